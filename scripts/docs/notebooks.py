"""Execute the notebooks and keep the pictures that the documentation shows.

    python scripts/docs/notebooks.py                      # run all of them; the first error ends it
    python scripts/docs/notebooks.py --figures docs/figures   # and write their pictures

The notebooks in the repository hold no outputs, and are not changed. A cell with the metadata `{"figure": "name"}`
draws the picture `name.png`.
"""

import argparse
import base64
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
_CELL_SECONDS = 300


def execute(path: Path) -> nbformat.NotebookNode:
    """Run a notebook in its own folder and return it with its outputs.

    Raises:
        CellExecutionError: With the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=_CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    return client.execute()


def figures(notebook: nbformat.NotebookNode) -> dict[str, bytes]:
    """Return the pictures of an executed notebook by name.

    Raises:
        LookupError: If a cell that is to draw one shows none.
    """
    found = {}
    for cell in notebook.cells:
        name = cell.metadata.get("figure")
        if name is None:
            continue
        pictures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        if not pictures:
            raise LookupError(f"The cell of the figure {name!r} shows no picture.")
        found[f"{name}.png"] = base64.b64decode(pictures[0])
    return found


def main() -> None:
    """Run all notebooks, and write pictures where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--figures", type=Path, help="folder for the pictures")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    arguments = parser.parse_args()
    for path in arguments.notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        started = time.perf_counter()
        pictures = figures(execute(path))
        if arguments.figures is not None:
            for name, content in pictures.items():
                (arguments.figures / name).write_bytes(content)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {len(pictures)} pictures")


if __name__ == "__main__":
    main()

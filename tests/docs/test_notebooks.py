"""The notebooks as they are committed, and the script that runs them (`make notebooks` runs them all)."""

import ast
import base64
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError


NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_there_are_five():
    assert [path.stem.partition("_")[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_no_outputs(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "clear the outputs before committing"
            assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_valid_and_say_what_they_need(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert "**Needs**" in notebook.cells[0].source
    for cell in notebook.cells:
        if cell.cell_type == "code":
            ast.parse(cell.source)


def test_figures_of_notebooks_are_those_of_the_pages(root):
    drawn = {
        cell.metadata["figure"]
        for path in NOTEBOOKS
        for cell in nbformat.read(path, as_version=4).cells
        if "figure" in cell.metadata
    }
    concepts = (root / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert drawn == set(re.findall(r"figures/([a-z-]+)\.png", concepts))


@pytest.fixture
def write_notebook(tmp_path):
    """A function writing a notebook of one code cell."""

    def write(source, **metadata):
        cell = nbformat.v4.new_code_cell(source, metadata=metadata)
        path = tmp_path / "notebook.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
        return path

    return write


def _picture(name):
    source = f"from IPython.display import display, Image\nimport base64\ndisplay(Image(base64.b64decode('{PIXEL}')))"
    return source, {"figure": name}


def test_pictures_of_an_executed_notebook(write_notebook, load_script):
    notebooks = load_script("notebooks")
    source, metadata = _picture("pixel")
    path = write_notebook(source, **metadata)
    before = path.read_bytes()
    assert notebooks.figures(notebooks.execute(path)) == {"pixel.png": base64.b64decode(PIXEL)}
    assert path.read_bytes() == before


def test_a_cell_without_its_picture_is_an_error(write_notebook, load_script):
    notebooks = load_script("notebooks")
    with pytest.raises(LookupError, match="'nothing' shows no picture"):
        notebooks.figures(notebooks.execute(write_notebook("print(1)", figure="nothing")))


def test_a_failing_cell_is_an_error(write_notebook, load_script):
    with pytest.raises(CellExecutionError, match="seven is not eight"):
        load_script("notebooks").execute(write_notebook("raise ValueError('seven is not eight')"))

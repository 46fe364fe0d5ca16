"""Write what the documentation shows of results, estimates and commands: `python scripts/docs/generate.py`.

Pages keep generated parts between two comments, ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything else is
written by hand. Charts go to `docs/figures`. The pictures of `docs/concepts.md` come from a notebook
(`scripts/docs/notebooks.py`).
"""

import re
from collections.abc import Callable
from pathlib import Path

import held_out
import memory
import performance
from transcripts import transcript


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))

BLOCKS: dict[str, Callable[[], str]] = {
    "whole transformer": performance.whole_transformer,
    "parts of a call": performance.parts_of_a_call,
    "window": performance.window,
    "operators": performance.operators,
    "dense attention": performance.dense_attention,
    "whole models": performance.whole_models,
    "what fits": memory.what_fits,
    "under a cap": memory.under_a_cap,
    "demo": lambda: held_out.figures("figures"),
    "demo for README": lambda: held_out.figures("docs/figures"),
    "help": lambda: transcript(["--help"]),
    "generate help": lambda: transcript(["generate", "--help"]),
    "overlays list": lambda: transcript(["overlays", "list"]),
    "plan that fits": lambda: transcript(["plan", "--frames", "345", "--precision", "fp8", "--card", "H200"]),
    "plan that does not": lambda: transcript(["plan", "--card", "RTX 4090"]),
    "wrong size": lambda: transcript(["plan", "--height", "1000", "--width", "1344"], "stderr"),
    "wrong option": lambda: transcript(["generate", "A red fox.", "--lenght", "5"], "stderr"),
    "doctor": lambda: transcript(["doctor"]),
}
# What a test cannot compare: the answer depends on the machine, or its layout on the release of typer.
VARYING = {"doctor", "help", "generate help", "wrong option"}

CHARTS: dict[str, Callable[[], str]] = {
    "transformer.svg": performance.whole_transformer_chart,
    "window.svg": performance.window_chart,
    "attention.svg": performance.dense_attention_chart,
}

_PART = re.compile(r"(<!-- generated: (?P<name>[^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, blocks: dict[str, Callable[[], str]]) -> str:
    """Return a page with its generated parts made anew; parts that `blocks` does not name stay.

    Raises:
        KeyError: If a part has a name that nothing generates.
    """

    def replace(match: re.Match) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise KeyError(f"nothing generates {name!r}; known are {', '.join(BLOCKS)}")
        return match[0] if name not in blocks else f"{match[1]}\n{blocks[name]()}\n\n{match[3]}"

    return _PART.sub(replace, text)


def main() -> None:
    """Bring every page and chart up to date."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(fill(text, BLOCKS), encoding="utf-8")
    for name, draw in CHARTS.items():
        (DOCS / "figures" / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()

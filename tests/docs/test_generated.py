"""What is generated into the pages is what the generators make of the results, the planner and the commands now."""

import re

import pytest


MADE_BY = "run `python scripts/docs/generate.py`"
PAGES = [
    "README.md",
    "docs/performance.md",
    "docs/memory.md",
    "docs/training.md",
    pytest.param("docs/cli.md", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("page", PAGES)
def test_pages_are_up_to_date(page, root, load_script):
    generate = load_script("generate")
    blocks = {name: make for name, make in generate.BLOCKS.items() if name not in generate.VARYING}
    text = (root / page).read_text(encoding="utf-8")
    assert generate.fill(text, blocks) == text, MADE_BY


def test_every_block_is_on_one_of_these_pages(root, load_script):
    found = {}
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        for name in re.findall(r"<!-- generated: ([^>]+) -->", page.read_text(encoding="utf-8")):
            found[name] = page.name
    assert set(found) == set(load_script("generate").BLOCKS)
    assert set(found.values()) == {"README.md", "performance.md", "memory.md", "training.md", "cli.md"}


def test_charts_are_up_to_date(root, load_script):
    charts = load_script("generate").CHARTS
    assert set(charts) == {path.name for path in (root / "docs" / "figures").glob("*.svg")}
    for name, draw in charts.items():
        assert (root / "docs" / "figures" / name).read_text(encoding="utf-8") == draw(), MADE_BY


def test_a_part_is_replaced_and_the_rest_stays(load_script):
    generate = load_script("generate")
    text = "before\n<!-- generated: window -->\nold\n<!-- end -->\nafter\n"
    expected = "before\n<!-- generated: window -->\n\nnew\n\n<!-- end -->\nafter\n"
    assert generate.fill(text, {"window": lambda: "new"}) == expected
    assert generate.fill(text, {}) == text


def test_an_unknown_part_is_an_error(load_script):
    with pytest.raises(KeyError, match="nothing generates 'windows'"):
        load_script("generate").fill("<!-- generated: windows -->\n<!-- end -->", {})


def test_bars_are_to_scale_and_escaped(load_script):
    chart = load_script("charts").bar_chart("A & B", "ms", [("<a>", 10.0), ("b", 20.0)], accent="b")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.1)
    assert "A &amp; B (ms)" in chart
    assert "&lt;a&gt;" in chart
    assert re.findall(r'fill="(#[0-9a-f]+)"/>', chart) == ["#8fa3bf", "#3f6fd8"]


@pytest.mark.parametrize("bars", [[], [("a", 1.0), ("b", 0.0)]])
def test_a_chart_of_nothing_is_an_error(bars, load_script):
    with pytest.raises(ValueError, match="positive values"):
        load_script("charts").bar_chart("title", "ms", bars)


def test_a_transcript_has_the_command_and_its_exit_code(load_script):
    text = load_script("transcripts").transcript(["plan", "--frames", "many words"], "stderr")
    lines = text.splitlines()
    assert lines[:2] == ["```console", '$ diffusers-h3 plan --frames "many words"']
    assert lines[2].startswith("error: Invalid value for '--frames'")
    assert lines[-2:] == ["[exit code 2]", "```"]


def test_the_transcript_of_doctor_names_no_path_of_a_machine(root):
    text = (root / "docs" / "cli.md").read_text(encoding="utf-8")
    block = re.search(r"\$ diffusers-h3 doctor\n(.*?)```", text, re.DOTALL)[1]
    assert "torch" in block
    assert not re.findall(r"(?<![\w~.])/(?:home|root|tmp|work|usr|var)\b", block)

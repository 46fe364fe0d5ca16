import subprocess
import sys

import pytest

from diffusers_h3.demo import grammar


def test_sentences():
    assert grammar.describe("red", "circle", "right") == "a red circle moves left to right"
    assert grammar.describe("blue", "square", "orbit", "light") == (
        "a blue square orbits around the centre on a light background"
    )
    sentences = grammar.all_prompts()
    assert len(set(sentences)) == len(sentences) == 6 * 3 * 6 * 4


@pytest.mark.parametrize(
    ("prompt", "nearest"),
    [
        ("A red circle moves left to right.", "a red circle moves left to right"),
        ("blue triangle bouncing", "a blue triangle bounces on the floor"),
    ],
)
def test_the_nearest_sentence_comes_first(prompt, nearest):
    found = grammar.nearest_prompts(prompt)
    assert found[0] == nearest
    assert len(set(found)) == 3
    assert set(found) < set(grammar.all_prompts())


@pytest.mark.parametrize("prompt", ["x", "狐が走る", "fox " * 400])
def test_anything_has_nearest_sentences(prompt):
    assert len(grammar.nearest_prompts(prompt)) == 3


def test_help_needs_no_torch():
    code = "import sys, diffusers_h3.cli, diffusers_h3.demo.grammar; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

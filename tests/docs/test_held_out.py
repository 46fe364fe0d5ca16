"""The block of held-out figures, with and without a result."""

import json

import pytest


FIGURES = {"colour": 1.0, "shape": 0.944, "motion": 0.5, "pitch": 0.98, "pan": 0.926, "all": 0.481, "clips": 54}


@pytest.fixture
def held_out(load_script):
    return load_script("held_out")


@pytest.fixture
def results(tmp_path):
    """Two results, of which the later counts."""
    for date, shape in (("2026-01-01", 0.1), ("2026-02-01", 0.944)):
        report = {model: {**FIGURES, "shape": shape} for model in ("dense", "hybrid", "turbo")}
        report["turbo"]["colour"] = 0.907
        (tmp_path / f"{date}-h200-demo.json").write_text(json.dumps(report))
    (tmp_path / "2026-03-01-h200-dit.json").write_text("{}")
    return tmp_path


def test_the_newest_result_becomes_a_table(held_out, results, tmp_path):
    assert held_out.figures("figures", results, tmp_path / "none.png").splitlines() == [
        "| model | colour | shape | motion | pitch | pan | all |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| dense, 50 calls | 100 % | 94 % | 50 % | 98 % | 93 % | 48 % |",
        "| hybrid, 50 calls | 100 % | 94 % | 50 % | 98 % | 93 % | 48 % |",
        "| hybrid, 8 calls (the demo) | 91 % | 94 % | 50 % | 98 % | 93 % | 48 % |",
        "",
        "54 clips a model, recognised by geometry: `benchmarks/results/2026-02-01-h200-demo.json`.",
    ]


def test_the_picture_is_shown_where_there_is_one(held_out, results, tmp_path):
    picture = tmp_path / "demo.png"
    picture.write_bytes(b"")
    assert held_out.figures("docs/figures", results, picture).endswith("](docs/figures/demo.png)")


def test_without_a_result_the_block_says_so(held_out, tmp_path):
    assert held_out.figures("figures", tmp_path) == "No trained model has been evaluated yet."


def test_models_compared_on_different_clips_are_an_error(held_out, results):
    path = results / "2026-02-01-h200-demo.json"
    report = json.loads(path.read_text())
    report["dense"]["clips"] = 18
    path.write_text(json.dumps(report))
    with pytest.raises(ValueError, match=r"different numbers of clips: \[18, 54\]"):
        held_out.figures("figures", results)

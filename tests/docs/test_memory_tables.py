"""The tables of runs under a cap, from a result of the benchmark's own form."""

import json

import pytest


RESULT = {
    "environment": {"date": "2026-12-03", "device": "NVIDIA H200", "torch": "2.11.0"},
    "settings": {"layers": 50, "caps": [16.0, 80.0, 24.0]},
    "runs": [
        {
            "run": "hybrid:fp8",
            "offload": "block",
            "use_stream": True,
            "compiled_parts": "blocks",
            "frames": 345,
            "memory_cap_gb": 24.0,
            "s_per_call": 10.256,
            "peak_gb": 19.34,
            "reserved_gb": 20.06,
            "outside_gb": 0.61,
            "pinned_gb": 63.9,
        },
        {
            "run": "hybrid:bf16",
            "offload": "none",
            "use_stream": False,
            "compiled_parts": "blocks",
            "frames": 124,
            "failed": "does not fit: its peak is 86.5 GB or more, the largest cap 80",
        },
        {
            "run": "hybrid:fp8",
            "offload": "leaf",
            "use_stream": False,
            "compiled_parts": "layers",
            "frames": 345,
            "pinned_gb": 0.0,
            "failed": "Traceback …\nRuntimeError: no",
        },
    ],
    "decoding": [
        {
            "tiling": True,
            "frames": 345,
            "memory_cap_gb": 24.0,
            "s_per_call": 14.0,
            "peak_gb": 18.0,
            "reserved_gb": 19.0,
            "outside_gb": 0.7,
        },
        {"tiling": False, "frames": 124, "failed": "not run: about 25 s more after 420 s exceed `--minutes`"},
    ],
}


@pytest.fixture
def under_a_cap(load_script, monkeypatch, tmp_path):
    """A function making the tables of the results in a folder, where it first writes the reports given."""

    def make(*reports):
        monkeypatch.setattr(load_script("performance"), "RESULTS", tmp_path)
        for number, report in enumerate(reports, 1):
            (tmp_path / f"2026-12-03-h200-memory-{number}.json").write_text(json.dumps(report), encoding="utf-8")
        return load_script("memory").under_a_cap()

    return make


def test_every_row_is_shown_shortest_clip_first(under_a_cap):
    lines = under_a_cap(RESULT).splitlines()
    assert lines[:2] == [
        "`benchmarks/results/2026-12-03-h200-memory-1.json`: NVIDIA H200, torch 2.11.0, 2026-12-03.",
        "Caps of 16, 24 and 80 GB; what the process holds outside of them was 0.7 GB.",
    ]
    assert [line for line in lines if line.startswith(("| fp8", "| bf16"))] == [
        "| bf16, no offload, blocks compiled | 124 | does not fit | – | – | – | – |",
        "| fp8, offload by block with streams, blocks compiled | 345 | 24 | 10.26 | 19.3 | 20.1 | 63.9 |",
        "| fp8, offload by leaf, linear layers compiled | 345 | failed | – | – | – | 0.0 |",
    ]
    assert lines[-2:] == [
        "| whole frames | 124 | not run | – | – | – |",
        "| in tiles | 345 | 24 | 14.00 | 18.0 | 19.0 |",
    ]


def test_without_a_result_it_says_so(under_a_cap):
    assert under_a_cap() == "No such run is among the results yet."
    assert under_a_cap({"runs": [], "environment": RESULT["environment"]}) == "No such run is among the results yet."


def test_a_result_in_which_nothing_ran_is_shown_all_the_same(under_a_cap):
    failed = {**RESULT, "runs": RESULT["runs"][1:2], "decoding": []}
    assert "| bf16, no offload, blocks compiled | 124 | does not fit | – |" in under_a_cap(failed)


def test_later_results_fill_and_replace_rows(under_a_cap):
    """A setting that ran once is not unsaid by a run that had no time for it, and of two runs the later counts."""
    whole = {"tiling": False, "frames": 124, "memory_cap_gb": 16.0, "s_per_call": 8.22, "peak_gb": 9.5}
    no_time = {**RESULT["runs"][0], "failed": "not run: about 20 s more after 420 s exceed `--minutes`"}
    leaf = {**RESULT["runs"][2], "memory_cap_gb": 24.0, "s_per_call": 50.0}
    del leaf["failed"]
    later = {**RESULT, "settings": {"caps": [32.0]}, "runs": [no_time, leaf], "decoding": [whole]}
    text = under_a_cap(RESULT, later)
    assert "Caps of 16, 24, 32 and 80 GB" in text
    assert all(f"memory-{number}.json" in text for number in (1, 2))
    assert "| fp8, offload by block with streams, blocks compiled | 345 | 24 | 10.26 |" in text
    assert text.count("| fp8, offload by leaf, linear layers compiled | 345 |") == 1
    assert "| fp8, offload by leaf, linear layers compiled | 345 | 24 | 50.00 |" in text
    assert text.count("| whole frames | 124 |") == 1
    assert "| whole frames | 124 | 16 | 8.22 |" in text


def test_rows_of_another_card_are_not_mixed_in(under_a_cap):
    small = {**RESULT, "environment": {**RESULT["environment"], "device": "NVIDIA RTX A6000"}}
    text = under_a_cap({**RESULT, "runs": RESULT["runs"][:1]}, {**small, "runs": RESULT["runs"][1:2]})
    assert "memory-1.json" not in text
    assert "offload by block" not in text

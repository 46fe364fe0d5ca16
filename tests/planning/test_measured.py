"""The committed table is what its script makes of the committed results, and every entry is what it says."""

import importlib
import json
import pathlib

import pytest

from diffusers_h3.planning.cards import find_card
from diffusers_h3.planning.estimate import MEASURED, Settings, estimate
from diffusers_h3.planning.measured import measurements
from diffusers_h3.planning.workload import block_bytes, moved_bytes, resident_bytes


BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def measured_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("measured_table")


def test_the_committed_table_is_what_the_script_makes(measured_table):
    assert measured_table.TABLE.read_text() == measured_table.table(), "run benchmarks/measured_table.py"


def test_every_entry_has_the_rows_of_its_request_and_a_known_card():
    for entry in measurements():
        assert entry.clip.rows == entry.rows
        assert find_card(entry.card).rates is not None
        assert entry.peak_gb > entry.weights_gb > 0
        assert entry.model in ("hybrid", "dense")


def test_both_precisions_were_measured():
    assert {entry.precision for entry in measurements() if entry.model == "hybrid"} == {"bf16", "fp8"}


def test_the_published_runs_come_back_as_they_were_measured():
    """The figures of benchmarks/RESULTS.md on 2026-12-02; later runs of the same request may replace them."""
    found = [
        entry
        for entry in measurements()
        if (entry.model, entry.precision, entry.frames, entry.date) == ("hybrid", "fp8", 345, "2026-12-02")
        and entry.attention_precision == "bf16"
        and (entry.offload, entry.memory_cap_gb) == ("none", None)
    ]
    assert [
        [round(value, 2) for value in (entry.seconds_per_call, entry.peak_gb, entry.weights_gb)] for entry in found
    ] == [[9.99, 65.15, 49.41], [9.98, 65.15, 49.41], [9.86, 65.15, 49.41]]
    for entry in found:
        assert estimate(Settings(entry.clip, "fp8"), find_card("H200")).basis == MEASURED


RUN = {
    "run": "hybrid:fp8:fp8",
    "frames": 345,
    "height": 768,
    "width": 1344,
    "text_rows": 200,
    "compiled": True,
    "weights_gb": 49.4,
    "rows": 104_166,
    "s_per_call": 8.0,
    "finite": True,
    "peak_gb": 60.0,
}


def make_table(measured_table, folder, *runs, layers=50, settings=(), **versions):
    environment = {"date": "2026-12-03", "device": "NVIDIA H200", "torch": "2.11.0", **versions}
    content = {"environment": environment, "settings": {"layers": layers, **dict(settings)}, "runs": list(runs)}
    (folder / "run.json").write_text(json.dumps(content))
    (folder / "other.json").write_text(json.dumps({"sections": {}}))
    return json.loads(measured_table.table(folder))


def test_a_run_becomes_an_entry(measured_table, tmp_path):
    assert make_table(measured_table, tmp_path, RUN) == [
        {
            "card": "NVIDIA H200",
            "date": "2026-12-03",
            "versions": {"torch": "2.11.0"},
            "model": "hybrid",
            "height": 768,
            "width": 1344,
            "frames": 345,
            "text_rows": 200,
            "rows": 104_166,
            "precision": "fp8",
            "attention_precision": "fp8",
            "offload": "none",
            "compiled": True,
            "memory_cap_gb": None,
            "seconds_per_call": 8.0,
            "peak_gb": 60.0,
            "weights_gb": 49.4,
            "use_stream": False,
            "compiled_parts": None,
        }
    ]


def test_runs_that_several_gpus_shared_are_left_out(measured_table, tmp_path):
    """Their peak is one of several cards, and their time that of all."""
    assert make_table(measured_table, tmp_path, RUN, settings={"GPUs": 8}) == []


def test_what_a_run_says_of_itself_is_kept(measured_table, tmp_path):
    own = {"height": 480, "width": 832, "text_rows": 77, "compiled": False}
    own |= {"offload": "leaf", "use_stream": True, "memory_cap_gb": 24, "compiled_parts": "layers"}
    (entry,) = make_table(measured_table, tmp_path, RUN | own | {"run": "hybrid:bf16"}, torch="2.12")
    assert own.items() <= entry.items()
    assert (entry["precision"], entry["attention_precision"]) == ("bf16", "bf16")
    assert entry["versions"] == {"torch": "2.12"}


@pytest.mark.parametrize("change", [{"finite": False}, {"peak_gb": None}, {"s_per_call": None}])
def test_runs_that_say_nothing_about_the_full_model_are_left_out(measured_table, tmp_path, change):
    unusable = {name: value for name, value in (RUN | change).items() if value is not None}
    failed = {"run": "hybrid:bf16", "frames": 345, "failed": "out of memory"}
    assert make_table(measured_table, tmp_path, unusable, failed) == []
    assert make_table(measured_table, tmp_path, RUN, layers=5) == []


@pytest.mark.parametrize(("tuned", "expected"), [(True, ["eager"]), (False, ["eager", "compiled"])])
def test_tuned_kernels_are_left_out(measured_table, tmp_path, tuned, expected):
    """Tuning does nothing to what is not compiled, so those runs of its report are like any other."""
    eager = RUN | {"run": "hybrid:fp8:eager", "compiled": False, "s_per_call": 18.0}
    found = make_table(measured_table, tmp_path, eager, RUN, settings={"tuned": tuned})
    assert ["compiled" if entry["compiled"] else "eager" for entry in found] == expected
    assert [entry["seconds_per_call"] for entry in found] == [18.0, 8.0][: len(expected)]


def test_a_measured_offload_is_what_an_estimate_of_it_starts_from(measured_runs, run_of):
    """The fastest run of a clip, here with streams; without one it would be the run of all weights on the card."""
    offloaded = {"precision": "fp8", "offload": "block", "memory_cap_gb": 24.0}
    streams = run_of(345, 11.0, 20.0, weights=3.6, use_stream=True, **offloaded)
    measured_runs(
        run_of(345, 10.0, 65.0, weights=49.4, precision="fp8"),
        run_of(345, 35.0, 19.0, weights=2.7, **offloaded),
        streams,
    )
    found = estimate(Settings(streams.clip, "fp8", offload="block"), find_card("H200"))
    assert (found.seconds_per_call, found.is_lower_bound, found.basis) == (pytest.approx(11.0), False, MEASURED)
    assert (found.weights_gb, found.peak_gb) == (pytest.approx(3.6), pytest.approx(20.0))
    assert "group offload by block with streams" in found.reasons[0]


def test_weights_cannot_cross_faster_than_the_bus(measured_runs, run_of):
    """A short clip, of which the measured card hid the moving, on a card with a slower one."""
    run = run_of(124, 0.5, 9.0, weights=3.6, precision="fp8", offload="block", use_stream=True)
    measured_runs(run)
    card = find_card("RTX 4090")
    found = estimate(Settings(run.clip, "fp8", offload="block"), card)
    bus = moved_bytes("fp8", "block") / (card.rates.host * 1e9)
    assert found.seconds_per_call >= bus > 0.5


def test_streams_hold_a_second_group():
    assert resident_bytes("fp8", "block", use_stream=True) - resident_bytes("fp8", "block") == block_bytes("fp8")
    assert resident_bytes("fp8", "leaf", use_stream=True) == 2 * resident_bytes("fp8", "leaf")
    assert resident_bytes("bf16", "none", use_stream=True) == resident_bytes("bf16", "none")

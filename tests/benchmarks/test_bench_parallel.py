"""The benchmark of several GPUs: what it is asked, what a layer that differs does, and a toy run on two ranks."""

import importlib
import json
import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).resolve().parents[2]
TOY = ["--tiny", "--layers", "2", "--text-rows", "21", "--frames", "39", "--eager", "--repeats", "1"]
FIGURES = {"frames": 39, "communication_ms": [2.0, 3.0]}
RUNS = ["hybrid:bf16", "dense:bf16", "wan:bf16"]


@pytest.fixture
def bench(monkeypatch):
    """The script as a module; it imports its neighbours by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_parallel")


@pytest.fixture
def alone(monkeypatch):
    """The environment of one process that `torchrun` started."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--layers", "0"], ["--runs", "wan"], ["--frames", "100"]])
def test_bad_arguments_end_before_anything_is_built(arguments, check_refused):
    check_refused(arguments)


def test_it_says_how_to_start_it(bench, monkeypatch, capsys):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        bench.main([])
    assert "torchrun --nproc-per-node" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "ranks", "possible"),
    [
        ("wan:bf16", 4, True),
        ("wan:bf16", 8, False),
        ("dense:bf16", 8, True),
        ("dense:bf16", 16, False),
        ("hybrid:fp8", 16, True),
        ("hybrid:fp8", 57, False),
    ],
)
def test_more_ranks_than_can_share_the_heads_are_refused(run, ranks, possible, bench, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    if possible:
        bench.parse_arguments(["--runs", run])
        return
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--runs", run])
    assert f"heads cannot be shared by {ranks} ranks" in capsys.readouterr().err


@pytest.mark.parametrize(("float32", "shared", "code"), [(1e-5, 1.2e-2, 0), (3e-5, 1e-2, 1), (1e-5, 1.3e-2, 1)])
def test_a_layer_that_differs_is_an_error(float32, shared, code, bench, alone, monkeypatch, tmp_path):
    errors = iter([float32, 1e-2, shared] * 2)
    monkeypatch.setattr(bench, "relative_error", lambda actual, expected: next(errors))
    monkeypatch.setattr(bench, "measure", lambda arguments, run, frames, device: dict(FIGURES, run=run.name))
    assert bench.main([*TOY, "--runs", *RUNS[:2], "--output", str(tmp_path)]) == code
    assert ("NO" in (tmp_path / "parallel.md").read_text()) == bool(code)


@pytest.mark.slow
def test_a_toy_run_on_two_ranks(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(ROOT / "tests/parallel/cpu_ranks.py"), str(ROOT / "benchmarks/bench_parallel.py")]
    finished = subprocess.run(
        [*launcher, *script, *TOY, "--runs", *RUNS, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "benchmarks")},
    )
    assert finished.returncode == 0, finished.stderr
    report = json.loads((tmp_path / "parallel.json").read_text())
    assert report["settings"]["GPUs"] == 2
    for layer in report["layers"]:
        assert layer["float32_error"] <= 2e-5
        assert 1e-3 < layer["bfloat16_error_shared"] < 2e-2
    assert [row["run"] for row in report["runs"]] == RUNS
    assert all(row["finite"] and row["s_per_call"] > 0 for row in report["runs"])
    assert ["s_per_call_without_overlap" in row for row in report["runs"]] == [True, False, False]
    table = (tmp_path / "parallel.md").read_text()
    assert all(f"| {run} |" in table for run in RUNS)

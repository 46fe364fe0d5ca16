"""The benchmark scripts run: the card's check against the stand-in, the others at toy sizes."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest


BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def run_script(name, *arguments):
    command = [sys.executable, str(BENCHMARKS / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.slow
def test_gpu_check_passes_with_the_stand_in(tmp_path):
    path = tmp_path / "check.json"
    code, output = run_script("gpu_check_flashinfer.py", "--stand-in", "--output", path)
    assert code == 0, output
    sections = json.loads(path.read_text())["sections"]
    assert list(sections) == [
        "build",
        "values",
        "cudnn_values",
        "fp8_values",
        "tiny_models",
        "threads_and_streams",
        "public_backend",
        "default_kernel",
        "attention_speed",
        "wan_speed",
        "h3_speed",
        "full_size_blocks",
    ]
    assert all(section["passed"] for section in sections.values())


def test_bench_attention_writes_its_report(tmp_path):
    code, output = run_script(
        "bench_attention.py", "--small", "--repeats", 3, "--batches", 1, 2, "--output", tmp_path / "attention"
    )
    assert code == 0, output
    report = json.loads((tmp_path / "attention.json").read_text())
    assert [(row["shape"], row["batch"]) for row in report["rows"]] == [
        ("small self", 1),
        ("small self", 2),
        ("small text", 1),
        ("small text", 2),
    ]
    for row in report["rows"]:
        for result in row["results"].values():
            assert len(result["all_s"]) == 3
            assert sorted(result["all_s"])[1] == result["median_s"]
    assert "| small text | 2 |" in (tmp_path / "attention.md").read_text()


@pytest.fixture
def bench_pipeline(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench_pipeline")


@pytest.mark.slow
def test_bench_pipeline_measures_a_generation_in_a_fresh_process(tmp_path):
    code, output = run_script(
        *("bench_pipeline.py", "--model", "tiny-wan", "--backends", "native-math", "--repeats", 1, "--steps", 2),
        *("--output", tmp_path / "pipeline"),
    )
    assert code == 0, output
    (run,) = json.loads((tmp_path / "pipeline.json").read_text())["runs"]
    assert run["backend"] == "native-math"
    assert run["seconds"] > 0
    assert 0 < run["attention_share"] < 1
    assert "| native-math |" in (tmp_path / "pipeline.md").read_text()


def test_bench_pipeline_reverses_the_order_between_repeats(bench_pipeline, monkeypatch, tmp_path):
    seconds = {"default": [2.0, 4.0], "native-math": [1.0, 2.0]}

    def run(backend):
        return {"backend": backend, "seconds": seconds[backend].pop(), "attention_share": 0.5, "peak_gib": None}

    monkeypatch.setattr(bench_pipeline, "run_in_subprocess", run)
    arguments = ["--model", "m", "--backends", "default", "native-math", "--output", str(tmp_path / "pipeline")]
    monkeypatch.setattr(sys, "argv", ["bench_pipeline.py", *arguments])
    bench_pipeline.main()
    runs = json.loads((tmp_path / "pipeline.json").read_text())["runs"]
    assert [run["backend"] for run in runs] == ["default", "native-math", "native-math", "default"]
    table = (tmp_path / "pipeline.md").read_text()
    assert "| default | 3.00 | 1.00× | 50% | – |" in table
    assert "| native-math | 1.50 | 2.00× | 50% | – |" in table


def test_bench_pipeline_reports_a_backend_that_failed(bench_pipeline, monkeypatch, tmp_path):
    monkeypatch.setattr(
        bench_pipeline, "run_in_subprocess", lambda backend: {"backend": backend, "error": ["no card"]}
    )
    arguments = ["--model", "m", "--backends", "flashinfer", "--repeats", "1", "--output", str(tmp_path / "pipeline")]
    monkeypatch.setattr(sys, "argv", ["bench_pipeline.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        bench_pipeline.main()
    assert stop.value.code == 1
    assert "| flashinfer | failed |" in (tmp_path / "pipeline.md").read_text()

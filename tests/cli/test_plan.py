"""`diffusers-h3 plan`, on pretended machines, with every connection refused."""

import json
import socket
from types import SimpleNamespace

import pytest
import torch


GB = 10**9


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_arguments, **_options):
        pytest.fail("a plan opens no connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def gpu(monkeypatch):
    """A function pretending one GPU; without it there is none."""

    def pretend(name, capability, total):
        device = SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=total)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return pretend


def test_help_teaches_on_stdout(run):
    finished = run("plan", "--help")
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.count("diffusers-h3 plan") >= 4
    assert "--num-frames" in finished.out


def test_the_measured_request(run):
    finished = run("plan", "--frames", 345, "--precision", "fp8", "--card", "H200", "--json")
    assert (finished.code, finished.err) == (0, "")
    plan = finished.json
    assert plan["rows"] == {"total": 104_166, "text": 200, "audio": 1150, "video": 102_816}
    assert plan["settings"] == {
        "height": 768,
        "width": 1344,
        "frames": 345,
        "precision": "fp8",
        "attention_precision": "bf16",
        "offload": "none",
        "compiled": True,
    }
    estimate = plan["estimate"]
    assert (estimate["basis"], estimate["fits"], estimate["calls"]) == ("measured", True, 8)
    # The first run took 9.82 s and 64.0 GB; later ones of the same request may be better, not far worse.
    assert 5 < estimate["seconds_per_call"] < 10
    assert estimate["seconds_per_video"] == pytest.approx(8 * estimate["seconds_per_call"])
    assert 49 < estimate["weights_gb"] < 50
    assert 60 < estimate["peak_gb"] < 66
    assert plan["alternatives"] == []


def test_eager_blocks_need_more_than_compiled_ones(run):
    """What `generate` runs: the figures under a cap were 32.9 GB eager and 19.4 GB compiled."""
    words = ["plan", "--frames", 345, "--precision", "fp8", "--card", "H200", "--json"]
    compiled, eager = (run(*words, *flag).json for flag in ([], ["--eager"]))
    assert (compiled["settings"]["compiled"], eager["settings"]["compiled"]) == (True, False)
    assert eager["estimate"]["activations_gb"] > 1.5 * compiled["estimate"]["activations_gb"]
    assert eager["estimate"]["seconds_per_call"] > compiled["estimate"]["seconds_per_call"]


def test_the_schema(run):
    plan = run("plan", "--frames", 345, "--card", "RTX 4090", "--json").json
    assert list(plan) == ["overlay", "card", "settings", "rows", "estimate", "not_counted", "alternatives"]
    assert list(plan["card"]) == ["name", "memory", "capability", "rates", "source", "devices"]
    estimate_fields = {
        "weights_gb": float,
        "activations_gb": float,
        "available_gb": float,
        "seconds_per_call": float,
        "is_lower_bound": bool,
        "basis": str,
        "reasons": list,
        "peak_gb": float,
        "fits": bool,
        "calls": int,
        "seconds_per_video": float,
    }
    assert plan["alternatives"], "the weights alone exceed 24 GB"
    for entry in (plan, *plan["alternatives"]):
        assert {name: type(value) for name, value in entry["estimate"].items()} == estimate_fields
        assert list(entry["settings"]) == [
            "height",
            "width",
            "frames",
            "precision",
            "attention_precision",
            "offload",
            "compiled",
        ]
        assert entry["estimate"]["basis"] == "extrapolated"
    for alternative in plan["alternatives"]:
        assert alternative["changes"]
        assert alternative["estimate"]["fits"] is True
        assert alternative["estimate"]["peak_gb"] <= 23


def test_what_does_not_fit_is_said_with_what_would(run):
    finished = run("plan", "--frames", 345, "--card", "RTX 4090")
    assert finished.code == 0
    text = " ".join(finished.out.split())
    assert "does not fit" in text
    assert "What would fit, the smallest change first" in text
    assert "group offload by block" in text
    assert "extrapolated" in text
    assert "scaled to RTX 4090 by published peaks (NVIDIA Ada architecture paper)" in text
    assert all(len(line) <= 80 for line in finished.out.splitlines())


def test_what_fits_has_no_alternatives(run):
    finished = run("plan", "--card", "B200")
    assert finished.code == 0
    assert ", fits: weights" in finished.out
    assert "What would fit" not in finished.out


def test_nothing_fits(run):
    finished = run("plan", "--gpu-memory", "1.2")
    assert finished.code == 0
    assert "Nothing fits" in finished.out


def test_memory_alone_gives_no_time(run):
    plan = run("plan", "--gpu-memory", 90, "--json").json
    assert (plan["card"]["memory"], plan["card"]["rates"]) == (90, None)
    assert plan["estimate"]["available_gb"] == 89
    assert plan["estimate"]["seconds_per_call"] is None
    assert plan["estimate"]["seconds_per_video"] is None
    assert "unknown: name a --card" in run("plan", "--gpu-memory", 90).out


def test_memory_of_a_named_card(run):
    plan = run("plan", "--card", "H200", "--gpu-memory", 80, "--json").json
    assert (plan["card"]["name"], plan["card"]["memory"]) == ("H200", 80)
    assert plan["estimate"]["seconds_per_call"] > 0
    assert plan["estimate"]["available_gb"] == 79


def test_text_counts(run):
    rows = [run("plan", "--text-tokens", count, "--card", "H200", "--json").json["rows"] for count in (1, 1001)]
    assert [entry["text"] for entry in rows] == [1, 1001]
    assert rows[1]["total"] - rows[0]["total"] == 1000


def test_without_a_gpu_it_plans_for_the_measured_card(run, gpu):
    finished = run("plan", "--json")
    assert finished.json["card"]["name"] == "H200"
    assert "No CUDA GPU here" in finished.err


@pytest.mark.parametrize(
    ("name", "capability", "total", "expected", "fits"),
    [
        ("NVIDIA H200", (9, 0), 150 * GB, "H200", True),
        ("NVIDIA B200", (10, 0), 191 * GB, "B200", True),
        ("NVIDIA GeForce RTX 4090", (8, 9), 25 * GB, "RTX 4090", False),
        ("NVIDIA GB10", (12, 1), 128 * GB, "NVIDIA GB10", True),
    ],
)
def test_this_machines_gpu(run, gpu, name, capability, total, expected, fits):
    gpu(name, capability, total)
    finished = run("plan", "--json")
    assert finished.err == ""
    plan = finished.json
    assert (plan["card"]["name"], plan["card"]["memory"]) == (expected, total / GB)
    assert plan["estimate"]["available_gb"] == total / GB - 1
    assert plan["estimate"]["fits"] is fits
    assert (plan["estimate"]["seconds_per_call"] is None) == (expected == "NVIDIA GB10")


def test_a_turing_card_is_refused(run, gpu):
    gpu("Tesla T4", (7, 5), 15 * GB)
    finished = run("plan")
    assert finished.code == 2
    assert "compute capability 8.0 or newer, and Tesla T4 has 7.5" in finished.err


WRONG = {
    "height alone": ("--height 64", ["--height", "--width", "together"]),
    "height between": ("--height 848 --width 1000", ["--height", "848", "832", "864"]),
    "too short": ("--frames 81", ["--frames", "81", "124"]),
    "too long": ("--num-frames 360", ["--frames", "360", "345"]),
    "no text": ("--text-tokens 0", ["--text-tokens"]),
    "unknown precision": ("--precision int4", ["--precision", "bf16", "fp8"]),
    "unknown card": ("--card Voodoo2", ["--card", "Voodoo2", "RTX 4090", "memory"]),
    "two cards": ("--card H100", ["--card", "H100 SXM", "H100 PCIe"]),
    "no memory": ("--gpu-memory 0", ["--gpu-memory", "positive"]),
    "memory without end": ("--gpu-memory inf", ["--gpu-memory", "inf"]),
    "not a number": ("--gpu-memory nan", ["--gpu-memory", "nan"]),
    "fp8 before Ada": ("--precision fp8 --card A100-SXM4-80GB", ["--card"]),
    "fp8 on Ampere": ("--precision fp8 --card RTX3090", ["8.9", "RTX 3090", "bf16"]),
    "fp8 attention on Blackwell": ("--attention-fp8 --card B200", ["fp8 attention", "9.0", "B200 has 10.0"]),
}


@pytest.mark.parametrize(("line", "named"), WRONG.values(), ids=WRONG)
def test_wrong_usage_is_two_lines_and_code_2(run, line, named):
    finished = run("plan", *line.split())
    assert (finished.code, finished.out) == (2, "")
    assert len(finished.error_lines) == 2, finished.err
    message, hint = finished.error_lines
    assert message.startswith("error: ")
    assert hint == "Try 'diffusers-h3 plan --help'."
    for text in named:
        assert text in message


def test_a_length_between_is_rounded_up_as_generate_does(run):
    finished = run("plan", "--frames", 125, "--card", "H200", "--json")
    assert finished.json["settings"]["frames"] == 141
    assert "rounding 125 up to 141" in finished.err


def test_json_is_the_only_thing_on_stdout(run, gpu):
    finished = run("plan", "--json")
    assert json.loads(finished.out)["overlay"] == "vdn-h3-8step"

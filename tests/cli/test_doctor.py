"""`diffusers-h3 doctor` on pretended machines, whole and broken, with every connection refused."""

import importlib.util
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diffusers_h3 import machine_report


GB = 10**9
OPTIONAL_MODULES = (
    *("triton", "flashinfer", "flashinfer_jit_cache", "cudnn", "flash_attn", "flash_attn_interface", "torchao"),
)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_arguments, **_options):
        pytest.fail("the doctor opens no connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function pretending a machine: its GPU, optional packages, programs, free disk and what nvidia-smi answers."""

    def pretend(gpu=None, modules=OPTIONAL_MODULES, programs=("nvcc", "ninja", "nvidia-smi"), disk=500 * GB, smi=None):
        find_spec, which = importlib.util.find_spec, shutil.which

        def find(name, package=None):
            if name in OPTIONAL_MODULES:
                return SimpleNamespace(name=name) if name in modules else None
            return find_spec(name, package)

        def locate(name, *arguments, **options):
            if Path(name).name in ("nvcc", "ninja", "nvidia-smi"):
                return f"/bin/{Path(name).name}" if Path(name).name in programs else None
            return which(name, *arguments, **options)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(shutil, "which", locate)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk))
        answer = smi or subprocess.CompletedProcess([], 0, "580.95.05\n", "")
        monkeypatch.setattr(machine_report.subprocess, "run", lambda *_arguments, **_options: answer)
        for name in ("FLASHINFER_NVCC", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("DIFFUSERS_H3_CACHE", str(tmp_path / "overlays"))
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if gpu is None else 1)
        if gpu is not None:
            name, capability, total, free = gpu
            device = SimpleNamespace(name=name, major=capability[0], minor=capability[1], total_memory=total)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, total))

    return pretend


H200 = ("NVIDIA H200", (9, 0), 150 * GB, 149 * GB)
B200 = ("NVIDIA B200", (10, 0), 191 * GB, 190 * GB)
ADA = ("NVIDIA GeForce RTX 4090", (8, 9), 25 * GB, 24 * GB)
TURING = ("Tesla T4", (7, 5), 16 * GB, 15 * GB)


def statuses(finished):
    return {check["name"]: check["status"] for check in finished.json["checks"]}


def checks(finished):
    return {check["name"]: check for check in finished.json["checks"]}


def kernels(finished):
    return [
        name.removeprefix("FlashInfer kernel ")
        for name, status in statuses(finished).items()
        if name.startswith("FlashInfer kernel ") and status == "ok"
    ]


def test_help_teaches_on_stdout(run):
    finished = run("doctor", "--help")
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.count("diffusers-h3 doctor") >= 3
    for field in ("can_generate", "window_backend", "importance", "command"):
        assert field in finished.out


def test_a_whole_h200(run, machine):
    machine(H200)
    finished = run("doctor", "--json")
    assert (finished.code, finished.err) == (0, "")
    assert finished.json["can_generate"] is True
    assert finished.json["window_backend"] == "flashinfer"
    assert kernels(finished) == ["fa2", "fa3", "fp8", "cudnn"]
    found = checks(finished)
    assert found["GPU"]["found"] == "0: NVIDIA H200, compute 9.0, 150.0 GB, 149.0 free"
    assert found["driver"]["found"] == "580.95.05"
    assert found["shortest clip"]["found"].startswith("124 frames of 1344×768 in bf16 take ")
    assert found["shortest clip"]["found"].endswith(" GB of 149")
    assert found["fp8 linear layers"]["status"] == "ok"
    assert found["MXFP8 linear layers"]["found"] == "needs compute capability 10.0, the best card here has 9.0"
    missing = {name for name, status in statuses(finished).items() if status != "ok"}
    assert missing == {"MXFP8 linear layers"}


def test_a_b200_has_mxfp8_and_no_hopper_kernels(run, machine):
    machine(B200)
    finished = run("doctor", "--json")
    assert finished.code == 0
    assert kernels(finished) == ["fa2", "cudnn"]
    assert statuses(finished)["MXFP8 linear layers"] == "ok"
    assert finished.json["window_backend"] == "flashinfer"
    assert "(Hopper) alone" in checks(finished)["FlashInfer kernel fa3"]["found"]


def test_ada_with_24_gb(run, machine):
    machine(ADA)
    finished = run("doctor", "--json")
    assert finished.code == 0
    clip = checks(finished)["shortest clip"]
    assert clip["status"] == "ok"
    assert "GB of 24 with group offload by block" in clip["found"]
    assert kernels(finished) == ["fa2", "cudnn"]
    assert statuses(finished)["fp8 linear layers"] == "ok"
    assert statuses(finished)["MXFP8 linear layers"] == "missing"


def test_turing_cannot_generate(run, machine):
    machine(TURING)
    finished = run("doctor", "--json")
    assert finished.code == 1
    assert finished.json["can_generate"] is False
    assert finished.json["window_backend"] is None
    found = checks(finished)
    assert found["GPU"]["status"] == "missing"
    assert found["GPU"]["found"].endswith("compute capability 8.0 or newer is needed")
    assert found["GPU"]["found"].startswith("0: Tesla T4, compute 7.5, 16.0 GB")
    assert found["window backend 'auto'"]["status"] == "missing"
    assert kernels(finished) == []
    assert found["fp8 linear layers"]["status"] == "missing"
    assert "shortest clip" not in found


def test_a_gpu_no_clip_fits(run, machine):
    machine(("NVIDIA GeForce MX570", (8, 6), 2 * GB, GB))
    finished = run("doctor", "--json")
    assert finished.code == 1
    clip = checks(finished)["shortest clip"]
    assert (clip["status"], clip["importance"]) == ("missing", "required")
    assert clip["found"].endswith("GB of 1, and nothing smaller fits")


def test_no_gpu_and_nothing_optional(run, machine):
    machine(modules=(), programs=())
    finished = run("doctor", "--json")
    assert finished.code == 1
    found = checks(finished)
    assert found["GPU"]["found"] == "PyTorch sees no CUDA device"
    assert "'diffusers-h3 demo' needs none" in found["GPU"]["effect"]
    assert found["driver"]["found"] == "no nvidia-smi on the PATH"
    assert finished.json["window_backend"] == "sdpa"
    commands = {name: check["command"] for name, check in found.items() if check["command"]}
    assert commands == {
        "triton": "pip install triton",
        "FlashInfer": "pip install 'diffusers-h3[flashinfer]'",
        "cuDNN front end": "pip install nvidia-cudnn-frontend",
        "flash-attn": "pip install 'diffusers-h3[flash-attn]'",
        "nvcc and ninja": "pip install flashinfer-jit-cache",
    }
    assert all(found[name]["effect"] for name in commands)


@pytest.mark.parametrize(
    ("modules", "backend"),
    [(("flash_attn",), "flash_attn"), (("flash_attn_interface",), "flash_attn"), ((), "cudnn")],
)
def test_an_h200_without_flashinfer_still_generates(run, machine, modules, backend):
    machine(H200, modules=modules)
    finished = run("doctor", "--json")
    assert finished.code == 0
    assert finished.json["window_backend"] == backend
    assert checks(finished)["FlashInfer"]["importance"] == "faster"


def test_ada_without_any_package_takes_pytorchs_flash_kernel(run, machine):
    machine(ADA, modules=())
    finished = run("doctor", "--json")
    assert (finished.code, finished.json["window_backend"]) == (0, "torch_flash")
    assert checks(finished)["fp8 linear layers"]["command"] == "pip install 'diffusers-h3[fp8]'"


@pytest.mark.parametrize(
    ("programs", "modules", "status", "command", "working"),
    [
        ((), OPTIONAL_MODULES[:2], "missing", "pip install flashinfer-jit-cache", []),
        (("nvcc",), OPTIONAL_MODULES[:2], "missing", "pip install ninja", []),
        (("ninja",), OPTIONAL_MODULES[:2], "missing", "pip install flashinfer-jit-cache", []),
        ((), OPTIONAL_MODULES[:3], "ok", None, ["fa2", "fa3", "fp8"]),
        ((), ("flashinfer", "cudnn"), "missing", "pip install flashinfer-jit-cache", ["cudnn"]),
    ],
)
def test_compiling_flashinfers_kernels(run, machine, programs, modules, status, command, working):
    machine(H200, modules=modules, programs=programs)
    finished = run("doctor", "--json")
    found = checks(finished)["nvcc and ninja"]
    assert (found["status"], found["command"]) == (status, command)
    assert kernels(finished) == working
    assert finished.code == 0, "a slower kernel is a kernel"


def test_too_small_a_disk(run, machine):
    machine(H200, disk=100 * GB)
    finished = run("doctor", "--json")
    assert finished.code == 1
    found = checks(finished)["disk for an overlay"]
    assert (found["status"], found["importance"]) == ("missing", "required")
    # Twice the base of 66.3 GB, the branch of 4.3 GB and adapters of 1.2 GB.
    assert found["found"].startswith("138.03 GB are needed")
    assert "100.00 GB are free" in found["found"]
    assert "HF_HUB_CACHE" in found["command"]


def test_a_made_overlay_needs_no_space(run, machine, tmp_path):
    machine(H200, disk=0)
    for name in ("vdn-h3-8step-0123456789abcdef", "my-own-release-0123456789abcdef"):
        (tmp_path / "overlays" / name).mkdir(parents=True)
        (tmp_path / "overlays" / name / "model_index.json").write_text("{}")
    finished = run("doctor", "--json")
    assert finished.code == 0
    assert checks(finished)["disk for an overlay"]["found"].startswith("vdn-h3-8step-0123456789abcdef in ")


def test_missing_encoders(run, machine, monkeypatch):
    import av

    def codec(name, mode):
        raise av.codec.codec.UnknownCodecError(name)

    machine(H200)
    monkeypatch.setattr(av.codec, "Codec", codec)
    finished = run("doctor", "--json")
    assert finished.code == 1
    for name, encoder in (("H.264 encoder", "libx264"), ("AAC encoder", "aac")):
        found = checks(finished)[name]
        assert (found["status"], found["importance"]) == ("missing", "required")
        assert found["found"].endswith(f"has no {encoder}")


@pytest.mark.parametrize(
    ("smi", "found"),
    [
        (subprocess.CompletedProcess([], 9, "Failed to initialize NVML\n", ""), "ended with 9: Failed to initialize"),
        (subprocess.CompletedProcess([], 1, "", ""), "ended with 1: no output"),
        (subprocess.CompletedProcess([], 0, "", ""), "ended with 0: no output"),
    ],
)
def test_a_broken_nvidia_smi_is_reported_and_hides_nothing(run, machine, smi, found):
    machine(H200, smi=smi)
    finished = run("doctor", "--json")
    assert finished.code == 0, "PyTorch sees the GPU, whatever nvidia-smi says"
    driver = checks(finished)["driver"]
    assert driver["status"] == "failed"
    assert found in driver["found"]


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("nvidia-smi", 10), PermissionError("denied")])
def test_an_nvidia_smi_that_does_not_end_or_start(run, machine, monkeypatch, error):
    machine(H200)

    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(machine_report.subprocess, "run", fail)
    finished = run("doctor", "--json")
    assert finished.code == 0
    assert checks(finished)["driver"]["found"].startswith(type(error).__name__)


def test_a_gpu_out_of_order_still_has_a_name(run, machine, monkeypatch):
    machine(H200)

    def fail(index):
        raise RuntimeError("CUDA error: device is busy\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    found = checks(run("doctor", "--json"))["GPU"]
    assert (found["status"], found["found"]) == (
        "ok",
        "0: NVIDIA H200, compute 9.0, 150.0 GB, free memory unknown (CUDA error: device is busy)",
    )


def test_a_torch_without_cuda(run, machine, monkeypatch):
    machine()
    monkeypatch.setattr(torch.version, "cuda", None)
    finished = run("doctor", "--json")
    assert finished.code == 1
    assert "built without CUDA" in checks(finished)["GPU"]["found"]
    assert checks(finished)["GPU"]["command"].startswith("pip install --force-reinstall torch")


@pytest.mark.parametrize("position", range(len(machine_report._PROBES)))
def test_a_probe_that_fails_is_reported_and_takes_no_other_with_it(run, machine, monkeypatch, position):
    machine(H200)
    whole = run("doctor", "--json").json["checks"]

    def fail():
        raise OSError("libcuda.so.1: cannot open shared object file\nmore")

    probes = list(machine_report._PROBES)
    name, importance, probe = probes[position]
    lost = {check.name for check in probe()}
    probes[position] = (name, importance, fail)
    monkeypatch.setattr(machine_report, "_PROBES", tuple(probes))
    finished = run("doctor", "--json")
    assert finished.code == (1 if importance == "required" else 0)
    expected = {"found": "OSError: libcuda.so.1: cannot open shared object file", "status": "failed"}
    assert expected.items() <= checks(finished)[name].items()
    assert checks(finished)[name]["importance"] == importance
    kept = [check for check in whole if check["name"] not in lost]
    assert [check for check in finished.json["checks"] if check["name"] != name] == kept


def test_the_schema(run, machine):
    machine(ADA, modules=())
    report = run("doctor", "--json").json
    assert list(report) == ["schema", "can_generate", "window_backend", "checks"]
    assert report["schema"] == 1
    for check in report["checks"]:
        assert list(check) == ["name", "status", "found", "importance", "command", "effect"]
        assert check["status"] in ("ok", "missing", "failed")
        assert check["importance"] in ("required", "faster", "optional")
        assert check["found"]
    names = [check["name"] for check in report["checks"]]
    assert len(set(names)) == len(names)


def test_the_table_reads_well(run, machine):
    machine(ADA, modules=("triton",), programs=())
    finished = run("doctor")
    assert (finished.code, finished.err) == (0, "")
    table, _, remedies = finished.out.partition("\n\n")
    assert all(len(line) <= 80 for line in table.splitlines())
    assert "window backend 'auto'" in table
    assert "Faster\n  FlashInfer: the fastest attention" in remedies
    assert "\n    pip install 'diffusers-h3[flashinfer]'\n" in remedies
    assert "Required" not in remedies
    assert finished.out.endswith("This machine can generate videos.\n")


def test_the_table_on_a_machine_that_cannot(run, machine):
    machine(modules=())
    finished = run("doctor")
    assert finished.code == 1
    assert "\nRequired\n  GPU: generating needs an NVIDIA GPU" in finished.out
    assert finished.out.endswith("This machine cannot generate videos.\n")


def test_text_in_brackets_is_shown_as_it_is(run, machine):
    machine((f"Card [red]{'x'}", (9, 0), 80 * GB, 80 * GB))
    assert "Card [red]x" in run("doctor").out


@pytest.mark.parametrize("name", ["doctor", "plan"])
def test_help_needs_neither_torch_nor_diffusers(name):
    script = (
        "import sys\n"
        "from diffusers_h3.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    sys.exit(str({'torch', 'transformers', 'diffusers'} & set(sys.modules) or stop.code))\n"
    )
    command = [sys.executable, "-c", script, name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == "0\n"
    assert f"diffusers-h3 {name}" in done.stdout


@pytest.mark.slow
def test_this_machine_as_it_is():
    """In a process of its own, with whatever is here and without PATH: no crash, an answer, nothing written."""
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "diffusers_h3", "doctor"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "cannot generate videos" in done.stdout
    assert "Traceback" not in done.stderr

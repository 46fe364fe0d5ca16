"""What this machine can run, found out by looking: nothing is downloaded and nothing is built."""

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any

from .planning.cards import dotted


OK, MISSING, FAILED = "ok", "missing", "failed"
REQUIRED, FASTER, OPTIONAL = "required", "faster", "optional"

_NVIDIA_SMI_SECONDS = 10


@dataclass(frozen=True)
class Check:
    """One thing that was looked for.

    Args:
        name (`str`): What it is.
        status (`str`): `"ok"`, `"missing"`, or `"failed"` where looking for it raised an error.
        found (`str`): What is there, or why it cannot be used.
        importance (`str`): `"required"` to generate, `"faster"`, or `"optional"`.
        command (`str`, *optional*): What to run to get it; null where there is nothing to run, or no need.
        effect (`str`, *optional*): What having it changes.
    """

    name: str
    status: str
    found: str
    importance: str = OPTIONAL
    command: str | None = None
    effect: str | None = None


@dataclass(frozen=True)
class MachineReport:
    """All checks in order.

    As data (`to_dict`) it is ``{"schema": 1, "can_generate": bool, "window_backend": str | null, "checks": [...]}``,
    each check with exactly the fields of `Check`. `can_generate` is whether every required check is `"ok"`, and
    `window_backend` what `HybridAttnProcessor("auto")` takes.
    """

    checks: tuple[Check, ...]
    window_backend: str | None

    @property
    def can_generate(self) -> bool:
        """Whether the released weights can be run at all."""
        return all(check.status == OK for check in self.checks if check.importance == REQUIRED)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as data for JSON."""
        return {
            "schema": 1,
            "can_generate": self.can_generate,
            "window_backend": self.window_backend,
            "checks": [asdict(check) for check in self.checks],
        }


def inspect_machine() -> MachineReport:
    """Run every probe; one that fails is reported and takes no other with it."""
    checks = [check for name, importance, probe in _PROBES for check in _guarded(name, importance, probe)]
    backends = [check.found.split()[0] for check in checks if check.name == _BACKEND and check.status == OK]
    return MachineReport(tuple(checks), backends[0] if backends else None)


def _guarded(name: str, importance: str, probe: Callable[[], list[Check]]) -> list[Check]:
    """Run a probe. Whatever a broken installation raises, from a loader's OSError up, is what the report is about."""
    try:
        return probe()
    except Exception as error:
        lines = str(error).splitlines()
        return [Check(name, FAILED, f"{type(error).__name__}: {lines[0] if lines else 'no message'}", importance)]


def _gpus() -> list[Check]:
    import torch

    from .planning.cards import MINIMUM_CAPABILITY

    if torch.version.cuda is None:
        found = f"torch {torch.__version__} is built without CUDA"
        return [Check(_GPU, MISSING, found, REQUIRED, "pip install --force-reinstall torch torchvision", _GPU_EFFECT)]
    if not torch.cuda.is_available():
        effect = f"{_GPU_EFFECT} and a driver that nvidia-smi lists it with; 'diffusers-h3 demo' needs none"
        return [Check(_GPU, MISSING, "PyTorch sees no CUDA device", REQUIRED, None, effect)]
    indices = range(torch.cuda.device_count())
    if max(map(torch.cuda.get_device_capability, indices)) >= MINIMUM_CAPABILITY:
        return [Check(_GPU, OK, _describe_gpu(index), REQUIRED) for index in indices]
    reason = f"compute capability {dotted(MINIMUM_CAPABILITY)} or newer is needed"
    return [
        Check(_GPU, MISSING, f"{_describe_gpu(index)}; {reason}", REQUIRED, None, _GPU_EFFECT) for index in indices
    ]


def _describe_gpu(index: int) -> str:
    import torch

    device = torch.cuda.get_device_properties(index)
    text = f"{index}: {device.name}, compute {device.major}.{device.minor}, {device.total_memory / 1e9:.1f} GB"
    try:
        free, _ = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # a device that is taken, or out of order, still has a name
        return f"{text}, free memory unknown ({str(error).splitlines()[0]})"
    return f"{text}, {free / 1e9:.1f} free"


def _default_clip() -> list[Check]:
    """Say what the shortest clip of the default canvas needs on the first GPU that can compute it at all."""
    import torch

    from .planning.advice import alternatives
    from .planning.cards import card_of_device
    from .planning.estimate import Settings, estimate, precision_refusal
    from .planning.workload import resolve_clip

    if not torch.cuda.is_available():
        return []
    device = torch.cuda.get_device_properties(0)
    card = card_of_device(device.name, device.total_memory, (device.major, device.minor))
    settings = Settings(resolve_clip(None, None, 124, 200))
    if precision_refusal(card, settings.precision, settings.attention_precision):
        return []
    needed = f"124 frames of {settings.clip.width}×{settings.clip.height} in bf16 take"
    found = estimate(settings, card)
    if found.fits:
        return [Check(_CLIP, OK, f"{needed} {found.peak_gb:.0f} GB of {found.available_gb:.0f}", REQUIRED)]
    others = alternatives(settings, card)
    effect = "'diffusers-h3 plan' says what would fit"
    if not others:
        found = f"{needed} {found.peak_gb:.0f} GB of {found.available_gb:.0f}, and nothing smaller fits"
        return [Check(_CLIP, MISSING, found, REQUIRED, None, effect)]
    changes = "; ".join(change.partition(" (")[0] for change in others[0].changes)
    found = f"{needed} {others[0].estimate.peak_gb:.0f} GB of {found.available_gb:.0f} with {changes}"
    return [Check(_CLIP, OK, found, REQUIRED, None, effect)]


def _driver() -> list[Check]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return [Check(_DRIVER, MISSING, "no nvidia-smi on the PATH", OPTIONAL, None, "shows the driver's version")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    if done.returncode or not lines:
        found = f"nvidia-smi ended with {done.returncode}: {lines[0] if lines else 'no output'}"
        return [Check(_DRIVER, FAILED, found, OPTIONAL, "nvidia-smi", "the GPU runs only with a working driver")]
    return [Check(_DRIVER, OK, ", ".join(sorted(set(lines))))]


def _torch() -> list[Check]:
    import torch

    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return [Check(_TORCH, OK, f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn}", REQUIRED)]


def _diffusers() -> list[Check]:
    from diffusers import MiniMaxH3Transformer3DModel  # noqa: F401  # absent from releases before 0.42

    return [Check(_DIFFUSERS, OK, metadata.version("diffusers"), REQUIRED)]


@dataclass(frozen=True)
class _Package:
    """A package that is looked for without importing it: it is there if one of `modules` is."""

    name: str
    modules: tuple[str, ...]
    distribution: str
    importance: str
    command: str
    effect: str

    def check(self) -> list[Check]:
        if not any(importlib.util.find_spec(module) for module in self.modules):
            return [Check(self.name, MISSING, "not installed", self.importance, self.command, self.effect)]
        return [Check(self.name, OK, _version(self.distribution), self.importance)]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "installed, version unknown"


def _flashinfer_kernels() -> list[Check]:
    from .ops.prefill.machine import machine_refusal
    from .ops.prefill.options import PrefillOptions

    effects = {
        "fa2": (PrefillOptions(prefill="single", kernel="fa2"), "FlashInfer's attention on Ampere and Ada"),
        "fa3": (PrefillOptions(prefill="single", kernel="fa3"), "the fastest attention on Hopper"),
        "fp8": (PrefillOptions(prefill="single", fp8=True), "fp8 attention on Hopper"),
        "cudnn": (PrefillOptions(prefill="cudnn"), "FlashInferProcessor(prefill='cudnn')"),
    }
    checks = []
    for kernel, (options, effect) in effects.items():
        refusal = machine_refusal(options)
        name = f"FlashInfer kernel {kernel}"
        if refusal is None:
            checks.append(Check(name, OK, "can run here", FASTER))
        else:
            # The reason is before the colon, and the ways out are those of the other checks.
            checks.append(Check(name, MISSING, refusal.partition(":")[0], OPTIONAL, None, effect))
    return checks


def _compiler() -> list[Check]:
    from .ops.prefill.machine import has_compiler, has_module, has_program

    if has_module("flashinfer_jit_cache"):
        return [Check(_COMPILER, OK, "not needed: flashinfer-jit-cache holds compiled kernels", FASTER)]
    missing = [name for name, found in (("nvcc", has_compiler()), ("ninja", has_program("ninja"))) if not found]
    if not missing:
        return [Check(_COMPILER, OK, "found", FASTER)]
    command = "pip install ninja" if missing == ["ninja"] else "pip install flashinfer-jit-cache"
    effect = "FlashInfer compiles its kernels with them, or finds them compiled"
    return [Check(_COMPILER, MISSING, f"no {' and no '.join(missing)}", FASTER, command, effect)]


def _low_precision() -> list[Check]:
    from .ops.prefill.machine import visible_capabilities
    from .planning.cards import FP8_LINEARS_CAPABILITY, MXFP8_LINEARS_CAPABILITY

    best = max(visible_capabilities(), default=None)
    installed = importlib.util.find_spec("torchao") is not None
    checks = []
    for name, capability, effect in (
        ("fp8 linear layers", FP8_LINEARS_CAPABILITY, "the transformer's weights shrink from 70.8 to 49.4 GB"),
        ("MXFP8 linear layers", MXFP8_LINEARS_CAPABILITY, "fp8 scaled by blocks of 32, on data-centre Blackwell"),
    ):
        if best is None or best < capability:
            card = "no GPU" if best is None else f"the best card here has {dotted(best)}"
            found = f"needs compute capability {dotted(capability)}, {card}"
            checks.append(Check(name, MISSING, found, OPTIONAL, None, effect))
        elif not installed:
            command = "pip install 'diffusers-h3[fp8]'"
            checks.append(Check(name, MISSING, "torchao is not installed", FASTER, command, effect))
        else:
            checks.append(Check(name, OK, f"can run here, torchao {_version('torchao')}", FASTER))
    return checks


def _encoders() -> list[Check]:
    import av

    checks = []
    for name, codec in (("H.264 encoder", "libx264"), ("AAC encoder", "aac")):
        try:
            av.codec.Codec(codec, "w")
        except ValueError:  # PyAV's error for an unknown codec is one
            found = f"PyAV {av.__version__} has no {codec}"
            command = "pip install --force-reinstall --only-binary av av"
            checks.append(Check(name, MISSING, found, REQUIRED, command, "saving an mp4 with sound"))
        else:
            checks.append(Check(name, OK, f"{codec}, PyAV {av.__version__}", REQUIRED))
    return checks


def _window_backend() -> list[Check]:
    import torch

    from .ops.window_attention.kernels import KERNELS, kernel_refusal

    effect = "how hybrid attention computes its window"
    if not torch.cuda.is_available():
        return [Check(_BACKEND, OK, "sdpa (no CUDA device)", OPTIONAL, None, effect)]
    # All a refusal depends on, so that nothing is allocated: the released heads have 128 channels.
    query = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 1, 56, 128))
    refusals = {name: kernel_refusal(name, query) for name in KERNELS}
    for name, refusal in refusals.items():
        if refusal is None:
            return [Check(_BACKEND, OK, f"{name} (first of {', '.join(KERNELS)} that runs here)", REQUIRED)]
    found = "; ".join(dict.fromkeys(refusals.values()))
    return [Check(_BACKEND, MISSING, found, REQUIRED, None, effect)]


def _disk() -> list[Check]:
    from .overlays.errors import DiskSpaceError
    from .overlays.hub import HubAccess, default_cache_dir
    from .overlays.manifest import builtin_overlays
    from .overlays.parts import check_space
    from .planning.workload import STOCK_BYTES

    folder = default_cache_dir()
    known = builtin_overlays()
    made = [path.parent.name for name in known for path in sorted(folder.glob(f"{name}-*/model_index.json"))]
    if made:
        return [Check(_DISK, OK, f"{', '.join(made)} in {folder}", REQUIRED)]
    manifest = known["vdn-h3-8step"]
    added = sum(part.weights.bytes or 0 for part in (*manifest.adapters, manifest.linear_branch))
    # The base is downloaded and written again with the adapters merged; text encoder and VAEs state no sizes.
    needs = [(HubAccess().cache, STOCK_BYTES + added), (folder, STOCK_BYTES)]
    total = f"{(2 * STOCK_BYTES + added) / 1e9:.0f} GB, and the text encoder and VAEs"
    try:
        check_space(needs)
    except DiskSpaceError as error:
        command = "export DIFFUSERS_H3_CACHE=… HF_HUB_CACHE=…"
        effect = f"making an overlay takes {total}"
        return [Check(_DISK, MISSING, str(error).partition(" Free some")[0], REQUIRED, command, effect)]
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    return [Check(_DISK, OK, f"{free / 1e9:.0f} GB free; an overlay takes {total}", REQUIRED)]


_GPU, _DRIVER, _TORCH, _DIFFUSERS, _DISK = "GPU", "driver", "torch", "diffusers", "disk for an overlay"
_CLIP, _COMPILER, _BACKEND = "shortest clip", "nvcc and ninja", "window backend 'auto'"
_GPU_EFFECT = "generating needs an NVIDIA GPU of compute capability 8.0 or newer"

_PACKAGES = (
    _Package(
        name="triton",
        modules=("triton",),
        distribution="triton",
        importance=FASTER,
        command="pip install triton",
        effect="the linear branch's kernels; PyTorch's take several times as long",
    ),
    _Package(
        name="FlashInfer",
        modules=("flashinfer",),
        distribution="flashinfer-python",
        importance=FASTER,
        command="pip install 'diffusers-h3[flashinfer]'",
        effect="the fastest attention: a window layer in 99 ms, where cuDNN takes 113 and flash 178 (H200)",
    ),
    _Package(
        name="cuDNN front end",
        modules=("cudnn",),
        distribution="nvidia-cudnn-frontend",
        importance=OPTIONAL,
        command="pip install nvidia-cudnn-frontend",
        effect="FlashInferProcessor(prefill='cudnn'), which needs no nvcc",
    ),
    _Package(
        name="flash-attn",
        modules=("flash_attn", "flash_attn_interface"),
        distribution="flash-attn",
        importance=OPTIONAL,
        command="pip install 'diffusers-h3[flash-attn]'",
        effect="a window kernel where FlashInfer cannot run",
    ),
)

# In the order of the report: the name and importance a failure is reported under, and what looks.
_PROBES: tuple[tuple[str, str, Callable[[], list[Check]]], ...] = (
    (_GPU, REQUIRED, _gpus),
    (_CLIP, REQUIRED, _default_clip),
    (_DRIVER, OPTIONAL, _driver),
    (_TORCH, REQUIRED, _torch),
    (_DIFFUSERS, REQUIRED, _diffusers),
    ("H.264 and AAC encoders", REQUIRED, _encoders),
    (_DISK, REQUIRED, _disk),
    (_BACKEND, REQUIRED, _window_backend),
    *((package.name, package.importance, package.check) for package in _PACKAGES),
    (_COMPILER, FASTER, _compiler),
    ("FlashInfer's kernels", OPTIONAL, _flashinfer_kernels),
    ("fp8 and MXFP8", OPTIONAL, _low_precision),
)

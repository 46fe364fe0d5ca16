"""What this machine offers to FlashInfer, found out without building anything."""

import importlib.util
import os
import shutil

import torch

from .options import PrefillOptions


MINIMUM_CAPABILITY = (8, 0)
# FlashInfer's fa3 kernels, float8 ones included, are built for sm_90a alone.
HOPPER = (9, 0)


@torch.compiler.assume_constant_result
def cuda_capability(device_type: str, device_index: int | None) -> tuple[int, int] | None:
    """Return a device's compute capability, or None for a device that is not a CUDA one."""
    if device_type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device_index)


def is_hopper(capability: tuple[int, int]) -> bool:
    """Whether a card has the kernels that FlashInfer builds for sm_90a alone."""
    # `==`, in one place: `!=` on tuples does not trace on torch 2.11.
    return capability == HOPPER


def visible_capabilities() -> list[tuple[int, int]]:
    """Return the compute capabilities of all CUDA devices."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


@torch.compiler.assume_constant_result
def has_module(name: str) -> bool:
    """Whether a top-level module can be imported."""
    return importlib.util.find_spec(name) is not None


def has_program(path: str) -> bool:
    """Whether a program can be run, by name or path."""
    return shutil.which(path) is not None


def has_compiler() -> bool:
    """Whether FlashInfer finds an nvcc, where it looks for one itself."""
    if os.environ.get("FLASHINFER_NVCC"):
        return has_program(os.environ["FLASHINFER_NVCC"])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        if has_program("nvcc"):
            return True
        home = "/usr/local/cuda"
    return has_program(os.path.join(home, "bin", "nvcc"))


def machine_refusal(options: PrefillOptions) -> str | None:
    """Say why this machine cannot run attention with these options, in one sentence, or return None."""
    if not has_module("flashinfer"):
        return (
            "FlashInfer is not installed: `pip install 'diffusers-h3[flashinfer]'`, or pass `fallback='sdpa'` to use "
            "PyTorch's attention."
        )
    capabilities = visible_capabilities()
    if not capabilities:
        return (
            "FlashInfer needs a CUDA device and PyTorch sees none: run on a machine with one, or pass "
            "`fallback='sdpa'` to use PyTorch's attention."
        )
    if max(capabilities) < MINIMUM_CAPABILITY:
        return (
            f"FlashInfer needs compute capability {_dotted(MINIMUM_CAPABILITY)} (Ampere) or newer and the best card "
            f"here has {_dotted(max(capabilities))}: keep Diffusers' own processor, or pass `fallback='sdpa'`."
        )
    if options.prefill == "cudnn":
        # cuDNN compiles its kernels itself, so no nvcc is asked for.
        if not has_module("cudnn"):
            return (
                "`prefill='cudnn'` needs cuDNN's Python front end: `pip install nvidia-cudnn-frontend`, or use "
                "`prefill='single'`."
            )
        return None
    wanted = "`fp8=True`" if options.fp8 else "`kernel='fa3'`" if options.kernel == "fa3" else None
    if wanted and HOPPER not in capabilities:
        return (
            f"{wanted} needs FlashInfer's fa3 kernel, which exists for compute capability {_dotted(HOPPER)} (Hopper) "
            f"alone, and the best card here has {_dotted(max(capabilities))}: leave it at its default."
        )
    if has_module("flashinfer_jit_cache"):
        return None
    if not has_compiler():
        return (
            "FlashInfer compiles its kernels on first use and finds no nvcc: install the CUDA toolkit and set "
            "CUDA_HOME, or `pip install flashinfer-jit-cache` for compiled kernels, or use `prefill='cudnn'`."
        )
    if not has_program("ninja"):
        return "FlashInfer compiles its kernels with ninja, which is not on the PATH: `pip install ninja`."
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))

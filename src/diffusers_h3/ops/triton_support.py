"""What every Triton implementation shares: when it may run, and how it is reached.

Triton is imported by the `triton.py` modules only, and those are imported on first use, so the package works where
Triton is not installed.
"""

import importlib.util
import os
from functools import cache

import torch


# Tiles that keep several stages of operands in flight need up to 176 KiB of shared memory: H100 and B200 have 228, an
# A100 has 164 and consumer cards 100.
LARGE_SHARED_MEMORY = 176 * 1024

# Read once: both are constants to a traced graph, and Triton itself reads the variable when a kernel is defined.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory one program can have on a device."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def use_triton(*tensors: torch.Tensor | None) -> bool:
    """Whether the Triton implementation runs for these inputs.

    It is inference only and for CUDA tensors of at most single precision; everything else takes the reference, which
    is differentiable. `TRITON_INTERPRET=1` also admits CPU tensors, which is how the kernels are tested without a GPU.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.dtype == torch.float64 for tensor in present):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present):
        return False
    return _HAS_TRITON and (_INTERPRETED or all(tensor.is_cuda for tensor in present))

"""Dense attention kernels that also return the log-sum-exp of their logits, which merging two key sets needs."""

from collections.abc import Callable

import torch

from ...notices import inform_once
from ..prefill.kernels import SINGLE_HEAD_DIMS
from ..prefill.machine import HOPPER, MINIMUM_CAPABILITY, cuda_capability, has_module, is_hopper, machine_refusal
from ..prefill.options import PrefillOptions


Scales = list[torch.Tensor] | None
# (query, key, value [L, H, D], per-head scales, output dtype) -> (output [L, H, D], log-sum-exp [L, H], natural)
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scales, torch.dtype], tuple[torch.Tensor, torch.Tensor]]

LN_2 = 0.6931471805599453


def _flashinfer(query, key, value, scales: Scales, dtype: torch.dtype):
    from flashinfer.prefill import single_prefill_with_kv_cache

    capability = cuda_capability(query.device.type, query.device.index)
    arguments = {}
    if scales is not None:
        arguments = dict(zip(("scale_q", "scale_k", "scale_v"), scales, strict=True), o_dtype=dtype)
    output, lse = single_prefill_with_kv_cache(
        query,
        key,
        value,
        kv_layout="NHD",
        backend="fa3" if is_hopper(capability) else "fa2",
        return_lse=True,
        **arguments,
    )
    return output, lse * LN_2  # FlashInfer's logarithm is to base 2


def _flash_attn(query, key, value, scales: Scales, dtype: torch.dtype):
    query, key, value = (rows.unsqueeze(0) for rows in (query, key, value))
    if has_module("flash_attn_interface"):  # FlashAttention 3
        from flash_attn_interface import flash_attn_func

        output, lse = flash_attn_func(query, key, value, return_attn_probs=True)[:2]
    else:
        from flash_attn import flash_attn_func

        output, lse, _ = flash_attn_func(query, key, value, return_attn_probs=True)
    return output[0], lse[0].transpose(0, 1)


def _cudnn(query, key, value, scales: Scales, dtype: torch.dtype):
    query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    output, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[:2]
    return output[0].transpose(0, 1), lse.reshape(lse.shape[1:3]).transpose(0, 1)


def _torch_flash(query, key, value, scales: Scales, dtype: torch.dtype):
    query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, key, value))
    if query.is_cuda:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[:2]
    else:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


# In the order `auto` tries them; the times are of one full layer's window on an H200, see benchmarks/RESULTS.md.
KERNELS: dict[str, Kernel] = {
    "flashinfer": _flashinfer,
    "flash_attn": _flash_attn,
    "cudnn": _cudnn,
    "torch_flash": _torch_flash,
}


def kernel_refusal(name: str, query: torch.Tensor) -> str | None:
    """Say why a kernel cannot run for a query like this one, or return `None`."""
    capability = cuda_capability(query.device.type, query.device.index)
    fp8 = query.dtype == torch.float8_e4m3fn
    head_dim = query.shape[-1]
    if fp8 and name != "flashinfer":
        return "fp8 attention runs on the 'flashinfer' backend only"
    if name == "torch_flash" and capability is None:
        return None
    if capability is None:
        return f"{query.device.type} tensors: it needs a CUDA device"
    if query.dtype not in (torch.float16, torch.bfloat16) and not fp8:
        return f"{query.dtype}: it takes float16 and bfloat16"
    if capability < MINIMUM_CAPABILITY:
        return f"compute capability {capability}: it needs {MINIMUM_CAPABILITY} or newer"
    if name == "flashinfer":
        if head_dim not in SINGLE_HEAD_DIMS:
            return f"head dimension {head_dim}: it takes {SINGLE_HEAD_DIMS}"
        return machine_refusal(PrefillOptions(prefill="single", fp8=fp8))
    if name == "flash_attn" and not (has_module("flash_attn") or has_module("flash_attn_interface")):
        return "flash-attn is not installed: `pip install 'diffusers-h3[flash-attn]'`"
    if name == "cudnn" and capability < HOPPER:
        return f"compute capability {capability}: it needs {HOPPER} or newer"
    limit = 128 if name == "cudnn" else 256
    if head_dim % 8 or head_dim > limit:
        return f"head dimension {head_dim}: it takes multiples of 8 up to {limit}"
    return None


def resolve_kernel(backend: str, query: torch.Tensor) -> Kernel:
    """Return the kernel of a backend, the first that runs here for `"auto"`.

    Raises:
        ValueError: Where the backend that was named, or all of them, cannot run.
    """
    names = list(KERNELS) if backend == "auto" else [backend]
    refusals = {name: kernel_refusal(name, query) for name in names}
    for name, refusal in refusals.items():
        if refusal is None:
            if backend == "auto":
                passed = "".join(f"; {other}: {why}" for other, why in refusals.items() if why)
                inform_once(f"Hybrid attention runs its window on {name!r} ({query.dtype}, {query.device}){passed}.")
            return KERNELS[name]
    reasons = "; ".join(f"{name!r} cannot take {refusal}" for name, refusal in refusals.items())
    raise ValueError(f"No window backend runs here: {reasons}. Use `HybridAttnProcessor(backend='sdpa')`.")

"""Dense attention on FlashInfer's prefill kernels: what they take, which one runs, and the call. Inference only.

FlashInfer and cuDNN are imported by the call itself; everything before it needs PyTorch alone.
"""

import math

import torch

from ...notices import inform_once, warn_once
from . import cudnn, machine
from .kernels import SINGLE_HEAD_DIMS, prefill
from .masks import is_zero_or_minus_infinity, with_query_axis
from .options import PrefillOptions
from .quantize import quantize_per_head


__all__ = ["PrefillOptions", "prefill_attention", "prefill_refusal"]

# Where `prefill="auto"` takes cuDNN: from this batch on and up to this many keys, by compute capability; a card not
# listed keeps one call per item. On Hopper (benchmarks/RESULTS.md, H200, 2026-12-02) cuDNN wins where keys are few:
# 32,760 rows × 12 heads against 512 keys took 1.18 and 1.96 ms at batches 4 and 8, fa3 1.62 and 2.88; against 32,760
# keys fa3 took 9.7, 19.0 and 37.2 ms at batches 1, 2 and 4 and cuDNN 11.1, 22.1 and 44.5.
_CUDNN_MEASURED_FASTER: dict[tuple[int, int], tuple[int, int]] = {machine.HOPPER: (4, 512)}

_DIRECT_DTYPES = (torch.float16, torch.bfloat16)
_CAST_DTYPES = (torch.float32, torch.float64)


def prefill_refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float | None,
    options: PrefillOptions,
) -> str | None:
    """Say why FlashInfer cannot compute this call, in one sentence, or return None.

    Args:
        query (`torch.Tensor`): ``[B, Q, H, D]``.
        key, value (`torch.Tensor`): ``[B, K, H_kv, D]``, H a multiple of H_kv.
        attn_mask (`torch.Tensor`, *optional*): ``[B, K]`` or ``[1 or B, 1, 1 or Q, K]``; boolean, True where a query
            looks, or floating point, 0 there and minus infinity elsewhere. The values of the latter are read back
            from the device.
        is_causal (`bool`): Whether query i sees the keys 0 to i alone; composes with a mask.
        softmax_scale (`float`, *optional*): Defaults to ``D ** -0.5``.

    Raises:
        ValueError: For shapes that no attention could have, naming them.
    """
    _check_shapes(query, key, value)
    head_dim = query.shape[-1]
    mask = None
    if attn_mask is not None:
        mask = with_query_axis(attn_mask, query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        if attn_mask.device != query.device:
            raise ValueError(f"The attention mask is on {attn_mask.device}, the query on {query.device}.")

    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return (
            "FlashInfer's kernels have no backward pass and a query, key or value requires a gradient: run under "
            "`torch.inference_mode()`, or train with Diffusers' own processor."
        )
    capability = machine.cuda_capability(query.device.type, query.device.index)
    if capability is None:
        return f"FlashInfer runs on CUDA devices and the query is on {query.device.type!r}: move the model to one."
    if capability < machine.MINIMUM_CAPABILITY:
        return (
            f"FlashInfer needs compute capability 8.0 or newer and {query.device} has {capability[0]}.{capability[1]}."
        )
    if options.fp8 and not machine.is_hopper(capability):
        return (
            "`fp8=True` needs FlashInfer's fa3 kernel, which exists for compute capability 9.0 (Hopper) alone; "
            f"{query.device} has {capability[0]}.{capability[1]}."
        )
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if rows.dtype not in _DIRECT_DTYPES + _CAST_DTYPES:
            return f"FlashInfer attention takes floating-point inputs of 16 bits or more; the {name} is {rows.dtype}."

    masked = mask is not None or attn_mask is not None or (is_causal and query.shape[1] != key.shape[1])
    kernel = _kernel(options, capability, *key.shape[:2], head_dim, masked, softmax_scale, query.device.index)
    head_dims = cudnn.HEAD_DIMS if kernel == "cudnn" else SINGLE_HEAD_DIMS
    if head_dim not in head_dims:
        return (
            f"FlashInfer's {kernel} kernel takes head dimensions {', '.join(map(str, head_dims))} and this model has "
            f"{head_dim}: keep Diffusers' own attention for it, or pass `fallback='sdpa'`."
        )
    if kernel == "fa3" and not machine.is_hopper(capability):
        return (
            f"`kernel='fa3'` exists for compute capability 9.0 (Hopper) alone; {query.device} has "
            f"{capability[0]}.{capability[1]}: use 'auto' or 'fa2'."
        )
    if kernel == "cudnn":
        if not _is_default_scale(softmax_scale, head_dim):
            return (
                f"FlashInfer caches cuDNN's graphs without the softmax scale, so `prefill='cudnn'` takes the default "
                f"{head_dim**-0.5:.6g} alone and got {softmax_scale:.6g}: use `prefill='single'`."
            )
        if refusal := cudnn.device_refusal(query.device.index):
            return refusal
    return _mask_refusal(attn_mask, mask, masked, kernel, options)


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    softmax_scale: float | None = None,
    options: PrefillOptions | None = None,
) -> torch.Tensor:
    """Compute dense attention with FlashInfer. Arguments as in `prefill_refusal`, which must have returned None.

    Inputs that are not all float16 or all bfloat16 are computed in bfloat16.

    Returns:
        `torch.Tensor`: ``[B, Q, H, D]`` in the query's dtype.
    """
    options = options or PrefillOptions()
    batch, num_queries, num_heads, head_dim = query.shape
    output_dtype = query.dtype
    if output_dtype not in _DIRECT_DTYPES or key.dtype != output_dtype or value.dtype != output_dtype:
        warn_once(
            "FlashInfer attention got inputs that are not all float16 or all bfloat16: it computes them in bfloat16 "
            "and returns the query's dtype."
        )
        query, key, value = (rows.to(torch.bfloat16) for rows in (query, key, value))

    mask = None
    if attn_mask is not None:
        mask = with_query_axis(attn_mask, batch, num_heads, num_queries, key.shape[1])
        if mask.dtype != torch.bool:
            mask = mask == 0
    masked = mask is not None or (is_causal and num_queries != key.shape[1])
    capability = machine.cuda_capability(query.device.type, query.device.index)
    kernel = _kernel(options, capability, *key.shape[:2], head_dim, masked, softmax_scale, query.device.index)
    _announce(options, kernel, capability, batch > 1, masked)

    compute_dtype, scales = query.dtype, (None, None, None)
    if options.fp8:
        (query, key, value), scales = zip(*(quantize_per_head(rows) for rows in (query, key, value)), strict=True)
    output = prefill(
        query,
        key,
        value,
        mask,
        *scales,
        is_causal,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        kernel,
        compute_dtype,
    )
    return output.to(output_dtype)


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not (query.ndim == key.ndim == value.ndim == 4):
        raise ValueError(f"Attention takes tensors of shape (batch, rows, heads, head dimension); got {shapes}.")
    if key.shape != value.shape or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"Key and value must have one shape, and the query their batch and head dimension; got {shapes}."
        )
    if 0 in query.shape or 0 in key.shape:
        raise ValueError(f"Attention needs at least one query and one key; got {shapes}.")
    if query.shape[2] % key.shape[2] != 0:
        raise ValueError(f"The query's heads must be a multiple of the key's; got {shapes}.")
    if not (query.device == key.device == value.device):
        raise ValueError(
            f"Query, key and value must be on one device; got {query.device}, {key.device} and {value.device}."
        )


def _mask_refusal(
    attn_mask: torch.Tensor | None, mask: torch.Tensor | None, masked: bool, kernel: str, options: PrefillOptions
) -> str | None:
    if masked and options.fp8:
        return "FlashInfer has no masked float8 kernel: drop the mask or `fp8=True`."
    if masked and kernel != "fa2":
        choice = "`prefill='cudnn'`" if kernel == "cudnn" else "`kernel='fa3'`"
        return (
            f"FlashInfer's {kernel} kernel takes no mask (nor `is_causal` with unequal lengths), so {choice} cannot "
            "run this call: use 'auto', or `kernel='fa2'`."
        )
    if attn_mask is None:
        return None
    if mask is None:
        return (
            f"FlashInfer takes one mask for all heads and this one, of shape {tuple(attn_mask.shape)}, differs "
            "between them: pass `fallback='sdpa'` to run it on PyTorch's attention."
        )
    if attn_mask.dtype == torch.bool:
        return None
    if not attn_mask.is_floating_point():
        return f"A mask must be boolean or floating point, got {attn_mask.dtype}: convert it with `.bool()`."
    if torch.compiler.is_compiling():
        return (
            "The values of a floating-point mask cannot be checked inside a compiled graph: pass a boolean mask, True "
            "where a query looks."
        )
    if not is_zero_or_minus_infinity(attn_mask):
        return (
            "FlashInfer takes masks of 0 and minus infinity and this one has other values, a bias: pass "
            "`fallback='sdpa'` to run it on PyTorch's attention."
        )
    return None


def _kernel(
    options: PrefillOptions,
    capability: tuple[int, int],
    batch: int,
    num_keys: int,
    head_dim: int,
    masked: bool,
    softmax_scale: float | None,
    device_index: int | None,
) -> str:
    """Return the kernel to run; an explicit request is returned even where it will be refused."""
    if options.prefill == "cudnn":
        return "cudnn"
    if options.kernel != "auto":
        return options.kernel
    if options.fp8:
        return "fa3"
    if masked:
        # fa3 refuses masks, so fa2 takes them on every card.
        return "fa2"
    measured = _CUDNN_MEASURED_FASTER.get(capability)
    if (
        options.prefill == "auto"
        and measured is not None
        and batch >= measured[0]
        and num_keys <= measured[1]
        and head_dim in cudnn.HEAD_DIMS
        and _is_default_scale(softmax_scale, head_dim)
        and cudnn.device_refusal(device_index) is None
        and machine.has_module("cudnn")
    ):
        return "cudnn"
    return "fa3" if machine.is_hopper(capability) else "fa2"


def _is_default_scale(softmax_scale: float | None, head_dim: int) -> bool:
    return softmax_scale is None or math.isclose(softmax_scale, head_dim**-0.5, rel_tol=1e-6)


def _announce(options: PrefillOptions, kernel: str, capability: tuple[int, int], is_batch: bool, masked: bool) -> None:
    if options.prefill == "auto":
        inform_once(
            f"FlashInfer attention: {kernel} on compute capability {capability[0]}.{capability[1]}"
            f"{', in float8' if options.fp8 else ''}{', masked' if masked else ''}"
            f"{', batches' if is_batch else ', one item'}."
        )
    if is_batch and kernel != "cudnn" and options.prefill == "single":
        warn_once(
            "FlashInfer's single prefill runs once per batch item; `prefill='cudnn'` takes a whole batch in one call."
        )

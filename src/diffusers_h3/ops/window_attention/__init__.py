"""Softmax attention over a window: a union of dense attentions, one per group of rows with equal key sets.

`"sdpa"` gathers one group's keys after another and runs anywhere, with gradients. The kernel backends are inference
only and gather nothing: every group attends to its own contiguous slice of the keys, all rows attend to the keys the
groups share, and the two results are merged by their log-sum-exp.
"""

from collections.abc import Sequence

import torch

from .kernels import KERNELS
from .reference import DenseAttention, RowRange, gathered_attention
from .slices import slice_groups


BACKENDS = ("sdpa", *KERNELS)

__all__ = ["BACKENDS", "RowRange", "window_attention"]


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Sequence[tuple[Sequence[RowRange], Sequence[RowRange]]],
    attention: DenseAttention,
    gate: torch.Tensor | None = None,
    backend: str = "auto",
    fp8: bool = False,
) -> torch.Tensor:
    """Attend group by group and gate the result.

    Args:
        query, key, value (`torch.Tensor`): ``[B, T, H, D]``.
        groups (`Sequence`): ``(query ranges, key ranges)`` pairs of half-open row ranges, as tuples. Every row must be
            a query of exactly one group.
        attention (`Callable`): Dense, unmasked attention on ``[B, L, H, D]`` tensors, used by `"sdpa"`.
        gate (`torch.Tensor`, *optional*): ``[B, T, H]``; its sigmoid multiplies the output.
        backend (`str`): One of `BACKENDS`, or `"auto"`: the fastest kernel present for CUDA inference, else `"sdpa"`.
        fp8 (`bool`): Quantise query, key and value per head to e4m3 (FlashInfer on Hopper or newer only).

    Returns:
        `torch.Tensor`: ``[B, T, H, D]`` in the dtype of `query`.

    Raises:
        ValueError: Where the groups do not cover every row exactly once, and where a kernel backend that was named
            cannot run here, or not in fp8.
    """
    if fp8 and backend == "sdpa":
        raise ValueError("fp8 attention runs on the 'flashinfer' window backend only, not on 'sdpa'.")
    needs_grad = torch.is_grad_enabled() and any(rows.requires_grad for rows in (query, key, value))
    if backend == "sdpa" or (backend == "auto" and not fp8 and (needs_grad or not query.is_cuda)):
        output = gathered_attention(query, key, value, groups, attention)
        return output if gate is None else output * torch.sigmoid(gate).unsqueeze(-1).to(output.dtype)
    if needs_grad:
        raise ValueError(f"The {backend!r} window backend is inference only: use `torch.no_grad()`, or `'sdpa'`.")
    from .sliced import sliced_attention

    window = slice_groups(tuple(groups), query.shape[1])
    scales = None
    dtype = query.dtype
    if fp8:
        from ..prefill.quantize import quantize_per_head

        (query, key, value), scales = zip(*(quantize_per_head(rows) for rows in (query, key, value)), strict=True)
    return sliced_attention(query, key, value, gate, scales, window, backend, dtype)

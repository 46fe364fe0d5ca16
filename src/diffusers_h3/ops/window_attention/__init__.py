"""Softmax attention over a window: a union of dense attentions, one per group of rows with equal key sets.

`"sdpa"` gathers one group's keys after another and runs anywhere, with gradients. The kernel backends are inference
only and gather nothing: every group attends to its own contiguous slice of the keys, all rows attend to the keys the
groups share, and the two results are merged by their log-sum-exp.
"""

from collections.abc import Callable

import torch

from .kernels import KERNELS
from .reference import DenseAttention, Groups, Range, check_cover, gathered_attention, place
from .slices import SlicedWindow, slice_groups


BACKENDS = ("sdpa", *KERNELS)

__all__ = ["BACKENDS", "window_attention"]


def window_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Groups,
    attention: DenseAttention,
    gate: torch.Tensor | None = None,
    backend: str = "auto",
    fp8: bool = False,
    rows: Callable[[int, int], Range] = lambda start, stop: (start, stop),
) -> torch.Tensor:
    """Attend group by group and gate the result.

    Args:
        query, key, value (`torch.Tensor`): ``[B, T, H, D]``.
        groups (`Sequence`): ``(query ranges, key ranges)`` pairs of half-open ranges, as tuples. Every row must be a
            query of exactly one group.
        attention (`Callable`): Dense, unmasked attention on ``[B, L, H, D]`` tensors, used by `"sdpa"`.
        gate (`torch.Tensor`, *optional*): ``[B, T, H]``; its sigmoid multiplies the output.
        backend (`str`): One of `BACKENDS`, or `"auto"`: the fastest kernel present for CUDA inference in half
            precision, else `"sdpa"`.
        fp8 (`bool`): Quantise query, key and value per head to e4m3 (FlashInfer on Hopper only).
        rows (`Callable`): Returns the rows ``(start, stop)`` of a range of `groups`, which are rows by default.

    Returns:
        `torch.Tensor`: ``[B, T, H, D]`` in the dtype of `query`.

    Raises:
        ValueError: Where the groups do not cover every row exactly once, and where a kernel backend that was named
            cannot run here, or not in fp8.
    """
    if fp8 and backend == "sdpa":
        raise ValueError("fp8 attention runs on the 'flashinfer' window backend only, not on 'sdpa'.")
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    beyond_kernels = needs_grad or not query.is_cuda or query.dtype == torch.float32
    if backend == "sdpa" or (backend == "auto" and not fp8 and beyond_kernels):
        output = gathered_attention(query, key, value, groups, attention, rows)
        return output if gate is None else output * torch.sigmoid(gate).unsqueeze(-1).to(output.dtype)
    if needs_grad:
        raise ValueError(f"The {backend!r} window backend is inference only: use `torch.no_grad()`, or `'sdpa'`.")
    from .sliced import sliced_attention

    check_cover(groups, rows, query.shape[1])
    window = slice_groups(tuple(groups))
    # Queries and slices are pairs, and a slice may be empty; among the others an empty range is nothing.
    pairs = [[rows(*bounds) for bounds in ranges] for ranges in (window.queries, window.slices)]
    window = SlicedWindow(place(window.dense, rows), place(window.shared, rows), *pairs)
    scales = None
    dtype = query.dtype
    if fp8:
        from ..prefill.quantize import quantize_per_head

        (query, key, value), scales = zip(*(quantize_per_head(part) for part in (query, key, value)), strict=True)
    return sliced_attention(query, key, value, gate, scales, window, backend, dtype)

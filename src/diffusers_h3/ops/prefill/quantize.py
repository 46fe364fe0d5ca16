"""Quantisation of queries, keys and values to float8 e4m3 with one scale per batch item and head."""

import torch


_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_per_head(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and their scales, `rows ≈ values * scales`.

    Args:
        rows (`torch.Tensor`): float16 or bfloat16 ``[B, S, H, D]``.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: float8_e4m3fn ``[B, S, H, D]`` and float32 ``[B, H]``.
    """
    # The infinity norm is max |x| in one pass, without an |x| of the whole input.
    largest = torch.linalg.vector_norm(rows, ord=float("inf"), dim=(1, 3), dtype=torch.float32)
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    # A quotient a rounding above the largest value still rounds to it, so nothing is clamped.
    return (rows.float() / scales[:, None, :, None]).to(torch.float8_e4m3fn), scales

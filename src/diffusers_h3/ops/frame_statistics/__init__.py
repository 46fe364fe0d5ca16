"""Per-frame second-order statistics of keys and values: what the delta rule writes into its state."""

import torch

from ..precision import without_autocast
from ..triton_support import use_triton
from . import reference


__all__ = ["frame_statistics"]


@without_autocast
def frame_statistics(
    key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, gram_fp32: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum ``β·k·kᵀ`` and ``β·v·kᵀ`` over the rows of every frame.

    Args:
        key (`torch.Tensor`): ``[B, F, S, H, D]``.
        value (`torch.Tensor`): ``[B, F, S, H, Dv]``.
        beta (`torch.Tensor`): ``[B, F, S, H]``, the write strength of every row.
        gram_fp32 (`bool`): Form the Gram matrix from float32 products. It is inverted later; `False` forms it from
            products in the dtype of `key`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The Gram matrices ``A [B, F, H, D, D]`` and the cross moments
        ``B [B, F, H, Dv, D]``, both float32 (float64 for float64 inputs).
    """
    if use_triton(key, value, beta) and key.shape == value.shape and key.dtype == value.dtype:
        from . import triton

        return triton.frame_statistics(key, value, beta, gram_fp32)
    return reference.frame_statistics(key, value, beta, gram_fp32)

"""Frame statistics in plain torch."""

import torch

from ..precision import accumulation_dtype


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
    dtype = accumulation_dtype(key.dtype)
    # Square roots keep A symmetric to the last bit, which the Cholesky factorisation relies on.
    root = beta.to(dtype).sqrt().unsqueeze(-1)
    weighted_key = (key.to(dtype) * root).movedim(-2, 2)  # [B, F, H, S, D]
    weighted_value = (value.to(dtype) * root).movedim(-2, 2)
    gram_key = weighted_key if gram_fp32 else weighted_key.to(key.dtype)
    gram = (gram_key.transpose(-1, -2) @ gram_key).to(dtype)
    return gram, weighted_value.transpose(-1, -2) @ weighted_key

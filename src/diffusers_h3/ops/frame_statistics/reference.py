"""Frame statistics in plain torch."""

import torch

from ..precision import accumulation_dtype


def frame_statistics(
    key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, gram_fp32: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``A [B, F, H, D, D]`` and ``B [B, F, H, Dv, D]``; the package's function says what of."""
    dtype = accumulation_dtype(key.dtype)
    # Square roots keep A symmetric to the last bit, which the Cholesky factorisation relies on.
    root = beta.to(dtype).sqrt().unsqueeze(-1)
    weighted_key = (key.to(dtype) * root).movedim(-2, 2)  # [B, F, H, S, D]
    weighted_value = (value.to(dtype) * root).movedim(-2, 2)
    gram_key = weighted_key if gram_fp32 else weighted_key.to(key.dtype)
    gram = (gram_key.transpose(-1, -2) @ gram_key).to(dtype)
    return gram, weighted_value.transpose(-1, -2) @ weighted_key

"""Depthwise short convolutions over space and time that turn projections into features of the linear branch."""

import torch

from ..precision import without_autocast
from ..triton_support import use_triton
from . import reference
from .reference import spatial_conv


__all__ = ["spatial_conv", "temporal_features"]


@without_autocast
def temporal_features(
    features: torch.Tensor, weight: torch.Tensor | None, num_heads: int, normalize: bool, eps: float = 1e-6
) -> torch.Tensor:
    """Convolve over frames (depthwise, zero padded), apply SiLU and, for queries and keys, the L2 norm per head.

    Args:
        features (`torch.Tensor`): ``[B, F, S, H·D]``.
        weight (`torch.Tensor`, *optional*): ``[H·D, 1, K]`` with odd ``K``; `None` skips the convolution.
        num_heads (`int`): ``H``.
        normalize (`bool`): Whether to divide every head by its L2 norm.
        eps (`float`): Added to the squared norm.

    Returns:
        `torch.Tensor`: ``[B, F, S, H, D]`` in the dtype of `features`, computed in float32 (float64 for float64).
    """
    if use_triton(features, weight) and (weight is None or weight.shape[-1] == 5):
        from . import triton

        return triton.temporal_features(features, weight, num_heads, normalize, eps)
    return reference.temporal_features(features, weight, num_heads, normalize, eps)

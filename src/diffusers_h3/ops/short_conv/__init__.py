"""Features of the linear branch: depthwise convolutions over space and time, SiLU and a norm per head."""

import torch

from ..precision import without_autocast
from ..triton_support import use_triton
from . import reference


__all__ = ["convolved_features", "pointwise_features"]


@without_autocast
def convolved_features(
    features: torch.Tensor,
    spatial: torch.Tensor,
    temporal: torch.Tensor,
    grid: tuple[int, int],
    num_heads: int,
    normalize: bool,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Convolve over a frame's grid, then over frames (depthwise, zero padded), and apply `pointwise_features`.

    Args:
        features (`torch.Tensor`): ``[B, F, S, H·D]`` with rows in raster order, ``S = grid[0]·grid[1]``.
        spatial (`torch.Tensor`): ``[H·D, 1, K, K]`` with odd ``K``.
        temporal (`torch.Tensor`): ``[H·D, 1, K]`` with odd ``K``.
        grid (`tuple[int, int]`): Rows and columns of a frame.
        num_heads (`int`): ``H``.
        normalize (`bool`): Whether to divide every head by its L2 norm.
        eps (`float`): Added to the squared norm.

    Returns:
        `torch.Tensor`: ``[B, F, S, H, D]`` in the dtype of `features`. The reference also rounds to it between the
        two convolutions; all else is float32 (float64 for float64).
    """
    five_taps = spatial.shape[-2:] == (5, 5) and temporal.shape[-1] == 5
    if use_triton(features, spatial, temporal) and five_taps:
        from . import triton

        return triton.convolved_features(features, spatial, temporal, grid, num_heads, normalize, eps)
    return reference.convolved_features(features, spatial, temporal, grid, num_heads, normalize, eps)


@without_autocast
def pointwise_features(features: torch.Tensor, num_heads: int, normalize: bool, eps: float = 1e-6) -> torch.Tensor:
    """Apply SiLU and, for queries and keys, the L2 norm per head: ``[B, F, S, H·D]`` to ``[B, F, S, H, D]``.

    Arguments and dtypes are those of `convolved_features`.
    """
    if use_triton(features):
        from . import triton

        return triton.pointwise_features(features, num_heads, normalize, eps)
    return reference.pointwise_features(features, num_heads, normalize, eps)

"""Short convolutions in plain torch."""

import torch
import torch.nn.functional as F

from ..precision import accumulation_dtype


def spatial_conv(features: torch.Tensor, weight: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Convolve every frame with a depthwise, zero-padded spatial kernel.

    Args:
        features (`torch.Tensor`): ``[B, F, S, C]`` with rows in raster order, ``S = grid[0]·grid[1]``.
        weight (`torch.Tensor`): ``[C, 1, K, K]`` with odd ``K``.
        grid (`tuple[int, int]`): Rows and columns of a frame.

    Returns:
        `torch.Tensor`: ``[B, F, S, C]``, contiguous, in the dtype of `features`.
    """
    images = features.flatten(0, 1).unflatten(1, grid).permute(0, 3, 1, 2)  # a channels-last view, no copy
    images = F.conv2d(images, weight.to(images.dtype), padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return images.permute(0, 2, 3, 1).reshape(features.shape)


def temporal_features(
    features: torch.Tensor, weight: torch.Tensor | None, num_heads: int, normalize: bool, eps: float = 1e-6
) -> torch.Tensor:
    """Return the features ``[B, F, S, H, D]``; the package's function says what of."""
    states = features.to(accumulation_dtype(features.dtype))
    if weight is not None:
        weight = weight.to(states.dtype)
        num_frames, taps = features.shape[1], weight.shape[-1]
        padded = F.pad(states, (0, 0, 0, 0, taps // 2, taps // 2))
        states = sum(padded[:, tap : tap + num_frames] * weight[:, 0, tap] for tap in range(taps))
    states = F.silu(states).unflatten(-1, (num_heads, -1))
    if normalize:
        states = states * torch.rsqrt(states.square().sum(-1, keepdim=True) + eps)
    return states.to(features.dtype)

"""Short convolutions and the feature map in plain torch."""

import torch
import torch.nn.functional as F

from ..precision import accumulation_dtype


def convolved_features(
    features: torch.Tensor,
    spatial: torch.Tensor,
    temporal: torch.Tensor,
    grid: tuple[int, int],
    num_heads: int,
    normalize: bool,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Return the features ``[B, F, S, H, D]``; the package's function says what of."""
    states = temporal_conv(spatial_conv(features, spatial, grid), temporal)
    return pointwise_features(states, num_heads, normalize, eps).to(features.dtype)


def spatial_conv(features: torch.Tensor, weight: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Convolve every frame: ``[B, F, S, C]`` with ``[C, 1, K, K]`` to ``[B, F, S, C]`` in the same dtype."""
    images = features.flatten(0, 1).unflatten(1, grid).permute(0, 3, 1, 2)  # a channels-last view, no copy
    images = F.conv2d(images, weight.to(images.dtype), padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return images.permute(0, 2, 3, 1).reshape(features.shape)


def temporal_conv(features: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Convolve over frames: ``[B, F, S, C]`` with ``[C, 1, K]`` to ``[B, F, S, C]`` in the accumulation dtype."""
    states = features.to(accumulation_dtype(features.dtype))
    weight = weight.to(states.dtype)
    num_frames, taps = features.shape[1], weight.shape[-1]
    padded = F.pad(states, (0, 0, 0, 0, taps // 2, taps // 2))
    return sum(padded[:, tap : tap + num_frames] * weight[:, 0, tap] for tap in range(taps))


def pointwise_features(features: torch.Tensor, num_heads: int, normalize: bool, eps: float = 1e-6) -> torch.Tensor:
    """Return ``[B, F, S, H, D]`` of ``[B, F, S, H·D]``; the package's function says what."""
    states = F.silu(features.to(accumulation_dtype(features.dtype))).unflatten(-1, (num_heads, -1))
    if normalize:
        states = states * torch.rsqrt(states.square().sum(-1, keepdim=True) + eps)
    return states.to(features.dtype)

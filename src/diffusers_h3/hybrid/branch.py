"""The linear branch's modules, under the names a VDN-H3 release stores them by.

Weights are only ever touched inside the `forward` of the module that owns them: offload and quantization hooks fire
on `forward`, so a weight read by attribute would stay on another device.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..ops.delta_rule import delta_factors
from ..ops.frame_statistics import frame_statistics
from ..ops.linear_state import linear_states, readout
from ..ops.precision import accumulation_dtype
from ..ops.short_conv import spatial_conv, temporal_features
from .config import HybridAttentionConfig
from .layout import BranchPlan, SequenceLayout, plan_branch


SHORT_CONV_TAPS = 5
READOUT_NORM_EPS = 1e-6


class SoftmaxGate(nn.Module):
    """Per-head gate on the window's output before its sigmoid: ``[B, T, C]`` to ``[B, T, H]``."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.up = nn.Linear(hidden_size, num_heads, bias=True)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.up(hidden_states)


class FrameDecay(nn.Module):
    """The decay of the state, per frame and key channel, from the mean of a frame's rows.

    ``log α = −exp(A_log)·softplus(up(down(mean)) + dt_bias)``. `A_log` and `dt_bias` stay float32.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(num_heads))
        self.dt_bias = nn.Parameter(torch.zeros(num_heads * head_dim))
        self.down = nn.Linear(hidden_size, head_dim, bias=False)
        self.up = nn.Linear(head_dim, num_heads * head_dim, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map frames of rows ``[B, F, S, C]`` to ``log α [B, F, H, D]`` in float32 (float64 for float64)."""
        dtype = accumulation_dtype(hidden_states.dtype)
        mean = hidden_states.mean(dim=2, dtype=dtype).to(hidden_states.dtype)
        step = F.softplus(self.up(self.down(mean)).to(dtype) + self.dt_bias.to(dtype))
        return -self.A_log.to(dtype).exp().unsqueeze(-1) * step.unflatten(-1, (self.A_log.shape[0], -1))


class OutputGate(nn.Module):
    """Low-rank gate on the readout before its sigmoid: ``[..., C]`` to ``[..., H·D]``."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.down = nn.Linear(hidden_size, head_dim, bias=False)
        self.up = nn.Linear(head_dim, num_heads * head_dim, bias=True)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(hidden_states))


class SpatialConv(nn.Module):
    """Depthwise convolution over a frame's patch grid, weight ``[C, 1, 5, 5]``."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, SHORT_CONV_TAPS, SHORT_CONV_TAPS))
        nn.init.dirac_(self.weight, groups=channels)

    def forward(self, features: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        return spatial_conv(features, self.weight, grid)


class TemporalConv(nn.Module):
    """Depthwise convolution over frames, then the feature map, weight ``[C, 1, 5]``."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, SHORT_CONV_TAPS))
        nn.init.dirac_(self.weight, groups=channels)

    def forward(self, features: torch.Tensor, num_heads: int, normalize: bool) -> torch.Tensor:
        return temporal_features(features, self.weight, num_heads, normalize)


class ShortConv(nn.Module):
    """The short convolutions of the chosen projections, `<name>_sp` over space and `<name>_tm` over time."""

    def __init__(self, channels: int, targets: tuple[str, ...]):
        super().__init__()
        self.targets = targets
        for name in targets:
            self.add_module(f"{name}_sp", SpatialConv(channels))
            self.add_module(f"{name}_tm", TemporalConv(channels))

    def forward(self, name: str, features: torch.Tensor, grid: tuple[int, int], num_heads: int) -> torch.Tensor:
        """Turn the projection `name` into features: ``[B, F, S, H·D]`` to ``[B, F, S, H, D]``."""
        normalize = name != "v"
        if name not in self.targets:
            return temporal_features(features, None, num_heads, normalize)
        features = self.get_submodule(f"{name}_sp")(features, grid)
        return self.get_submodule(f"{name}_tm")(features, num_heads, normalize)


class GatedReadout(nn.Module):
    """Read the states, RMS-normalise over a head's channels and gate; owns the norm's weight ``[D]``."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))

    def forward(self, states: torch.Tensor, query: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return readout(states, query, gate, self.weight, READOUT_NORM_EPS)


class VideoDeltaAttention(nn.Module):
    """Carry what the window cannot see: a gated delta rule over the frames of a clip, in both directions.

    Source: VDN-H3, `linear_branch` of an OpenVDN release.

    Args:
        hidden_size (`int`): Channels ``C`` of the attention input.
        num_heads (`int`): ``H``.
        config (`HybridAttentionConfig`): The layer's configuration; its `linear_head_dim` is ``D``.
    """

    def __init__(self, hidden_size: int, num_heads: int, config: HybridAttentionConfig):
        super().__init__()
        head_dim = config.linear_head_dim
        self.config = config
        self.num_heads = num_heads
        self.alpha = FrameDecay(hidden_size, num_heads, head_dim)
        self.beta_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.short_conv = ShortConv(num_heads * head_dim, config.short_conv_targets)
        self.norm = GatedReadout(head_dim)
        self.output_gate = OutputGate(hidden_size, num_heads, head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        folded: bool = True,
    ) -> torch.Tensor:
        """Run the branch over the frames of `plan_branch(config, layout)`.

        Args:
            hidden_states (`torch.Tensor`): ``[B, T, C]``, the attention input.
            query, key, value (`torch.Tensor`): ``[B, T, H·D]``, the projections before norm and rotary embedding.
            layout (`SequenceLayout`): The rows of the sequence.
            folded (`bool`): Fold the scans over window chunks, or walk them frame by frame.

        Returns:
            `torch.Tensor`: ``[B, rows, H·D]`` for the rows of the branch's frames; every other video row reads zero.

        Raises:
            ValueError: Where the window covers the clip, so that there is no frame to carry.
        """
        plan = plan_branch(self.config, layout)
        if plan.num_frames == 0:
            raise ValueError(f"The window covers all {layout.num_frames} frames: the linear branch is off.")
        initial = self._initial_state(hidden_states, key, value, layout)
        hidden_states, query, key, value = (_frames(rows, layout, plan) for rows in (hidden_states, query, key, value))
        log_alpha = self.alpha(hidden_states)
        key = self.short_conv("k", key, layout.grid, self.num_heads)
        value = self.short_conv("v", value, layout.grid, self.num_heads)
        transition, update = self._factors(hidden_states, key, value, log_alpha.exp())
        del key, value
        states = linear_states(
            transition, update, initial, log_alpha, plan.prefix, plan.suffix, self.config.bridge, folded
        )
        del transition, update
        query = self.short_conv("q", query, layout.grid, self.num_heads)
        return self.norm(states, query, self.output_gate(hidden_states)).flatten(1, 2)

    def _factors(
        self,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        alpha: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        beta = torch.sigmoid(self.beta_proj(hidden_states))
        gram, cross = frame_statistics(key, value, beta, self.config.a_fp32)
        return delta_factors(gram, cross, alpha, self.config.delta_rule, rows=key.shape[2])

    def _initial_state(
        self, hidden_states: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: SequenceLayout
    ) -> torch.Tensor:
        """Return ``[B, H, D, D]``: half of what the text rows write into an empty state, or zeros.

        Both scans start from it, so a frame that reads text from both sides reads it once in full.
        """
        if not self.config.enable_text_state or layout.text_len == 0:
            head_dim = self.config.linear_head_dim
            shape = (hidden_states.shape[0], self.num_heads, head_dim, head_dim)
            return hidden_states.new_zeros(shape, dtype=accumulation_dtype(hidden_states.dtype))
        # The text is one frame of rows that no convolution touches.
        text, key, value = (rows[:, : layout.text_len].unsqueeze(1) for rows in (hidden_states, key, value))
        key = temporal_features(key, None, self.num_heads, normalize=True)
        value = temporal_features(value, None, self.num_heads, normalize=False)
        _, update = self._factors(text, key, value, None)
        return update.squeeze(1) * 0.5


def _frames(rows: torch.Tensor, layout: SequenceLayout, plan: BranchPlan) -> torch.Tensor:
    """View the rows of the branch's frames as ``[B, F, S, C]``."""
    start, stop = layout.frame_range(plan.first_frame, plan.first_frame + plan.num_frames)
    return rows[:, start:stop].unflatten(1, (plan.num_frames, layout.rows_per_frame))

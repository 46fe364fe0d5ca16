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
from ..ops.short_conv import convolved_features, pointwise_features
from .config import HybridAttentionConfig
from .layout import BranchPlan, SequenceLayout, plan_branch
from .parallel import HeadSplit


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

    def forward(self, mean: torch.Tensor) -> torch.Tensor:
        """Map the frames' means ``[B, F, C]`` to ``log α [B, F, H, D]`` in float32 (float64 for float64)."""
        dtype = accumulation_dtype(mean.dtype)
        step = F.softplus(self.up(self.down(mean)).to(dtype) + self.dt_bias.to(dtype))
        return -self.A_log.to(dtype).exp().unsqueeze(-1) * step.unflatten(-1, (self.A_log.shape[0], -1))


class HeadLinear(nn.Linear):
    """A linear layer that can compute a range of its output channels alone."""

    def forward(self, states: torch.Tensor, channels: slice = slice(None)) -> torch.Tensor:
        return F.linear(states, self.weight[channels], self.bias[channels])


class OutputGate(nn.Module):
    """Low-rank gate on the readout before its sigmoid, `up` after `down`: ``[..., C]`` to ``[..., H·D]``."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.down = nn.Linear(hidden_size, head_dim, bias=False)
        self.up = HeadLinear(head_dim, num_heads * head_dim, bias=True)

    def forward(self, compressed: torch.Tensor, channels: slice) -> torch.Tensor:
        """Expand what `down` returned, ``[..., D]``, to a range of the channels."""
        if type(self.up) is HeadLinear:
            return self.up(compressed, channels)
        # What wraps or replaces the layer, an adapter or a quantised one, knows nothing of ranges.
        return self.up(compressed)[..., channels]


class DepthwiseTaps(nn.Module):
    """The taps of one depthwise convolution, weight ``[C, 1, *size]``.

    One operator takes the taps of two modules, and hooks fire on `forward` only: it returns a copy, which stays when a
    hook moves the weight away again.
    """

    def __init__(self, channels: int, *size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, *size))
        nn.init.dirac_(self.weight, groups=channels)

    def forward(self, channels: slice = slice(None)) -> torch.Tensor:
        return self.weight[channels].clone()


class ShortConv(nn.Module):
    """The short convolutions of the chosen projections, `<name>_sp` over space and `<name>_tm` over time."""

    def __init__(self, channels: int, targets: tuple[str, ...]):
        super().__init__()
        self.targets = targets
        for name in targets:
            self.add_module(f"{name}_sp", DepthwiseTaps(channels, SHORT_CONV_TAPS, SHORT_CONV_TAPS))
            self.add_module(f"{name}_tm", DepthwiseTaps(channels, SHORT_CONV_TAPS))

    def forward(self, name: str, features: torch.Tensor, grid: tuple[int, int], split: HeadSplit) -> torch.Tensor:
        """Turn the projection `name` of the rank's heads into features: ``[B, F, S, H·D]`` to ``[B, F, S, H, D]``."""
        normalize = name != "v"
        if name not in self.targets:
            return pointwise_features(features, split.num_heads, normalize)
        channels = split.channels(features.shape[-1] // split.num_heads)
        spatial, temporal = (self.get_submodule(f"{name}_{kind}")(channels) for kind in ("sp", "tm"))
        return convolved_features(features, spatial, temporal, grid, split.num_heads, normalize)


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
        split: HeadSplit | None = None,
        folded: bool = True,
    ) -> torch.Tensor:
        """Run the branch over the frames of `plan_branch`, for this rank's ``H`` heads.

        Args:
            hidden_states (`torch.Tensor`): ``[B, rows, C]``, the attention input at this rank's rows.
            query, key, value (`torch.Tensor`): ``[B, T, H·D]``, the projections before norm and rotary embedding.
            layout (`SequenceLayout`): The rows of the sequence.
            split (`HeadSplit`, *optional*): The rank's rows and heads; by default all.
            folded (`bool`): Fold the scans over window chunks, or walk them frame by frame.

        Returns:
            `torch.Tensor`: ``[B, rows, H·D]`` for the rows of the branch's frames; every other video row reads zero.

        Raises:
            ValueError: Where the window covers the clip, so that there is no frame to carry.
        """
        plan = plan_branch(self.config, layout.num_frames)
        if plan.num_frames == 0:
            raise ValueError(f"The window covers all {layout.num_frames} frames: the linear branch is off.")
        split = split or HeadSplit.of(None, layout.seq_len, self.num_heads)
        first_row, _ = layout.rows(plan.first_frame, plan.first_frame)
        # All transfers begin here and run beside what needs none of them.
        mean = split.frame_means(hidden_states, first_row, plan.num_frames, layout.rows_per_frame)
        beta = split.to_heads(torch.sigmoid(self.beta_proj(hidden_states)))
        compressed = split.gather(self.output_gate.down(hidden_states))
        beta = beta()
        initial = self._initial_state(key, value, beta, layout, split)
        query, key, value, beta = (_frames(rows, layout, plan) for rows in (query, key, value, beta))
        log_alpha = self.alpha(mean())[:, :, split.heads]
        key = self.short_conv("k", key, layout.grid, split)
        value = self.short_conv("v", value, layout.grid, split)
        transition, update = self._factors(key, value, beta, log_alpha.exp())
        del key, value
        states = linear_states(
            transition, update, initial, log_alpha, plan.prefix, plan.suffix, self.config.bridge, folded
        )
        del transition, update
        query = self.short_conv("q", query, layout.grid, split)
        gate = self.output_gate(_frames(compressed(), layout, plan), split.channels(self.config.linear_head_dim))
        return self.norm(states, query, gate).flatten(1, 2)

    def _factors(
        self, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gram, cross = frame_statistics(key, value, beta, self.config.a_fp32)
        return delta_factors(gram, cross, alpha, self.config.delta_rule, rows=key.shape[2])

    def _initial_state(
        self, key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, layout: SequenceLayout, split: HeadSplit
    ) -> torch.Tensor:
        """Return ``[B, H, D, D]``: half of what the text rows write into an empty state, or zeros.

        Both scans start from it, so a frame that reads text from both sides reads it once in full.
        """
        if not self.config.enable_text_state or layout.text_len == 0:
            head_dim = self.config.linear_head_dim
            shape = (key.shape[0], split.num_heads, head_dim, head_dim)
            return key.new_zeros(shape, dtype=accumulation_dtype(key.dtype))
        # The text is one frame of rows that no convolution touches.
        key, value, beta = (rows[:, : layout.text_len].unsqueeze(1) for rows in (key, value, beta))
        key = pointwise_features(key, split.num_heads, normalize=True)
        value = pointwise_features(value, split.num_heads, normalize=False)
        _, update = self._factors(key, value, beta, None)
        return update.squeeze(1) * 0.5


def _frames(rows: torch.Tensor, layout: SequenceLayout, plan: BranchPlan) -> torch.Tensor:
    """View the rows of the branch's frames as ``[B, F, S, C]``."""
    start, stop = layout.rows(plan.first_frame, plan.first_frame + plan.num_frames)
    return rows[:, start:stop].unflatten(1, (plan.num_frames, layout.rows_per_frame))

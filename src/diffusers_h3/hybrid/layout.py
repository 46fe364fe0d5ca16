"""Where the rows of a packed MiniMax-H3 sequence are, and which frames see which."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops.plans import cached_plan
from .config import HybridAttentionConfig


# Half-open, in latent frames of the target video. Frame −1 stands for all rows before it, which are global: plans are
# then the same for every prompt length, and `SequenceLayout.rows` places them in a sequence.
FrameRange = tuple[int, int]
GLOBAL: FrameRange = (-1, 0)


class AttentionGroup(NamedTuple):
    """Queries that share one key set, both as sorted, disjoint frame ranges that do not touch.

    One dense, unmasked attention per group is the whole window, so no mask is ever built.
    """

    queries: tuple[FrameRange, ...]
    keys: tuple[FrameRange, ...]


@dataclass(frozen=True)
class BranchPlan:
    """What the linear branch runs over, in frames counted from its own first frame.

    Attributes:
        first_frame (`int`): The clip's frame that is the branch's frame 0 (1 where the anchors are dropped).
        num_frames (`int`): Frames of the branch; 0 where nothing is left to carry.
        prefix (`tuple[int, ...]`): Per frame `t`, the last frame whose state the forward scan hands to it (`lo − 1`);
            negative where the window reaches past the start.
        suffix (`tuple[int, ...]`): Per frame, the first frame of the backward scan it reads (`hi + 1`); `num_frames`
            or more where the window reaches past the end.
    """

    first_frame: int
    num_frames: int
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


@dataclass(frozen=True)
class SequenceLayout:
    """The row layout of one packed request: `[text | keyframe conditions | audio | video]`.

    Rows before the target video are global: they see, and are seen by, every row.

    Attributes:
        seq_len (`int`): Rows of the packed sequence.
        text_len (`int`): Text rows, which come first.
        video_start (`int`): First row of the target video, which comes last.
        num_frames (`int`): Latent frames of the target video.
        grid (`tuple[int, int]`): Rows and columns of a latent frame's patch grid.

    Examples:
        >>> from diffusers_h3 import SequenceLayout
        >>> layout = SequenceLayout(seq_len=70, text_len=6, video_start=10, num_frames=5, grid=(3, 4))
        >>> layout.rows_per_frame
        12
        >>> layout.rows(1, 3)
        (22, 46)
    """

    seq_len: int
    text_len: int
    video_start: int
    num_frames: int
    grid: tuple[int, int]

    def __post_init__(self):
        if min(self.num_frames, *self.grid) < 1:
            raise ValueError(
                f"A layout needs at least one frame, row and column, got {self.num_frames} frames of {self.grid}."
            )
        video_stop = self.video_start + self.num_frames * self.rows_per_frame
        if not 0 <= self.text_len <= self.video_start or video_stop != self.seq_len:
            raise ValueError(
                "The text comes first and the target video last, which these are not: "
                f"text_len={self.text_len}, video rows {self.video_start}..{video_stop}, seq_len={self.seq_len}."
            )

    @property
    def rows_per_frame(self) -> int:
        """Rows of one latent frame."""
        return self.grid[0] * self.grid[1]

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the row range of a frame range; both are half open."""
        return (
            0 if start < 0 else self.video_start + start * self.rows_per_frame,
            self.video_start + stop * self.rows_per_frame,
        )

    @classmethod
    def from_indices(
        cls, position_ids: torch.Tensor, video_indices: torch.Tensor, text_indices: torch.Tensor
    ) -> "SequenceLayout":
        """Derive the layout from the tensors `MiniMaxH3Transformer3DModel.forward` takes.

        The target video is the trailing run of `video_indices` that is contiguous in the sequence and strictly
        increasing in `(t, h, w)`: a keyframe's rows before it restart the grid at an earlier or equal coordinate, so
        they never join the run, whether or not audio rows stand between.

        Args:
            position_ids (`torch.Tensor` of shape `(seq_len, 3)`): The rotary `(t, h, w)` coordinates.
            video_indices (`torch.Tensor` of shape `(num_video_tokens,)`): Rows of keyframe conditions and video.
            text_indices (`torch.Tensor` of shape `(num_text_tokens,)`): Rows of the text.

        Raises:
            ValueError: Where the rows do not form a grid of equal frames, the text does not come first or the target
                video not last.

        Examples:
            >>> import torch
            >>> from diffusers_h3 import SequenceLayout
            >>> text = torch.zeros(4, 3)
            >>> video = torch.cartesian_prod(torch.arange(3.0), torch.arange(2.0), torch.arange(2.0))
            >>> SequenceLayout.from_indices(torch.cat([text, video]), torch.arange(4, 16), torch.arange(4))
            SequenceLayout(seq_len=16, text_len=4, video_start=4, num_frames=3, grid=(2, 2))
        """
        positions = position_ids.detach().to("cpu", torch.float64)
        video = video_indices.detach().cpu()
        text = text_indices.detach().cpu()
        if video.numel() == 0:
            raise ValueError("`video_indices` is empty: hybrid attention needs target video rows.")
        if not torch.equal(text, torch.arange(text.numel())):
            raise ValueError("Hybrid attention expects the text rows first: `text_indices` must be 0, 1, 2, ….")

        coordinates = positions[video]
        step = coordinates[1:] - coordinates[:-1]
        # The first non-zero axis decides a lexicographic comparison; rows of equal coordinates do not increase.
        first_axis = (step != 0).to(torch.int8).argmax(dim=1, keepdim=True)
        follows = (step.gather(1, first_axis)[:, 0] > 0) & (video[1:] == video[:-1] + 1)
        breaks = (~follows).nonzero()
        run_start = int(breaks[-1]) + 1 if breaks.numel() else 0
        coordinates = coordinates[run_start:]

        num_frames = int(coordinates[:, 0].unique_consecutive().numel())
        first_frame = coordinates[coordinates[:, 0] == coordinates[0, 0]]
        height = int(first_frame[:, 1].unique_consecutive().numel())
        width = int(first_frame[:, 2].unique().numel())
        if num_frames * height * width != coordinates.shape[0]:
            raise ValueError(
                f"The {coordinates.shape[0]} target video rows do not form {num_frames} frames of a "
                f"{height}×{width} grid."
            )
        if not torch.equal(coordinates[:, 1:], first_frame[:, 1:].repeat(num_frames, 1)):
            raise ValueError("Every frame of the target video must carry the same (h, w) grid.")
        return cls(
            seq_len=positions.shape[0],
            text_len=text.numel(),
            video_start=int(video[run_start]),
            num_frames=num_frames,
            grid=(height, width),
        )


def window_bounds(config: HybridAttentionConfig, frame: int) -> tuple[int, int]:
    """Return the first and last frame that `frame` sees, unclamped: they may lie outside the clip."""
    if config.chunk == 0:
        return frame - config.radius, frame + config.radius
    chunk = frame // config.chunk
    return (chunk - config.radius) * config.chunk, (chunk + config.radius + 1) * config.chunk - 1


def covers_clip(config: HybridAttentionConfig, num_frames: int) -> bool:
    """Whether every frame sees the whole clip, so that the layer is dense attention and the branch is off."""
    bounds = [window_bounds(config, frame) for frame in range(num_frames)]
    return all(low <= 0 and high >= num_frames - 1 for low, high in bounds)


@cached_plan
def plan_window(config: HybridAttentionConfig, num_frames: int) -> tuple[AttentionGroup, ...]:
    """Split the sequence into groups of queries with equal key sets.

    Returns:
        `tuple[AttentionGroup, ...]`: The queries that see everything first, then one group per distinct window in
        frame order. Every frame, and the global rows, are queries of exactly one group.
    """
    num_frames = _constant(num_frames)
    last = num_frames - 1
    everything = ((-1, num_frames),)
    dense = [GLOBAL]
    windows: dict[tuple[FrameRange, ...], list[FrameRange]] = {}
    for frame in range(num_frames):
        low, high = window_bounds(config, frame)
        keys = [GLOBAL, (max(low, 0), min(high, last) + 1)]
        if config.anchor_columns:
            keys += [(0, 1), (last, num_frames)]
        keys = _merge(keys)
        if keys == everything or (config.anchor_rows and frame in (0, last)):
            dense.append((frame, frame + 1))
        else:
            windows.setdefault(keys, []).append((frame, frame + 1))
    groups = [AttentionGroup(_merge(frames), keys) for keys, frames in windows.items()]
    return AttentionGroup(_merge(dense), everything), *groups


@cached_plan
def plan_branch(config: HybridAttentionConfig, num_frames: int) -> BranchPlan:
    """Return the frames the linear branch carries and the boundary states each of them reads."""
    num_frames = _constant(num_frames)
    first, stop = 0, num_frames
    if covers_clip(config, num_frames):
        stop = 0
    elif config.anchor_frames == "both":
        # Both anchors see and are seen by every row, so the branch has nothing to carry for them.
        first, stop = 1, num_frames - 1
    bounds = [window_bounds(config, frame) for frame in range(first, stop)]
    return BranchPlan(
        first_frame=first,
        num_frames=len(bounds),
        prefix=tuple(low - first - 1 for low, _ in bounds),
        suffix=tuple(high - first + 1 for _, high in bounds),
    )


def _constant(number: int) -> int:
    """Return the number; under `torch.compile`, where it may be a variable, make it a constant of the graph."""
    return len(range(number))


def _merge(ranges: list[FrameRange]) -> tuple[FrameRange, ...]:
    """Sort half-open ranges, drop empty ones and join those that touch or overlap."""
    merged: list[FrameRange] = []
    for start, stop in sorted(item for item in ranges if item[0] < item[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)

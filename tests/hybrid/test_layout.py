"""`SequenceLayout` from the tensors Diffusers packs, and the plans of window and branch made from it."""

from itertools import pairwise

import pytest
import torch

from diffusers_h3 import HybridAttentionConfig, SequenceLayout
from diffusers_h3.hybrid.layout import plan_branch, plan_window


KEYFRAMES = [(), ("first",), ("last",), ("first", "last")]
REQUESTS = [(0, 1, 0), (1, 2, 3), (7, 7, 0), (40, 12, 5), (2772, 47, 263)]
GRIDS = [(1, 1), (1, 4), (5, 1), (5, 2), (3, 4), (7, 3), (24, 42)]


@pytest.mark.parametrize("keyframes", KEYFRAMES, ids=lambda value: "+".join(value) or "t2va")
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(
    ("text", "num_frames", "audio"), [(0, 1, 0), (1, 2, 3), (7, 7, 0), (40, 12, 5), (2772, 47, 263)]
)
def test_layout_of_packed_requests(text, num_frames, audio, grid, keyframes, pack):
    rows = grid[0] * grid[1]
    video_start = text + len(keyframes) * rows + 2 * audio
    layout = SequenceLayout.from_indices(*pack(text, num_frames, grid, audio, keyframes))
    assert layout == SequenceLayout(
        seq_len=video_start + num_frames * rows,
        text_len=text,
        video_start=video_start,
        num_frames=num_frames,
        grid=grid,
    )


def test_full_size_layout(pack):
    """345 frames at 1344×768: 102 latent frames of 24×42, 575 audio latents per channel."""
    layout = SequenceLayout.from_indices(*pack(text=512, num_frames=102, grid=(24, 42), audio=575))
    assert layout == SequenceLayout(104_478, 512, 1662, 102, (24, 42))
    assert layout.rows_per_frame == 1008
    assert layout.rows(3, 5) == (1662 + 3024, 1662 + 5040)
    assert layout.rows(-1, 0) == (0, 1662)
    assert layout.rows(-1, 2) == (0, 1662 + 2016)
    assert layout.rows(-1, 102) == (0, 104_478)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layout_does_not_depend_on_the_dtype_of_positions(dtype, pack):
    position_ids, video_indices, text_indices = pack(
        text=900, num_frames=102, grid=(6, 7), audio=5, keyframes=("last",)
    )
    layout = SequenceLayout.from_indices(position_ids.to(dtype), video_indices, text_indices)
    assert layout == SequenceLayout(900 + 42 + 10 + 102 * 42, 900, 952, 102, (6, 7))


def _grid_positions(start, num_frames, grid):
    axes = [torch.arange(size, dtype=torch.float64) for size in (num_frames, *grid)]
    positions = torch.cartesian_prod(*axes).reshape(-1, 3)
    positions[:, 0] += start
    return positions


@pytest.mark.parametrize("keyframe_times", [(2.0,), (5.0,), (2.0, 5.0), (5.0, 2.0), (2.0, 2.0)])
@pytest.mark.parametrize("grid", [(1, 1), (2, 3)])
def test_keyframe_rows_never_join_a_video_they_touch(keyframe_times, grid):
    """By hand, without audio rows: conditions stand right before a video of times 2, 3, 4, 5."""
    text = torch.zeros(2, 3, dtype=torch.float64)
    text[:, 0] = torch.arange(2)
    conditions = [_grid_positions(time, 1, grid) for time in keyframe_times]
    position_ids = torch.cat([text, *conditions, _grid_positions(2.0, 4, grid)])
    rows = grid[0] * grid[1]
    layout = SequenceLayout.from_indices(position_ids, torch.arange(2, len(position_ids)), torch.arange(2))
    start = 2 + len(conditions) * rows
    assert layout == SequenceLayout(start + 4 * rows, 2, start, 4, grid)


def _request(text=2, num_frames=3, grid=(2, 3)):
    positions = torch.zeros(text, 3, dtype=torch.float64)
    positions[:, 0] = torch.arange(text)
    positions = torch.cat([positions, _grid_positions(float(text), num_frames, grid)])
    return positions, torch.arange(text, len(positions)), torch.arange(text)


def test_no_video_is_refused():
    position_ids, _, text_indices = _request()
    with pytest.raises(ValueError, match=r"`video_indices` is empty"):
        SequenceLayout.from_indices(position_ids, torch.empty(0, dtype=torch.long), text_indices)


@pytest.mark.parametrize("text_indices", [[1, 2], [1, 0], [0, 0], [18, 19]])
def test_text_that_does_not_come_first_is_refused(text_indices):
    position_ids, video_indices, _ = _request()
    with pytest.raises(ValueError, match="text rows first"):
        SequenceLayout.from_indices(position_ids, video_indices, torch.tensor(text_indices))


def test_an_incomplete_last_frame_is_refused():
    position_ids, video_indices, text_indices = _request()
    with pytest.raises(ValueError, match="17 target video rows do not form 3 frames of a 2×3 grid"):
        SequenceLayout.from_indices(position_ids[:-1], video_indices[:-1], text_indices)


def test_frames_of_another_grid_are_refused():
    position_ids, video_indices, text_indices = _request()
    position_ids[-6:, 1] += 0.5
    with pytest.raises(ValueError, match=r"same \(h, w\) grid"):
        SequenceLayout.from_indices(position_ids, video_indices, text_indices)


def test_a_gap_in_the_video_is_refused():
    """A missing row cuts the run; what is left is not a grid, so nothing is computed from it."""
    position_ids, video_indices, text_indices = _request(num_frames=3, grid=(2, 3))
    keep = torch.ones(len(video_indices), dtype=torch.bool)
    keep[8] = False
    with pytest.raises(ValueError, match="9 target video rows do not form 2 frames"):
        SequenceLayout.from_indices(position_ids, video_indices[keep], text_indices)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((20, 2, 2, 0, (2, 3)), "at least one frame"),
        ((20, 2, 2, 3, (0, 3)), "at least one frame"),
        ((20, 2, 2, 3, (2, -1)), "at least one frame"),
        ((21, 2, 2, 3, (2, 3)), "text comes first and the target video last"),
        ((19, 2, 2, 3, (2, 3)), "text comes first and the target video last"),
        ((20, 5, 2, 3, (2, 3)), "text comes first and the target video last"),
        ((20, -1, 2, 3, (2, 3)), "text comes first and the target video last"),
    ],
)
def test_impossible_layouts_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout(*fields)


# Plans

WINDOWS = [(0, 0), (0, 2), (1, 0), (1, 1), (3, 1), (5, 0), (5, 1), (5, 2)]


@pytest.mark.parametrize("anchor_frames", ["none", "columns", "rows", "both"])
@pytest.mark.parametrize(("chunk", "radius"), WINDOWS)
@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 6, 11, 23])
def test_window_plan_is_the_mask(num_frames, chunk, radius, anchor_frames, make_rows, window_mask):
    config = HybridAttentionConfig(chunk=chunk, radius=radius, anchor_frames=anchor_frames)
    seq_len = 5 + 2 * num_frames
    layout = SequenceLayout(seq_len, 3, 5, num_frames, (1, 2))
    groups = plan_window(config, num_frames)
    mask = torch.zeros(seq_len, seq_len, dtype=torch.bool)
    asked = torch.zeros(seq_len, dtype=torch.long)
    for queries, keys in groups:
        key_row = torch.zeros(seq_len, dtype=torch.bool)
        for start, stop in (layout.rows(*frames) for frames in keys):
            assert not key_row[start:stop].any()
            key_row[start:stop] = True
        for start, stop in (layout.rows(*frames) for frames in queries):
            asked[start:stop] += 1
            mask[start:stop] = key_row
    assert asked.tolist() == [1] * seq_len
    assert torch.equal(mask, window_mask(config, make_rows(3, 5, num_frames, (1, 2), seq_len)))
    # No two groups could be one, and ranges that touch are one range.
    assert len({keys for _, keys in groups}) == len(groups)
    for ranges in (ranges for group in groups for ranges in group):
        assert all(first[1] < second[0] for first, second in pairwise(ranges))


def test_full_size_window_plan():
    """345 frames at 1344×768: 21 window groups, 374 thousand gathered key rows, dense rows in a group apart."""
    layout = SequenceLayout(104_478, 512, 1662, 102, (24, 42))
    dense, *windows = plan_window(HybridAttentionConfig(), 102)
    assert len(windows) == 21
    assert dense == (((-1, 1), (101, 102)), ((-1, 102),))
    assert windows[0] == (((1, 5),), ((-1, 10), (101, 102)))
    assert windows[1] == (((5, 10),), ((-1, 15), (101, 102)))
    # The last chunk holds frames 100 and 101, of which 101 is an anchor.
    assert windows[-1] == (((100, 101),), ((-1, 1), (95, 102)))
    assert sum(stop - start for group in windows for start, stop in group.queries) == 100
    keys = [layout.rows(*frames) for group in windows for frames in group.keys]
    # Frames the chunks see: 11, 16, then 15 and both anchors for 17 chunks, 13, 8. Each sees the 1,662 global rows.
    assert sum(stop - start for start, stop in keys) == (11 + 16 + 17 * 17 + 13 + 8) * 1008 + 21 * 1662 == 374_598


@pytest.mark.parametrize(
    ("config", "num_frames", "expected"),
    [
        # Chunks of five, the anchors dropped: frame 0 of the branch is frame 1 of the clip.
        (
            {"chunk": 5, "radius": 1},
            13,
            (1, 11, (-7,) * 4 + (-2,) * 5 + (3,) * 2, (9,) * 4 + (14,) * 5 + (19,) * 2),
        ),
        (
            {"chunk": 5, "radius": 1, "anchor_frames": "columns"},
            12,
            (0, 12, (-6,) * 5 + (-1,) * 5 + (4,) * 2, (10,) * 5 + (15,) * 5 + (20,) * 2),
        ),
        (
            {"chunk": 0, "radius": 1, "anchor_frames": "none"},
            4,
            (0, 4, (-2, -1, 0, 1), (2, 3, 4, 5)),
        ),
        (
            {"chunk": 0, "radius": 1, "anchor_frames": "both"},
            5,
            (1, 3, (-2, -1, 0), (2, 3, 4)),
        ),
        ({"chunk": 5, "radius": 1}, 10, (0, 0, (), ())),
        ({"chunk": 0, "radius": 4, "anchor_frames": "rows"}, 5, (0, 0, (), ())),
        ({"chunk": 1, "radius": 0}, 2, (1, 0, (), ())),
        ({"chunk": 1, "radius": 0}, 1, (0, 0, (), ())),
    ],
)
def test_branch_plan(config, num_frames, expected):
    plan = plan_branch(HybridAttentionConfig(**config), num_frames)
    assert (plan.first_frame, plan.num_frames, plan.prefix, plan.suffix) == expected


def test_a_window_with_one_frame_outside_keeps_the_branch():
    """The branch is off only where every frame's bounds cover the clip, the ends' included."""
    config = HybridAttentionConfig(chunk=0, radius=3, anchor_frames="none")
    assert plan_branch(config, 4).num_frames == 0
    assert plan_branch(config, 5).num_frames == 5

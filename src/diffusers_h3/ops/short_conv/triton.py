"""Short convolutions, SiLU and L2 norm in one pass over the projection, and SiLU and norm alone."""

# ruff: noqa: RUF005 - Triton concatenates tuples and does not unpack them.

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """What a thread of the convolution holds, `rows` × `columns` pixels of two channels, and the warps of a program.

    More pixels share more of what is loaded, ``(rows + 4)·(columns + 4)`` values for ``rows·columns`` results, and
    need more registers: four partial results a pixel and 30 taps, per channel.
    """

    rows: int
    columns: int
    warps: int


# By whether the L2 norm follows. Neighbouring pixels of a program meet in the multiprocessor's cache, so wide programs
# read less from outside it; the norm makes all warps of a program wait for each other, so it gets narrower ones.
TILES = {True: Tile(3, 3, 4), False: Tile(3, 3, 4)}


@triton.jit
def _activate(b_y, eps, NORMALIZE: tl.constexpr):
    b_y = b_y / (1.0 + tl.exp(-b_y))
    if NORMALIZE:
        b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=1, keep_dims=True) + eps)
    return b_y


@triton.jit
def _convolved_features_kernel(
    p_x,
    p_spatial,
    p_temporal,
    p_o,
    F,
    GY,
    GX,
    H,
    stride_xb,
    stride_xf,
    stride_xy,
    stride_xs: tl.constexpr,
    stride_of,
    stride_oy,
    eps,
    D: tl.constexpr,
    NORMALIZE: tl.constexpr,
    RY: tl.constexpr,
    RX: tl.constexpr,
    BG: tl.constexpr,
    BD: tl.constexpr,
):
    # One program walks all frames with RY rows of BG groups of RX columns and one head. Every value is loaded once a
    # frame and serves all pixels around it that the thread holds. A frame's spatial results go into the five temporal
    # sums they belong to: the oldest is complete, the other four wait in registers. Tuples are unrolled by pixel, and
    # the row stride is a constant so that columns differ by immediate offsets.
    tiles = tl.cdiv(GX, BG * RX)
    i_y = tl.program_id(0) // tiles * RY
    o_x = tl.program_id(0) % tiles * (BG * RX) + tl.arange(0, BG)[:, None] * RX
    i_h, i_b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_d = i_h * D + tl.arange(0, BD)[None, :]
    d_mask = tl.arange(0, BD)[None, :] < D
    # Pointers advance frame by frame, so no offset ever leaves 64 bits. Inputs start two rows and columns, outputs
    # two frames before the first; what lies outside is masked.
    p_x += i_b * stride_xb + (i_y - 2).to(tl.int64) * stride_xy + (o_x - 2).to(tl.int64) * stride_xs + o_d
    p_o += i_b * F * stride_of + i_y.to(tl.int64) * stride_oy + o_x.to(tl.int64) * (H * D) + o_d
    p_o = p_o - stride_of - stride_of

    spatial = ()
    for tap in tl.static_range(25):
        spatial = spatial + (tl.load(p_spatial + o_d * 25 + tap, mask=d_mask, other=0.0).to(tl.float32),)
    temporal = ()
    for tap in tl.static_range(5):
        temporal = temporal + (tl.load(p_temporal + o_d * 5 + tap, mask=d_mask, other=0.0).to(tl.float32),)
    b_zero = tl.zeros((BG, BD), tl.float32)
    waiting = ()
    for _ in tl.static_range(RY * RX):
        waiting = waiting + ((b_zero, b_zero, b_zero, b_zero),)

    for i_f in range(F + 2):
        sums = ()
        for _ in tl.static_range(RY * RX):
            sums = sums + (b_zero,)
        p_row = p_x
        for y in tl.static_range(RY + 4):
            # Row by row, which leaves the compiler few values to hold. As unsigned, what is negative is large.
            in_rows = (i_f < F) & ((i_y + (y - 2)).to(tl.uint32) < GY)
            b_row = ()
            for x in tl.static_range(RX + 4):
                mask = in_rows & ((o_x + (x - 2)).to(tl.uint32) < GX) & d_mask
                b_row = b_row + (tl.load(p_row + x * stride_xs, mask=mask, other=0.0).to(tl.float32),)
            p_row += stride_xy
            added = ()
            for i in tl.static_range(RY * RX):
                b_y = sums[i]
                if (y - i // RX >= 0) & (y - i // RX < 5):
                    for x in tl.static_range(5):
                        b_y += b_row[i % RX + x] * spatial[(y - i // RX) * 5 + x]
                added = added + (b_y,)
            sums = added
        shifted = ()
        for i in tl.static_range(RY * RX):
            b_0, b_1, b_2, b_3 = waiting[i]
            b_o = _activate(b_0 + sums[i] * temporal[4], eps, NORMALIZE)
            mask = (i_f >= 2) & (i_y + i // RX < GY) & (o_x + i % RX < GX) & d_mask
            tl.store(p_o + i // RX * stride_oy + i % RX * (H * D), b_o.to(p_o.dtype.element_ty), mask=mask)
            b_0, b_1 = b_1 + sums[i] * temporal[3], b_2 + sums[i] * temporal[2]
            shifted = shifted + ((b_0, b_1, b_3 + sums[i] * temporal[1], sums[i] * temporal[0]),)
        waiting = shifted
        p_x += stride_xf
        p_o += stride_of


@torch.library.custom_op("diffusers_h3::convolved_features", mutates_args=())
def convolved_features(
    features: torch.Tensor,
    spatial: torch.Tensor,
    temporal: torch.Tensor,
    grid: list[int],
    num_heads: int,
    normalize: bool,
    eps: float,
) -> torch.Tensor:
    """Launch the kernel; see the reference for shapes. Both convolutions have five taps a dimension."""
    B, F, S, C = features.shape
    D = C // num_heads
    if features.stride(-1) != 1:
        features = features.contiguous()
    output = features.new_empty((B, F, S, num_heads, D))
    tile = TILES[normalize]
    BD = triton.next_power_of_2(D)
    # Two channels a thread: more would need more registers for the taps.
    BG = max(1, tile.warps * 64 // BD)
    programs = triton.cdiv(grid[0], tile.rows) * triton.cdiv(grid[1], BG * tile.columns)
    _convolved_features_kernel[(programs, num_heads, B)](
        features,
        spatial.contiguous(),
        temporal.contiguous(),
        output,
        F,
        grid[0],
        grid[1],
        num_heads,
        features.stride(0),
        features.stride(1),
        grid[1] * features.stride(2),
        features.stride(2),
        output.stride(1),
        grid[1] * C,
        eps,
        D=D,
        NORMALIZE=normalize,
        RY=tile.rows,
        RX=tile.columns,
        BG=BG,
        BD=BD,
        num_warps=tile.warps,
    )
    return output


@convolved_features.register_fake
def _(features, spatial, temporal, grid, num_heads, normalize, eps):
    return _empty_features(features, num_heads)


@triton.jit
def _pointwise_features_kernel(
    p_x,
    p_o,
    F,
    S,
    H,
    D,
    stride_xb,
    stride_xf,
    stride_xs,
    eps,
    NORMALIZE: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    i_h, i_f = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_s = (tl.program_id(0) * BS + tl.arange(0, BS)).to(tl.int64)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    mask = (o_s < S) & (o_d < D)
    p_x += i_f // F * stride_xb + i_f % F * stride_xf + i_h * D
    b_x = tl.load(p_x + o_s * stride_xs + o_d, mask=mask, other=0.0).to(tl.float32)
    b_o = _activate(b_x, eps, NORMALIZE)
    tl.store(p_o + ((i_f * S + o_s) * H + i_h) * D + o_d, b_o.to(p_o.dtype.element_ty), mask=mask)


@torch.library.custom_op("diffusers_h3::pointwise_features", mutates_args=())
def pointwise_features(features: torch.Tensor, num_heads: int, normalize: bool, eps: float) -> torch.Tensor:
    """Launch the kernel; see the reference for shapes."""
    B, F, S, C = features.shape
    D = C // num_heads
    if features.stride(-1) != 1:
        features = features.contiguous()
    output = features.new_empty((B, F, S, num_heads, D))
    BD = triton.next_power_of_2(D)
    BS = max(1, min(16, 2048 // BD))
    _pointwise_features_kernel[(triton.cdiv(S, BS), num_heads, B * F)](
        features,
        output,
        F,
        S,
        num_heads,
        D,
        features.stride(0),
        features.stride(1),
        features.stride(2),
        eps,
        NORMALIZE=normalize,
        BS=BS,
        BD=BD,
        num_warps=4,
    )
    return output


@pointwise_features.register_fake
def _(features, num_heads, normalize, eps):
    return _empty_features(features, num_heads)


def _empty_features(features: torch.Tensor, num_heads: int) -> torch.Tensor:
    return features.new_empty((*features.shape[:-1], num_heads, features.shape[-1] // num_heads))

"""Temporal convolution, SiLU and L2 norm in one pass: every element is read once and written once."""

import torch
import triton
import triton.language as tl


@triton.jit
def _temporal_features_kernel(
    p_x,
    p_w,
    p_o,
    F,
    S,
    H,
    D,
    stride_xb,
    stride_xf,
    stride_xs,
    stride_of,
    eps,
    HAS_CONV: tl.constexpr,
    NORMALIZE: tl.constexpr,
    AHEAD: tl.constexpr,
    SPAN: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    # One program walks a span of frames of a tile of rows and one head, keeping the taps in registers: beyond the
    # two frames around its span it reads nothing twice. The frame after next is loaded while this one is computed.
    i_s, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    spans = tl.cdiv(F, SPAN)
    i_b = (tl.program_id(2) // spans).to(tl.int64)
    first = (tl.program_id(2) % spans) * SPAN
    last = tl.minimum(first + SPAN, F)
    o_s = (i_s * BS + tl.arange(0, BS)).to(tl.int64)
    o_d = tl.arange(0, BD)
    mask = (o_s < S)[:, None] & (o_d < D)[None, :]
    # Pointers advance frame by frame, so no offset ever leaves 64 bits.
    p_x += i_b * stride_xb + first.to(tl.int64) * stride_xf
    p_x += o_s[:, None] * stride_xs + i_h * D + o_d[None, :]
    p_o += i_b * F * stride_of + first.to(tl.int64) * stride_of
    p_o += (o_s[:, None] * H + i_h) * D + o_d[None, :]

    b_2 = tl.load(p_x, mask=mask, other=0.0)
    if HAS_CONV:
        p_w += (i_h * D + o_d) * 5
        d_mask = o_d < D
        w0 = tl.load(p_w, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        w1 = tl.load(p_w + 1, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(p_w + 2, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        w3 = tl.load(p_w + 3, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        w4 = tl.load(p_w + 4, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        b_0 = tl.load(p_x - 2 * stride_xf, mask=mask & (first > 1), other=0.0)
        b_1 = tl.load(p_x - stride_xf, mask=mask & (first > 0), other=0.0)
        b_3 = tl.load(p_x + stride_xf, mask=mask & (first + 1 < F), other=0.0)
        b_4 = tl.load(p_x + 2 * stride_xf, mask=mask & (first + 2 < F), other=0.0)
    p_x += AHEAD * stride_xf
    for i_f in range(first, last):
        b_ahead = tl.load(p_x, mask=mask & (i_f + AHEAD < F), other=0.0)
        if HAS_CONV:
            b_y = b_0.to(tl.float32) * w0 + b_1.to(tl.float32) * w1 + b_2.to(tl.float32) * w2
            b_y += b_3.to(tl.float32) * w3 + b_4.to(tl.float32) * w4
            b_0, b_1, b_2, b_3, b_4 = b_1, b_2, b_3, b_4, b_ahead
        else:
            b_y = b_2.to(tl.float32)
            b_2 = b_ahead
        b_y = b_y * tl.sigmoid(b_y)
        if NORMALIZE:
            b_y *= tl.rsqrt(tl.sum(b_y * b_y, axis=1, keep_dims=True) + eps)
        tl.store(p_o, b_y.to(p_o.dtype.element_ty), mask=mask)
        p_x += stride_xf
        p_o += stride_of


@torch.library.custom_op("diffusers_h3::temporal_features", mutates_args=())
def temporal_features(
    features: torch.Tensor, weight: torch.Tensor | None, num_heads: int, normalize: bool, eps: float
) -> torch.Tensor:
    """Launch the kernel; see the reference for shapes."""
    B, F, S, C = features.shape
    D = C // num_heads
    if features.stride(-1) != 1:
        features = features.contiguous()
    if weight is not None:
        weight = weight.contiguous()
    output = features.new_empty((B, F, S, num_heads, D))
    BD = triton.next_power_of_2(D)
    BS = max(1, min(16, 2048 // BD))
    # Spans give the card enough programs; each costs four frames read a second time.
    span = 50 if weight is not None else 1
    _temporal_features_kernel[(triton.cdiv(S, BS), num_heads, B * triton.cdiv(F, span))](
        features,
        weight,
        output,
        F,
        S,
        num_heads,
        D,
        features.stride(0),
        features.stride(1),
        features.stride(2),
        output.stride(1),
        eps,
        HAS_CONV=weight is not None,
        NORMALIZE=normalize,
        AHEAD=3 if weight is not None else 1,
        SPAN=span,
        BS=BS,
        BD=BD,
        num_warps=4,
    )
    return output


@temporal_features.register_fake
def _(features, weight, num_heads, normalize, eps):
    B, F, S, C = features.shape
    return features.new_empty((B, F, S, num_heads, C // num_heads))

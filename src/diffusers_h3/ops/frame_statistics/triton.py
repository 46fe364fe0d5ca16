"""Frame statistics in one read of keys and values."""

import torch
import triton
import triton.language as tl

from ..triton_support import LARGE_SHARED_MEMORY, shared_memory


@triton.jit
def _frame_statistics_kernel(
    p_k,
    p_v,
    p_beta,
    p_a,
    p_b,
    S,
    H,
    D,
    stride_kf,
    stride_ks,
    stride_kh,
    stride_vf,
    stride_vs,
    stride_vh,
    GRAM_RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    # `β·k` does not fit the half-precision type `k` has, so it is split into its rounding and the remainder: two
    # tensor-core products with the exact `k` and `v` then reach float32 accuracy at half-precision speed.
    i_h, i_f = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_d = tl.arange(0, BD)
    p_k += i_f * stride_kf + i_h * stride_kh
    p_v += i_f * stride_vf + i_h * stride_vh
    p_beta += i_f * S * H + i_h
    b_a = tl.zeros((BD, BD), tl.float32)
    b_b = tl.zeros((BD, BD), tl.float32)
    for i_s in range(0, S, BS):
        o_s = (i_s + tl.arange(0, BS)).to(tl.int64)
        mask = (o_s < S)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_k + o_s[:, None] * stride_ks + o_d[None, :], mask=mask, other=0.0)
        b_v = tl.load(p_v + o_s[:, None] * stride_vs + o_d[None, :], mask=mask, other=0.0)
        b_beta = tl.load(p_beta + o_s * H, mask=o_s < S, other=0.0).to(tl.float32)
        b_w = b_k.to(tl.float32) * b_beta[:, None]
        if SPLIT:
            b_high = b_w.to(b_k.dtype)
            b_low = (b_w - b_high.to(tl.float32)).to(b_k.dtype)
            b_a = tl.dot(tl.trans(b_k), b_high, b_a)
            b_b = tl.dot(tl.trans(b_v), b_high, b_b)
            if GRAM_RESIDUAL:
                b_a = tl.dot(tl.trans(b_k), b_low, b_a)
            b_b = tl.dot(tl.trans(b_v), b_low, b_b)
        else:
            b_a = tl.dot(tl.trans(b_k), b_w, b_a, input_precision="tf32x3")
            b_b = tl.dot(tl.trans(b_v), b_w, b_b, input_precision="tf32x3")
    offsets = (i_f * H + i_h) * D * D + o_d[:, None] * D + o_d[None, :]
    mask = (o_d < D)[:, None] & (o_d < D)[None, :]
    tl.store(p_a + offsets, b_a, mask=mask)
    tl.store(p_b + offsets, b_b, mask=mask)


@torch.library.custom_op("diffusers_h3::frame_statistics", mutates_args=())
def frame_statistics(
    key: torch.Tensor, value: torch.Tensor, beta: torch.Tensor, gram_fp32: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; see the reference for shapes. Keys and values have the same head dimension."""
    B, F, S, H, D = key.shape
    key, value = (rows.flatten(0, 1) for rows in (key, value))
    key, value = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (key, value))
    beta = beta.contiguous()
    gram = key.new_empty((B, F, H, D, D), dtype=torch.float32)
    cross = torch.empty_like(gram)
    half = key.dtype in (torch.bfloat16, torch.float16)
    _frame_statistics_kernel[(H, B * F)](
        key,
        value,
        beta,
        gram,
        cross,
        S,
        H,
        D,
        key.stride(0),
        key.stride(1),
        key.stride(2),
        value.stride(0),
        value.stride(1),
        value.stride(2),
        GRAM_RESIDUAL=gram_fp32,
        SPLIT=half,
        BS=64 if half else 32,
        BD=max(16, triton.next_power_of_2(D)),
        num_warps=8,
        num_stages=3 if shared_memory(key.device) > LARGE_SHARED_MEMORY else 1,
    )
    return gram, cross


@frame_statistics.register_fake
def _(key, value, beta, gram_fp32):
    B, F, _, H, D = key.shape
    return tuple(key.new_empty((B, F, H, D, D), dtype=torch.float32) for _ in range(2))

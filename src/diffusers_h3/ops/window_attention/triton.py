"""Merge of two attention results with the gate, one read of each and one write."""

import torch
import triton
import triton.language as tl


@triton.jit
def _merge_two_kernel(
    p_a,
    p_la,
    p_b,
    p_lb,
    p_g,
    p_o,
    L,
    H,
    D,
    stride_al,
    stride_ah,
    stride_lal,
    stride_lah,
    stride_bl,
    stride_bh,
    stride_lbl,
    stride_lbh,
    stride_gl,
    stride_gh,
    stride_ol,
    stride_oh,
    HAS_GATE: tl.constexpr,
    BL: tl.constexpr,
    BD: tl.constexpr,
):
    i_l, i_h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_l = (i_l * BL + tl.arange(0, BL)).to(tl.int64)
    o_d = tl.arange(0, BD)
    l_mask = o_l < L
    mask = l_mask[:, None] & (o_d < D)[None, :]
    b_la = tl.load(p_la + o_l * stride_lal + i_h * stride_lah, mask=l_mask, other=0.0)
    b_lb = tl.load(p_lb + o_l * stride_lbl + i_h * stride_lbh, mask=l_mask, other=0.0)
    b_a = tl.load(p_a + o_l[:, None] * stride_al + i_h * stride_ah + o_d[None, :], mask=mask, other=0.0)
    b_b = tl.load(p_b + o_l[:, None] * stride_bl + i_h * stride_bh + o_d[None, :], mask=mask, other=0.0)
    # Of two softmax weights one is the sigmoid of the difference of the log-sum-exps.
    b_wa = tl.sigmoid(b_la - b_lb)
    b_wb = tl.sigmoid(b_lb - b_la)
    if HAS_GATE:
        b_g = tl.sigmoid(tl.load(p_g + o_l * stride_gl + i_h * stride_gh, mask=l_mask, other=0.0).to(tl.float32))
        b_wa *= b_g
        b_wb *= b_g
    b_o = b_a.to(tl.float32) * b_wa[:, None] + b_b.to(tl.float32) * b_wb[:, None]
    tl.store(p_o + o_l[:, None] * stride_ol + i_h * stride_oh + o_d[None, :], b_o.to(p_o.dtype.element_ty), mask=mask)


def merge_two(
    output_a: torch.Tensor,
    lse_a: torch.Tensor,
    output_b: torch.Tensor,
    lse_b: torch.Tensor,
    gate: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Launch the kernel; see `merge_gated`. Channels are adjacent in all of them."""
    L, H, D = output.shape
    BD = triton.next_power_of_2(D)
    BL = max(1, 4096 // BD)
    _merge_two_kernel[(triton.cdiv(L, BL), H)](
        output_a,
        lse_a,
        output_b,
        lse_b,
        gate,
        output,
        L,
        H,
        D,
        *output_a.stride()[:2],
        *lse_a.stride(),
        *output_b.stride()[:2],
        *lse_b.stride(),
        *(gate.stride() if gate is not None else (0, 0)),
        *output.stride()[:2],
        HAS_GATE=gate is not None,
        BL=BL,
        BD=BD,
        num_warps=4,
    )

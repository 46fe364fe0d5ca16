"""Delta rule factors and the scan over frames, one program per head."""

import torch
import triton
import triton.language as tl

from ..triton_support import LARGE_SHARED_MEMORY, shared_memory


@triton.jit
def _invert_block(b_p, BK: tl.constexpr):
    """Invert a small positive definite block in place by Gauss–Jordan elimination without pivoting."""
    o_r = tl.arange(0, BK)[:, None]
    o_c = tl.arange(0, BK)[None, :]
    for j in range(BK):
        b_row = tl.sum(tl.where(o_r == j, b_p, 0.0), axis=0, keep_dims=True)
        b_col = tl.sum(tl.where(o_c == j, b_p, 0.0), axis=1, keep_dims=True)
        pivot = 1.0 / tl.sum(tl.where(o_c == j, b_row, 0.0), axis=1, keep_dims=True)
        b_row = tl.where(o_c == j, 1.0, b_row) * pivot
        b_p = tl.where(o_r == j, b_row, tl.where(o_c == j, 0.0, b_p) - b_col * b_row)
    return b_p


@triton.jit
def _delta_factors_kernel(
    p_a,
    p_b,
    p_alpha,
    p_m,
    p_u,
    D,
    scale_a,
    scale_b,
    HAS_ALPHA: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    # Block Gauss–Jordan inversion of `I + A`. The matrix lives in `p_m` between the steps, where panels of it can be
    # addressed; a barrier separates stores from the loads of other threads. Panels of few rows leave
    # registers for several programs per multiprocessor, which hides the latency of the pivots.
    i = tl.program_id(0).to(tl.int64)
    p_w = p_m + i * D * D
    p_a += i * D * D
    p_b += i * D * D
    p_u += i * D * D
    o_k = tl.arange(0, BK)
    o_c = tl.arange(0, BD)[None, :]
    c_mask = o_c < D
    for r in range(0, D, BK):
        o_r = (r + o_k)[:, None]
        b_w = tl.load(p_a + o_r * D + o_c, mask=(o_r < D) & c_mask, other=0.0) * scale_a
        tl.store(p_w + o_r * D + o_c, b_w + tl.where(o_r == o_c, 1.0, 0.0), mask=(o_r < D) & c_mask)
    tl.debug_barrier()

    for k in range(0, D, BK):
        o_kr = (k + o_k)[:, None]
        o_kc = (k + o_k)[None, :]
        b_p = tl.load(p_w + o_kr * D + o_kc, mask=(o_kr < D) & (o_kc < D), other=0.0)
        b_p = _invert_block(b_p + tl.where((o_kr == o_kc) & (o_kr >= D), 1.0, 0.0), BK)
        in_columns = (o_c >= k) & (o_c < k + BK)
        # With the identity in place of the pivot block, one product gives the row panel with `P` in that block.
        b_row = tl.load(p_w + o_kr * D + o_c, mask=(o_kr < D) & c_mask, other=0.0)
        b_row = tl.where(in_columns, tl.where(o_kr == o_c, 1.0, 0.0), b_row)
        b_row = tl.dot(b_p, b_row, input_precision="tf32x3")
        tl.debug_barrier()
        tl.store(p_w + o_kr * D + o_c, b_row, mask=(o_kr < D) & c_mask)
        for r in range(0, D, BK):
            if r != k:
                o_r = (r + o_k)[:, None]
                b_column = tl.load(p_w + o_r * D + o_kc, mask=(o_r < D) & (o_kc < D), other=0.0)
                b_rest = tl.load(p_w + o_r * D + o_c, mask=(o_r < D) & c_mask & (in_columns == 0), other=0.0)
                b_rest = tl.dot(-b_column, b_row, b_rest, input_precision="tf32x3")
                tl.debug_barrier()
                tl.store(p_w + o_r * D + o_c, b_rest, mask=(o_r < D) & c_mask)
        tl.debug_barrier()

    for r in range(0, D, BK):
        o_r = (r + o_k)[:, None]
        b_u = tl.zeros((BK, BD), tl.float32)
        for k in range(0, D, BK):
            o_kr = (k + o_k)[:, None]
            o_kc = (k + o_k)[None, :]
            b_column = tl.load(p_b + o_r * D + o_kc, mask=(o_r < D) & (o_kc < D), other=0.0) * scale_b
            b_row = tl.load(p_w + o_kr * D + o_c, mask=(o_kr < D) & c_mask, other=0.0)
            b_u = tl.dot(b_column, b_row, b_u, input_precision="tf32x3")
        tl.store(p_u + o_r * D + o_c, b_u, mask=(o_r < D) & c_mask)
    if HAS_ALPHA:
        tl.debug_barrier()
        for r in range(0, D, BK):
            o_r = (r + o_k)[:, None]
            b_alpha = tl.load(p_alpha + i * D + o_r, mask=o_r < D, other=0.0)
            b_w = tl.load(p_w + o_r * D + o_c, mask=(o_r < D) & c_mask, other=0.0)
            tl.store(p_w + o_r * D + o_c, b_w * b_alpha, mask=(o_r < D) & c_mask)


@torch.library.custom_op("diffusers_h3::delta_factors", mutates_args=())
def delta_factors(
    gram: torch.Tensor, cross: torch.Tensor, alpha: torch.Tensor | None, scale_gram: float, scale_cross: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel for ``M = diag(α)·(I + A·scale)⁻¹`` and ``U = B·scale·(I + A·scale)⁻¹``, all float32."""
    D = gram.shape[-1]
    gram, cross = gram.contiguous(), cross.contiguous()
    if alpha is not None:
        alpha = alpha.contiguous()
    transition, update = torch.empty_like(gram), torch.empty_like(cross)
    BD = max(16, triton.next_power_of_2(D))
    _delta_factors_kernel[(gram.numel() // (D * D),)](
        gram,
        cross,
        alpha,
        transition,
        update,
        D,
        scale_gram,
        scale_cross,
        HAS_ALPHA=alpha is not None,
        BD=BD,
        BK=min(32, BD),
        num_warps=4,
        num_stages=1,
    )
    return transition, update


@delta_factors.register_fake
def _(gram, cross, alpha, scale_gram, scale_cross):
    return torch.empty_like(gram), torch.empty_like(cross)


@triton.jit
def _scan_kernel(
    p_m,
    p_u,
    p_s0,
    p_o,
    F,
    H,
    D,
    cut_first,
    cut_step,
    num_cuts,
    REVERSE: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
):
    # Rows of a state never mix, so a program carries a tile of rows of one head's state through all frames. The
    # product runs over panels of BK channels, which keeps the shared memory small; the state's panel is cut out of
    # its registers by a masked sum.
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_v = (i_v * BV + tl.arange(0, BV))[:, None]
    o_c = tl.arange(0, BD)[None, :]
    o_k = tl.arange(0, BK)[:, None]
    o_panel = tl.arange(0, BD // BK)[None, :, None]
    state_mask = (o_v < D) & (o_c < D)
    o_state = o_v * D + o_c
    b_s = tl.load(p_s0 + (i_b * H + i_h) * D * D + o_state, mask=state_mask, other=0.0)
    p_o += (i_b * num_cuts * H + i_h) * D * D
    tl.store(p_o + o_state, b_s, mask=state_mask)
    stride = H * D * D
    last = cut_first + (num_cuts - 2) * cut_step
    for i in range(1, last + 1):
        if REVERSE:
            i_f = i_b * F + F - i
        else:
            i_f = i_b * F + i - 1
        offset = (i_f * H + i_h) * D * D
        b_next = tl.load(p_u + offset + o_state, mask=state_mask, other=0.0)
        b_panels = tl.reshape(b_s, (BV, BD // BK, BK))
        for k in tl.static_range(BD // BK):
            b_panel = tl.sum(tl.where(o_panel == k, b_panels, 0.0), axis=1)
            o_row = k * BK + o_k
            b_m = tl.load(p_m + offset + o_row * D + o_c, mask=(o_row < D) & (o_c < D), other=0.0)
            b_next = tl.dot(b_panel, b_m, b_next, input_precision="tf32x3")
        b_s = b_next
        past = i - cut_first
        if (past >= 0) & (past % cut_step == 0):
            slot = (1 + past // cut_step).to(tl.int64)
            tl.store(p_o + slot * stride + o_state, b_s, mask=state_mask)


@torch.library.custom_op("diffusers_h3::scan", mutates_args=())
def scan(
    transition: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor,
    cut_first: int,
    cut_step: int,
    num_cuts: int,
    reverse: bool,
) -> torch.Tensor:
    """Return the states after 0, `cut_first`, `cut_first + cut_step`, … frames, from the front or from the back.

    Args:
        transition, update (`torch.Tensor`): ``[B, F, H, D, D]`` float32.
        initial (`torch.Tensor`): ``[B, H, D, D]`` float32.
        cut_first, cut_step, num_cuts (`int`): The frame counts whose states are returned, 0 included.
        reverse (`bool`): Scan from the last frame to the first.

    Returns:
        `torch.Tensor`: ``[B, num_cuts, H, D, D]`` float32.
    """
    B, F, H, D, _ = transition.shape
    transition, update, initial = transition.contiguous(), update.contiguous(), initial.contiguous()
    output = initial.new_empty((B, num_cuts, H, D, D))
    BD = max(16, triton.next_power_of_2(D))
    BV = min(32, BD)
    _scan_kernel[(triton.cdiv(D, BV), H, B)](
        transition,
        update,
        initial,
        output,
        F,
        H,
        D,
        cut_first,
        cut_step,
        num_cuts,
        REVERSE=reverse,
        BV=BV,
        BD=BD,
        BK=min(64, BD),
        num_warps=8,
        num_stages=3 if shared_memory(transition.device) > LARGE_SHARED_MEMORY else 1,
    )
    return output


@scan.register_fake
def _(transition, update, initial, cut_first, cut_step, num_cuts, reverse):
    B, _, H, D, _ = transition.shape
    return initial.new_empty((B, num_cuts, H, D, D))

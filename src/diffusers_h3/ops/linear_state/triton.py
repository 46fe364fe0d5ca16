"""Boundary state gather with the decay bridge, and the readout with its norm and gate."""

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache(maxsize=64)
def _index_table(columns: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """Return int32 columns as one device tensor; one copy per layout and device, not per layer."""
    return torch.tensor(columns, dtype=torch.int32).to(device)


@triton.jit
def _product(p_alpha, start, stop, stride, o_d, D):
    b_sum = tl.zeros_like(o_d).to(tl.float32)
    p_alpha += start.to(tl.int64) * stride
    for _ in range(start, stop):
        b_sum += tl.load(p_alpha + o_d, mask=o_d < D, other=0.0)
        p_alpha += stride
    return tl.exp(b_sum)


@triton.jit
def _bridge_states_kernel(
    p_front,
    p_back,
    p_alpha,
    p_index,
    p_o,
    F,
    H,
    D,
    front_cuts,
    back_cuts,
    BRIDGE: tl.constexpr,
    BD: tl.constexpr,
):
    i_f, i_h, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_d = tl.arange(0, BD)
    mask = (o_d < D)[:, None] & (o_d < D)[None, :]
    offsets = i_h * D * D + o_d[:, None] * D + o_d[None, :]
    front_slot = tl.load(p_index + i_f).to(tl.int64)
    back_slot = tl.load(p_index + F + i_f).to(tl.int64)
    b_front = tl.load(p_front + (i_b * front_cuts + front_slot) * H * D * D + offsets, mask=mask, other=0.0)
    b_back = tl.load(p_back + (i_b * back_cuts + back_slot) * H * D * D + offsets, mask=mask, other=0.0)
    if BRIDGE:
        window_start = tl.load(p_index + 2 * F + i_f)
        window_stop = tl.load(p_index + 3 * F + i_f)
        p_alpha += (i_b * F * H + i_h) * D
        b_front *= _product(p_alpha, window_start, i_f + 1, H * D, o_d, D)[None, :]
        b_back *= _product(p_alpha, i_f, window_stop, H * D, o_d, D)[None, :]
    tl.store(p_o + (i_b * F + i_f) * H * D * D + offsets, b_front + b_back, mask=mask)


@torch.library.custom_op("diffusers_h3::bridge_states", mutates_args=())
def bridge_states(
    front: torch.Tensor,
    back: torch.Tensor,
    log_alpha: torch.Tensor,
    front_slots: list[int],
    back_slots: list[int],
    window_start: list[int],
    window_stop: list[int],
    bridge: bool,
) -> torch.Tensor:
    """Launch the kernel; see the reference for shapes. All tensors are float32."""
    B, F, H, D = log_alpha.shape
    columns = tuple(tuple(values) for values in (front_slots, back_slots, window_start, window_stop))
    output = front.new_empty((B, F, H, D, D))
    _bridge_states_kernel[(F, H, B)](
        front.contiguous(),
        back.contiguous(),
        log_alpha.contiguous(),
        _index_table(columns, log_alpha.device),
        output,
        F,
        H,
        D,
        front.shape[1],
        back.shape[1],
        BRIDGE=bridge,
        BD=triton.next_power_of_2(D),
        num_warps=8,
    )
    return output


@bridge_states.register_fake
def _(front, back, log_alpha, front_slots, back_slots, window_start, window_stop, bridge):
    B, F, H, D = log_alpha.shape
    return front.new_empty((B, F, H, D, D))


@triton.jit
def _readout_kernel(
    p_s,
    p_q,
    p_g,
    p_w,
    p_o,
    S,
    H,
    D,
    stride_qf,
    stride_qs,
    stride_qh,
    stride_gf,
    stride_gs,
    eps,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    i_s, i_h, i_f = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_s = (i_s * BS + tl.arange(0, BS)).to(tl.int64)
    o_d = tl.arange(0, BD)
    d_mask = o_d < D
    mask = (o_s < S)[:, None] & d_mask[None, :]
    b_q = tl.load(
        p_q + i_f * stride_qf + i_h * stride_qh + o_s[:, None] * stride_qs + o_d[None, :], mask=mask, other=0.0
    )
    # The state is read transposed, ``[D, Dv]``, the right operand of the product.
    state_mask = d_mask[:, None] & d_mask[None, :]
    p_s += (i_f * H + i_h) * D * D
    b_s = tl.load(p_s + o_d[None, :] * D + o_d[:, None], mask=state_mask, other=0.0).to(b_q.dtype)
    b_o = tl.dot(b_q, b_s, input_precision="ieee")
    b_w = tl.load(p_w + o_d, mask=d_mask, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + i_f * stride_gf + i_h * D + o_s[:, None] * stride_gs + o_d[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    b_o *= tl.rsqrt(tl.sum(b_o * b_o, axis=1, keep_dims=True) / D + eps)
    b_o *= b_w[None, :] * tl.sigmoid(b_g)
    o_offsets = ((i_f * S + o_s[:, None]) * H + i_h) * D + o_d[None, :]
    tl.store(p_o + o_offsets, b_o.to(p_o.dtype.element_ty), mask=mask)


@torch.library.custom_op("diffusers_h3::readout", mutates_args=())
def readout(
    states: torch.Tensor, query: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Launch the kernel; see the reference for shapes."""
    B, F, S, H, D = query.shape
    query, gate = query.flatten(0, 1), gate.flatten(0, 1)
    query, gate = (rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (query, gate))
    output = query.new_empty((B, F, S, H * D))
    BD = max(16, triton.next_power_of_2(D))
    BS = 64 if query.itemsize < 4 else 16
    _readout_kernel[(triton.cdiv(S, BS), H, B * F)](
        states.contiguous(),
        query,
        gate,
        weight.contiguous(),
        output,
        S,
        H,
        D,
        query.stride(0),
        query.stride(1),
        query.stride(2),
        gate.stride(0),
        gate.stride(1),
        eps,
        BS=BS,
        BD=BD,
        num_warps=4 if BD <= 128 else 8,
    )
    return output


@readout.register_fake
def _(states, query, gate, weight, eps):
    B, F, S, H, D = query.shape
    return query.new_empty((B, F, S, H * D))

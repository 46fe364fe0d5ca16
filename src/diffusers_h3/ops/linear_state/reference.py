"""Boundary states and readout in plain torch."""

from itertools import groupby

import torch
import torch.nn.functional as F


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
    """Hand every frame its two boundary states, carried over the window's frames by the decay.

    Args:
        front, back (`torch.Tensor`): ``[B, cuts, H, Dv, D]``, the boundary states of the two scans.
        log_alpha (`torch.Tensor`): ``[B, F, H, D]``.
        front_slots, back_slots (`list[int]`): Per frame, which boundary state it reads.
        window_start, window_stop (`list[int]`): Per frame, its window clamped to the clip, half open.
        bridge (`bool`): Whether the decay applies.

    Returns:
        `torch.Tensor`: ``[B, F, H, Dv, D]``, the sum of both sides.
    """
    front, back = _per_frame(front, front_slots), _per_frame(back, back_slots)
    if bridge:
        frames = torch.arange(log_alpha.shape[1], device=log_alpha.device)
        start, stop = (_as_indices(values, log_alpha.device) for values in (window_start, window_stop))
        front = front * _decay(log_alpha, start, frames + 1).unsqueeze(-2)
        back = back * _decay(log_alpha, frames, stop).unsqueeze(-2)
    return front + back


def readout(
    states: torch.Tensor, query: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return ``sigmoid(gate) ⊙ RMSNorm(S·q)``, ``[B, F, S, H·D]``."""
    output = torch.einsum("bfhvk,bfshk->bfshv", states.to(query.dtype), query)
    output = F.rms_norm(output, weight.shape, weight.to(output.dtype), eps)
    return torch.sigmoid(gate) * output.flatten(-2)


def _per_frame(states: torch.Tensor, slots: list[int]) -> torch.Tensor:
    runs = [(slot, len(list(run))) for slot, run in groupby(slots)]
    return torch.cat(
        [states[:, slot : slot + 1].expand(-1, length, -1, -1, -1) for slot, length in runs],
        dim=1,
    )


def _as_indices(values: list[int], device: torch.device) -> torch.Tensor:
    """Build an index tensor on the device from runs of constants: no copy from the host, so no synchronisation."""
    return torch.cat(
        [torch.full((len(list(run)),), value, device=device, dtype=torch.long) for value, run in groupby(values)]
    )


def _decay(log_alpha: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    """Return ``Π α`` per frame over the frames from `start` to before `stop`: ``[B, F, H, D]``."""
    frames = torch.arange(log_alpha.shape[1], device=log_alpha.device)
    inside = (frames >= start.unsqueeze(1)) & (frames < stop.unsqueeze(1))
    return torch.einsum("tu,buhd->bthd", inside.to(log_alpha.dtype), log_alpha).exp()

"""The state every frame reads: boundary states of both scans, carried over the window's frames by the decay."""

from collections.abc import Sequence

import torch

from ..delta_rule import boundary_scan
from ..precision import without_autocast
from ..triton_support import use_triton
from . import reference


__all__ = ["linear_states", "readout"]


@without_autocast
def linear_states(
    transition: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor,
    log_alpha: torch.Tensor,
    prefix: Sequence[int],
    suffix: Sequence[int],
    bridge: str = "alpha",
    folded: bool = True,
) -> torch.Tensor:
    """Return the state each frame reads from the frames its window does not cover.

    Frame ``t`` reads ``prefix_state[prefix[t]]·Π α`` over the frames from its window's start up to itself, plus
    ``suffix_state[suffix[t]]·Π α`` over those from itself to its window's end. A side without frames reads `initial`.

    Args:
        transition (`torch.Tensor`): ``[B, F, H, D, D]`` from `delta_factors`.
        update (`torch.Tensor`): ``[B, F, H, Dv, D]`` from `delta_factors`.
        initial (`torch.Tensor`): ``[B, H, Dv, D]``, the state both scans start from.
        log_alpha (`torch.Tensor`): ``[B, F, H, D]``, the logarithm of the decay.
        prefix (`Sequence[int]`): Per frame, the last frame of the forward scan it reads; may be negative.
        suffix (`Sequence[int]`): Per frame, the first frame of the backward scan it reads; may be ``F`` or more.
        bridge (`str`): `"alpha"` applies the products of the decay, `"none"` leaves them out.
        folded (`bool`): Let the reference fold the frames between boundaries; `False` walks every frame.

    Returns:
        `torch.Tensor`: ``[B, F, H, Dv, D]`` in the dtype of `update`.
    """
    num_frames = update.shape[1]
    # Counts of frames already scanned, from the front and from the back.
    from_front = [max(last + 1, 0) for last in prefix]
    from_back = [num_frames - min(first, num_frames) for first in suffix]
    front_cuts, back_cuts = sorted({0, *from_front}), sorted({0, *from_back})
    front = boundary_scan(transition, update, initial, front_cuts, folded=folded)
    back = boundary_scan(transition, update, initial, back_cuts, reverse=True, folded=folded)
    front_slots = [front_cuts.index(count) for count in from_front]
    back_slots = [back_cuts.index(count) for count in from_back]
    window_start = from_front
    window_stop = [num_frames - count for count in from_back]
    arguments = (front, back, log_alpha, front_slots, back_slots, window_start, window_stop, bridge == "alpha")
    if use_triton(front, back, log_alpha) and front.shape[-1] == front.shape[-2]:
        from . import triton

        return triton.bridge_states(*arguments)
    return reference.bridge_states(*arguments)


@without_autocast
def readout(
    states: torch.Tensor, query: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Read every frame's state with its queries, normalise and gate: ``sigmoid(gate) ⊙ RMSNorm(S·q)``.

    Args:
        states (`torch.Tensor`): ``[B, F, H, D, D]``; rounded to the dtype of `query` for the product.
        query (`torch.Tensor`): ``[B, F, S, H, D]``.
        gate (`torch.Tensor`): ``[B, F, S, H·D]``, before the sigmoid.
        weight (`torch.Tensor`): ``[D]``, the norm's.
        eps (`float`): The norm's, added to the mean square.

    Returns:
        `torch.Tensor`: ``[B, F, S, H·D]`` in the dtype of `query`.
    """
    if use_triton(states, query, gate, weight):
        from . import triton

        return triton.readout(states, query, gate, weight, eps)
    return reference.readout(states, query, gate, weight, eps)

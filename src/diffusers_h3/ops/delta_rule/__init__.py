"""The delta rule over frames: every frame is an affine map of the state, and frames compose into chunks.

A state ``S`` of shape ``[Dv, D]`` per head is updated as ``S ← S·M + U``. `delta_factors` turns a frame's statistics
into ``(M, U)``; `boundary_scan` returns the states at the frame counts that are read. The reference has the scan
twice: `scan_frames` applies the maps one by one and is the specification; `scan_folded` composes the frames between
two boundaries, ``(M₁, U₁)·(M₂, U₂) = (M₁M₂, U₁M₂ + U₂)``, all chunks at once, and then walks the chunks.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..precision import without_autocast
from ..triton_support import use_triton
from . import reference


__all__ = ["boundary_scan", "delta_factors"]


@without_autocast
def delta_factors(
    gram: torch.Tensor, cross: torch.Tensor, alpha: torch.Tensor | None, rule: str, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn frame statistics into the affine map ``S ← S·M + U`` of the delta rule.

    With ``P = (I + A)⁻¹``: `vdn_solve` is ``M = diag(α)·P, U = B·P``; `vdn_scaled` is the same with ``A/rows`` and
    ``B/√rows``; `sana_scaled` is ``M = diag(α)·(I − A/rows), U = B/√rows``.

    Args:
        gram (`torch.Tensor`): ``A [B, F, H, D, D]``, symmetric positive semi-definite.
        cross (`torch.Tensor`): ``B [B, F, H, Dv, D]``.
        alpha (`torch.Tensor`, *optional*): ``[B, F, H, D]``, the decay per key channel; `None` means no decay.
        rule (`str`): `"vdn_solve"`, `"vdn_scaled"` or `"sana_scaled"`.
        rows (`int`): Rows of a frame, the scale of the two scaled rules.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: ``M [B, F, H, D, D]`` and ``U [B, F, H, Dv, D]``.
    """
    scale_gram, scale_cross = (1.0, 1.0) if rule == "vdn_solve" else (1.0 / rows, rows**-0.5)
    if rule == "sana_scaled":  # pointwise, which Inductor fuses
        return reference.sana_factors(gram, cross, alpha, scale_gram, scale_cross)
    if use_triton(gram, cross, alpha) and gram.shape == cross.shape:
        from . import triton

        return triton.delta_factors(gram, cross, alpha, scale_gram, scale_cross)
    return reference.solve_factors(gram, cross, alpha, scale_gram, scale_cross)


@without_autocast
def boundary_scan(
    transition: torch.Tensor,
    update: torch.Tensor,
    initial: torch.Tensor,
    cuts: Sequence[int],
    reverse: bool = False,
    folded: bool = True,
) -> torch.Tensor:
    """Return the states after `cuts` frames of a scan from the front, or from the back with `reverse`.

    Args:
        transition (`torch.Tensor`): ``[B, F, H, D, D]``.
        update (`torch.Tensor`): ``[B, F, H, Dv, D]``.
        initial (`torch.Tensor`): ``[B, H, Dv, D]``.
        cuts (`Sequence[int]`): Increasing frame counts from 0 to at most ``F``. All steps between them are equal but
            the first, which may be shorter, as chunk boundaries are.
        reverse (`bool`): Scan from the last frame to the first.
        folded (`bool`): Let the reference fold the frames between two cuts; `False` walks every frame.

    Returns:
        `torch.Tensor`: ``[B, len(cuts), H, Dv, D]``.

    Raises:
        ValueError: Where the cuts do not have that form.
    """
    num_frames = transition.shape[1]
    steps = [stop - start for start, stop in pairwise(cuts)]
    first, step = (steps[0], max(steps)) if steps else (0, 0)
    if cuts[0] != 0 or cuts[-1] > num_frames or (steps and (first < 1 or any(other != step for other in steps[1:]))):
        raise ValueError(
            f"`cuts` must start at 0 and grow by equal steps (the first may be shorter) up to {num_frames} frames, "
            f"got {list(cuts)}."
        )
    if not steps:
        return initial.unsqueeze(1)
    if use_triton(transition, update, initial) and transition.shape == update.shape:
        from . import triton

        return triton.scan(transition, update, initial, first, step, len(cuts), reverse)
    if reverse:
        transition, update = transition.flip(1), update.flip(1)
    transition, update = transition[:, : cuts[-1]], update[:, : cuts[-1]]
    if folded:
        return reference.scan_folded(transition, update, initial, first, step)
    return reference.scan_frames(transition, update, initial)[:, list(cuts)]

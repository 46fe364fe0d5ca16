"""Delta rule factors and scans in plain torch."""

import torch


def solve_factors(
    gram: torch.Tensor, cross: torch.Tensor, alpha: torch.Tensor | None, scale_gram: float, scale_cross: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``M = diag(α)·P`` and ``U = scale_cross·B·P`` with ``P = (I + scale_gram·A)⁻¹`` by Cholesky."""
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    # Unchecked: the matrix is positive definite by construction, and a check would wait for the device.
    factor, _ = torch.linalg.cholesky_ex(identity + gram * scale_gram)
    right_hand_sides = torch.cat((identity.expand_as(gram), scale_cross * cross.transpose(-1, -2)), dim=-1)
    solution = torch.linalg.solve_triangular(factor, right_hand_sides, upper=False)
    solution = torch.linalg.solve_triangular(factor.mT, solution, upper=True)
    transition, update = solution.split((gram.shape[-1], cross.shape[-2]), dim=-1)
    if alpha is not None:
        transition = alpha.unsqueeze(-1) * transition
    return transition, update.transpose(-1, -2)


def sana_factors(
    gram: torch.Tensor, cross: torch.Tensor, alpha: torch.Tensor | None, scale_gram: float, scale_cross: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``M = diag(α)·(I − scale_gram·A)`` and ``U = scale_cross·B``."""
    transition = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) - gram * scale_gram
    if alpha is not None:
        transition = alpha.unsqueeze(-1) * transition
    return transition, cross * scale_cross


def scan_frames(transition: torch.Tensor, update: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    """Apply the affine maps one after another.

    Args:
        transition (`torch.Tensor`): ``[B, F, H, D, D]``.
        update (`torch.Tensor`): ``[B, F, H, Dv, D]``.
        initial (`torch.Tensor`): ``[B, H, Dv, D]``.

    Returns:
        `torch.Tensor`: ``[B, F + 1, H, Dv, D]``; entry ``i`` is the state after ``i`` frames.
    """
    states = [initial]
    for frame in range(transition.shape[1]):
        states.append(states[-1] @ transition[:, frame] + update[:, frame])
    return torch.stack(states, dim=1)


def scan_folded(
    transition: torch.Tensor, update: torch.Tensor, initial: torch.Tensor, first: int, step: int
) -> torch.Tensor:
    """Fold the frames of every segment into one affine map and scan the segments.

    Args:
        transition (`torch.Tensor`): ``[B, F, H, D, D]`` with ``F = first + n·step``.
        update (`torch.Tensor`): ``[B, F, H, Dv, D]``.
        initial (`torch.Tensor`): ``[B, H, Dv, D]``.
        first (`int`): Frames of the first segment, at most `step`.
        step (`int`): Frames of all others.

    Returns:
        `torch.Tensor`: ``[B, n + 2, H, Dv, D]``, the states at the ends of the segments, `initial` first.
    """
    if first < step:
        # Identity maps in front complete the first segment without changing what it does.
        missing = step - first
        identity = torch.eye(transition.shape[-1], dtype=transition.dtype, device=transition.device)
        identity = identity.expand(transition.shape[0], missing, *transition.shape[2:])
        zeros = update.new_zeros((update.shape[0], missing, *update.shape[2:]))
        transition, update = torch.cat((identity, transition), dim=1), torch.cat((zeros, update), dim=1)
    transition, update = transition.unflatten(1, (-1, step)), update.unflatten(1, (-1, step))
    folded_transition, folded_update = transition[:, :, 0], update[:, :, 0]
    for frame in range(1, step):
        folded_update = folded_update @ transition[:, :, frame] + update[:, :, frame]
        folded_transition = folded_transition @ transition[:, :, frame]
    return scan_frames(folded_transition, folded_update, initial)

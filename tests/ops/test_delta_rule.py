"""Delta rule factors and the scan, folded and frame by frame: values by hand, refusals, and every gradient."""

import pytest
import torch
from torch.autograd import gradcheck

from diffusers_h3.ops.delta_rule import boundary_scan, delta_factors


RULES = ("vdn_solve", "vdn_scaled", "sana_scaled")

# How many frames stand before each boundary that is read, as chunked windows make them.
CUTS = [
    (7, [0]),
    (7, [0, 1]),
    (7, [0, 7]),
    (7, [0, 3, 6]),
    (7, [0, 1, 4, 7]),
    (7, [0, 2, 5]),
    (7, [0, 1, 2, 3, 4, 5, 6, 7]),
    (11, [0, 4, 9]),
    (1, [0, 1]),
]


def _statistics(draw, dim=3, value_dim=4, requires_grad=False):
    rows = draw(2, 5, dim)
    gram = rows.transpose(-1, -2) @ rows
    cross = draw(2, value_dim, dim)
    alpha = torch.sigmoid(draw(2, dim))
    return tuple(tensor.requires_grad_(requires_grad) for tensor in (gram, cross, alpha))


@pytest.mark.parametrize("rule", RULES)
def test_factors_apply_the_rule(rule, draw):
    """``S·M + U`` is one frame of the rule, written with an explicit inverse."""
    gram, cross, alpha = _statistics(draw)
    transition, update = delta_factors(gram, cross, alpha, rule, rows=6)
    state, identity = draw(2, 4, 3), torch.eye(3, dtype=torch.float64)
    decayed = state * alpha.unsqueeze(-2)
    if rule == "vdn_solve":
        expected = (decayed + cross) @ torch.linalg.inv(identity + gram)
    elif rule == "vdn_scaled":
        expected = (decayed + cross / 6**0.5) @ torch.linalg.inv(identity + gram / 6)
    else:
        expected = decayed @ (identity - gram / 6) + cross / 6**0.5
    torch.testing.assert_close(state @ transition + update, expected, rtol=1e-12, atol=1e-12)


def test_factors_of_one_channel_by_hand():
    """A = 3, B = 2, α = ½: `vdn_solve` keeps ⅛ and writes ½; over 4 rows `vdn_scaled` 2/7 and 4/7, `sana` ⅛ and 1."""
    gram, cross, alpha = (torch.tensor(value, dtype=torch.float64) for value in ([[3.0]], [[2.0]], [0.5]))
    expected = {"vdn_solve": (1 / 8, 1 / 2), "vdn_scaled": (2 / 7, 4 / 7), "sana_scaled": (1 / 8, 1.0)}
    for rule, (kept, written) in expected.items():
        transition, update = delta_factors(gram, cross, alpha, rule, rows=4)
        assert transition.item() == pytest.approx(kept, abs=1e-14)
        assert update.item() == pytest.approx(written, abs=1e-14)


def test_factors_without_decay_are_factors_of_decay_one(draw):
    gram, cross, alpha = _statistics(draw)
    for rule in RULES:
        without = delta_factors(gram, cross, None, rule, rows=5)
        with_ones = delta_factors(gram, cross, torch.ones_like(alpha), rule, rows=5)
        for one, other in zip(without, with_ones, strict=True):
            assert torch.equal(one, other)


def test_a_frame_that_writes_nothing_only_decays(draw):
    alpha = torch.sigmoid(draw(3))
    for rule in RULES:
        zeros = torch.zeros(3, 3, dtype=torch.float64)
        transition, update = delta_factors(zeros, zeros[:2], alpha, rule, rows=5)
        torch.testing.assert_close(transition, torch.diag(alpha), rtol=0, atol=1e-15)
        assert torch.equal(update, torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("rule", RULES)
def test_gradients_of_the_factors(rule, draw):
    gram, cross, alpha = _statistics(draw, requires_grad=True)

    def factors(gram, cross, alpha):
        # The Cholesky factor reads one triangle only, so finite differences must move both entries of a pair.
        return delta_factors((gram + gram.transpose(-1, -2)) / 2, cross, alpha, rule, rows=5)

    assert gradcheck(factors, (gram, cross, alpha))
    assert gradcheck(lambda gram, cross: factors(gram, cross, None), (gram, cross))


@pytest.mark.parametrize("folded", [True, False])
def test_scan_by_hand(folded):
    """S ← 2·S + U over the numbers 1, 10, 100 from 5, and over 100, 10, 1 in reverse."""
    transition = torch.full((1, 3, 1, 1, 1), 2.0)
    update = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1, 1)
    initial = torch.full((1, 1, 1, 1), 5.0)
    forward = boundary_scan(transition, update, initial, [0, 1, 2, 3], folded=folded)
    assert forward.shape == (1, 4, 1, 1, 1)
    assert forward.flatten().tolist() == [5.0, 11.0, 32.0, 164.0]
    backward = boundary_scan(transition, update, initial, [0, 1, 3], reverse=True, folded=folded)
    assert backward.flatten().tolist() == [5.0, 110.0, 461.0]


def _loop(transition, update, initial, cuts, reverse):
    """The states after `cuts` frames, one product at a time."""
    states = [initial]
    order = range(update.shape[1])
    for frame in reversed(order) if reverse else order:
        states.append(states[-1] @ transition[:, frame] + update[:, frame])
    return torch.stack([states[count] for count in cuts], dim=1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize(("num_frames", "cuts"), CUTS)
def test_scan_equals_the_loop(num_frames, cuts, folded, reverse, draw_maps):
    maps = draw_maps(num_frames)
    states = boundary_scan(*maps, cuts, reverse=reverse, folded=folded)
    assert states.shape == (2, len(cuts), 2, 4, 3)
    torch.testing.assert_close(states, _loop(*maps, cuts, reverse), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("num_frames", "cuts"), CUTS)
def test_gradients_of_the_folded_scan_equal_those_of_the_frame_loop(num_frames, cuts, reverse, draw, draw_maps):
    inputs = draw_maps(num_frames, requires_grad=True)
    weight = draw(2, len(cuts), 2, 4, 3)
    folded, walked, looped = (
        torch.autograd.grad((states * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for states in (
            boundary_scan(*inputs, cuts, reverse=reverse, folded=True),
            boundary_scan(*inputs, cuts, reverse=reverse, folded=False),
            _loop(*inputs, cuts, reverse),
        )
    )
    for one, two, expected in zip(folded, walked, looped, strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(two, expected, rtol=1e-11, atol=1e-11)
    # Frames before the last cut count in every gradient, later ones in none.
    for gradient in folded[:2]:
        counted = (gradient.abs().sum(dim=(0, 2, 3, 4)) > 0).tolist()
        expected = [frame < cuts[-1] for frame in range(num_frames)]
        assert counted == (expected[::-1] if reverse else expected)


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize(
    "cuts",
    [[1, 3], [0, 2, 2], [0, 3, 2], [0, 3, 5], [0, 2, 5, 7], [0, 3, 8], [0, 8], [-1, 2], [0, 0]],
    ids=str,
)
def test_scan_refuses_irregular_cuts(cuts, folded, draw_maps):
    with pytest.raises(ValueError, match=r"`cuts` must start at 0 and grow by equal steps.*7 frames"):
        boundary_scan(*draw_maps(7), cuts, folded=folded)


@pytest.mark.parametrize("folded", [True, False])
def test_scan_of_no_frames_returns_the_initial_state(folded, draw_maps):
    transition, update, initial = draw_maps(0)
    assert torch.equal(boundary_scan(transition, update, initial, [0], folded=folded), initial.unsqueeze(1))

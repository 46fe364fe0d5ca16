"""The state every frame reads: bounds, decay and gradients of both ways to scan."""

import pytest
import torch
from torch.autograd import gradcheck

from diffusers_h3.hybrid.config import HybridAttentionConfig
from diffusers_h3.hybrid.layout import plan_branch
from diffusers_h3.ops.linear_state import linear_states, readout


PLANS = [
    ("both", 5, 1, 23),
    ("none", 5, 1, 17),
    ("rows", 3, 1, 7),
    ("columns", 3, 0, 10),
    ("both", 1, 1, 6),
    ("both", 1, 2, 9),
    ("none", 0, 1, 5),
    ("both", 0, 2, 9),
    ("both", 1, 0, 3),
]


def _plan(anchor_frames, chunk, radius, num_frames):
    config = HybridAttentionConfig(anchor_frames=anchor_frames, chunk=chunk, radius=radius)
    plan = plan_branch(config, num_frames)
    assert plan.num_frames > 0
    return plan


@pytest.fixture
def problem(draw, draw_maps):
    """A function drawing the four tensors of `linear_states`."""

    def make(num_frames, requires_grad=False, **sizes):
        transition, update, initial = draw_maps(num_frames, requires_grad=requires_grad, **sizes)
        batch, _, heads, dim, _ = transition.shape
        log_alpha = (-draw(batch, num_frames, heads, dim).abs()).requires_grad_(requires_grad)
        return transition, update, initial, log_alpha

    return make


def test_states_by_hand():
    """One channel, S ← 2·S + u with u = 1, 10, 100 from 4, α = ½: every state by arithmetic."""
    transition = torch.full((1, 3, 1, 1, 1), 2.0, dtype=torch.float64)
    update = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).view(1, 3, 1, 1, 1)
    initial = torch.full((1, 1, 1, 1), 4.0, dtype=torch.float64)
    log_alpha = torch.full((1, 3, 1, 1), 0.5, dtype=torch.float64).log()
    # Each frame sees itself alone: it reads the states before and after it, both decayed once.
    # Forward: 4, 9, 28, 156. Backward from the end: 4, 108, 226, 453.
    arguments = (transition, update, initial, log_alpha, (-1, 0, 1), (1, 2, 3))
    for folded in (True, False):
        decayed = linear_states(*arguments, bridge="alpha", folded=folded)
        assert decayed.flatten().tolist() == pytest.approx([(4 + 226) / 2, (9 + 108) / 2, (28 + 4) / 2])
        plain = linear_states(*arguments, bridge="none", folded=folded)
        assert plain.flatten().tolist() == pytest.approx([4 + 226, 9 + 108, 28 + 4])


def test_decay_runs_over_the_whole_window_by_hand():
    """All frames in one window: frame t decays by α₀…α_t to the left and α_t…α₂ to the right."""
    maps = torch.zeros(1, 3, 1, 1, 1, dtype=torch.float64)
    initial = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    log_alpha = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64).log().view(1, 3, 1, 1)
    expected = [0.5 + 0.5 * 0.25 * 0.125, 0.5 * 0.25 + 0.25 * 0.125, 0.5 * 0.25 * 0.125 + 0.125]
    for prefix, suffix in (((-1,) * 3, (3,) * 3), ((-4,) * 3, (8,) * 3)):
        states = linear_states(maps, maps, initial, log_alpha, prefix, suffix)
        assert states.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("bridge", ["alpha", "none"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_folded_equals_frame_loop(plan, bridge, problem):
    plan = _plan(*plan)
    tensors = problem(plan.num_frames)
    folded = linear_states(*tensors, plan.prefix, plan.suffix, bridge, folded=True)
    walked = linear_states(*tensors, plan.prefix, plan.suffix, bridge, folded=False)
    assert folded.shape == (2, plan.num_frames, 2, 4, 3)
    torch.testing.assert_close(folded, walked, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bridge", ["alpha", "none"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_gradients_of_folded_equal_those_of_the_frame_loop(plan, bridge, draw, problem):
    plan = _plan(*plan)
    tensors = problem(plan.num_frames, requires_grad=True)
    weight = draw(2, plan.num_frames, 2, 4, 3)
    gradients = [
        torch.autograd.grad(
            (linear_states(*tensors, plan.prefix, plan.suffix, bridge, folded=folded) * weight).sum(),
            tensors,
            allow_unused=True,
            materialize_grads=True,
        )
        for folded in (True, False)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert (gradients[0][3].abs().sum() > 0) == (bridge == "alpha")
    assert gradients[0][2].abs().sum() > 0


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("bridge", ["alpha", "none"])
@pytest.mark.parametrize("plan", [("both", 3, 1, 9), ("none", 0, 1, 5)], ids=str)
def test_gradcheck(plan, bridge, folded, problem):
    plan = _plan(*plan)
    tensors = problem(plan.num_frames, requires_grad=True, batch=1, heads=1, dim=2, value_dim=2)
    tensors = tensors if bridge == "alpha" else (*tensors[:3], tensors[3].detach())
    assert gradcheck(
        lambda *tensors: linear_states(*tensors, plan.prefix, plan.suffix, bridge, folded=folded), tensors
    )


def test_readout(draw):
    states, query, gate, weight = draw(2, 3, 2, 4, 4), draw(2, 3, 6, 2, 4), draw(2, 3, 6, 8), draw(4)
    result = readout(states, query, gate, weight, 0.5)
    assert result.shape == (2, 3, 6, 8)
    read = states[1, 2, 1] @ query[1, 2, 4, 1]
    expected = read / (read.square().mean() + 0.5).sqrt() * weight * torch.sigmoid(gate[1, 2, 4, 4:])
    torch.testing.assert_close(result[1, 2, 4, 4:], expected, rtol=1e-12, atol=1e-12)


def test_readout_keeps_the_dtype_of_its_query(draw):
    states, query, gate, weight = draw(1, 2, 2, 4, 4), draw(1, 2, 3, 2, 4), draw(1, 2, 3, 8), draw(4)
    exact = readout(states, query, gate, weight, 1e-6)
    rounded = readout(states.float(), query.bfloat16(), gate.bfloat16(), weight.bfloat16(), 1e-6)
    assert rounded.dtype == torch.bfloat16
    # A handful of roundings to eight bits, each at most 2⁻⁹ relative.
    assert (rounded.double() - exact).norm() <= 8 * 2**-9 * exact.norm()


def test_readout_gradients(draw):
    tensors = (draw(1, 2, 2, 3, 3), draw(1, 2, 3, 2, 3), draw(1, 2, 3, 6), draw(3))
    tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    assert gradcheck(lambda *tensors: readout(*tensors, 1e-3), tensors)

"""The states of all frames and their readout."""

import pytest
import torch

from diffusers_h3.hybrid.config import HybridAttentionConfig
from diffusers_h3.hybrid.layout import plan_branch
from diffusers_h3.ops.linear_state import linear_states, readout, reference


# Anchor frames, chunk, radius, latent frames and the branch's frames; the last plan reads the initial state alone.
PLANS = (
    ("both", 5, 1, 53, 51),
    ("none", 5, 1, 17, 17),
    ("both", 3, 0, 7, 5),
    ("rows", 1, 1, 5, 5),
    ("none", 0, 1, 3, 3),
    ("none", 0, 0, 2, 2),
    ("both", 1, 0, 3, 1),
)
STATES = ["_scan_kernel", "_scan_kernel", "_bridge_states_kernel"]


def _problem(draw, batch, frames, heads, dim):
    transition = draw(batch, frames, heads, dim, dim) * 0.7 / dim**0.5
    update, initial = draw(batch, frames, heads, dim, dim), draw(batch, heads, dim, dim)
    log_alpha = -draw(batch, frames, heads, dim).abs() / 4
    return tuple(tensor.float() for tensor in (transition, update, initial, log_alpha))


@pytest.mark.parametrize("bridge", ["alpha", "none"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_states_of_plans(plan, bridge, agrees, draw):
    anchor_frames, chunk, radius, num_frames, branch_frames = plan
    config = HybridAttentionConfig(anchor_frames=anchor_frames, chunk=chunk, radius=radius)
    branch = plan_branch(config, num_frames)
    assert branch.num_frames == branch_frames
    tensors = _problem(draw, 2, branch_frames, 1 if branch_frames > 20 else 3, 16)
    kernels = STATES if branch_frames > 1 else STATES[2:]
    agrees(linear_states, (*tensors, branch.prefix, branch.suffix, bridge, False), kernels)


@pytest.mark.parametrize("dim", [20, 32, 48, 64, 128])
def test_states_of_head_dimensions(dim, agrees, draw):
    tensors = _problem(draw, 1, 5, 1, dim)
    agrees(linear_states, (*tensors, (-1, -1, 0, 1, 2), (2, 3, 4, 5, 5), "alpha", False), STATES)


def test_states_start_from_the_text(draw):
    """With maps that forget, a side without frames hands on the initial state, decayed over the window."""
    zeros, initial = torch.zeros(1, 3, 2, 16, 16), draw(1, 2, 16, 16).float()
    log_alpha = -draw(1, 3, 2, 16).abs().float()
    states = linear_states(zeros, zeros, initial, log_alpha, (-1, -1, -1), (3, 3, 3), "alpha")
    alpha = log_alpha[0].exp()
    left, right = alpha[0] * alpha[1], alpha[1] * alpha[2]
    expected = initial[0] * (left + right).unsqueeze(-2)
    torch.testing.assert_close(states[0, 1], expected, rtol=1e-6, atol=1e-6)


def test_states_of_a_strided_decay(agrees, draw):
    transition, update, initial, log_alpha = _problem(draw, 2, 4, 3, 16)
    log_alpha = log_alpha.movedim(2, 0).contiguous().movedim(0, 2)
    agrees(
        linear_states, (transition, update, initial, log_alpha, (-1, 0, 0, 1), (2, 3, 3, 4), "alpha", False), STATES
    )


def test_readout(size, dtype, agrees, draw):
    batch, frames, rows, heads, dim = size
    states, query = draw(batch, frames, heads, dim, dim).float(), draw(*size).to(dtype)
    gate, weight = draw(batch, frames, rows, heads * dim).to(dtype), draw(dim).to(dtype)
    agrees(readout, (states, query, gate, weight, 1e-6), ["_readout_kernel"], reference.readout)


def test_readout_of_strided_inputs(dtype, agrees, draw):
    """Queries out of wider heads, gates out of a packed projection, states stored transposed."""
    states = draw(2, 3, 2, 48, 48).float().mT
    query = draw(2, 3, 24, 2, 2 * 48).to(dtype)[:, :, 1:22, :, 48:]
    gate = draw(2, 3, 24, 3 * 96).to(dtype)[:, :, 1:22, 96:192]
    weight = draw(48).to(dtype)
    agrees(readout, (states, query, gate, weight, 1e-6), ["_readout_kernel"], reference.readout)
    across = draw(2, 3, 21, 48, 2).to(dtype).mT
    agrees(readout, (states, across, gate, weight, 1e-6), ["_readout_kernel"], reference.readout)


def test_readout_norm_adds_eps_to_the_mean_square(agrees, draw):
    states, query = 0.1 * draw(1, 1, 2, 16, 16).float(), draw(1, 1, 9, 2, 16).float()
    gate, weight = draw(1, 1, 9, 32).float(), draw(16).float()
    agrees(readout, (states, query, gate, weight, 0.5), ["_readout_kernel"], reference.readout)

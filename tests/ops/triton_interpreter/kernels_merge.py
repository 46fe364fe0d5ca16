"""The merge of two attention results with the gate."""

import pytest
import torch

from diffusers_h3.ops.window_attention.merge import merge_gated


def _merged(parts, gate):
    output = torch.empty(parts[0][0].shape, dtype=parts[0][0].dtype)
    merge_gated(parts, gate, output)
    return output


def _softmax_merge(first, second, gate):
    """The definition, in the dtype of its inputs: weights ``exp(lse)`` over their sum."""
    (one, lse_one), (two, lse_two) = first, second
    share = (lse_one.exp() / (lse_one.exp() + lse_two.exp())).unsqueeze(-1).to(one.dtype)
    merged = one * share + two * (1 - share)
    return merged if gate is None else merged * torch.sigmoid(gate).unsqueeze(-1).to(one.dtype)


def _error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm()).item()


def _double(pair):
    return tuple(tensor.double() for tensor in pair)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("size", [(1, 1, 16), (7, 3, 32), (63, 1, 48), (100, 3, 64), (33, 2, 128)], ids=str)
def test_values(size, dtype, gated, launches, draw):
    first, second = ((draw(*size).to(dtype), 3 * draw(*size[:2]).float()) for _ in range(2))
    gate = draw(*size[:2]).to(dtype) if gated else None
    output = _merged((first, second), gate)
    assert launches == ["_merge_two_kernel"]
    exact = _softmax_merge(_double(first), _double(second), None if gate is None else gate.double())
    eager = _softmax_merge(first, second, gate)
    assert _error(output, exact) <= max(1.5 * _error(eager, exact), 1e-6)


def test_rows_of_wider_buffers(dtype, launches, draw):
    """As the window calls it: part of the shared result, log-sum-exps with heads first, every second row's gate."""
    wide, mine = draw(50, 3, 32).to(dtype), draw(21, 3, 64).to(dtype)[..., :32]
    lse_wide, lse_mine = draw(3, 50).float().T, draw(3, 21).float().T
    gate = draw(42, 3).to(dtype)[::2]
    buffer = torch.full((60, 3, 32), 7.0, dtype=dtype)
    first, second = (mine, lse_mine), (wide[9:30], lse_wide[9:30])
    merge_gated((first, second), gate, buffer[30:51])
    assert launches == ["_merge_two_kernel"]
    exact = _softmax_merge(_double(first), _double(second), gate.double())
    eager = _softmax_merge(first, second, gate)
    assert _error(buffer[30:51], exact) <= max(1.5 * _error(eager, exact), 1e-6)
    assert (buffer[:30] == 7).all()
    assert (buffer[51:] == 7).all()


def test_distant_log_sum_exps_choose_one_side(draw):
    """Logits hundreds apart neither overflow nor mix."""
    one, two = draw(2, 1, 16).float(), draw(2, 1, 16).float()
    low, high = torch.tensor([[-400.0], [300.0]]), torch.tensor([[500.0], [-200.0]])
    output = _merged(((one, low), (two, high)), None)
    assert torch.equal(output, torch.stack((two[0], one[1])))

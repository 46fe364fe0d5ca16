"""Gram matrices and cross moments of every frame."""

import pytest
import torch

from diffusers_h3.ops.frame_statistics import frame_statistics, reference


KERNELS = ["_frame_statistics_kernel"]


def _unit(rows):
    return rows / rows.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("gram_fp32", [True, False])
def test_values(size, dtype, gram_fp32, agrees, draw):
    key, value = _unit(draw(*size)).to(dtype), draw(*size).to(dtype)
    beta = torch.sigmoid(draw(*size[:-1])).to(dtype)
    agrees(frame_statistics, (key, value, beta, gram_fp32), KERNELS, reference.frame_statistics)


@pytest.mark.parametrize("gram_fp32", [True, False])
def test_strided_inputs(dtype, gram_fp32, agrees, draw):
    """Both halves of wider heads, rows of a longer sequence, beta with its heads first."""
    both = draw(2, 3, 40, 3, 2 * 48).to(dtype)[:, :, 3:36]
    beta = torch.sigmoid(draw(3, 2, 3, 33)).to(dtype).movedim(0, -1)
    arguments = (both[..., :48], both[..., 48:], beta, gram_fp32)
    agrees(frame_statistics, arguments, KERNELS, reference.frame_statistics)
    arguments = (both[..., :48], both[..., ::2], beta, gram_fp32)
    agrees(frame_statistics, arguments, KERNELS, reference.frame_statistics)


def test_half_precision_keeps_float32_accuracy(draw):
    """The remainder of `β·k` counts: without it the Gram matrix has the error of one bfloat16 rounding."""
    key, value = draw(1, 2, 200, 2, 32).bfloat16(), draw(1, 2, 200, 2, 32).bfloat16()
    beta = torch.sigmoid(draw(1, 2, 200, 2)).bfloat16()
    exact, _ = frame_statistics(key.double(), value.double(), beta.double())
    errors = [
        ((frame_statistics(key, value, beta, gram_fp32)[0] - exact).norm() / exact.norm()).item()
        for gram_fp32 in (True, False)
    ]
    assert errors[0] <= 1e-5
    assert 1e-4 <= errors[1] <= 2**-8


def test_other_value_dimensions_take_the_reference(agrees, draw):
    key, value, beta = draw(1, 2, 9, 2, 16), draw(1, 2, 9, 2, 24), torch.sigmoid(draw(1, 2, 9, 2))
    agrees(frame_statistics, (key.float(), value.float(), beta.float()), [], reference.frame_statistics)

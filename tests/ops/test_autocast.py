"""Under autocast the branch still accumulates in float32: Gram matrices are inverted and states compound."""

import pytest
import torch

from diffusers_h3.ops.delta_rule import boundary_scan, delta_factors
from diffusers_h3.ops.frame_statistics import frame_statistics
from diffusers_h3.ops.linear_state import linear_states


def _assert_unchanged(function, *tensors):
    """`function` under bfloat16 autocast gives float32 results, close to those without it as float32 is."""
    plain = function(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        automatic = function(*tensors)
    plain, automatic = (result if isinstance(result, tuple) else (result,) for result in (plain, automatic))
    for expected, actual in zip(plain, automatic, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frame_statistics(dtype, draw):
    key, value, beta = draw(1, 3, 20, 2, 8), draw(1, 3, 20, 2, 8), torch.sigmoid(draw(1, 3, 20, 2))
    _assert_unchanged(frame_statistics, key.to(dtype), value.to(dtype), beta.to(dtype))


@pytest.mark.parametrize("rule", ["vdn_solve", "vdn_scaled", "sana_scaled"])
def test_delta_factors(rule, draw):
    rows = draw(1, 3, 2, 9, 8).float()
    gram, cross, alpha = rows.mT @ rows, draw(1, 3, 2, 8, 8).float(), torch.sigmoid(draw(1, 3, 2, 8)).float()
    _assert_unchanged(lambda *tensors: delta_factors(*tensors, rule, rows=9), gram, cross, alpha)


@pytest.mark.parametrize("folded", [True, False])
def test_boundary_scan(folded, draw_maps):
    maps = (tensor.float() for tensor in draw_maps(9))
    _assert_unchanged(lambda *maps: boundary_scan(*maps, [0, 3, 6, 9], folded=folded), *maps)


def test_linear_states(draw, draw_maps):
    maps = (tensor.float() for tensor in draw_maps(9))
    log_alpha = -draw(2, 9, 2, 3).abs().float()
    prefix, suffix = (-4,) * 3 + (-1,) * 3 + (2,) * 3, (6,) * 3 + (9,) * 3 + (12,) * 3
    _assert_unchanged(lambda *tensors: linear_states(*tensors, prefix, suffix), *maps, log_alpha)

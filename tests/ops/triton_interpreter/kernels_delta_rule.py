"""The inverse of the delta rule and the scan over frames."""

import pytest
import torch

from diffusers_h3.ops.delta_rule import boundary_scan, delta_factors, reference


DIMS = (16, 20, 32, 48, 64, 128)

# Frames of the clip and the counts whose states are read: none, all, the end alone, a short first step, a tail that no
# cut reaches.
CUTS = (
    (1, [0, 1]),
    (2, [0, 2]),
    (7, [0, 1, 4, 7]),
    (7, [0, 2, 5]),
    (9, [0, 5]),
    (5, [0, 1, 2, 3, 4, 5]),
    (51, [0, 1, 11, 21, 31, 41, 51]),
)


def _statistics(draw, batch, frames, heads, dim, rows):
    key = draw(batch, frames, heads, rows, dim)
    key = key / key.norm(dim=-1, keepdim=True)
    beta = torch.sigmoid(draw(batch, frames, heads, rows, 1))
    value = draw(batch, frames, heads, rows, dim)
    gram, cross = (key * beta).mT @ key, (value * beta).mT @ key
    return gram.float(), cross.float(), torch.sigmoid(draw(batch, frames, heads, dim)).float()


@pytest.mark.parametrize("decayed", [True, False])
@pytest.mark.parametrize("rule", ["vdn_solve", "vdn_scaled"])
@pytest.mark.parametrize("rows", [1, 100])
def test_factors(rows, rule, decayed, agrees, draw):
    """One row makes a Gram matrix of rank one, a hundred fill it; without the decay as the text has it."""
    gram, cross, alpha = _statistics(draw, 2, 2, 2, 16, rows)
    agrees(delta_factors, (gram, cross, alpha if decayed else None, rule, rows), ["_delta_factors_kernel"])


@pytest.mark.parametrize("dim", DIMS)
def test_factors_of_head_dimensions(dim, agrees, draw):
    agrees(delta_factors, (*_statistics(draw, 1, 2, 1, dim, 63), "vdn_solve", 63), ["_delta_factors_kernel"])


def test_factors_of_ill_conditioned_frames(launches, draw):
    """The keys of a still frame are nearly one vector: eigenvalues from 1 to 1,000 beside the identity.

    A stable inversion in float32 errs by at most the condition number times 2⁻²⁴.
    """
    key = draw(1, 1, 1, 1, 32) + 0.01 * draw(1, 2, 1, 1000, 32)
    key = key / key.norm(dim=-1, keepdim=True)
    gram, cross = (key.mT @ key).float(), (draw(1, 2, 1, 1000, 32).mT @ key).float()
    condition = torch.linalg.cond(torch.eye(32) + gram.double()).max()
    assert 500 < condition < 2000
    launches.clear()
    factors = delta_factors(gram, cross, None, "vdn_solve", 1000)
    assert launches == ["_delta_factors_kernel"]
    for actual, exact in zip(
        factors, reference.solve_factors(gram.double(), cross.double(), None, 1.0, 1.0), strict=True
    ):
        assert (actual.double() - exact).norm() <= condition * 2**-24 * exact.norm()


def test_factors_of_strided_statistics(agrees, draw):
    gram, cross, alpha = _statistics(draw, 2, 2, 2, 32, 40)
    statistics = torch.stack((gram, cross), dim=-1)
    arguments = (statistics[..., 0], statistics[..., 1], alpha.mT.contiguous().mT, "vdn_solve", 40)
    agrees(delta_factors, arguments, ["_delta_factors_kernel"])


def test_the_pointwise_rule_launches_nothing(agrees, draw):
    gram, cross, alpha = _statistics(draw, 1, 2, 2, 16, 9)
    agrees(delta_factors, (gram, cross, alpha, "sana_scaled", 9), [])


def _maps(draw, batch, frames, heads, dim):
    scale = 0.7 / dim**0.5  # a random matrix of this scale shrinks the state a little
    maps = (draw(batch, frames, heads, dim, dim) * scale, draw(batch, frames, heads, dim, dim))
    return tuple(tensor.float() for tensor in (*maps, draw(batch, heads, dim, dim)))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("frames", "cuts"), CUTS, ids=str)
def test_scan_cuts(frames, cuts, reverse, agrees, draw):
    agrees(boundary_scan, (*_maps(draw, 2, frames, 2, 16), cuts, reverse, False), ["_scan_kernel"])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_scan_dimensions(dim, reverse, agrees, draw):
    agrees(boundary_scan, (*_maps(draw, 1, 5, 1, dim), [0, 1, 3, 5], reverse, False), ["_scan_kernel"])


def test_scan_of_strided_maps(agrees, draw):
    transition, update, initial = _maps(draw, 2, 4, 2, 16)
    maps = torch.stack((transition, update), dim=2)
    arguments = (maps[:, :, 0], maps[:, :, 1], initial.mT.contiguous().mT, [0, 2, 4], False, False)
    agrees(boundary_scan, arguments, ["_scan_kernel"])


def test_scan_that_reads_no_frame_launches_nothing(agrees, draw):
    agrees(boundary_scan, (*_maps(draw, 1, 3, 2, 16), [0], False, False), [])

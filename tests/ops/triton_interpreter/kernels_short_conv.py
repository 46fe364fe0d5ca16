"""The short convolutions over space and time with SiLU and L2 norm, in one pass, and SiLU and norm alone."""

import pytest
import torch

from diffusers_h3.ops.short_conv import convolved_features, pointwise_features, reference
from diffusers_h3.ops.short_conv import triton as kernels


CONVOLVED, POINTWISE = ["_convolved_features_kernel"], ["_pointwise_features_kernel"]

# B, F, grid, H, D: one frame, two, odd counts; grids below the reach of the taps, with sides that no tile divides, of
# several tiles either way; head dimensions below, at and between powers of two.
CLIPS = (
    (1, 1, (1, 1), 1, 16),
    (1, 2, (3, 5), 3, 64),
    (2, 3, (3, 5), 1, 16),
    (1, 3, (7, 2), 1, 48),
    (1, 2, (1, 70), 1, 16),
    (1, 1, (2, 6), 2, 128),
    (1, 1, (4, 4), 1, 256),
    (1, 9, (2, 3), 1, 16),
)


def _taps(draw, channels, dtype):
    return (draw(channels, 1, 5, 5) / 5).to(dtype), (draw(channels, 1, 5) / 2).to(dtype)


@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_clips(clip, agrees, draw):
    batch, frames, grid, heads, dim = clip
    features = draw(batch, frames, grid[0] * grid[1], heads * dim).float()
    arguments = (features, *_taps(draw, heads * dim, torch.float32), grid, heads, True)
    agrees(convolved_features, arguments, CONVOLVED, reference.convolved_features)


@pytest.mark.parametrize("normalize", [True, False])
def test_dtypes(dtype, normalize, agrees, draw):
    arguments = (draw(1, 2, 15, 64).to(dtype), *_taps(draw, 64, dtype), (3, 5), 1, normalize)
    agrees(convolved_features, arguments, CONVOLVED, reference.convolved_features)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tile", [(1, 1, 1), (2, 3, 2), (5, 1, 1), (3, 3, 4)], ids=str)
def test_other_tiles(tile, normalize, agrees, draw, monkeypatch):
    """More pixels a thread than the grid has rows or columns, and fewer."""
    monkeypatch.setattr(kernels, "TILES", {normalize: kernels.Tile(*tile)})
    arguments = (draw(1, 2, 28, 16).float(), *_taps(draw, 16, torch.float32), (4, 7), 1, normalize)
    agrees(convolved_features, arguments, CONVOLVED, reference.convolved_features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:], indirect=True)
def test_rounds_once(dtype, draw):
    """Nothing but the result is rounded to half precision: the error is that of rounding the exact result."""
    arguments = (draw(1, 2, 15, 64).to(dtype), *_taps(draw, 64, dtype), (3, 5), 2, True)
    exact = convolved_features(*(rows.double() if isinstance(rows, torch.Tensor) else rows for rows in arguments))
    error, rounding = ((rows.double() - exact).norm() for rows in (convolved_features(*arguments), exact.to(dtype)))
    assert 0 < error <= 1.01 * rounding


def test_frames_and_rows_do_not_leak(launches):
    """An impulse in the corner of the middle frame answers in five frames and three rows and columns, or nowhere."""
    features = torch.zeros(1, 9, 6 * 7, 16)
    features[0, 4, 0] = 1.0
    output = convolved_features(features, torch.ones(16, 1, 5, 5), torch.ones(16, 1, 5), (6, 7), 1, False)
    assert launches == CONVOLVED
    expected = torch.zeros(9, 6, 7)
    expected[2:7, :3, :3] = torch.sigmoid(torch.ones(()))
    torch.testing.assert_close(output[0, ..., 0, 3].unflatten(1, (6, 7)), expected, rtol=1e-6, atol=0)


def test_strided_inputs(dtype, agrees, draw):
    """Channels of a packed projection, rows of a longer sequence, and channels that are not adjacent at all."""
    spatial, temporal = draw(5, 5, 64).to(dtype).movedim(-1, 0).unsqueeze(1), draw(5, 64).to(dtype).T.unsqueeze(1)
    packed = draw(2, 5 * 20 + 7, 3 * 64).to(dtype)[:, 7:, 64:128].unflatten(1, (5, 20))[:, 1:3, 2:17]
    across = draw(2, 2, 64, 15).to(dtype).mT
    for features in (packed, across):
        arguments = (features, spatial, temporal, (3, 5), 1, True)
        agrees(convolved_features, arguments, CONVOLVED, reference.convolved_features)
        agrees(pointwise_features, (features, 2, True), POINTWISE, reference.pointwise_features)


def test_taps_of_another_dtype(agrees, draw):
    arguments = (draw(1, 3, 15, 32).bfloat16(), *_taps(draw, 32, torch.float32), (3, 5), 2, True)
    agrees(convolved_features, arguments, CONVOLVED, reference.convolved_features)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_norm_adds_eps_to_the_squared_sum(eps, agrees, draw):
    features, taps = 0.1 * draw(1, 3, 6, 32).float(), _taps(draw, 32, torch.float32)
    agrees(convolved_features, (features, *taps, (2, 3), 2, True, eps), CONVOLVED, reference.convolved_features)
    agrees(pointwise_features, (features, 2, True, eps), POINTWISE, reference.pointwise_features)


@pytest.mark.parametrize(("spatial", "temporal"), [((3, 3), 5), ((5, 5), 3), ((7, 7), 7), ((5, 3), 5)], ids=str)
def test_other_kernel_sizes_take_the_reference(spatial, temporal, launches, draw):
    """Their values are compared with PyTorch's convolutions in `tests/ops`."""
    features = draw(1, 4, 6, 32).float()
    arguments = (features, draw(32, 1, *spatial).float(), draw(32, 1, temporal).float(), (2, 3), 2, True)
    if spatial[0] == spatial[1]:
        assert convolved_features(*arguments).shape == (1, 4, 6, 2, 16)
    else:
        with pytest.raises(RuntimeError):  # no odd square: the padding of one side does not fit the other
            convolved_features(*arguments)
    assert launches == []


@pytest.mark.parametrize("normalize", [True, False])
def test_pointwise(size, dtype, normalize, agrees, draw):
    batch, frames, rows, heads, dim = size
    features = draw(batch, frames, rows, heads * dim).to(dtype)
    agrees(pointwise_features, (features, heads, normalize), POINTWISE, reference.pointwise_features)


@pytest.mark.parametrize("normalize", [True, False])
def test_zero_rows_stay_zero(normalize, launches):
    """As padding and black frames have them; large negative values, whose exponential overflows, give zero too."""
    features = torch.zeros(1, 2, 6, 32)
    features[0, 1] = -200.0
    spatial, temporal = torch.zeros(32, 1, 5, 5), torch.zeros(32, 1, 5)
    spatial[:, :, 2, 2] = temporal[:, :, 2] = 1.0
    for output in (
        convolved_features(features, spatial, temporal, (2, 3), 2, normalize),
        pointwise_features(features, 2, normalize),
    ):
        assert torch.equal(output, torch.zeros(1, 2, 6, 2, 16))
    assert launches == CONVOLVED + POINTWISE

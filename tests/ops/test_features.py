"""Short convolutions and frame statistics: values against PyTorch's own operators, dtypes, gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from diffusers_h3.ops.frame_statistics import frame_statistics
from diffusers_h3.ops.short_conv import convolved_features, pointwise_features
from diffusers_h3.ops.short_conv.reference import spatial_conv


@pytest.mark.parametrize("grid", [(5, 2), (1, 1), (3, 4), (7, 3)])
def test_spatial_conv_is_a_padded_correlation(grid, draw):
    """One pixel at a time: the response of an impulse is the flipped kernel around it."""
    weight = draw(3, 1, 5, 5)
    features = torch.zeros(1, 2, grid[0] * grid[1], 3, dtype=torch.float64)
    row, column = grid[0] // 2, grid[1] // 2
    features[0, 1, row * grid[1] + column] = torch.tensor([1.0, 2.0, -1.0])
    result = spatial_conv(features, weight, grid)
    assert result.shape == features.shape
    assert result.is_contiguous()
    assert result[0, 0].abs().sum() == 0
    for y in range(grid[0]):
        for x in range(grid[1]):
            down, right = row - y + 2, column - x + 2
            reached = 0 <= down < 5 and 0 <= right < 5
            expected = weight[:, 0, down, right] * torch.tensor([1.0, 2.0, -1.0]) if reached else torch.zeros(3)
            torch.testing.assert_close(result[0, 1, y * grid[1] + x], expected.double(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("taps", [(5, 5), (3, 7)])
@pytest.mark.parametrize("num_frames", [1, 2, 3, 8])
def test_convolved_features_equal_conv3d(num_frames, taps, normalize, draw):
    """Both convolutions are one depthwise convolution of the volume with the product of their kernels."""
    features, spatial, temporal = draw(2, num_frames, 12, 8), draw(8, 1, taps[0], taps[0]), draw(8, 1, taps[1])
    volume = features.unflatten(2, (3, 4)).permute(0, 4, 1, 2, 3)
    kernel = temporal[..., None, None] * spatial.unsqueeze(2)
    expected = F.conv3d(volume, kernel, padding=(taps[1] // 2, taps[0] // 2, taps[0] // 2), groups=8)
    expected = expected.permute(0, 2, 3, 4, 1).flatten(2, 3)
    expected = (expected / (1 + torch.exp(-expected))).unflatten(-1, (2, 4))
    if normalize:
        expected = expected / (expected.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    actual = convolved_features(features, spatial, temporal, (3, 4), 2, normalize)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("normalize", [True, False])
def test_pointwise_features(normalize, draw):
    features = draw(1, 3, 2, 4)
    expected = (features * torch.sigmoid(features)).unflatten(-1, (2, 2))
    if normalize:
        expected = expected / (expected.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(pointwise_features(features, 2, normalize), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_the_features(normalize, draw):
    features = draw(1, 4, 6, 4, requires_grad=True)
    taps = draw(4, 1, 5, 5, requires_grad=True), draw(4, 1, 5, requires_grad=True)
    assert gradcheck(lambda *tensors: convolved_features(*tensors, (3, 2), 2, normalize), (features, *taps))
    assert gradcheck(lambda features: pointwise_features(features, 2, normalize), (features,))


def test_features_of_half_precision(draw):
    """The reference rounds after the spatial convolution and at the end, to half precision, and nowhere between."""
    features, spatial, temporal = draw(1, 6, 6, 8).bfloat16(), draw(8, 1, 5, 5).bfloat16(), draw(8, 1, 5).bfloat16()
    result = convolved_features(features, spatial, temporal, (2, 3), 2, True)
    assert result.dtype == torch.bfloat16
    between = spatial_conv(features.float(), spatial.float(), (2, 3)).bfloat16()
    centre = torch.zeros(8, 1, 5, 5)
    centre[:, :, 2, 2] = 1
    expected = convolved_features(between.float(), centre, temporal.float(), (2, 3), 2, True)
    assert (result.float() - expected).norm() <= 2**-8 * expected.norm()
    pointwise = pointwise_features(features, 2, True)
    assert pointwise.dtype == torch.bfloat16
    assert torch.equal(pointwise, pointwise_features(features.float(), 2, True).bfloat16())


def test_zero_rows_stay_finite():
    zeros = torch.zeros(1, 2, 3, 4, requires_grad=True)
    result = pointwise_features(zeros, 2, True)
    assert torch.equal(result, torch.zeros(1, 2, 3, 2, 2))
    (gradient,) = torch.autograd.grad(result.sum(), zeros)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("gram_fp32", [True, False])
def test_frame_statistics_sum_outer_products(gram_fp32, draw):
    key, value, beta = draw(2, 3, 4, 2, 5), draw(2, 3, 4, 2, 6), torch.sigmoid(draw(2, 3, 4, 2))
    gram, cross = frame_statistics(key, value, beta, gram_fp32)
    assert gram.shape == (2, 3, 2, 5, 5)
    assert cross.shape == (2, 3, 2, 6, 5)
    outer = sum(beta[1, 2, row, 1] * torch.outer(key[1, 2, row, 1], key[1, 2, row, 1]) for row in range(4))
    torch.testing.assert_close(gram[1, 2, 1], outer, rtol=1e-12, atol=1e-12)
    moment = sum(beta[1, 2, row, 1] * torch.outer(value[1, 2, row, 1], key[1, 2, row, 1]) for row in range(4))
    torch.testing.assert_close(cross[1, 2, 1], moment, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gram_fp32", [True, False])
def test_frame_statistics_gradients(gram_fp32, draw):
    tensors = (draw(1, 2, 3, 2, 2), draw(1, 2, 3, 2, 3), torch.sigmoid(draw(1, 2, 3, 2)))
    tensors = tuple(tensor.requires_grad_() for tensor in tensors)
    assert gradcheck(lambda *tensors: frame_statistics(*tensors, gram_fp32), tensors)


def test_frame_statistics_precision_under_bfloat16(draw):
    """Both statistics are float32. The Gram matrix is exact to float32 rounding, or to bfloat16's where asked so."""
    key, value = draw(1, 2, 64, 2, 8).bfloat16(), draw(1, 2, 64, 2, 8).bfloat16()
    beta = torch.sigmoid(draw(1, 2, 64, 2)).bfloat16()
    exact, exact_cross = frame_statistics(key.double(), value.double(), beta.double())
    errors = {}
    for gram_fp32 in (True, False):
        gram, cross = frame_statistics(key, value, beta, gram_fp32)
        assert gram.dtype == cross.dtype == torch.float32
        assert torch.equal(gram, gram.transpose(-1, -2))
        assert (cross - exact_cross).norm() <= 1e-6 * exact_cross.norm()
        errors[gram_fp32] = ((gram - exact).norm() / exact.norm()).item()
    assert errors[True] <= 1e-6
    # bfloat16 keeps eight bits: one rounding is at most 2⁻⁹ relative, the products see two and the sum a third.
    assert 1e-5 < errors[False] <= 3 * 2**-9

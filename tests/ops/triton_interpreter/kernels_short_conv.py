"""The temporal convolution with SiLU and L2 norm."""

import pytest

from diffusers_h3.ops.short_conv import reference, temporal_features


KERNELS = ["_temporal_features_kernel"]


@pytest.mark.parametrize(("convolved", "normalize"), [(True, True), (True, False), (False, True)])
def test_values(size, dtype, convolved, normalize, agrees, draw):
    batch, frames, rows, heads, dim = size
    features = draw(batch, frames, rows, heads * dim).to(dtype)
    weight = draw(heads * dim, 1, 5).to(dtype) if convolved else None
    agrees(temporal_features, (features, weight, heads, normalize), KERNELS, reference.temporal_features)


@pytest.mark.parametrize("convolved", [True, False])
def test_strided_inputs(dtype, convolved, agrees, draw):
    """Channels of a packed projection, rows of a longer sequence, and channels that are not adjacent at all."""
    weight = draw(5, 64).to(dtype).T.unsqueeze(1) if convolved else None
    packed = draw(2, 9, 21, 3 * 64).to(dtype)[:, 1:7, 2:19, 64:128]
    agrees(temporal_features, (packed, weight, 2, True), KERNELS, reference.temporal_features)
    across = draw(2, 6, 64, 17).to(dtype).mT
    agrees(temporal_features, (across, weight, 2, True), KERNELS, reference.temporal_features)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_norm_adds_eps_to_the_squared_sum(eps, agrees, draw):
    features, weight = 0.1 * draw(1, 3, 5, 32).float(), draw(32, 1, 5).float()
    agrees(temporal_features, (features, weight, 2, True, eps), KERNELS, reference.temporal_features)


@pytest.mark.parametrize("taps", [3, 7])
def test_other_kernel_lengths_take_the_reference(taps, agrees, draw):
    features, weight = draw(1, 4, 5, 32).bfloat16(), draw(32, 1, taps).bfloat16()
    agrees(temporal_features, (features, weight, 2, True), [], reference.temporal_features)

"""Small float64 problems for the operators of the linear branch."""

import pytest
import torch


@pytest.fixture
def draw():
    """A function drawing float64 tensors from one seeded stream."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, requires_grad=False):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)

    return make


@pytest.fixture
def draw_maps(draw):
    """A function drawing affine maps that neither grow nor die: ``(M [B, F, H, D, D], U [B, F, H, Dv, D], S₀)``."""

    def make(num_frames, batch=2, heads=2, dim=3, value_dim=4, requires_grad=False):
        tensors = (
            draw(batch, num_frames, heads, dim, dim) * 0.5,
            draw(batch, num_frames, heads, value_dim, dim),
            draw(batch, heads, value_dim, dim),
        )
        return tuple(tensor.requires_grad_(requires_grad) for tensor in tensors)

    return make

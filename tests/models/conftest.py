"""Tiny hybrid transformers with weights that make every part count."""

import json
import math
from pathlib import Path

import pytest
import torch

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel


GOLDEN_RELEASE = Path(__file__).parents[1] / "golden/release_t2va"


def _randomize(model, seed):
    """Draw every parameter anew, so that no branch starts at zero and no convolution at the identity."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 1.0 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.3
        offset = 1.0 if "norm" in name and parameter.ndim == 1 and not name.endswith("bias") else 0.0
        drawn = offset + scale * torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter.dtype)
    return model


@pytest.fixture(scope="session")
def randomize():
    """A function drawing every parameter of a model from a seed."""
    return _randomize


@pytest.fixture(scope="session")
def golden_release():
    """The directory of the golden release."""
    return GOLDEN_RELEASE


@pytest.fixture(scope="session")
def tiny_arguments():
    """Constructor arguments of the golden release's transformer; its blocks have 2 heads of 16 channels."""
    arguments = json.loads((GOLDEN_RELEASE / "h3-base/transformer/config.json").read_text())
    return {name: value for name, value in arguments.items() if not name.startswith("_")}


@pytest.fixture(scope="session")
def make_model(tiny_arguments):
    """A function building a tiny hybrid transformer of three blocks; windows of chunks of two frames by default."""

    def make(seed=0, dtype=torch.float32, fused_adapters=None, **config):
        config = HybridAttentionConfig(linear_head_dim=16, **{"chunk": 2, **config})
        model = VDNH3Transformer3DModel(
            **tiny_arguments, hybrid_attention=config.to_dict(), fused_adapters=fused_adapters
        )
        return _randomize(model, seed).to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def predict():
    """A function running a model without gradients: both predictions in one flat float32 tensor."""

    def run(model, request):
        with torch.no_grad():
            video, audio = model(**request, return_dict=False)
        return torch.cat([video.flatten(), audio.flatten()]).float()

    return run

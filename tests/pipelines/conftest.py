"""Tiny pipelines: the embedded release's components with the hybrid transformer of its 8-step overlay."""

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file


SIZE = {"height": 64, "width": 96}


@pytest.fixture(scope="session")
def hybrid_transformer(tiny_release, tiny_components):
    """The tiny base with the linear branch, its adapters left out. Shared: tests do not change it."""
    from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel

    base = tiny_components["transformer"]
    config = {name: value for name, value in base.config.items() if not name.startswith("_")}
    hybrid = HybridAttentionConfig(linear_head_dim=base.config.attention_head_dim).to_dict()
    transformer = VDNH3Transformer3DModel(**config, hybrid_attention=hybrid)
    branch = load_file(tiny_release / "stage-dmd-step-250" / "linear_branch" / "model.safetensors")
    transformer.load_state_dict({**base.state_dict(), **branch})
    return transformer.eval()


@pytest.fixture(scope="session")
def components(tiny_components, hybrid_transformer):
    return {**tiny_components, "transformer": hybrid_transformer}


@pytest.fixture
def make_pipeline(components):
    """A function making a quiet `VDNH3Pipeline` that shares the session's models but nothing else."""
    from diffusers import MiniMaxH3Scheduler

    from diffusers_h3 import VDNH3Pipeline

    def make(num_inference_steps=None, **replaced):
        schedulers = {
            name: MiniMaxH3Scheduler.from_config(components[name].config) for name in ("scheduler", "audio_scheduler")
        }
        pipeline = VDNH3Pipeline(**{**components, **schedulers, **replaced}, num_inference_steps=num_inference_steps)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return make


@pytest.fixture
def pipeline(make_pipeline):
    return make_pipeline()


@pytest.fixture
def generate():
    """A function making the latents of a small request of two calls."""

    def run(pipeline, prompt="a red fox in the snow", seed=7, **options):
        options = {**SIZE, "num_inference_steps": 2, "output_type": "latent", **options}
        generator = torch.Generator().manual_seed(seed)
        output = pipeline(prompt, generator=generator, **options)
        return output.frames, output.audio

    return run


@pytest.fixture(scope="session")
def keyframes():
    """Two images that differ from each other and from the canvas in size and shape."""
    generator = torch.Generator().manual_seed(3)
    pixels = [
        torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size in ((48, 80), (90, 70))
    ]
    return tuple(Image.fromarray(image.numpy()) for image in pixels)

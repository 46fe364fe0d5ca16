"""Fixtures every test directory shares: the tiny release, its components and the pipeline diffusers makes of them."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest


# The training code is a folder of the repository, not a part of the package.
sys.path.insert(0, str(Path(__file__).parents[1]))

# Read when the libraries are imported. The user's Hugging Face home, its cache and token, is nobody's test data.
_HOME = tempfile.TemporaryDirectory(prefix="diffusers-h3-tests-")
os.environ["HF_HOME"] = _HOME.name
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE"):
    os.environ.pop(name, None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; each with a pool over all of them is slower than one thread each.
    os.environ["OMP_NUM_THREADS"] = "1"


def _helper(name):
    """Import a module of `helpers`, which is no package."""
    if name not in sys.modules:
        specification = importlib.util.spec_from_file_location(name, Path(__file__).parent / "helpers" / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module
        specification.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(autouse=True)
def _seeded():
    """Start every test from the same random numbers, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_release(tmp_path_factory):
    """A release with random weights as a directory, built once per worker. Read only: copy it to change it."""
    return _helper("random_release").build_release(tmp_path_factory.mktemp("tiny") / "release")


@pytest.fixture(scope="session")
def load_components():
    """A function loading a release's base components, float32, the transformer being diffusers' own."""
    import torch
    from diffusers import (
        AutoencoderKLMiniMaxH3,
        AutoencoderKLMiniMaxH3Audio,
        MiniMaxH3Scheduler,
        MiniMaxH3Transformer3DModel,
    )
    from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

    def load(release):
        base = release / "h3-base"
        return {
            "transformer": MiniMaxH3Transformer3DModel.from_pretrained(base / "transformer"),
            "vae": AutoencoderKLMiniMaxH3.from_pretrained(base / "vae"),
            "audio_vae": AutoencoderKLMiniMaxH3Audio.from_pretrained(base / "audio_vae"),
            "text_encoder": Qwen3VLForConditionalGeneration.from_pretrained(
                base / "text_encoder", dtype=torch.float32
            ),
            "tokenizer": Qwen2TokenizerFast.from_pretrained(base / "tokenizer"),
            "processor": Qwen3VLProcessor.from_pretrained(base / "processor"),
            "scheduler": MiniMaxH3Scheduler.from_pretrained(base / "scheduler"),
            "audio_scheduler": MiniMaxH3Scheduler.from_pretrained(base / "audio_scheduler"),
        }

    return load


@pytest.fixture(scope="session")
def tiny_components(tiny_release, load_components):
    """The tiny release's components by name. Shared: a test that changes one loads its own with `load_components`."""
    return load_components(tiny_release)


@pytest.fixture(scope="session")
def modular_pipeline():
    """A function making diffusers' `MiniMaxH3ModularPipeline` of a dictionary of components."""
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Blocks

    def make(components):
        pipeline = MiniMaxH3Blocks().init_pipeline()
        pipeline.update_components(**components)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    return make


@pytest.fixture(scope="session")
def hub_server_class():
    """The class `HubServer` of `helpers/hub_server.py`, a stand-in for the Hub on the loopback interface."""
    return _helper("hub_server").HubServer


@pytest.fixture(scope="session")
def make_request():
    """A function packing a request of a tiny model by Diffusers' own block: `forward`'s arguments, random contents."""
    # Imported here: most tests need no Diffusers.
    import torch
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    def make(text=3, num_frames=7, grid=(2, 3), audio=2, keyframes=(), batch=1, seed=2):
        generator = torch.Generator().manual_seed(seed)
        position_ids, token_tags, video_indices, audio_indices, text_indices, num_condition_rows, _ = (
            MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                torch.ones(text, dtype=torch.long),
                num_latent_frames=num_frames,
                latent_height=2 * grid[0],
                latent_width=2 * grid[1],
                num_audio_latents=audio,
                patch_size=(1, 2, 2),
                audio_channels=2,
                audio_tag=2,
                video_tag=0,
                keyframe_anchors=keyframes,
            )
        )
        # Conditions are clean, audio and target video are at noise levels of their own.
        timestep_indices = torch.zeros(len(position_ids), dtype=torch.long)
        timestep_indices[audio_indices] = 1
        timestep_indices[video_indices[num_condition_rows:]] = 2
        return {
            "hidden_states": torch.randn(batch, len(video_indices), 16, generator=generator),
            "audio_hidden_states": torch.randn(batch, len(audio_indices), 6, generator=generator),
            "encoder_hidden_states": torch.randn(batch, text, 20, generator=generator),
            "timestep": torch.tensor([1.0, 0.6, 0.4]),
            "timestep_indices": timestep_indices,
            "token_tags": token_tags,
            "position_ids": position_ids,
            "video_indices": video_indices,
            "audio_indices": audio_indices,
            "text_indices": text_indices,
        }

    return make

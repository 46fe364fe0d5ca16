"""Tiny hybrid models and requests of any number of heads and rows, and processes to run them in."""

import functools
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel


FOLDER = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def make_model():
    """A function building a tiny hybrid transformer of two blocks with weights that make every part count."""

    def make(heads=4, **config):
        config = HybridAttentionConfig(linear_head_dim=16, **{"chunk": 2, **config})
        model = VDNH3Transformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=16,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=32,
            in_channels=4,
            audio_in_channels=6,
            text_dim=20,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
            hybrid_attention=config.to_dict(),
        )
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
            parameter.data = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
        return model.eval()

    return make


@pytest.fixture(scope="session")
def make_request(make_request):
    """A function packing a request of 7 frames of 6 rows and 4 of audio: 46 rows besides text and keyframes."""
    return functools.partial(make_request, text=4, seed=1)


@pytest.fixture(scope="session")
def torchrun():
    """A function running a program of this folder, or a module, in several processes under `torchrun`."""

    def run(ranks, *command, timeout=120):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return subprocess.run(
            [*launcher, "cpu_ranks.py", *map(str, command)],
            cwd=FOLDER,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    return run

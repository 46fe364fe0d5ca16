from pathlib import Path

import pytest
import torch

from diffusers_h3.cli import weights
from diffusers_h3.pipelines.pipeline_vdn_h3 import VDNH3Pipeline


CPU = torch.device("cpu")


def latents(pipeline):
    request = {"prompt": "x", "height": 64, "width": 64, "num_inference_steps": 1, "force_num_inference_steps": True}
    return pipeline(**request, generator=torch.Generator().manual_seed(0), output_type="latent", return_dict=False)


def test_group_offload_changes_nothing_but_where_weights_are(folder):
    plain = latents(weights.load_pipeline(Path(folder), CPU, "auto", "none"))
    offloaded = latents(weights.load_pipeline(Path(folder), CPU, "auto", "group"))
    for expected, actual in zip(plain, offloaded, strict=True):
        assert expected.isfinite().all()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(("device", "use_stream"), [("cuda:1", True), ("xpu", False), ("mps", False)])
def test_group_offload_is_by_block_and_has_streams_on_cuda(folder, monkeypatch, device, use_stream):
    asked = []
    monkeypatch.setattr(
        VDNH3Pipeline, "enable_group_offload", lambda self, device, **options: asked.append((device, options))
    )
    monkeypatch.setattr(VDNH3Pipeline, "to", lambda self, device: pytest.fail("offloaded weights must not be moved"))
    weights.load_pipeline(Path(folder), torch.device(device), "float32", "group")
    assert asked == [(torch.device(device), {"num_blocks_per_group": 1, "use_stream": use_stream})]


def test_model_offload_goes_to_the_device_asked_for(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(VDNH3Pipeline, "enable_model_cpu_offload", lambda self, device: asked.append(device))
    monkeypatch.setattr(VDNH3Pipeline, "to", lambda self, device: pytest.fail("offloaded weights must not be moved"))
    weights.load_pipeline(Path(folder), torch.device("cuda:1"), "float32", "model")
    assert asked == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("cpu", "auto", torch.float32),
        ("cuda", "auto", torch.bfloat16),
        ("cpu", "bfloat16", torch.bfloat16),
        ("cuda", "float32", torch.float32),
    ],
)
def test_dtype(folder, monkeypatch, device, dtype, expected):
    monkeypatch.setattr(VDNH3Pipeline, "to", lambda self, device: self)
    transformer = weights.load_pipeline(Path(folder), torch.device(device), dtype, "none").transformer
    assert transformer.transformer_blocks[0].ff.net[2].weight.dtype == expected
    # The checkpoint's float32 islands stay so in any dtype.
    assert transformer.proj_in.weight.dtype == torch.float32

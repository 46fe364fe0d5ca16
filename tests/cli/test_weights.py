from pathlib import Path

import pytest
import torch

from diffusers_h3.cli import weights
from diffusers_h3.cli.console import UsageError
from diffusers_h3.cli.weights import Running
from diffusers_h3.models.transformer_vdn_h3 import VDNH3Transformer3DModel
from diffusers_h3.pipelines.pipeline_vdn_h3 import VDNH3Pipeline


CPU = torch.device("cpu")


def latents(pipeline):
    request = {"prompt": "x", "height": 64, "width": 64, "num_inference_steps": 1, "force_num_inference_steps": True}
    return pipeline(**request, generator=torch.Generator().manual_seed(0), output_type="latent", return_dict=False)


def test_group_offload_changes_nothing_but_where_weights_are(folder):
    plain = latents(weights.load_pipeline(Path(folder), Running(CPU, "auto", "none")))
    offloaded = latents(weights.load_pipeline(Path(folder), Running(CPU, "auto", "group")))
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
    weights.load_pipeline(Path(folder), Running(torch.device(device), "float32", "group"))
    assert asked == [(torch.device(device), {"num_blocks_per_group": 1, "use_stream": use_stream})]


def test_model_offload_goes_to_the_device_asked_for(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(VDNH3Pipeline, "enable_model_cpu_offload", lambda self, device: asked.append(device))
    monkeypatch.setattr(VDNH3Pipeline, "to", lambda self, device: pytest.fail("offloaded weights must not be moved"))
    weights.load_pipeline(Path(folder), Running(torch.device("cuda:1"), "float32", "model"))
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
    transformer = weights.load_pipeline(Path(folder), Running(torch.device(device), dtype, "none")).transformer
    assert transformer.transformer_blocks[0].ff.net[2].weight.dtype == expected
    # The checkpoint's float32 islands stay so in any dtype.
    assert transformer.proj_in.weight.dtype == torch.float32


@pytest.fixture
def compiled(monkeypatch):
    """What `torch.compile` was asked for, while it uses a backend that needs no compiler."""
    asked, real = [], torch.compile

    def compile_(function, **options):
        asked.append(options)
        return real(function, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compile_)
    return asked


@pytest.mark.parametrize("offload", ["none", "group"])
def test_compiled_blocks_make_the_same_video(folder, compiled, offload):
    """One graph for all blocks, and the offload's hooks outside of it: `fullgraph` would not take them in."""
    plain = latents(weights.load_pipeline(Path(folder), Running(CPU)))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    pipeline = weights.load_pipeline(Path(folder), Running(CPU, offload=offload, compiled=True))
    for expected, actual in zip(plain, latents(pipeline), strict=True):
        torch.testing.assert_close(actual, expected)
    assert compiled == [{"fullgraph": True}] * len(pipeline.transformer.transformer_blocks)
    assert counters["stats"]["unique_graphs"] == 1


def test_without_a_transformer_nothing_is_compiled_or_quantised(folder, compiled, monkeypatch):
    monkeypatch.setattr(weights, "_load_fp8", lambda *arguments: pytest.fail("a transformer is loaded"))
    running = Running(CPU, dtype="bfloat16", fp8=True, compiled=True)
    assert weights.load_pipeline(Path(folder), running, ("transformer", "vae", "audio_vae")).transformer is None
    assert compiled == []


@pytest.mark.parametrize(("offload", "placement"), [("none", "cuda:0"), ("model", None), ("group", None)])
def test_fp8_layers_are_quantised_where_they_are_to_stay(folder, monkeypatch, offload, placement):
    """The layers are quantised for real; the card is pretended."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    monkeypatch.setattr("diffusers_h3.models.quantization.cuda_capability", lambda: (9, 0))
    real, placements = VDNH3Transformer3DModel.from_pretrained, []

    def from_pretrained(*arguments, device_map=None, **options):
        placements.append(device_map)
        return real(*arguments, **options)

    monkeypatch.setattr(VDNH3Transformer3DModel, "from_pretrained", from_pretrained)
    for name in ("to", "enable_model_cpu_offload", "enable_group_offload"):
        monkeypatch.setattr(VDNH3Pipeline, name, lambda self, *arguments, **options: self)
    running = Running(torch.device("cuda:0"), offload=offload, fp8=True)
    weights.check_fp8(running)
    block = weights.load_pipeline(Path(folder), running).transformer.transformer_blocks[0]
    assert type(block.ff.net[2].weight.data).__name__ == "Float8Tensor"
    assert type(block.adaln_proj.linear.weight.data) is torch.Tensor
    assert placements == [placement]


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "message"),
    [
        ("cpu", "auto", None, "--fp8 needs a CUDA device, and this runs on cpu"),
        ("cuda", "float16", (9, 0), "--fp8 goes with --dtype bfloat16, not float16"),
        ("cuda", "auto", (8, 6), "8.9 or higher, and this one has 8.6: leave it out here"),
    ],
)
def test_fp8_that_cannot_be_is_refused(monkeypatch, device, dtype, capability, message):
    monkeypatch.setattr("diffusers_h3.models.quantization.cuda_capability", lambda: capability)
    with pytest.raises(UsageError, match=message):
        weights.check_fp8(Running(torch.device(device), dtype, fp8=True))
    weights.check_fp8(Running(torch.device(device), dtype))

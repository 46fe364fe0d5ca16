"""fp8 linear layers on a real card: both recipes where it has them, offload, saving, the peak while loading."""

import math

import pytest
import torch
from diffusers.hooks import apply_group_offloading

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel
from diffusers_h3.models.quantization import MINIMUM_CAPABILITY, cuda_capability, fp8_quantization_config


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
# Heads × channels differ from the hidden size; wide enough that the linear layers of the blocks are most of it.
SIZES = {
    "num_attention_heads": 6,
    "attention_head_dim": 64,
    "hidden_size": 256,
    "num_layers": 4,
    "num_refiner_layers": 1,
    "ffn_dim": 1024,
    "in_channels": 4,
    "audio_in_channels": 6,
    "text_dim": 32,
    "freq_dim": 32,
    "time_embed_dim": 32,
    "time_embed_hidden_dim": 64,
    "rope_freq_dim": 8,
}


@pytest.fixture(params=MINIMUM_CAPABILITY)
def recipe(request):
    capability = cuda_capability()
    if capability is None or capability < MINIMUM_CAPABILITY[request.param]:
        pytest.skip(f"needs a CUDA device that multiplies {request.param} fp8")
    pytest.importorskip("torchao")
    return request.param


@pytest.fixture
def num_layers():
    return SIZES["num_layers"]


@pytest.fixture
def folder(tmp_path, num_layers):
    """A model saved in bfloat16, in shards of a fraction of its size."""
    config = HybridAttentionConfig(linear_head_dim=64, chunk=2)
    model = VDNH3Transformer3DModel(**SIZES | {"num_layers": num_layers}, hybrid_attention=config.to_dict())
    for name, parameter in model.named_parameters():
        scale = 1.0 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.3
        offset = 1.0 if "norm" in name and parameter.ndim == 1 and not name.endswith("bias") else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "original", max_shard_size="2MB")
    return tmp_path / "original"


@pytest.fixture
def load(recipe, folder):
    """A function loading the model quantised, onto the card."""

    def load():
        config = fp8_quantization_config(recipe)
        return VDNH3Transformer3DModel.from_pretrained(
            folder, quantization_config=config, dtype=torch.bfloat16, device_map="cuda"
        ).eval()

    return load


@pytest.fixture
def predict():
    """A function running a model on one request of 600 video rows: both predictions in one flat tensor."""
    from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

    position_ids, token_tags, video, audio, text, *_ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(7, dtype=torch.long),
        num_latent_frames=12,
        latent_height=10,
        latent_width=20,
        num_audio_latents=5,
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
        keyframe_anchors=(),
    )
    generator = torch.Generator().manual_seed(0)
    timestep_indices = torch.zeros(len(position_ids), dtype=torch.long)
    timestep_indices[video] = 1
    request = {
        "hidden_states": torch.randn(1, len(video), 16, generator=generator).bfloat16(),
        "audio_hidden_states": torch.randn(1, len(audio), 6, generator=generator).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 7, 32, generator=generator).bfloat16(),
        "timestep": torch.tensor([0.6, 0.4]),
        "timestep_indices": timestep_indices,
        "token_tags": token_tags,
        "position_ids": position_ids,
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }
    request = {name: tensor.to(GPU) for name, tensor in request.items()}

    def run(model):
        with torch.no_grad():
            return torch.cat([output.flatten() for output in model(**request, return_dict=False)]).double().cpu()

    return run


def test_a_quantised_model_predicts_what_the_original_does(load, folder, predict):
    original = VDNH3Transformer3DModel.from_pretrained(folder, dtype=torch.bfloat16).to(GPU).eval()
    exact = predict(original)
    error = (predict(load()) - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.15


def test_a_quantised_model_saves_and_loads(load, predict, tmp_path):
    model = load()
    model.save_pretrained(tmp_path / "quantised")
    again = VDNH3Transformer3DModel.from_pretrained(tmp_path / "quantised", dtype=torch.bfloat16).to(GPU).eval()
    assert torch.equal(predict(again), predict(model))


@pytest.mark.parametrize("use_stream", [False, True])
@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offload_changes_nothing(offload_type, use_stream, load, predict):
    model = load()
    expected = predict(model)
    model.to(CPU)
    blocks = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
    apply_group_offloading(model, GPU, CPU, offload_type, use_stream=use_stream, **blocks)
    for _ in range(2):  # the second call meets what the first one offloaded
        assert torch.equal(predict(model), expected)
    weight = model.transformer_blocks[1].ff.net[2].weight
    assert {weight.qdata.device.type, weight.scale.device.type} == {"cpu"}


@pytest.mark.parametrize("num_layers", [16])
def test_loading_peaks_under_the_bf16_size(load, folder):
    """Quantising a weight takes 7.5 times its bfloat16 bytes for a moment, so that it must be a small part of all."""
    original = VDNH3Transformer3DModel.from_pretrained(folder, dtype=torch.bfloat16)
    bf16_bytes = sum(tensor.numel() * tensor.element_size() for tensor in original.state_dict().values())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load()
    peak = torch.cuda.max_memory_allocated() - before
    assert model.transformer_blocks[0].attn.to_q.weight.device.type == "cuda"
    assert peak < bf16_bytes

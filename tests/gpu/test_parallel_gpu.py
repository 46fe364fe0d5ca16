"""The layer under NCCL with a world of one process: the same exchanges, to itself."""

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel
from diffusers_h3.hybrid import parallel


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def world_of_one(tmp_path_factory):
    """Diffusers' configuration of one rank, which it only makes by hand: it refuses a degree of one."""
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    config = ContextParallelConfig(ulysses_degree=2)
    config.ulysses_degree = 1
    yield config
    dist.destroy_process_group()


def _model():
    torch.manual_seed(0)
    config = HybridAttentionConfig(linear_head_dim=128, chunk=2)
    model = VDNH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=128,
        hidden_size=192,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=256,
        in_channels=4,
        audio_in_channels=6,
        text_dim=20,
        freq_dim=16,
        time_embed_hidden_dim=32,
        time_embed_dim=16,
        hybrid_attention=config.to_dict(),
    )
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
        parameter.data = torch.randn_like(parameter) / fan_in**0.5
    return model.eval().to("cuda", torch.bfloat16)


def _request():
    layout = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(13, dtype=torch.long),
        num_latent_frames=9,
        latent_height=8,
        latent_width=12,
        num_audio_latents=4,
        patch_size=(1, 2, 2),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
        keyframe_anchors=("first",),
    )
    position_ids, token_tags, video_indices, audio_indices, text_indices, _, _ = layout
    generator = torch.Generator().manual_seed(1)
    request = {
        "hidden_states": torch.randn(1, len(video_indices), 16, generator=generator),
        "audio_hidden_states": torch.randn(1, len(audio_indices), 6, generator=generator),
        "encoder_hidden_states": torch.randn(1, 13, 20, generator=generator).bfloat16(),
        "timestep": torch.tensor([0.4]),
        "timestep_indices": torch.zeros(len(position_ids), dtype=torch.long),
        "token_tags": token_tags,
        "position_ids": position_ids,
        "video_indices": video_indices,
        "audio_indices": audio_indices,
        "text_indices": text_indices,
    }
    return {name: tensor.cuda() for name, tensor in request.items()}


def _relative_error(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_world_of_one_under_nccl_equals_no_parallelism(compiled, world_of_one, monkeypatch):
    model, request = _model(), _request()
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(**request, return_dict=False)
    model.enable_parallelism(config=world_of_one)
    exchanges = []
    exchange = parallel.HeadSplit._exchange
    if compiled:
        model.compile_repeated_blocks(fullgraph=True)
    else:
        monkeypatch.setattr(
            parallel.HeadSplit, "_exchange", lambda *arguments: exchanges.append(1) or exchange(*arguments)
        )
    with torch.no_grad():
        actual = model(**request, return_dict=False)
    # Query, key, value, gate, beta, the window and the readout, in two layers.
    assert len(exchanges) == (0 if compiled else 14)
    for got, wanted in zip(actual, expected, strict=True):
        assert _relative_error(got, wanted) < (2e-2 if compiled else 1e-2)


def test_the_group_runs_on_nccl(world_of_one):
    assert "nccl" in str(dist.get_backend_config())

"""Offloaded pipelines give what pipelines give that stay on their device."""

import copy

import pytest
import torch


CPU = torch.device("cpu")


@pytest.fixture
def own_pipeline(make_pipeline, components, tiny_release):
    """A pipeline with models of its own, since hooks stay on them."""
    models = {name: copy.deepcopy(components[name]) for name in ("transformer", "text_encoder", "vae")}
    # Weight norms cannot be copied.
    audio_vae = type(components["audio_vae"]).from_pretrained(tiny_release / "h3-base" / "audio_vae")
    return make_pipeline(**models, audio_vae=audio_vae)


def _generate(pipeline, keyframes):
    output = pipeline(
        "a red fox in the snow",
        image=keyframes[0],
        height=64,
        width=64,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        output_type="pt",
    )
    return output.frames, output.audio


@pytest.fixture(scope="module")
def expected(components, keyframes):
    from diffusers_h3 import VDNH3Pipeline

    pipeline = VDNH3Pipeline(**components)
    pipeline.set_progress_bar_config(disable=True)
    return _generate(pipeline, keyframes)


@pytest.fixture
def poisoned(monkeypatch):
    """Fill fresh memory with NaN, so that weights read while they are on the disk cannot go unnoticed."""
    empty_like = torch.empty_like

    def poisoned_empty_like(tensor, **options):
        result = empty_like(tensor, **options)
        return result.fill_(torch.nan) if result.is_floating_point() else result

    monkeypatch.setattr(torch, "empty_like", poisoned_empty_like)


@pytest.mark.parametrize(
    "options", [{"offload_type": "block_level", "num_blocks_per_group": 1}, {"offload_type": "leaf_level"}]
)
def test_group_offload_changes_nothing(options, own_pipeline, expected, keyframes, tmp_path, poisoned):
    own_pipeline.enable_group_offload(CPU, CPU, offload_to_disk_path=str(tmp_path), **options)
    offloaded = {
        name: own_pipeline.components[name].state_dict()
        for name in ("transformer", "text_encoder", "vae", "audio_vae")
    }
    for name, state_dict in offloaded.items():
        is_poisoned = any(tensor.is_floating_point() and tensor.isnan().any() for tensor in state_dict.values())
        assert is_poisoned == (name != "audio_vae"), f"{name} is not where it should be"
    frames, audio = _generate(own_pipeline, keyframes)
    assert torch.equal(frames, expected[0])
    assert torch.equal(audio, expected[1])


def test_group_offload_leaves_out_what_is_excluded(own_pipeline, tmp_path, poisoned):
    own_pipeline.enable_group_offload(
        CPU, CPU, "leaf_level", exclude_modules=["text_encoder", "vae"], offload_to_disk_path=str(tmp_path)
    )
    for name, is_poisoned in {"transformer": True, "text_encoder": False, "vae": False}.items():
        weights = own_pipeline.components[name].parameters()
        assert any(weight.isnan().any() for weight in weights) == is_poisoned


def test_group_offload_refuses_to_exclude_what_is_not_there(pipeline):
    with pytest.raises(ValueError, match=r"names transformer_ref, but has only .*text_encoder"):
        pipeline.enable_group_offload(CPU, CPU, "leaf_level", exclude_modules="transformer_ref")


def test_model_offload_changes_nothing_and_lets_go_afterwards(own_pipeline, expected, keyframes):
    own_pipeline.enable_model_cpu_offload(device="cpu")
    for _ in range(2):
        frames, audio = _generate(own_pipeline, keyframes)
        assert torch.equal(frames, expected[0])
        assert torch.equal(audio, expected[1])
        for name in ("transformer", "text_encoder", "vae", "audio_vae"):
            assert hasattr(own_pipeline.components[name], "_hf_hook"), f"{name} lost its hook"


def test_model_offload_runs_every_hook(own_pipeline, keyframes):
    own_pipeline.enable_model_cpu_offload(device="cpu")
    onloaded = []
    for name in ("transformer", "text_encoder", "vae", "audio_vae"):
        hook = own_pipeline.components[name]._hf_hook

        def pre_forward(module, *arguments, _name=name, _run=hook.pre_forward, **options):
            onloaded.append(_name)
            return _run(module, *arguments, **options)

        hook.pre_forward = pre_forward
    _generate(own_pipeline, keyframes)
    assert list(dict.fromkeys(onloaded)) == ["text_encoder", "vae", "transformer", "audio_vae"]
    assert onloaded.count("transformer") == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", ["model", "block_level", "leaf_level"])
def test_offload_from_a_gpu_changes_nothing(offload, own_pipeline, keyframes):
    own_pipeline.to("cuda")
    expected = _generate(own_pipeline, keyframes)
    own_pipeline.to("cpu")
    if offload == "model":
        own_pipeline.enable_model_cpu_offload()
    else:
        own_pipeline.enable_group_offload(torch.device("cuda"), CPU, offload, num_blocks_per_group=1)
    frames, audio = _generate(own_pipeline, keyframes)
    assert torch.allclose(frames, expected[0], atol=1e-5)
    assert torch.allclose(audio, expected[1], atol=1e-5)
    assert own_pipeline.transformer.transformer_blocks[0].attn.to_q.weight.device.type == "cpu"

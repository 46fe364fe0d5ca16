"""Offloaded pipelines give what pipelines give that stay on their device."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from diffusers.hooks import HookRegistry
from diffusers.hooks.group_offloading import ModuleGroup, _maybe_remove_and_reapply_group_offloading


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


@pytest.fixture
def record(monkeypatch):
    """A function writing down from now on what models of a pipeline do, and how often each weight of its VAE moves."""

    def start(pipeline):
        vae, events, moved, present = pipeline.vae, [], Counter(), set()
        names = {id(weight): name for name, weight in (*vae.named_parameters(), *vae.named_buffers())}
        transfer, offload = ModuleGroup._transfer_tensor_to_device, ModuleGroup.offload_

        def recorded_transfer(group, tensor, *arguments):
            name = names.get(id(tensor))
            # Diffusers asks twice for what it has as a module and as a parameter; only the first time is a copy.
            if name is not None and name not in present:
                events.append("in")
                moved[name] += 1
                present.add(name)
            return transfer(group, tensor, *arguments)

        def recorded_offload(group):
            if vae.decoder in group.modules:
                events.append("out")
                present.clear()
            return offload(group)

        monkeypatch.setattr(ModuleGroup, "_transfer_tensor_to_device", recorded_transfer)
        monkeypatch.setattr(ModuleGroup, "offload_", recorded_offload)
        for name, module in {"encoder": vae.encoder, "decoder": vae.decoder, "denoiser": pipeline.transformer}.items():
            module.register_forward_pre_hook(lambda *_, _name=name: events.append(_name))
        return events, moved, set(names.values())

    return start


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_the_vae_is_moved_once_for_all_tiles(offload_type, own_pipeline, record, keyframes):
    own_pipeline.enable_group_offload(CPU, CPU, offload_type, num_blocks_per_group=1)
    # Nine tiles of the canvas, and a decoded clip has seven chunks of frames.
    own_pipeline.vae.enable_tiling(32, 32, 16, 16)
    events, moved, names = record(own_pipeline)
    _generate(own_pipeline, keyframes)
    counts = {"in": 2 * len(names), "encoder": 9, "out": 2, "denoiser": 2, "decoder": 63}
    assert Counter(events) == counts
    order = ["in", "encoder", "out", "denoiser", "in", "decoder", "out"]
    assert [event for event, _ in itertools.groupby(events)] == order
    assert moved == dict.fromkeys(names, 2)


@pytest.fixture
def is_out(own_pipeline, tmp_path, poisoned):
    """A function saying whether weights of the video VAE, which is offloaded to a disk, are there now."""
    own_pipeline.enable_group_offload(
        CPU, CPU, num_blocks_per_group=1, exclude_modules="text_encoder", offload_to_disk_path=str(tmp_path)
    )
    return lambda: any(weight.isnan().any() for weight in own_pipeline.vae.parameters())


def _decode(vae):
    latents = torch.randn(1, 4, 12, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return vae.decode(latents, return_dict=False)[0]


@pytest.mark.parametrize("kept", ["as it was put", "put anew, as for a LoRA", "taken off"])
def test_the_offloaded_vae_decodes_by_itself(kept, own_pipeline, is_out, components):
    vae = own_pipeline.vae
    assert is_out()
    if kept == "put anew, as for a LoRA":
        _maybe_remove_and_reapply_group_offloading(vae)
    elif kept == "taken off":
        registry = HookRegistry.check_if_exists_or_initialize(vae)
        registry.get_hook("group_offloading").group.onload_()
        registry.remove_hook("group_offloading")
    assert torch.equal(_decode(vae), _decode(components["vae"]))
    assert is_out() == (kept != "taken off")


def test_the_vae_goes_when_decoding_fails(own_pipeline, is_out):
    seen = []

    def fail(*arguments):
        seen.append(is_out())
        raise torch.OutOfMemoryError("no memory for this tile")

    own_pipeline.vae.decoder.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for this tile"):
        _decode(own_pipeline.vae)
    assert seen == [False]
    assert is_out()


def test_the_vae_takes_no_streams(own_pipeline):
    """The device has none: what asks for them is refused."""
    options = {"num_blocks_per_group": 1, "use_stream": True}
    own_pipeline.enable_group_offload(CPU, CPU, exclude_modules=["transformer", "text_encoder"], **options)
    with pytest.raises(ValueError, match="backend implements streams"):
        own_pipeline.enable_group_offload(CPU, CPU, exclude_modules=["text_encoder", "vae"], **options)


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
@pytest.mark.parametrize(
    ("offload", "use_stream"),
    [("model", False), ("block_level", False), ("block_level", True), ("leaf_level", False), ("leaf_level", True)],
)
def test_offload_from_a_gpu_changes_nothing(offload, use_stream, own_pipeline, keyframes):
    own_pipeline.to("cuda")
    expected = _generate(own_pipeline, keyframes)
    own_pipeline.to("cpu")
    if offload == "model":
        own_pipeline.enable_model_cpu_offload()
    else:
        own_pipeline.enable_group_offload(
            torch.device("cuda"), CPU, offload, num_blocks_per_group=1, use_stream=use_stream
        )
    for _ in range(2):  # with streams, the second request brings weights in the order that the first one had
        frames, audio = _generate(own_pipeline, keyframes)
        assert torch.allclose(frames, expected[0], atol=1e-5)
        assert torch.allclose(audio, expected[1], atol=1e-5)
    assert own_pipeline.transformer.transformer_blocks[0].attn.to_q.weight.device.type == "cpu"
    if offload != "model":
        assert {weight.device.type for weight in own_pipeline.vae.parameters()} == {"cpu"}

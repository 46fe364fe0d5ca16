"""The release of random weights that other tests read: its layout, odd sizes and ranks, and how it is written."""

import hashlib
import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from diffusers_h3.hybrid.config import HybridAttentionConfig


STAGES = ("stage-dmd-step-250", "stage-b-step-2000")

# A block's branch at full size has these names and, in the tiny model, these shapes (3 heads of 16, hidden size 32).
BRANCH = {
    "linear_attention.alpha.A_log": [3],
    "linear_attention.alpha.down.weight": [16, 32],
    "linear_attention.alpha.dt_bias": [48],
    "linear_attention.alpha.up.weight": [48, 16],
    "linear_attention.beta_proj.weight": [3, 32],
    "linear_attention.norm.weight": [16],
    "linear_attention.output_gate.down.weight": [16, 32],
    "linear_attention.output_gate.up.bias": [48],
    "linear_attention.output_gate.up.weight": [48, 16],
    "linear_attention.short_conv.k_sp.weight": [48, 1, 5, 5],
    "linear_attention.short_conv.k_tm.weight": [48, 1, 5],
    "linear_attention.short_conv.v_sp.weight": [48, 1, 5, 5],
    "linear_attention.short_conv.v_tm.weight": [48, 1, 5],
    "softmax_gate.up.bias": [3],
    "softmax_gate.up.weight": [3, 32],
    "to_out_linear.weight": [32, 48],
}


@pytest.fixture
def build_release(tiny_release):
    """The function that built `tiny_release`."""
    return sys.modules["random_release"].build_release


def digests(directory):
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def test_same_seed_same_bytes_and_caller_keeps_its_random_numbers(tiny_release, build_release, tmp_path):
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    again = build_release(tmp_path / "again")
    assert torch.equal(torch.rand(3), expected), "building a release moved the caller's generator"
    assert digests(again) == digests(tiny_release)

    other = digests(build_release(tmp_path / "other", seed=1))
    same = digests(tiny_release)
    assert other.keys() == same.keys()
    differing = {name for name in same if name.endswith(".safetensors") and same[name] != other[name]}
    assert differing == {name for name in same if name.endswith(".safetensors")}


def test_size_and_files(tiny_release):
    names = set(digests(tiny_release))
    assert sum(path.stat().st_size for path in tiny_release.rglob("*") if path.is_file()) < 4e6
    assert {name.split("/")[1] for name in names if name.startswith("h3-base/")} == {
        "transformer",
        "vae",
        "audio_vae",
        "text_encoder",
        "tokenizer",
        "processor",
        "scheduler",
        "audio_scheduler",
    }
    assert {name for name in names if name.startswith("h3-base/transformer/")} == {
        "h3-base/transformer/config.json",
        "h3-base/transformer/diffusion_pytorch_model.safetensors.index.json",
        *(f"h3-base/transformer/diffusion_pytorch_model-0000{index}-of-00003.safetensors" for index in (1, 2, 3)),
    }
    stage_files = {"model_spec.json", "metadata.json", "linear_branch/config.json", "linear_branch/model.safetensors"}
    for stage, adapters in zip(STAGES, (("default", "turbo"), ("default",)), strict=True):
        expected = set(stage_files)
        for adapter in adapters:
            expected |= {f"adapters/{adapter}/adapter_spec.json", f"adapters/{adapter}/adapter_model.safetensors"}
        found = {name.removeprefix(f"{stage}/") for name in names if name.startswith(f"{stage}/")}
        assert found == expected


def test_every_file_is_in_the_list_of_digests(tiny_release):
    listed = json.loads((tiny_release / "digests.json").read_text())
    found = digests(tiny_release)
    found.pop("digests.json")
    assert listed == found


def test_a_directory_in_use_is_left_alone(build_release, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="exists already"):
        build_release(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_failure_leaves_nothing(build_release, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("training.release.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        build_release(tmp_path / "release")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_and_missing_parents_are_filled(build_release, tmp_path):
    target = tmp_path / "deep" / "er"
    target.mkdir(parents=True)
    assert build_release(target) == target
    assert (target / "h3-base" / "vae" / "config.json").is_file()


def test_transformer_is_mixed_precision(tiny_release):
    directory = tiny_release / "h3-base" / "transformer"
    index = json.loads((directory / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    tensors = {}
    for shard in sorted(set(index.values())):
        tensors.update(load_file(directory / shard))
    assert tensors.keys() == index.keys()
    islands = {"proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"}
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if name.split(".")[0] in islands else torch.bfloat16), name


@pytest.mark.parametrize("stage", STAGES)
def test_branch_matches_the_released_names(tiny_release, stage):
    tensors = load_file(tiny_release / stage / "linear_branch" / "model.safetensors")
    found = {name: list(tensor.shape) for name, tensor in tensors.items()}
    assert found == {
        f"transformer_blocks.{block}.attn.{name}": shape for block in range(2) for name, shape in BRANCH.items()
    }
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    specification = json.loads((tiny_release / stage / "model_spec.json").read_text())
    branch_config = json.loads((tiny_release / stage / "linear_branch" / "config.json").read_text())
    assert specification["transforms"] == [branch_config]
    assert HybridAttentionConfig.from_dict(branch_config) == HybridAttentionConfig(linear_head_dim=16)


@pytest.mark.parametrize(("stage", "steps"), list(zip(STAGES, (8, None), strict=True)))
def test_sampling_contract(tiny_release, stage, steps):
    sampling = json.loads((tiny_release / stage / "metadata.json").read_text())["metadata"]
    expected = {"video_shift": 12.0, "audio_shift": 3.0}
    assert sampling == (expected if steps is None else {**expected, "turbo_num_steps": steps})


@pytest.mark.parametrize(
    ("stage", "adapter", "pairs"),
    # 12 attention linears (2 blocks, 1 refiner), then 6 feed-forward ones, 2 modulations and the output norm.
    [("stage-dmd-step-250", "default", 12), ("stage-dmd-step-250", "turbo", 21), ("stage-b-step-2000", "default", 12)],
)
def test_adapters_fit_the_base(tiny_release, tiny_components, stage, adapter, pairs):
    directory = tiny_release / stage / "adapters" / adapter
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_spec.json").read_text())["config"]
    assert len(tensors) == 2 * pairs

    ranks, modules = set(), set()
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removesuffix(f".lora_A.{adapter}.weight")
        assert (".attn.orig." in name) == (name.startswith("transformer_blocks.") and ".attn." in name)
        module = module.replace(".attn.orig.", ".attn.")
        weight = tiny_components["transformer"].get_submodule(module).weight
        up = tensors[name.replace("lora_A", "lora_B")]
        rank = config["rank_pattern"].get(module, config["rank"])
        assert (tuple(down.shape), tuple(up.shape)) == ((rank, weight.shape[1]), (weight.shape[0], rank))
        ranks.add(rank)
        modules.add(module)

        scale = config["alpha_pattern"].get(module, config["alpha"]) / rank
        change = (scale * up.float() @ down.float()).norm() / weight.norm()
        assert 0.02 < change < 2, f"{module}: the adapter changes its weight by a factor of {change:.3f}"
    assert ranks == ({4} if adapter == "default" else {2, 3, 5})
    assert modules >= set(config["alpha_pattern"]) | set(config["rank_pattern"])


@pytest.mark.parametrize("keyframes", [(), ("image",), ("image", "last_image")], ids=["t2va", "i2va", "fl2va"])
def test_diffusers_modular_pipeline_runs_on_it(tiny_components, modular_pipeline, keyframes):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 100, 3), dtype=np.uint8))
    prompt = "Ein Fuchs läuft, 狐"
    state = modular_pipeline(tiny_components)(
        prompt=prompt,
        height=64,
        width=64,
        num_frames=124,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **dict.fromkeys(keyframes, image),
    )
    video, audio = state.get("videos"), state.get("audio")
    assert video.shape == (1, 124, 64, 64, 3)
    # 124 frames at 24 fps last 206.67 audio latents of 800 samples, rounded to 207.
    assert tuple(audio.shape) == (1, 2, 207 * 800)
    assert np.isfinite(video).all()
    assert audio.isfinite().all()
    assert 0.05 < video.std() < 0.5
    assert 0.02 < audio.std() < 0.5
    assert audio.abs().max() < 1.0
    # A token per byte; a keyframe adds "<Picture 1>: ", two tokens around it and one for every 32×32 pixels.
    assert tuple(state.get("prompt_embeds").shape) == (1, len(prompt.encode()) + len(keyframes) * (13 + 2 + 4), 24)
    # Latents stay near the unit variance they start from.
    assert 0.3 < state.get("latents").std() < 3
    assert 0.3 < state.get("audio_latents").std() < 3

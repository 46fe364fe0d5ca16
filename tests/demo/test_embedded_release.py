"""The trained release in the package: whole, small, and the same merged or beside its base."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from diffusers_h3 import VDNH3Pipeline, apply_hybrid_attention, load_overlay, materialize_overlay
from diffusers_h3.demo import release
from diffusers_h3.demo.grammar import NUM_FRAMES, SIZE
from diffusers_h3.overlays.errors import IntegrityError


# The merged weights are rounded to bfloat16 once, to 2⁻⁹ of each, in six layers.
MERGED_TOLERANCE = 0.01


@pytest.fixture(scope="module")
def embedded():
    return release.embedded_release()


def test_it_is_small_and_all_of_it_is_checked(embedded):
    files = {path.relative_to(embedded).as_posix(): path for path in embedded.rglob("*") if path.is_file()}
    assert sum(path.stat().st_size for path in files.values()) <= 12e6
    assert set(json.loads(files.pop("digests.json").read_text())) == set(files)
    assert {name.split("/")[0] for name in files} == {"h3-base", "stage-b-step-2000", "stage-dmd-step-250"}


def test_its_overlays(embedded):
    eight, many = (load_overlay(embedded / stage).manifest for stage in (release.STAGE, "stage-b-step-2000"))
    assert [adapter.name for adapter in eight.adapters] == ["default", "turbo"]
    assert [adapter.name for adapter in many.adapters] == ["default"]
    assert (eight.sampling.num_inference_steps, many.sampling.num_inference_steps) == (8, None)
    # Its weights were made here, of nothing under another licence.
    assert "Apache" in eight.license_note
    assert "MiniMax" not in eight.license_note + many.license_note


@pytest.fixture
def copy(embedded, tmp_path, monkeypatch):
    """An installation of its own, which a test may break."""
    folder = tmp_path / "weights"
    shutil.copytree(embedded, folder)
    monkeypatch.setattr(release, "_RELEASE", folder)
    return folder


def test_a_whole_installation_is_accepted(copy):
    assert release.embedded_release() == copy


@pytest.mark.parametrize("name", ["h3-base/vae/config.json", f"{release.STAGE}/linear_branch/model.safetensors"])
def test_a_missing_or_changed_file_is_named(copy, name):
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(content)
    with pytest.raises(IntegrityError, match=rf"is broken: {name} changed\. Install diffusers-h3 again"):
        release.embedded_release()
    (copy / name).unlink()
    with pytest.raises(IntegrityError, match=rf"is broken: {name} missing\. Install diffusers-h3 again"):
        release.embedded_release()


def test_an_installation_without_weights(copy):
    shutil.rmtree(copy)
    with pytest.raises(IntegrityError, match=r"The demo's model is missing: there is no .*digests\.json\. Install"):
        release.embedded_release()


@pytest.fixture(scope="module")
def merged(embedded, tmp_path_factory):
    """The pipeline of the 8-call overlay, float32 on the CPU."""
    folder = materialize_overlay(load_overlay(embedded / release.STAGE), cache_dir=tmp_path_factory.mktemp("cache"))
    pipeline = VDNH3Pipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def request_inputs(merged):
    """What the transformer is given in the last of eight calls of a real request."""
    calls = []
    hook = merged.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    merged(
        "a red circle moves left to right",
        height=SIZE,
        width=SIZE,
        num_frames=NUM_FRAMES,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    )
    hook.remove()
    assert len(calls) == 8
    return calls[-1]


@pytest.fixture(scope="module")
def beside(embedded, load_components):
    """The base with the branch attached and both adapters running beside its weights."""
    overlay = load_overlay(embedded / release.STAGE)
    stage = embedded / release.STAGE
    transformer = load_components(embedded)["transformer"].float()
    branch = load_file(stage / "linear_branch" / "model.safetensors")
    apply_hybrid_attention(transformer, overlay.manifest.hybrid_attention, branch).float()
    names = [adapter.name for adapter in overlay.manifest.adapters]
    for name in names:
        config = json.loads((stage / "adapters" / name / "adapter_spec.json").read_text())["config"]
        # Of scale 1, as a file without a specification is taken to be.
        assert config["alpha"] == config["rank"]
        tensors = load_file(stage / "adapters" / name / "adapter_model.safetensors")
        spelled = {
            key.replace(".attn.orig.", ".attn.").replace(f".{name}.weight", ".weight"): value.float()
            for key, value in tensors.items()
        }
        transformer.load_lora_adapter(spelled, prefix=None, adapter_name=name)
    transformer.set_adapters(names)
    return transformer.eval()


def relative_error(value, expected):
    return float((value - expected).norm() / expected.norm())


def test_merged_equals_beside_to_rounding(merged, beside, request_inputs):
    with torch.no_grad():
        found = merged.transformer(**request_inputs)[:2]
        expected = beside(**request_inputs)[:2]
        beside.disable_lora()
        without = beside(**request_inputs)[:2]
    for value, right, other in zip(found, expected, without, strict=True):
        assert relative_error(value, right) < MERGED_TOLERANCE
        assert relative_error(other, right) > 3 * MERGED_TOLERANCE, "the adapters change nothing"

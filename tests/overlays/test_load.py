"""What `load_overlay` accepts, what it refuses, and that it says so."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from diffusers_h3.hybrid.config import HybridAttentionConfig
from diffusers_h3.overlays import ManifestError, OverlayError, SourceError, UnpinnedRevisionError, load_overlay


EIGHT, FIFTY = "stage-dmd-step-250", "stage-b-step-2000"
PINNED = ("MiniMaxAI/MiniMax-H3", "939557dc319dd91227e30195a763f272ba7f8765")


def test_builtin():
    overlay = load_overlay("vdn-h3-8step")
    assert overlay.name == "vdn-h3-8step"
    assert overlay.root is None
    with pytest.raises(OverlayError, match="pins its own revisions"):
        load_overlay("vdn-h3-8step", revision="0" * 40)


def test_a_release_may_have_a_licence_note_of_its_own(release):
    assert "MiniMax-H3 Community License" in load_overlay(release / EIGHT).manifest.license_note
    metadata = json.loads((release / EIGHT / "metadata.json").read_text())
    metadata["metadata"]["license_note"] = "Mine, and yours."
    (release / EIGHT / "metadata.json").write_text(json.dumps(metadata))
    assert load_overlay(release / EIGHT).manifest.license_note == "Mine, and yours."
    metadata["metadata"]["license_note"] = 7
    (release / EIGHT / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(ManifestError, match=r"`license_note` must be a text, got 7"):
        load_overlay(release / EIGHT)


@pytest.mark.parametrize(
    ("stage", "calls", "recommended", "adapters"),
    [(EIGHT, 8, 8, ["default", "turbo"]), (FIFTY, None, 50, ["default"])],
)
def test_stage_of_a_release(tiny_release, stage, calls, recommended, adapters):
    overlay = load_overlay(tiny_release / stage)
    manifest = overlay.manifest
    assert overlay.root == tiny_release
    assert manifest.name == stage
    assert [adapter.name for adapter in manifest.adapters] == adapters
    assert manifest.hybrid_attention == HybridAttentionConfig(linear_head_dim=16)
    sampling = manifest.sampling
    assert (sampling.num_inference_steps, sampling.recommended_num_inference_steps) == (calls, recommended)
    assert (sampling.video_shift, sampling.audio_shift) == (12.0, 3.0)
    assert manifest.components["text_encoder"].subfolder == "h3-base/text_encoder"
    assert manifest.components["text_encoder"].repo is None


def test_stages_may_be_named_relative_and_as_text(tiny_release, monkeypatch):
    monkeypatch.chdir(tiny_release)
    for source in (EIGHT, f"./{EIGHT}/", f".//{EIGHT}"):
        assert load_overlay(source).name == EIGHT


def test_several_stages_are_listed(tiny_release):
    with pytest.raises(SourceError, match=f"several overlays: {FIFTY}, {EIGHT}") as error:
        load_overlay(tiny_release)
    named = str(error.value).rpartition("'")[0].rpartition("'")[2]
    assert load_overlay(named).name == FIFTY


def test_the_only_stage_is_taken(golden):
    overlay = load_overlay(golden)
    assert overlay.name == EIGHT
    text_encoder = overlay.manifest.components["text_encoder"]
    assert (text_encoder.repo, text_encoder.revision) == PINNED
    assert overlay.manifest.components["vae"].repo is None


def test_a_local_folder_has_no_revision(golden):
    with pytest.raises(OverlayError, match="on this machine and has no revision"):
        load_overlay(golden, revision="0" * 40)


def test_manifest_file_and_folder_with_one(golden, tmp_path):
    manifest = load_overlay(golden).manifest.to_dict() | {"name": "mine"}
    (golden / "overlay.json").write_text(json.dumps(manifest))
    for source in (golden / "overlay.json", golden):
        overlay = load_overlay(source)
        assert (overlay.name, overlay.root) == ("mine", golden)
    (golden / "overlay.json").write_text(json.dumps(manifest | {"surprise": 1}))
    with pytest.raises(ManifestError, match=r"overlay\.json: unknown field `surprise`"):
        load_overlay(golden)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"name": '])
def test_a_corrupted_manifest_is_one_clear_error(tmp_path, text):
    path = tmp_path / "overlay.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match=r"overlay\.json") as error:
        load_overlay(path)
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize("source", ["vdn-h3-9step", "./nothing", "/nowhere/at/all", "a/b/c", "~/nothing", "", "a b/c"])
def test_unknown_sources_say_what_there_is(source):
    with pytest.raises(SourceError, match="vdn-h3-8step"):
        load_overlay(source or "no such overlay")


@pytest.mark.parametrize(
    "revision", [None, "main", "refs/pr/1", "18be6bc", "18BE6BCC4EE72585EEE322BA28B5CCAC2CF85EF0"]
)
def test_repositories_need_a_commit(revision):
    with pytest.raises(UnpinnedRevisionError, match="40 lowercase hexadecimal digits"):
        load_overlay("OpenVDN/vdn-minimax-h3", revision=revision)


def test_a_folder_without_an_overlay_says_what_was_looked_for(tmp_path):
    (tmp_path / "readme.md").touch()
    with pytest.raises(SourceError, match=r"looked for overlay\.json, or h3-base/transformer.*found readme\.md"):
        load_overlay(tmp_path)


OTHER_KINDS = {
    "pruned for ComfyUI": (
        ["split_files/diffusion_models/minimax_h3_pruned_fp8.safetensors", "README.md"],
        "pruned (AdaLN input 8 instead of 2688)",
    ),
    "pruned LoRA": (["h3_turbo_Pruned_lora.safetensors"], "pruned (AdaLN input 8 instead of 2688)"),
    "for ComfyUI": (["diffusion_models/minimax_h3_bf16.safetensors", "vae/h3.safetensors"], "for another program"),
    "GGUF": (["minimax-h3-Q4_K_M.gguf"], "for another program"),
    "base": (
        ["transformer/config.json", "transformer/diffusion_pytorch_model.safetensors", "modular_model_index.json"],
        "`base_transformer`",
    ),
    "LoRA": (["minimax_h3_turbo_8step.safetensors", "README.md"], "`load_lora_weights`"),
    "nothing known": (["README.md"], "found README.md."),
}


@pytest.mark.parametrize(("names", "message"), OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_community_checkpoints_are_told_what_takes_them(tmp_path, names, message):
    """By their file names alone: empty files stand for weights, which are never read."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(SourceError, match="holds no overlay") as error:
        load_overlay(tmp_path)
    assert message in str(error.value)
    others = {text for _, text in OTHER_KINDS.values()} - {message}
    assert not any(text in str(error.value) for text in others)


def test_a_community_repository_is_refused_without_fetching_it(hub_server_class, tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "minimax_h3_pruned_bf16.safetensors").write_bytes(bytes(1000))
    with hub_server_class({"someone/H3-pruned": source}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code = (
            "import sys; from diffusers_h3.overlays import load_overlay, SourceError\n"
            f"try:\n load_overlay('someone/H3-pruned', '{hub.commit('someone/H3-pruned')}', cache_dir=sys.argv[1])\n"
            "except SourceError as error:\n print(error)"
        )
        words = [sys.executable, "-c", code, str(tmp_path / "cache")]
        result = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    assert "someone/H3-pruned" in result.stdout
    assert "AdaLN input 8 instead of 2688" in result.stdout
    assert hub.downloads(".safetensors") == []


def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(content):
        for key in path:
            content = content[key]
        content[last] = value

    return change


RELEASE_DAMAGE = [
    ("model_spec.json", _set("format_version", 3), "`format_version` must be 2, got 3"),
    ("model_spec.json", _set("base", "class_name", "WanTransformer3DModel"), "MiniMaxH3Transformer3DModel"),
    ("model_spec.json", _set("transforms", []), "`transforms` must hold one"),
    ("model_spec.json", _set("transforms", 0, "version", 1), "version 2"),
    ("model_spec.json", _set("transforms", 0, "config", "linear_attention", "delta_rule", "other"), "delta_rule"),
    ("metadata.json", _set("metadata", {"audio_shift": 3.0}), "`metadata.video_shift`"),
    ("metadata.json", _set("metadata", None), "`metadata.video_shift`, `metadata.audio_shift`"),
    ("metadata.json", _set("metadata", "turbo_num_steps", 0), "sampling.num_inference_steps"),
]


@pytest.mark.parametrize(("file", "change", "message"), RELEASE_DAMAGE)
def test_release_descriptions_this_version_cannot_read(golden, edit_json, file, change, message):
    edit_json(golden / EIGHT / file, change)
    with pytest.raises(ManifestError) as error:
        load_overlay(golden)
    assert message in str(error.value)
    assert EIGHT in str(error.value)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickled_adapters_are_refused(golden, suffix):
    weights = golden / EIGHT / "adapters" / "turbo" / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(suffix))
    with pytest.raises(SourceError, match=rf"found adapter_model\{suffix}.*Only \.safetensors") as error:
        load_overlay(golden)
    assert "adapters/turbo" in str(error.value)


@pytest.mark.parametrize(("gone", "found"), [("adapters/turbo", "default"), ("adapters", "none")])
def test_a_stage_without_its_adapters_is_incomplete(golden, gone, found):
    """An eight-step model without what distilled it would run, and be ruined."""
    shutil.rmtree(golden / EIGHT / gone)
    with pytest.raises(SourceError, match=f"calls for the adapter 'turbo', adapters/ holds {found}"):
        load_overlay(golden)


def test_linked_folders_are_read(golden, tmp_path):
    turbo = golden / EIGHT / "adapters" / "turbo"
    shutil.move(turbo, tmp_path / "elsewhere")
    turbo.symlink_to(tmp_path / "elsewhere")
    assert [adapter.name for adapter in load_overlay(golden).manifest.adapters] == ["default", "turbo"]


def test_a_missing_part_is_named(golden):
    shutil.rmtree(golden / EIGHT / "linear_branch")
    with pytest.raises(SourceError, match=r"Looked for model\.safetensors in .*linear_branch; found no files"):
        load_overlay(golden)


def test_loading_needs_no_torch(tiny_release):
    code = (
        "import sys; from diffusers_h3.overlays import builtin_overlays, load_overlay; builtin_overlays();"
        f"load_overlay({str(tiny_release / EIGHT)!r}); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert result.stdout.strip() == "False"

"""The folder an overlay becomes: its content, its links, its record, and what happens when the disk is against it."""

import errno
import hashlib
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from diffusers_h3.overlays import (
    DiskSpaceError,
    IntegrityError,
    OverlayError,
    SourceError,
    default_cache_dir,
    files,
    fuse,
    load_overlay,
    materialize_overlay,
    parts,
    verify_folder,
)


EIGHT, FIFTY = "stage-dmd-step-250", "stage-b-step-2000"
TRANSFORMER = ("transformer",)
FLOAT32_ISLANDS = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out")


def test_golden_weights_are_exact(golden, tmp_path, read_weights):
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    expected = load_file(golden / "expected.safetensors")
    expected = {name.removeprefix("fused."): value for name, value in expected.items() if name.startswith("fused.")}
    weights = read_weights(folder / "transformer")
    assert len(expected) == 64
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype
        assert torch.equal(weights[name], value), name
    dtypes = {name: weights[name].dtype for name in expected}
    islands = {name for name in dtypes if name.startswith(FLOAT32_ISLANDS)}
    assert {dtypes[name] for name in islands} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in islands} == {torch.bfloat16}
    branch = load_file(golden / EIGHT / "linear_branch" / "model.safetensors")
    assert set(weights) == set(expected) | set(branch)
    assert all(torch.equal(weights[name], value) and value.dtype == torch.bfloat16 for name, value in branch.items())


def test_complete_folder(release, tmp_path):
    folder = materialize_overlay(load_overlay(release / EIGHT), tmp_path / "cache")
    assert folder.parent == tmp_path / "cache"
    assert folder.name.startswith(f"{EIGHT}-")
    index = json.loads((folder / "model_index.json").read_text())
    assert {name: value for name, value in index.items() if name != "_diffusers_version"} == {
        "_class_name": "VDNH3Pipeline",
        "transformer": ["diffusers_h3", "VDNH3Transformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLMiniMaxH3"],
        "audio_vae": ["diffusers", "AutoencoderKLMiniMaxH3Audio"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", "MiniMaxH3Scheduler"],
        "audio_scheduler": ["diffusers", "MiniMaxH3Scheduler"],
        "num_inference_steps": 8,
    }
    config = json.loads((folder / "transformer" / "config.json").read_text())
    adapters = {
        name: release / EIGHT / "adapters" / name / "adapter_model.safetensors" for name in ("default", "turbo")
    }
    assert config["_class_name"] == "VDNH3Transformer3DModel"
    assert config["fused_adapters"] == [
        {"name": name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()} for name, path in adapters.items()
    ]
    assert config["hybrid_attention"]["config"]["softmax_attention"] == {"chunk": 5, "radius": 1}
    for component, shift in (("scheduler", 12.0), ("audio_scheduler", 3.0)):
        assert json.loads((folder / component / "scheduler_config.json").read_text())["shift"] == shift


def test_every_component_loads(release, tmp_path):
    import diffusers
    import transformers

    from diffusers_h3 import VDNH3Transformer3DModel

    folder = materialize_overlay(load_overlay(release / FIFTY), tmp_path / "cache")
    index = json.loads((folder / "model_index.json").read_text())
    assert index["num_inference_steps"] is None
    libraries = {"diffusers": diffusers, "transformers": transformers}
    for name, (library, class_name) in ((k, v) for k, v in index.items() if isinstance(v, list)):
        if name != "transformer":
            assert getattr(libraries[library], class_name).from_pretrained(folder / name) is not None
    model, info = VDNH3Transformer3DModel.from_pretrained(folder, subfolder="transformer", output_loading_info=True)
    assert not any(info.values())
    assert [adapter["name"] for adapter in model.config.fused_adapters] == ["default"]


def test_only_the_asked_components(release, tmp_path):
    shutil.rmtree(release / "h3-base" / "vae")
    folder = materialize_overlay(load_overlay(release / EIGHT), tmp_path, ("scheduler", "transformer"))
    assert sorted(path.name for path in folder.iterdir()) == [
        "model_index.json",
        "overlay.json",
        "scheduler",
        "transformer",
    ]
    assert json.loads((folder / "model_index.json").read_text())["vae"] == [None, None]
    with pytest.raises(SourceError, match=r"no folder .*h3-base/vae"):
        materialize_overlay(load_overlay(release / EIGHT), tmp_path)


@pytest.mark.parametrize("components", [("transfomer",), "transformer", ()])
def test_unknown_components_are_refused(golden, components):
    with pytest.raises(OverlayError, match="must be a list of some of transformer, vae"):
        materialize_overlay(load_overlay(golden), components=components)


def test_unchanged_files_are_linked(golden, release, tmp_path, edit_json):
    folder = materialize_overlay(load_overlay(release / EIGHT), tmp_path / "cache")
    linked = {name: check for name, check in _checks(folder).items() if check.origin == "linked"}
    assert "transformer/linear_branch.safetensors" in linked
    assert "text_encoder/model.safetensors" in linked
    assert (folder / "vae/diffusion_pytorch_model.safetensors").samefile(
        release / "h3-base/vae/diffusion_pytorch_model.safetensors"
    )
    # Without `turbo` no adapter touches the shard of the output heads: it is the base's own.
    shutil.rmtree(golden / EIGHT / "adapters" / "turbo")
    edit_json(golden / EIGHT / "metadata.json", lambda content: content["metadata"].pop("turbo_num_steps"))
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    origins = {name: check.origin for name, check in _checks(folder).items() if name.endswith("-of-00004.safetensors")}
    assert origins.pop("transformer/diffusion_pytorch_model-00004-of-00004.safetensors") == "linked"
    assert set(origins.values()) == {"fused"}


@pytest.mark.parametrize("symbolic", [True, False], ids=["symbolic link", "copy"])
def test_file_systems_without_links(golden, tmp_path, monkeypatch, symbolic):
    def refuse(*arguments, **options):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(files.os, "link", refuse)
    if not symbolic:
        monkeypatch.setattr(files.os, "symlink", refuse)
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    branch = folder / "transformer" / "linear_branch.safetensors"
    assert branch.is_symlink() == symbolic
    assert branch.read_bytes() == (golden / EIGHT / "linear_branch" / "model.safetensors").read_bytes()
    assert branch.stat().st_nlink == 1


def _checks(folder):
    return {check.path: check for check in verify_folder(folder)}


def test_record(golden, tmp_path):
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    record = json.loads((folder / "overlay.json").read_text())
    assert record["root"] == str(golden)
    assert record["components"] == ["transformer"]
    assert record["manifest"] == json.loads(json.dumps(load_overlay(golden).manifest.to_dict()))
    assert set(record["versions"]) == {
        "diffusers",
        "diffusers_h3",
        "huggingface_hub",
        "python",
        "safetensors",
        "torch",
    }
    inputs = {(entry["source"], entry["file"]): entry for entry in record["inputs"]}
    turbo = inputs[str(golden / EIGHT / "adapters" / "turbo"), "adapter_model.safetensors"]
    content = (golden / EIGHT / "adapters" / "turbo" / "adapter_model.safetensors").read_bytes()
    assert (turbo["bytes"], turbo["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert {entry["checked"] for entry in record["inputs"]} == {"computed"}
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(record["outputs"]) == on_disk - {"overlay.json"}


def test_published_digests_are_verified(golden, tmp_path, leftovers):
    content = load_overlay(golden).manifest.to_dict()
    weights = content["adapters"][1]["weights"]
    path = golden / EIGHT / "adapters" / "turbo" / weights["file"]
    weights["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (golden / "overlay.json").write_text(json.dumps(content))
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    checked = {
        entry["source"]: entry["checked"]
        for entry in json.loads((folder / "overlay.json").read_text())["inputs"]
        if entry["file"] == "adapter_model.safetensors"
    }
    assert checked == {
        str(golden / EIGHT / "adapters" / "default"): "computed",
        str(golden / EIGHT / "adapters" / "turbo"): "verified",
    }
    # A bit flipped in the weights, size and header as before.
    spoiled = bytearray(path.read_bytes())
    spoiled[-1] ^= 1
    path.unlink()
    path.write_bytes(spoiled)
    with pytest.raises(IntegrityError, match=r"adapters/turbo/adapter_model\.safetensors is damaged.*SHA-256"):
        materialize_overlay(load_overlay(golden), tmp_path / "other", TRANSFORMER)
    assert leftovers(tmp_path / "other") == []


CORRUPTED = [
    ("h3-base/transformer/diffusion_pytorch_model-00002-of-00004.safetensors", "shard"),
    (f"{EIGHT}/adapters/default/adapter_model.safetensors", "adapter"),
    (f"{EIGHT}/linear_branch/model.safetensors", "branch"),
]


@pytest.mark.parametrize("file", [file for file, _ in CORRUPTED], ids=[name for _, name in CORRUPTED])
@pytest.mark.parametrize("damage", ["truncated", "header"])
def test_corrupted_weights_are_one_clear_error(golden, tmp_path, leftovers, file, damage):
    path = golden / file
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-100] if damage == "truncated" else content[:8] + b"\0" * 40 + content[48:])
    with pytest.raises(IntegrityError) as error:
        materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert leftovers(tmp_path / "cache") == []


def test_an_overflowing_merge_leaves_nothing(golden, tmp_path, leftovers, edit_tensors):
    name = "transformer_blocks.2.attn.orig.to_q.lora_B.default.weight"
    edit_tensors(
        golden / EIGHT / "adapters" / "default" / "adapter_model.safetensors",
        lambda tensors: tensors.update({name: tensors[name] * float("inf")}),
    )
    with pytest.raises(IntegrityError, match=r"transformer_blocks\.2\.attn\.to_q\.weight .*not finite"):
        materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    assert leftovers(tmp_path / "cache") == []


@pytest.mark.parametrize("name", ["pytorch_model.bin", "diffusion_pytorch_model.pt", "nested/weights.ckpt"])
def test_pickled_components_are_refused(release, tmp_path, leftovers, name):
    path = release / "h3-base" / "vae" / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(SourceError, match=f"holds {name}: pickled weights can run code"):
        materialize_overlay(load_overlay(release / EIGHT), tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_code_is_left_behind(release, tmp_path):
    (release / "h3-base" / "vae" / "modeling.py").write_text("raise SystemExit('this must never run')")
    folder = materialize_overlay(load_overlay(release / EIGHT), tmp_path / "cache", ("vae",))
    assert sorted(path.name for path in (folder / "vae").iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
    ]


@pytest.mark.parametrize(("gone", "message"), [("config.json", "no config.json"), ("model.safetensors", "no weights")])
def test_incomplete_components_are_refused(release, tmp_path, gone, message):
    (release / "h3-base" / "text_encoder" / gone).unlink()
    with pytest.raises(SourceError, match=f"text_encoder has {message}"):
        materialize_overlay(load_overlay(release / EIGHT), tmp_path / "cache")


def test_shards_of_components_must_be_there(release, tmp_path):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}}
    (release / "h3-base" / "text_encoder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match=r"text_encoder lacks model-00001-of-00002\.safetensors"):
        materialize_overlay(load_overlay(release / EIGHT), tmp_path / "cache")


def test_a_second_call_returns_the_folder_as_it_is(golden, tmp_path, monkeypatch):
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    before = (folder / "overlay.json").read_bytes()
    monkeypatch.setattr(fuse, "write", lambda *arguments: pytest.fail("the weights were written again"))
    assert materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER) == folder
    assert (folder / "overlay.json").read_bytes() == before


def test_the_name_depends_on_what_is_in_it(golden, tmp_path):
    def name(**options):
        components = options.pop("components", TRANSFORMER)
        return materialize_overlay(load_overlay(golden), tmp_path / "cache", components).name

    first = name()
    assert name(components=("transformer", "scheduler")) != first
    assert name(components=["transformer"]) == first
    spec = golden / EIGHT / "adapters" / "turbo" / "adapter_spec.json"
    os.utime(spec, ns=(1, 1))
    changed = name()
    assert changed != first
    content = json.loads(spec.read_text())
    content["config"]["alpha"] = 12.0
    spec.unlink()
    spec.write_text(json.dumps(content))
    assert name() not in (first, changed)


def test_a_damaged_result_is_made_again(golden, tmp_path, caplog):
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    shard = folder / "transformer" / "diffusion_pytorch_model-00001-of-00004.safetensors"
    content = shard.read_bytes()
    for damage in (shard.unlink, lambda: shard.write_bytes(content[:-1]), (folder / "overlay.json").unlink):
        damage()
        assert materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER) == folder
        assert shard.read_bytes() == content
        assert {check.status for check in verify_folder(folder)} == {"ok"}
    assert caplog.text.count("has lost files") == 3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".locks", folder.name]


def test_verify_folder_finds_every_change(golden, tmp_path):
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    assert {check.status for check in verify_folder(folder)} == {"ok"}
    shard = "transformer/diffusion_pytorch_model-00001-of-00004.safetensors"
    content = bytearray((folder / shard).read_bytes())
    content[-1] ^= 1
    (folder / shard).write_bytes(content)
    (folder / "model_index.json").unlink()
    found = {path: check.status for path, check in _checks(folder).items() if check.status != "ok"}
    assert found == {shard: "changed", "model_index.json": "missing"}
    with pytest.raises(SourceError, match="not a materialised overlay"):
        verify_folder(tmp_path)


def test_default_cache(golden, monkeypatch, tmp_path):
    from huggingface_hub import constants

    assert default_cache_dir() == tmp_path / "default-cache"
    assert materialize_overlay(load_overlay(golden), components=TRANSFORMER).parent == tmp_path / "default-cache"
    monkeypatch.delenv("DIFFUSERS_H3_CACHE")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    assert default_cache_dir() == tmp_path / "home" / "diffusers-h3"


def test_too_little_space_is_said_before_anything_is_written(golden, tmp_path, monkeypatch, leftovers):
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(parts.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(fuse, "write", lambda *arguments: pytest.fail("weights were written"))
    # The four shards hold 133,672 bytes and every one of them is changed.
    shards = sum(path.stat().st_size for path in (golden / "h3-base" / "transformer").glob("*.safetensors"))
    assert shards == 133_672
    with pytest.raises(DiskSpaceError, match=f"needed on the disk of {tmp_path}"):
        materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    assert leftovers(tmp_path / "cache") == []


def test_space_is_summed_by_disk_and_said_in_gigabytes(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=12_300_000_000)
    monkeypatch.setattr(parts.shutil, "disk_usage", lambda path: usage)
    parts.check_space([(tmp_path / "a" / "b", 6_000_000_000), (tmp_path, 6_300_000_000)])
    with pytest.raises(DiskSpaceError, match=rf"66\.12 GB are needed on the disk of {tmp_path}, 12\.30 GB are free"):
        parts.check_space([(tmp_path / "a" / "b", 60_000_000_000), (tmp_path, 6_120_000_000)])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1, 40])
def test_a_full_disk_leaves_nothing(golden, tmp_path, monkeypatch, leftovers, code, after):
    quota, calls = after, []
    original = fuse.write

    def limited(writer, digest, data):
        calls.append(len(data))
        if len(calls) > quota:
            raise OSError(code, os.strerror(code))
        original(writer, digest, data)

    monkeypatch.setattr(fuse, "write", limited)
    with pytest.raises(DiskSpaceError, match="ran full while writing stage-dmd-step-250") as error:
        materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    assert len(calls) == after + 1
    assert len(str(error.value).splitlines()) == 1
    assert leftovers(tmp_path / "cache") == []
    monkeypatch.setattr(fuse, "write", original)
    folder = materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER)
    assert {check.status for check in verify_folder(folder)} == {"ok"}


def test_a_folder_that_cannot_be_written_is_named(golden, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OverlayError, match=r"Materialising .*file.* failed: .*Not a directory|File exists"):
        materialize_overlay(load_overlay(golden), tmp_path / "file", TRANSFORMER)

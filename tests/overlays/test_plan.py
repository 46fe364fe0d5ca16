"""Parts that do not belong together are refused from headers and configs, before anything is written."""

import json
import shutil

import pytest
import torch

from diffusers_h3.overlays import (
    IncompatibleWeightsError,
    IntegrityError,
    ManifestError,
    SourceError,
    load_overlay,
    materialize_overlay,
)


STAGE = "stage-dmd-step-250"
TRANSFORMER = ("transformer",)


@pytest.fixture
def refused(golden, tmp_path, leftovers):
    """A function that expects a refusal matching `message` and checks that nothing is left of the attempt."""

    def check(error_class, message):
        cache = tmp_path / "cache"
        with pytest.raises(error_class, match=message) as error:
            materialize_overlay(load_overlay(golden), cache, TRANSFORMER)
        assert leftovers(cache) == []
        assert len(str(error.value).splitlines()) <= 2
        return str(error.value)

    return check


def _shard_with(folder, tensor):
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())
    return folder / index["weight_map"][tensor]


def _base(golden):
    return golden / "h3-base" / "transformer"


def test_pruned_bases_are_refused_by_shape(golden, edit_tensors, refused):
    """Case 13: the AdaLN projections of a pruned base take fewer inputs than the adapter's."""
    names = [f"transformer_blocks.{block}.adaln_proj.linear.weight" for block in range(3)]
    for name in names:
        edit_tensors(
            _shard_with(_base(golden), name), lambda tensors, name=name: tensors.update({name: tensors[name][:, :8]})
        )
    message = refused(IncompatibleWeightsError, "Adapter 'turbo'.*3 modules of another shape")
    assert "transformer_blocks.0.adaln_proj.linear: weight [576, 8], B [576, 2], A [2, 12]" in message
    assert "pruned" in message


def test_a_base_of_fewer_blocks_is_refused(golden, edit_json, edit_tensors, refused):
    index = _base(golden) / "diffusion_pytorch_model.safetensors.index.json"
    gone = [name for name in json.loads(index.read_text())["weight_map"] if name.startswith("transformer_blocks.2.")]
    for name in gone:
        edit_tensors(_shard_with(_base(golden), name), lambda tensors, name=name: tensors.pop(name))
    edit_json(index, lambda content: [content["weight_map"].pop(name) for name in gone])
    refused(IncompatibleWeightsError, r"4 modules the base does not have \(transformer_blocks\.2")


FUSED = [
    {"fused_adapters": [{"name": "default", "sha256": "0" * 64}]},
    {"hybrid_attention": {"type": "hybrid_attention"}},
    {"_class_name": "VDNH3Transformer3DModel", "fused_adapters": [{"name": "turbo", "sha256": "0" * 64}]},
]


@pytest.mark.parametrize("config", FUSED, ids=lambda config: "+".join(config))
def test_merging_twice_is_refused(golden, edit_json, refused, config):
    """Case 14."""
    edit_json(_base(golden) / "config.json", lambda content: content.update(config))
    message = refused(IncompatibleWeightsError, "already holds an overlay.*Merging twice")
    for entry in config.get("fused_adapters", ()):
        assert entry["name"] in message


def test_a_materialised_transformer_is_no_base(golden, tmp_path, refused):
    """Case 14 with the real thing: what was materialised, put in the base's place."""
    folder = materialize_overlay(load_overlay(golden), tmp_path / "first", TRANSFORMER)
    shutil.rmtree(_base(golden))
    shutil.copytree(folder / "transformer", _base(golden))
    assert "default, turbo" in refused(IncompatibleWeightsError, "already holds an overlay")


def test_another_class_is_refused(golden, edit_json, refused):
    edit_json(_base(golden) / "config.json", lambda content: content.update(_class_name="WanTransformer3DModel"))
    refused(IncompatibleWeightsError, "'WanTransformer3DModel'; an overlay is laid over a MiniMaxH3Transformer3DModel")


def test_head_dimensions_must_agree(golden, edit_json, refused):
    edit_json(_base(golden) / "config.json", lambda content: content.update(attention_head_dim=32))
    refused(IncompatibleWeightsError, "16 channels per head")


A_LOG = "transformer_blocks.1.attn.linear_attention.alpha.A_log"
BRANCH_DAMAGE = [
    (lambda tensors: tensors.pop(A_LOG), f"1 missing .{A_LOG}"),
    (lambda tensors: tensors.update({"surprise": torch.ones(1)}), "1 unexpected .surprise"),
    (lambda tensors: tensors.update({A_LOG: torch.ones(3)}), r"1 of another shape .*A_log: \[3\] instead of \[2\]"),
    (lambda tensors: tensors.clear(), "48 missing"),
]


@pytest.mark.parametrize(("change", "message"), BRANCH_DAMAGE)
def test_branches_that_do_not_fit_are_refused(golden, edit_tensors, refused, change, message):
    edit_tensors(golden / STAGE / "linear_branch" / "model.safetensors", change)
    refused(IncompatibleWeightsError, f"linear branch .* does not fit the base transformer: {message}")


def test_the_branch_must_be_for_the_same_attention(golden, edit_json, refused):
    path = golden / STAGE / "linear_branch" / "config.json"
    edit_json(path, lambda content: content["config"]["softmax_attention"].update(radius=2))
    refused(ManifestError, "another hybrid attention than the manifest")


def test_index_and_shards_must_agree(golden, edit_json, refused):
    index = _base(golden) / "diffusion_pytorch_model.safetensors.index.json"

    def swap(content):
        content["weight_map"]["proj_out.bias"] = content["weight_map"]["proj_in.bias"]

    edit_json(index, swap)
    refused(IntegrityError, "index and shards disagree about proj_out.bias")


def test_a_missing_shard_is_named(golden, refused):
    (_base(golden) / "diffusion_pytorch_model-00003-of-00004.safetensors").unlink()
    refused(SourceError, "lacks diffusion_pytorch_model-00003-of-00004.safetensors, which its index names")


def test_pickled_shards_are_refused(golden, edit_json, refused):
    index = _base(golden) / "diffusion_pytorch_model.safetensors.index.json"
    edit_json(index, lambda content: content["weight_map"].update({"proj_in.bias": "pytorch_model.bin"}))
    refused(ManifestError, "must map every weight to a .safetensors file")


def test_a_base_in_one_file(golden, tmp_path, read_weights):
    from safetensors.torch import save_file

    tensors = read_weights(_base(golden))
    for path in _base(golden).glob("diffusion_pytorch_model*"):
        path.unlink()
    save_file(tensors, _base(golden) / "diffusion_pytorch_model.safetensors")
    merged = read_weights(materialize_overlay(load_overlay(golden), tmp_path / "cache", TRANSFORMER) / "transformer")
    assert len(merged) == len(tensors) + 48


COUNTS = [
    (("base_transformer", "shards"), 14, "4"),
    (("adapters", 0, "pairs"), 208, "16"),
    (("adapters", 1, "weights", "tensors"), 726, "56"),
    (("linear_branch", "weights", "tensors"), 800, "48"),
]


@pytest.mark.parametrize(("path", "value", "found"), COUNTS, ids=lambda value: str(value))
def test_the_manifests_counts_are_checked(golden, refused, path, value, found):
    content = load_overlay(golden).manifest.to_dict()
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (golden / "overlay.json").write_text(json.dumps(content))
    assert f"is {value}," in refused(ManifestError, f"has {found}")


def test_published_sizes_are_checked_before_anything_is_read(golden, refused):
    content = load_overlay(golden).manifest.to_dict()
    content["adapters"][0]["weights"]["bytes"] = 334_026_912
    (golden / "overlay.json").write_text(json.dumps(content))
    refused(IntegrityError, r"12,072 bytes, the manifest \(`adapters\[0\]\.weights\.bytes`\) says 334,026,912")

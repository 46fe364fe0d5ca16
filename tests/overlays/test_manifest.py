"""The manifest format and the two manifests that come with the package."""

import copy
import json
from math import prod

import pytest

from diffusers_h3.hybrid.config import HybridAttentionConfig
from diffusers_h3.overlays import ManifestError, OverlayManifest, UnpinnedRevisionError, builtin_overlays
from diffusers_h3.overlays.plan import branch_shapes


COMMIT = "18be6bcc4ee72585eee322ba28b5ccac2cf85ef0"
FULL_SIZE = {"num_attention_heads": 56, "hidden_size": 5376, "num_layers": 50}


@pytest.fixture
def content():
    return builtin_overlays()["vdn-h3-8step"].to_dict() | {"name": "mine"}


def _plain(content):
    """What a JSON file would hold: lists instead of tuples."""
    return json.loads(json.dumps(content))


def _paths(node, prefix=()):
    """Every key of nested objects and lists, as a path."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        if isinstance(node, dict):
            yield (*prefix, key)
        yield from _paths(value, (*prefix, key))


def _spelled(path):
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.lstrip(".")


def _parent(content, path):
    for key in path[:-1]:
        content = content[key]
    return content


def test_builtin_names_and_sampling_contracts():
    overlays = builtin_overlays()
    assert set(overlays) == {"vdn-h3-8step", "vdn-h3-50step"}
    calls = {name: overlay.sampling.num_inference_steps for name, overlay in overlays.items()}
    assert calls == {"vdn-h3-8step": 8, "vdn-h3-50step": None}
    assert overlays["vdn-h3-50step"].sampling.recommended_num_inference_steps == 50
    for overlay in overlays.values():
        assert (overlay.sampling.video_shift, overlay.sampling.audio_shift) == (12.0, 3.0)
        assert overlay.hybrid_attention == HybridAttentionConfig()
        assert "MiniMax-H3 Community License" in overlay.license_note


def test_builtin_pins():
    eight = builtin_overlays()["vdn-h3-8step"]
    revisions = {source.repo: source.revision for source in eight.sources()}
    assert revisions == {
        "OpenVDN/vdn-minimax-h3": COMMIT,
        "MiniMaxAI/MiniMax-H3": "939557dc319dd91227e30195a763f272ba7f8765",
    }
    published = {
        adapter.name: (adapter.weights.sha256[:8], adapter.weights.bytes, adapter.weights.tensors, adapter.pairs)
        for adapter in eight.adapters
    }
    assert published == {
        "default": ("58558fef", 334_026_912, 416, 208),
        "turbo": ("24fc93c8", 851_452_696, 726, 363),
    }
    assert [adapter.name for adapter in eight.adapters] == ["default", "turbo"]
    assert eight.linear_branch.weights.sha256.startswith("dec6981c")
    assert eight.base_transformer.shards == 14
    fifty = builtin_overlays()["vdn-h3-50step"]
    assert [adapter.source.subfolder for adapter in fifty.adapters] == ["stage-b-step-2000/adapters/default"]
    assert fifty.linear_branch.weights.sha256 is None


def test_full_size_branch_has_the_published_tensors_and_bytes():
    shapes = branch_shapes(FULL_SIZE, HybridAttentionConfig())
    assert len(shapes) == 800
    assert shapes["transformer_blocks.49.attn.to_out_linear.weight"] == (5376, 7168)
    data = 2 * sum(prod(shape) for shape in shapes.values())
    published = 4_279_428_112
    assert 0 < published - data < 200_000  # the file's header, about 120 bytes a tensor


@pytest.mark.parametrize(
    "hybrid_attention",
    [
        HybridAttentionConfig(linear_head_dim=16),
        HybridAttentionConfig(linear_head_dim=16, enable_softmax_gate=False, short_conv_targets=()),
        HybridAttentionConfig(linear_head_dim=16, short_conv_targets=("q", "k", "v"), bridge="none", chunk=0),
    ],
)
def test_branch_shapes_are_those_of_the_model(hybrid_attention):
    from diffusers_h3.models.transformer_vdn_h3 import VDNH3Transformer3DModel

    size = {"num_attention_heads": 3, "hidden_size": 32, "num_layers": 2}
    model = VDNH3Transformer3DModel(
        **size,
        attention_head_dim=16,
        num_refiner_layers=1,
        ffn_dim=48,
        text_dim=20,
        freq_dim=16,
        time_embed_hidden_dim=24,
        time_embed_dim=12,
        rope_freq_dim=2,
        hybrid_attention=hybrid_attention.to_dict(),
    )
    stock = {"to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k"}
    own = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.startswith("transformer_blocks.") and ".attn." in name and name.split(".")[3] not in stock
    }
    assert branch_shapes(size, hybrid_attention) == own


def test_round_trip(content):
    manifest = OverlayManifest.from_dict(_plain(content))
    assert manifest.name == "mine"
    assert OverlayManifest.from_dict(_plain(manifest.to_dict())) == manifest


def test_every_missing_field_is_named(content):
    content = _plain(content)
    paths = [path for path in _paths(content) if path[0] != "hybrid_attention" or len(path) == 1]
    assert len(paths) > 40
    for path in paths:
        damaged = copy.deepcopy(content)
        del _parent(damaged, path)[path[-1]]
        with pytest.raises(ManifestError, match="missing field") as error:
            OverlayManifest.from_dict(damaged)
        assert f"`{_spelled(path)}`" in str(error.value)


def test_every_unknown_field_is_named(content):
    content = _plain(content)
    objects = {path[:-1] for path in _paths(content) if path[0] != "hybrid_attention"} - {("hybrid_attention",)}
    assert len(objects) > 15
    for path in objects:
        damaged = copy.deepcopy(content)
        _parent(damaged, (*path, "x"))["surprise"] = 1
        with pytest.raises(ManifestError, match="unknown field") as error:
            OverlayManifest.from_dict(damaged)
        assert f"`{_spelled((*path, 'surprise'))}`" in str(error.value)


ILLEGAL = [
    (("schema_version",), 2),
    (("schema_version",), True),
    (("name",), "../up"),
    (("name",), ""),
    (("description",), 3),
    (("license_note",), " "),
    (("base_transformer", "shards"), 0),
    (("base_transformer", "source"), "OpenVDN/vdn-minimax-h3"),
    (("base_transformer", "source", "repo"), "no-owner"),
    (("base_transformer", "source", "repo"), None),
    (("base_transformer", "source", "subfolder"), "/etc"),
    (("base_transformer", "source", "subfolder"), "a/../../b"),
    (("adapters",), {}),
    (("adapters", 0, "name"), "a/b"),
    (("adapters", 1, "name"), "default"),
    (("adapters", 0, "pairs"), -1),
    (("adapters", 0, "weights", "file"), "adapter_model.bin"),
    (("adapters", 0, "weights", "file"), "../x.safetensors"),
    (("adapters", 0, "weights", "sha256"), "ABC"),
    (("adapters", 0, "weights", "bytes"), 1.5),
    (("linear_branch", "weights", "tensors"), "800"),
    (("components", "vae"), None),
    (("sampling", "num_inference_steps"), 0),
    (("sampling", "num_inference_steps"), True),
    (("sampling", "video_shift"), -1),
    (("sampling", "audio_shift"), float("nan")),
    (("hybrid_attention", "config", "softmax_attention", "chunk"), -1),
    (("hybrid_attention", "version"), 1),
]


@pytest.mark.parametrize(("path", "value"), ILLEGAL, ids=lambda value: str(value))
def test_illegal_values_are_named(content, path, value):
    content = _plain(content)
    _parent(content, path)[path[-1]] = value
    with pytest.raises(ManifestError) as error:
        OverlayManifest.from_dict(content)
    # A field that is only illegal beside another is reported at the object that holds both.
    named = path[:1] if path[0] in ("hybrid_attention",) or path == ("adapters", 1, "name") else path
    named = named[:-1] if path[-1] == "repo" and value is None else named
    assert f"`{_spelled(named)}`" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("revision", ["main", "v1.0", "18be6bc", COMMIT.upper(), COMMIT + "0"])
def test_only_commits_are_revisions(content, revision):
    content = _plain(content)
    content["components"]["vae"]["revision"] = revision
    with pytest.raises(UnpinnedRevisionError, match=r"components\.vae\.revision.*allow_unpinned"):
        OverlayManifest.from_dict(content)
    assert OverlayManifest.from_dict(content, allow_unpinned=True).components["vae"].revision == revision


def test_a_key_named_twice_is_refused(tmp_path):
    path = tmp_path / "overlay.json"
    path.write_text('{"name": "a", "name": "b"}')
    with pytest.raises(ManifestError, match="'name' more than once"):
        OverlayManifest.from_file(path)

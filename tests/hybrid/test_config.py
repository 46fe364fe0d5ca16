"""`HybridAttentionConfig`: what it accepts, what it refuses and under which name."""

import copy
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from diffusers_h3 import HybridAttentionConfig


GOLDEN_RELEASE = Path(__file__).parents[1] / "golden/release_t2va/stage-dmd-step-250"

RELEASED = {
    "type": "hybrid_attention",
    "version": 2,
    "config": {
        "anchor_frames": "both",
        "enable_softmax_gate": True,
        "linear_attention": {
            "a_fp32": True,
            "bridge": "alpha",
            "delta_rule": "vdn_solve",
            "enable_text_state": True,
            "linear_head_dim": 128,
            "short_conv": {"targets": ["k", "v"]},
        },
        "softmax_attention": {"chunk": 5, "radius": 1},
    },
}

ILLEGAL = [
    *(("chunk", value) for value in (-1, 2.0, "5", None, True)),
    *(("radius", value) for value in (-1, 1.5, "1", None, False)),
    *(("linear_head_dim", value) for value in (0, -128, 128.0, "128", None, True)),
    *(("anchor_frames", value) for value in ("Both", "first", "", None, True, ["both"], 1)),
    *(("delta_rule", value) for value in ("vdn", "VDN_SOLVE", "", None, 2)),
    *(("bridge", value) for value in ("beta", "", None, False)),
    *(("enable_softmax_gate", value) for value in (1, 0, "true", None)),
    *(("a_fp32", value) for value in (1, "yes", None)),
    *(("enable_text_state", value) for value in (0, "no", None)),
    *(("short_conv_targets", value) for value in ("kv", "k", None, 1, {"k", "v"}, ("x",), ("k", "k"), ("k", None))),
    ("short_conv_targets", (["k"],)),
]

PATHS = {
    "anchor_frames": ("anchor_frames",),
    "enable_softmax_gate": ("enable_softmax_gate",),
    "chunk": ("softmax_attention", "chunk"),
    "radius": ("softmax_attention", "radius"),
    "a_fp32": ("linear_attention", "a_fp32"),
    "bridge": ("linear_attention", "bridge"),
    "delta_rule": ("linear_attention", "delta_rule"),
    "enable_text_state": ("linear_attention", "enable_text_state"),
    "linear_head_dim": ("linear_attention", "linear_head_dim"),
    "short_conv_targets": ("linear_attention", "short_conv", "targets"),
}


def _changed(path, change):
    """Return the released transform with `change(node, leaf)` applied at `path` of its config."""
    transform = copy.deepcopy(RELEASED)
    node = transform["config"]
    for parent in path[:-1]:
        node = node[parent]
    change(node, path[-1])
    return transform


@pytest.mark.parametrize(("name", "value"), ILLEGAL)
def test_illegal_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        HybridAttentionConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), ILLEGAL)
def test_illegal_values_in_a_transform_are_refused_by_name(name, value):
    transform = _changed(PATHS[name], lambda node, leaf: node.__setitem__(leaf, value))
    with pytest.raises(ValueError, match=f"`{name}`"):
        HybridAttentionConfig.from_dict(transform)


def test_the_defaults_are_the_released_configuration():
    assert HybridAttentionConfig().to_dict() == RELEASED
    assert HybridAttentionConfig.from_dict(RELEASED) == HybridAttentionConfig()


@pytest.mark.parametrize("file", ["model_spec.json", "linear_branch/config.json"])
def test_released_files_parse_to_the_defaults(file):
    content = json.loads((GOLDEN_RELEASE / file).read_text())
    transform = content["transforms"][0] if "transforms" in content else content
    config = HybridAttentionConfig.from_dict(transform)
    assert config == HybridAttentionConfig(linear_head_dim=16)
    assert config.to_dict() == transform


@pytest.mark.parametrize(
    "config",
    [
        HybridAttentionConfig(),
        HybridAttentionConfig(
            chunk=0,
            radius=3,
            anchor_frames="none",
            enable_softmax_gate=False,
            delta_rule="sana_scaled",
            bridge="none",
            a_fp32=False,
            enable_text_state=False,
            linear_head_dim=64,
            short_conv_targets=(),
        ),
        HybridAttentionConfig(anchor_frames="rows", delta_rule="vdn_scaled", short_conv_targets=("q", "k", "v")),
    ],
)
def test_round_trip(config):
    transform = config.to_dict()
    assert HybridAttentionConfig.from_dict(json.loads(json.dumps(transform))) == config
    assert HybridAttentionConfig.from_dict(transform["config"]) == config


def test_round_trip_keeps_every_value_apart():
    transform = HybridAttentionConfig(chunk=7, radius=2, linear_head_dim=64, bridge="none").to_dict()
    assert transform["config"]["softmax_attention"] == {"chunk": 7, "radius": 2}
    assert transform["config"]["linear_attention"]["linear_head_dim"] == 64
    assert transform["config"]["linear_attention"]["bridge"] == "none"
    assert transform["config"]["anchor_frames"] == "both"


def test_order_of_the_convolved_projections_does_not_matter():
    config = HybridAttentionConfig(short_conv_targets=["v", "q"])
    assert config.short_conv_targets == ("q", "v")
    assert config == HybridAttentionConfig(short_conv_targets=("q", "v"))
    assert hash(config) == hash(HybridAttentionConfig(short_conv_targets=("q", "v")))


@pytest.mark.parametrize(
    ("mode", "columns", "rows"),
    [("none", False, False), ("columns", True, False), ("rows", False, True), ("both", True, True)],
)
def test_anchor_modes(mode, columns, rows):
    config = HybridAttentionConfig(anchor_frames=mode)
    assert (config.anchor_columns, config.anchor_rows) == (columns, rows)


def test_config_is_frozen():
    config = HybridAttentionConfig()
    with pytest.raises(FrozenInstanceError):
        config.chunk = 4
    with pytest.raises(ValueError, match="`chunk`"):
        replace(config, chunk=-4)


@pytest.mark.parametrize("path", list(PATHS.values()))
def test_missing_fields_are_named(path):
    transform = _changed(path, lambda node, leaf: node.pop(leaf))
    with pytest.raises(ValueError, match=f"missing {'.'.join(path)}"):
        HybridAttentionConfig.from_dict(transform)


@pytest.mark.parametrize(
    "path",
    [
        ("extra",),
        ("softmax_attention", "extra"),
        ("linear_attention", "extra"),
        ("linear_attention", "short_conv", "extra"),
    ],
)
@pytest.mark.parametrize("value", [1, None, {"deep": 1}, {}])
def test_unknown_fields_are_named(path, value):
    transform = _changed(path, lambda node, leaf: node.__setitem__(leaf, value))
    with pytest.raises(ValueError, match=f"unknown {'.'.join(path)}"):
        HybridAttentionConfig.from_dict(transform)


@pytest.mark.parametrize("group", ["softmax_attention", "linear_attention"])
@pytest.mark.parametrize("value", [None, 5, [], {}])
def test_a_group_of_another_shape_is_refused_by_field_names(group, value):
    transform = _changed((group,), lambda node, leaf: node.__setitem__(leaf, value))
    with pytest.raises(ValueError, match=f"unknown {group}.*missing {group}"):
        HybridAttentionConfig.from_dict(transform)


def test_a_leaf_that_is_a_group_is_refused_by_name():
    transform = _changed(("anchor_frames",), lambda node, leaf: node.__setitem__(leaf, {"mode": "both"}))
    with pytest.raises(ValueError, match=r"unknown anchor_frames\.mode, missing anchor_frames"):
        HybridAttentionConfig.from_dict(transform)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "linear_attention"}, "type 'linear_attention', version 2"),
        ({"version": 1}, "type 'hybrid_attention', version 1"),
        ({"version": 3}, "version 3"),
        ({"version": "2"}, "version '2'"),
        ({"extra": 1}, "exactly 'type', 'version' and 'config'"),
        ({"config": None}, "dictionary"),
        ({"config": [1]}, "dictionary"),
    ],
)
def test_another_transform_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        HybridAttentionConfig.from_dict({**RELEASED, **change})


@pytest.mark.parametrize(
    ("missing", "message"),
    [("type", "got type None, version 2"), ("version", "version None"), ("config", "got .'type', 'version'.")],
)
def test_a_partial_transform_is_refused(missing, message):
    transform = {name: value for name, value in RELEASED.items() if name != missing}
    with pytest.raises(ValueError, match=message):
        HybridAttentionConfig.from_dict(transform)


@pytest.mark.parametrize("value", [None, 2, "hybrid_attention", [RELEASED]])
def test_something_else_is_refused(value):
    with pytest.raises(ValueError, match="must be a dictionary"):
        HybridAttentionConfig.from_dict(value)


def test_an_empty_dictionary_names_everything_it_lacks():
    with pytest.raises(ValueError, match=r"missing anchor_frames.*missing softmax_attention\.radius"):
        HybridAttentionConfig.from_dict({})

"""Which pair changes which weight by how much: ranks, alphas, patterns, and tensors that belong nowhere."""

import json

import pytest
import torch

from diffusers_h3.overlays import IncompatibleWeightsError, ManifestError, SourceError
from diffusers_h3.overlays.adapters import AdapterSpec, pair_tensors, read_adapter_spec
from diffusers_h3.overlays.fuse import Delta, fuse_shard
from diffusers_h3.overlays.sources import LocalFolder
from diffusers_h3.overlays.tensor_file import read_header


WIDTH = 80


@pytest.fixture
def merge(make_base, tmp_path):
    """A function merging one adapter into a base, as the materialiser does; returns the merged weights."""
    from safetensors.torch import load_file

    def run(base, adapter, spec, name="x"):
        base_file, adapter_file = make_base(base), make_base(adapter, "adapter.safetensors")
        pairs = pair_tensors(name, "adapter", spec, read_header(adapter_file)[0], read_header(base_file)[0])
        deltas = {pair.target: [Delta(name, adapter_file, pair.lora_a, pair.lora_b, pair.scale)] for pair in pairs}
        fuse_shard(base_file, tmp_path / "out.safetensors", deltas)
        return load_file(tmp_path / "out.safetensors")

    return run


def _spec(rank=None, alpha=None, rank_pattern=None, alpha_pattern=None):
    return AdapterSpec(rank, alpha, rank_pattern or {}, alpha_pattern or {})


def _adapter(ranks, name="x"):
    tensors = {}
    for module, rank in ranks.items():
        tensors[f"{module}.lora_A.{name}.weight"] = torch.randn(rank, WIDTH)
        tensors[f"{module}.lora_B.{name}.weight"] = torch.randn(WIDTH, rank)
    return tensors


def _base(modules):
    return {f"{module}.weight": torch.randn(WIDTH, WIDTH) for module in modules}


SCALES = [
    pytest.param(_spec(), {"first": 1.0, "second": 1.0}, id="nothing declared"),
    pytest.param(_spec(rank_pattern={"first": 16, "second": 64}), {"first": 1.0, "second": 1.0}, id="ranks only"),
    pytest.param(_spec(alpha=32), {"first": 2.0, "second": 0.5}, id="one alpha"),
    pytest.param(_spec(alpha=16, rank=16, rank_pattern={"second": 64}), {"first": 1.0, "second": 0.25}, id="patterns"),
    pytest.param(_spec(alpha_pattern={"second": 128}), {"first": 1.0, "second": 2.0}, id="alpha of one"),
]


@pytest.mark.parametrize(("spec", "scales"), SCALES)
@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_every_module_has_its_own_scale(merge, spec, scales, order):
    """Case 2: two linears of ranks 16 and 64, in both orders of their keys."""
    ranks = {name: {"first": 16, "second": 64}[name] for name in order}
    base, adapter = _base(order), _adapter(ranks)
    merged = merge(base, adapter, spec)
    for name in order:
        delta = adapter[f"{name}.lora_B.x.weight"].double() @ adapter[f"{name}.lora_A.x.weight"].double()
        expected = base[f"{name}.weight"].double() + scales[name] * delta
        assert torch.allclose(merged[f"{name}.weight"].double(), expected, rtol=1e-5, atol=1e-4)


PATTERNS = ["to_q", "attn.to_q", "blocks.1.attn.to_q", r"blocks\.\d+\.attn\.to_q", "o_q", "blocks.1", "to_q|to_k"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("module", ["blocks.1.attn.to_q", "blocks.11.attn.to_q", "to_q", "blocks.1.attn.to_k"])
def test_patterns_match_as_in_peft(pattern, module):
    from peft.utils.other import get_pattern_key

    in_peft = {pattern: 7}.get(get_pattern_key([pattern], module), 3)
    assert _spec(rank=3, rank_pattern={pattern: 7}).declared_rank(module) == in_peft


@pytest.mark.parametrize("stored", ["b.0.attn.orig.to_q", "b.0.attn.to_q"])
@pytest.mark.parametrize("pattern", ["b.0.attn.orig.to_q", "b.0.attn.to_q"])
def test_both_spellings_of_the_attention(merge, stored, pattern):
    base, adapter = _base(["b.0.attn.to_q"]), _adapter({stored: 4})
    matches = stored == pattern or ".orig." in stored
    merged = merge(base, adapter, _spec(rank=4, alpha=4, alpha_pattern={pattern: 12}))["b.0.attn.to_q.weight"]
    delta = adapter[f"{stored}.lora_B.x.weight"] @ adapter[f"{stored}.lora_A.x.weight"]
    scale = 3.0 if matches else 1.0
    assert torch.allclose(merged, base["b.0.attn.to_q.weight"] + scale * delta, atol=1e-4)


def test_keys_may_leave_the_adapter_name_out(merge):
    base = _base(["first"])
    adapter = {"first.lora_A.weight": torch.ones(1, WIDTH), "first.lora_B.weight": torch.ones(WIDTH, 1)}
    assert torch.allclose(merge(base, adapter, _spec())["first.weight"], base["first.weight"] + 1)


def _without(key):
    return lambda adapter: adapter.pop(key)


def _with(key, value):
    return lambda adapter: adapter.update({key: value})


def _rename(old, new):
    return lambda adapter: adapter.update({new: adapter.pop(old)})


A, B = "first.lora_A.x.weight", "first.lora_B.x.weight"
MISFITS = [
    pytest.param(_without(B), "without their other half .*first.lora_A", id="A without B"),
    pytest.param(_without(A), "without their other half .*first.lora_B", id="B without A"),
    pytest.param(_with("first.alpha", torch.ones(1)), "no part of an adapter .*first.alpha", id="foreign tensor"),
    pytest.param(_with("first.lora_magnitude_vector.x", torch.ones(1)), "no part of an adapter", id="DoRA"),
    pytest.param(_rename(A, "first.lora_A.y.weight"), "no part of an adapter named 'x'", id="another adapter"),
    pytest.param(_with("third.lora_A.x.weight", torch.ones(2, WIDTH)), "without their other half", id="stray"),
    pytest.param(_with(A, torch.ones(16, 8)), r"another shape \(first: weight \[80, 80\].*A \[16, 8\]", id="inputs"),
    pytest.param(_with(B, torch.ones(8, 16)), "another shape", id="outputs"),
    pytest.param(_with(B, torch.ones(WIDTH, 4)), "another shape", id="ranks of A and B"),
    pytest.param(_with(A, torch.ones(16, WIDTH, 1)), "another shape", id="convolution"),
    pytest.param(_with(A, torch.ones(16, WIDTH, dtype=torch.int8)), "cannot be merged", id="integers"),
    pytest.param(_with("first.lora_A.weight", torch.ones(16, WIDTH)), "adapted twice", id="twice"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS)
def test_tensors_that_do_not_fit_are_named(merge, change, message):
    adapter = _adapter({"first": 16, "second": 64})
    change(adapter)
    with pytest.raises(IncompatibleWeightsError, match=message) as error:
        merge(_base(["first", "second"]), adapter, _spec())
    assert len(str(error.value)) < 600


def test_modules_the_base_lacks_are_counted(merge):
    adapter = _adapter({f"blocks.{index}.to_q": 2 for index in range(50)} | {"first": 2})
    with pytest.raises(IncompatibleWeightsError, match=r"50 modules the base does not have \(.* and 47 more\)"):
        merge(_base(["first"]), adapter, _spec())


def test_declared_ranks_are_checked(merge):
    with pytest.raises(IncompatibleWeightsError, match=r"1 modules of another rank \(second: rank 64, declared 16\)"):
        merge(_base(["first", "second"]), _adapter({"first": 16, "second": 64}), _spec(rank=16))


def test_quantised_bases_are_refused(merge):
    base = {"first.weight": torch.zeros(WIDTH, WIDTH).to(torch.float8_e4m3fn)}
    with pytest.raises(IncompatibleWeightsError, match="F8_E4M3"):
        merge(base, _adapter({"first": 16}), _spec())


def test_a_pattern_that_matches_nothing_is_said(merge, caplog):
    merge(_base(["first"]), _adapter({"first": 4}), _spec(alpha_pattern={"frist": 8.0}))
    assert "'frist' matches none" in caplog.text


@pytest.mark.parametrize("name", ["adapter_spec.json", "adapter_config.json"])
def test_both_names_of_the_specification(tmp_path, name):
    """Case 12: the file was renamed."""
    (tmp_path / name).write_text(json.dumps({"config": {"rank": 4, "alpha": 8.0, "rank_pattern": {"a": 2}}}))
    assert read_adapter_spec(LocalFolder(tmp_path)) == AdapterSpec(4, 8.0, {"a": 2}, {})


def test_a_missing_specification_says_what_was_looked_for_and_found(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "README.md").touch()
    with pytest.raises(SourceError) as error:
        read_adapter_spec(LocalFolder(tmp_path))
    assert "Looked for adapter_spec.json or adapter_config.json" in str(error.value)
    assert "found README.md, adapter_model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"r": 4, "lora_alpha": 8}, "must hold `config`"),
        ({"config": {"rank": 4, "use_rslora": True}}, "unknown adapter setting use_rslora"),
        ({"config": {"rank": 0}}, "positive"),
        ({"config": {"alpha": "8"}}, "positive"),
        ({"config": {"rank_pattern": ["a"]}}, "must be an object"),
        ({"config": {"rank_pattern": {"a[": 4}}}, "no valid pattern"),
        ({"config": {"alpha_pattern": {"a": -1}}}, "positive"),
    ],
)
def test_specifications_that_say_something_else_are_refused(tmp_path, content, message):
    (tmp_path / "adapter_spec.json").write_text(json.dumps(content))
    with pytest.raises(ManifestError, match=message):
        read_adapter_spec(LocalFolder(tmp_path))

"""LoRA adapters on the hybrid transformer: others load, those merged already are refused."""

import hashlib
import json
import os
import re

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from diffusers_h3 import VDNH3Transformer3DModel


TARGETS = ["to_q", "to_v", "to_out.0", "beta_proj"]


@pytest.fixture(scope="module")
def adapter_files(golden_release):
    folder = golden_release / "stage-dmd-step-250/adapters"
    return {name: folder / name / "adapter_model.safetensors" for name in ("default", "turbo")}


@pytest.fixture(scope="module")
def fused_adapters(adapter_files):
    """What the config of a materialised transformer records."""
    return [
        {"name": name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()} for name, file in adapter_files.items()
    ]


@pytest.fixture
def fused_model(make_model, fused_adapters):
    return make_model(fused_adapters=fused_adapters)


@pytest.fixture
def foreign_adapter(make_model):
    """A LoRA as PEFT makes it, with a strong effect."""
    model = make_model()
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False), "mine")
    return get_peft_model_state_dict(model, adapter_name="mine")


def _assert_refused(model, message, *args, **kwargs):
    with pytest.raises(ValueError, match=message):
        model.load_lora_adapter(*args, **kwargs)
    assert not getattr(model, "peft_config", {})
    assert not any("lora" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("name", ["default", "turbo"])
@pytest.mark.parametrize("form", ["file", "folder", "folder_and_name", "renamed", "path"])
def test_a_merged_adapter_is_refused_as_a_file(name, form, fused_model, adapter_files, tmp_path):
    file = adapter_files[name]
    kwargs = {"prefix": None}
    if form == "file":
        source = str(file)
    elif form == "path":
        source = file
    elif form == "renamed":
        source = tmp_path / "other.safetensors"
        source.write_bytes(file.read_bytes())
    else:
        source = str(file.parent)
        kwargs |= {"weight_name": file.name} if form == "folder_and_name" else {}
    _assert_refused(fused_model, f"adapter '{name}' is already merged", source, **kwargs)


def test_a_merged_adapter_is_recognised_by_its_digest_alone(make_model, foreign_adapter, tmp_path):
    """Nothing in its keys says what it is."""
    save_file(foreign_adapter, tmp_path / "mine.safetensors", metadata={"trained": "here"})
    digest = hashlib.sha256((tmp_path / "mine.safetensors").read_bytes()).hexdigest()
    model = make_model(fused_adapters=[{"name": "style", "sha256": digest}])
    _assert_refused(model, "adapter 'style' is already merged", tmp_path / "mine.safetensors", prefix=None)
    model.load_lora_adapter(foreign_adapter, prefix=None)  # the digest of a file with metadata is not its tensors'


@pytest.mark.parametrize("name", ["default", "turbo"])
def test_a_merged_adapter_is_refused_as_tensors(name, fused_model, adapter_files):
    tensors = load_file(adapter_files[name])
    _assert_refused(fused_model, f"adapter '{name}' is already merged", tensors, prefix=None)
    _assert_refused(fused_model, f"adapter '{name}' is already merged", tensors)
    plain = {key.replace(".attn.orig.", ".attn."): tensor for key, tensor in tensors.items()}
    _assert_refused(fused_model, f"adapter '{name}' is already merged", plain, prefix=None)
    prefixed = {f"transformer.{key}": tensor for key, tensor in tensors.items()}
    _assert_refused(fused_model, f"adapter '{name}' is already merged", prefixed)


def test_a_merged_adapter_is_refused_when_saved_again(fused_model, adapter_files, tmp_path):
    """Another digest, the same keys."""
    save_file(load_file(adapter_files["turbo"]), tmp_path / "again.safetensors", metadata={"note": "copy"})
    _assert_refused(fused_model, "adapter 'turbo' is already merged", tmp_path / "again.safetensors", prefix=None)


def test_the_record_survives_saving(fused_model, adapter_files, tmp_path):
    fused_model.save_pretrained(tmp_path)
    assert [entry["name"] for entry in json.loads((tmp_path / "config.json").read_text())["fused_adapters"]] == [
        "default",
        "turbo",
    ]
    loaded = type(fused_model).from_pretrained(tmp_path)
    _assert_refused(loaded, "adapter 'default' is already merged", adapter_files["default"], prefix=None)


def test_an_adapter_in_the_release_spelling_says_how_to_load_it(make_model, adapter_files, make_request, predict):
    """Without it the keys would match no module and the adapter would do nothing, silently."""
    model, request = make_model(), make_request()
    before = predict(model, request)
    tensors = load_file(adapter_files["default"])
    message = r"rename `\.attn\.orig\.` to `\.attn\.`.*`prefix=None`"
    _assert_refused(model, message, tensors, prefix=None)
    _assert_refused(model, message, adapter_files["default"], prefix=None)

    renamed = {
        re.sub(r"\.(lora_[AB])\.[^.]+\.weight$", r".\1.weight", key.replace(".attn.orig.", ".attn.")): tensor.float()
        for key, tensor in tensors.items()
    }
    model.load_lora_adapter(renamed, prefix=None, adapter_name="default")
    with_adapter = predict(model, request)
    assert (with_adapter - before).norm() > 1e-3 * before.norm()

    # alpha = rank, so the effect is that of W + B·A.
    merged = make_model()
    weights = merged.state_dict()
    for key, low in renamed.items():
        if ".lora_A." in key:
            high = renamed[key.replace(".lora_A.", ".lora_B.")]
            weights[key.replace(".lora_A.", ".")] += high @ low
    merged.load_state_dict(weights)
    torch.testing.assert_close(with_adapter, predict(merged, request), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["tensors", "file", "folder"])
def test_another_adapter_loads(form, fused_model, foreign_adapter, make_request, predict, tmp_path):
    request = make_request()
    before = predict(fused_model, request)
    source, kwargs = foreign_adapter, {}
    if form != "tensors":
        prefixed = {f"transformer.{key}": tensor for key, tensor in foreign_adapter.items()}
        save_file(prefixed, tmp_path / "pytorch_lora_weights.safetensors")
        source = tmp_path / "pytorch_lora_weights.safetensors" if form == "file" else str(tmp_path)
    else:
        kwargs["prefix"] = None
    fused_model.load_lora_adapter(source, adapter_name="mine", **kwargs)
    assert list(fused_model.peft_config) == ["mine"]
    loaded = get_peft_model_state_dict(fused_model, adapter_name="mine")
    assert loaded.keys() == foreign_adapter.keys()
    assert all(torch.equal(tensor, foreign_adapter[name]) for name, tensor in loaded.items())
    assert any("linear_attention.beta_proj" in name for name in loaded)
    assert (predict(fused_model, request) - before).norm() > 0.01 * before.norm()
    fused_model.delete_adapters("mine")
    assert torch.equal(predict(fused_model, request), before)


def test_a_saved_adapter_keeps_its_alpha(make_model, make_request, predict, tmp_path):
    """The alpha is in the file's metadata, so scaling is that of training."""
    model, request = make_model(), make_request()
    config = LoraConfig(r=4, lora_alpha=32, target_modules=TARGETS, init_lora_weights=False)
    model.add_adapter(config, "mine")
    expected = predict(model, request)
    model.save_lora_adapter(tmp_path, adapter_name="mine")
    (file,) = (name for name in os.listdir(tmp_path) if name.endswith(".safetensors"))
    other = make_model()
    other.load_lora_adapter(tmp_path / file, prefix=None, adapter_name="mine")
    assert other.peft_config["mine"].lora_alpha == 32
    torch.testing.assert_close(predict(other, request), expected, rtol=1e-5, atol=1e-5)


def _lora(model, names, rank=4, seed=0):
    """A LoRA in the model's own names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in names:
        module = model.get_submodule(name)
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator)
    return tensors


BLOCK = "transformer_blocks.1"
BRANCH = [
    "linear_attention.alpha.down",
    "linear_attention.alpha.up",
    "linear_attention.beta_proj",
    "linear_attention.output_gate.down",
    "linear_attention.output_gate.up",
    "softmax_gate.up",
    "to_out_linear",
]


@pytest.mark.parametrize(
    "name", [f"{BLOCK}.attn.{name}" for name in BRANCH] + [f"{BLOCK}.ff.net.2", "norm_out.linear"]
)
def test_every_linear_of_the_branch_takes_a_lora(name, make_model, make_request, predict):
    model, request = make_model(), make_request()
    before = predict(model, request)
    tensors = _lora(model, [name])
    model.load_lora_adapter(tensors, prefix=None)
    beside = predict(model, request)
    assert (beside - before).norm() > 1e-4 * before.norm()
    merged = make_model()
    weights = merged.state_dict()
    weights[f"{name}.weight"] += tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    merged.load_state_dict(weights)
    torch.testing.assert_close(beside, predict(merged, request), rtol=1e-4, atol=1e-4)


def _without(tensors, end):
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}


# What becomes of a good LoRA, the prefix it is loaded with, and the message.
TO_Q = f"{BLOCK}.attn.to_q"
UNFIT = {
    "unknown module": (
        lambda lora: lora | {"transformer_blocks.9.attn.to_q.lora_A.weight": torch.ones(2, 24)},
        None,
        r"1 modules that it does not have \(transformer_blocks\.9\.attn\.to_q\)",
    ),
    "half a pair": (lambda lora: _without(lora, "lora_B.weight"), None, r"1 modules with one half of a pair"),
    "pruned": (
        lambda lora: {
            f"{BLOCK}.adaln_proj.linear.lora_A.weight": torch.ones(2, 8),
            f"{BLOCK}.adaln_proj.linear.lora_B.weight": torch.ones(5, 2),
        },
        None,
        r"A \[2, 8\], B \[5, 2\].*pruned checkpoint \(AdaLN input 8 instead of 2688\).*adaln_proj\.linear",
    ),
    "ranks of A and B": (
        lambda lora: lora | {f"{TO_Q}.lora_A.weight": torch.ones(3, lora[f"{TO_Q}.lora_A.weight"].shape[1])},
        None,
        r"1 modules of another shape",
    ),
    "alpha as a tensor": (
        lambda lora: lora | {f"{TO_Q}.alpha": torch.tensor(2.0)},
        None,
        r"no part of a LoRA.*to_q\.alpha",
    ),
    "for another model": (
        lambda lora: {f"unet.{name}": tensor for name, tensor in lora.items()},
        "transformer",
        r"holds nothing for VDNH3Transformer3DModel.*'transformer\.'.*unet\.",
    ),
}


@pytest.mark.parametrize(("change", "prefix", "message"), UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("form", ["tensors", "file"])
def test_what_would_be_loaded_in_part_is_refused_in_whole(
    change, prefix, message, form, make_model, make_request, predict, tmp_path
):
    model, request = make_model(), make_request()
    before = predict(model, request)
    source = change(_lora(model, [TO_Q]))
    if form == "file":
        save_file(source, tmp_path / "lora.safetensors")
        source = tmp_path / "lora.safetensors"
    _assert_refused(model, message, source, prefix=prefix)
    assert torch.equal(predict(model, request), before)


def test_fused_projections_and_loras_do_not_lose_each_other(make_model, make_request, predict):
    """Case of both orders: fused projections run instead of `to_q`, and are made of the weights alone."""
    model, request = make_model(), make_request()
    tensors = _lora(model, [f"{BLOCK}.attn.to_q", f"{BLOCK}.attn.to_out.0"])
    model.fuse_qkv_projections()
    _assert_refused(model, r"projections that are fused.*`unfuse_qkv_projections`.*to_q", tensors, prefix=None)
    model.unfuse_qkv_projections()
    model.load_lora_adapter(tensors, prefix=None)
    expected = predict(model, request)
    with pytest.raises(ValueError, match=rf"{BLOCK}\.attn\.to_q: fuse it first"):
        model.fuse_qkv_projections()
    assert torch.equal(predict(model, request), expected)
    model.fuse_lora()
    model.fuse_qkv_projections()
    torch.testing.assert_close(predict(model, request), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_under_group_offload_loras_load_and_are_not_fused(offload_type, make_model, make_request, predict):
    """New layers are moved like the others: every one has the hook, or is in a group that has it."""
    model, request = make_model(), make_request()
    tensors = _lora(model, [f"{BLOCK}.attn.to_q", f"{BLOCK}.attn.to_out_linear"])
    expected = make_model()
    expected.load_lora_adapter(tensors, prefix=None)
    model.enable_group_offload(torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=1)
    before = predict(model, request)
    model.load_lora_adapter(tensors, prefix=None, adapter_name="mine")
    hooks = {
        name: module._diffusers_hook.get_hook("group_offloading")
        for name, module in model.named_modules()
        if hasattr(module, "_diffusers_hook")
    }
    moved = set()
    for hook in hooks.values():
        if hook is not None:
            moved.update(map(id, hook.group.parameters))
            moved.update(id(parameter) for module in hook.group.modules for parameter in module.parameters())
    assert {name for name, parameter in model.named_parameters() if id(parameter) not in moved} == set()
    torch.testing.assert_close(predict(model, request), predict(expected, request))
    for action in (model.fuse_lora, model.unfuse_lora):
        with pytest.raises(ValueError, match=r"while the transformer is offloaded.*overlay, LoRA.*fp8, offload"):
            action()
    model.delete_adapters("mine")
    assert torch.equal(predict(model, request), before)


def test_weights_that_are_elsewhere_are_not_fused_into(make_model):
    """A sequential offload leaves parameters without data; adding to them would do nothing, silently."""
    model = make_model()
    model.load_lora_adapter(_lora(model, [TO_Q]), prefix=None)
    model.to("meta")
    with pytest.raises(ValueError, match="while the transformer is offloaded"):
        model.fuse_lora()


@pytest.fixture
def fp8_model(make_model, monkeypatch, tmp_path):
    """A model with fp8 linears; torchao asks for a card, which the conversion does not need."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    from diffusers import TorchAoConfig
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, FqnToConfig, PerRow

    from diffusers_h3.models.quantization import FP8_LINEARS

    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    rowwise = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
    make_model().save_pretrained(tmp_path / "plain")
    return VDNH3Transformer3DModel.from_pretrained(
        tmp_path / "plain",
        quantization_config=TorchAoConfig(FqnToConfig({FP8_LINEARS: rowwise})),
        dtype=torch.bfloat16,
    )


def test_a_lora_runs_beside_fp8_weights_and_is_not_fused_into_them(fp8_model):
    """PEFT would fuse some layers and fail at the first quantised one."""
    layers = ["attn.linear_attention.beta_proj", "attn.to_q"]
    tensors = _lora(fp8_model, [f"{BLOCK}.{name}" for name in layers])
    low, high = (tensors[f"{BLOCK}.attn.to_q.lora_{side}.weight"].bfloat16() for side in "AB")
    fp8_model.load_lora_adapter({name: t.bfloat16() for name, t in tensors.items()}, prefix=None)
    layer = fp8_model.get_submodule(f"{BLOCK}.attn.to_q")
    assert type(layer.get_base_layer().weight.data).__name__ == "Float8Tensor"
    assert torch.equal(layer.get_delta_weight(layer.active_adapters[0]), high @ low)

    gate = fp8_model.get_submodule(f"{BLOCK}.attn.linear_attention.beta_proj").get_base_layer().weight
    before = gate.clone()
    with pytest.raises(ValueError, match=r"quantised weights \(Float8Tensor\).*overlay, LoRA.*fp8, offload"):
        fp8_model.fuse_lora()
    assert torch.equal(gate, before)


def test_the_order_that_fp8_needs_works(make_model, tmp_path):
    """LoRA fused and unloaded, saved, loaded again: the plain weights of the sum, ready for `quantization_config`."""
    model = make_model()
    names = [f"{BLOCK}.attn.to_q", f"{BLOCK}.attn.linear_attention.beta_proj"]
    tensors = _lora(model, names)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in names:
        expected[f"{name}.weight"] += tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    model.load_lora_adapter(tensors, prefix=None)
    model.fuse_lora()
    model.unload_lora()
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).state_dict()
    assert saved.keys() == expected.keys()
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, expected[name])


def _record(model):
    return [entry["name"] for entry in model.config.fused_adapters or []]


def _sources(tensors, folder):
    """One LoRA in every form it may come in, with the arguments it loads with."""
    save_file(tensors, folder / "plain.safetensors")
    save_file(tensors, folder / "noted.safetensors", metadata={"note": "saved by another program"})
    prefixed = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, folder / "prefixed.safetensors")
    return {
        "tensors": (tensors, {"prefix": None}),
        "reversed": (dict(reversed(tensors.items())), {"prefix": None}),
        "plain": (folder / "plain.safetensors", {"prefix": None}),
        "noted": (folder / "noted.safetensors", {"prefix": None}),
        "prefixed": (folder / "prefixed.safetensors", {}),
        "prefixed tensors": (prefixed, {}),
    }


LAYERS = [TO_Q, f"{BLOCK}.attn.linear_attention.beta_proj"]


def test_a_fused_lora_is_recorded_until_it_is_unfused(make_model, fused_adapters, tmp_path):
    """Beside the overlay's own, which stay; the digest is that of the file which holds the tensors alone."""
    model = make_model(fused_adapters=fused_adapters)
    tensors, other = _lora(model, LAYERS), _lora(model, LAYERS, seed=1)
    save_file(tensors, tmp_path / "style.safetensors")
    model.load_lora_adapter(tmp_path / "style.safetensors", prefix=None, adapter_name="style")
    model.load_lora_adapter(other, prefix=None, adapter_name="motion")
    assert model.config.fused_adapters == fused_adapters, "loaded is not fused"
    model.fuse_lora(adapter_names=["style"])
    digest = hashlib.sha256((tmp_path / "style.safetensors").read_bytes()).hexdigest()
    assert model.config.fused_adapters == [*fused_adapters, {"name": "style", "sha256": digest}]
    model.fuse_lora(adapter_names=["motion"])
    assert _record(model) == ["default", "turbo", "motion", "style"]
    model.unfuse_lora()
    assert model.config.fused_adapters == fused_adapters
    model.fuse_lora(adapter_names=["style"])
    assert _record(model) == ["default", "turbo", "style"]


@pytest.mark.parametrize("again", ["tensors", "reversed", "plain", "noted", "prefixed", "prefixed tensors"])
@pytest.mark.parametrize("first", ["tensors", "noted", "prefixed"])
def test_a_fused_lora_is_refused_in_every_form_after_saving(first, again, make_model, tmp_path):
    """Case 14 for a user's LoRA, in the model itself and in the one read from disk."""
    model = make_model()
    sources = _sources(_lora(model, LAYERS), tmp_path)
    source, options = sources[first]
    model.load_lora_adapter(source, adapter_name="style", **options)
    model.fuse_lora()
    model.unload_lora()
    assert _record(model) == ["style"]
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    source, options = sources[again]
    for one in (model, loaded):
        weights = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        _assert_refused(one, "adapter 'style' is already merged", source, adapter_name="another", **options)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in one.state_dict().items())
    loaded.load_lora_adapter(_lora(model, LAYERS, seed=1), prefix=None)  # another one loads


def test_a_lora_loaded_twice_is_fused_once(make_model):
    """Before anything is fused the second one loads, as in Diffusers; fusing both is what is refused."""
    model = make_model()
    tensors = _lora(model, LAYERS)
    for name in ("one", "two"):
        model.load_lora_adapter(tensors, prefix=None, adapter_name=name)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_adapters(["one", "two"])
    with pytest.raises(ValueError, match=r"'two' is the same as 'one'.*applied twice.*`adapter_names`"):
        model.fuse_lora()
    assert model.config.fused_adapters is None
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    model.fuse_lora(adapter_names=["one"])
    with pytest.raises(ValueError, match=r"'two' is the same as 'one'"):
        model.fuse_lora(adapter_names=["two"])
    with pytest.raises(ValueError, match=r"'one' is fused already.*`unfuse_lora`"):
        model.fuse_lora(lora_scale=0.5, adapter_names=["one"])
    assert _record(model) == ["one"]
    expected = weights[f"{TO_Q}.base_layer.weight"] + (
        tensors[f"{TO_Q}.lora_B.weight"] @ tensors[f"{TO_Q}.lora_A.weight"]
    )
    torch.testing.assert_close(model.get_submodule(TO_Q).get_base_layer().weight, expected)


def test_a_fused_lora_whose_layers_are_gone_stays_recorded(make_model):
    """Nothing can subtract it any more."""
    model = make_model()
    tensors, other = _lora(model, LAYERS), _lora(model, LAYERS, seed=1)
    model.load_lora_adapter(tensors, prefix=None, adapter_name="first")
    model.fuse_lora()
    model.unload_lora()
    model.load_lora_adapter(other, prefix=None, adapter_name="first")  # the name is free again
    model.fuse_lora()
    assert _record(model) == ["first", "first"]
    model.unfuse_lora()
    assert _record(model) == ["first"]
    model.unload_lora()
    model.unfuse_lora()
    _assert_refused(model, "adapter 'first' is already merged", tensors, prefix=None)


def test_a_deleted_lora_stays_recorded_if_it_was_fused(make_model):
    model = make_model()
    tensors = _lora(model, LAYERS)
    model.load_lora_adapter(tensors, prefix=None, adapter_name="mine")
    model.fuse_lora()
    weight = model.get_submodule(TO_Q).get_base_layer().weight
    fused = weight.detach().clone()
    model.delete_adapters("mine")
    model.unfuse_lora()
    assert torch.equal(weight, fused), "nothing was left to subtract"
    assert _record(model) == ["mine"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_digest_is_of_what_was_loaded(dtype, make_model):
    """Not of what PEFT made of it for weights of another dtype."""
    model = make_model(dtype=torch.bfloat16)
    tensors = {name: tensor.to(dtype) for name, tensor in _lora(model, LAYERS).items()}
    model.load_lora_adapter(tensors, prefix=None, adapter_name="mine")
    model.fuse_lora()
    model.unload_lora()
    _assert_refused(model, "adapter 'mine' is already merged", tensors, prefix=None)


def test_a_lora_trained_here_is_recorded_as_it_is_when_fused(make_model):
    """Under a name that an adapter from a file had before."""
    model = make_model()
    model.load_lora_adapter(_lora(model, LAYERS), prefix=None, adapter_name="mine")
    model.delete_adapters("mine")
    model.add_adapter(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False), "mine")
    tensors = {name: t.clone() for name, t in get_peft_model_state_dict(model, adapter_name="mine").items()}
    model.fuse_lora()
    model.unload_lora()
    assert _record(model) == ["mine"]
    _assert_refused(model, "adapter 'mine' is already merged", tensors, prefix=None)
    model.load_lora_adapter(_lora(model, LAYERS), prefix=None)


def test_half_fused_is_recorded(make_model):
    """`safe_fusing` stops at the first value that is not finite, with the layers before it fused."""
    model = make_model()
    tensors = _lora(model, LAYERS)
    tensors[f"{LAYERS[1]}.lora_B.weight"][0, 0] = torch.nan
    model.load_lora_adapter(tensors, prefix=None, adapter_name="broken")
    with pytest.raises(ValueError, match=r"NaN"):
        model.fuse_lora(safe_fusing=True)
    merged = [name for name in LAYERS if model.get_submodule(name).merged]
    assert len(merged) == 1
    assert _record(model) == ["broken"]
    model.unfuse_lora()
    assert model.config.fused_adapters is None


def test_a_fused_lora_is_not_exchanged(make_model):
    """Diffusers' hotswap would put other tensors under the fused ones' name, and `unfuse_lora` subtract those."""
    model = make_model()
    model.load_lora_adapter(_lora(model, [TO_Q]), prefix=None, adapter_name="mine")
    model.fuse_lora()
    tensors = {
        f"{TO_Q}.lora_{side}.weight": torch.ones_like(
            getattr(model.get_submodule(TO_Q), f"lora_{side}")["mine"].weight
        )
        for side in "AB"
    }
    with pytest.raises(ValueError, match=r"'mine' is fused and cannot be exchanged"):
        model.load_lora_adapter(tensors, prefix=None, adapter_name="mine", hotswap=True)
    model.unfuse_lora()
    model.load_lora_adapter(tensors, prefix=None, adapter_name="mine", hotswap=True)
    model.fuse_lora()
    model.unload_lora()
    _assert_refused(model, "adapter 'mine' is already merged", tensors, prefix=None)


def test_a_missing_file_is_named(make_model, tmp_path):
    with pytest.raises(OSError, match=r"nothing\.safetensors"):
        make_model().load_lora_adapter(tmp_path, weight_name="nothing.safetensors")


def test_the_stock_class_is_unchanged():
    assert "load_lora_adapter" not in vars(MiniMaxH3Transformer3DModel)

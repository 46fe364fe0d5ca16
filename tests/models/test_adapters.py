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
    save_file(foreign_adapter, tmp_path / "mine.safetensors")
    digest = hashlib.sha256((tmp_path / "mine.safetensors").read_bytes()).hexdigest()
    model = make_model(fused_adapters=[{"name": "style", "sha256": digest}])
    _assert_refused(model, "adapter 'style' is already merged", tmp_path / "mine.safetensors", prefix=None)
    model.load_lora_adapter(foreign_adapter, prefix=None)  # as tensors it cannot be told from another


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


def test_a_missing_file_is_named(make_model, tmp_path):
    with pytest.raises(OSError, match=r"nothing\.safetensors"):
        make_model().load_lora_adapter(tmp_path, weight_name="nothing.safetensors")


def test_the_stock_class_is_unchanged():
    assert "load_lora_adapter" not in vars(MiniMaxH3Transformer3DModel)

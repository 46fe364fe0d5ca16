"""fp8 linear layers: which are touched, which never, and that a quantised model saves, loads and computes."""

import re
import sys

import pytest
import torch

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel
from diffusers_h3.models.quantization import FP8_LINEARS, fp8_quantization_config


WIDE = 4096
PATTERN = FP8_LINEARS.removeprefix("re:")
BLOCK_LINEARS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_out_linear"]
BLOCK_LINEARS += ["ff.net.0.proj", "ff.net.2"]


@pytest.fixture
def any_hardware(monkeypatch):
    """Let torchao quantise here: it asks for a card that multiplies fp8, which the conversion does not do."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)


@pytest.fixture
def load_fp8(make_model, any_hardware, tmp_path):
    """A function saving a tiny model and loading it quantised: the model, and the folder it came from."""

    def load():
        make_model().save_pretrained(tmp_path / "original")
        model = VDNH3Transformer3DModel.from_pretrained(
            tmp_path / "original", quantization_config=fp8_quantization_config(), dtype=torch.bfloat16
        )
        return model.eval(), tmp_path

    return load


def _quantized(model):
    from torchao.quantization import Float8Tensor

    return [name for name, parameter in model.named_parameters() if isinstance(parameter.data, Float8Tensor)]


def _assert_same_weights(model, other):
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        if name.removesuffix(".weight").endswith(tuple(BLOCK_LINEARS)) and "refiner" not in name:
            assert torch.equal(one.qdata.view(torch.uint8), two.qdata.view(torch.uint8)), name
            assert torch.equal(one.scale, two.scale), name
        else:
            assert torch.equal(one, two), name


def test_at_full_size_the_wide_linears_of_the_blocks_are_named():
    """The list from the names is the list from the shapes, and the names match nothing outside the blocks."""
    with torch.device("meta"):
        model = VDNH3Transformer3DModel(num_layers=2)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    blocks = "transformer_blocks."
    wide = [name for name, module in linears.items() if min(module.in_features, module.out_features) >= WIDE]
    named = [name for name in linears if re.fullmatch(PATTERN, name)]
    assert named == [name for name in wide if name.startswith(blocks)]
    assert sorted(named) == sorted(f"{blocks}{index}.{name}" for index in range(2) for name in BLOCK_LINEARS)
    everything = [*dict(model.named_parameters()), *dict(model.named_modules())]
    assert sorted(name for name in everything if re.fullmatch(PATTERN, name)) == sorted(named)


def test_fused_projections_are_named_too():
    with torch.device("meta"):
        model = VDNH3Transformer3DModel(num_layers=1)
        model.fuse_qkv_projections()
    fused = model.transformer_blocks[0].attn.to_qkv
    assert min(fused.in_features, fused.out_features) >= WIDE
    assert re.fullmatch(PATTERN, "transformer_blocks.0.attn.to_qkv")


@pytest.mark.parametrize(
    "name",
    [
        "transformer_blocks.0.attn.softmax_gate.up",
        "transformer_blocks.0.attn.linear_attention.beta_proj",
        "transformer_blocks.0.attn.linear_attention.alpha.down",
        "transformer_blocks.0.attn.linear_attention.alpha.up",
        "transformer_blocks.0.attn.linear_attention.output_gate.down",
        "transformer_blocks.0.attn.linear_attention.output_gate.up",
        "transformer_blocks.0.adaln_proj.linear",
        "token_refiner.refiner_blocks.0.attn.to_q",
        "token_refiner.refiner_blocks.0.ff.net.2",
    ],
)
def test_gates_decay_adaln_and_refiner_are_not_named(name):
    """Each of them exists under that name."""
    with torch.device("meta"):
        model = VDNH3Transformer3DModel(num_layers=1)
    assert isinstance(model.get_submodule(name), torch.nn.Linear)
    assert not re.fullmatch(PATTERN, name)


def test_loading_quantises_these_layers_and_no_other(load_fp8):
    model, _ = load_fp8()
    expected = [f"transformer_blocks.{index}.{name}.weight" for index in range(3) for name in BLOCK_LINEARS]
    assert sorted(_quantized(model)) == sorted(expected)
    for name, parameter in model.named_parameters():
        kept = any(part in VDNH3Transformer3DModel._keep_in_fp32_modules for part in name.split("."))
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    weight = model.transformer_blocks[0].attn.to_q.weight
    assert weight.qdata.dtype == torch.float8_e4m3fn
    assert weight.scale.shape == (weight.shape[0], 1)  # one scale per output row


def test_weights_are_within_an_fp8_rounding(load_fp8, make_model):
    model, _ = load_fp8()
    original = make_model().state_dict()
    for name in _quantized(model):
        exact = original[name].bfloat16().double()
        # Three bits of mantissa: half a step is 2⁻⁴ of a normal number.
        largest = exact.abs().amax(dim=1, keepdim=True)
        error = (model.get_parameter(name).dequantize().double() - exact).abs()
        assert (error <= 2**-4 * exact.abs() + 2**-9 * largest).all(), name
        assert error.sum() > 0, name


def test_a_quantised_model_saves_and_loads(load_fp8):
    model, folder = load_fp8()
    model.save_pretrained(folder / "quantised")
    again = VDNH3Transformer3DModel.from_pretrained(folder / "quantised", dtype=torch.bfloat16)
    assert _quantized(again) == _quantized(model)
    assert again.config.hybrid_attention == HybridAttentionConfig(linear_head_dim=16, chunk=2).to_dict()
    _assert_same_weights(model, again)


def _multiplies_rows_on_the_cpu():
    rows = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(rows, rows.T, torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not _multiplies_rows_on_the_cpu(), reason="this PyTorch has no row-wise fp8 product on the CPU")
def test_a_quantised_model_predicts_what_its_weights_say(load_fp8, make_request, predict):
    """Against the same weights in bfloat16, where only the activations' rounding differs."""
    model, _ = load_fp8()
    request = make_request()
    for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
        request[name] = request[name].bfloat16()
    quantised = predict(model, request)
    for name in _quantized(model):
        module, _, key = name.rpartition(".")
        plain = torch.nn.Parameter(model.get_parameter(name).dequantize(), requires_grad=False)
        setattr(model.get_submodule(module), key, plain)
    assert _quantized(model) == []
    plain = predict(model, request)
    error = (quantised - plain).norm() / plain.norm()
    assert 1e-3 < error < 0.1


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusers-h3\[fp8\]'"):
        fp8_quantization_config()

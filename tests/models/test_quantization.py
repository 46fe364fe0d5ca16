"""fp8 linear layers: which are touched, which never, on which card how, and that a quantised model saves and loads."""

import gc
import logging
import re
import sys

import diffusers.quantizers.torchao.torchao_quantizer as diffusers_torchao
import pytest
import torch
from diffusers.hooks import apply_group_offloading

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel
from diffusers_h3.models import quantization
from diffusers_h3.models.quantization import FP8_LINEARS, fp8_quantization_config


WIDE = 4096
PATTERN = FP8_LINEARS.removeprefix("re:")
BLOCK_LINEARS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_out_linear"]
BLOCK_LINEARS += ["ff.net.0.proj", "ff.net.2"]
RECIPES = ["rowwise", "mxfp8"]


@pytest.fixture
def on_card(monkeypatch):
    """A function pretending that the current CUDA device has a compute capability, None for no device."""

    def pretend(capability):
        monkeypatch.setattr(quantization, "cuda_capability", lambda: capability)

    return pretend


@pytest.fixture
def any_hardware(monkeypatch, on_card):
    """Let torchao quantise here: it asks for a card that multiplies fp8, which the conversion does not do."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)
    on_card((10, 0))


def _layer_config(config):
    (pattern, layer_config), *others = config.quant_type.fqn_to_config.items()
    assert (pattern, others) == (FP8_LINEARS, [])
    return layer_config


def _config_for_the_cpu(recipe):
    """The recipe with a matrix product that a CPU has: MXFP8's blocks are multiplied as bfloat16, exactly."""
    from torchao.quantization.quantize_.common import KernelPreference

    config = fp8_quantization_config(recipe)
    if recipe == "mxfp8":
        _layer_config(config).kernel_preference = KernelPreference.EMULATED
    return config


@pytest.fixture
def save_original(tiny_arguments, randomize, tmp_path):
    """A function saving a tiny model, its matrices 32 or 64 wide so that MXFP8's blocks fit; its folder."""

    def save(**options):
        config = HybridAttentionConfig(linear_head_dim=16, chunk=2).to_dict()
        model = VDNH3Transformer3DModel(**{**tiny_arguments, "ffn_dim": 64}, hybrid_attention=config)
        randomize(model, 0).save_pretrained(tmp_path / "original", **options)
        return tmp_path / "original"

    return save


@pytest.fixture
def load_fp8(save_original, any_hardware):
    """A function saving a tiny model and loading it quantised: the model, and the folder it came from."""

    def load(recipe="rowwise"):
        folder = save_original()
        model = VDNH3Transformer3DModel.from_pretrained(
            folder, quantization_config=_config_for_the_cpu(recipe), dtype=torch.bfloat16
        )
        return model.eval(), folder.parent

    return load


@pytest.fixture
def request_bf16(make_request):
    """A request whose latents and text are bfloat16."""
    request = make_request()
    for name in ("hidden_states", "audio_hidden_states", "encoder_hidden_states"):
        request[name] = request[name].bfloat16()
    return request


def _quantized(model):
    from torchao.utils import TorchAOBaseTensor

    return [name for name, parameter in model.named_parameters() if isinstance(parameter.data, TorchAOBaseTensor)]


def _assert_same_weights(model, other):
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        if name.removesuffix(".weight").endswith(tuple(BLOCK_LINEARS)) and "refiner" not in name:
            assert torch.equal(one.qdata.view(torch.uint8), two.qdata.view(torch.uint8)), name
            assert torch.equal(one.scale.view(torch.uint8), two.scale.view(torch.uint8)), name
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


def test_weights_are_within_an_fp8_rounding(load_fp8):
    model, folder = load_fp8()
    original = VDNH3Transformer3DModel.from_pretrained(folder / "original").state_dict()
    for name in _quantized(model):
        exact = original[name].bfloat16().double()
        # Three bits of mantissa: half a step is 2⁻⁴ of a normal number.
        largest = exact.abs().amax(dim=1, keepdim=True)
        error = (model.get_parameter(name).dequantize().double() - exact).abs()
        assert (error <= 2**-4 * exact.abs() + 2**-9 * largest).all(), name
        assert error.sum() > 0, name


def _multiplies_rows_on_the_cpu():
    rows = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(rows, rows.T, torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_rowwise_products = pytest.mark.skipif(
    not _multiplies_rows_on_the_cpu(), reason="this PyTorch has no row-wise fp8 product on the CPU"
)
each_recipe = pytest.mark.parametrize("recipe", [pytest.param("rowwise", marks=needs_rowwise_products), "mxfp8"])


@each_recipe
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_a_quantised_model_saves_and_loads(recipe, safe, load_fp8, request_bf16, predict):
    model, folder = load_fp8(recipe)
    model.save_pretrained(folder / "quantised", safe_serialization=safe)
    again = VDNH3Transformer3DModel.from_pretrained(folder / "quantised", dtype=torch.bfloat16, use_safetensors=safe)
    assert _quantized(again) == _quantized(model)
    assert len(_quantized(again)) == 3 * len(BLOCK_LINEARS)
    assert again.config.hybrid_attention == HybridAttentionConfig(linear_head_dim=16, chunk=2).to_dict()
    _assert_same_weights(model, again)
    prediction = predict(model, request_bf16)
    assert prediction.abs().sum() > 0
    assert torch.equal(predict(again.eval(), request_bf16), prediction)


def test_a_quantised_model_saves_and_loads_in_shards(load_fp8, request_bf16, predict):
    """A weight and its scales may end up in different files."""
    model, folder = load_fp8("mxfp8")
    model.save_pretrained(folder / "quantised", max_shard_size="3KB")
    assert len([*(folder / "quantised").glob("*.safetensors")]) > 5
    again = VDNH3Transformer3DModel.from_pretrained(folder / "quantised", dtype=torch.bfloat16)
    _assert_same_weights(model, again)
    assert torch.equal(predict(again.eval(), request_bf16), predict(model, request_bf16))


@each_recipe
def test_a_quantised_model_predicts_what_its_weights_say(recipe, load_fp8, request_bf16, predict):
    """Against the same weights in bfloat16, where only the activations' rounding differs."""
    model, _ = load_fp8(recipe)
    quantised = predict(model, request_bf16)
    for name in _quantized(model):
        module, _, key = name.rpartition(".")
        plain = torch.nn.Parameter(model.get_parameter(name).dequantize(), requires_grad=False)
        setattr(model.get_submodule(module), key, plain)
    assert _quantized(model) == []
    plain = predict(model, request_bf16)
    error = (quantised - plain).norm() / plain.norm()
    assert 1e-3 < error < 0.1


@each_recipe
@pytest.mark.parametrize(
    "arguments", [{"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 2}]
)
def test_group_offload_of_a_quantised_model_changes_nothing(recipe, arguments, load_fp8, request_bf16, predict):
    model, _ = load_fp8(recipe)
    expected = predict(model, request_bf16)
    device = torch.device("cpu")
    apply_group_offloading(model, onload_device=device, offload_device=device, **arguments)
    for _ in range(2):  # the second call meets what the first one offloaded
        assert torch.equal(predict(model, request_bf16), expected)
    assert len(_quantized(model)) == 3 * len(BLOCK_LINEARS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_leaf_level_offload_moves_data_and_scales(recipe, load_fp8, monkeypatch):
    """The meta device stands for a card: what is sent there is lost, but says where it went."""
    # PyTorch has streams for every device but that one; offload without `use_stream` asks for none.
    monkeypatch.setattr("diffusers.hooks.group_offloading.TorchDeviceBackend", lambda device: None)
    model, _ = load_fp8(recipe)
    layer = model.transformer_blocks[1].ff.net[2]
    apply_group_offloading(model, torch.device("meta"), torch.device("cpu"), "leaf_level")
    assert {layer.weight.qdata.device.type, layer.weight.scale.device.type} == {"cpu"}
    layer._diffusers_hook.get_hook("group_offloading").group.onload_()
    assert {layer.weight.qdata.device.type, layer.weight.scale.device.type} == {"meta"}


def test_group_offload_of_a_quantised_model_to_disk_is_refused(load_fp8, tmp_path):
    """By Diffusers, before anything is written."""
    model, _ = load_fp8()
    device = torch.device("cpu")
    with pytest.raises(ValueError, match="Disk offloading is not supported for TorchAO"):
        apply_group_offloading(
            model, device, device, "block_level", num_blocks_per_group=1, offload_to_disk_path=str(tmp_path / "disk")
        )
    assert not (tmp_path / "disk").exists()


@pytest.fixture
def live_bytes():
    """A function counting the bytes of all tensors made since, each storage once; it sees into quantised ones."""
    gc.collect()
    gc.freeze()  # objects of now are not listed below

    def count():
        storages = {}
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
                parts = [getattr(candidate, name) for name in ("qdata", "scale") if hasattr(candidate, name)]
                for tensor in parts or [candidate]:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return sum(storages.values())

    yield count
    gc.unfreeze()


@pytest.mark.parametrize("recipe", RECIPES)
def test_loading_peaks_under_the_bf16_size(recipe, live_bytes, any_hardware, tiny_arguments, tmp_path, monkeypatch):
    """Layers are quantised as their weights come: no more of the model is unquantised than one shard."""
    sizes = {"hidden_size": 128, "ffn_dim": 512, "num_layers": 4}
    config = HybridAttentionConfig(linear_head_dim=16, chunk=2).to_dict()
    model = VDNH3Transformer3DModel(**tiny_arguments | sizes, hybrid_attention=config).bfloat16()
    bf16_bytes = sum(tensor.numel() * 2 for tensor in model.state_dict().values())
    assert live_bytes() >= bf16_bytes  # the count would catch a whole model
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    del model
    gc.collect()
    assert live_bytes() < 0.1 * bf16_bytes
    live = []

    def quantize(module, layer_config, quantize_=diffusers_torchao.quantize_):
        live.append(live_bytes())
        quantize_(module, layer_config)

    monkeypatch.setattr(diffusers_torchao, "quantize_", quantize)
    model = VDNH3Transformer3DModel.from_pretrained(
        tmp_path, quantization_config=_config_for_the_cpu(recipe), dtype=torch.bfloat16
    )
    assert len(live) == len(_quantized(model)) == 4 * len(BLOCK_LINEARS)
    quantised_bytes = live_bytes()
    assert quantised_bytes < max(live) < min(quantised_bytes + 500_000, 0.85 * bf16_bytes)


def _blocks_of(matrix):
    return matrix.unflatten(-1, (-1, 32))


def _mx_layer(weight):
    from torchao.quantization import quantize_

    layer = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    quantize_(layer, _layer_config(_config_for_the_cpu("mxfp8")))
    return layer


def _mx_bound(matrix):
    """How far MXFP8 may move each element: half a step of e4m3, under a scale that fits the block's largest."""
    blocks = _blocks_of(matrix.double())
    scale = 2 ** torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448))
    return (2**-4 * blocks.abs()).maximum(2**-10 * scale).flatten(-2)


def _mx_round(matrix):
    """MXFP8 as the specification has it, in float64: the nearest multiple of the step, ties to even."""
    blocks = _blocks_of(matrix.double())
    scale = 2 ** torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True) / 448))
    scaled = blocks / scale
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2**-6)))
    step = 2 ** (exponent - 3)
    return (torch.round(scaled / step) * step * scale).flatten(-2)


@pytest.fixture
def matrices():
    """Activations and a weight whose channels differ in size by up to 2²⁰."""
    spread = 2 ** torch.linspace(-10, 10, 256)[torch.randperm(256)]
    return (torch.randn(33, 256) * spread).bfloat16(), (torch.randn(48, 256) * spread.flip(0)).bfloat16()


def test_mxfp8_rounds_as_the_specification_says(matrices, any_hardware):
    _, weight = matrices
    rounded = _mx_layer(weight).weight.dequantize().double()
    assert torch.equal(rounded, _mx_round(weight))
    error = (rounded - weight.double()).abs()
    assert (error <= _mx_bound(weight)).all()
    assert error.sum() > 0


def test_mxfp8_products_are_within_the_bound_of_their_blocks(matrices, any_hardware):
    """Emulated, against a float64 product of the same rounded matrices, and of the exact ones."""
    inputs, weight = matrices
    output = _mx_layer(weight)(inputs).double()
    rounded = _mx_round(inputs) @ _mx_round(weight).T
    size = _mx_round(inputs).abs() @ _mx_round(weight).abs().T
    accumulation = 2**-8 * rounded.abs() + 256 * 2**-24 * size
    assert ((output - rounded).abs() <= accumulation).all()
    exact = inputs.double() @ weight.double().T
    bound = _mx_bound(inputs) @ weight.double().abs().T + _mx_round(inputs).abs() @ _mx_bound(weight).T
    assert ((output - exact).abs() <= bound + accumulation).all()
    assert 1e-3 < (output - exact).norm() / exact.norm() < 0.05


def test_mxfp8_keeps_an_outlier_in_its_block(any_hardware):
    """A scale per row loses what is 2¹⁷ times smaller than the row's largest; a scale per block does not."""
    from torchao.quantization import Float8Tensor, PerRow

    weight = torch.ones(1, 64, dtype=torch.bfloat16)
    weight[0, 0] = 2**20
    assert _mx_layer(weight).weight.dequantize()[0, 32:].tolist() == [1.0] * 32
    assert Float8Tensor.from_hp(weight, granularity=PerRow()).dequantize()[0, 32:].tolist() == [0.0] * 32


@pytest.mark.parametrize(
    ("capability", "recipe", "expected"),
    [
        ((8, 9), "auto", "rowwise"),
        ((9, 0), "auto", "rowwise"),
        ((10, 0), "auto", "mxfp8"),
        ((10, 3), "auto", "mxfp8"),
        ((11, 0), "auto", "rowwise"),
        ((12, 0), "auto", "rowwise"),
        ((8, 9), "rowwise", "rowwise"),
        ((10, 0), "rowwise", "rowwise"),
        ((10, 0), "mxfp8", "mxfp8"),
        ((12, 0), "mxfp8", "mxfp8"),
    ],
)
def test_the_recipe_follows_the_card(capability, recipe, expected, on_card):
    from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    on_card(capability)
    layer_config = _layer_config(fp8_quantization_config(recipe))
    assert layer_config.activation_dtype == layer_config.weight_dtype == torch.float8_e4m3fn
    if expected == "mxfp8":
        assert isinstance(layer_config, MXDynamicActivationMXWeightConfig)
        assert layer_config.block_size == 32
    else:
        assert isinstance(layer_config, Float8DynamicActivationFloat8WeightConfig)
        assert layer_config.granularity == [PerRow(), PerRow()]


@pytest.mark.parametrize(
    ("capability", "recipe", "message"),
    [
        (None, "auto", "8.9 or higher, and there is none: load without `quantization_config` here."),
        (None, "mxfp8", "10.0 or higher, and there is none: load without"),
        ((7, 5), "rowwise", "8.9 or higher, and this one has 7.5: load without"),
        ((8, 6), "auto", "8.9 or higher, and this one has 8.6: load without"),
        ((8, 0), "mxfp8", "10.0 or higher, and this one has 8.0: load without"),
        ((8, 9), "mxfp8", "10.0 or higher, and this one has 8.9: use `recipe='rowwise'`"),
        ((9, 0), "mxfp8", "10.0 or higher, and this one has 9.0: use `recipe='rowwise'`"),
    ],
)
def test_a_card_that_cannot_is_refused_by_name(capability, recipe, message, on_card):
    on_card(capability)
    with pytest.raises(RuntimeError, match=re.escape(message)) as error:
        fp8_quantization_config(recipe)
    assert f"recipe '{recipe}'" in str(error.value)


@pytest.mark.parametrize("recipe", ["MXFP8", "tensorwise", None])
def test_an_unknown_recipe_is_refused(recipe, on_card):
    on_card((9, 0))
    with pytest.raises(ValueError, match=f"must be 'auto', 'rowwise' or 'mxfp8', got {recipe!r}"):
        fp8_quantization_config(recipe)


@pytest.mark.parametrize(("cuda", "available"), [(None, True), ("13.0", False)])
def test_there_is_no_capability_without_cuda(cuda, available, monkeypatch):
    """A ROCm device has numbers of its own, which mean something else."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert quantization.cuda_capability() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert quantization.cuda_capability() == (10, 3)


def test_without_mxfp8_in_torchao_auto_takes_rows_and_says_so(on_card, monkeypatch, caplog):
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig

    on_card((10, 0))
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats", None)
    with caplog.at_level(logging.WARNING, "diffusers_h3"):
        layer_config = _layer_config(fp8_quantization_config())
    assert isinstance(layer_config, Float8DynamicActivationFloat8WeightConfig)
    assert "pip install -U torchao" in caplog.text
    with pytest.raises(ImportError, match="MXFP8 needs a newer torchao"):
        fp8_quantization_config("mxfp8")


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match=r"pip install 'diffusers-h3\[fp8\]'"):
        fp8_quantization_config()

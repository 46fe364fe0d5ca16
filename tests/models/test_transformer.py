"""`VDNH3Transformer3DModel`: golden output, names, precision, saving and loading."""

import json

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel


FLOAT32_ISLANDS = ("proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out", "A_log", "dt_bias")


def _release_branch(golden_release):
    return load_file(golden_release / "stage-dmd-step-250/linear_branch/model.safetensors")


def test_golden_release(golden_release, tiny_arguments):
    """The fused weights and the branch in float32 give the recorded prediction."""
    stage = golden_release / "stage-dmd-step-250"
    expected = load_file(golden_release / "expected.safetensors")
    (transform,) = json.loads((stage / "model_spec.json").read_text())["transforms"]
    model = VDNH3Transformer3DModel(**tiny_arguments, hybrid_attention=transform).eval()
    fused = {name.removeprefix("fused."): tensor for name, tensor in expected.items() if name.startswith("fused.")}
    model.load_state_dict({**fused, **_release_branch(golden_release)})
    request = {name.removeprefix("input."): tensor for name, tensor in expected.items() if name.startswith("input.")}
    with torch.no_grad():
        output = model(**request)
    for actual, name in ((output.sample, "output.video"), (output.audio_sample, "output.audio")):
        assert actual.shape == expected[name].shape
        assert (actual - expected[name]).norm() <= 1e-3 * expected[name].norm()


def test_state_dict_is_the_stock_one_and_the_release_branch(golden_release, tiny_arguments):
    transform = HybridAttentionConfig(linear_head_dim=16).to_dict()
    model = VDNH3Transformer3DModel(**tiny_arguments, hybrid_attention=transform)
    stock = MiniMaxH3Transformer3DModel(**tiny_arguments)
    expected = {name: tensor.shape for name, tensor in stock.state_dict().items()}
    expected |= {name: tensor.shape for name, tensor in _release_branch(golden_release).items()}
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == expected


def test_full_size_names_and_shapes():
    """16 tensors per block, 800 in all, at the published sizes."""
    with torch.device("meta"):
        model = VDNH3Transformer3DModel()
    published = {
        "linear_attention.alpha.A_log": (56,),
        "linear_attention.alpha.down.weight": (128, 5376),
        "linear_attention.alpha.up.weight": (7168, 128),
        "linear_attention.alpha.dt_bias": (7168,),
        "linear_attention.beta_proj.weight": (56, 5376),
        "linear_attention.norm.weight": (128,),
        "linear_attention.output_gate.down.weight": (128, 5376),
        "linear_attention.output_gate.up.weight": (7168, 128),
        "linear_attention.output_gate.up.bias": (7168,),
        "linear_attention.short_conv.k_sp.weight": (7168, 1, 5, 5),
        "linear_attention.short_conv.v_sp.weight": (7168, 1, 5, 5),
        "linear_attention.short_conv.k_tm.weight": (7168, 1, 5),
        "linear_attention.short_conv.v_tm.weight": (7168, 1, 5),
        "softmax_gate.up.weight": (56, 5376),
        "softmax_gate.up.bias": (56,),
        "to_out_linear.weight": (5376, 7168),
    }
    expected = {
        f"transformer_blocks.{block}.attn.{name}": shape for block in range(50) for name, shape in published.items()
    }
    tensors = model.state_dict()
    branch = {
        name: tuple(tensor.shape)
        for name, tensor in tensors.items()
        if any(part in name for part in ("linear_attention", "softmax_gate", "to_out_linear"))
    }
    assert len(branch) == 800
    assert branch == expected
    # The published file has 4,279,428,112 bytes: bfloat16 numbers and a header of about 100 KB.
    total = 2 * sum(tensors[name].numel() for name in branch)
    assert 0 < 4_279_428_112 - total < 200_000


def test_gate_and_convolutions_follow_the_config(make_model):
    names = make_model(enable_softmax_gate=False, short_conv_targets=("q",)).state_dict()
    assert not any("softmax_gate" in name for name in names)
    assert {name.rsplit(".", 2)[1] for name in names if "short_conv" in name} == {"q_sp", "q_tm"}


def test_the_default_is_the_released_configuration_and_is_recorded(tiny_arguments):
    with torch.device("meta"):
        model = VDNH3Transformer3DModel(**{**tiny_arguments, "attention_head_dim": 128})
    assert model.config.hybrid_attention == HybridAttentionConfig().to_dict()
    assert model.config.fused_adapters is None
    assert model.transformer_blocks[0].attn.linear_attention.config == HybridAttentionConfig()


def test_another_head_dimension_is_refused(tiny_arguments):
    with pytest.raises(ValueError, match="`linear_head_dim` must equal the transformer's head dimension 16, got 128"):
        VDNH3Transformer3DModel(**tiny_arguments)


def test_an_illegal_transform_is_refused_by_name(tiny_arguments):
    transform = HybridAttentionConfig(linear_head_dim=16).to_dict()
    transform["config"]["softmax_attention"]["chunk"] = -5
    with pytest.raises(ValueError, match="`chunk`"):
        VDNH3Transformer3DModel(**tiny_arguments, hybrid_attention=transform)


def _expected_dtype(name, rest):
    return torch.float32 if any(island in name for island in FLOAT32_ISLANDS) else rest


@pytest.fixture
def saved(make_model, tmp_path):
    """A mixed-precision model and the folder it was saved to, in several shards."""
    fused_adapters = [{"name": "default", "sha256": "0" * 64}]
    model = make_model(seed=3, fused_adapters=fused_adapters, bridge="none")
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(_expected_dtype(name, torch.bfloat16))
    model.save_pretrained(tmp_path / "transformer", max_shard_size="40KB")
    return model, tmp_path / "transformer"


def test_round_trip_keeps_weights_config_and_precision(saved, make_request, predict):
    model, folder = saved
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    on_disk = {}
    for shard in shards:
        with safe_open(shard, "pt") as file:
            on_disk |= {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 – not a dictionary
    assert on_disk == {name: _expected_dtype(name, torch.bfloat16) for name in model.state_dict()}

    loaded = VDNH3Transformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    assert not loaded.training
    assert {**loaded.config, "_name_or_path": None} == {**model.config, "_name_or_path": None}
    assert loaded.config.fused_adapters == [{"name": "default", "sha256": "0" * 64}]
    assert loaded.config.hybrid_attention["config"]["linear_attention"]["bridge"] == "none"
    for (name, tensor), (other_name, other) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert other.dtype == _expected_dtype(name, torch.bfloat16)
        assert torch.equal(tensor, other)
    for request in (make_request(), make_request(num_frames=13, keyframes=("last",))):
        expected = predict(model, request)
        assert expected.isfinite().all()
        assert torch.equal(predict(loaded, request), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loading_keeps_float32_islands(dtype, make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    loaded = VDNH3Transformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype)
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert dtypes == {name: _expected_dtype(name, dtype) for name in dtypes}
    kept = {name for name, kind in dtypes.items() if kind == torch.float32}
    decays = {f"transformer_blocks.{block}.attn.linear_attention.alpha" for block in range(3)}
    assert {f"{decay}.{name}" for decay in decays for name in ("A_log", "dt_bias")} <= kept
    assert loaded.rope.inv_freq.dtype == torch.float32


def test_loading_without_a_dtype_is_float32(saved):
    _, folder = saved
    loaded = VDNH3Transformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def _mixed(model):
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(_expected_dtype(name, torch.bfloat16))
    return model


def test_bfloat16_against_float32(make_model, tiny_arguments, make_request, predict):
    """The hybrid model may lose twice what Diffusers' dense one loses with the same weights, no more."""
    errors = {}
    for name in ("hybrid", "dense"):
        exact = make_model(seed=5)
        rounded = _mixed(make_model(seed=5))
        exact.load_state_dict(rounded.state_dict())  # the same numbers, so only the computation differs
        if name == "dense":
            weights = exact.state_dict()
            stock = {key: weights[key] for key in MiniMaxH3Transformer3DModel(**tiny_arguments).state_dict()}
            exact, rounded = (
                MiniMaxH3Transformer3DModel(**tiny_arguments),
                MiniMaxH3Transformer3DModel(**tiny_arguments),
            )
            exact.load_state_dict(stock)
            rounded.load_state_dict(stock)
            _mixed(rounded)
        request = make_request(num_frames=17, text=6)
        expected = predict(exact.eval(), request)
        errors[name] = ((predict(rounded.eval(), request) - expected).norm() / expected.norm()).item()
    assert 1e-4 < errors["dense"] < 0.05
    assert errors["hybrid"] <= 2 * errors["dense"]


@pytest.mark.parametrize("autocast", [False, True])
def test_the_scan_stays_float32_under_bfloat16(autocast, make_model, make_request, predict, monkeypatch):
    from diffusers_h3.hybrid import branch

    seen = []

    def record(transition, update, initial, log_alpha, *args):
        states = linear_states(transition, update, initial, log_alpha, *args)
        seen.append([tensor.dtype for tensor in (transition, update, initial, log_alpha, states)])
        return states

    linear_states = branch.linear_states
    monkeypatch.setattr(branch, "linear_states", record)
    model = make_model() if autocast else _mixed(make_model())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        predict(model, make_request())
    assert seen == [[torch.float32] * 5] * 3


def test_fused_projections_give_the_same_output(make_model, make_request, predict):
    model, request = make_model(), make_request(num_frames=9)
    expected = predict(model, request)
    model.fuse_qkv_projections()
    attn = model.transformer_blocks[0].attn
    assert attn.fused_projections
    # What is read is the fused weight: without the others the output is the same.
    for block in model.transformer_blocks:
        for name in ("to_q", "to_k", "to_v"):
            torch.nn.init.zeros_(getattr(block.attn, name).weight)
    torch.testing.assert_close(predict(model, request), expected, rtol=1e-5, atol=1e-5)

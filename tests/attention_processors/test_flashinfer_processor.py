"""The processor's gates and its place in Diffusers: options, machine, switches, attention classes, sharing."""

import gc
import logging
import re
import subprocess
import sys
import weakref

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from diffusers_h3 import FlashInferProcessor
from diffusers_h3.ops.prefill import machine


pytestmark = pytest.mark.usefixtures("fresh_backends")


def run(model, inputs):
    with torch.inference_mode():
        return model(**inputs, return_dict=False)[0]


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill", "double"),
        ("prefill", ""),
        ("prefill", 1),
        ("kernel", "fa4"),
        ("kernel", None),
        ("fp8", 1),
        ("fp8", "yes"),
        ("fallback", "native"),
        ("fallback", None),
    ],
)
def test_unknown_options_name_the_allowed_ones(hopper, name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be one of .*, got {re.escape(repr(value))}"):
        FlashInferProcessor(**{name: value})


@pytest.mark.parametrize(
    "options",
    [{"prefill": "cudnn", "kernel": "fa2"}, {"prefill": "cudnn", "fp8": True}, {"kernel": "fa2", "fp8": True}],
)
def test_options_that_exclude_each_other(hopper, options):
    with pytest.raises(ValueError, match=r"prefill='(cudnn|single)'"):
        FlashInferProcessor(**options)


def test_unknown_options_raise_under_fallback_too():
    with pytest.raises(ValueError, match="`kernel`"):
        FlashInferProcessor(kernel="fa4", fallback="sdpa")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "auto"), ("", "auto"), ("single", "single"), ("cudnn", "cudnn")]
)
def test_environment_sets_the_default(hopper, monkeypatch, value, expected):
    monkeypatch.delenv("DIFFUSERS_H3_FLASHINFER_PREFILL", raising=False)
    if value is not None:
        monkeypatch.setenv("DIFFUSERS_H3_FLASHINFER_PREFILL", value)
    assert FlashInferProcessor().options.prefill == expected
    assert FlashInferProcessor(prefill="auto").options.prefill == "auto"


def test_wrong_environment_is_named(hopper, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_H3_FLASHINFER_PREFILL", "Single")
    with pytest.raises(ValueError, match=r"DIFFUSERS_H3_FLASHINFER_PREFILL must be one of .*got 'Single'.*unset"):
        FlashInferProcessor()


# --- machine ---------------------------------------------------------------------------------------------------------


def refused(**options):
    with pytest.raises(RuntimeError) as error:
        FlashInferProcessor(**options)
    text = str(error.value)
    assert text.endswith(".")
    assert ". " not in text.replace("diffusers-h3[flashinfer]", ""), "one sentence"
    return text


def test_missing_package(hopper):
    hopper.modules["flashinfer"] = False
    assert "pip install 'diffusers-h3[flashinfer]'" in refused()


def test_missing_compiler(hopper, monkeypatch):
    monkeypatch.setattr(machine, "has_program", lambda path: "nvcc" not in path)
    for options in ({}, {"prefill": "single"}, {"kernel": "fa2"}):
        assert "no nvcc" in refused(**options)
    # cuDNN brings compiled kernels, and so does FlashInfer's own package of them.
    FlashInferProcessor(prefill="cudnn")
    hopper.modules["flashinfer_jit_cache"] = True
    FlashInferProcessor()


@pytest.mark.parametrize(
    ("environment", "present", "expected"),
    [
        ({"CUDA_HOME": "/cuda"}, "/cuda/bin/nvcc", True),
        ({"CUDA_HOME": "/cuda"}, "nvcc", False),
        ({"CUDA_PATH": "/cuda"}, "/cuda/bin/nvcc", True),
        ({}, "nvcc", True),
        ({}, "/usr/local/cuda/bin/nvcc", True),
        ({"FLASHINFER_NVCC": "/opt/nvcc"}, "/opt/nvcc", True),
        ({"FLASHINFER_NVCC": "/opt/nvcc"}, "nvcc", False),
    ],
)
def test_compiler_is_looked_for_where_flashinfer_looks(monkeypatch, environment, present, expected):
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(machine, "has_program", lambda path: path == present)
    assert machine.has_compiler() is expected


def test_missing_ninja(hopper, monkeypatch):
    monkeypatch.setattr(machine, "has_program", lambda path: path != "ninja")
    assert "pip install ninja" in refused()


def test_missing_cudnn_front_end(hopper):
    hopper.modules["cudnn"] = False
    assert "nvidia-cudnn-frontend" in refused(prefill="cudnn")


def test_no_cuda_device(hopper, monkeypatch):
    monkeypatch.setattr(machine, "visible_capabilities", list)
    assert "CUDA device" in refused()


def test_old_card(hopper):
    hopper.set_capability((7, 5))
    text = refused()
    assert "8.0" in text
    assert "7.5" in text


@pytest.mark.parametrize("options", [{"kernel": "fa3"}, {"fp8": True}])
@pytest.mark.parametrize("capability", [(8, 9), (10, 0)])
def test_what_only_hopper_has(hopper, options, capability):
    hopper.set_capability(capability)
    assert "9.0 (Hopper)" in refused(**options)
    FlashInferProcessor()


def test_fallback_turns_a_missing_machine_into_one_warning(hopper, make_model, make_inputs, caplog):
    hopper.modules["flashinfer"] = False
    model, inputs = make_model("wan"), make_inputs("wan")
    expected = run(model, inputs)
    model.set_attn_processor(FlashInferProcessor(fallback="sdpa"))
    with caplog.at_level(logging.WARNING, logger="diffusers_h3"):
        actual = [run(model, inputs) for _ in range(2)]
    torch.testing.assert_close(actual[0], expected)
    torch.testing.assert_close(actual[1], expected)
    assert len(caplog.records) == 1
    assert "not installed" in caplog.records[0].getMessage()


def test_import_needs_none_of_the_optional_packages():
    script = """
import sys
for name in ("flashinfer", "cudnn", "triton", "flash_attn", "torchao"):
    sys.modules[name] = None
import diffusers_h3
from diffusers_h3.attention_processors.flashinfer import FlashInferProcessor
assert diffusers_h3.FlashInferProcessor is FlashInferProcessor
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# --- attention classes and Diffusers' switches -----------------------------------------------------------------------


def test_later_switches_take_precedence(stand_in, make_model, make_inputs):
    model, inputs = make_model("wan").to(torch.bfloat16), make_inputs("wan", dtype=torch.bfloat16)
    model.set_attention_backend("_native_math")
    model.set_attn_processor(FlashInferProcessor(kernel="fa2"))
    run(model, inputs)
    assert stand_in.kernels == ["fa2"] * 4
    model.set_attention_backend("native")
    run(model, inputs)
    assert stand_in.kernels == ["fa2"] * 4
    model.set_attention_backend("flashinfer")
    run(model, inputs)
    assert stand_in.kernels[4:] == ["fa3"] * 4
    model.reset_attention_backend()
    run(model, inputs)
    assert stand_in.kernels[8:] == ["fa2"] * 4


def test_setting_the_processor_leaves_other_models_alone(stand_in, make_model, make_inputs):
    first, second = (make_model("wan").to(torch.bfloat16) for _ in range(2))
    first.set_attn_processor(FlashInferProcessor())
    run(second, make_inputs("wan", dtype=torch.bfloat16))
    assert stand_in.calls == []


def test_two_models_of_two_classes_share_one_processor(stand_in, make_model, make_inputs):
    processor = FlashInferProcessor()
    for kind in ("wan", "h3", "wan"):
        model = make_model(kind).to(torch.bfloat16)
        for sizes in ({"frames": 2}, {"frames": 3, "width": 4, "batch": 2}):
            inputs = make_inputs(kind, dtype=torch.bfloat16, **sizes)
            expected = run(model, inputs)
            stock = model.attn_processors
            model.set_attn_processor(processor)
            torch.testing.assert_close(run(model, inputs), expected, rtol=5e-2, atol=5e-2)
            model.set_attn_processor(stock)
    assert set(stand_in.kernels) == {"fa3"}


def test_a_processor_keeps_no_model_alive(stand_in, make_model, make_inputs):
    processor, model = FlashInferProcessor(), make_model("wan").to(torch.bfloat16)
    model.set_attn_processor(processor)
    run(model, make_inputs("wan", dtype=torch.bfloat16))
    reference = weakref.ref(model)
    stand_in.calls.clear()
    del model
    gc.collect()
    assert reference() is None


def test_other_attention_classes_are_refused_by_name(hopper):
    from diffusers.models.transformers.transformer_flux import FluxAttention

    attention = FluxAttention(query_dim=16, heads=2, dim_head=8, processor=FlashInferProcessor())
    with pytest.raises(TypeError, match=r"not FluxAttention: use `model.set_attention_backend\('flashinfer'\)`"):
        attention(torch.randn(1, 3, 16))


def test_a_layer_with_a_linear_branch_never_runs_dense(stand_in, make_model, make_inputs):
    model = make_model("h3").to(torch.bfloat16)
    model.transformer_blocks[1].attn.linear_attention = torch.nn.Identity()
    model.set_attn_processor(FlashInferProcessor())
    with pytest.raises(ValueError, match="HybridAttnProcessor"):
        run(model, make_inputs("h3", dtype=torch.bfloat16))


def test_gradients_are_refused_with_the_way_out(stand_in, make_model, make_inputs):
    model = make_model("wan").to(torch.bfloat16).requires_grad_(True)
    model.set_attn_processor(FlashInferProcessor())
    inputs = make_inputs("wan", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch\.inference_mode"):
        model(**inputs)
    run(model, inputs)


def test_small_heads_are_refused_before_any_call(stand_in, make_model, make_inputs):
    model = make_model("wan", attention_head_dim=72).to(torch.bfloat16)
    model.set_attn_processor(FlashInferProcessor())
    with pytest.raises(ValueError, match="this model has 72"):
        run(model, make_inputs("wan", dtype=torch.bfloat16))
    assert stand_in.calls == []


@pytest.mark.parametrize("kind", ["wan", "h3"])
def test_float32_model_keeps_its_dtype(stand_in, make_model, make_inputs, kind):
    model, inputs = make_model(kind), make_inputs(kind)
    expected = run(model, inputs)
    model.set_attn_processor(FlashInferProcessor())
    actual = run(model, inputs)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


def test_autocast(stand_in, make_model, make_inputs):
    """Under autocast the norms give float32 queries and keys beside a bfloat16 value."""
    model, inputs = make_model("wan"), make_inputs("wan")
    expected = run(model, inputs)
    model.set_attn_processor(FlashInferProcessor())
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(model, inputs)
    torch.testing.assert_close(actual.float(), expected, rtol=5e-2, atol=5e-2)
    assert {call.arguments["q"].dtype for call in stand_in.calls} == {torch.bfloat16}


@pytest.mark.parametrize("options", [{"prefill": "cudnn"}, {"prefill": "single"}])
@pytest.mark.parametrize("kind", ["wan", "h3"])
def test_batches(stand_in, make_model, make_inputs, kind, options):
    model = make_model(kind, **({"attention_head_dim": 128} if kind == "wan" else {})).to(torch.bfloat16)
    inputs = make_inputs(kind, dtype=torch.bfloat16, batch=3)
    expected = run(model, inputs)
    model.set_attn_processor(FlashInferProcessor(**options))
    torch.testing.assert_close(run(model, inputs), expected, rtol=5e-2, atol=5e-2)
    layers = 5 if kind == "h3" else 4
    assert stand_in.kernels == (["cudnn"] * layers if options["prefill"] == "cudnn" else ["fa3"] * 3 * layers)


def test_the_backend_in_force_is_a_diffusers_name(hopper):
    processor = FlashInferProcessor(prefill="single")
    assert isinstance(processor._attention_backend, AttentionBackendName)
    assert processor._parallel_config is None

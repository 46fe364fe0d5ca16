"""`torch.compile`: FlashInfer stays outside the graph, one compilation serves all blocks, options are followed."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from diffusers_h3 import FlashInferProcessor


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def blocks_of(model):
    return model.transformer_blocks if hasattr(model, "transformer_blocks") else model.blocks


@pytest.mark.parametrize("kind", ["wan", "wan_i2v", "h3"])
@pytest.mark.parametrize("options", [{}, {"prefill": "single", "kernel": "fa2"}, {"fp8": True}])
def test_one_graph_serves_all_blocks(stand_in, make_model, make_inputs, kind, options):
    model = make_model(kind, num_layers=4).to(torch.bfloat16)
    inputs = make_inputs(kind, dtype=torch.bfloat16)
    model.set_attn_processor(FlashInferProcessor(**options))
    with torch.inference_mode():
        expected = model(**inputs, return_dict=False)
        eager_kernels = list(stand_in.kernels)
        stand_in.calls.clear()
        counter = CompileCounterWithBackend("aot_eager")
        for block in blocks_of(model):
            block.compile(backend=counter, fullgraph=True)
        actual = model(**inputs, return_dict=False)
    assert counter.frame_count == 1, "a second compilation: blocks are told apart by something"
    assert stand_in.kernels == eager_kernels
    assert set(eager_kernels) == {options.get("kernel", "fa3")}
    for got, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_other_sizes_do_not_break_the_graph(stand_in, make_model, make_inputs):
    model = make_model("h3").to(torch.bfloat16)
    model.set_attn_processor(FlashInferProcessor())
    with torch.inference_mode():
        counter = CompileCounterWithBackend("aot_eager")
        for block in model.transformer_blocks:
            block.compile(backend=counter, fullgraph=True)
        for text, frames in ((5, 2), (8, 3), (11, 4)):
            model(**make_inputs("h3", dtype=torch.bfloat16, text=text, frames=frames))
    # The second size makes the graph dynamic, the third reuses it.
    assert counter.frame_count == 2


def test_float32_model_casts_inside_the_graph(stand_in, make_model, make_inputs):
    model = make_model("wan")
    inputs = make_inputs("wan")
    model.set_attn_processor(FlashInferProcessor())
    with torch.inference_mode():
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        (output,) = model(**inputs, return_dict=False)
    assert output.dtype == torch.float32
    assert {call.arguments["q"].dtype for call in stand_in.calls} == {torch.bfloat16}


def test_fallback_compiles_into_pytorch_attention(stand_in, make_model, make_inputs):
    model = make_model("wan", attention_head_dim=32, num_attention_heads=2)
    inputs = make_inputs("wan")
    with torch.inference_mode():
        (expected,) = model(**inputs, return_dict=False)
        model.set_attn_processor(FlashInferProcessor(fallback="sdpa"))
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        (actual,) = model(**inputs, return_dict=False)
    assert stand_in.calls == []
    torch.testing.assert_close(actual, expected)


def test_operator_passes_the_checks_of_torch_library(stand_in):
    query, key = torch.randn(2, 6, 4, 64).bfloat16(), torch.randn(2, 9, 2, 64).bfloat16()
    mask = torch.rand(1, 6, 9) > 0.3
    for arguments in (
        (query, key, key, None, None, None, None, False, 0.125, "fa3", torch.bfloat16),
        (query, key, key, mask, None, None, None, True, 0.125, "fa2", torch.bfloat16),
    ):
        torch.library.opcheck(
            torch.ops.diffusers_h3.flashinfer_prefill.default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )

"""The processor on tiny real models: equal to the stock processor, through the kernels it should use."""

import pytest
import torch

from diffusers_h3 import FlashInferProcessor


KINDS = ("wan", "wan_i2v", "wan_expand_timesteps", "h3")


def run(model, inputs):
    with torch.inference_mode():
        return model(**inputs, return_dict=False)


def assert_equal(actual, expected, tolerance):
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        error = ((got - wanted).double().norm() / wanted.double().norm()).item()
        assert error < tolerance, error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_equals_the_stock_processor(stand_in, make_model, make_inputs, kind, fused):
    model = make_model(kind).to(torch.bfloat16)
    inputs = make_inputs(kind, dtype=torch.bfloat16)
    if fused:
        model.fuse_qkv_projections()
    expected = run(model, inputs)
    model.set_attn_processor(FlashInferProcessor())
    actual = run(model, inputs)
    # bfloat16 has 8 bits: what remains is one rounding of the attention output per layer.
    assert_equal(actual, expected, 2e-2)
    # Wan: 2 blocks of self- and cross-attention, image-to-video a third call; MiniMax-H3: 3 blocks, 2 refiner blocks.
    count = {"wan": 4, "wan_i2v": 6, "wan_expand_timesteps": 4, "h3": 5}[kind]
    assert stand_in.kernels == ["fa3"] * count

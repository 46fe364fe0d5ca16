"""FlashInfer as a Diffusers backend: the name, the registry, and what Diffusers' switches do with it."""

import logging
import subprocess
import sys

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)

from diffusers_h3.attention_processors.flashinfer_backend import backend_for, register_backend
from diffusers_h3.ops.prefill import PrefillOptions


pytestmark = pytest.mark.usefixtures("fresh_backends")


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register_backend()


def test_made_for_this_version_of_diffusers():
    """The enumeration and the registry are Diffusers' internals: look at both again before raising this version."""
    assert diffusers.__version__.startswith("0.42."), diffusers.__version__
    assert set(_AttentionBackendRegistry._supported_arg_names[AttentionBackendName("flashinfer")]) == set(
        _AttentionBackendRegistry._supported_arg_names[AttentionBackendName.NATIVE]
    )


def test_the_name_is_a_full_member():
    member = AttentionBackendName("flashinfer")
    assert isinstance(member, AttentionBackendName)
    assert member == "flashinfer"
    assert member.value == "flashinfer"
    assert member.name == "FLASHINFER"
    assert member is AttentionBackendName.FLASHINFER is AttentionBackendName["FLASHINFER"]
    assert member in list(AttentionBackendName)
    assert member in _AttentionBackendRegistry.list_backends()
    assert _AttentionBackendRegistry._is_context_parallel_available(member)
    assert AttentionBackendName("native").value == "native", "the others are as they were"


def test_registering_twice_changes_nothing():
    before = list(AttentionBackendName), dict(_AttentionBackendRegistry._backends)
    register_backend()
    assert (list(AttentionBackendName), dict(_AttentionBackendRegistry._backends)) == before


def test_a_backend_of_diffusers_own_is_left_alone():
    """A later Diffusers may have a backend of this name."""
    script = """
from diffusers.models import attention_dispatch as dispatch
from diffusers_h3.attention_processors import flashinfer_backend as ours
own = ours._add_member("flashinfer")
dispatch._AttentionBackendRegistry.register(own)(len)
ours.register_backend()
assert dispatch._AttentionBackendRegistry._backends[own] is len
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_options_have_backends_of_their_own():
    first = backend_for(PrefillOptions(prefill="single", kernel="fa2"))
    assert first is backend_for(PrefillOptions(prefill="single", kernel="fa2"))
    others = [
        PrefillOptions(),
        PrefillOptions(prefill="cudnn"),
        PrefillOptions(fp8=True),
        PrefillOptions(fallback="sdpa"),
        PrefillOptions(prefill="single", kernel="fa3"),
    ]
    assert len({first, *map(backend_for, others)}) == 6


def test_set_attention_backend_on_stock_processors(stand_in, make_model, make_inputs):
    model = make_model("wan").to(torch.bfloat16)
    inputs = make_inputs("wan", dtype=torch.bfloat16)
    with torch.inference_mode():
        (expected,) = model(**inputs, return_dict=False)
        model.set_attention_backend("flashinfer")
        (actual,) = model(**inputs, return_dict=False)
    assert stand_in.kernels == ["fa3"] * 4
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_context_manager_and_direct_dispatch(stand_in):
    query = torch.randn(1, 6, 2, 64).bfloat16()
    expected = dispatch_attention_fn(query, query, query)
    with attention_backend("flashinfer"):
        torch.testing.assert_close(dispatch_attention_fn(query, query, query), expected, rtol=2e-2, atol=2e-2)
    assert stand_in.kernels == ["fa3"]
    dispatch_attention_fn(query, query, query)
    assert stand_in.kernels == ["fa3"]


def test_grouped_heads_need_no_flag(stand_in):
    query, key = torch.randn(1, 6, 4, 64).bfloat16(), torch.randn(1, 7, 2, 64).bfloat16()
    expected = dispatch_attention_fn(query, key, key, enable_gqa=True)
    for enable_gqa in (True, False):
        actual = dispatch_attention_fn(query, key, key, enable_gqa=enable_gqa, backend="flashinfer")
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert stand_in.kernels == ["fa3"] * 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"dropout_p": 0.1}, "dropout_p=0.1"), ({"attention_kwargs": {"return_lse": True}}, "return_lse")],
)
def test_arguments_no_kernel_takes(stand_in, arguments, match):
    query = torch.randn(1, 6, 2, 64).bfloat16()
    with pytest.raises(ValueError, match=match):
        dispatch_attention_fn(query, query, query, backend="flashinfer", **arguments)


REFUSED = {
    "head dimensions": ({"head_dim": 72}, {}),
    "differs between": ({}, {"attn_mask": torch.ones(1, 2, 6, 6, dtype=torch.bool).tril()}),
    "a bias": ({}, {"attn_mask": torch.full((1, 1, 6, 6), 0.25)}),
    "dropout": ({}, {"dropout_p": 1e-12}),
    "a gradient": ({"requires_grad": True}, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_fallback_runs_diffusers_own_attention_and_warns_once(stand_in, caplog, case):
    shape, arguments = REFUSED[case]
    query = torch.randn(1, 6, 2, shape.get("head_dim", 64), requires_grad=shape.get("requires_grad", False))
    expected = dispatch_attention_fn(query, query, query, **arguments)
    strict, lenient = (backend_for(PrefillOptions(fallback=fallback)) for fallback in ("error", "sdpa"))
    with pytest.raises(ValueError, match=case):
        dispatch_attention_fn(query, query, query, backend=strict, **arguments)
    with caplog.at_level(logging.WARNING, logger="diffusers_h3"):
        for _ in range(2):
            actual = dispatch_attention_fn(query, query, query, backend=lenient, **arguments)
    torch.testing.assert_close(actual, expected)
    assert len(caplog.records) == 1
    assert "falls back to PyTorch's" in caplog.records[0].getMessage()
    assert stand_in.calls == []
    if case == "a gradient":
        actual.sum().backward()
        assert query.grad.abs().sum() > 0


def test_fallback_computes_grouped_heads(stand_in):
    query, key = torch.randn(1, 6, 4, 32), torch.randn(1, 7, 2, 32)
    backend = backend_for(PrefillOptions(fallback="sdpa"))
    actual = dispatch_attention_fn(query, key, key, backend=backend)
    torch.testing.assert_close(actual, dispatch_attention_fn(query, key, key, enable_gqa=True))


def test_fallback_does_not_hide_wrong_shapes(stand_in):
    query = torch.randn(1, 6, 2, 64)
    backend = backend_for(PrefillOptions(fallback="sdpa"))
    with pytest.raises(ValueError, match="6 queries and 6 keys"):
        dispatch_attention_fn(query, query, query, attn_mask=torch.ones(1, 1, 5, 6, dtype=torch.bool), backend=backend)


def test_environment_reaches_the_public_backend():
    """Read at the first call of a process, so that one is started; without a card its refusal names the choice."""
    script = """
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers_h3.attention_processors.flashinfer_backend import register_backend
register_backend()
query = torch.randn(1, 6, 2, 64)
try:
    dispatch_attention_fn(query, query, query, backend="flashinfer")
except ValueError as error:
    print(error)
"""
    command = [sys.executable, "-c", script]
    environment = {"DIFFUSERS_H3_FLASHINFER_PREFILL": "doubel", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    result = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True, env=environment)
    assert "DIFFUSERS_H3_FLASHINFER_PREFILL must be one of ['auto', 'single', 'cudnn'], got 'doubel'" in result.stdout

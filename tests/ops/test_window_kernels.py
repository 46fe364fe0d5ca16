"""The kernel window backends: slices, merge and dispatch, on the CPU's kernel and on recording stand-ins."""

import importlib.machinery
import itertools
import logging
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusers_h3 import notices
from diffusers_h3.hybrid.config import HybridAttentionConfig
from diffusers_h3.hybrid.layout import SequenceLayout, plan_window
from diffusers_h3.ops.prefill import machine
from diffusers_h3.ops.window_attention import kernels, window_attention
from diffusers_h3.ops.window_attention.merge import merge_gated
from diffusers_h3.ops.window_attention.reference import place
from diffusers_h3.ops.window_attention.sliced import sliced_attention
from diffusers_h3.ops.window_attention.slices import slice_groups


ANCHORS = ("none", "columns", "rows", "both")
# Chunk and radius; without chunks, windows of neighbouring frames differ and overlap.
WINDOWS = ((5, 1), (3, 0), (2, 1), (1, 2), (0, 0), (0, 1), (0, 2))
FRAMES = (1, 2, 4, 5, 6, 11, 16)
# Rows before the video.
GLOBALS = (0, 1, 4)


def _groups(anchor_frames, window, num_frames, global_rows=7, grid=(2, 1)):
    """The groups of a clip in rows."""
    config = HybridAttentionConfig(anchor_frames=anchor_frames, chunk=window[0], radius=window[1])
    seq_len = global_rows + num_frames * grid[0] * grid[1]
    layout = SequenceLayout(seq_len, min(global_rows, 2), global_rows, num_frames, grid)
    groups = (
        tuple(tuple(place(ranges, layout.rows)) for ranges in group) for group in plan_window(config, num_frames)
    )
    return tuple((queries, keys) for queries, keys in groups if queries)


def _rows(ranges):
    return [row for start, stop in ranges for row in range(start, stop)]


def _attention(query, key, value):
    weights = torch.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("bhts,bshd->bthd", weights.softmax(-1), value)


def _windowed(query, key, value, groups, gate=None):
    """The window by its definition: every row attends to its group's keys, one row at a time, in float64."""
    query, key, value = (rows.double() for rows in (query, key, value))
    output = torch.zeros_like(query)
    for queries, keys in groups:
        seen = _rows(keys)
        for row in _rows(queries):
            output[:, row : row + 1] = _attention(query[:, row : row + 1], key[:, seen], value[:, seen])
    return output if gate is None else output * torch.sigmoid(gate.double()).unsqueeze(-1)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("anchor_frames", ANCHORS)
def test_slices_are_the_groups(anchor_frames, window):
    """For every clip: shared and own keys are disjoint and together the group's; rows occur once."""
    for num_frames, global_rows in itertools.product(FRAMES, GLOBALS):
        groups = _groups(anchor_frames, window, num_frames, global_rows)
        seen = {row: set(_rows(keys)) for queries, keys in groups for row in _rows(queries)}
        sliced = slice_groups(groups)
        shared = _rows(sliced.shared)
        covered = _rows(sliced.dense)
        assert len(set(shared)) == len(shared)
        for row in covered:
            assert seen[row] == set(range(len(seen)))
        for queries, own in zip(sliced.queries, sliced.slices, strict=True):
            assert not set(shared) & set(_rows([own]))
            for row in _rows([queries]):
                assert set(shared) | set(_rows([own])) == seen[row]
            covered += _rows([queries])
        assert sorted(covered) == list(range(len(seen)))


def test_slices_by_hand():
    """Six frames of two rows after one text row, chunks of two, neighbours seen, anchors that are both."""
    sliced = slice_groups(_groups("both", (2, 1), 6, 1))
    # The middle chunk sees the whole clip; frame 1 sees all but frame 4, frame 4 all but frame 1.
    assert sliced.dense == ((0, 3), (5, 9), (11, 13))
    assert sliced.shared == ((0, 3), (5, 9), (11, 13))
    assert sliced.queries == ((3, 5), (9, 11))
    assert sliced.slices == ((3, 5), (9, 11))


@pytest.mark.parametrize("queries", [[((0, 4),), ((5, 9),)], [((0, 5),), ((4, 9),)], [((0, 9),)] * 2])
def test_slices_refuse_groups_that_do_not_cover_the_rows(queries):
    with pytest.raises(ValueError, match="do not cover"):
        slice_groups(tuple((ranges, ((0, 9),)) for ranges in queries))


@pytest.mark.parametrize("stop", [8, 10])
def test_kernel_backends_refuse_groups_of_another_length(stop, draw):
    """As `"sdpa"` does: rows that no group names would come out as whatever the memory held."""
    rows = draw(1, 9, 1, 8).float()
    with pytest.raises(ValueError, match="do not cover 9 rows exactly once"):
        window_attention(rows, rows, rows, ((((0, stop),), ((0, stop),)),), _attention, backend="torch_flash")


def test_slices_refuse_own_keys_in_pieces():
    groups = ((((0, 2),), ((0, 1), (3, 4))), (((2, 5),), ((4, 5),)))
    with pytest.raises(ValueError, match="not contiguous"):
        slice_groups(groups)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("global_rows", [0, 7])
@pytest.mark.parametrize("anchor_frames", ANCHORS)
def test_sliced_equals_the_definition(anchor_frames, global_rows, gated, draw):
    """For every window and clip, one frame included, two batch items and heads."""
    for window, num_frames in itertools.product(WINDOWS, (1, 3, 11)):
        groups = _groups(anchor_frames, window, num_frames, global_rows)
        seq_len = global_rows + 2 * num_frames
        query, key, value = (draw(2, seq_len, 2, 8).float() for _ in range(3))
        gate = draw(2, seq_len, 2).float() if gated else None
        with torch.no_grad():
            output = window_attention(query, key, value, groups, _attention, gate, "torch_flash")
        assert output.dtype == torch.float32
        torch.testing.assert_close(output.double(), _windowed(query, key, value, groups, gate), rtol=1e-5, atol=2e-6)


def test_sliced_equals_gathered_in_bfloat16(draw):
    """No worse than 1.5 times the gathered path's own error."""
    groups = _groups("both", (2, 1), 11)
    query, key, value = (draw(2, 29, 2, 16).bfloat16() for _ in range(3))
    gate = draw(2, 29, 2).bfloat16()
    exact = _windowed(query, key, value, groups, gate)
    errors = {
        backend: (window_attention(query, key, value, groups, _attention, gate, backend).double() - exact).norm()
        for backend in ("sdpa", "torch_flash")
    }
    assert 0 < errors["torch_flash"] <= 1.5 * errors["sdpa"]


@pytest.mark.parametrize("gated", [True, False])
def test_merge_of_two_parts_is_attention_over_both_key_sets(gated, draw):
    logits, values, gate = draw(5, 3, 7), draw(7, 3, 4), draw(5, 3) if gated else None

    def part(keys):
        share = logits[..., keys].softmax(-1)
        return torch.einsum("lhk,khd->lhd", share, values[keys]), logits[..., keys].logsumexp(-1)

    output = torch.empty(5, 3, 4, dtype=torch.float64)
    expected = torch.einsum("lhk,khd->lhd", logits.softmax(-1), values)
    if gated:
        expected = expected * torch.sigmoid(gate).unsqueeze(-1)
    for parts in ([part(slice(0, 2)), part(slice(2, 7))], [part(slice(0, 7))]):
        merge_gated(parts, gate, output.fill_(torch.nan))
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def _module(name, **functions):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    return module


@pytest.fixture
def card(monkeypatch):
    """A function pretending that CPU tensors are on a card of some compute capability, with packages installed."""

    def pretend(capability, *packages):
        for module in (kernels, machine):
            monkeypatch.setattr(module, "cuda_capability", lambda *_: capability, raising=True)
            monkeypatch.setattr(module, "has_module", lambda name: name in packages, raising=True)
        monkeypatch.setattr(machine, "visible_capabilities", lambda: [capability] if capability else [])
        monkeypatch.setattr(machine, "has_compiler", lambda: True)
        monkeypatch.setattr(machine, "has_program", lambda path: True)

    return pretend


def _query(dtype=torch.bfloat16, head_dim=128):
    return torch.zeros(1, 4, 2, head_dim, dtype=dtype)


ALL = ("flashinfer", "flash_attn", "cudnn")
E4M3 = torch.float8_e4m3fn
# Card, packages, query, and per backend the words of its refusal, or None where it runs.
MACHINES = [
    (None, ALL, _query(), ["needs a CUDA device"] * 3 + [None]),
    ((7, 5), ALL, _query(torch.float16), [r"\(7, 5\): it needs \(8, 0\)"] * 4),
    ((8, 6), (), _query(), ["FlashInfer is not installed", "flash-attn is not installed", r"needs \(9, 0\)", None]),
    ((8, 6), ALL, _query(torch.float16), [None, None, r"\(8, 6\): it needs \(9, 0\)", None]),
    ((9, 0), ALL, _query(), [None] * 4),
    ((9, 0), ("flash_attn_interface",), _query(), ["FlashInfer is not installed", None, None, None]),
    ((9, 0), ALL, _query(head_dim=72), [r"72: it takes \(64, 128, 256\)", None, None, None]),
    ((9, 0), ALL, _query(head_dim=36), ["36: it takes", "36: it takes multiples of 8 up to 256"] + ["multiples"] * 2),
    ((9, 0), ALL, _query(head_dim=256), [None, None, "256: it takes multiples of 8 up to 128", None]),
    ((9, 0), ALL, _query(torch.float32), ["float32: it takes float16 and bfloat16"] * 4),
    ((9, 0), ALL, _query().to(E4M3), [None] + ["'flashinfer' backend only"] * 3),
    ((8, 6), ALL, _query().to(E4M3), ["`fp8=True` needs FlashInfer's fa3"] + ["'flashinfer' backend only"] * 3),
    ((10, 0), ALL, _query(), [None] * 4),
    ((10, 0), ALL, _query().to(E4M3), ["`fp8=True` needs FlashInfer's fa3"] + ["'flashinfer' backend only"] * 3),
]


@pytest.mark.parametrize(("capability", "packages", "query", "refusals"), MACHINES)
def test_refusals(capability, packages, query, refusals, card):
    card(capability, *packages)
    for name, expected in zip(kernels.KERNELS, refusals, strict=True):
        if expected is None:
            assert kernels.kernel_refusal(name, query) is None
            assert kernels.resolve_kernel(name, query) is kernels.KERNELS[name]
        else:
            with pytest.raises(ValueError, match=f"'{name}' cannot take .*{expected}.*backend='sdpa'"):
                kernels.resolve_kernel(name, query)


@pytest.mark.parametrize(("capability", "packages", "query", "refusals"), MACHINES)
def test_auto_takes_the_first_that_runs_and_says_so_once(capability, packages, query, refusals, card, caplog):
    card(capability, *packages)
    notices._log.cache_clear()
    if None not in refusals:
        with pytest.raises(ValueError, match=r"'flashinfer' cannot take .*; 'torch_flash' cannot take"):
            kernels.resolve_kernel("auto", query)
        return
    chosen = list(kernels.KERNELS)[refusals.index(None)]
    with caplog.at_level(logging.INFO, logger="diffusers_h3"):
        for _ in range(3):
            assert kernels.resolve_kernel("auto", query) is kernels.KERNELS[chosen]
    (message,) = caplog.messages
    assert f"runs its window on '{chosen}'" in message


@pytest.mark.parametrize(("dtype", "gathered"), [(torch.float32, True), (torch.bfloat16, False)])
def test_auto_gathers_on_a_card_in_float32_only(dtype, gathered):
    calls = []

    def attention(query, key, value):
        calls.append(key.shape[1])
        return query

    with FakeTensorMode():
        rows = torch.empty(1, 9, 1, 64, dtype=dtype, device="cuda")
        groups = ((((0, 5),), ((0, 9),)), (((5, 9),), ((2, 9),)))
        output = window_attention(rows, rows, rows, groups, attention)
    assert (output.shape, output.dtype, output.device.type) == (rows.shape, dtype, "cuda")
    assert calls == ([9, 7] if gathered else [])


def test_named_backends_refuse_the_cpu_and_gradients(draw):
    rows, groups = draw(1, 9, 1, 8).float(), ((((0, 9),), ((0, 9),)),)
    for backend in ("flashinfer", "flash_attn", "cudnn"):
        with pytest.raises(ValueError, match=f"'{backend}' cannot take cpu tensors: it needs a CUDA device"):
            window_attention(rows, rows, rows, groups, _attention, backend=backend)
    for backend in ("flash_attn", "torch_flash"):
        with pytest.raises(ValueError, match=f"The '{backend}' window backend is inference only: use `torch.no_grad"):
            window_attention(rows, rows.clone().requires_grad_(), rows, groups, _attention, backend=backend)
    with pytest.raises(ValueError, match="'flashinfer' cannot take cpu tensors"):
        window_attention(rows, rows, rows, groups, _attention, backend="auto", fp8=True)


def test_auto_is_gathered_attention_on_the_cpu_and_gives_gradients(draw):
    rows, calls = draw(1, 9, 1, 8).requires_grad_(), []

    def attention(*tensors):
        calls.append(tensors)
        return _attention(*tensors)

    output = window_attention(rows, rows, rows, ((((0, 9),), ((0, 9),)),), attention)
    assert len(calls) == 1
    assert torch.autograd.grad(output.square().sum(), rows)[0].abs().sum() > 0


def _attend(query, key, value, dtype):
    """Attend over ``[L, H, D]`` in float64: the output, and the natural log-sum-exp ``[L, H]`` in float32."""
    logits = torch.einsum("qhd,khd->qhk", query.double(), key.double()) / query.shape[-1] ** 0.5
    output = torch.einsum("qhk,khd->qhd", logits.softmax(-1), value.double())
    return output.to(dtype), logits.logsumexp(-1).float()


@pytest.fixture
def stand_ins(monkeypatch):
    """FlashInfer and both flash-attn packages, computing in float64 and recording their keyword arguments."""
    calls = []

    def single_prefill_with_kv_cache(query, key, value, **options):
        calls.append(("flashinfer", options))
        assert query.ndim == 3
        assert query.dtype == key.dtype == value.dtype
        scales = [options.pop(f"scale_{name}", None) for name in "qkv"]
        dtype = options.pop("o_dtype", query.dtype)
        if scales[0] is not None:
            assert query.dtype == E4M3
            assert all(scale.shape == query.shape[1:2] for scale in scales)
            query, key, value = (
                rows.double() * scale.double()[:, None]
                for rows, scale in zip((query, key, value), scales, strict=True)
            )
        output, lse = _attend(query, key, value, dtype)
        return output, lse / torch.tensor(2.0).log()

    def flash_attn(name, returns):
        def flash_attn_func(query, key, value, **options):
            calls.append((name, options))
            output, lse = _attend(query[0], key[0], value[0], query.dtype)
            return (output.unsqueeze(0), lse.T.unsqueeze(0), None)[:returns]

        return _module(name, flash_attn_func=flash_attn_func)

    prefill = _module("flashinfer.prefill", single_prefill_with_kv_cache=single_prefill_with_kv_cache)
    monkeypatch.setitem(sys.modules, "flashinfer", _module("flashinfer", prefill=prefill))
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", prefill)
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attn("flash_attn", 3))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn("flash_attn_interface", 2))
    return calls


@pytest.mark.parametrize(
    ("capability", "packages", "backend", "name", "options"),
    [
        ((9, 0), ALL, "flashinfer", "flashinfer", {"kv_layout": "NHD", "backend": "fa3", "return_lse": True}),
        ((8, 6), ALL, "flashinfer", "flashinfer", {"kv_layout": "NHD", "backend": "fa2", "return_lse": True}),
        ((10, 0), ALL, "auto", "flashinfer", {"kv_layout": "NHD", "backend": "fa2", "return_lse": True}),
        ((8, 0), ("flash_attn",), "auto", "flash_attn", {"return_attn_probs": True}),
        ((9, 0), ("flash_attn", "flash_attn_interface"), "auto", "flash_attn_interface", {"return_attn_probs": True}),
    ],
)
def test_packages_are_called_as_documented(capability, packages, backend, name, options, card, stand_ins, draw):
    """A window of dense rows, slices and shared keys through each package: its arguments and the merged values."""
    card(capability, *packages)
    groups = _groups("both", (2, 1), 11)
    query, key, value = (draw(1, 29, 2, 64).half() for _ in range(3))
    gate = draw(1, 29, 2).half()
    window = slice_groups(groups)
    assert window.dense
    assert window.shared
    # The public function keeps CPU tensors off the kernels under "auto", so the operator is called itself.
    output = sliced_attention(query, key, value, gate, None, window, backend, torch.float16)
    assert stand_ins == [(name, options)] * (2 + len(window.queries))
    exact = _windowed(query, key, value, groups, gate)
    # float16 rounds the parts, their merge and the gated result: a few times 2⁻¹¹.
    assert (output.double() - exact).norm() <= 4 * 2**-11 * exact.norm()


def test_fp8_hands_scales_per_item_and_head(card, stand_ins, draw):
    card((9, 0), *ALL)
    groups = _groups("both", (2, 1), 11)
    scale = torch.tensor([[1.0, 20.0], [0.05, 3.0]])[:, None, :, None]  # items and heads of very different size
    query, key, value = (draw(2, 29, 2, 64).float().mul(factor).half() for factor in (1.0, 1.0, scale))
    output = window_attention(query, key, value, groups, _attention, None, "flashinfer", fp8=True)
    assert output.dtype == torch.float16
    assert {name for name, _ in stand_ins} == {"flashinfer"}
    exact = _windowed(query, key, value, groups)
    for item, head in itertools.product(range(2), range(2)):
        error = (output[item, :, head].double() - exact[item, :, head]).norm() / exact[item, :, head].norm()
        assert 1e-3 < error < 2**-4  # e4m3 errs by at most 2⁻⁴ of an input

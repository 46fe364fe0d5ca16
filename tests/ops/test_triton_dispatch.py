"""Which implementation runs: the kernels only for CUDA inference in at most single precision, else the reference."""

import importlib

import pytest
import torch

from diffusers_h3.ops import delta_rule, frame_statistics, linear_state, short_conv, triton_support
from diffusers_h3.ops.triton_support import use_triton
from diffusers_h3.ops.window_attention import merge


class _Cuda:
    """What `use_triton` asks of a tensor, as a CUDA tensor answers."""

    is_cuda = True

    def __init__(self, dtype=torch.bfloat16, requires_grad=False):
        self.dtype, self.requires_grad = dtype, requires_grad


@pytest.fixture
def machine(monkeypatch):
    """A function setting what was found when the package was imported."""

    def set_machine(has_triton=True, interpreted=False):
        monkeypatch.setattr(triton_support, "_HAS_TRITON", has_triton)
        monkeypatch.setattr(triton_support, "_INTERPRETED", interpreted)

    return set_machine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_cuda_inference_takes_the_kernels(dtype, machine):
    machine()
    assert use_triton(_Cuda(dtype), None, _Cuda(torch.float32))


def test_without_triton_nothing_takes_the_kernels(machine):
    machine(has_triton=False, interpreted=True)
    assert not use_triton(_Cuda())


def test_cpu_tensors_take_the_kernels_in_the_interpreter_only(machine):
    machine()
    assert not use_triton(torch.zeros(1))
    assert not use_triton(_Cuda(), torch.zeros(1))
    machine(interpreted=True)
    assert use_triton(torch.zeros(1))


def test_double_precision_takes_the_reference(machine):
    machine(interpreted=True)
    assert not use_triton(_Cuda(), _Cuda(torch.float64))
    assert not use_triton(torch.zeros(1), torch.zeros(1, dtype=torch.float64))


def test_gradients_take_the_reference(machine):
    machine(interpreted=True)
    assert not use_triton(_Cuda(), _Cuda(requires_grad=True))
    with torch.no_grad():
        assert use_triton(_Cuda(), _Cuda(requires_grad=True))


B, F, S, H, D = 1, 4, 3, 2, 4


def _rows(*shape, requires_grad=False):
    return torch.randn(*shape, requires_grad=requires_grad)


def _gram():
    return torch.eye(D).expand(B, F, H, D, D)


# Per kernel entry point: its module, its name there, and the public call that reaches it, of what it differentiates.
ENTRIES = {
    "convolved_features": (
        short_conv,
        "convolved_features",
        lambda leaf: short_conv.convolved_features(
            leaf(B, F, S, H * D), _rows(H * D, 1, 5, 5), _rows(H * D, 1, 5), (1, S), H, True
        ),
    ),
    "pointwise_features": (
        short_conv,
        "pointwise_features",
        lambda leaf: short_conv.pointwise_features(leaf(B, F, S, H * D), H, True),
    ),
    "frame_statistics": (
        frame_statistics,
        "frame_statistics",
        lambda leaf: frame_statistics.frame_statistics(
            leaf(B, F, S, H, D), _rows(B, F, S, H, D), torch.rand(B, F, S, H)
        )[0],
    ),
    "delta_factors": (
        delta_rule,
        "delta_factors",
        lambda leaf: delta_rule.delta_factors(_gram(), leaf(B, F, H, D, D), None, "vdn_solve", S)[1],
    ),
    "scan": (
        delta_rule,
        "scan",
        lambda leaf: delta_rule.boundary_scan(
            _rows(B, F, H, D, D), leaf(B, F, H, D, D), torch.zeros(B, H, D, D), [0, 2, 4]
        ),
    ),
    "bridge_states": (
        linear_state,
        "bridge_states",
        lambda leaf: linear_state.linear_states(
            _rows(B, F, H, D, D), leaf(B, F, H, D, D), torch.zeros(B, H, D, D), _rows(B, F, H, D), [0] * F, [1] * F
        ),
    ),
    "readout": (
        linear_state,
        "readout",
        lambda leaf: linear_state.readout(
            _rows(B, F, H, D, D), leaf(B, F, S, H, D), _rows(B, F, S, H * D), torch.ones(D), 1e-6
        ),
    ),
}


class _KernelRan(Exception):
    """Raised in place of a kernel."""


@pytest.fixture
def refuse_kernels(monkeypatch):
    """Make every kernel's entry point raise, so that a result can only be the reference's."""

    def refuse(*arguments):
        raise _KernelRan

    for module, name, _ in ENTRIES.values():
        monkeypatch.setattr(importlib.import_module(f"{module.__name__}.triton"), name, refuse)
    monkeypatch.setattr(importlib.import_module("diffusers_h3.ops.window_attention.triton"), "merge_two", refuse)


@pytest.mark.parametrize("entry", ENTRIES)
def test_operators_follow_the_rule(entry, machine, refuse_kernels):
    """The same call reaches the kernel without gradients and, with them, the reference, which gives them."""
    machine(interpreted=True)
    call = ENTRIES[entry][2]
    with pytest.raises(_KernelRan):
        call(_rows)
    leaves = []

    def leaf(*shape):
        leaves.append(_rows(*shape, requires_grad=True))
        return leaves[-1]

    output = call(leaf)
    (gradient,) = torch.autograd.grad(output.square().sum(), leaves)
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0
    machine(interpreted=False)
    assert call(_rows).isfinite().all()


def test_merge_follows_the_rule(machine, refuse_kernels):
    """Two parts in float32 reach the kernel; one part, and float64, do not."""
    machine(interpreted=True)
    part = (torch.ones(2, 1, 4), torch.zeros(2, 1))
    output = torch.zeros(2, 1, 4)
    with pytest.raises(_KernelRan):
        merge.merge_gated([part, part], None, output)
    merge.merge_gated([part], None, output)
    assert torch.equal(output, torch.ones(2, 1, 4))
    double = tuple(tensor.double() for tensor in part)
    merge.merge_gated([double, double], None, output.zero_().double())


def test_shared_memory_is_asked_of_the_device(monkeypatch):
    """A CPU has none; a card's is what one program can opt in to."""
    asked = []

    class Properties:
        shared_memory_per_block_optin = 101_376

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or Properties)
    shared_memory = triton_support.shared_memory.__wrapped__
    assert shared_memory(torch.device("cpu")) == 0
    assert shared_memory(torch.device("cuda", 1)) == 101_376
    assert asked == [torch.device("cuda", 1)]

"""Every kernel compiled ahead of time, without a card, in the form it is launched with: does it fit the card?"""

import os
import re
import subprocess

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from diffusers_h3.ops.delta_rule import triton as delta_rule
from diffusers_h3.ops.frame_statistics import triton as frame_statistics
from diffusers_h3.ops.linear_state import triton as linear_state
from diffusers_h3.ops.short_conv import triton as short_conv
from diffusers_h3.ops.window_attention import triton as window_attention


KIB = 1024
# Compute capability and the shared memory one program may have: 1 KiB less than a multiprocessor has.
CARDS = {"sm_80": (80, 163 * KIB), "sm_86": (86, 99 * KIB), "sm_90": (90, 227 * KIB)}
KERNELS = {
    "_convolved_features_kernel": short_conv,
    "_pointwise_features_kernel": short_conv,
    "_frame_statistics_kernel": frame_statistics,
    "_delta_factors_kernel": delta_rule,
    "_scan_kernel": delta_rule,
    "_bridge_states_kernel": linear_state,
    "_readout_kernel": linear_state,
    "_merge_two_kernel": window_attention,
}
ORIGINALS = {name: getattr(module, name) for name, module in KERNELS.items()}
B, F, S, H, D = 1, 4, 16, 8, 128


class _Card:
    """A driver that names a card and has none."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


class _CompiledOnly:
    """Stands in for a kernel: a launch compiles it for its arguments and keeps the result."""

    def __init__(self, kernel, compiled):
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.compiled[self.kernel.fn.__name__] = self.kernel.warmup(*arguments, grid=grid, **options)

        return launch


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for what is compiled, shared by the tests, empty at first."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def compile_for(monkeypatch, cache):
    """A function compiling every kernel for a card and a dtype: the compiled kernels by name."""
    assert os.environ.get("TRITON_INTERPRET") != "1"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))

    def run(card, dtype, normalize=True):
        capability, limit = CARDS[card]
        monkeypatch.setattr(triton.runtime.driver, "_active", _Card(capability))
        compiled = {}
        for name, module in KERNELS.items():
            monkeypatch.setattr(module, name, _CompiledOnly(ORIGINALS[name], compiled))
            if hasattr(module, "shared_memory"):
                monkeypatch.setattr(module, "shared_memory", lambda device: limit)
        rows, states = torch.zeros(B, F, S, H, D, dtype=dtype), torch.zeros(B, F, H, D, D)
        spatial, temporal = torch.zeros(H * D, 1, 5, 5, dtype=dtype), torch.zeros(H * D, 1, 5, dtype=dtype)
        lse = torch.zeros(S, H)
        gate, decay = rows.flatten(-2), torch.zeros(B, F, H, D)
        slots = [0] * F
        short_conv.convolved_features(gate, spatial, temporal, [4, 4], H, normalize, 1e-6)
        short_conv.pointwise_features(gate, H, normalize, 1e-6)
        frame_statistics.frame_statistics(rows, rows, rows[..., 0], True)
        delta_rule.delta_factors(states, states, decay, 1.0, 1.0)
        delta_rule.scan(states, states, states[:, 0], 1, 1, 3, False)
        linear_state.bridge_states(states, states, decay, slots, slots, slots, slots, True)
        linear_state.readout(states, rows, gate, temporal[:D, 0, 0], 1e-6)
        window_attention.merge_two(rows[0, 0], lse, rows[0, 1], lse, lse, rows[0, 2])
        return compiled

    return run


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("card", CARDS)
def test_shared_memory_fits_the_card(card, dtype, compile_for):
    """At head dimension 128, the released one."""
    capability, limit = CARDS[card]
    compiled = compile_for(card, dtype)
    assert set(compiled) == set(KERNELS)
    for name, kernel in compiled.items():
        assert kernel.metadata.target.arch == capability
        assert kernel.metadata.shared <= limit, name
        assert kernel.asm["cubin"], name


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("card", CARDS)
def test_convolution_stays_in_registers(card, dtype, normalize, compile_for, tmp_path):
    """Its tile is as large as the registers of a thread allow: none of it spills to memory."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compile_for(card, dtype, normalize)["_convolved_features_kernel"].asm["cubin"])
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"REG:\d{3} STACK:0 ", usage), usage


def test_small_cards_get_fewer_stages(compile_for):
    """The kernels that keep stages in flight keep one on a small card, where a large card's would not fit."""
    small, large = (compile_for(card, torch.bfloat16) for card in ("sm_86", "sm_90"))
    for name in ("_frame_statistics_kernel", "_scan_kernel"):
        assert small[name].metadata.num_stages == 1
        assert large[name].metadata.num_stages == 3
        assert small[name].metadata.shared < large[name].metadata.shared
        assert large[name].metadata.shared > 99 * KIB


def test_half_precision_products_run_on_tensor_cores(compile_for):
    assert "f32.bf16.bf16" in compile_for("sm_90", torch.bfloat16)["_frame_statistics_kernel"].asm["ptx"]

"""The memory benchmark: what it is asked, caps, the weights' way from run to run, its report, and a toy run."""

import argparse
import contextlib
import importlib
import json
import pathlib

import pytest
import torch
from diffusers.hooks import group_offloading


ROOT = pathlib.Path(__file__).resolve().parents[2]
TOY = ["--tiny", "--layers", "2", "--text-rows", "20"]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch):
    """The script as a module; it imports its neighbours by name, and sets a variable that is put back here."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return importlib.import_module("bench_memory")


@pytest.fixture
def make_bench(bench):
    """A function making a bench of toy size with some memory, by default a CPU's."""

    def make(memory=None, *arguments):
        return bench.Bench(bench.parse_arguments([*TOY, *arguments]), memory or bench.Memory())

    return make


@pytest.fixture
def card(bench):
    """The memory of a card on which so much runs out of memory, and every limit it was given."""

    class Card(bench.Memory):
        def __init__(self, needed_gb):
            self.needed_gb, self.limits = needed_gb, []

        def limit(self, cap_gb):
            self.limits.append(cap_gb)

        def peak(self):
            return {"peak_gb": self.needed_gb - 1, "reserved_gb": self.needed_gb, "outside_gb": 0.5}

        caps = bench.CudaMemory.caps

        def run(self):
            if self.limits[-1] is not None and self.limits[-1] < self.needed_gb:
                raise torch.OutOfMemoryError("no memory left")
            return 2.5, True

    return Card


@pytest.fixture
def streams(monkeypatch, bench):
    """Streams on the CPU, which has none: what they do to weights, hooks and order, every weight moved for real."""

    class Backend:
        def __init__(self, device):
            pass

        def stream(self, stream):
            return contextlib.nullcontext()

        def current_stream(self):
            return Stream()

    class Stream:
        def synchronize(self):
            pass

    def apply(model, onload_device, offload_device, offload_type, num_blocks_per_group, use_stream):
        config = group_offloading.GroupOffloadingConfig(
            onload_device=onload_device,
            offload_device=offload_device,
            offload_type=group_offloading.GroupOffloadingType(offload_type),
            num_blocks_per_group=num_blocks_per_group,
            non_blocking=False,
            record_stream=False,
            low_cpu_mem_usage=False,
            stream=Stream() if use_stream else None,
        )
        group_offloading._apply_group_offloading(model, config)

    def transfer(group, tensor, source, default_stream):
        moves.append(tensor)
        moved = source.detach().clone()
        if group_offloading._is_torchao_tensor(tensor):
            group_offloading._swap_torchao_tensor(tensor, moved)
        else:
            tensor.data = moved

    moves = []
    monkeypatch.setattr(group_offloading, "TorchDeviceBackend", Backend)
    monkeypatch.setattr(group_offloading.ModuleGroup, "_to_cpu", staticmethod(lambda tensor, _: tensor.detach()))
    pinned = contextlib.contextmanager(lambda group: (yield group.cpu_param_dict))
    monkeypatch.setattr(group_offloading.ModuleGroup, "_pinned_memory_tensors", pinned)
    monkeypatch.setattr(group_offloading.ModuleGroup, "_transfer_tensor_to_device", transfer)
    monkeypatch.setattr(bench, "apply_group_offloading", apply)
    return moves


@pytest.fixture
def any_fp8(monkeypatch):
    """Let torchao quantise and multiply here, as on a card whose fp8 scales rows; where PyTorch's CPU code can."""
    quant_api = pytest.importorskip("torchao.quantization.quant_api")
    monkeypatch.setattr("diffusers_h3.models.quantization.cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(quant_api, "_check_hardware_support", lambda granularity: None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8:none", ("fp8", "none", False, "blocks")),
        ("bf16:none:eager", ("bf16", "none", False, "nothing")),
        ("fp8:block", ("fp8", "block", False, "blocks")),
        ("fp8:block:stream:eager", ("fp8", "block", True, "nothing")),
        ("fp8:leaf:stream", ("fp8", "leaf", True, "layers")),
        ("bf16:leaf:eager", ("bf16", "leaf", False, "nothing")),
    ],
)
def test_a_run_is_parsed(name, expected, bench):
    run = bench.parse_run(name)
    assert (run.precision, run.offload, run.use_stream, run.compiled) == expected


def test_a_decoding_is_parsed(bench):
    assert [bench.parse_run(name).tiling for name in ("vae:tiles", "vae:whole")] == [True, False]


@pytest.mark.parametrize(
    "name",
    ["fp8", "fp16:none", "fp8:none:stream", "bf16:none:stream:eager", "fp8:disk", "fp8:block:eager:stream", "vae"],
)
def test_another_run_is_refused_by_name(name, bench):
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{name}'"):
        bench.parse_run(name)


@pytest.mark.parametrize("arguments", [["--caps", "0"], ["--layers", "0"], ["--width", "1340"], ["--frames", "100"]])
def test_bad_arguments_end_before_anything_is_built(arguments, check_refused):
    check_refused(arguments)


def test_the_smallest_cap_that_a_call_ends_under_is_its_row(card, make_bench):
    """The peak of 17 GB leaves out 16; what the call then needs runs out of 24 and fits 32."""
    memory, row = card(needed_gb=30), {}
    make_bench(memory).under_a_cap(memory.run, row, 17.0)
    assert memory.limits == [24.0, None, 32.0]
    assert row == {
        "too_small_gb": [24.0],
        "s_per_call": 2.5,
        "finite": True,
        "memory_cap_gb": 32.0,
        "peak_gb": 29,
        "reserved_gb": 30,
        "outside_gb": 0.5,
    }


def test_what_fits_under_no_cap_says_so(card, make_bench, bench):
    memory, row = card(needed_gb=90), {}
    make_bench(memory, "--caps", "24", "80").under_a_cap(memory.run, row, 30.0)
    assert memory.limits == [80.0, None]
    assert row["failed"] == "does not fit: its peak is 30.0 GB or more, the largest cap 80"
    assert "s_per_call" not in row


def test_a_cap_is_a_share_of_the_card(bench, monkeypatch):
    fractions = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100e9, 150e9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for cap in (24.0, None, 200.0):
        bench.CudaMemory().limit(cap)
    assert fractions == [pytest.approx(0.16), 1.0, 1.0]
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 49.5e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 60e9)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 55e9)
    assert bench.CudaMemory().peak() == {"peak_gb": 55.0, "reserved_gb": 60.0, "outside_gb": 0.5}


def test_weights_go_from_run_to_run_and_nothing_changes(make_bench, bench, streams, any_fp8):
    """One model for all runs of a precision, without a hook of the run before, and the same prediction under each."""
    own = make_bench()
    names = ["none", "block:stream", "leaf:stream", "block", "leaf", "block:stream", "none"]
    seen, models = [], set()
    for name in names:
        run = bench.parse_run(f"fp8:{name}:eager")
        own.place(run)
        models.add(own.model)
        inputs = bench.request_inputs(own.model, 96, 160, 22, 20, "cpu")
        with torch.no_grad():
            outputs = [own.model(**inputs)[0] for _ in range(2)]
        assert torch.equal(*outputs)
        hooks = [module for module in own.model.modules() if "forward" in module.__dict__]
        seen.append((outputs[0], len(bench.groups(own.model)), len(hooks)))
    assert len(models) == 1
    for output, _, _ in seen:
        assert torch.equal(output, seen[0][0])
    counts = [groups for _, groups, _ in seen]
    # Two blocks and what is outside them; every leaf.
    assert (counts[0], counts[1], counts[3], counts[5], counts[6]) == (0, 3, 3, 3, 0)
    assert counts[2] > counts[4] > 30
    assert [hooks for _, _, hooks in seen][:2] == [0, 3]
    assert seen[-1][2] == 0


def test_another_precision_is_another_model(make_bench, bench, any_fp8):
    own = make_bench()
    weights = []
    for name in ("bf16:none:eager", "fp8:none:eager"):
        own.place(bench.parse_run(name))
        weights.append(type(own.model.transformer_blocks[0].attn.to_q.weight.data).__name__)
    assert weights == ["Tensor", "Float8Tensor"]


def test_running_out_of_memory_leaves_no_group_on_the_card(make_bench, bench, streams):
    own = make_bench()
    own.place(bench.parse_run("bf16:block:stream:eager"))
    home = {name: weight.data_ptr() for name, weight in own.model.transformer_blocks[1].named_parameters()}
    for group in bench.groups(own.model):
        group.onload_()
    moved = {name: weight.data_ptr() for name, weight in own.model.transformer_blocks[1].named_parameters()}
    assert not home.items() & moved.items()
    own.recover()
    assert {name: weight.data_ptr() for name, weight in own.model.transformer_blocks[1].named_parameters()} == home


def test_weights_that_stay_on_the_card_go_with_their_model(make_bench, bench, streams, monkeypatch):
    def stuck(group):
        raise RuntimeError("cannot be moved")

    own = make_bench()
    own.place(bench.parse_run("bf16:block:stream:eager"))
    monkeypatch.setattr(group_offloading.ModuleGroup, "offload_", stuck)
    own.recover()
    assert (own.model, own.placed) == (None, None)


@pytest.mark.slow
@pytest.mark.parametrize(("offload", "graphs"), [("block:stream", 2), ("block", 2), ("leaf:stream", 4)])
def test_what_is_compiled_is_whole_under_the_hooks(offload, graphs, make_bench, bench, streams, monkeypatch):
    """Blocks of two kinds, or linear layers of four shapes, a graph each: hooks break none, and calls share them."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    own = make_bench()
    inputs, seen = None, []
    for name in (f"bf16:{offload}", f"bf16:{offload}:eager"):
        own.place(bench.parse_run(name))
        inputs = inputs or bench.request_inputs(own.model, 96, 160, 124, 20, "cpu")
        with torch.no_grad():
            outputs = [own.model(**inputs)[0] for _ in range(2)]
        assert torch.equal(*outputs)
        seen.append(outputs[0])
    torch.testing.assert_close(*seen, atol=2e-2, rtol=2e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert torch._dynamo.utils.counters["graph_break"] == {}
    torch._dynamo.reset()


def test_a_toy_run_end_to_end(bench, tmp_path):
    runs = ["bf16:none:eager", "bf16:block:eager", "vae:tiles", "vae:whole", "bf16:leaf:eager"]
    assert bench.main([*TOY, "--frames", "22", "39", "--runs", *runs, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "memory.json").read_text())
    assert [(row["offload"], row["frames"]) for row in report["runs"]] == [
        (offload, frames) for offload in ("none", "block", "leaf") for frames in (22, 39)
    ]
    assert [(row["tiling"], row["frames"]) for row in report["decoding"]] == [
        (True, 22), (True, 39), (False, 22), (False, 39),
    ]  # fmt: skip
    for row in (*report["runs"], *report["decoding"]):
        assert row["finite"]
        assert row["s_per_call"] > 0
        assert row["memory_cap_gb"] is None
    # 96 × 160 pixels are 15 rows a latent frame; 20 rows of text, two audio channels at 40 Hz.
    assert [row["rows"] for row in report["runs"]][:2] == [20 + 7 * 15 + 2 * 37, 20 + 12 * 15 + 2 * 65]
    text = (tmp_path / "memory.md").read_text()
    assert "| bf16, offload by block, eager | 39 | no cap |" in text
    assert "| whole frames | 22 | no cap |" in text


def test_no_row_is_begun_that_ends_too_late(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "random_transformer", None)
    runs = ["fp8:none", "vae:tiles"]
    assert bench.main([*TOY, "--minutes", "0", "--frames", "345", "--runs", *runs, "--output", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "memory.json").read_text())
    for row in (*report["runs"], *report["decoding"]):
        assert row["failed"].startswith("not run: about")
    assert "| fp8, no offload, blocks compiled | 345 | not run | – |" in (tmp_path / "memory.md").read_text()


def test_what_a_row_takes_depends_on_where_the_weights_are(make_bench, bench):
    own = make_bench()
    run, stream = bench.parse_run("fp8:block"), bench.parse_run("fp8:block:stream")
    # Build, place and compile; two calls, each with the moving.
    assert own.expected_seconds(run, 345) == 35 + 40 + 60 + 2 * (11 + 20)
    assert own.expected_seconds(stream, 345) == 35 + 40 + 60 + 2 * 11
    own.placed, own.compiled = stream, {("blocks", "fp8", 345)}
    assert own.expected_seconds(stream, 345) == 2 * 11
    assert own.expected_seconds(bench.parse_run("fp8:leaf:stream:eager"), 345) == 2 * 18
    assert own.expected_seconds(run, 69) == pytest.approx(40 + 15 + 2 * (11 / 5 + 20))


def test_a_failing_run_costs_no_other(bench, tmp_path, monkeypatch):
    """What is measured is on disk before the next run starts; weights that cannot be placed are tried once."""
    seen = []

    def place(own, run):
        seen.append((run.name, len(json.loads((tmp_path / "memory.json").read_text())["runs"]) if seen else 0))
        own.not_placed = run
        if run.use_stream:
            raise ValueError("no streams here")
        own.model, own.placed, own.not_placed = torch.nn.Identity(), run, None

    def under_a_cap(own, function, row, peak_gb):
        row |= {"s_per_call": 1.0, "finite": True, "memory_cap_gb": 24.0, **own.memory.peak()}

    monkeypatch.setattr(bench.Bench, "place", place)
    monkeypatch.setattr(bench.Bench, "under_a_cap", under_a_cap)
    rows = {"position_ids": torch.zeros(7, 3)}
    monkeypatch.setattr(bench, "request_inputs", lambda *arguments: rows)
    monkeypatch.setattr(torch.nn.Identity, "forward", lambda own, **inputs: (torch.zeros(1), torch.zeros(1)))
    runs = ["fp8:block:stream", "fp8:block"]
    assert bench.main([*TOY, "--frames", "22", "39", "--runs", *runs, "--output", str(tmp_path)]) == 1
    assert seen == [("fp8:block:stream", 0), ("fp8:block", 2), ("fp8:block", 3)]
    failed, skipped, first, second = json.loads((tmp_path / "memory.json").read_text())["runs"]
    assert failed["failed"].endswith("ValueError: no streams here\n")
    assert skipped["failed"].startswith("not run: its weights could not be placed")
    assert [first["memory_cap_gb"], second["memory_cap_gb"]] == [24.0, 24.0]
    assert "| fp8, offload by block, blocks compiled | 22 | 24 | 1.00 |" in (tmp_path / "memory.md").read_text()
    assert (
        "with streams, blocks compiled, 22 frames: ValueError: no streams here" in (tmp_path / "memory.md").read_text()
    )
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []

"""Full-size models that several GPUs share: equal to one GPU, seconds per call, and the communication in it.

    torchrun --nproc-per-node 8 benchmarks/bench_parallel.py --output outputs/parallel --runs hybrid:fp8 dense:bf16

writes `parallel.json` and `parallel.md` into the output folder, after every run; `--nproc-per-node 1` measures without
sharing. A run is one of `bench_dit.py`, with FlashInfer for the dense model, or `wan:bf16`, Wan 2.1 1.3B at
832×480×81. First, one full-width layer of the MiniMax-H3 models asked for is compared with itself on one GPU, in
float32 and in bfloat16, where both are compared with float32. Then every run is timed, a call taking as long as its
slowest rank; profiled; and for hybrid runs timed again with every exchange waited for as soon as it begins. `--tiny`
runs the same on small models.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
import types

import torch
import torch.distributed as dist
from bench_attention import environment
from bench_dit import (
    Run,
    heading,
    make_parser,
    number,
    parse_run,
    parse_timing,
    profile_kernels,
    release,
    table,
    write_texts,
)
from diffusers import ContextParallelConfig
from full_size import TINY, TINY_WAN, WAN, random_transformer, random_wan, request_inputs, sizes
from parallel_cost_model import HEADS, Machine, diffusers_shares, predict

from diffusers_h3 import FlashInferProcessor, HybridAttnProcessor
from diffusers_h3.hybrid import parallel


FLOAT32_LIMIT = 2e-5
# How much further from float32 the shared layer may be than the layer alone, both in bfloat16.
BFLOAT16_RATIO = 1.25
WAN_RUN = Run("wan:bf16", hybrid=False, fp8=False, fp8_attention=False, compiled=True)


def parse_shared_run(name: str) -> Run:
    """Return the run of that name, Wan's or one of `bench_dit.py`."""
    return WAN_RUN if name == WAN_RUN.name else parse_run(name)


def num_heads(run: Run, tiny: bool) -> int:
    """Return the attention heads of a run's model."""
    if run is WAN_RUN:
        return (TINY_WAN if tiny else WAN)["num_attention_heads"]
    return TINY["num_attention_heads"] if tiny else HEADS


def share(model: torch.nn.Module) -> None:
    """Let all processes share the model's calls."""
    if dist.get_world_size() > 1:
        model.enable_parallelism(
            config=ContextParallelConfig(ulysses_degree=dist.get_world_size(), ulysses_anything=True)
        )


@contextlib.contextmanager
def waiting_at_once():
    """Have every exchange of a hybrid layer waited for where it begins, so that nothing runs beside it."""
    real = parallel.collectives

    def waiting(collective):
        return lambda *arguments: real.wait_tensor(collective(*arguments))

    names = ("all_to_all_single", "all_gather_tensor", "all_reduce")
    parallel.collectives = types.SimpleNamespace(
        AsyncCollectiveTensor=real.AsyncCollectiveTensor, **{name: waiting(getattr(real, name)) for name in names}
    )
    try:
        yield
    finally:
        parallel.collectives = real


def of_all_ranks(value: float) -> list[float]:
    """Return the figure of every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def relative_error(actual: tuple, expected: tuple) -> float:
    """Return the largest relative error of any output on any rank."""
    errors = [
        ((one.double() - other.double()).norm() / other.double().norm()).item()
        for one, other in zip(actual, expected, strict=True)
    ]
    return max(of_all_ranks(max(errors)))


@torch.no_grad()
def compare_layer(arguments: argparse.Namespace, hybrid: bool, device: str) -> dict:
    """Compare one layer that the ranks share with the same layer on each of them alone."""

    def outputs(dtype, shared):
        model = random_transformer(hybrid, False, device, 1, **sizes(hybrid, arguments.tiny))
        if dtype == torch.float32:
            model = model.float()
        if shared:
            share(model)
        inputs = request_inputs(
            model, arguments.height, arguments.width, min(arguments.frames), arguments.text_rows, device
        )
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].to(dtype)
        return model(**inputs)

    alone, exact = (outputs(dtype, False) for dtype in (torch.bfloat16, torch.float32))
    together = outputs(torch.bfloat16, True)
    row = {
        "model": "hybrid" if hybrid else "dense",
        "frames": min(arguments.frames),
        "float32_error": relative_error(outputs(torch.float32, True), exact),
        "bfloat16_error_alone": relative_error(alone, exact),
        "bfloat16_error_shared": relative_error(together, exact),
    }
    row["equal"] = (
        row["float32_error"] <= FLOAT32_LIMIT
        and row["bfloat16_error_shared"] <= BFLOAT16_RATIO * row["bfloat16_error_alone"]
    )
    return row


def build(arguments: argparse.Namespace, run: Run, frames: int, device: str) -> tuple[torch.nn.Module, dict]:
    """Return a model that the ranks share and the arguments of a call, the same on all."""
    if run is WAN_RUN:
        torch.manual_seed(0)
        model, inputs = random_wan(device, arguments.tiny)
        inputs["return_dict"] = False
    else:
        config = sizes(run.hybrid, arguments.tiny)
        model = random_transformer(run.hybrid, run.fp8, device, arguments.layers, **config)
        inputs = request_inputs(model, arguments.height, arguments.width, frames, arguments.text_rows, device)
    if run.hybrid:
        model.set_attn_processor(HybridAttnProcessor(backend=arguments.backend, fp8=run.fp8_attention))
    elif device == "cuda":
        model.set_attn_processor(FlashInferProcessor())
    share(model)
    return model, inputs


@torch.no_grad()
def measure(arguments: argparse.Namespace, run: Run, frames: int, device: str) -> dict:
    """Time one model; a call begins on all ranks together and ends with the last."""
    model, inputs = build(arguments, run, frames, device)
    row = {
        "run": run.name,
        "frames": 81 if run is WAN_RUN else frames,
        "compiled": run.compiled and not arguments.eager,
    }
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def compile_blocks():
        torch._dynamo.reset()
        if row["compiled"]:
            model.compile_repeated_blocks(fullgraph=True)

    def call():
        dist.barrier()
        started = time.perf_counter()
        outputs = model(**inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = max(of_all_ranks(time.perf_counter() - started))
        return seconds, all(of_all_ranks(all(bool(output.isfinite().all()) for output in outputs)))

    compile_blocks()
    row["first_call_s"] = call()[0]
    # Diffusers' sharding hook is compiled with the first block, and once more for what it remembers of its first call.
    call()
    samples, finite = zip(*(call() for _ in range(arguments.repeats)), strict=True)
    row |= {"s_per_call": statistics.median(samples), "samples": list(samples), "finite": all(finite)}
    if device == "cuda":
        row["peak_gb"] = max(of_all_ranks(torch.cuda.max_memory_allocated() / 1e9))
    kernels = profile_kernels(lambda: model(**inputs), device)
    # A collective's kernel also waits for the other ranks, and may run beside others.
    sent = sum(milliseconds for name, _, milliseconds in kernels if name.startswith("ncclDevKernel"))
    row["communication_ms"], row["kernels"] = of_all_ranks(sent), kernels
    if run.hybrid and dist.get_world_size() > 1:
        with waiting_at_once():
            compile_blocks()
            call()
            row["s_per_call_without_overlap"] = statistics.median(call()[0] for _ in range(arguments.repeats))
    return row


def predicted(arguments: argparse.Namespace, row: dict) -> dict[str, float]:
    """Return what the cost model says of VDN-H3 in fp8; its dense model is the stock one, which is not run here."""
    if arguments.tiny or (row["run"], row["frames"], arguments.layers) != ("hybrid:fp8", 345, 50):
        return {}
    machine = Machine(gpus_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    return {"predicted_s": predict(dist.get_world_size(), machine).total}


def markdown(report: dict) -> str:
    """Return the report's tables."""
    lines = heading(report)
    if report["layers"]:
        lines += ["One full-width layer, relative errors against float32 on one GPU:", ""]
        keys = ("float32_error", "bfloat16_error_alone", "bfloat16_error_shared")
        body = [
            [row["model"], str(row["frames"]), *(f"{row[key]:.1e}" for key in keys), "yes" if row["equal"] else "NO"]
            for row in report["layers"]
        ]
        header = ["model", "frames", "float32, shared", "bfloat16, alone", "bfloat16, shared", "equal"]
        lines += [*table(header, body), ""]
    header = [
        "run",
        "frames",
        "s per call",
        "predicted",
        "without overlap",
        "communication ms",
        "peak GB",
        "first call s",
    ]
    body = []
    for row in report["runs"]:
        cells = [row["run"], str(row["frames"]), number(row, "s_per_call", 3), number(row, "predicted_s", 3)]
        cells.append(number(row, "s_per_call_without_overlap", 3))
        sent = row["communication_ms"]
        cells.append(f"{min(sent):.0f}–{max(sent):.0f}")
        body.append([*cells, number(row, "peak_gb", 1), number(row, "first_call_s", 1)])
    return "\n".join(lines + table(header, body)) + "\n"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, frames=[345], output="outputs/parallel")
    runs = ["hybrid:fp8", "dense:bf16"]
    parser.add_argument("--runs", type=parse_shared_run, nargs="+", default=[parse_shared_run(name) for name in runs])
    arguments = parse_timing(parser, argv)
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with `torchrun --nproc-per-node N benchmarks/bench_parallel.py …`")
    for run in arguments.runs:
        heads, ranks = num_heads(run, arguments.tiny), int(os.environ["WORLD_SIZE"])
        if not ((run.hybrid and ranks <= heads) or diffusers_shares(heads, ranks)):
            parser.error(f"{run.name}: {heads} heads cannot be shared by {ranks} ranks")
    return arguments


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    settings = {key: getattr(arguments, key) for key in ("layers", "text_rows", "repeats", "backend", "tiny")}
    report = {
        "environment": environment(torch.device(device)),
        "settings": {"GPUs": dist.get_world_size(), "canvas": f"{arguments.width}×{arguments.height}", **settings},
        "layers": [],
        "runs": [],
    }

    def keep(rows: list[dict], row: dict) -> None:
        rows.append(row)
        if dist.get_rank() == 0:
            write_texts(
                arguments.output, {"parallel.json": json.dumps(report, indent=1), "parallel.md": markdown(report)}
            )
            print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)
        release(device)

    for hybrid in dict.fromkeys(run.hybrid for run in arguments.runs if run is not WAN_RUN):
        keep(report["layers"], compare_layer(arguments, hybrid, device))
    for run in arguments.runs:
        for frames in arguments.frames[: 1 if run is WAN_RUN else None]:
            row = measure(arguments, run, frames, device)
            keep(report["runs"], row | predicted(arguments, row))
    if dist.get_rank() == 0:
        print(markdown(report))
    dist.destroy_process_group()
    return 0 if all(row["equal"] for row in report["layers"]) else 1


if __name__ == "__main__":
    sys.exit(main())

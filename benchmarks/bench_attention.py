"""Time dense attention by itself at Wan's and MiniMax-H3's shapes, one row per backend, shape and batch.

    python benchmarks/bench_attention.py --output results/attention

writes `attention.json`, `attention.md` and `attention.png` (with matplotlib). Backends take turns, starting with
another one every repeat, and the median counts. FlashInfer compiles each kernel on first use, a minute or more.
"""

import argparse
import json
import math
import pathlib
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffusers_h3.ops.prefill import PrefillOptions, prefill_attention, prefill_refusal
from diffusers_h3.ops.prefill.machine import machine_refusal


@dataclass(frozen=True)
class Shape:
    """Rows of the query and key, heads and head dimension of one attention call."""

    queries: int
    keys: int
    heads: int
    head_dim: int = 128

    def operations(self, batch: int) -> float:
        return 4.0 * batch * self.heads * self.queries * self.keys * self.head_dim


SHAPES = {
    "Wan 1.3B 832×480×81 self": Shape(32_760, 32_760, 12),
    "Wan 1.3B 832×480×81 text": Shape(32_760, 512, 12),
    "Wan 14B 1280×720×81 self": Shape(75_600, 75_600, 40),
    "MiniMax-H3 1344×768×124": Shape(37_976, 37_976, 56),
    "MiniMax-H3 1344×768×345": Shape(104_512, 104_512, 56),
}

SMALL_SHAPES = {"small self": Shape(96, 96, 2), "small text": Shape(96, 40, 2)}


def _sdpa(backend: SDPBackend) -> Callable:
    def attend(query, key, value):
        with sdpa_kernel(backend):
            rows = (x.transpose(1, 2) for x in (query, key, value))
            return F.scaled_dot_product_attention(*rows).transpose(1, 2)

    return attend


def _flashinfer(**options) -> Callable:
    options = PrefillOptions(**options)

    def attend(query, key, value):
        refusal = machine_refusal(options) or prefill_refusal(query, key, value, None, False, None, options)
        if refusal is not None:
            raise ValueError(refusal)
        return prefill_attention(query, key, value, options=options)

    return attend


BACKENDS: dict[str, Callable] = {
    "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlashInfer single fa2": _flashinfer(prefill="single", kernel="fa2"),
    "FlashInfer single fa3": _flashinfer(prefill="single", kernel="fa3"),
    "FlashInfer cuDNN": _flashinfer(prefill="cudnn"),
    "FlashInfer fp8": _flashinfer(prefill="single", kernel="fa3", fp8=True),
}
CPU_BACKENDS = {"SDPA math": _sdpa(SDPBackend.MATH), "SDPA flash": _sdpa(SDPBackend.FLASH_ATTENTION)}


def seconds(function: Callable, device: torch.device) -> float:
    """Time one call, from its start on the device to its end."""
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def time_in_turns(functions: dict[str, Callable], device: torch.device, repeats: int, warmups: int = 2) -> dict:
    """Return each name's `median_s` and `all_s`, or its `error`; the first to run changes every repeat."""
    results: dict[str, dict] = {}
    for name, function in functions.items():
        try:
            for _ in range(warmups):
                function()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            results[name] = {"all_s": []}
        except (RuntimeError, ValueError) as error:
            results[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    names = [name for name, result in results.items() if "error" not in result]
    for repeat in range(repeats):
        turn = repeat % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            results[name]["all_s"].append(seconds(functions[name], device))
    for name in names:
        results[name]["median_s"] = statistics.median(results[name]["all_s"])
    return results


def measure(shape: Shape, batch: int, device: torch.device, repeats: int, backends: dict[str, Callable]) -> dict:
    """Time every backend on the same random bfloat16 inputs."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(batch, rows, shape.heads, shape.head_dim) for rows in (shape.queries, shape.keys, shape.keys)]
    inputs = [torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for size in sizes]
    functions = {name: (lambda attend=attend: attend(*inputs)) for name, attend in backends.items()}
    with torch.inference_mode():
        results = time_in_turns(functions, device, repeats)
    for result in results.values():
        if "median_s" in result:
            result["tflops"] = shape.operations(batch) / result["median_s"] / 1e12
    return results


def environment(device: torch.device) -> dict:
    """Return what a reader needs to judge the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("torch", "triton", "diffusers", "torchao", "flashinfer-python", "nvidia-cudnn-frontend"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        **versions,
    }


def markdown(report: dict) -> str:
    """Return one table row per shape and batch, milliseconds (TFLOP/s)."""
    names = list(dict.fromkeys(name for row in report["rows"] for name in row["results"]))
    lines = [", ".join(f"{key} {value}" for key, value in report["environment"].items() if value), ""]
    lines += ["| shape | batch | " + " | ".join(names) + " |", "| --- | --- |" + " --- |" * len(names)]
    for row in report["rows"]:
        cells = []
        for name in names:
            result = row["results"].get(name, {})
            if "median_s" in result:
                cells.append(f"{result['median_s'] * 1000:.2f} ({result['tflops']:.0f})")
            else:
                cells.append("–")
        lines.append(f"| {row['shape']} | {row['batch']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(report: dict, path: pathlib.Path) -> bool:
    """Draw throughput by shape at batch one; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row["batch"] == 1]
    names = list(dict.fromkeys(name for row in rows for name in row["results"]))
    figure, axes = pyplot.subplots(figsize=(10, 4), layout="constrained")
    for index, name in enumerate(names):
        heights = [row["results"].get(name, {}).get("tflops", math.nan) for row in rows]
        axes.bar(
            [place + index * 0.8 / len(names) for place in range(len(rows))], heights, 0.8 / len(names), label=name
        )
    axes.set_xticks([place + 0.4 for place in range(len(rows))], [row["shape"] for row in rows], fontsize=8)
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("results/attention"), help="without suffix"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shapes", nargs="+", help="parts of shape names; default: all")
    parser.add_argument("--max-petaflop", type=float, default=5.0, help="leave out calls with more work than this")
    parser.add_argument("--small", action="store_true", help="toy shapes, on the CPU where there is no card")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.small:
        parser.error("no CUDA device; `--small` runs toy shapes on the CPU")
    backends = BACKENDS if device.type == "cuda" else CPU_BACKENDS

    report = {"environment": environment(device), "rows": []}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for name, shape in (SMALL_SHAPES if arguments.small else SHAPES).items():
        if arguments.shapes and not any(part in name for part in arguments.shapes):
            continue
        for batch in arguments.batches:
            if shape.operations(batch) > arguments.max_petaflop * 1e15:
                continue
            results = measure(shape, batch, device, arguments.repeats, backends)
            report["rows"].append({"shape": name, "batch": batch, "results": results})
            # Written as it goes: a run that is cut short keeps what it measured.
            arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1))
            print(markdown({"environment": {}, "rows": report["rows"][-1:]}).splitlines()[-1], flush=True)
    arguments.output.with_suffix(".md").write_text(markdown(report))
    if not plot(report, arguments.output.with_suffix(".png")):
        print("No plot: matplotlib is not installed (`pip install 'diffusers-h3[notebooks]'`).")
    print(markdown(report))


if __name__ == "__main__":
    main()

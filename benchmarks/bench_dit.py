"""Seconds per transformer call and peak memory of full-size MiniMax-H3 models with random weights.

    python benchmarks/bench_dit.py --output outputs/dit --runs dense:bf16 dense:bf16:eager hybrid:fp8 --profile

writes `dit.json`, `dit.md` and `dit.png` (with matplotlib) into the output folder, after every run. A run is
`model:precision[:attention][:eager]`: model `dense` (stock Diffusers on its default attention) or `hybrid` (VDN-H3),
precision of the linear layers `bf16` or `fp8`, attention `bf16` (default) or `fp8` (hybrid only), blocks compiled
unless `eager`. All runs share one process and one machine; every model is built, compiled block by block, warmed up,
timed (median) and released, or kept for the next run if that has the same weights. `--frames 124 345` times every run
at both lengths and reports how the time grows with the rows. `--tiny` runs the same code on a small model.
"""

import argparse
import gc
import itertools
import json
import math
import pathlib
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_attention import environment
from full_size import random_transformer, request_inputs, sizes

from diffusers_h3 import HybridAttnProcessor


# Which part of a call a kernel belongs to: the first pattern found in its name. Inductor names a kernel after all it
# fused, convolutions and products included, so its prefix comes first; an attention kernel may also say `gemm` or
# `fprop`. Branch features are convolutions with SiLU and norm in one kernel; a spatial convolution is a library's own.
# `nvjet` is cuBLAS from Hopper on; its type letters start with `q` for fp8 operands.
PARTS = {
    "pointwise (Inductor)": r"^triton_(poi|red|per|for|unk)_",
    "merge": r"^_merge|MergeState",
    "attention": r"(?i)flashinfer|flash|fmha|sdpa|scaled_dot_product|PrefillWithKVCache",
    "branch features": r"^_\w+_features",
    "spatial convolution": r"(?i)conv(?!ert)|fprop",
    "statistics": r"^_frame_statistics",
    "delta factors": r"^_delta_factors",
    "scans": r"^_scan|^_bridge",
    "readout": r"^_readout",
    "fp8 matrix products": r"(?i)nvjet_[a-z0-9]+_q|f8f8|_scaled_mm|(gemm|cutlass).*(e4m3|float8|fp8)",
    "other matrix products": r"(?i)nvjet|gemm|gemv|cutlass|cublas|splitK|^triton_tem_|::(add|b|badd)?mm$",
}
OTHER = "other"
NOT_PROFILED = "not profiled"


@dataclass(frozen=True)
class Run:
    """One model to time, as named on the command line."""

    name: str
    hybrid: bool
    fp8: bool
    fp8_attention: bool
    compiled: bool


def parse_run(name: str) -> Run:
    """Return the run that `model:precision[:attention][:eager]` names."""
    match = re.fullmatch(r"(dense|hybrid):(bf16|fp8)(?::(bf16|fp8))?(:eager)?", name)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{name!r} is no run: `model:precision[:attention][:eager]` with model dense or hybrid, precision and "
            "attention bf16 or fp8, such as hybrid:fp8:bf16:eager"
        )
    model, precision, attention, eager = match.groups()
    if model == "dense" and attention == "fp8":
        raise argparse.ArgumentTypeError(f"{name!r}: the stock processor has no fp8 attention, only hybrid runs have")
    return Run(name, model == "hybrid", precision == "fp8", attention == "fp8", eager is None)


def parse_frames(text: str) -> int:
    """Return a number of pixel frames that MiniMax-H3 has, 17n + 5."""
    frames = int(text)
    if frames < 22 or frames % 17 != 5:
        lower = max(22, (frames - 5) // 17 * 17 + 5)
        raise argparse.ArgumentTypeError(f"{frames} frames are not 17n + 5; the nearest are {lower} and {lower + 17}")
    return frames


def part_of(kernel: str) -> str:
    """Return the part of a call that a kernel belongs to."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, kernel)), OTHER)


def breakdown(kernels: list[list]) -> dict[str, float]:
    """Sum `[name, launches, milliseconds]` by part, the longest first; nothing is left out."""
    parts: dict[str, float] = {}
    for name, _, milliseconds in kernels:
        parts[part_of(name)] = parts.get(part_of(name), 0.0) + milliseconds
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def profile_kernels(function: Callable, device: str) -> list[list]:
    """Return `[name, launches, milliseconds]` of every kernel of one call, the longest first; operators on a CPU."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if device == "cuda" else activity.CPU]) as profiler:
        function()
        if device == "cuda":
            torch.cuda.synchronize()
    attribute = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    kernels = [[event.key, event.count, getattr(event, attribute) / 1e3] for event in profiler.key_averages()]
    return sorted((kernel for kernel in kernels if kernel[2] > 0), key=lambda kernel: -kernel[2])


def release(device: str) -> None:
    """Give back what the last run held."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def measure(arguments: argparse.Namespace, run: Run, frames: int, device: str, row: dict, kept: dict) -> None:
    """Time and, if asked, profile one model at one length; every figure enters `row` once it is known.

    `kept` holds the last model, which the next run takes if it has the same weights.
    """
    started = time.perf_counter()
    weights = (run.hybrid, run.fp8, run.compiled)
    if weights not in kept:
        kept.clear()
        release(device)
        config = sizes(run.hybrid, arguments.tiny)
        kept[weights] = random_transformer(run.hybrid, run.fp8, device, arguments.layers, **config)
    model = kept[weights]
    if run.hybrid:
        model.set_attn_processor(HybridAttnProcessor(backend=arguments.backend, fp8=run.fp8_attention))
    row["build_s"] = time.perf_counter() - started
    if device == "cuda":
        row["weights_gb"] = torch.cuda.memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    inputs = request_inputs(model, arguments.height, arguments.width, frames, arguments.text_rows, device)
    row["rows"] = inputs["position_ids"].shape[0]
    if run.compiled and not arguments.eager:
        options = {"coordinate_descent_tuning": True} if arguments.tuned else None
        model.compile_repeated_blocks(fullgraph=True, options=options)

    def call():
        started = time.perf_counter()
        video, audio = model(**inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, bool(video.isfinite().all() and audio.isfinite().all())

    row["first_call_s"] = call()[0]
    print(f"{run.name}, {frames} frames: first call {row['first_call_s']:.1f} s", flush=True)
    samples, finite = zip(*(call() for _ in range(arguments.repeats)), strict=True)
    row |= {"s_per_call": statistics.median(samples), "samples": list(samples), "finite": all(finite)}
    if device == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    if arguments.profile:
        row["kernels"] = profile_kernels(lambda: model(**inputs), device)
        row["parts_ms"] = breakdown(row["kernels"])


def growth(rows: list[dict]) -> list[dict]:
    """Return, for every run timed at several lengths, the exponent of the rows that its time grows with."""
    result = []
    for name in dict.fromkeys(row["run"] for row in rows):
        timed = sorted(
            (row for row in rows if row["run"] == name and "s_per_call" in row), key=lambda row: row["rows"]
        )
        for short, long in itertools.pairwise(timed):
            if long["rows"] > short["rows"]:
                exponent = math.log(long["s_per_call"] / short["s_per_call"]) / math.log(long["rows"] / short["rows"])
                result.append({"run": name, "frames": [short["frames"], long["frames"]], "exponent": exponent})
    return result


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def number(row: dict, key: str, digits: int) -> str:
    """Return a figure of a row, or a dash where it has none."""
    return f"{row[key]:.{digits}f}" if key in row else "–"


def _ratio(row: dict, base: dict | None) -> str:
    if base is None or "s_per_call" not in base or "s_per_call" not in row:
        return "–"
    return f"{base['s_per_call'] / row['s_per_call']:.2f}×"


def heading(report: dict) -> list[str]:
    """Return the lines that say what a report was made on and with."""
    settings = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in report["settings"].items())
    return [", ".join(f"{key} {value}" for key, value in report["environment"].items() if value), "", settings, ""]


def markdown(report: dict) -> str:
    """Return the report's tables: every run beside the dense ones of its length, growth, parts, and what failed."""
    rows = report["runs"]
    dense = {(row["run"], row["frames"]): row for row in rows if row["run"].startswith("dense")}
    names = list(dict.fromkeys(name for name, _ in dense))
    header = ["run", "frames", "rows", "s per call", *(f"times as fast as {name}" for name in names)]
    body = []
    for row in rows:
        cells = [row["run"], str(row["frames"]), str(row.get("rows", "–"))]
        cells.append(number(row, "s_per_call", 3) if "s_per_call" in row else "failed")
        cells += [_ratio(row, dense.get((name, row["frames"]))) for name in names]
        body.append([*cells, *(number(row, key, 1) for key in ("peak_gb", "weights_gb", "first_call_s"))])
    lines = heading(report)
    lines += table([*header, "peak GB", "weights GB", "first call s"], body)
    if report["growth"]:
        lines += ["", "Time grows with the rows to the power of:", ""]
        body = [
            [each["run"], "{} to {}".format(*each["frames"]), f"{each['exponent']:.3f}"] for each in report["growth"]
        ]
        lines += table(["run", "frames", "exponent"], body)
    profiled = [row for row in rows if "parts_ms" in row]
    if profiled:
        lines += ["", "Milliseconds of one profiled call by part:", ""]
        parts = [part for part in (*PARTS, OTHER) if any(part in row["parts_ms"] for row in profiled)]
        body = [[part, *(f"{row['parts_ms'].get(part, 0.0):.1f}" for row in profiled)] for part in parts]
        body.append(["all", *(f"{sum(row['parts_ms'].values()):.1f}" for row in profiled)])
        lines += table(["part", *(f"{row['run']}, {row['frames']} frames" for row in profiled)], body)
    for row in rows:
        if "failed" in row:
            lines += ["", f"{row['run']}, {row['frames']} frames: {row['failed'].strip().splitlines()[-1]}"]
    return "\n".join(lines) + "\n"


def bars(report: dict) -> tuple[list[str], dict[str, list[float]]]:
    """Return the label of every timed run and its seconds by part; all of it is one part where none was profiled."""
    timed = [row for row in report["runs"] if "s_per_call" in row]
    labels = [f"{row['run']}\n{row['frames']} frames" for row in timed]
    # The profiled call's shares of the median, since the profiler's own call is not the one that is timed.
    shares = [
        {part: value / sum(row["parts_ms"].values()) for part, value in row["parts_ms"].items()}
        if row.get("parts_ms")
        else {NOT_PROFILED: 1.0}
        for row in timed
    ]
    parts = [part for part in (*PARTS, OTHER, NOT_PROFILED) if any(part in share for share in shares)]
    heights = {
        part: [share.get(part, 0.0) * row["s_per_call"] for share, row in zip(shares, timed, strict=True)]
        for part in parts
    }
    return labels, heights


def plot(report: dict, path: pathlib.Path) -> bool:
    """Draw seconds per call, split into parts; False without matplotlib or anything to draw."""
    labels, heights = bars(report)
    try:
        import matplotlib
    except ImportError:
        return False
    if not labels:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2 + 1.5 * len(labels), 5), layout="constrained")
    bottom = [0.0] * len(labels)
    # A part has the same colour in every plot.
    colors = dict(zip((*PARTS, OTHER, NOT_PROFILED), pyplot.colormaps["tab20"].colors, strict=False))
    for part, values in heights.items():
        axes.bar(labels, values, 0.6, bottom=bottom, label=part, color=colors[part])
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axes.bar_label(axes.containers[-1], [f"{value:.2f}" for value in bottom])
    axes.set_ylabel("s per transformer call")
    axes.tick_params(axis="x", labelsize=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def write_texts(folder: pathlib.Path, texts: dict[str, str]) -> None:
    """Write files into a folder, each in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.part").write_text(text, encoding="utf-8")
        (folder / f"{name}.part").replace(folder / name)


def write(report: dict, folder: pathlib.Path) -> bool:
    """Write the report as JSON, Markdown and plot, each in one step; whether there is a plot."""
    write_texts(folder, {"dit.json": json.dumps(report, indent=1), "dit.md": markdown(report)})
    return plot(report, folder / "dit.png")


def make_parser(description: str, frames: list[int], output: str) -> argparse.ArgumentParser:
    """Return a parser of the options that every benchmark of the whole model takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--height", type=int, default=768)
    parser.add_argument("--width", type=int, default=1344)
    parser.add_argument("--frames", "--num-frames", type=parse_frames, nargs="+", default=frames)
    parser.add_argument("--text-rows", type=int, default=200)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--backend", default="auto", help="window backend of the hybrid model")
    parser.add_argument("--tiny", action="store_true", help="small models and canvas, to test the script")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path(output), help="a folder")
    return parser


def parse_clip(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parse and end with an error where the canvas is none that MiniMax-H3 has."""
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        arguments.height, arguments.width = 96, 160
    if arguments.height % 32 or arguments.width % 32:
        parser.error(f"height and width must be multiples of 32, got {arguments.height} and {arguments.width}")
    return arguments


def parse_timing(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Add the options of every benchmark that times calls, parse, and end with an error for numbers below 1."""
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="compile the blocks of no run")
    arguments = parse_clip(parser, argv)
    if arguments.repeats < 1 or arguments.layers < 1:
        parser.error(f"`--repeats` and `--layers` must be at least 1, got {arguments.repeats} and {arguments.layers}")
    return arguments


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, frames=[345], output="outputs/dit")
    runs = ["dense:bf16", "hybrid:bf16", "hybrid:fp8", "hybrid:fp8:fp8"]
    parser.add_argument("--runs", type=parse_run, nargs="+", default=[parse_run(name) for name in runs])
    parser.add_argument("--tuned", action="store_true", help="let Inductor search the tiles of its kernels")
    parser.add_argument("--profile", action="store_true", help="add the time per kernel and part of one more call")
    return parse_timing(parser, argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = {
        "environment": environment(torch.device(device)),
        "settings": {
            "canvas": f"{arguments.width}×{arguments.height}",
            **{key: getattr(arguments, key) for key in ("layers", "text_rows", "repeats", "backend", "tuned", "tiny")},
        },
        "runs": [],
        "growth": [],
    }
    drawn, kept = False, {}
    clip = {key: getattr(arguments, key) for key in ("height", "width", "text_rows")}
    for run in arguments.runs:
        for frames in arguments.frames:
            row = {"run": run.name, "frames": frames, **clip, "compiled": run.compiled and not arguments.eager}
            try:
                measure(arguments, run, frames, device, row, kept)
            except Exception:  # one run out of memory or time must not cost the others
                row["failed"] = traceback.format_exc()[-1500:]
            report["runs"].append(row)
            report["growth"] = growth(report["runs"])
            drawn = write(report, arguments.output)
            print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)
            release(device)
    print(markdown(report))
    if not drawn:
        print("No plot: it takes a run that succeeds and matplotlib (`pip install 'diffusers-h3[notebooks]'`).")
    return 1 if any("failed" in row for row in report["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())

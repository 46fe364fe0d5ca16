"""Tables and charts of the committed benchmark results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from charts import bar_chart

from diffusers_h3.planning.measured import Measurement, measurements


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"

_BACKENDS = {
    "flashinfer": "flashinfer",
    "flashinfer.fp8": "flashinfer, fp8",
    "cudnn": "cudnn",
    "sdpa": "sdpa, gathered keys",
    "torch_flash": "torch_flash",
    "flash_attn": "flash_attn",
}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reports(has_section: Callable[[dict[str, Any]], bool]) -> list[tuple[dict[str, Any], str]]:
    """Return the reports with what is wanted, oldest first, each with a line that says where it comes from."""
    found = []
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(report, dict) and has_section(report):
            machine = report.get("environment", report)
            card = machine.get("card", machine.get("device"))
            source = f"`benchmarks/results/{path.name}`: {card}, torch {machine['torch']}, {machine['date']}."
            found.append((report, source))
    if not found:
        raise LookupError("No file of benchmarks/results has the section that this page shows.")
    return found


def newest(has_section: Callable[[dict[str, Any]], bool]) -> tuple[dict[str, Any], str]:
    """Return the newest report with what is wanted, and a line that says where it comes from."""
    return reports(has_section)[-1]


def whole_transformer() -> str:
    """Return the table of every full-size run."""
    rows = [
        [
            _run_name(entry),
            str(entry.frames),
            f"{entry.rows:,}",
            f"{entry.seconds_per_call:.2f}",
            f"{entry.peak_gb:.1f}",
            f"{entry.weights_gb:.1f}",
            f"{entry.card}, {entry.date}",
        ]
        for entry in measurements()
    ]
    return table(["run", "frames", "rows", "s per call", "peak GB", "weights GB", "machine, date"], rows)


def whole_transformer_chart() -> str:
    """Return the chart of the longest measured clip, runs that had the whole card and kept all weights on it."""
    frames = max(entry.frames for entry in measurements())
    whole = [entry for entry in measurements() if entry.offload == "none" and entry.memory_cap_gb is None]
    shown = [entry for entry in whole if entry.frames == frames]
    bars = sorted({_run_name(entry): entry.seconds_per_call for entry in shown}.items(), key=lambda bar: bar[1])
    return bar_chart(f"One transformer call, {frames} frames of 1344×768", "seconds", bars, accent="VDN-H3")


def _run_name(entry: Measurement) -> str:
    parts = ["VDN-H3" if entry.model == "hybrid" else "dense H3", entry.precision]
    if entry.attention_precision != "bf16":
        parts.append(f"{entry.attention_precision} attention")
    if entry.compiled_parts == "layers":
        parts.append("linear layers compiled")
    elif entry.compiled is False:
        parts.append("eager")
    if entry.offload != "none":
        parts.append(f"offload by {entry.offload}" + " with streams" * entry.use_stream)
    if entry.memory_cap_gb is not None:
        parts.append(f"cap {entry.memory_cap_gb:g} GB")
    return ", ".join(parts)


def parts_of_a_call() -> str:
    """Return where the time of a profiled VDN-H3 call goes."""
    sys.path.insert(0, str(BENCHMARKS))
    from bench_dit import breakdown

    def profiled(report: dict[str, Any]) -> list[dict[str, Any]]:
        return [run for run in report.get("runs", []) if run["run"].startswith("hybrid") and run.get("kernels")]

    report, source = newest(profiled)
    run = max(profiled(report), key=lambda entry: entry["rows"])
    layers = report["settings"]["layers"]
    rows = [
        [part, f"{milliseconds:,.0f}", f"{milliseconds / layers:.1f}"]
        for part, milliseconds in breakdown(run["kernels"]).items()
    ]
    name = f"`{run['run']}`, {run['frames']} frames. {source}"
    return f"{name}\n\n{table(['part', 'ms a call', 'ms a layer'], rows)}"


def window() -> str:
    """Return the window backends of one layer."""
    report, source = newest(lambda report: any(key.startswith("window.") for key in report))
    rows = [
        [f"`{backend}`", f"{report[f'window.{key}.ms']:.1f}", f"{report[f'window.{key}.error']:.1e}"]
        for key, backend in _BACKENDS.items()
        if f"window.{key}.ms" in report
    ]
    return f"{source}\n\n{table(['backend', 'ms', 'relative error against float64'], rows)}"


def window_chart() -> str:
    """Return the chart of the window backends."""
    report, _ = newest(lambda report: any(key.startswith("window.") for key in report))
    bars = [(name, report[f"window.{key}.ms"]) for key, name in _BACKENDS.items() if f"window.{key}.ms" in report]
    return bar_chart("The window of one full-size layer", "ms", sorted(bars, key=lambda bar: bar[1]), "flashinfer")


def operators() -> str:
    """Return the operators of the linear branch, one layer."""
    report, source = newest(lambda report: "delta_factors.ms" in report)
    rows = []
    for key, milliseconds in report.items():
        name = key.removesuffix(".ms")
        if key.endswith(".ms") and not name.startswith(("window.", "block.")):
            errors = [value for other, value in report.items() if other.startswith(name) and other.endswith(".error")]
            rows.append([f"`{name}`", f"{milliseconds:.2f}", f"{max(errors):.1e}" if errors else "–"])
    return f"{source}\n\n{table(['operator', 'ms', 'relative error against float64'], rows)}"


def dense_attention() -> str:
    """Return attention alone, by shape, batch and kernel."""
    report, source = newest(lambda report: "attention_speed" in report.get("sections", {}))
    measured = report["sections"]["attention_speed"]["results"]["rows"]
    kernels = list(dict.fromkeys(name for row in measured for name in row["results"]))
    rows = [
        [row["shape"], str(row["batch"]), *(_milliseconds(row["results"].get(name)) for name in kernels)]
        for row in measured
    ]
    return f"{source} Milliseconds (TFLOP/s).\n\n{table(['shape', 'batch', *kernels], rows)}"


def dense_attention_chart() -> str:
    """Return the chart of attention alone at MiniMax-H3's shape."""
    report, _ = newest(lambda report: "attention_speed" in report.get("sections", {}))
    row = report["sections"]["attention_speed"]["results"]["rows"][-1]
    bars = [(name, found["median_s"] * 1e3) for name, found in row["results"].items() if "median_s" in found]
    return bar_chart(row["shape"], "ms", sorted(bars, key=lambda bar: bar[1]), accent="FlashInfer")


def whole_models() -> str:
    """Return whole forward passes with the default attention and with FlashInfer's."""
    report, source = newest(lambda report: "wan_speed" in report.get("sections", {}))
    names = {"wan_speed": "Wan 2.1 1.3B, 832×480×81", "h3_speed": "dense H3, one block, 345 frames"}
    rows = []
    for section, name in names.items():
        for mode in ("eager", "compiled"):
            found = report["sections"][section]["results"].get(mode, {})
            if "median_s" not in found.get("default", {}):
                continue
            default = found["default"]["median_s"]
            cells = [_speedup(found.get(column), default) for column in ("FlashInfer", "FlashInfer fp8")]
            rows.append([name, mode, f"{default:.3f}", *cells])
    return f"{source} Seconds.\n\n{table(['model', '', 'default', 'FlashInfer', 'FlashInfer, fp8'], rows)}"


def _milliseconds(found: dict[str, Any] | None) -> str:
    if found is None or "median_s" not in found:
        return "–"
    return f"{found['median_s'] * 1e3:.2f} ({found['tflops']:.0f})"


def _speedup(found: dict[str, Any] | None, default: float) -> str:
    if found is None:
        return "–"
    if "median_s" not in found:
        return "failed"
    return f"{found['median_s']:.3f} ({default / found['median_s']:.2f}×)"

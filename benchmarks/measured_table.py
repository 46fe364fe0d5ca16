"""Make the table of measurements that `diffusers-h3 plan` starts from, of what the benchmarks wrote.

    python benchmarks/measured_table.py

Reads every `results/*.json` with runs of the whole transformer (`bench_dit.py`, `bench_memory.py`) and writes
`src/diffusers_h3/planning/measured.json`. Runs that failed, of fewer layers or without finite output are left out, and
so are those that several GPUs shared (`bench_parallel.py`) or whose kernels were tuned (`bench_dit.py --tuned`):
estimates are for one card and for blocks as they compile by default.
"""

import json
import pathlib


RESULTS = pathlib.Path(__file__).parent / "results"
TABLE = pathlib.Path(__file__).parents[1] / "src" / "diffusers_h3" / "planning" / "measured.json"

FULL_LAYERS = 50
ABOUT_THE_RUN = ("date", "device")


def entries(report):
    """Return the table's entries of one report."""
    settings = report.get("settings", {})
    if settings.get("layers") != FULL_LAYERS or "GPUs" in settings:
        return []
    # Tuning changes only what is compiled.
    ordinary = [run for run in report["runs"] if not (settings.get("tuned") and run["compiled"])]
    return [entry(report["environment"], run) for run in ordinary if is_complete(run)]


def is_complete(run):
    return run.get("finite") is True and "s_per_call" in run and "peak_gb" in run


def entry(environment, run):
    model, precision, *attention = run["run"].removesuffix(":eager").split(":")
    return {
        "card": environment["device"],
        "date": environment["date"],
        "versions": {name: value for name, value in environment.items() if name not in ABOUT_THE_RUN},
        "model": model,
        "height": run["height"],
        "width": run["width"],
        "frames": run["frames"],
        "text_rows": run["text_rows"],
        "rows": run["rows"],
        "precision": precision,
        "attention_precision": attention[0] if attention else "bf16",
        "offload": run.get("offload", "none"),
        "compiled": run["compiled"],
        "memory_cap_gb": run.get("memory_cap_gb"),
        "seconds_per_call": run["s_per_call"],
        "peak_gb": run["peak_gb"],
        "weights_gb": run["weights_gb"],
        "use_stream": run.get("use_stream", False),
        "compiled_parts": run.get("compiled_parts"),
    }


def table(folder=RESULTS):
    """Return the text of the table, the entries in the order of the files' names and runs."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    rows = [row for report in reports if isinstance(report, dict) for row in entries(report)]
    return json.dumps(rows, indent=2) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
    print(f"{TABLE}: {len(json.loads(table()))} measurements")

"""Seconds per transformer call and peak memory of full-size MiniMax-H3 models with random weights.

    python benchmarks/bench_dit.py --output outputs/dit --runs dense:bf16 hybrid:fp8 hybrid:fp8:fp8 hybrid:bf16

A run is `model:precision[:attention]`: model `dense` (stock Diffusers on its default attention) or `hybrid` (VDN-H3),
precision of the linear layers `bf16` or `fp8`, attention `bf16` (default) or `fp8`. All runs share one process and one
machine; every model is built, compiled block by block, warmed up, timed (median) and released. `--tiny` runs the same
code on a small model.
"""

import argparse
import gc
import json
import pathlib
import time
import traceback

import torch
from bench_layer import profile
from full_size import TINY, TINY_HYBRID, random_transformer, request_inputs

from diffusers_h3 import HybridAttnProcessor


class Results:
    """Figures of all runs, written after every one of them."""

    def __init__(self, arguments):
        self.path = pathlib.Path(arguments.output)
        self.path.mkdir(parents=True, exist_ok=True)
        self.results = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "runs": []}
        if torch.cuda.is_available():
            self.results["card"] = torch.cuda.get_device_name()

    def add(self, row):
        self.results["runs"].append(row)
        (self.path / "dit.json").write_text(json.dumps(self.results, indent=1))
        shown = {key: value for key, value in row.items() if key != "profile"}
        print(json.dumps(shown), flush=True)


def measure(arguments, name, num_frames):
    kind, precision, attention = (name + ":bf16").split(":")[:3]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (TINY_HYBRID if kind == "hybrid" else TINY) if arguments.tiny else {}
    started = time.time()
    model = random_transformer(kind == "hybrid", precision == "fp8", device, arguments.layers, **sizes)
    if kind == "hybrid":
        model.set_attn_processor(HybridAttnProcessor(backend=arguments.backend, fp8=attention == "fp8"))
    row = {"run": name, "frames": num_frames, "layers": arguments.layers, "build_s": round(time.time() - started, 1)}
    if device == "cuda":
        row["weights_gb"] = round(torch.cuda.memory_allocated() / 1e9, 2)
        torch.cuda.reset_peak_memory_stats()
    inputs = request_inputs(model, arguments.height, arguments.width, num_frames, arguments.text_rows, device)
    row["rows"] = inputs["position_ids"].shape[0]
    if not arguments.eager:
        model.compile_repeated_blocks(fullgraph=True)

    def call():
        started = time.perf_counter()
        video, audio = model(**inputs)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, video, audio

    row["first_call_s"] = round(call()[0], 1)
    repeats = arguments.repeats
    samples = [call() for _ in range(repeats)]
    row["s_per_call"] = round(sorted(sample[0] for sample in samples)[repeats // 2], 3)
    row["samples"] = [round(sample[0], 3) for sample in samples]
    row["finite"] = bool(samples[-1][1].isfinite().all() and samples[-1][2].isfinite().all())
    if device == "cuda":
        row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        if arguments.profile:
            row["profile"] = profile(lambda: model(**inputs))
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["dense:bf16", "hybrid:bf16", "hybrid:fp8", "hybrid:fp8:fp8"])
    parser.add_argument("--height", type=int, default=768)
    parser.add_argument("--width", type=int, default=1344)
    parser.add_argument("--frames", type=int, nargs="+", default=[345])
    parser.add_argument("--text-rows", type=int, default=200)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="auto", help="window backend of the hybrid runs")
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    parser.add_argument("--profile", action="store_true", help="add the time per kernel of one more call")
    parser.add_argument("--tiny", action="store_true", help="a small model and canvas, to test the script")
    parser.add_argument("--output", default="outputs/dit")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.height, arguments.width = 96, 160
    torch.set_grad_enabled(False)
    results = Results(arguments)
    for name in arguments.runs:
        for num_frames in arguments.frames:
            try:
                results.add(measure(arguments, name, num_frames))
            except Exception:  # one run out of memory or time must not cost the others
                results.add({"run": name, "frames": num_frames, "failed": traceback.format_exc()[-1500:]})
            gc.collect()
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

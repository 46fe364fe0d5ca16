"""Time a whole Wan or MiniMax-H3 generation once per attention backend, each in a process of its own.

    python benchmarks/bench_pipeline.py --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --output results/wan
    python benchmarks/bench_pipeline.py --model MiniMaxAI/MiniMax-H3 --family h3 --num-frames 345 --output results/h3

Every backend runs `--repeats` times, in reversed order every other repeat, so that a card that warms up favours none.
A run loads the pipeline, measures the share of attention in two steps, warms up, and then times one generation
from prompt to decoded video; nothing is saved. Writes JSON and Markdown. `tiny-wan` is a random toy model.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch
from bench_attention import environment
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from diffusers.models.transformers import transformer_minimax_h3, transformer_wan

from diffusers_h3 import FlashInferProcessor


# What each name does to a transformer.
BACKENDS = {
    "default": lambda transformer: None,
    "native-math": lambda transformer: transformer.set_attention_backend("_native_math"),
    "native-cudnn": lambda transformer: transformer.set_attention_backend("_native_cudnn"),
    "flashinfer": lambda transformer: transformer.set_attn_processor(FlashInferProcessor()),
    "flashinfer-fa2": lambda transformer: transformer.set_attn_processor(
        FlashInferProcessor(prefill="single", kernel="fa2")
    ),
    "flashinfer-cudnn": lambda transformer: transformer.set_attn_processor(FlashInferProcessor(prefill="cudnn")),
    "flashinfer-fp8": lambda transformer: transformer.set_attn_processor(FlashInferProcessor(fp8=True)),
}

PROMPT = "A lighthouse on a cliff at dusk, waves breaking below, gulls crying."


def make_tiny_wan(device: torch.device) -> WanPipeline:
    """Return a random Wan pipeline that needs no text encoder."""
    torch.manual_seed(0)
    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=2,
    )
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1)
    pipeline = WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        transformer=transformer,
    )
    return pipeline.to(device)


def load(arguments: argparse.Namespace, device: torch.device):
    """Return the pipeline and a function that generates with a number of steps."""
    size = {"height": arguments.height, "width": arguments.width, "num_frames": arguments.num_frames}
    if arguments.model == "tiny-wan":
        pipeline = make_tiny_wan(device)
        size = {"height": 16, "width": 16, "num_frames": 5}
        inputs = {"prompt_embeds": torch.zeros(1, 8, 16, device=device), "guidance_scale": 1.0}
    elif arguments.family == "wan":
        pipeline = WanPipeline.from_pretrained(arguments.model, dtype=torch.bfloat16).to(device)
        inputs = {"prompt": PROMPT}
    else:
        from diffusers import ModularPipeline

        pipeline = ModularPipeline.from_pretrained(arguments.model)
        pipeline.load_components(dtype=torch.bfloat16)
        pipeline.to(device)
        inputs = {"prompt": PROMPT}
    pipeline.set_progress_bar_config(disable=True)

    def generate(steps: int) -> None:
        generator = torch.Generator(device).manual_seed(0)
        pipeline(**inputs, **size, num_inference_steps=steps, generator=generator)

    return pipeline, generate


class AttentionClock:
    """Time spent in Diffusers' attention dispatch, on the device and without waiting for it."""

    def __init__(self, device: torch.device):
        self.device = device
        self.spans = []

    def _now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self) -> "AttentionClock":
        self._originals = [
            (module, module.dispatch_attention_fn) for module in (transformer_wan, transformer_minimax_h3)
        ]

        for module, original in self._originals:

            def timed(*args, original=original, **kwargs):
                start = self._now()
                output = original(*args, **kwargs)
                self.spans.append((start, self._now()))
                return output

            module.dispatch_attention_fn = timed
        return self

    def __exit__(self, *_) -> None:
        for module, original in self._originals:
            module.dispatch_attention_fn = original

    def seconds(self) -> float:
        if self.device.type != "cuda":
            return sum(end - start for start, end in self.spans)
        torch.cuda.synchronize(self.device)
        return sum(start.elapsed_time(end) for start, end in self.spans) / 1000


def timed(function, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def run_one(arguments: argparse.Namespace) -> dict:
    """Measure one backend in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline, generate = load(arguments, device)
    transformers = [getattr(pipeline, name, None) for name in ("transformer", "transformer_2")]
    transformers = [transformer for transformer in transformers if transformer is not None]
    for transformer in transformers:
        BACKENDS[arguments.backends[0]](transformer)
    generate(1)
    with AttentionClock(device) as clock:
        total = timed(lambda: generate(2), device)
    if arguments.compile:
        for transformer in transformers:
            transformer.compile_repeated_blocks(fullgraph=True)
    for _ in range(arguments.warmups):
        generate(2)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = timed(lambda: generate(arguments.steps), device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return {
        "seconds": seconds,
        "attention_share": clock.seconds() / total,
        "peak_gib": peak,
        "environment": environment(device),
    }


def run_in_subprocess(backend: str) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--backends", backend, "--in-this-process"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        return {"backend": backend, "error": result.stderr.strip().splitlines()[-1:]}
    return {"backend": backend, **json.loads(result.stdout.splitlines()[-1])}


def markdown(report: dict) -> str:
    """Return one table row per backend: medians over the repeats."""
    lines = [report["title"], "", "| backend | seconds | against the first | attention | peak GiB |"]
    lines.append("| --- | --- | --- | --- | --- |")
    first = None
    for backend in dict.fromkeys(run["backend"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["backend"] == backend and "seconds" in run]
        if not runs:
            lines.append(f"| {backend} | failed | – | – | – |")
            continue
        seconds = statistics.median(run["seconds"] for run in runs)
        first = first or seconds
        share = statistics.median(run["attention_share"] for run in runs)
        peak = "–" if runs[0]["peak_gib"] is None else f"{max(run['peak_gib'] for run in runs):.1f}"
        lines.append(f"| {backend} | {seconds:.2f} | {first / seconds:.2f}× | {share:.0%} | {peak} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, a repository, or `tiny-wan`")
    parser.add_argument("--family", choices=["wan", "h3"], default="wan")
    parser.add_argument(
        "--backends", nargs="+", choices=list(BACKENDS), default=["default", "native-cudnn", "flashinfer"]
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--num-frames", type=int, default=81)
    parser.add_argument("--compile", action="store_true", help="compile the transformer's blocks")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/pipeline"), help="without suffix")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        print(json.dumps(run_one(arguments)))
        return

    compiled = ", compiled" if arguments.compile else ""
    report = {"title": f"{arguments.model}, {arguments.steps} steps{compiled}", "runs": []}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    for repeat in range(arguments.repeats):
        for backend in arguments.backends if repeat % 2 == 0 else reversed(arguments.backends):
            run = run_in_subprocess(backend)
            report["runs"].append(run)
            print(run.get("error") or f"{backend}: {run['seconds']:.2f} s", flush=True)
            arguments.output.with_suffix(".json").write_text(json.dumps(report, indent=1))
    arguments.output.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))
    if any("error" in run for run in report["runs"]):
        sys.exit(1)


if __name__ == "__main__":
    main()

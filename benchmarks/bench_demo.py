"""Compare window backends end to end: held-out clips of the packaged 8-call model, the same seeds on each, as PSNR.

    python benchmarks/bench_demo.py --backends sdpa flashinfer --output results/demo-backends.json

The first backend is what the others are compared with. The transformer runs in bfloat16 with its float32 islands, the
autoencoders in float32.
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import torch
from bench_attention import environment
from bench_dit import write_texts

from diffusers_h3 import HybridAttnProcessor, VDNH3Pipeline
from diffusers_h3.demo.release import STAGE, embedded_release


sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from training import data, evaluate


def clips(pipeline: VDNH3Pipeline, backend: str, count: int) -> np.ndarray:
    """Return `count` clips of held-out prompts, ``[N, T, H, W, 3]`` in [0, 1]."""
    pipeline.transformer.set_attn_processor(HybridAttnProcessor(backend=backend))
    generated = evaluate.generate(pipeline, data.few_held_out(count), evaluate.CALLS["turbo"])
    return np.stack([clip.frames for clip in generated])


def decibels(first: np.ndarray, second: np.ndarray) -> list[float]:
    """Return the PSNR of each pair of clips."""
    return (-10 * np.log10(np.square(first - second).mean(axis=(1, 2, 3, 4)))).tolist()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["sdpa", "flashinfer"], help="two or more window backends")
    parser.add_argument("--clips", type=int, default=6, choices=range(1, 19), metavar="1..18")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("demo-backends.json"))
    arguments = parser.parse_args(argv)
    if len(arguments.backends) < 2:
        parser.error("name two backends or more: the first is what the others are compared with.")

    pipeline = VDNH3Pipeline.from_pretrained(
        embedded_release() / STAGE,
        dtype={"transformer": torch.bfloat16, "default": torch.float32},
        local_files_only=True,
    ).to(arguments.device)
    first, *others = arguments.backends
    expected = clips(pipeline, first, arguments.clips)
    psnr = {name: decibels(clips(pipeline, name, arguments.clips), expected) for name in others}
    report = {"environment": environment(arguments.device), "against": first, "psnr": psnr}
    write_texts(arguments.output.parent, {arguments.output.name: json.dumps(report, indent=2) + "\n"})
    for name, values in psnr.items():
        print(f"{name} against {first}: {min(values):.1f} to {max(values):.1f} dB over {len(values)} clips")


if __name__ == "__main__":
    main()

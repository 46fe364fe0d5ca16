"""Train a tiny VDN-H3 stage by stage: `python -m training.train --help`.

Every stage takes up where it stopped, stops after `--minutes`, and prints its losses every few seconds.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer

from diffusers_h3.demo.contact_sheet import contact_sheet

from . import autoencoders, data, dense, evaluate, hybrid, turbo
from .export import export_release
from .latents import LatentPool
from .loop import Schedule


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

Run = Annotated[Path, typer.Option(help="Folder of checkpoints, figures and samples.")]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps of the whole stage.")]
Minutes = Annotated[float, typer.Option(min=0.0, help="Stop and save after this long.")]
Rate = Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Clips per part of a batch.")]
Parts = Annotated[int, typer.Option(min=1, help="Parts per step, each at a time of its own.")]
Clips = Annotated[int, typer.Option(min=1, help="Clips of the encoded pool.")]
Graphs = Annotated[bool, typer.Option(help="On a card, replay forward and backward passes as CUDA graphs.")]
Device = Annotated[str, typer.Option(help="Device to run on; the first card by default, else the CPU.")]

_DEFAULT_RUN = Path("runs/tiny")
_DEFAULT_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@app.command()
def video_vae(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 3000,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 2e-3,
    batch: BatchSize = 16,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Train the video autoencoder."""
    autoencoders.train_video_vae(run, Schedule(steps, minutes, learning_rate, graphs=graphs), _open(device), batch)


@app.command()
def video_decoder(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 3000,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 1e-3,
    batch: BatchSize = 16,
    windows: Annotated[int, typer.Option(min=1, help="Encoded windows of the pool.")] = 1024,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Train the video decoder on, at any time: its latents stay as they are."""
    schedule = Schedule(steps, minutes, learning_rate, graphs=graphs)
    autoencoders.train_video_decoder(run, schedule, _open(device), batch, windows)


@app.command()
def audio_vae(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 4000,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 2e-3,
    batch: BatchSize = 8,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Train the sound autoencoder; it may run beside `video-vae` on one card."""
    autoencoders.train_audio_vae(run, Schedule(steps, minutes, learning_rate, graphs=graphs), _open(device), batch)


@app.command("dense")
def dense_stage(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 8000,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 1e-3,
    batch: BatchSize = 64,
    parts: Parts = 4,
    clips: Clips = 4096,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Train the dense transformer by flow matching."""
    target = _open(device)
    pool = LatentPool(run, target, clips)
    dense.train_dense(run, Schedule(steps, minutes, learning_rate, graphs=graphs), target, pool, batch, parts)


@app.command()
def align(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 1500,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 2e-3,
    batch: BatchSize = 32,
    parts: Parts = 2,
    clips: Clips = 1024,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Fit the linear branch of each layer to the dense layer."""
    target = _open(device)
    pool = LatentPool(run, target, clips)
    hybrid.train_align(run, Schedule(steps, minutes, learning_rate, graphs=graphs), target, pool, batch, parts)


@app.command("hybrid")
def hybrid_stage(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 1500,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 5e-4,
    batch: BatchSize = 32,
    parts: Parts = 4,
    clips: Clips = 2048,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Train branch and adapter `default` end to end."""
    target = _open(device)
    pool = LatentPool(run, target, clips)
    hybrid.train_hybrid(run, Schedule(steps, minutes, learning_rate, graphs=graphs), target, pool, batch, parts)


@app.command("turbo")
def turbo_stage(
    run: Run = _DEFAULT_RUN,
    steps: Steps = 600,
    minutes: Minutes = 8.0,
    learning_rate: Rate = 1e-3,
    batch: BatchSize = 64,
    parts: Parts = 4,
    substeps: Annotated[int, typer.Option(min=1, help="Teacher calls for one of the student's.")] = 4,
    clips: Clips = 1024,
    graphs: Graphs = True,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Train the adapter `turbo` for eight calls."""
    target = _open(device)
    pool = LatentPool(run, target, clips)
    turbo.train_turbo(
        run, Schedule(steps, minutes, learning_rate, graphs=graphs), target, pool, batch, parts, substeps
    )


@app.command()
def export(run: Run = _DEFAULT_RUN, release: Path = Path("runs/tiny-release")) -> None:
    """Write a finished run in the release layout."""
    folder = export_release(run, release)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{folder}: {size / 1e6:.2f} MB")


@app.command()
def sample(
    stage: Annotated[str, typer.Argument(help="vae, dense, hybrid or turbo.")],
    run: Run = _DEFAULT_RUN,
    count: Annotated[int, typer.Option(min=1, max=18, help="Held-out prompts.")] = 6,
    calls: Annotated[int | None, typer.Option(min=1, help="Transformer calls; by default the stage's own.")] = None,
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Sample a stage of a run on held-out prompts: figures, clips and a contact sheet below the run."""
    if stage not in ("vae", *evaluate.CALLS):
        raise typer.BadParameter(f"the stage must be one of vae, {', '.join(evaluate.CALLS)}, got {stage!r}.")
    target = _open(device)
    scenes = data.few_held_out(count)
    if stage == "vae":
        clips = list(evaluate.ground_truth(scenes, run, target))
    else:
        pipeline = evaluate.run_pipeline(run, stage, target)
        clips = list(evaluate.generate(pipeline, scenes, calls or evaluate.CALLS[stage]))
    _report(run / "samples", stage, evaluate.score(clips), clips)


@app.command("evaluate")
def evaluate_release(
    release: Path,
    output: Annotated[Path, typer.Option(help="Folder of the figures, clips and contact sheets.")] = Path("runs/eval"),
    device: Device = _DEFAULT_DEVICE,
) -> None:
    """Compare the base, the hybrid and the 8-call stage of a release on 54 held-out prompts."""
    target = _open(device)
    figures = {}
    backgrounds = [data.held_out_scenes(background) for background in data.BACKGROUNDS]
    for stage, calls in evaluate.CALLS.items():
        pipeline = evaluate.release_pipeline(release.absolute(), stage, target, output.absolute() / "cache")
        clips = [
            clip
            for index, scenes in enumerate(backgrounds)
            for clip in evaluate.generate(pipeline, scenes, calls, seed=index)
        ]
        figures[stage] = evaluate.score(clips)
        _report(output, stage, figures[stage], list(islice(clips, 0, None, 9)))
    (output / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _open(device: str) -> torch.device:
    """Return the device, set up for training: TF32 products where there are tensor cores, and the fastest kernels."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    return torch.device(device)


def _report(folder: Path, name: str, figures: dict[str, float], clips: list[evaluate.LabelledClip]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    evaluate.save_clips(folder / f"{name}.npz", clips)
    contact_sheet(clips).save(folder / f"{name}.png")
    typer.echo(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in figures.items()))


if __name__ == "__main__":
    app()

"""`diffusers-h3 generate`: prompts, and up to two keyframes each, become mp4 files with sound."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import batch, checks, options, processes, weights
from .console import UsageError, option_names, print_json, results
from .prompts_file import Clip, read_clips


if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ..pipelines.request import Geometry


class Dtype(StrEnum):
    """What the weights are computed in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Offload(StrEnum):
    """What stays in the CPU's memory while it is not needed."""

    none = "none"
    model = "model"
    group = "group"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to generate, in one text.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The mp4 to write. Default: output.mp4.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of PROMPT, a file with one clip a line: JSON objects (.jsonl) or bare prompts (.txt). The "
            "other options hold for every line that does not say otherwise.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=True, help="With --prompts, the folder for the videos and results.jsonl.", show_default=False
        ),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="Image the video starts from.", show_default=False)] = None,
    last_image: Annotated[
        Path | None, typer.Option(help="Image the video ends on, alone or with --image.", show_default=False)
    ] = None,
    overlay: Annotated[
        str,
        typer.Option(
            help="The weights: a name from 'overlays list', an overlay repository with --revision, a manifest file, a "
            "release directory, or a folder that 'materialize' or save_pretrained wrote."
        ),
    ] = "vdn-h3-8step",
    revision: options.Revision = None,
    height: Annotated[
        int | None, typer.Option(help="Height in pixels, a multiple of 32; with --width.", show_default=False)
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Width in pixels. Default: 16:9, or the keyframe's shape.", show_default=False)
    ] = None,
    frames: Annotated[int, typer.Option(help="Frames at 24 per second: 124, 141, …, 345 (17·n + 5).")] = 124,
    seed: Annotated[int, typer.Option(help="Seed of the noise: the same seed, the same video.")] = 0,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Transformer calls. Default: what the weights were made for.", show_default=False),
    ] = None,
    force_steps: Annotated[
        bool, typer.Option("--force-steps", help="Allow another number of --steps than the weights were made for.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="auto is bfloat16 on a GPU, float32 on a CPU.")] = Dtype.auto,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, … Default: the first GPU, or the CPU.", show_default=False)
    ] = None,
    offload: Annotated[
        Offload,
        typer.Option(
            help="Save GPU memory: model moves whole components in and out, group a block of layers at a time. "
            "On CUDA, group copies the next block while one computes, which pins up to 1.5 times the weights' size of "
            "the computer's memory."
        ),
    ] = Offload.none,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="The transformer's wide linear layers in fp8 (compute capability 8.9 or newer)."),
    ] = False,
    compile_blocks: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Compile the transformer's blocks, in the first two calls; then a call takes less time and memory.",
        ),
    ] = False,
    cache_dir: options.CacheDir = None,
    allow_unpinned: options.AllowUnpinned = False,
    local_files_only: options.LocalFilesOnly = False,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Generate a video with sound.

    The first run downloads the weights and merges the overlay into them, once; later runs find them in the cache.

    [bold]Examples[/bold]

    diffusers-h3 generate "A red fox runs through fresh snow, wind howling." -o fox.mp4

    diffusers-h3 generate "The ship sails on." --image start.png --last-image end.png --frames 345 -o ship.mp4

    diffusers-h3 generate "Rain on a tin roof." --overlay vdn-h3-50step --steps 30 --offload model -o rain.mp4

    diffusers-h3 generate --prompts clips.jsonl --out clips  [dim]# again: makes what is missing or failed[/dim]

    accelerate launch --num_processes 8 -m diffusers_h3 generate --prompts clips.jsonl --out clips

    torchrun --nproc-per-node 8 -m diffusers_h3 generate "A red fox." -o fox.mp4  [dim]# one clip on 8 GPUs[/dim]
    """
    _check_mode(prompt, output, prompts, out)
    checks.check_seed(seed)
    access = weights.Access(cache_dir, local_files_only)
    if prompts is not None:
        defaults = {
            "seed": seed,
            "image": image and image.absolute(),
            "last_image": last_image and last_image.absolute(),
            "height": height,
            "width": width,
            "num_frames": frames,
            "num_inference_steps": steps,
        }
        clips = read_clips(prompts, defaults)
        batch.check_folder(out, clips, overwrite)
        running = weights.Running(_check_device(device, offload), dtype, offload, fp8, compile_blocks)
        weights.check_fp8(running)
        requested = {f"{prompts} line {clip.line}, `num_inference_steps`": clip.num_inference_steps for clip in clips}
        folder = _prepare_weights(overlay, revision, allow_unpinned, access, {} if force_steps else requested)
        _generate_batch(clips, out, folder, running, device, force_steps, as_json)
        return
    output = output or Path("output.mp4")
    checks.check_output(output, overwrite)
    first, last = checks.open_keyframe("--image", image), checks.open_keyframe("--last-image", last_image)
    keyframes = [keyframe for keyframe in (first, last) if keyframe is not None]
    if not prompt.strip() and not keyframes:
        raise UsageError("PROMPT is empty; say what to generate, or pass --image or --last-image.")
    geometry = _check_geometry(keyframes, height, width, frames)
    target = processes.own_device(_check_device(device, offload), device)
    running = weights.Running(target, dtype, offload, fp8, compile_blocks)
    weights.check_fp8(running)
    folder = _prepare_weights(overlay, revision, allow_unpinned, access, {} if force_steps else {"--steps": steps})
    processes.join(folder, target)

    import torch

    pipeline = weights.load_pipeline(folder, running)
    processes.share_sequence(pipeline)
    result = pipeline(
        prompt=prompt,
        image=first,
        last_image=last,
        height=geometry.height,
        width=geometry.width,
        num_frames=geometry.num_frames,
        num_inference_steps=steps,
        force_num_inference_steps=force_steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    processes.leave()
    if result.frames is None:
        return  # the first process has them
    output.parent.mkdir(parents=True, exist_ok=True)
    saved = result.save(output, overwrite=overwrite)
    if as_json:
        print_json(
            {
                "output": str(saved.absolute()),
                "weights": str(folder),
                "prompt": prompt,
                "seed": seed,
                "steps": pipeline.num_timesteps,
                "height": geometry.height,
                "width": geometry.width,
                "frames": geometry.num_frames,
                "fps": result.fps,
                "seconds": geometry.num_frames / result.fps,
                "audio_channels": result.audio.shape[1],
                "sampling_rate": result.sampling_rate,
                "device": str(target),
            }
        )
    else:
        results.print(str(saved), markup=False)


def _check_mode(prompt: str | None, output: Path | None, prompts: Path | None, out: Path | None) -> None:
    """Check that the call is for one clip or for a file of them, with the options of that way."""
    if (prompt is None) == (prompts is None):
        given = "neither" if prompt is None else "both"
        raise UsageError(f"Say what to generate, with PROMPT or with --prompts and a file; got {given}.")
    if prompts is not None and out is None:
        raise UsageError("--prompts needs --out, the folder for the videos.")
    if prompts is not None and output is not None:
        raise UsageError("--output names one video; with --prompts they go to the folder --out, named by their ids.")
    if prompts is None and out is not None:
        raise UsageError("--out is the folder for the videos of --prompts; name one video with --output.")


def _generate_batch(
    clips: list[Clip],
    out: Path,
    folder: Path,
    running: weights.Running,
    device: str | None,
    force_steps: bool,
    as_json: bool,
) -> None:
    """Make all clips, among all processes, and let the first one say what became of them."""
    if processes.num_processes() > 1 and running.device.type != "cpu":
        processes.check_gpus()
    joined = batch.join_processes(running.device)
    if joined.num_processes > 1:
        if device not in (None, "cpu"):
            raise UsageError(
                f"--device {device}: each of the {joined.num_processes} processes takes a GPU of its own. Leave it "
                "out, or say cpu."
            )
        running = replace(running, device=joined.device)
    outcome = batch.Batch(clips, out, folder, running, force_steps, joined).run()
    joined.destroy_process_group()
    if joined.is_main_process:
        if as_json:
            print_json(outcome)
        else:
            counts = ", ".join(f"{outcome[name]} {name}" for name in ("made", "skipped", "failed"))
            results.print(f"{counts}: {outcome['results']}", markup=False)
    if outcome["failed"]:
        raise typer.Exit(1)


def _check_geometry(keyframes: list["Image"], height: int | None, width: int | None, frames: int) -> "Geometry":
    """Apply the pipeline's own rules of size and length before there is a pipeline."""
    from diffusers.modular_pipelines import MiniMaxH3ModularPipeline

    from ..pipelines.request import resolve_geometry

    try:
        # Without components, it has the geometry of the released weights.
        return resolve_geometry(MiniMaxH3ModularPipeline(), keyframes, height, width, frames)
    except ValueError as error:
        raise UsageError(option_names(str(error))) from error


def _check_device(name: str | None, offload: Offload) -> "torch.device":
    """Return the device to run on, after looking whether it is there."""
    import torch

    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None else accelerator
    else:
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error
    if offload is not Offload.none and device.type == "cpu":
        raise UsageError(f"--offload {offload} keeps weights off a GPU, but the device is the CPU; leave it out.")
    return device


def _prepare_weights(
    source: str, revision: str | None, allow_unpinned: bool, access: weights.Access, requested: dict[str, int | None]
) -> Path:
    """Return the pipeline's folder, after checking its contract against the calls requested, by who requests them."""
    if weights.is_pipeline_folder(source):
        if revision is not None:
            raise UsageError(f"--revision is for repositories, but --overlay {source} is a folder; leave it out.")
        _check_steps(requested, weights.open_folder(Path(source)))
        return Path(source)
    overlay = weights.find_overlay(source, revision, allow_unpinned, access)
    _check_steps(requested, overlay.manifest.sampling.num_inference_steps)
    return weights.make_folder(overlay, access)


def _check_steps(requested: dict[str, int | None], trained: int | None) -> None:
    for name, steps in requested.items():
        if steps is not None and trained is not None and steps != trained:
            raise UsageError(
                f"{name} {steps}: these weights were made for {trained} transformer calls. Leave it out, or add "
                "--force-steps."
            )

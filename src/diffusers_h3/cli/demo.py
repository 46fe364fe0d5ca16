"""`diffusers-h3 demo`: the whole path, with a tiny model, on any machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import checks, options
from .console import UsageError, print_fields, print_json


def demo(
    prompt: Annotated[str, typer.Option(help="What to generate.")] = "A red fox runs through fresh snow at dawn.",
    output: Annotated[Path, typer.Option("--output", "-o", help="The mp4 to write.")] = Path("demo.mp4"),
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    cache_dir: options.CacheDir = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Make a five-second clip with sound from the embedded tiny model.

    It builds a release of a few megabytes with random weights, merges it as a real one, runs the real pipeline on the
    CPU, and decodes the file it saved. What you see and hear is noise: it shows that everything works here.

    [bold]Example[/bold]

    diffusers-h3 demo -o demo.mp4
    """
    checks.check_output(output, overwrite)
    checks.check_seed(seed)
    if not prompt.strip():
        raise UsageError("--prompt is empty; say what to generate.")

    from ..demo.run import make_demo_video

    report = make_demo_video(output, prompt, seed, cache_dir, overwrite)
    if as_json:
        print_json({"output": str(output.absolute()), "seed": seed, **asdict(report)})
        return
    print_fields(
        {
            "file": output,
            "video": f"{report.frames} frames, {report.fps:g} fps, {report.width}x{report.height}, "
            f"{report.video_seconds:.3f} s",
            "sound": f"{report.audio_channels} channels, {report.sampling_rate} Hz, {report.audio_seconds:.3f} s",
        }
    )

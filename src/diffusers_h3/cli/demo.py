"""`diffusers-h3 demo`: the whole path, with a tiny model, on any machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..demo.grammar import BACKGROUNDS, COLOURS, MOTIONS, PITCHES, all_prompts, describe, nearest_prompts
from . import checks, options
from .console import UsageError, messages, print_fields, print_json


GRAMMAR_HELP = "\n\n".join(
    [
        "[bold]What the model knows[/bold]: a COLOUR SHAPE MOTION, with or without: on a BACKGROUND background",
        *(
            f"{name}: {', '.join(values)}"
            for name, values in (
                ("COLOUR", COLOURS),
                ("SHAPE", PITCHES),
                ("MOTION", MOTIONS.values()),
                ("BACKGROUND", BACKGROUNDS),
            )
        ),
    ]
)


def demo(
    prompt: Annotated[str, typer.Option(help="What to generate.")] = describe("red", "circle", "right"),
    output: Annotated[Path, typer.Option("--output", "-o", help="The mp4 to write.")] = Path("demo.mp4"),
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    contact_sheet: Annotated[
        Path | None, typer.Option(help="A .png to write too: frames, the waveforms under them.", show_default=False)
    ] = None,
    cache_dir: options.CacheDir = None,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Make a five-second clip with sound from the embedded tiny model.

    The model was trained to move coloured shapes to a tone, whose pitch follows the shape and whose pan
    follows its place. It is a release of a few megabytes: the command merges it as a real one, runs the
    real pipeline on the CPU, and decodes the file it saved.

    [bold]Example[/bold]

    diffusers-h3 demo --prompt "a cyan square orbits around the centre" -o demo.mp4 --contact-sheet demo.png
    """
    checks.check_output(output, overwrite)
    if contact_sheet is not None:
        checks.check_output(contact_sheet, overwrite, "--contact-sheet", ".png")
    checks.check_seed(seed)
    if not prompt.strip():
        raise UsageError("--prompt is empty; say what to generate.")
    if prompt not in all_prompts():
        nearest = ", ".join(repr(sentence) for sentence in nearest_prompts(prompt))
        messages.print(
            f"The demo's model was not trained on this prompt; the nearest it knows: {nearest}.", markup=False
        )

    from ..demo.run import make_demo_video

    report = make_demo_video(output, prompt, seed, contact_sheet, cache_dir, overwrite)
    if as_json:
        sheet = None if contact_sheet is None else str(contact_sheet.absolute())
        result = {"output": str(output.absolute()), "contact_sheet": sheet, "prompt": prompt, "seed": seed}
        print_json({**result, **asdict(report)})
        return
    fields = {
        "file": output,
        "video": f"{report.frames} frames, {report.fps:g} fps, {report.width}x{report.height}, "
        f"{report.video_seconds:.3f} s",
        "sound": f"{report.audio_channels} channels, {report.sampling_rate} Hz, {report.audio_seconds:.3f} s",
    }
    if contact_sheet is not None:
        fields["sheet"] = contact_sheet
    print_fields(fields)

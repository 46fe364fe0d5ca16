"""`diffusers-h3 plan`: rows, memory and time of a request, before anything is downloaded."""

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from . import options
from .console import UsageError, messages, option_names, print_json, results


if TYPE_CHECKING:
    from ..planning.advice import Alternative
    from ..planning.cards import Card
    from ..planning.estimate import Estimate, Settings
    from ..planning.workload import Clip

_FRAMES_PER_SECOND = 24
_OVERLAY = "vdn-h3-8step"
_NOT_COUNTED = (
    "text encoder and VAEs, in memory and time: under --offload model and --offload group they take turns with the "
    "transformer, and the VAE decodes in tiles unless told otherwise"
)


class Precision(StrEnum):
    """What the wide linear layers are computed in."""

    bf16 = "bf16"
    fp8 = "fp8"


def plan(
    height: Annotated[
        int | None, typer.Option(help="Height in pixels, a multiple of 32; with --width.", show_default=False)
    ] = None,
    width: Annotated[int | None, typer.Option(help="Width in pixels. Default: 16:9.", show_default=False)] = None,
    frames: Annotated[
        int, typer.Option("--frames", "--num-frames", help="Frames at 24 per second: 124, 141, …, 345 (17·n + 5).")
    ] = 124,
    precision: Annotated[Precision, typer.Option(help="Of the wide linear layers.")] = Precision.bf16,
    attention_fp8: Annotated[
        bool, typer.Option("--attention-fp8", help="Attention in fp8 too (compute capability 9.0 alone).")
    ] = False,
    eager: Annotated[
        bool, typer.Option("--eager", help="Blocks that are not compiled: 'generate' without --compile.")
    ] = False,
    card: Annotated[
        str | None,
        typer.Option(
            help="H200, B200, 'RTX 4090', … Default: this machine's first GPU, or an H200 without one.",
            show_default=False,
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(help="Memory in GB, of a card that has no name here or less free.", show_default=False),
    ] = None,
    text_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 200,
    as_json: options.Json = False,
) -> None:
    """Say what a video needs: rows, memory, time, and what would fit if it does not. Downloads nothing.

    Figures rest on runs on an H200 and say so: measured (this very request was run), interpolated (between two lengths
    that were run), extrapolated (all else; other cards are scaled by their published peaks).

    With --json: "overlay", "card", "settings", "rows", "estimate", "not_counted", and "alternatives", what would fit,
    each with "changes", "settings" and "estimate". Memory is in GB of 10^9 bytes.

    [bold]Examples[/bold]

    diffusers-h3 plan --frames 345 --precision fp8 --card H200

    diffusers-h3 plan --height 768 --width 1344 --card "RTX 4090"

    diffusers-h3 plan --frames 345 --gpu-memory 48 --json
    """
    clip = _resolve_clip(height, width, frames, text_tokens)
    target = _find_card(card, gpu_memory)

    from ..overlays import builtin_overlays
    from ..planning.advice import alternatives
    from ..planning.estimate import Settings, estimate, precision_refusal

    settings = Settings(clip, str(precision), "fp8" if attention_fp8 else "bf16", compiled=not eager)
    if refusal := precision_refusal(target, settings.precision, settings.attention_precision):
        raise UsageError(f"{refusal} Take bf16, or another --card.")
    steps = builtin_overlays()[_OVERLAY].sampling.recommended_num_inference_steps
    found = estimate(settings, target)
    others = [] if found.fits else alternatives(settings, target)
    if as_json:
        print_json(_to_dict(settings, target, found, others, steps))
    else:
        _print_plan(settings, target, found, steps)
        if not found.fits:
            _print_alternatives(others, steps)


def _resolve_clip(height: int | None, width: int | None, frames: int, text_tokens: int) -> "Clip":
    from ..planning.workload import resolve_clip

    try:
        return resolve_clip(height, width, frames, text_tokens)
    except ValueError as error:
        raise UsageError(option_names(str(error))) from error


def _find_card(name: str | None, gpu_memory: float | None) -> "Card":
    """Return the card asked for, this machine's first GPU, or the one that was measured."""
    from dataclasses import replace

    from ..planning.cards import Card, card_of_device, find_card

    if gpu_memory is not None and not 0 < gpu_memory < float("inf"):
        raise UsageError(f"--gpu-memory must be a positive number of GB, got {gpu_memory:g}.")
    if name is not None:
        try:
            found = find_card(name)
        except ValueError as error:
            raise UsageError(f"--card {error}") from error
        return found if gpu_memory is None else replace(found, memory=gpu_memory)
    if gpu_memory is not None:
        return Card("a card without a name", gpu_memory)

    import torch

    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return card_of_device(device.name, device.total_memory, (device.major, device.minor))
    messages.print("No CUDA GPU here and no --card: planning for an H200.", markup=False)
    return find_card("H200")


def _print_table(header: list[str] | None, rows: list[list[str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for line in [header, *rows] if header else rows:
        table.add_row(*map(escape, line))
    results.print(table, soft_wrap=False)


def _seconds_text(found: "Estimate", calls: int) -> str:
    """Return the time of some calls, in seconds up to three minutes and minutes beyond."""
    if found.seconds_per_call is None:
        return "?"
    seconds = found.seconds_per_call * calls
    duration = f"{seconds:.1f} s" if seconds < 180 else f"{seconds / 60:.0f} min"
    return f"≥ {duration}" if found.is_lower_bound else duration


def _print_plan(settings: "Settings", card: "Card", found: "Estimate", steps: int) -> None:
    clip = settings.clip
    what = f"{settings.precision} linear layers, {settings.attention_precision} attention"
    what += ", compiled blocks" if settings.compiled else ", eager"
    verdict, takes = ("fits", "") if found.fits else ("does not fit", "would be ")
    fields = {
        "video": f"{clip.num_frames} frames ({clip.num_frames / _FRAMES_PER_SECOND:.1f} s) of "
        f"{clip.width}×{clip.height}, {what}",
        "card": f"{card.name}, {card.memory:.0f} GB, {found.available_gb:.0f} usable",
        "rows": f"{clip.rows:,}: text {clip.text_rows:,}, audio {clip.audio_rows:,}, video {clip.video_rows:,}; a "
        f"keyframe adds {clip.rows_per_frame:,}",
        "memory": f"{found.peak_gb:.1f} GB, {verdict}: weights {found.weights_gb:.1f}, activations "
        f"{found.activations_gb:.1f}",
        "time": f"{takes}{_seconds_text(found, 1)} a call, {_seconds_text(found, steps)} a video ({steps} calls)"
        if card.rates
        else "unknown: name a --card",
        "basis": f"{found.basis}: {'; '.join(found.reasons)}",
        "not counted": _NOT_COUNTED,
    }
    _print_table(None, [[name, text] for name, text in fields.items()])


def _print_alternatives(others: list["Alternative"], steps: int) -> None:
    if not others:
        results.print("\nNothing fits this card, down to 124 frames on a canvas of 256 pixels.", markup=False)
        return
    results.print("\nWhat would fit, the smallest change first:", markup=False)
    rows = [
        [
            "; ".join(other.changes),
            f"{other.estimate.peak_gb:.1f} GB",
            f"{other.estimate.weights_gb:.1f} GB",
            _seconds_text(other.estimate, steps),
            other.estimate.basis,
        ]
        for other in others
    ]
    _print_table(["change", "memory", "weights", "a video", "basis"], rows)
    if any(other.settings.offload != "none" for other in others):
        results.print("\nGroup offload keeps all weights in the computer's own memory.", markup=False)


def _to_dict(
    settings: "Settings", card: "Card", found: "Estimate", others: list["Alternative"], steps: int
) -> dict[str, Any]:
    """Return the plan as data."""
    return {
        "overlay": _OVERLAY,
        "card": asdict(card),
        "settings": _settings_dict(settings),
        "rows": {
            "total": settings.clip.rows,
            "text": settings.clip.text_rows,
            "audio": settings.clip.audio_rows,
            "video": settings.clip.video_rows,
        },
        "estimate": _estimate_dict(found, steps),
        "not_counted": _NOT_COUNTED,
        "alternatives": [
            {
                "changes": list(other.changes),
                "settings": _settings_dict(other.settings),
                "estimate": _estimate_dict(other.estimate, steps),
            }
            for other in others
        ],
    }


def _settings_dict(settings: "Settings") -> dict[str, Any]:
    clip = settings.clip
    return {
        "height": clip.height,
        "width": clip.width,
        "frames": clip.num_frames,
        "precision": settings.precision,
        "attention_precision": settings.attention_precision,
        "offload": settings.offload,
        "compiled": settings.compiled,
    }


def _estimate_dict(found: "Estimate", steps: int) -> dict[str, Any]:
    seconds = found.seconds_per_call
    return {
        **asdict(found),
        "peak_gb": found.peak_gb,
        "fits": found.fits,
        "calls": steps,
        "seconds_per_video": None if seconds is None else seconds * steps,
    }

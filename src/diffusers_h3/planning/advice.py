"""Other settings that would fit a card, the smallest change first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from .cards import Card
from .estimate import Estimate, Settings, estimate, precision_refusal
from .workload import OFFLOADS, resolve_clip


# Below, a canvas has too few rows to show anything.
_SHORTEST_EDGE = 256

# Yields the settings that one kind of change leads to, in words and as they are then, the gentlest first.
Change = Callable[[Settings, Card], Iterator[tuple[str, Settings]]]


@dataclass(frozen=True)
class Alternative:
    """Settings that fit, and how they differ from what was asked for."""

    changes: tuple[str, ...]
    settings: Settings
    estimate: Estimate


def alternatives(settings: Settings, card: Card) -> list[Alternative]:
    """Return what fits with the fewest changes, each as small as will do; nothing if nothing fits.

    What leaves the video as it is comes before what makes it shorter or smaller.
    """
    for count in range(1, len(_CHANGES) + 1):
        fitting = [_gentlest(settings, card, changes) for changes in combinations(_CHANGES, count)]
        found = [alternative for alternative in fitting if alternative is not None]
        if found:
            return found
    return []


def _gentlest(settings: Settings, card: Card, changes: tuple[Change, ...]) -> Alternative | None:
    for words, changed in _apply(changes, settings, card):
        found = estimate(changed, card)
        if found.fits:
            return Alternative(words, changed, found)
    return None


def _apply(changes: tuple[Change, ...], settings: Settings, card: Card) -> Iterator[tuple[tuple[str, ...], Settings]]:
    """Yield what all the changes together lead to."""
    if not changes:
        yield (), settings
        return
    for words, changed in changes[0](settings, card):
        for others, final in _apply(changes[1:], changed, card):
            yield (words, *others), final


def _compiled_blocks(settings: Settings, card: Card) -> Iterator[tuple[str, Settings]]:
    if not settings.compiled:
        yield "compiled blocks", replace(settings, compiled=True)


def _fp8_linears(settings: Settings, card: Card) -> Iterator[tuple[str, Settings]]:
    if settings.precision != "fp8" and not precision_refusal(card, "fp8", settings.attention_precision):
        yield "fp8 linear layers", replace(settings, precision="fp8")


def _block_offload(settings: Settings, card: Card) -> Iterator[tuple[str, Settings]]:
    yield from _offload(settings, "block", "two blocks and what is outside the blocks on the GPU")


def _leaf_offload(settings: Settings, card: Card) -> Iterator[tuple[str, Settings]]:
    yield from _offload(settings, "leaf", "two layers on the GPU")


def _offload(settings: Settings, offload: str, resident: str) -> Iterator[tuple[str, Settings]]:
    if OFFLOADS.index(offload) > OFFLOADS.index(settings.offload):
        yield f"group offload by {offload} ({resident})", replace(settings, offload=offload)


def _shorter(settings: Settings, card: Card) -> Iterator[tuple[str, Settings]]:
    from diffusers.modular_pipelines import MiniMaxH3ModularPipeline

    clip, step = settings.clip, MiniMaxH3ModularPipeline().vae_frames_per_chunk
    for num_frames in range(clip.num_frames - step, 0, -step):
        try:
            shorter = resolve_clip(clip.height, clip.width, num_frames, clip.text_rows)
        except ValueError:  # shorter than the models make
            return
        yield f"{num_frames} frames", replace(settings, clip=shorter)


def _smaller(settings: Settings, card: Card) -> Iterator[tuple[str, Settings]]:
    from diffusers.modular_pipelines import MiniMaxH3ModularPipeline
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import resolve_canvas_size

    clip, multiple = settings.clip, MiniMaxH3ModularPipeline().canvas_multiple
    seen = {(clip.height, clip.width)}
    for short_edge in range(min(clip.height, clip.width) - multiple, _SHORTEST_EDGE - 1, -multiple):
        try:
            canvas = resolve_canvas_size(clip.width, clip.height, multiple, short_edge, clip.width * clip.height)
        except ValueError:  # of a shape the models were not trained on, so there is none to advise
            return
        if canvas not in seen:
            seen.add(canvas)
            smaller = resolve_clip(*canvas, clip.num_frames, clip.text_rows)
            yield f"{canvas[1]}×{canvas[0]}", replace(settings, clip=smaller)


_CHANGES: tuple[Change, ...] = (
    _compiled_blocks,
    _fp8_linears,
    _block_offload,
    _leaf_offload,
    _shorter,
    _smaller,
)

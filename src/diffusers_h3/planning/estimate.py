"""Memory and time of one request on one card, each with what it rests on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product

from .cards import FP8_ATTENTION_CAPABILITY, FP8_LINEARS_CAPABILITY, MINIMUM_CAPABILITY, Card, dotted, find_card
from .measured import Measurement, measurements
from .workload import INNER_DIM, OFFLOADS, Clip, model_seconds, moved_bytes, resident_bytes


# What a process holds beside PyTorch's allocations, which is all the measured peaks count: the CUDA context and the
# libraries' handles.
RESERVED_GB = 1.0

MEASURED, INTERPOLATED, EXTRAPOLATED = "measured", "interpolated", "extrapolated"


@dataclass(frozen=True)
class Settings:
    """What is run: `"bf16"` or `"fp8"` linear layers and attention, `"none"`, `"block"` or `"leaf"` group offload.

    An offload is one with streams, as `generate --offload group` has it. `compiled` says whether the
    blocks are, under offload by leaf their linear layers.
    """

    clip: Clip
    precision: str = "bf16"
    attention_precision: str = "bf16"
    offload: str = "none"
    compiled: bool = True


@dataclass(frozen=True)
class Estimate:
    """What the transformer needs for one request, in GB of 10^9 bytes and seconds.

    Args:
        weights_gb (`float`): Weights on the GPU at once.
        activations_gb (`float`): Everything else at the peak.
        available_gb (`float`): The card's memory without what the process holds itself.
        seconds_per_call (`float`, *optional*): Null for a card of unknown speed.
        is_lower_bound (`bool`): Whether a call takes at least `seconds_per_call`, not about it.
        basis (`str`): `"measured"`, `"interpolated"` or `"extrapolated"`.
        reasons (`tuple[str, ...]`): The measurements used, and what was assumed beyond them.
    """

    weights_gb: float
    activations_gb: float
    available_gb: float
    seconds_per_call: float | None
    is_lower_bound: bool
    basis: str
    reasons: tuple[str, ...]

    @property
    def peak_gb(self) -> float:
        """Weights and activations."""
        return self.weights_gb + self.activations_gb

    @property
    def fits(self) -> bool:
        """Whether the peak fits in what is available."""
        return self.peak_gb <= self.available_gb


def precision_refusal(card: Card, precision: str, attention_precision: str) -> str | None:
    """Say why a card cannot compute in these precisions, in one sentence, or return None."""
    if card.capability is None:
        return None
    has = f"{card.name} has {dotted(card.capability)}"
    if card.capability < MINIMUM_CAPABILITY:
        return f"The attention kernels need compute capability {dotted(MINIMUM_CAPABILITY)} or newer, and {has}."
    if precision == "fp8" and card.capability < FP8_LINEARS_CAPABILITY:
        return f"fp8 linear layers need compute capability {dotted(FP8_LINEARS_CAPABILITY)} or newer, and {has}."
    if attention_precision == "fp8" and card.capability != FP8_ATTENTION_CAPABILITY:
        return f"fp8 attention exists for compute capability {dotted(FP8_ATTENTION_CAPABILITY)} alone, and {has}."
    return None


def estimate(settings: Settings, card: Card) -> Estimate:
    """Estimate memory and time from the measurements nearest to the request.

    Between two measured lengths the ratio of measured to modelled cost is interpolated in log-log; beyond them it is
    that of the nearest. The model (`model_seconds`) carries it to other lengths, canvases and cards.
    """
    found, substituted = _measurements_for(settings)
    clip, last = settings.clip, found[-1]
    reasons = [_describe(found), *substituted]
    if last.offload == settings.offload:
        weights = last.weights_gb * 1e9
    else:
        weights = resident_bytes(settings.precision, settings.offload, use_stream=True)
    activations = (
        clip.rows
        * INNER_DIM
        * _calibrate(found, clip, lambda entry: entry.activation_bytes / (entry.rows * INNER_DIM))
    )
    seconds, is_lower_bound = None, False
    if card.rates is None:
        reasons.append(f"no speed is known for {card.name}")
    else:
        seconds, is_lower_bound = _seconds(settings, card, found)
    basis = _basis(found, clip, exact=not substituted and _is_measured_card(card, last))
    if not _is_measured_card(card, last) and card.rates is not None:
        reasons.append(f"scaled to {card.name} by published peaks ({card.source})")
    if is_lower_bound:
        reasons.append("moving the weights once a call is added at the peak of PCIe")
    return Estimate(
        weights_gb=weights / 1e9,
        activations_gb=activations / 1e9,
        available_gb=card.memory - RESERVED_GB,
        seconds_per_call=seconds,
        is_lower_bound=is_lower_bound,
        basis=basis,
        reasons=tuple(reasons),
    )


def _measurements_for(settings: Settings) -> tuple[list[Measurement], list[str]]:
    """Return measurements of these settings by length, or of the nearest measured ones and what was put for what."""
    for attention, offload in product(
        dict.fromkeys((settings.attention_precision, "bf16")), dict.fromkeys((settings.offload, *OFFLOADS))
    ):
        found = _select(settings.precision, attention, offload, settings.compiled)
        if found:
            substituted = []
            if attention != settings.attention_precision:
                substituted.append("no run with fp8 attention: taken to cost what bf16 attention does")
            if offload != settings.offload:
                missing = (
                    "without offload" if settings.offload == "none" else f"with group offload by {settings.offload}"
                )
                substituted.append(f"no run {missing}")
            return found, substituted
    blocks = "" if settings.compiled else " of blocks that are not compiled"
    raise LookupError(f"The table of measurements has no run in {settings.precision}{blocks}.")


def _select(precision: str, attention_precision: str, offload: str, compiled: bool) -> list[Measurement]:
    """Return the measurements of VDN-H3 with these settings, shortest first, one a clip: the newest, then fastest."""
    wanted = ("hybrid", precision, attention_precision, offload, compiled)
    by_clip = {
        entry.clip: entry
        for entry in sorted(measurements(), key=lambda entry: (entry.date, -entry.seconds_per_call))
        if (entry.model, entry.precision, entry.attention_precision, entry.offload, entry.is_compiled) == wanted
    }
    return sorted(by_clip.values(), key=lambda entry: entry.rows)


def _calibrate(found: list[Measurement], clip: Clip, ratio: Callable[[Measurement], float]) -> float:
    """Return the ratio at a length: between two measured ones in log-log, beyond them the nearest one's."""
    for entry in found:
        if entry.clip == clip:
            return ratio(entry)
    for shorter, longer in pairwise(found):
        if shorter.rows <= clip.rows < longer.rows:
            share = math.log(clip.rows / shorter.rows) / math.log(longer.rows / shorter.rows)
            return ratio(shorter) ** (1 - share) * ratio(longer) ** share
    nearest = min(found, key=lambda entry: abs(entry.rows - clip.rows))
    return ratio(nearest)


def _seconds(settings: Settings, card: Card, found: list[Measurement]) -> tuple[float, bool]:
    """Return the seconds of one call and whether they are a lower bound."""
    measured = found[-1]
    precisions = (measured.precision, measured.attention_precision)

    def ratio(entry: Measurement) -> float:
        rates = _card_of(entry).rates
        return entry.seconds_per_call / model_seconds(entry.clip, *precisions, rates)

    seconds = model_seconds(settings.clip, *precisions, card.rates) * _calibrate(found, settings.clip, ratio)
    moving = moved_bytes(settings.precision, settings.offload) / (card.rates.host * 1e9)
    if measured.offload == settings.offload:
        # What hid the moving on the card that was measured may take less time than it here.
        return max(seconds, moving), False
    # Without an offload nothing is moved, and a run with one took no less.
    return seconds + moving, settings.offload != "none"


def _basis(found: list[Measurement], clip: Clip, exact: bool) -> str:
    if not exact:
        return EXTRAPOLATED
    if any(entry.clip == clip for entry in found):
        return MEASURED
    on_canvas = [entry.rows for entry in found if (entry.height, entry.width) == (clip.height, clip.width)]
    if on_canvas and min(on_canvas) <= clip.rows <= max(on_canvas):
        return INTERPOLATED
    return EXTRAPOLATED


def _describe(found: list[Measurement]) -> str:
    """Name the measurements an estimate rests on."""
    first = found[0]
    frames = " and ".join(
        f"{entry.frames}{' (blocks not compiled)' if entry.compiled is False else ''}" for entry in found
    )
    offload = "" if first.offload == "none" else f", group offload by {first.offload}"
    if all(entry.use_stream for entry in found):
        offload += " with streams"
    return (
        f"runs on {first.card} of {frames} frames of {first.width}×{first.height}, {first.precision}, attention "
        f"{first.attention_precision}{offload} ({', '.join(sorted({entry.date for entry in found}))})"
    )


def _card_of(entry: Measurement) -> Card:
    """Return the card of the table that a measurement was taken on."""
    return find_card(entry.card)


def _is_measured_card(card: Card, entry: Measurement) -> bool:
    return card.name == _card_of(entry).name

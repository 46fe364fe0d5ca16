"""What fits on which card, by the planner's own estimates and by runs under a cap."""

import sys

from performance import BENCHMARKS, newest, table

from diffusers_h3.planning.advice import alternatives
from diffusers_h3.planning.cards import CARDS, Card
from diffusers_h3.planning.estimate import Settings, estimate, precision_refusal
from diffusers_h3.planning.workload import resolve_clip


_FRAMES = (124, 345)
_TEXT_ROWS = 200


def what_fits() -> str:
    """Return the table of cards: the gentlest settings that fit a short and a long clip of the default canvas."""
    rows = [[card.name, f"{card.memory:g}", *(_settings(card, frames) for frames in _FRAMES)] for card in CARDS]
    header = ["card", "GB", *(f"{frames} frames of 1344×768" for frames in _FRAMES)]
    return table(header, rows)


def under_a_cap() -> str:
    """Return the tables of the newest run with a capped allocator."""
    try:
        report, source = newest(lambda report: "decoding" in report)
    except LookupError:
        return "No such run is among the results yet."
    sys.path.insert(0, str(BENCHMARKS))
    from bench_memory import decoding_table, transformer_table

    caps = " and ".join(", ".join(f"{cap:g}" for cap in sorted(report["settings"]["caps"])).rsplit(", ", 1))
    lines = [f"{source} Caps of {caps} GB"]
    outside = [row["outside_gb"] for row in (*report["runs"], *report["decoding"]) if "outside_gb" in row]
    if outside:
        lines[0] += f"; what the process holds outside of them was {max(outside):.1f} GB"
    return "\n".join([f"{lines[0]}.", "", *transformer_table(report), "", *decoding_table(report)])


def _settings(card: Card, frames: int) -> str:
    settings = Settings(resolve_clip(768, 1344, frames, _TEXT_ROWS))
    if precision_refusal(card, settings.precision, settings.attention_precision):
        return "cannot compute it"
    found = estimate(settings, card)
    if found.fits:
        return f"as it is: {found.peak_gb:.0f} GB, {found.basis}"
    others = alternatives(settings, card)
    if not others:
        return "does not fit"
    best = others[0]
    changes = ", ".join(change.partition(" (")[0] for change in best.changes)
    return f"{changes}: {best.estimate.peak_gb:.0f} GB, {best.estimate.basis}"

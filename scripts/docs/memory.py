"""What fits on which card, by the planner's own estimates and by runs under a cap."""

import sys
from collections.abc import Iterable
from typing import Any

from performance import BENCHMARKS, reports, table

from diffusers_h3.planning.advice import alternatives
from diffusers_h3.planning.cards import CARDS, Card
from diffusers_h3.planning.estimate import Settings, estimate, precision_refusal
from diffusers_h3.planning.workload import resolve_clip


_FRAMES = (124, 345)
_TEXT_ROWS = 200
# What tells the settings of rows apart.
_SETTING = ("run", "offload", "use_stream", "compiled_parts", "tiling", "frames")


def what_fits() -> str:
    """Return the table of cards: the gentlest settings that fit a short and a long clip of the default canvas."""
    rows = [[card.name, f"{card.memory:g}", *(_settings(card, frames) for frames in _FRAMES)] for card in CARDS]
    header = ["card", "GB", *(f"{frames} frames of 1344×768" for frames in _FRAMES)]
    return table(header, rows)


def under_a_cap() -> str:
    """Return the tables of the runs with a capped allocator, of one card: of each setting the newest that ran."""
    try:
        found = reports(lambda report: "decoding" in report)
    except LookupError:
        return "No such run is among the results yet."
    sys.path.insert(0, str(BENCHMARKS))
    from bench_memory import decoding_table, transformer_table

    card = found[-1][0]["environment"]["device"]
    found = [(report, source) for report, source in found if report["environment"]["device"] == card]
    merged = {kind: _newest_rows(row for report, _ in found for row in report[kind]) for kind in ("runs", "decoding")}
    caps = sorted({cap for report, _ in found for cap in report["settings"]["caps"]})
    note = f"Caps of {' and '.join(', '.join(f'{cap:g}' for cap in caps).rsplit(', ', 1))} GB"
    outside = [row["outside_gb"] for row in (*merged["runs"], *merged["decoding"]) if "outside_gb" in row]
    if outside:
        note += f"; what the process holds outside of them was {max(outside):.1f} GB"
    lines = [*(source for _, source in found), f"{note}."]
    return "\n".join([*lines, "", *transformer_table(merged), "", *decoding_table(merged)])


def _newest_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last row of every setting, of rows in order; one that only says it was not run replaces none."""
    from bench_memory import NOT_RUN

    kept = {}
    for row in rows:
        setting = tuple(row.get(name) for name in _SETTING)
        if setting not in kept or not row.get("failed", "").startswith(NOT_RUN):
            kept[setting] = row
    return list(kept.values())


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

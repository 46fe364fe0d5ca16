"""What the embedded model makes of prompts it was never trained on."""

import json
from pathlib import Path

from performance import RESULTS, table


FIGURES = Path(__file__).parents[2] / "docs" / "figures"
SHEET = "demo.png"

_MODELS = {
    "dense": "dense, 50 calls",
    "hybrid": "hybrid, 50 calls",
    "turbo": "hybrid, 8 calls (the demo)",
}
_ATTRIBUTES = ("colour", "shape", "motion", "pitch", "pan", "all")


def figures(folder: str, results: Path = RESULTS, sheet: Path = FIGURES / SHEET) -> str:
    """Return the table of the newest `*-demo.json`, and the contact sheet where there is one.

    Args:
        folder (`str`): The folder of figures as the page names it.
        results (`Path`): Where results are.
        sheet (`Path`): The picture.
    """
    reports = sorted(results.glob("*-demo.json"))
    if not reports:
        return "No trained model has been evaluated yet."
    report = json.loads(reports[-1].read_text(encoding="utf-8"))
    rows = [
        [name, *(f"{100 * report[model][attribute]:.0f} %" for attribute in _ATTRIBUTES)]
        for model, name in _MODELS.items()
    ]
    clips = {report[model]["clips"] for model in _MODELS}
    if len(clips) != 1:
        raise ValueError(f"{reports[-1].name} compares models on different numbers of clips: {sorted(clips)}.")
    source = f"{clips.pop()} clips a model, recognised by geometry: `benchmarks/results/{reports[-1].name}`."
    parts = [table(["model", *_ATTRIBUTES], rows), source]
    if sheet.is_file():
        parts.append(f"![Clips of held-out prompts, with the waveforms under them]({folder}/{sheet.name})")
    return "\n\n".join(parts)

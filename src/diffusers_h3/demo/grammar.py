"""The sentences the embedded model was trained on, and what they stand for.

A sentence is ``a COLOUR SHAPE MOTION``, and may end in ``on a BACKGROUND background``; without one it is dark.
"""

import difflib


SIZE = 96
NUM_FRAMES = 124

# RGB in [0, 1].
COLOURS = {
    "red": (0.90, 0.12, 0.12),
    "yellow": (0.92, 0.85, 0.10),
    "green": (0.12, 0.75, 0.15),
    "cyan": (0.10, 0.80, 0.85),
    "blue": (0.15, 0.22, 0.95),
    "magenta": (0.90, 0.15, 0.80),
}
# Every shape has a tone, in hertz. A whole number of cycles fits one audio latent (1/40 s), so that a steady tone is a
# steady latent.
PITCHES = {"circle": 440.0, "square": 280.0, "triangle": 680.0}
MOTIONS = {
    "right": "moves left to right",
    "left": "moves right to left",
    "up": "rises to the top",
    "down": "falls to the bottom",
    "bounce": "bounces on the floor",
    "orbit": "orbits around the centre",
}
BACKGROUNDS = ("dark", "light", "striped")


def describe(colour: str, shape: str, motion: str, background: str | None = None) -> str:
    """Return the sentence for one combination; without a background it is a dark one.

    >>> from diffusers_h3.demo.grammar import describe
    >>> describe("cyan", "square", "orbit", "striped")
    'a cyan square orbits around the centre on a striped background'
    """
    ending = "" if background is None else f" on a {background} background"
    return f"a {colour} {shape} {MOTIONS[motion]}{ending}"


def all_prompts() -> list[str]:
    """Return every sentence of the grammar."""
    return [
        describe(colour, shape, motion, background)
        for colour in COLOURS
        for shape in PITCHES
        for motion in MOTIONS
        for background in (None, *BACKGROUNDS)
    ]


def nearest_prompts(prompt: str, count: int = 3) -> list[str]:
    """Return the `count` sentences most like `prompt`, the nearest first."""
    return difflib.get_close_matches(prompt.lower(), all_prompts(), n=count, cutoff=0.0)

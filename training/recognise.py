"""Say what is in a clip by plain geometry: no network looks at what a network made."""

import math
from dataclasses import dataclass

import numpy as np

from .data import COLOURS, FPS, MARGIN, PITCHES, SAMPLING_RATE


# A pixel belongs to the shape where it is at least this part as colourful as the frame's most colourful ones.
_COLOURFUL = 0.5
_FAINTEST = 0.15

# Of its bounding box a square fills all, a circle π/4, a triangle half; the bounds lie in the middle.
_SQUARE_FILL, _CIRCLE_FILL = (1 + math.pi / 4) / 2, (math.pi / 4 + 0.5) / 2

_PITCH_TOLERANCE = 0.05
_STILL, _TRAVEL = 0.18, 0.4
_PAN_WINDOW = 0.1
_PAN_TOLERANCE = 0.15


@dataclass(frozen=True)
class Sight:
    """What is seen: names (None where there is nothing to name) and the centres ``[T, 2]`` in [0, 1], NaN if lost."""

    colour: str | None
    shape: str | None
    motion: str | None
    centres: np.ndarray


@dataclass(frozen=True)
class Sound:
    """What is heard: the shape whose pitch it is, and the mean distance of pan and sight, in widths of the canvas."""

    shape: str | None
    pan_error: float

    @property
    def pan_follows(self) -> bool:
        """Whether the sound comes from where the shape is."""
        return self.pan_error <= _PAN_TOLERANCE


def see(frames: np.ndarray) -> Sight:
    """Recognise colour, shape and motion in RGB frames ``[T, H, W, 3]`` in [0, 1]."""
    chroma = frames.max(axis=3) - frames.min(axis=3)
    brightest = np.percentile(chroma.reshape(len(frames), -1), 99, axis=1)
    masks = (chroma >= _COLOURFUL * brightest[:, None, None]) & (brightest[:, None, None] >= _FAINTEST)
    seen = masks.any(axis=(1, 2))
    centres = np.full((len(frames), 2), np.nan)
    if seen.mean() < 0.5:
        return Sight(None, None, None, centres)

    fills = []
    for index in np.flatnonzero(seen):
        rows, columns = np.nonzero(masks[index])
        # A few stray pixels must not stretch the box.
        top, bottom = np.percentile(rows, (1, 99))
        left, right = np.percentile(columns, (1, 99))
        box = (bottom - top + 1) * (right - left + 1)
        fills.append(len(rows) / box)
        # The middle of the box, since a triangle's mean lies low.
        centres[index] = ((left + right + 1) / 2 / frames.shape[2], (top + bottom + 1) / 2 / frames.shape[1])
    fill = float(np.median(fills))
    shape = "square" if fill > _SQUARE_FILL else "circle" if fill > _CIRCLE_FILL else "triangle"
    colour = _nearest_hue(np.median(frames[masks], axis=0))
    return Sight(colour, shape, _motion(centres[seen]), centres)


def hear(audio: np.ndarray, centres: np.ndarray) -> Sound:
    """Recognise the pitch of ``[2, N]`` at 32 kHz, and compare its pan with the shape's `centres` ``[T, 2]``."""
    spectrum = np.abs(np.fft.rfft(audio * np.hanning(audio.shape[1]), axis=1)).sum(axis=0)
    if not spectrum.max() > 1.0:
        return Sound(None, float("inf"))
    frequency = int(spectrum.argmax()) * SAMPLING_RATE / audio.shape[1]
    shape = min(PITCHES, key=lambda name: abs(PITCHES[name] - frequency))
    if abs(frequency / PITCHES[shape] - 1) > _PITCH_TOLERANCE:
        shape = None

    length = int(_PAN_WINDOW * SAMPLING_RATE)
    errors = []
    for start in range(0, audio.shape[1] - length + 1, length):
        left, right = np.square(audio[:, start : start + length]).mean(axis=1)
        frame = round((start + length / 2) / SAMPLING_RATE * FPS)
        if frame < len(centres) and not np.isnan(centres[frame, 0]):
            heard = MARGIN + (1 - 2 * MARGIN) * 2 / math.pi * math.atan2(math.sqrt(right), math.sqrt(left))
            errors.append(abs(heard - centres[frame, 0].clip(MARGIN, 1 - MARGIN)))
    return Sound(shape, float(np.mean(errors)) if errors else float("inf"))


def _nearest_hue(rgb: np.ndarray) -> str:
    """Return the colour whose direction from grey is nearest."""

    def direction(values) -> np.ndarray:
        offset = np.asarray(values, dtype=float) - np.mean(values)
        return offset / max(np.linalg.norm(offset), 1e-6)

    return max(COLOURS, key=lambda name: float(direction(COLOURS[name]) @ direction(rgb)))


def _motion(centres: np.ndarray) -> str | None:
    """Name the path of the centres ``[T, 2]``, or None if it is none of the six."""
    count = max(len(centres) // 12, 1)
    travel = np.median(centres[-count:], axis=0) - np.median(centres[:count], axis=0)
    low, high = np.percentile(centres, (3, 97), axis=0)
    width, height = high - low
    # How far the shape went in all, along the smoothed path.
    kernel = np.ones(5) / 5
    smooth = np.stack([np.convolve(centres[:, axis], kernel, mode="valid") for axis in (0, 1)], axis=1)
    path = np.abs(np.diff(smooth, axis=0)).sum(axis=0)
    if height < _STILL and abs(travel[0]) > _TRAVEL:
        return "right" if travel[0] > 0 else "left"
    if width < _STILL and height > _TRAVEL and path[1] > 1.8 * height:
        return "bounce"
    if width < _STILL and abs(travel[1]) > _TRAVEL:
        return "down" if travel[1] > 0 else "up"
    if width > _TRAVEL and height > _TRAVEL and path[0] > 1.8 * width:
        return "orbit"
    return None

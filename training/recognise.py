"""Say what is in a clip by plain geometry: no network looks at what a network made."""

import math
from dataclasses import dataclass

import numpy as np

from .data import COLOURS, FPS, MARGIN, PITCHES, SAMPLING_RATE


# A pixel belongs to the shape where it is at least this part of the way from the frame's background to its most
# colourful pixels; a frame where these are fainter shows nothing.
_COLOURFUL = 0.5
_FAINTEST = 0.15

# Widths and heights tried for a shape, in parts of those it would have if its area were the silhouette's: an
# autoencoder that loses slivers narrows a shape along its way.
_STRETCHES = np.linspace(0.9, 1.1, 9)
# An undistorted triangle overlaps by 0.71 with the square or circle that fits it best, upside down as well: what fits
# no better than that is none of the three.
_FIT = 0.72

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
    """Recognise colour, shape and motion in RGB frames ``[T, H, W, 3]`` in [0, 1], mostly of grey background."""
    red, green, blue = (frames[..., channel] for channel in range(3))
    chroma = np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)
    # Noise is colourful too: the background's level is where nothing is.
    level, brightest = np.percentile(chroma.reshape(len(frames), -1), (50, 99), axis=1)[..., None, None]
    masks = (chroma - level >= _COLOURFUL * (brightest - level)) & (brightest - level >= _FAINTEST)
    seen = masks.any(axis=(1, 2))
    centres = np.full((len(frames), 2), np.nan)
    if seen.mean() < 0.5:
        return Sight(None, None, None, centres)

    # The middle of the box, since a triangle's mean lies low.
    centres[seen] = np.stack([_middles(masks[seen].sum(axis=axis)) for axis in (1, 2)], axis=1)
    colour = _nearest_hue(np.median(frames[masks], axis=0))
    return Sight(colour, _best_fit(_silhouette(masks[seen])), _motion(centres[seen]), centres)


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


def _middles(counts: np.ndarray) -> np.ndarray:
    """Return the middles ``[T]``, in [0, 1], of what ``[T, S]`` counts of pixels along an axis span."""
    below = counts.cumsum(axis=1) / counts.sum(axis=1, keepdims=True)
    # A few stray pixels must not stretch the box.
    first, last = (below < 0.01).sum(axis=1), (below < 0.99).sum(axis=1)
    return (first + last + 1) / 2 / counts.shape[1]


def _silhouette(masks: np.ndarray) -> np.ndarray:
    """Average masks ``[T, H, W]``, none empty, laid over each other at their centroids: ``[S, S]`` in [0, 1].

    What single frames lose at the borders of an autoencoder's patches, others have.
    """
    # The tip of the tallest triangle that is tried is 1.04 sides of a square of its area from the centroid.
    reach = math.ceil(1.2 * math.sqrt(np.median(masks.sum(axis=(1, 2)))))
    rows, columns = (
        np.round(counts @ np.arange(counts.shape[1]) / counts.sum(axis=1)).astype(int)
        for counts in (masks.sum(axis=2), masks.sum(axis=1))
    )
    padded = np.pad(masks, ((0, 0), (reach, reach), (reach, reach)))
    span = 2 * reach + 1
    windows = [mask[y : y + span, x : x + span] for mask, y, x in zip(padded, rows, columns, strict=True)]
    return np.mean(windows, axis=0)


def _best_fit(silhouette: np.ndarray) -> str | None:
    """Name the shape that overlaps most with a silhouette ``[S, S]`` at its best width and height, or None."""
    area = silhouette.sum()
    if area == 0:
        return None
    pixels = np.arange(len(silhouette))
    sizes = math.sqrt(area) * _STRETCHES
    # One unit is the side of a square of the silhouette's area: ``[1, widths, 1, S]`` and ``[heights, 1, S, 1]``.
    x = (pixels - pixels @ silhouette.sum(axis=0) / area) / sizes[None, :, None, None]
    y = ((pixels - pixels @ silhouette.sum(axis=1) / area) / sizes[:, None])[:, None, :, None]
    edge = math.sqrt(2)
    # Signed distances as in `data.render_video`, from shapes of area 1 around their centroids.
    distances = {
        "circle": np.sqrt(x**2 + y**2) - 1 / math.sqrt(math.pi),
        "square": np.maximum(np.abs(x), np.abs(y)) - 0.5,
        "triangle": np.maximum((np.abs(x) - (y + 2 / 3 * edge) / 2) / math.sqrt(1.25), y - edge / 3),
    }
    fits = {}
    for name, distance in distances.items():
        coverage = (0.5 - math.sqrt(area) * distance).clip(0, 1)
        shared = np.minimum(coverage, silhouette).sum(axis=(2, 3))
        fits[name] = float((shared / (area + coverage.sum(axis=(2, 3)) - shared)).max())
    best = max(fits, key=fits.get)
    return best if fits[best] > _FIT else None


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

"""Clips at a glance: frames of each in a row, and the waveforms of its sound under them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw


_FRAMES, _SCALE = 8, 2
_CAPTION_HEIGHT, _WAVE_HEIGHT, _GAP = 14, 40, 6
_BORDER = 2
_WAVE_COLOURS = ("navy", "darkred")


@dataclass(frozen=True)
class Clip:
    """A clip and its prompt: frames ``[T, H, W, 3]`` in [0, 1] and stereo sound ``[2, N]`` in [-1, 1]."""

    prompt: str
    frames: np.ndarray
    audio: np.ndarray


def contact_sheet(clips: Sequence[Clip]) -> Image.Image:
    """Draw a row per clip: its prompt, eight frames, and under them the waveform, left channel above right.

    Clips have frames of one size, which are shown twice as large.
    """
    height, width = (size * _SCALE for size in clips[0].frames.shape[1:3])
    row_height = _CAPTION_HEIGHT + height + len(_WAVE_COLOURS) * _WAVE_HEIGHT + _GAP
    sheet = Image.new("RGB", (_FRAMES * width, len(clips) * row_height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, clip in enumerate(clips):
        top = row * row_height
        draw.text((4, top + 1), clip.prompt, fill="black")
        top += _CAPTION_HEIGHT
        for column, index in enumerate(np.linspace(0, len(clip.frames) - 1, _FRAMES).round().astype(int)):
            frame = Image.fromarray((clip.frames[index] * 255).round().astype(np.uint8))
            sheet.paste(frame.resize((width, height), Image.Resampling.NEAREST), (column * width, top))
            if column:
                draw.rectangle((column * width, top, column * width + _BORDER - 1, top + height - 1), fill="white")
        top += height + 2
        for channel, (samples, colour) in enumerate(zip(clip.audio, _WAVE_COLOURS, strict=True)):
            middle = top + _WAVE_HEIGHT * channel + _WAVE_HEIGHT // 2
            # One column of pixels per slice of the sound, from its lowest to its highest sample.
            for x, part in enumerate(np.array_split(samples.clip(-1, 1), sheet.width)):
                low, high = part.min() * _WAVE_HEIGHT / 2, part.max() * _WAVE_HEIGHT / 2
                draw.line((x, middle - high, x, middle - low), fill=colour)
    return sheet

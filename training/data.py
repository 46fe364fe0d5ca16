"""Procedural clips with sound: a coloured shape moves over a plain background, and a tone follows it.

Every clip is a pure function of its `Scenes` entry, rendered on whatever device the tensors are on.
"""

import math
from dataclasses import dataclass, fields

import torch

from diffusers_h3.demo.grammar import BACKGROUNDS, COLOURS, MOTIONS, NUM_FRAMES, PITCHES, SIZE, describe


FPS = 24
SAMPLING_RATE = 32000
SAMPLES_PER_LATENT = 800

_GREYS = {"dark": (0.12, 0.12), "light": (0.88, 0.88), "striped": (0.30, 0.45)}
_STRIPE = 12

COLOUR_NAMES, SHAPE_NAMES, MOTION_NAMES = tuple(COLOURS), tuple(PITCHES), tuple(MOTIONS)

# Centres stay this far, in widths of the canvas, from its edges.
MARGIN = 0.17
_LANE, _BOUNCES, _BOUNCE_HEIGHT, _TURNS, _ORBIT_RADIUS = 0.2, 3.0, 0.6, 1.5, 0.27
_RADII = (0.115, 0.14)
_LOUDNESS, _OVERTONE = 0.5, 0.2


@dataclass(frozen=True)
class Scenes:
    """A batch of clips as tensors of shape ``[B]``.

    Attributes:
        colour, shape, motion, background (`torch.Tensor`): Indices into the names above.
        lane (`torch.Tensor`): Offset across the direction of motion, in [-1, 1].
        phase (`torch.Tensor`): Where a bounce or an orbit starts, in [0, 1).
        radius (`torch.Tensor`): Half the shape's width, in widths of the canvas.
    """

    colour: torch.Tensor
    shape: torch.Tensor
    motion: torch.Tensor
    background: torch.Tensor
    lane: torch.Tensor
    phase: torch.Tensor
    radius: torch.Tensor

    def __len__(self) -> int:
        return self.colour.shape[0]

    def __getitem__(self, index) -> "Scenes":
        return Scenes(*(getattr(self, field.name)[index] for field in fields(self)))

    def to(self, device: torch.device | str) -> "Scenes":
        """Move every tensor to `device`."""
        return Scenes(*(getattr(self, field.name).to(device) for field in fields(self)))


def is_held_out(colour: torch.Tensor, shape: torch.Tensor, motion: torch.Tensor) -> torch.Tensor:
    """Whether combinations are kept for evaluation: one colour of every shape and motion, 18 of 108."""
    return colour == (motion + 2 * shape) % len(COLOURS)


def draw_scenes(count: int, seed: int, held_out: bool = False) -> Scenes:
    """Draw `count` scenes on the CPU, of the training combinations or of the held-out ones; one seed, one result."""
    generator = torch.Generator().manual_seed(seed)
    names = (COLOUR_NAMES, SHAPE_NAMES, MOTION_NAMES)
    combinations = torch.cartesian_prod(*(torch.arange(len(group)) for group in names))
    combinations = combinations[is_held_out(*combinations.unbind(1)) == held_out]
    picks = torch.randint(len(combinations), (count,), generator=generator)
    background = torch.randint(len(BACKGROUNDS), (count,), generator=generator)
    lane, phase, radius = torch.rand(3, count, generator=generator).unbind()
    low, high = _RADII
    return Scenes(*combinations[picks].unbind(1), background, 2 * lane - 1, phase, low + (high - low) * radius)


def held_out_scenes(background: str = "dark") -> Scenes:
    """Return every held-out combination once, on one background, in the middle lane."""
    count = len(SHAPE_NAMES) * len(MOTION_NAMES)
    motion = torch.arange(count) % len(MOTION_NAMES)
    shape = torch.arange(count) // len(MOTION_NAMES)
    colour = (motion + 2 * shape) % len(COLOURS)
    zeros = torch.zeros(count)
    backgrounds = torch.full((count,), BACKGROUNDS.index(background))
    return Scenes(colour, shape, motion, backgrounds, zeros, zeros, torch.full((count,), sum(_RADII) / 2))


def few_held_out(count: int) -> Scenes:
    """Return up to 18 held-out combinations, every third first, so that a few show all shapes and motions."""
    return held_out_scenes()[torch.arange(18).reshape(6, 3).T.flatten()[:count]]


def prompts(scenes: Scenes, seed: int) -> list[str]:
    """Describe scenes in plain English; half of those on a dark background do not mention it."""
    omitted = torch.rand(len(scenes), generator=torch.Generator().manual_seed(seed)) < 0.5
    return [
        describe(COLOUR_NAMES[c], SHAPE_NAMES[s], MOTION_NAMES[m], None if b == 0 and short else BACKGROUNDS[b])
        for c, s, m, b, short in zip(
            scenes.colour.tolist(),
            scenes.shape.tolist(),
            scenes.motion.tolist(),
            scenes.background.tolist(),
            omitted.tolist(),
            strict=True,
        )
    ]


def positions(scenes: Scenes, seconds: torch.Tensor, num_frames: int = NUM_FRAMES) -> torch.Tensor:
    """Return the centres ``[B, T, 2]`` as (x, y) in [0, 1], y downwards, at the times `seconds` ``[B, T]``.

    A motion fills a clip of `num_frames`, whatever part of it is asked for.
    """
    progress = (seconds * FPS / (num_frames - 1)).clamp(0, 1)
    lane, phase = scenes.lane[:, None], scenes.phase[:, None]
    forth = MARGIN + (1 - 2 * MARGIN) * progress
    across = (0.5 + _LANE * lane).expand_as(forth)
    height = _BOUNCE_HEIGHT * torch.sin(math.pi * (_BOUNCES * progress + phase)).abs()
    angle = 2 * math.pi * (_TURNS * progress + phase)
    paths = {
        "right": (forth, across),
        "left": (1 - forth, across),
        "up": (across, 1 - forth),
        "down": (across, forth),
        "bounce": (across, 1 - MARGIN - height),
        "orbit": (0.5 + _ORBIT_RADIUS * angle.cos(), 0.5 + _ORBIT_RADIUS * angle.sin()),
    }
    stacked = torch.stack([torch.stack(paths[name], dim=-1) for name in MOTION_NAMES])
    return stacked[scenes.motion, torch.arange(len(scenes), device=seconds.device)]


def render_video(
    scenes: Scenes,
    first_frame: torch.Tensor | None = None,
    num_frames: int = NUM_FRAMES,
    clip_frames: int = NUM_FRAMES,
    size: int = SIZE,
) -> torch.Tensor:
    """Draw `num_frames` frames from `first_frame` ``[B]`` (0) on: RGB in [0, 1], ``[B, 3, T, size, size]``."""
    device = scenes.lane.device
    frames = torch.arange(num_frames, device=device).expand(len(scenes), -1)
    if first_frame is not None:
        frames = frames + first_frame[:, None]
    centres = positions(scenes, frames / FPS, clip_frames) * size
    pixels = torch.arange(size, device=device) + 0.5
    x = pixels[None, None, None, :] - centres[..., 0, None, None]
    y = pixels[None, None, :, None] - centres[..., 1, None, None]
    radius = (scenes.radius * size)[:, None, None, None]
    # Signed distances in pixels; half a pixel on either side of an edge is blended.
    distances = {
        "circle": (x**2 + y**2).sqrt() - radius,
        "square": torch.maximum(x.abs(), y.abs()) - radius,
        "triangle": torch.maximum((x.abs() - (y + radius) / 2) / math.sqrt(1.25), y - radius),
    }
    stacked = torch.stack([distances[name] for name in SHAPE_NAMES])
    distance = stacked[scenes.shape, torch.arange(len(scenes), device=device)]
    coverage = (0.5 - distance).clamp(0, 1)[:, None]

    colours = torch.tensor(list(COLOURS.values()), device=device)[scenes.colour]
    greys = torch.tensor([_GREYS[name] for name in BACKGROUNDS], device=device)[scenes.background]
    stripes = greys[:, torch.arange(size, device=device) // _STRIPE % 2]
    return coverage * colours[:, :, None, None, None] + (1 - coverage) * stripes[:, None, None, :, None]


def render_audio(scenes: Scenes, num_latents: int, clip_frames: int = NUM_FRAMES) -> torch.Tensor:
    """Synthesise ``[B, 2, num_latents · 800]`` at 32 kHz: the shape's tone, panned with equal power to where it is."""
    device = scenes.lane.device
    seconds = torch.arange(num_latents * SAMPLES_PER_LATENT, device=device, dtype=torch.float64) / SAMPLING_RATE
    pitch = torch.tensor(list(PITCHES.values()), device=device, dtype=torch.float64)[scenes.shape]
    turns = 2 * math.pi * pitch[:, None] * seconds
    tone = _LOUDNESS * (turns.sin() + _OVERTONE * (2 * turns).sin()).float()
    across = positions(scenes, seconds.float().expand(len(scenes), -1), clip_frames)[..., 0]
    angle = math.pi / 2 * ((across - MARGIN) / (1 - 2 * MARGIN)).clamp(0, 1)
    return torch.stack((angle.cos() * tone, angle.sin() * tone), dim=1)

"""Stage `dense`: a stock MiniMax-H3 transformer by flow matching on video and sound, each on its own schedule."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel

from . import components
from .backward import Losses
from .components import AUDIO_SHIFT, VIDEO_SHIFT
from .latents import Batch, LatentPool
from .loop import Draws, Part, Schedule, fit, load_weights
from .packing import shifted, velocity


def noised(
    batch: Batch, fraction: float, draws: Draws
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], tuple[float, float]]:
    """Mix noise into a batch at one fraction of both schedules.

    Returns:
        `tuple`: the noisy video and audio rows, their data-ward velocities (clean − noise), and the times `1 − σ`.
    """
    sigmas = shifted(fraction, VIDEO_SHIFT), shifted(fraction, AUDIO_SHIFT)
    clean = batch.video, batch.audio
    noise = [draws.normal(rows.shape) for rows in clean]
    noisy = tuple((1 - s) * c + s * n for s, c, n in zip(sigmas, clean, noise, strict=True))
    flow = tuple(c - n for c, n in zip(clean, noise, strict=True))
    return noisy, flow, (1 - sigmas[0], 1 - sigmas[1])


def flow_parts(pool: LatentPool, batch: int, parts: int, draws: Draws) -> Iterator[Part]:
    """Yield the parts of a step of flow matching.

    All clips of a part share its two times, as diffusers' tables do; the parts' times come from one stratum of the
    schedule each, so that a step covers it evenly.
    """
    for fraction in draws.strata(parts):
        clips = pool.draw(batch, draws)
        noisy, flow, times = noised(clips, fraction, draws)
        yield clips.packing, (*noisy, clips.text, *clips.packing.timesteps(*times), *flow)


def distance(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> Losses:
    """Return the mean squared distance of two velocities, of video and of audio, and their sum as the loss."""
    video, audio = ((p - f).square().mean() for p, f in zip(first, second, strict=True))
    return {"loss": video + audio, "video": video, "audio": audio}


def train_dense(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    pool: LatentPool,
    batch: int = 64,
    parts: int = 4,
    seed: int = 0,
) -> MiniMaxH3Transformer3DModel:
    """Train the dense transformer on `parts` batches per step, at as many times."""
    torch.manual_seed(seed)
    transformer = components.make_transformer(pool.text_dim).to(device)

    def losses(packing, video, audio, text, timestep, timestep_indices, *flow) -> Losses:
        return distance(velocity(transformer, packing, video, audio, text, (timestep, timestep_indices)), flow)

    draw = partial(flow_parts, pool, batch, parts)
    fit(run / "dense", transformer, draw, losses, schedule, device, seed)
    return transformer


def load_dense(run: Path, device: torch.device, text_dim: int) -> MiniMaxH3Transformer3DModel:
    """Load the dense transformer with the rounding the release stores it in, computed in float32 and frozen."""
    transformer = components.make_transformer(text_dim)
    load_weights(transformer, run / "dense")
    round_to_release(transformer)
    return transformer.float().requires_grad_(False).to(device)


def round_to_release(transformer: MiniMaxH3Transformer3DModel) -> None:
    """Cast to the release's mixed precision in place: bfloat16 but for its float32 islands."""
    islands = transformer._keep_in_fp32_modules
    for name, parameter in transformer.named_parameters():
        if not any(island in name for island in islands):
            parameter.data = parameter.data.to(torch.bfloat16)

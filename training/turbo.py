"""Stage `turbo`: an adapter that makes eight transformer calls go where the hybrid model's many calls go."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel

from .hybrid import add_adapter, attention_linears, load_hybrid, train_only
from .latents import LatentPool
from .loop import Losses, Schedule, fit, load_weights
from .packing import denoise, schedules, velocity
from .release import TURBO_ADAPTER


TURBO_CALLS = 8
TURBO_RANK = 16

_FEED_FORWARD_LINEARS = ("ff.net.0.proj", "ff.net.2")


def turbo_linears(transformer: MiniMaxH3Transformer3DModel) -> list[str]:
    """Return what the released `turbo` adapter covers: attention, feed-forward, modulation and the output norm."""
    attention = attention_linears(transformer)
    blocks = dict.fromkeys(name.partition(".attn.")[0] for name in attention)
    feed_forward = [f"{block}.{linear}" for block in blocks for linear in _FEED_FORWARD_LINEARS]
    modulation = [f"{block}.adaln_proj.linear" for block in blocks if block.startswith("transformer_blocks.")]
    return [*attention, *feed_forward, *modulation, "norm_out.linear"]


def train_turbo(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    pool: LatentPool,
    batch: int = 32,
    substeps: int = 4,
    seed: int = 0,
) -> MiniMaxH3Transformer3DModel:
    """Train the adapter `turbo` by regression on the teacher's trajectories.

    The teacher takes `substeps` calls where the student takes one: their schedules share every `substeps`-th point.
    From each such point the student learns the one velocity whose Euler step ends where the teacher arrives.
    """
    torch.manual_seed(seed)
    teacher = load_hybrid(run, device, pool.text_dim, "hybrid")
    student = deepcopy(teacher)
    add_adapter(student, TURBO_ADAPTER, turbo_linears(student), TURBO_RANK)
    train_only(student, TURBO_ADAPTER)
    sigmas, audio_sigmas = (scheduler.sigmas.tolist() for scheduler in schedules(TURBO_CALLS))

    def losses(generator: torch.Generator) -> Iterator[Losses]:
        clips = pool.draw(batch, generator)
        noise = [torch.randn(rows.shape, generator=generator, device=device) for rows in (clips.video, clips.audio)]
        states = denoise(teacher, clips.packing, *noise, clips.text, TURBO_CALLS * substeps)
        points = [state for index, state in enumerate(states) if index % substeps == 0]
        steps = zip(pairwise(points), pairwise(sigmas), pairwise(audio_sigmas), strict=True)
        for ((video, audio), (next_video, next_audio)), (s, next_s), (audio_s, next_audio_s) in steps:
            predicted = velocity(student, clips.packing, video, audio, clips.text, (1 - s, 1 - audio_s))
            video_loss = (predicted[0] - (next_video - video) / (s - next_s)).square().mean()
            audio_loss = (predicted[1] - (next_audio - audio) / (audio_s - next_audio_s)).square().mean()
            yield {"loss": video_loss + audio_loss, "video": video_loss, "audio": audio_loss}

    fit(run / "turbo", student, losses, schedule, device, seed)
    return student


def load_turbo(run: Path, device: torch.device, text_dim: int) -> MiniMaxH3Transformer3DModel:
    """Load the hybrid transformer with both adapters beside its weights, frozen."""
    transformer = load_hybrid(run, device, text_dim, "hybrid")
    add_adapter(transformer, TURBO_ADAPTER, turbo_linears(transformer), TURBO_RANK)
    load_weights(transformer, run / "turbo")
    return transformer.requires_grad_(False)

"""Stage `turbo`: an adapter that makes eight transformer calls go where the hybrid model's many calls go."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel

from .backward import Losses
from .dense import distance
from .hybrid import add_adapter, attention_linears, load_hybrid, train_only
from .latents import LatentPool
from .loop import Draws, Part, Schedule, fit, load_weights
from .packing import denoise, schedules, velocity
from .release import TURBO_ADAPTER


TURBO_CALLS = 8
TURBO_RANK = 12

_FEED_FORWARD_LINEARS = ("ff.net.0.proj", "ff.net.2")


def turbo_linears(transformer: MiniMaxH3Transformer3DModel) -> list[str]:
    """Return what the released `turbo` adapter covers: attention, feed-forward, modulation and the output norm."""
    attention = attention_linears(transformer)
    blocks = dict.fromkeys(name.partition(".attn.")[0] for name in attention)
    feed_forward = [f"{block}.{linear}" for block in blocks for linear in _FEED_FORWARD_LINEARS]
    modulation = [f"{block}.adaln_proj.linear" for block in blocks if block.startswith("transformer_blocks.")]
    return [*attention, *feed_forward, *modulation, "norm_out.linear"]


class Trajectories:
    """Where the teacher goes with the clips of a pool: their rows at every point of the student's schedule.

    The teacher takes `substeps` calls where the student takes one: their schedules share every `substeps`-th point.

    Args:
        teacher (`MiniMaxH3Transformer3DModel`): The transformer that is called often.
        pool (`LatentPool`): Prompts, and the shape of the clips; every one starts from noise of its own.
        substeps (`int`): Calls of the teacher for one of the student's.
        draws (`Draws`): The noise.
        batch (`int`): Clips at a time.
    """

    def __init__(
        self, teacher: MiniMaxH3Transformer3DModel, pool: LatentPool, substeps: int, draws: Draws, batch: int = 128
    ):
        groups = defaultdict(list)
        for clips in pool.batches(batch):
            noise = draws.normal(clips.video.shape), draws.normal(clips.audio.shape)
            states = denoise(teacher, clips.packing, *noise, clips.text, TURBO_CALLS * substeps)
            points = islice(states, 0, None, substeps)
            video, audio = (torch.stack(rows, dim=1) for rows in zip(*points, strict=True))
            groups[clips.packing].append((video, audio, clips.text))
        # Per layout: video and audio ``[N, points, rows, C]`` and text ``[N, tokens, C]``.
        self._groups = [
            (packing, *(torch.cat(rows) for rows in zip(*chunks, strict=True))) for packing, chunks in groups.items()
        ]
        schedulers = schedules(TURBO_CALLS)
        self._sigmas = list(zip(*(scheduler.sigmas.tolist() for scheduler in schedulers), strict=True))

    def parts(self, batch: int, parts: int, draws: Draws) -> Iterator[Part]:
        """Yield the parts of a step: rows at a point and the one velocity whose Euler step ends at the next point."""
        sizes = [len(text) for *_, text in self._groups]
        for fraction in draws.strata(parts):
            group, picks = draws.pick(sizes, batch)
            packing, video, audio, text = self._groups[group]
            point = int(fraction * TURBO_CALLS)
            flow = [
                (rows[picks, point + 1] - rows[picks, point]) / (sigma - next_sigma)
                for rows, sigma, next_sigma in zip(
                    (video, audio), self._sigmas[point], self._sigmas[point + 1], strict=True
                )
            ]
            timesteps = packing.timesteps(*(1 - sigma for sigma in self._sigmas[point]))
            yield packing, (video[picks, point], audio[picks, point], text[picks], *timesteps, *flow)


def train_turbo(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    pool: LatentPool,
    batch: int = 32,
    parts: int = 4,
    substeps: int = 4,
    seed: int = 0,
) -> MiniMaxH3Transformer3DModel:
    """Train the adapter `turbo` by regression on the teacher's trajectories, computed at the start of a piece."""
    torch.manual_seed(seed)
    student = load_hybrid(run, device, pool.text_dim, "hybrid")
    trajectories = Trajectories(student, pool, substeps, Draws.of(seed, 0, device))
    add_adapter(student, TURBO_ADAPTER, turbo_linears(student), TURBO_RANK)
    train_only(student, TURBO_ADAPTER)

    def losses(packing, video, audio, text, timestep, timestep_indices, *flow) -> Losses:
        return distance(velocity(student, packing, video, audio, text, (timestep, timestep_indices)), flow)

    draw = partial(trajectories.parts, batch, parts)
    fit(run / "turbo", student, draw, losses, schedule, device, seed)
    return student


def load_turbo(run: Path, device: torch.device, text_dim: int) -> MiniMaxH3Transformer3DModel:
    """Load the hybrid transformer with both adapters beside its weights, frozen."""
    transformer = load_hybrid(run, device, text_dim, "hybrid")
    add_adapter(transformer, TURBO_ADAPTER, turbo_linears(transformer), TURBO_RANK)
    load_weights(transformer, run / "turbo")
    return transformer.requires_grad_(False)

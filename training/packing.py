"""Latents as the rows of diffusers' packed sequence, and the flow between noise and clips along the two schedules."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from diffusers import MiniMaxH3Scheduler, MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    MiniMaxH3SetTimestepsStep,
    patchify_video_latents,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline

from .components import make_schedulers


PATCH_SIZE = (1, 2, 2)


@dataclass(frozen=True)
class LatentShape:
    """Sizes of one clip's latents: frames, rows and columns of the video, and latents per channel of the sound."""

    frames: int
    height: int
    width: int
    audio: int


@dataclass(frozen=True, eq=False)
class Packing:
    """The layout of one packed sequence, equal to itself only.

    Attributes:
        arguments (`dict[str, torch.Tensor]`): What the transformer's forward pass takes, on its device.
        host (`dict[str, torch.Tensor]`): The same on the CPU, where the timestep tables are made.
    """

    arguments: dict[str, torch.Tensor]
    host: dict[str, torch.Tensor]

    def timesteps(self, video: float, audio: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the transformer's `timestep` and `timestep_indices` for one time `1 − σ` per modality."""
        text_len = len(self.host["text_indices"])
        tables = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            self.host["video_indices"], self.host["audio_indices"], 0, 0, text_len, video, audio, 1.0, 1.0
        )
        device = self.arguments["text_indices"].device
        return tuple(table.to(device) for table in tables)


@lru_cache
def pack(text_len: int, shape: LatentShape, device: torch.device) -> Packing:
    """Lay out `[text | audio | video]` with diffusers' own block; the same tensors for the same sizes."""
    components = MiniMaxH3ModularPipeline()
    *layout, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full((text_len,), components.text_tag),
        shape.frames,
        shape.height,
        shape.width,
        shape.audio,
        PATCH_SIZE,
        components.audio_channels,
        components.audio_tag,
        components.video_tag,
    )
    names = ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices")
    host = dict(zip(names, layout, strict=True))
    return Packing({name: tensor.to(device) for name, tensor in host.items()}, host)


def video_rows(latents: torch.Tensor) -> torch.Tensor:
    """Pack ``[B, C, F, h, w]`` into ``[B, F·h/2·w/2, 4·C]``."""
    return patchify_video_latents(latents, PATCH_SIZE).unflatten(0, (len(latents), -1))


def audio_rows(latents: torch.Tensor) -> torch.Tensor:
    """Pack ``[B, 2, C, A]`` into ``[B, 2·A, C]``, the left channel first."""
    return latents.transpose(2, 3).flatten(1, 2)


def shifted(fraction: float, shift: float) -> float:
    """Return σ at a fraction of the schedule (1 is noise), as `MiniMaxH3Scheduler` spaces it."""
    return shift * fraction / (1 + (shift - 1) * fraction)


def mixed_precision(device: torch.device) -> AbstractContextManager:
    """Return bfloat16 autocast on a card and full precision elsewhere."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def velocity(
    transformer: MiniMaxH3Transformer3DModel,
    packing: Packing,
    video: torch.Tensor,
    audio: torch.Tensor,
    text: torch.Tensor,
    timesteps: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Predict the data-ward velocity of noisy video and audio rows, float32, at what `Packing.timesteps` returns."""
    with mixed_precision(video.device):
        output = transformer(
            hidden_states=video,
            audio_hidden_states=audio,
            encoder_hidden_states=text,
            timestep=timesteps[0],
            timestep_indices=timesteps[1],
            return_dict=False,
            **packing.arguments,
        )
    return output[0].float(), output[1].float()


def schedules(calls: int) -> tuple[MiniMaxH3Scheduler, MiniMaxH3Scheduler]:
    """Return the video and the audio schedule of `calls` transformer calls."""
    pair = make_schedulers()
    for scheduler in pair:
        scheduler.set_timesteps(calls + 1)
    return pair


@torch.no_grad()
def denoise(
    transformer: MiniMaxH3Transformer3DModel,
    packing: Packing,
    video: torch.Tensor,
    audio: torch.Tensor,
    text: torch.Tensor,
    calls: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Walk from noise to clips and yield the rows at every point of the schedule, the noise first."""
    scheduler, audio_scheduler = schedules(calls)
    yield video, audio
    for time, audio_time in zip(scheduler.timesteps.tolist(), audio_scheduler.timesteps.tolist(), strict=True):
        timesteps = packing.timesteps(time, audio_time)
        video_flow, audio_flow = velocity(transformer, packing, video, audio, text, timesteps)
        video = scheduler.step(video_flow, time, video, return_dict=False)[0]
        audio = audio_scheduler.step(audio_flow, audio_time, audio, return_dict=False)[0]
        yield video, audio

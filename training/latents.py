"""A pool of encoded clips with their prompts, made once at the start of a piece."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from . import data
from .autoencoders import load_autoencoders, to_pixels
from .loop import Draws
from .packing import LatentShape, Packing, audio_rows, pack, video_rows
from .text import PromptEncoder


@dataclass(frozen=True)
class Batch:
    """Clips whose prompts have one length, as packed rows; the layout is shared by all of them."""

    packing: Packing
    video: torch.Tensor
    audio: torch.Tensor
    text: torch.Tensor


class LatentPool:
    """Encode `count` training clips, normalised as the transformer sees them, and draw batches of them.

    Args:
        run (`Path`): The run, whose autoencoders are trained.
        device (`torch.device`): Where everything is kept.
        count (`int`): Number of clips.
        seed (`int`): Seed of the scenes and prompts.
        num_frames (`int`): Frames per clip; a motion fills them.
        size (`int`): Height and width in pixels.
    """

    def __init__(
        self,
        run: Path,
        device: torch.device,
        count: int,
        seed: int = 0,
        num_frames: int = data.NUM_FRAMES,
        size: int = data.SIZE,
    ):
        self.device = device
        self.shape = latent_shape(num_frames, size)
        self._encode_clips(run, data.draw_scenes(count, seed), num_frames, size)
        encoder = PromptEncoder(run, device)
        self.text_dim = encoder.text_dim
        rows = encoder(data.prompts(data.draw_scenes(count, seed), seed))
        groups = defaultdict(list)
        for index, text in enumerate(rows):
            groups[len(text)].append(index)
        self._groups = [
            (torch.tensor(indices, device=device), torch.stack([rows[index] for index in indices]))
            for _, indices in sorted(groups.items())
        ]

    @torch.no_grad()
    def _encode_clips(self, run: Path, scenes: data.Scenes, num_frames: int, size: int) -> None:
        vae, audio_vae = load_autoencoders(run, self.device)
        mean, std = (
            torch.tensor(values, device=self.device)[:, None, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        audio_mean, audio_std = (
            torch.tensor(values, device=self.device)[:, None]
            for values in (audio_vae.config.latents_mean, audio_vae.config.latents_std)
        )
        video, audio = [], []
        for indices in torch.arange(len(scenes)).split(16):
            part = scenes[indices].to(self.device)
            pixels = to_pixels(data.render_video(part, num_frames=num_frames, clip_frames=num_frames, size=size))
            video.append(video_rows((vae.encode(pixels).latent_dist.mode() - mean) / std))
            wave = data.render_audio(part, self.shape.audio, num_frames).flatten(0, 1)[:, None]
            sound = (audio_vae.encode(wave).latent_dist.mode() - audio_mean) / audio_std
            audio.append(audio_rows(sound.unflatten(0, (-1, 2))))
        self._video, self._audio = torch.cat(video), torch.cat(audio)

    def draw(self, count: int, draws: Draws) -> Batch:
        """Draw `count` clips with prompts of one length, lengths as often as they occur."""
        return self._batch(*draws.pick([len(indices) for indices, _ in self._groups], count))

    def batches(self, count: int) -> Iterator[Batch]:
        """Yield every clip once, at most `count` at a time."""
        for group, (indices, _) in enumerate(self._groups):
            for picks in torch.arange(len(indices), device=self.device).split(count):
                yield self._batch(group, picks)

    def _batch(self, group: int, picks: torch.Tensor) -> Batch:
        indices, text = self._groups[group]
        packing = pack(text.shape[1], self.shape, self.device)
        return Batch(packing, self._video[indices[picks]], self._audio[indices[picks]], text[picks])


def latent_shape(num_frames: int, size: int) -> LatentShape:
    """Return the latent sizes of a clip of ``17·n + 5`` frames."""
    return LatentShape(
        frames=(num_frames - 5) // 17 * 5 + 2,
        height=size // 16,
        width=size // 16,
        audio=round(num_frames / data.FPS * data.SAMPLING_RATE / data.SAMPLES_PER_LATENT),
    )

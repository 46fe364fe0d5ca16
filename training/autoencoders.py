"""Stages `video-vae`, `video-decoder`, `audio-vae`: reconstruct, with a posterior pulled lightly to a normal one."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, ModelMixin

from . import components, data
from .backward import Losses
from .loop import Draws, Part, Schedule, fit


# 17 frames make five latents, of which a later chunk's last three are dropped: 22 frames hold both kinds of chunk.
WINDOW_FRAMES, WINDOW_LATENTS = 22, 7

_KL_WEIGHT = 1e-3
_CHROMA_WEIGHT = 20.0
# Pixels this near to a shape weigh what the shape does: else too much of it costs less than too little.
_EDGE = 4
_STFT_SIZES = (512, 2048)
# Clips whose latents' mean and deviation are stored.
STATISTICS_CLIPS = 64


@lru_cache
def pixel_statistics(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation of RGB, ``[3, 1, 1, 1]``, once per device."""
    mean, std = (torch.tensor(values, device=device) for values in (components.PIXEL_MEAN, components.PIXEL_STD))
    return mean[:, None, None, None], std[:, None, None, None]


def to_pixels(video: torch.Tensor) -> torch.Tensor:
    """Map RGB in [0, 1], ``[B, 3, T, H, W]``, to the values the VAE encodes."""
    mean, std = pixel_statistics(video.device)
    return (video - mean) / std


def random_scenes(count: int, draws: Draws) -> data.Scenes:
    """Draw training scenes from a step's random numbers, on its device."""
    seed = int(torch.randint(2**31, (), generator=draws.host))
    return data.draw_scenes(count, seed).to(draws.device.device)


def train_video_vae(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    batch: int = 32,
    size: int = data.SIZE,
    statistics_clips: int = STATISTICS_CLIPS,
    seed: int = 0,
) -> AutoencoderKLMiniMaxH3:
    """Train the video VAE on windows of 22 frames of `size` pixels and save it with its latents' statistics."""
    torch.manual_seed(seed)
    vae = components.make_vae().to(device)

    def draw(draws: Draws) -> Iterator[Part]:
        scenes = random_scenes(batch, draws)
        first = torch.randint(data.NUM_FRAMES - WINDOW_FRAMES + 1, (batch,), generator=draws.host).to(device)
        latents = size // 16
        noise = draws.normal((batch, components.VIDEO_LATENT_CHANNELS, WINDOW_LATENTS, latents, latents))
        yield None, (data.render_video(scenes, first, WINDOW_FRAMES, size=size), noise)

    def losses(key: None, video: torch.Tensor, noise: torch.Tensor) -> Losses:
        pixels = to_pixels(video)
        posterior = vae.encode(pixels).latent_dist
        reconstructed = vae.decode(posterior.mean + posterior.std * noise).sample
        divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        errors = _reconstruction(reconstructed, pixels, video)
        return errors | {"loss": errors["loss"] + _KL_WEIGHT * divergence, "kl": divergence}

    fit(run / "video_vae", vae, draw, losses, schedule, device, seed)
    with torch.no_grad():
        scenes = data.draw_scenes(statistics_clips, seed).to(device)
        latents = torch.cat(
            [
                vae.encode(to_pixels(data.render_video(scenes[part], size=size))).latent_dist.mode()
                for part in torch.arange(statistics_clips).split(4)
            ]
        )
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=tuple(mean.tolist()), latents_std=tuple(std.tolist()))
    vae.save_pretrained(run / "video_vae" / "model")
    return vae.eval()


@dataclass(frozen=True)
class Windows:
    """Windows of 22 frames of training clips, encoded once: scenes, first frames ``[N]``, posterior mean and std."""

    scenes: data.Scenes
    first: torch.Tensor
    mean: torch.Tensor
    std: torch.Tensor

    @classmethod
    @torch.no_grad()
    def encode(cls, vae: AutoencoderKLMiniMaxH3, count: int, size: int, seed: int) -> "Windows":
        """Draw and encode `count` windows of `size` pixels, on the device of `vae`."""
        scenes = data.draw_scenes(count, seed).to(vae.device)
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(data.NUM_FRAMES - WINDOW_FRAMES + 1, (count,), generator=generator).to(vae.device)
        posteriors = [
            vae.encode(to_pixels(data.render_video(scenes[part], first[part], WINDOW_FRAMES, size=size))).latent_dist
            for part in torch.arange(count).split(16)
        ]
        mean, std = (torch.cat([getattr(part, name) for part in posteriors]) for name in ("mean", "std"))
        return cls(scenes, first, mean, std)


def train_video_decoder(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    batch: int = 8,
    windows: int = 1024,
    size: int = data.SIZE,
    seed: int = 1,
) -> AutoencoderKLMiniMaxH3:
    """Train the decoder of the video VAE on from where it stands: latents stay what the transformer knows.

    The encoder is the expensive half; it runs once over `windows` windows, at the start of a piece.
    """
    vae = _load_frozen(AutoencoderKLMiniMaxH3, run / "video_vae" / "model", device)
    pool = Windows.encode(vae, windows, size, seed)
    vae.decoder.requires_grad_(True)

    def draw(draws: Draws) -> Iterator[Part]:
        picks = draws.pick([windows], batch)[1]
        video = data.render_video(pool.scenes[picks], pool.first[picks], WINDOW_FRAMES, size=size)
        mean = pool.mean[picks]
        yield None, (video, mean + pool.std[picks] * draws.normal(mean.shape))

    def losses(key: None, video: torch.Tensor, latents: torch.Tensor) -> Losses:
        return _reconstruction(vae.decode(latents).sample, to_pixels(video), video)

    fit(run / "video_decoder", vae, draw, losses, schedule, device, seed)
    vae.save_pretrained(run / "video_decoder" / "model")
    return vae


def train_audio_vae(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    batch: int = 8,
    num_latents: int = 207,
    statistics_clips: int = STATISTICS_CLIPS,
    seed: int = 0,
) -> AutoencoderKLMiniMaxH3Audio:
    """Train the audio VAE on single channels of `num_latents` latents and save it with its latents' statistics."""
    torch.manual_seed(seed)
    vae = components.make_audio_vae().to(device)

    def draw(draws: Draws) -> Iterator[Part]:
        wave = data.render_audio(random_scenes(batch, draws), num_latents).flatten(0, 1)[:, None]
        yield None, (wave, draws.normal((len(wave), components.AUDIO_LATENT_CHANNELS, num_latents)))

    def losses(key: None, wave: torch.Tensor, noise: torch.Tensor) -> Losses:
        posterior = vae.encode(wave).latent_dist
        reconstructed = vae.decode(posterior.mean + posterior.std * noise).sample
        error = (reconstructed - wave).square().mean()
        spectral = sum(_spectral_distance(reconstructed[:, 0], wave[:, 0], size) for size in _STFT_SIZES)
        divergence = (0.5 * (posterior.mean.square() + posterior.std.square() - 1.0) - posterior.logs).mean()
        decibels = -10 * (error.detach() / wave.square().mean()).log10()
        loss = 10 * error + (reconstructed - wave).abs().mean() + 0.1 * spectral + _KL_WEIGHT * divergence
        return {"loss": loss, "error": error, "kl": divergence, "snr": decibels}

    fit(run / "audio_vae", vae, draw, losses, schedule, device, seed)
    with torch.no_grad():
        scenes = data.draw_scenes(statistics_clips, seed).to(device)
        wave = data.render_audio(scenes, num_latents).flatten(0, 1)[:, None]
        latents = torch.cat([vae.encode(part).latent_dist.mode() for part in wave.split(8)])
    vae.register_to_config(latents_mean=latents.mean((0, 2)).tolist(), latents_std=latents.std((0, 2)).tolist())
    vae.save_pretrained(run / "audio_vae" / "model")
    return vae.eval()


def load_autoencoders(run: Path, device: torch.device) -> tuple[AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio]:
    """Load what the stages saved, frozen; the video decoder's own stage goes first, if there is one."""
    folders = (run / stage / "model" for stage in ("video_decoder", "video_vae"))
    folder = next((folder for folder in folders if folder.is_dir()), run / "video_vae" / "model")
    video = _load_frozen(AutoencoderKLMiniMaxH3, folder, device)
    return video, _load_frozen(AutoencoderKLMiniMaxH3Audio, run / "audio_vae" / "model", device)


def _load_frozen(kind: type[ModelMixin], folder: Path, device: torch.device) -> ModelMixin:
    return kind.from_pretrained(folder, local_files_only=True).requires_grad_(False).eval().to(device)


def _reconstruction(reconstructed: torch.Tensor, pixels: torch.Tensor, video: torch.Tensor) -> Losses:
    """Compare ``[B, 3, T, H, W]`` with the clip: as the encoder sees it (`pixels`) and in [0, 1] (`video`)."""
    difference = reconstructed - pixels
    # Shapes fill a twentieth of a frame, and only they are colourful: they weigh as much as the background.
    chroma = video.amax(1, keepdim=True) - video.amin(1, keepdim=True)
    near = torch.nn.functional.max_pool3d(chroma, (1, 2 * _EDGE + 1, 2 * _EDGE + 1), 1, (0, _EDGE, _EDGE))
    error = ((1 + _CHROMA_WEIGHT * near) * (difference.square() + difference.abs())).mean()
    # Of pixels in [0, 1], as a PSNR is stated.
    squared = (difference.detach() * pixel_statistics(video.device)[1]).square()
    decibels = -10 * squared.mean().log10()
    shape_decibels = -10 * ((squared * near).mean() / near.mean()).log10()
    return {"loss": error, "psnr": decibels, "shape_psnr": shape_decibels}


def _spectral_distance(first: torch.Tensor, second: torch.Tensor, size: int) -> torch.Tensor:
    """Return the mean distance of the two waves' magnitudes, relative to the second's loudest bin."""
    window = torch.hann_window(size, device=first.device)
    spectra = [torch.stft(wave, size, size // 4, window=window, return_complex=True).abs() for wave in (first, second)]
    return (spectra[0] - spectra[1]).abs().mean() / spectra[1].detach().abs().mean()

"""Write frames and sound to files that are complete or absent."""

import os
import tempfile
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers.utils.export_utils import encode_video
from PIL import Image


_AUDIO_CHANNELS = 2
# Frames converted and encoded at a time, so that a long video is never in memory twice.
_FRAMES_PER_CHUNK = 32


def check_frames(frames: list[list[Image.Image]] | np.ndarray | torch.Tensor) -> int:
    """Check that `frames` are one video that H.264 can hold, and return their number."""
    if isinstance(frames, list):
        if len(frames) != 1 or not isinstance(frames[0], list) or not frames[0]:
            raise ValueError("`frames` must be a list with one list of PIL images, the frames of one video.")
        sizes = {(frame.height, frame.width, frame.mode) for frame in frames[0]}
        if len(sizes) > 1 or next(iter(sizes))[2] != "RGB":
            raise ValueError(f"`frames` must be RGB images of one size, got (height, width, mode) {sorted(sizes)}.")
        count, (height, width, _) = len(frames[0]), sizes.pop()
    elif isinstance(frames, np.ndarray | torch.Tensor):
        is_array = isinstance(frames, np.ndarray)
        layout, channels = ("1, frames, height, width, 3", 4) if is_array else ("1, frames, 3, height, width", 2)
        shape = tuple(frames.shape)
        if len(shape) != 5 or shape[0] != 1 or shape[channels] != 3 or 0 in shape:
            raise ValueError(
                f"`frames` must have shape ({layout}), got {shape}; latents (`output_type='latent'`) must be decoded "
                "first."
            )
        if not (np.issubdtype(frames.dtype, np.floating) if is_array else frames.is_floating_point()):
            raise ValueError(f"`frames` must be floating-point pixels in [0, 1], got {frames.dtype}.")
        count = shape[1]
        height, width = (size for axis, size in enumerate(shape[2:], 2) if axis != channels)
    else:
        raise ValueError(f"`frames` must be PIL images, an array or a tensor, got {type(frames).__name__}.")
    if height % 2 or width % 2:
        raise ValueError(f"H.264 video needs an even height and width, got {height}x{width}: crop or pad the frames.")
    return count


def check_audio(audio: torch.Tensor, sampling_rate: int) -> None:
    """Check that `audio` is one stereo soundtrack."""
    if not isinstance(audio, torch.Tensor) or not audio.is_floating_point():
        raise ValueError(
            f"`audio` must be a floating-point tensor, got {getattr(audio, 'dtype', type(audio).__name__)}."
        )
    if audio.ndim != 3 or audio.shape[:2] != (1, _AUDIO_CHANNELS) or audio.shape[2] == 0:
        raise ValueError(
            f"`audio` must be one stereo soundtrack of shape (1, {_AUDIO_CHANNELS}, samples), got "
            f"{tuple(audio.shape)}."
        )
    if not isinstance(sampling_rate, int) or sampling_rate <= 0:
        raise ValueError(f"`sampling_rate` must be a positive integer, got {sampling_rate!r}.")


def frames_are_finite(frames: list[list[Image.Image]] | np.ndarray | torch.Tensor) -> bool:
    """Return whether no pixel is NaN or infinite; images cannot hold either."""
    if isinstance(frames, list):
        return True
    return bool(np.isfinite(frames).all()) if isinstance(frames, np.ndarray) else bool(frames.isfinite().all())


def fit_audio(audio: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Cut or pad ``(channels, samples)`` with silence at the end, to `num_samples` float32 samples on the CPU."""
    audio = audio[:, :num_samples].detach().float().cpu()
    return torch.nn.functional.pad(audio, (0, num_samples - audio.shape[1]))


def write_mp4(
    path: Path,
    frames: list[list[Image.Image]] | np.ndarray | torch.Tensor,
    fps: int,
    audio: torch.Tensor | None,
    sampling_rate: int | None,
    overwrite: bool,
) -> Path:
    """Encode one video, with ``(channels, samples)`` sound or without."""
    num_chunks = -(-check_frames(frames) // _FRAMES_PER_CHUNK)

    def write(target: Path) -> None:
        encode_video(
            _iterate_chunks(frames),
            fps=fps,
            output_path=str(target),
            audio=audio,
            audio_sample_rate=sampling_rate,
            video_chunks_number=num_chunks,
        )

    return write_complete(path, write, overwrite)


def write_wav(path: Path, audio: torch.Tensor, sampling_rate: int, overwrite: bool) -> Path:
    """Write ``(channels, samples)`` sound in [-1, 1] as 16-bit PCM."""

    def write(target: Path) -> None:
        samples = (audio.clamp(-1, 1) * 32767).round().to(torch.int16)
        with wave.open(str(target), "wb") as file:
            file.setnchannels(len(samples))
            file.setsampwidth(2)
            file.setframerate(sampling_rate)
            file.writeframes(samples.T.contiguous().numpy().astype("<i2").tobytes())

    return write_complete(path, write, overwrite)


def write_complete(path: Path, write: Callable[[Path], None], overwrite: bool) -> Path:
    """Let `write` fill a file in a scratch folder beside `path`, then move it there in one step."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already; pass `overwrite=True` to replace it.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The folder {path.parent} does not exist; create it first.")
    with tempfile.TemporaryDirectory(prefix=f".{path.stem}-", dir=path.parent) as scratch:
        target = Path(scratch) / path.name
        write(target)
        os.replace(target, path)
    return path


def _iterate_chunks(frames: list[list[Image.Image]] | np.ndarray | torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield ``(frames, height, width, 3)`` uint8 pixels on the CPU, a few frames at a time."""
    video = frames[0]
    for start in range(0, len(video), _FRAMES_PER_CHUNK):
        chunk = video[start : start + _FRAMES_PER_CHUNK]
        if isinstance(chunk, list):
            yield torch.from_numpy(np.stack([np.asarray(frame) for frame in chunk]))
            continue
        pixels = torch.from_numpy(chunk) if isinstance(chunk, np.ndarray) else chunk.permute(0, 2, 3, 1)
        low, high = pixels.min().item(), pixels.max().item()
        if low < 0 or high > 1:
            raise ValueError(f"`frames` must be pixels in [0, 1], got values from {low:g} to {high:g}.")
        yield (pixels.float() * 255).round().to("cpu", torch.uint8)

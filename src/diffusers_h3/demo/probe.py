"""Decode a video file and say what is in it."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av


@dataclass(frozen=True)
class MediaReport:
    """What decoding a file gave: counted frames and samples, not what its header promises.

    `video_seconds` and `audio_seconds` are the counts over `fps` and `sampling_rate`.
    """

    frames: int
    fps: float
    width: int
    height: int
    video_seconds: float
    audio_channels: int
    sampling_rate: int
    audio_seconds: float


def probe_media(path: str | Path) -> MediaReport:
    """Decode every frame and sample of a file with one video and one audio stream.

    Raises:
        ValueError: If it has other streams, or one that holds nothing.
    """
    with av.open(str(path)) as container:
        if len(container.streams.video) != 1 or len(container.streams.audio) != 1:
            raise ValueError(
                f"{path} must hold one video and one audio stream, got {len(container.streams.video)} and "
                f"{len(container.streams.audio)}."
            )
        video, audio = container.streams.video[0], container.streams.audio[0]
        frames, samples = 0, 0
        for frame in container.decode(video, audio):
            if isinstance(frame, av.VideoFrame):
                frames += 1
            else:
                samples += frame.samples
        if not frames or not samples:
            raise ValueError(f"{path} decodes to {frames} video frames and {samples} audio samples.")
        return MediaReport(
            frames=frames,
            fps=float(video.average_rate),
            width=video.width,
            height=video.height,
            video_seconds=float(frames / Fraction(video.average_rate)),
            audio_channels=audio.channels,
            sampling_rate=audio.rate,
            audio_seconds=samples / audio.rate,
        )

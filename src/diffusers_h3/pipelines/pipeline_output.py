"""What a `VDNH3Pipeline` returns, and how it becomes a file."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers.utils import BaseOutput
from PIL import Image

from . import media


class NonFiniteOutputError(ValueError):
    """Raised by `save` when a modality holds NaN or infinity, after the other one was saved.

    `modalities` names what was not saved, `saved` is the path of what was (None if nothing).
    """

    def __init__(self, message: str, modalities: tuple[str, ...], saved: Path | None):
        super().__init__(message)
        self.modalities = modalities
        self.saved = saved


@dataclass
class VDNH3PipelineOutput(BaseOutput):
    """A generated video and its sound.

    Args:
        frames (`list[list[PIL.Image.Image]]`, `np.ndarray` or `torch.Tensor`): One video as the request's
            `output_type` says: a list of one list of images, an array ``(1, frames, height, width, 3)`` or a tensor
            ``(1, frames, 3, height, width)``, both in [0, 1]; or the latents. None, as `audio` is, on a rank that
            shared the work and did not decode.
        audio (`torch.Tensor`): The sound, ``(1, 2, samples)`` in [-1, 1]; or the audio latents.
        sampling_rate (`int`): Samples per second and channel.
        fps (`int`): Frames per second.
        nonfinite (`tuple[str, ...]`): Which of `"video"` and `"audio"` held NaN or infinity when generated.

    Examples:
        >>> import torch
        >>> from diffusers_h3 import VDNH3PipelineOutput
        >>> frames, audio = torch.rand(1, 24, 3, 64, 64), torch.zeros(1, 2, 32000)
        >>> output = VDNH3PipelineOutput(frames, audio, sampling_rate=32000)
        >>> output.fps, output.nonfinite
        (24, ())
    """

    frames: list[list[Image.Image]] | np.ndarray | torch.Tensor | None
    audio: torch.Tensor | None
    sampling_rate: int
    fps: int = 24
    nonfinite: tuple[str, ...] = ()

    def save(self, path: str | os.PathLike, overwrite: bool = True) -> Path | None:
        """Write an mp4 of H.264 video and AAC stereo sound of equal length.

        Sound is cut or padded with silence to the length of the frames. The file appears under its name only when
        complete. If one modality holds NaN or infinity, the other is saved: video as an mp4 without sound, sound as
        a 16-bit `.wav` of the same name.

        Args:
            path (`str` or `os.PathLike`): Where to write; its name must end in `.mp4` and its folder must exist.
            overwrite (`bool`): Whether an existing file may be replaced.

        Returns:
            `Path`, *optional*: the file written; None on a rank that has no frames because rank 0 decoded them.

        Raises:
            ValueError: If frames or sound have another shape, or `path` another ending; nothing is written.
            FileExistsError: If the file exists and `overwrite` is False.
            NonFiniteOutputError: If a modality holds NaN or infinity, after the other one was saved.

        Examples:
            >>> import torch
            >>> from diffusers_h3 import VDNH3PipelineOutput
            >>> frames, audio = torch.rand(1, 24, 3, 64, 64), torch.zeros(1, 2, 32000)
            >>> VDNH3PipelineOutput(frames, audio, sampling_rate=32000).save("second.mp4").name
            'second.mp4'
            >>> VDNH3PipelineOutput(frames, audio, sampling_rate=32000).save("second.avi")
            Traceback (most recent call last):
                ...
            ValueError: The file name must end in .mp4, got 'second.avi'.
        """
        path = Path(path)
        if path.suffix.lower() != ".mp4":
            raise ValueError(f"The file name must end in .mp4, got {path.name!r}.")
        if self.frames is None and self.audio is None:
            return None
        num_frames = media.check_frames(self.frames)
        media.check_audio(self.audio, self.sampling_rate)
        audio = media.fit_audio(self.audio[0], round(num_frames * self.sampling_rate / self.fps))

        broken = tuple(
            name
            for name, finite in (("video", media.frames_are_finite(self.frames)), ("audio", audio.isfinite().all()))
            if name in self.nonfinite or not finite
        )
        if not broken:
            return media.write_mp4(path, self.frames, self.fps, audio, self.sampling_rate, overwrite)
        if broken == ("audio",):
            saved = media.write_mp4(path, self.frames, self.fps, None, None, overwrite)
        elif broken == ("video",):
            saved = media.write_wav(path.with_suffix(".wav"), audio, self.sampling_rate, overwrite)
        else:
            saved = None
        outcome = "nothing was saved" if saved is None else f"the rest was saved as {saved}"
        raise NonFiniteOutputError(
            f"NaN or infinity in the generated {' and '.join(broken)}; {outcome}.", broken, saved
        )

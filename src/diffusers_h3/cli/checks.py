"""Checks that cost nothing and run before any weights are downloaded or loaded."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .console import UsageError


if TYPE_CHECKING:
    from PIL.Image import Image


def check_output(path: Path, overwrite: bool, option: str = "--output", ending: str = ".mp4") -> None:
    """Check that a file of one `ending` can be written to `path`; missing folders will be created.

    Raises:
        UsageError: For another ending, an existing file without `overwrite`, a folder, or a place not writable.
    """
    if path.suffix.lower() != ending:
        raise UsageError(f"{option} must end in {ending}, got {path}.")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; name a file in it.")
    if path.exists() and not overwrite:
        raise UsageError(f"{option} {path} exists already; pass --overwrite to replace it.")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{option} {path} cannot be written: {folder} is not a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{option} {path} cannot be written: {folder} is not writable.")


def check_seed(seed: int) -> None:
    """Check that PyTorch's generator takes `seed`."""
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed must be from 0 to 2^63 - 1, got {seed}.")


def open_keyframe(option: str, path: Path | None) -> "Image | None":
    """Read a keyframe image, upright and in RGB.

    Raises:
        UsageError: If the file cannot be read as an image.
    """
    if path is None:
        return None
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise UsageError(f"{option} {path} cannot be read as an image: {error}") from error

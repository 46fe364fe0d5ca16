"""Read a file of prompts: one clip a line, every line and every image checked before any model is loaded."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checks
from .console import UsageError


if TYPE_CHECKING:
    from PIL.Image import Image

_TYPES = {
    "prompt": str,
    "id": str,
    "seed": int,
    "image": str,
    "last_image": str,
    "height": int,
    "width": int,
    "num_frames": int,
    "num_inference_steps": int,
}
_TYPE_NAMES = {str: "text", int: "an integer"}

_PROBLEMS_SHOWN = 10
# A name's scratch folder and ending still have to fit into the 255 bytes of a file name.
_NAME_BYTES = 200
_WORDS_IN_NAME = 6


@dataclass(frozen=True)
class Clip:
    """One checked line: all that decides the video but the weights. `image` and `last_image` are absolute paths."""

    line: int
    id: str | None
    prompt: str
    seed: int
    image: Path | None
    last_image: Path | None
    height: int
    width: int
    num_frames: int
    num_inference_steps: int | None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides the video, keyframes by the SHA-256 of their files."""
        return {
            "height": self.height,
            "width": self.width,
            "num_frames": self.num_frames,
            "num_inference_steps": self.num_inference_steps,
            "image": self.image and _sha256(self.image.read_bytes()),
            "last_image": self.last_image and _sha256(self.last_image.read_bytes()),
        }

    @cached_property
    def name(self) -> str:
        """The file's name without its ending: the id, or the prompt's first words and a digest of the settings."""
        if self.id is not None:
            return _file_name(self.id)
        words = _file_name(" ".join(self.prompt.split()[:_WORDS_IN_NAME])).encode()[:80].decode(errors="ignore")
        digest = digest_of({"prompt": self.prompt, "seed": self.seed, **self.settings})[:8]
        return f"{words}-{digest}".lstrip("-").lower()

    @property
    def file(self) -> str:
        """The name of the video's file."""
        return f"{self.name}.mp4"

    def keyframes(self) -> tuple["Image | None", "Image | None"]:
        """Read both keyframes, upright and in RGB."""
        return checks.open_keyframe("`image`", self.image), checks.open_keyframe("`last_image`", self.last_image)


def read_clips(path: Path, defaults: dict[str, Any]) -> list[Clip]:
    """Read a prompts file: JSON objects, one a line (`.jsonl`), or bare prompts, one a line (`.txt`).

    Args:
        path (`Path`): The file. Paths of images in it are relative to its folder. Empty lines are skipped.
        defaults (`dict[str, Any]`): Values of the keys that a line leaves out or sets to null.

    Raises:
        UsageError: With every line that is not a clip, by number: bad JSON, unknown keys, values of another type,
            sizes and lengths the weights cannot make, unreadable images, file names that collide.
    """
    clips, problems = [], []
    for number, text in _lines(path):
        try:
            clips.append(_read_clip(number, text, path, defaults))
        except UsageError as error:
            problems.append(f"line {number}: {error.message}")
    problems += _collisions(clips)
    if problems:
        shown = "\n".join(f"{path} {problem}" for problem in problems[:_PROBLEMS_SHOWN])
        more = len(problems) - _PROBLEMS_SHOWN
        raise UsageError(f"{shown}\nand {more} more" if more > 0 else shown)
    if not clips:
        raise UsageError(f"--prompts {path} holds no prompt.")
    return clips


def digest_of(content: dict[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, whatever the order of its keys."""
    return _sha256(json.dumps(content, sort_keys=True).encode())


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix not in (".jsonl", ".txt"):
        raise UsageError(f"--prompts must name a .jsonl or a .txt file, got {path}.")
    try:
        # Only line feeds end a line: JSON text may hold other separators as they are.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path} cannot be read: {error}") from error
    return ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())


def _read_clip(number: int, text: str, path: Path, defaults: dict[str, Any]) -> Clip:
    content = {"prompt": text} if path.suffix == ".txt" else _parse(text)
    _check_types(content)
    values = {"prompt": "", "id": None, **defaults}
    values |= {name: value for name, value in content.items() if value is not None}
    for name in ("image", "last_image"):
        if values[name] is not None:
            values[name] = (path.parent / values[name]).absolute()
    if not 0 <= values["seed"] < 2**63:
        raise UsageError(f"`seed` must be from 0 to 2^63 - 1, got {values['seed']}.")
    steps = values["num_inference_steps"]
    if steps is not None and steps < 1:
        raise UsageError(f"`num_inference_steps` must be at least 1, got {steps}.")
    keyframes = [
        keyframe
        for name in ("image", "last_image")
        if (keyframe := checks.open_keyframe(f"`{name}`", values[name])) is not None
    ]
    if not values["prompt"].strip() and not keyframes:
        raise UsageError("`prompt` is missing or empty; say what to generate, or give `image` or `last_image`.")
    values |= _geometry(keyframes, values["height"], values["width"], values["num_frames"])
    clip = Clip(line=number, **values)
    if clip.id is not None and not 0 < len(clip.name.encode()) <= _NAME_BYTES:
        raise UsageError(
            f"`id` becomes the file's name: it needs letters or digits, and at most {_NAME_BYTES} bytes; got "
            f"{clip.id!r}."
        )
    return clip


def _parse(text: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            names = [name for name, _ in pairs]
            raise UsageError(f"{next(name for name in names if names.count(name) > 1)!r} is there more than once.")
        return content

    try:
        content = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise UsageError(f"this is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UsageError(f'a line must be a JSON object such as {{"prompt": …}}, got {text[:40]}.')
    return content


def _check_types(content: dict[str, Any]) -> None:
    unknown = [name for name in content if name not in _TYPES]
    if unknown:
        raise UsageError(f"unknown {', '.join(map(repr, unknown))}; a line may hold {', '.join(_TYPES)}.")
    for name, value in content.items():
        expected = _TYPES[name]
        if value is not None and (not isinstance(value, expected) or isinstance(value, bool)):
            raise UsageError(f"`{name}` must be {_TYPE_NAMES[expected]}, got {json.dumps(value)}.")


def _geometry(keyframes: list["Image"], height: int | None, width: int | None, num_frames: int) -> dict[str, int]:
    """Apply the pipeline's own rules of size and length before there is a pipeline."""
    from diffusers.modular_pipelines import MiniMaxH3ModularPipeline

    from ..pipelines.request import resolve_geometry

    try:
        # Without components, it has the geometry of the released weights.
        geometry = resolve_geometry(MiniMaxH3ModularPipeline(), keyframes, height, width, num_frames)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return {"height": geometry.height, "width": geometry.width, "num_frames": geometry.num_frames}


def _collisions(clips: list[Clip]) -> list[str]:
    """Describe the clips that would be written to the file of an earlier one, also where case does not count."""
    problems, owners = [], {}
    for clip in clips:
        owner = owners.setdefault(clip.name.casefold(), clip)
        if owner is clip:
            continue
        if owner.id is None and clip.id is None:
            problems.append(f"line {clip.line}: the same as line {owner.line}; give it another `seed`, or remove it.")
        else:
            problems.append(
                f"line {clip.line}: {clip.file} is the file of line {owner.line} already; give it another `id`."
            )
    return problems


def _file_name(text: str) -> str:
    """Keep letters, digits, `.`, `_` and `-`, and nothing that hides a file or names a folder."""
    kept = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", text))
    return re.sub(r"-+", "-", kept).strip("-.")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

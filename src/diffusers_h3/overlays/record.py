"""The provenance record next to the weights, and checking a folder against it."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .._version import __version__
from .errors import ManifestError, SourceError
from .files import read_json, sha256_of
from .load import MANIFEST_FILE, Overlay


# Part of a folder's digest: a new layout never passes for an old one.
RECORD_VERSION = 1
RECORD_FILE = MANIFEST_FILE

_PACKAGES = ("diffusers", "huggingface_hub", "safetensors", "torch")


@dataclass(frozen=True)
class FileCheck:
    """One file of a materialised folder; `status` is `"ok"`, `"missing"` or `"changed"`.

    Examples:
        >>> from diffusers_h3.overlays.record import FileCheck
        >>> check = FileCheck("transformer/config.json", "changed", bytes=812, sha256="0" * 64, origin="written")
        >>> check.status == "ok"
        False
    """

    path: str
    status: str
    bytes: int
    sha256: str
    origin: str


def provenance(
    overlay: Overlay,
    digest: str,
    components: tuple[str, ...],
    inputs: list[dict[str, Any]],
    outputs: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Return the record: the manifest, what it was resolved to, what was read and written, and by which versions."""
    return {
        "record_version": RECORD_VERSION,
        "digest": digest,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "diffusers_h3": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in _PACKAGES},
        },
        "manifest": overlay.manifest.to_dict(),
        "root": None if overlay.root is None else str(overlay.root),
        "commits": {source.repo: source.revision for source in overlay.manifest.sources() if source.repo is not None},
        "unpinned": [
            {"repo": repo, "revision": revision, "commit": commit} for repo, revision, commit in overlay.unpinned
        ],
        "components": list(components),
        "inputs": inputs,
        "outputs": outputs,
    }


def is_complete(folder: Path, digest: str) -> bool:
    """Whether `folder` is the finished result for `digest`, with every file there in its recorded size."""
    try:
        record = read_record(folder)
        return record["digest"] == digest and all(
            (folder / name).stat().st_size == output["bytes"] for name, output in record["outputs"].items()
        )
    except (OSError, KeyError, ManifestError, SourceError):
        return False


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a materialised folder.

    Raises:
        SourceError: If the folder has none.
        ManifestError: If it cannot be read by this version.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        raise SourceError(f"{folder} is not a materialised overlay: it has no {RECORD_FILE}.")
    record = read_json(path)
    if record.get("record_version") != RECORD_VERSION:
        raise ManifestError(
            f"{path} is no record of this version: expected `record_version` {RECORD_VERSION}, got "
            f"{record.get('record_version')!r}. Materialise the overlay again."
        )
    return record


def verify_folder(folder: str | Path, progress: Callable[[int], Any] = lambda count: None) -> list[FileCheck]:
    """Hash every file of a materialised folder and compare it with the folder's record.

    Args:
        folder (`str` or `Path`): What `materialize_overlay` returned.
        progress (`Callable`): Called with the number of bytes as they are read.

    Returns:
        `list[FileCheck]`: One entry per recorded file.

    Raises:
        SourceError, ManifestError: If there is no readable record.

    Examples:
        >>> from diffusers_h3 import load_overlay, materialize_overlay
        >>> from diffusers_h3.demo.release import STAGE, embedded_release
        >>> from diffusers_h3.overlays import verify_folder
        >>> folder = materialize_overlay(load_overlay(embedded_release() / STAGE))
        >>> {check.status for check in verify_folder(folder)}
        {'ok'}
    """
    folder = Path(folder)
    checks = []
    for name, output in sorted(read_record(folder)["outputs"].items()):
        path = folder / name
        if not path.is_file():
            status = "missing"
        elif path.stat().st_size != output["bytes"] or sha256_of(path, progress) != output["sha256"]:
            status = "changed"
        else:
            status = "ok"
        checks.append(FileCheck(name, status, output["bytes"], output["sha256"], output["origin"]))
    return checks

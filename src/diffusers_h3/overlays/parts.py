"""The files an overlay is made of: which they are, what space they need, and fetching and verifying them."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from .adapters import SPEC_FILES
from .errors import DiskSpaceError, IntegrityError, SourceError, some_of
from .files import check_published_digest, sha256_of
from .manifest import OverlayManifest
from .plan import INDEX_FILE, TransformerPlan
from .sources import Folder, read_folder_json


BRANCH_FILE = "linear_branch.safetensors"

# Weights that are unpickled when loaded, and so could run code.
_PICKLED = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_DATA = (".jinja", ".json", ".safetensors", ".txt")
_WITH_WEIGHTS = ("vae", "audio_vae", "text_encoder")


@dataclass(frozen=True)
class Part:
    """One file of one component.

    `published` is the SHA-256 in the manifest; `target` is where the file appears in the materialised folder as it
    is, null for a file that is only read.
    """

    component: str
    folder: Folder
    name: str
    size: int
    published: str | None = None
    target: str | None = None

    @property
    def location(self) -> str:
        return f"{self.folder.location}/{self.name}"


@dataclass(frozen=True)
class FetchedPart:
    """A part on this machine; `checked` says whether its SHA-256 was verified against a published one."""

    part: Part
    path: Path
    sha256: str
    checked: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "component": self.part.component,
            "source": self.part.folder.location,
            "commit": self.part.folder.commit,
            "file": self.part.name,
            "bytes": self.part.size,
            "sha256": self.sha256,
            "checked": self.checked,
        }


def transformer_parts(
    manifest: OverlayManifest, plan: TransformerPlan, base: Folder, adapters: list[Folder], branch: Folder
) -> list[Part]:
    """Return what the transformer is made from; shards no adapter changes and the branch keep their content."""
    parts = [
        Part("transformer", base, name, base.files()[name])
        for name in ("config.json", INDEX_FILE)
        if name in base.files()
    ]
    for shard in plan.shards:
        target = None if plan.is_changed(shard) else f"transformer/{shard}"
        parts.append(Part("transformer", base, shard, base.files()[shard], target=target))
    for adapter, folder in zip(manifest.adapters, adapters, strict=True):
        files = folder.files()
        spec = next(name for name in SPEC_FILES if name in files)
        parts.append(Part("transformer", folder, spec, files[spec]))
        file = adapter.weights.file
        parts.append(Part("transformer", folder, file, files[file], adapter.weights.sha256))
    weights = manifest.linear_branch.weights
    target = f"transformer/{BRANCH_FILE}"
    parts.append(Part("transformer", branch, weights.file, branch.files()[weights.file], weights.sha256, target))
    return parts


def component_parts(component: str, folder: Folder) -> list[Part]:
    """Return the files of a component that is taken over as it is.

    Raises:
        SourceError: If it holds pickled weights, which are never read, or lacks what it needs.
    """
    files = folder.files()
    pickled = sorted(name for name in files if name.endswith(_PICKLED))
    if pickled:
        raise SourceError(
            f"{folder.location} holds {some_of(pickled)}: pickled weights can run code and are never read. "
            "Use a source that has only .safetensors."
        )
    data = [name for name in files if name.endswith(_DATA) and not _is_hidden(name)]
    _check_has_what_it_needs(component, folder.location, data)
    for index in [name for name in data if name.endswith(".safetensors.index.json")]:
        shards = set(read_folder_json(folder, (index,)).get("weight_map", {}).values())
        missing = sorted(shard for shard in shards if str(PurePosixPath(index).with_name(shard)) not in files)
        if missing:
            raise SourceError(f"{folder.location} lacks {some_of(missing)}, which its index names.")
    return [Part(component, folder, name, files[name], target=f"{component}/{name}") for name in data]


def check_space(needs: Iterable[tuple[Path, int]]) -> None:
    """Refuse to start what the disks cannot hold.

    Args:
        needs (`Iterable[tuple[Path, int]]`): Folders (which may not exist yet) and the bytes to be written there.
    """
    folders: dict[int, Path] = {}
    sums: dict[int, int] = {}
    for folder, count in needs:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        device = existing.stat().st_dev
        folders.setdefault(device, existing)
        sums[device] = sums.get(device, 0) + count
    for device, needed in sums.items():
        folder, free = folders[device], shutil.disk_usage(folders[device]).free
        if needed > free:
            raise DiskSpaceError(
                f"{needed / 1e9:.2f} GB are needed on the disk of {folder}, {free / 1e9:.2f} GB are free. Free some "
                "space, or choose another disk with `cache_dir` (or DIFFUSERS_H3_CACHE and HF_HUB_CACHE)."
            )


def fetch_part(part: Part, progress: Callable[[int], Any]) -> FetchedPart:
    """Download a part if need be and verify its size and digest.

    Raises:
        IntegrityError: If the content is not what the manifest or the Hub published.
    """
    path = part.folder.fetch(part.name)
    size = path.stat().st_size
    if size != part.size:
        raise IntegrityError(
            f"{part.location} is damaged: expected {part.size:,} bytes, got {size:,}. "
            f"Delete {path.resolve()} and run again."
        )
    sha256 = sha256_of(path, progress)
    if part.published is not None and sha256 != part.published:
        raise IntegrityError(
            f"{part.location} is damaged: the manifest publishes SHA-256 {part.published}, got {sha256}. "
            f"Delete {path.resolve()} and run again."
        )
    listed = part.folder.published_digest(part.name)
    if listed is not None:
        check_published_digest(path, part.location, listed, sha256)
    verified = part.published is not None or listed is not None
    return FetchedPart(part, path, sha256, "verified" if verified else "computed")


def content_fingerprint(folders: Iterable[Folder]) -> str:
    """Describe the local folders an overlay reads, so that a change in any of them makes another overlay."""
    entries = [
        (folder.location, name, size, folder.fetch(name).stat().st_mtime_ns)
        for folder in folders
        if folder.commit is None
        for name, size in folder.files().items()
    ]
    return json.dumps(entries)


def _check_has_what_it_needs(component: str, location: str, data: list[str]) -> None:
    if component in _WITH_WEIGHTS:
        missing = [] if "config.json" in data else ["config.json"]
        missing += [] if any(name.endswith(".safetensors") for name in data) else ["weights (.safetensors)"]
    else:
        missing = [] if any(name.endswith(".json") for name in data) else ["configuration (.json)"]
    if missing:
        raise SourceError(f"{location} has no {' and no '.join(missing)}; found {some_of(data, 8) or 'no files'}.")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)

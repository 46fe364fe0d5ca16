"""Hash what is on this machine and compare it with what was recorded or published."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..overlays import Overlay, SourceError, verify_folder
from ..overlays.files import git_blob_id_of, sha256_of
from ..overlays.hub import HubAccess
from ..overlays.sources import Folder
from . import weights


STATUSES = ("ok", "changed", "missing", "unchecked")


@dataclass(frozen=True)
class Checked:
    """One file and what became of it: `"ok"`, `"changed"`, `"missing"`, or `"unchecked"` where no digest is known."""

    file: str
    status: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def check_folder(folder: Path) -> list[Checked]:
    """Compare a materialised folder with the record beside its weights."""
    with _progress() as progress:
        return [
            Checked(str(folder / check.path), check.status, check.bytes) for check in verify_folder(folder, progress)
        ]


def check_overlay(overlay: Overlay, access: weights.Access) -> list[Checked]:
    """Compare an overlay's files on this machine, and every folder made of it, with manifest and records.

    Raises:
        SourceError: If none of it is on this machine.
    """
    hub = HubAccess(access.cache_dir, local_files_only=True)
    manifest = overlay.manifest
    published = {part.source: part.weights for part in (*manifest.adapters, manifest.linear_branch)}
    checked = []
    with _progress() as progress:
        for source in dict.fromkeys(manifest.sources()):
            folder = overlay.folder(source, hub)
            try:
                listed = folder.files()
            except SourceError:
                # Nothing of this part was downloaded.
                continue
            weights_file = published.get(source)
            for name, size in listed.items():
                if not folder.present(name):
                    continue
                expected = folder.published_digest(name)
                if weights_file is not None and name == weights_file.file:
                    expected = weights_file.sha256 or expected
                checked.append(_check_file(folder, name, size, expected, progress))
    for folder, record in weights.materialized_folders(access.cache_dir):
        if record["manifest"] == manifest.to_dict():
            checked += check_folder(folder)
    if not checked:
        raise SourceError(f"Nothing of {overlay.name} is on this machine; 'diffusers-h3 materialize' fetches it.")
    return checked


def _check_file(folder: Folder, name: str, size: int, expected: str | None, progress) -> Checked:
    if expected is None:
        status = "unchecked"
    else:
        path = folder.fetch(name)
        # The Hub names small files by their git object id and large ones by their SHA-256.
        actual = sha256_of(path, progress) if len(expected) == 64 else git_blob_id_of(path)
        status = "ok" if actual == expected else "changed"
    return Checked(f"{folder.location}/{name}", status, size)


@contextmanager
def _progress() -> Iterator[Any]:
    with tqdm(desc="Hashing", unit="B", unit_scale=True) as bar:
        yield bar.update

"""Where files come from: a folder on this machine, or (in `hub.py`) a folder of a repository, behind one interface."""

import os
from pathlib import Path
from typing import Any, Protocol

from .errors import ManifestError, SourceError, some_of
from .files import read_json
from .tensor_file import TensorEntry, read_header


class Folder(Protocol):
    """A folder of files that may still have to be downloaded."""

    location: str
    """What to call the folder in messages and records."""
    commit: str | None
    """The commit it is read at; null for a folder on this machine."""
    storage: Path
    """Where a file that still has to be fetched is written."""

    def files(self) -> dict[str, int]:
        """Return the size in bytes of every file below the folder, by relative path with forward slashes."""

    def child(self, subfolder: str) -> "Folder":
        """Return a folder below this one; it need not exist until it is read."""

    def header(self, name: str) -> dict[str, TensorEntry]:
        """Return the tensors of a safetensors file without fetching its weights."""

    def present(self, name: str) -> bool:
        """Whether the file is on this machine already."""

    def fetch(self, name: str) -> Path:
        """Return the file on this machine, downloading it if need be."""

    def published_digest(self, name: str) -> str | None:
        """Return the digest a fetched file was published under: SHA-256 or git object id; null where there is none."""


class LocalFolder:
    """A folder on this machine."""

    commit = None

    def __init__(self, path: Path):
        self.path = self.storage = path
        self.location = str(path)

    def files(self) -> dict[str, int]:
        if not self.path.is_dir():
            found = sorted(entry.name for entry in self.path.parent.iterdir()) if self.path.parent.is_dir() else []
            raise SourceError(
                f"There is no folder {self.path}; {self.path.parent} holds {some_of(found, 8) or 'nothing'}."
            )
        # Linked folders are followed: an adapter that is a link must not be overlooked.
        paths = [Path(folder, name) for folder, _, names in os.walk(self.path, followlinks=True) for name in names]
        return {
            path.relative_to(self.path).as_posix(): path.stat().st_size for path in sorted(paths) if path.is_file()
        }

    def child(self, subfolder: str) -> "LocalFolder":
        return LocalFolder(self.path / subfolder)

    def header(self, name: str) -> dict[str, TensorEntry]:
        return read_header(self.fetch(name))[0]

    def present(self, name: str) -> bool:
        return True

    def fetch(self, name: str) -> Path:
        path = self.path / name
        if not path.is_file():
            raise SourceError(f"There is no file {path}; its folder holds {some_of(self.files(), 8) or 'nothing'}.")
        return path

    def published_digest(self, name: str) -> str | None:
        return None


def read_folder_json(folder: Folder, names: tuple[str, ...]) -> dict[str, Any]:
    """Read the first of `names` that `folder` has.

    Raises:
        SourceError: If it has none; the message lists what was looked for and what was found.
        ManifestError: If the file is not a JSON object.
    """
    found = folder.files()
    name = next((name for name in names if name in found), None)
    if name is None:
        raise SourceError(
            f"Looked for {' or '.join(names)} in {folder.location}; found {some_of(found, 8) or 'no files'}."
        )
    path = folder.fetch(name)
    try:
        return read_json(path)
    except ManifestError as error:
        raise ManifestError(f"{folder.location}/{name}: {error}") from error

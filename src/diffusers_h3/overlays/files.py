"""Small file operations: JSON in, JSON out, digests, links, and folders that appear whole or not at all."""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import IntegrityError, ManifestError


_CHUNK_BYTES = 16 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object and refuse one that names a key twice, where parsers would keep either value."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            names = [name for name, _ in pairs]
            raise ManifestError(f"{path} names {next(n for n in names if names.count(n) > 1)!r} more than once.")
        return content

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ManifestError(f"{path} is not valid JSON ({error}). Fix the file, or fetch it again.") from error
    if not isinstance(content, dict):
        raise ManifestError(f"{path} must hold a JSON object, got {type(content).__name__}.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace `path` by `content` in one step, flushed to the disk."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    with scratch.open("w", encoding="utf-8") as handle:
        json.dump(content, handle, indent=2, sort_keys=True)
        handle.write("\n")
        flush(handle)
    scratch.replace(path)


def flush(handle) -> None:
    """Push a written file to the disk, so that a rename after it never exposes missing content."""
    handle.flush()
    os.fsync(handle.fileno())


def sync_folder(path: Path) -> None:
    """Push a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, progress: Callable[[int], Any] = lambda count: None) -> str:
    """Return the SHA-256 of a file in hexadecimal, reporting the bytes read to `progress`."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return digest.hexdigest()


def git_blob_id_of(path: Path) -> str:
    """Return the git object id of a file's content, by which the Hub names files that are not in large storage."""
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def check_published_digest(path: Path, location: str, published: str, sha256: str) -> None:
    """Compare a downloaded file with the digest the Hub lists for it (SHA-256, or a git object id)."""
    actual = sha256 if len(published) == 64 else git_blob_id_of(path)
    if actual != published:
        raise IntegrityError(
            f"{location} is damaged: the Hub lists it as {published}, got {actual}. "
            f"Delete {path.resolve()} and run again."
        )


def link_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source` without a second copy: hard link, else symbolic link, else copy."""
    source = source.resolve()
    for link in (os.link, os.symlink):
        try:
            link(source, target)
            return
        except OSError:
            # Another file system, one without such links, or a file of another user: the next way works.
            continue
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, _CHUNK_BYTES)
        flush(writer)

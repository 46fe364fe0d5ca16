"""Tell folders and repositories of diffusers' layout from overlays, and turn the latter into the former."""

import os
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..notices import warn_once
from ..overlays import OverlayError, load_overlay, materialize_overlay
from ..overlays.record import read_record


_INDEX_FILE = "model_index.json"


def resolve_source(
    source: str | os.PathLike, revision: str | None, allow_unpinned: bool, **hub
) -> tuple[str, str | None]:
    """Return what `DiffusionPipeline.from_pretrained` can load, and its revision; overlays are materialised for it.

    `hub` holds `cache_dir`, `token` and `local_files_only`; every part of an overlay is fetched with the same ones.
    """
    source = os.fspath(source)
    if not _has_pipeline_index(source, revision, **hub):
        overlay = load_overlay(source, revision, allow_unpinned=allow_unpinned, **hub)
        source, revision = str(materialize_overlay(overlay, **hub)), None
    if os.path.isdir(source):
        _show_license(Path(source))
    return source, revision


def _show_license(folder: Path) -> None:
    """Show the licence note of a materialised overlay's weights."""
    try:
        note = read_record(folder)["manifest"]["license_note"]
    except OverlayError:
        # A folder that `save_pretrained` wrote has no record, and needs none.
        return
    warn_once(note)


def _has_pipeline_index(source: str, revision: str | None, **hub) -> bool:
    """Return whether `source` is a folder or a repository that `save_pretrained` could have written."""
    if os.path.exists(source):
        return (Path(source) / _INDEX_FILE).is_file()
    if source.count("/") != 1:
        return False
    try:
        hf_hub_download(source, _INDEX_FILE, revision=revision, **hub)
    except (EntryNotFoundError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError):
        # `load_overlay` looks for the same, and says in one line what is missing.
        return False
    return True

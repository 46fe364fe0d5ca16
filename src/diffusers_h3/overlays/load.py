"""Find an overlay: built in, a manifest file, a repository or a release on this machine."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ManifestError, OverlayError, SourceError, UnpinnedRevisionError
from .files import read_json
from .hub import HubAccess, HubFolder, resolve_commit
from .manifest import COMMIT, REPOSITORY, FolderSource, OverlayManifest, builtin_overlays, unpinned_message
from .release import STAGE_MARKER, read_release
from .sources import Folder, LocalFolder


MANIFEST_FILE = "overlay.json"


@dataclass(frozen=True)
class Overlay:
    """A manifest and the folder its null repositories stand for (null where it has none).

    Every repository in `manifest` is at a commit; `unpinned` records which branch or tag a commit was looked up from.

    Examples:
        >>> from diffusers_h3 import load_overlay
        >>> overlay = load_overlay("vdn-h3-50step")
        >>> overlay.name, overlay.root, overlay.unpinned
        ('vdn-h3-50step', None, ())
    """

    manifest: OverlayManifest
    root: Path | None = None
    unpinned: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.manifest.name

    def folder(self, source: FolderSource, access: HubAccess) -> Folder:
        """Return the folder a source of the manifest names."""
        if source.repo is None:
            return LocalFolder(self.root / source.subfolder)
        return HubFolder(source.repo, source.revision, source.subfolder, access)


def load_overlay(
    source: str | os.PathLike,
    revision: str | None = None,
    *,
    allow_unpinned: bool = False,
    cache_dir: str | os.PathLike | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Overlay:
    """Find an overlay and read its description; no weights are downloaded.

    Args:
        source (`str` or `PathLike`): A built-in name (`"vdn-h3-8step"`, `"vdn-h3-50step"`); a manifest file; a folder
            with a manifest `overlay.json`; a release folder, or one of its stages; or a repository `"owner/name"`
            with either. `"owner/name//stage-b-step-2000"` picks one stage of a repository that holds several.
        revision (`str`, *optional*): The commit of a repository, 40 lowercase hexadecimal digits.
        allow_unpinned (`bool`): Accept a branch or a tag (`main` by default), here and in the manifest, and use the
            commit it points to now.
        cache_dir (`str` or `PathLike`, *optional*): The Hub cache.
        token (`str` or `bool`, *optional*): As for `huggingface_hub`.
        local_files_only (`bool`): Never open a connection.

    Raises:
        OverlayError: One of its subclasses, with what was looked for, what was found and the way out.

    Examples:
        >>> from diffusers_h3 import load_overlay
        >>> overlay = load_overlay("vdn-h3-8step")
        >>> [adapter.name for adapter in overlay.manifest.adapters]
        ['default', 'turbo']
        >>> overlay.manifest.sampling.num_inference_steps
        8
    """
    access = HubAccess(cache_dir, token, local_files_only)
    source = os.fspath(source)
    builtin = builtin_overlays()
    if source in builtin:
        _refuse_revision(revision, f"the built-in overlay {source!r} pins its own revisions")
        return Overlay(builtin[source])
    path = Path(source).expanduser()
    if path.exists():
        _refuse_revision(revision, f"{source} is on this machine and has no revision")
        return _resolve(*_load_local(path.absolute(), allow_unpinned), access)
    repo, _, stage = source.partition("//")
    if not REPOSITORY.fullmatch(repo):
        raise SourceError(
            f"{source!r} is no file or folder here, no repository ('owner/name') and no built-in overlay "
            f"({', '.join(builtin)})."
        )
    if not COMMIT.fullmatch(revision or "") and not allow_unpinned:
        raise UnpinnedRevisionError(f"Revision {unpinned_message(repo, revision)}")
    return _load_repository(repo, stage or None, revision or "main", allow_unpinned, access)


def _refuse_revision(revision: str | None, reason: str) -> None:
    if revision is not None:
        raise OverlayError(f"`revision` is for repositories, but {reason}; leave it out.")


def _load_local(path: Path, allow_unpinned: bool) -> tuple[OverlayManifest, Path]:
    if path.is_file():
        return _read_manifest(path, allow_unpinned), path.parent
    if (path / MANIFEST_FILE).is_file():
        return _read_manifest(path / MANIFEST_FILE, allow_unpinned), path
    if (path / STAGE_MARKER).is_file():
        return read_release(LocalFolder(path.parent), path.name, str(path.parent / "{stage}")), path.parent
    return read_release(LocalFolder(path), None, str(path / "{stage}")), path


def _read_manifest(path: Path, allow_unpinned: bool) -> OverlayManifest:
    content = read_json(path)
    if "record_version" in content:
        raise ManifestError(
            f"{path.parent} is an overlay that has been materialised already; load it with "
            "`VDNH3Pipeline.from_pretrained`."
        )
    return OverlayManifest.from_dict(content, allow_unpinned=allow_unpinned, origin=str(path))


def _load_repository(repo: str, stage: str | None, revision: str, allow_unpinned: bool, access: HubAccess) -> Overlay:
    commit = resolve_commit(repo, revision, access)
    root = HubFolder(repo, commit, "", access)
    if stage is None and MANIFEST_FILE in root.files():
        content = read_json(root.fetch(MANIFEST_FILE))
        manifest = OverlayManifest.from_dict(
            content, allow_unpinned=allow_unpinned, origin=f"{root.location}/{MANIFEST_FILE}"
        )
    else:
        manifest = read_release(root, stage, f"{repo}//{{stage}}")
    # What lies beside the manifest lies in its repository, at its commit.
    manifest = _map_sources(
        manifest, lambda source: source if source.repo else FolderSource(repo, commit, source.subfolder)
    )
    overlay = _resolve(manifest, None, access)
    if commit != revision:
        overlay = replace(overlay, unpinned=((repo, revision, commit), *overlay.unpinned))
    return overlay


def _resolve(manifest: OverlayManifest, root: Path | None, access: HubAccess) -> Overlay:
    """Replace every branch or tag in the manifest by the commit it points to."""
    commits = {
        (source.repo, source.revision): resolve_commit(source.repo, source.revision, access)
        for source in dict.fromkeys(manifest.sources())
        if source.repo is not None and not COMMIT.fullmatch(source.revision)
    }
    resolved = _map_sources(
        manifest,
        lambda source: replace(source, revision=commits.get((source.repo, source.revision), source.revision)),
    )
    return Overlay(resolved, root, tuple((*key, commit) for key, commit in commits.items()))


def _map_sources(manifest: OverlayManifest, change) -> OverlayManifest:
    return replace(
        manifest,
        base_transformer=replace(manifest.base_transformer, source=change(manifest.base_transformer.source)),
        adapters=tuple(replace(adapter, source=change(adapter.source)) for adapter in manifest.adapters),
        linear_branch=replace(manifest.linear_branch, source=change(manifest.linear_branch.source)),
        components={name: change(source) for name, source in manifest.components.items()},
    )

"""Turn an overlay into a plain diffusers folder: whole, or not there."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub.utils import tqdm

from .errors import DiskSpaceError, ManifestError, OverlayError
from .files import link_file, read_json, sha256_of, sync_folder, write_json
from .fuse import Delta, fuse_shard
from .hub import HubAccess, default_cache_dir
from .load import Overlay
from .manifest import COMPONENT_CLASSES, SOURCED_COMPONENTS
from .parts import (
    BRANCH_FILE,
    FetchedPart,
    Part,
    check_space,
    component_parts,
    content_fingerprint,
    fetch_part,
    transformer_parts,
)
from .plan import INDEX_FILE, TransformerPlan, plan_transformer
from .record import RECORD_FILE, RECORD_VERSION, is_complete, provenance
from .sources import Folder


logger = logging.getLogger(__name__)

_JOURNAL_FILE = "finished.json"
_DIGEST_LENGTH = 16


def materialize_overlay(
    overlay: Overlay,
    cache_dir: str | os.PathLike | None = None,
    components: Sequence[str] | None = None,
    *,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """Return the overlay as a folder `DiffusionPipeline.from_pretrained` reads, making it the first time.

    Adapters are merged into the base transformer shard by shard; everything else is linked. The folder appears under
    its name only when complete. A run that was killed is taken up after its last finished shard; two processes do the
    work once.

    Args:
        overlay (`Overlay`): From `load_overlay`.
        cache_dir (`str` or `PathLike`, *optional*): Holds the folder, and what is downloaded for it. By default
            `default_cache_dir()`, and the Hub's own cache for downloads.
        components (`Sequence[str]`, *optional*): Only these of the pipeline's components; all by default.
        token (`str` or `bool`, *optional*): As for `huggingface_hub`.
        local_files_only (`bool`): Never open a connection.

    Returns:
        `Path`: ``<cache_dir>/<name>-<digest>``; the digest covers the manifest, the components and local files.

    Raises:
        OverlayError: One of its subclasses. Nothing half-written is left behind.

    Examples:
        >>> from diffusers_h3 import load_overlay, materialize_overlay
        >>> from diffusers_h3.demo.release import STAGE, embedded_release
        >>> overlay = load_overlay(embedded_release() / STAGE)
        >>> folder = materialize_overlay(overlay, components=("transformer", "scheduler"))
        >>> sorted(path.name for path in folder.iterdir())
        ['model_index.json', 'overlay.json', 'scheduler', 'transformer']
    """
    components = _check_components(components)
    cache = Path(cache_dir).expanduser().absolute() if cache_dir is not None else default_cache_dir()
    folders = _source_folders(overlay, components, HubAccess(cache_dir, token, local_files_only))
    digest = _digest(overlay, components, folders)
    target = cache / f"{overlay.name}-{digest}"
    if is_complete(target, digest):
        return target
    with _readable_errors(target):
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(target):
            if not is_complete(target, digest):
                _Job(overlay, components, folders, digest, target).run()
    return target


def _check_components(components: Sequence[str] | None) -> tuple[str, ...]:
    if components is None:
        return tuple(COMPONENT_CLASSES)
    unknown = [name for name in components if name not in COMPONENT_CLASSES]
    if isinstance(components, str) or unknown or not components:
        raise OverlayError(
            f"`components` must be a list of some of {', '.join(COMPONENT_CLASSES)}, got {components!r}."
        )
    return tuple(name for name in COMPONENT_CLASSES if name in components)


def _source_folders(overlay: Overlay, components: tuple[str, ...], access: HubAccess) -> dict[str, list[Folder]]:
    """Return the folders each component is read from; the transformer's are base, adapters in order, branch."""
    manifest = overlay.manifest
    folders = {
        name: [overlay.folder(manifest.components[name], access)] for name in SOURCED_COMPONENTS if name in components
    }
    if "transformer" in components:
        sources = [
            manifest.base_transformer.source,
            *(adapter.source for adapter in manifest.adapters),
            manifest.linear_branch.source,
        ]
        folders["transformer"] = [overlay.folder(source, access) for source in sources]
    return folders


def _digest(overlay: Overlay, components: tuple[str, ...], folders: dict[str, list[Folder]]) -> str:
    described = {
        "record_version": RECORD_VERSION,
        "manifest": overlay.manifest.to_dict(),
        "components": components,
        "local": content_fingerprint(folder for group in folders.values() for folder in group),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Let one process work on `target` at a time."""
    lock = FileLock(_lock_path(target))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("Another process is materialising %s; waiting for it.", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _lock_path(target: Path) -> Path:
    folder = target.parent / ".locks"
    folder.mkdir(exist_ok=True)
    return folder / f"{target.name}.lock"


@contextmanager
def _readable_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):
            free = shutil.disk_usage(target.parent).free
            raise DiskSpaceError(
                f"The disk of {target.parent} ran full while writing {target.name}; what was written is removed, and "
                f"{free / 1e9:.2f} GB are free now. Free some space or choose another `cache_dir`."
            ) from error
        raise OverlayError(f"Materialising {target} failed: {error}.") from error


class _Job:
    """One materialisation, run under the lock of its target."""

    def __init__(
        self,
        overlay: Overlay,
        components: tuple[str, ...],
        folders: dict[str, list[Folder]],
        digest: str,
        target: Path,
    ):
        self.overlay, self.components, self.folders = overlay, components, folders
        self.digest, self.target = digest, target
        self.scratch = target.with_name(f".{target.name}.partial")
        self.retired = target.with_name(f".{target.name}.damaged")
        self.outputs: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        """Plan, check the space, fetch and verify, write, and rename."""
        self._clean_leftovers()
        plan, parts = self._plan()
        finished = _finished_shards(self.scratch)
        downloads = [(part.folder.storage, part.size) for part in parts if not part.folder.present(part.name)]
        shards = {} if plan is None else self.folders["transformer"][0].files()
        writes = [
            (self.target.parent, shards[shard])
            for shard in (plan.shards if plan else ())
            if plan.is_changed(shard) and f"transformer/{shard}" not in finished
        ]
        check_space(downloads + writes)
        fetched = self._fetch(parts)
        try:
            self.scratch.mkdir(exist_ok=True)
            if plan is not None:
                self._write_transformer(plan, fetched, finished)
            self._link(fetched)
            self._write_configs(plan)
            self._finish([part.to_dict() for part in fetched])
        except Exception:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        except BaseException:
            # Interrupted: shards that are done serve the next run, the rest goes.
            _finished_shards(self.scratch)
            raise

    def _clean_leftovers(self) -> None:
        """Remove what interrupted runs of this overlay left for other digests, unless they are at work."""
        pattern = f".{self.overlay.name}-{'[0-9a-f]' * _DIGEST_LENGTH}.partial"
        for scratch in set(self.target.parent.glob(pattern)) - {self.scratch}:
            try:
                with FileLock(_lock_path(scratch.with_name(scratch.name[1:].removesuffix(".partial"))), timeout=0):
                    shutil.rmtree(scratch, ignore_errors=True)
            except Timeout:
                continue
        shutil.rmtree(self.retired, ignore_errors=True)
        if self.target.exists():
            logger.warning("%s has lost files since it was made; making it again.", self.target)

    def _plan(self) -> tuple[TransformerPlan | None, list[Part]]:
        manifest, parts, plan = self.overlay.manifest, [], None
        for component, folders in self.folders.items():
            if component == "transformer":
                base, *adapters, branch = folders
                plan = plan_transformer(manifest, base, adapters, branch)
                parts += transformer_parts(manifest, plan, base, adapters, branch)
            else:
                parts += component_parts(component, folders[0])
        return plan, parts

    def _fetch(self, parts: list[Part]) -> list[FetchedPart]:
        total = sum(part.size for part in parts)
        with tqdm(total=total, desc="Fetching and verifying", unit="B", unit_scale=True) as bar:
            return [fetch_part(part, bar.update) for part in parts]

    def _write_transformer(self, plan: TransformerPlan, fetched: list[FetchedPart], finished: dict[str, str]) -> None:
        paths = {(part.part.folder.location, part.part.name): part for part in fetched}
        base, *adapters, _ = self.folders["transformer"]
        weights = [
            paths[folder.location, adapter.weights.file]
            for folder, adapter in zip(adapters, self.overlay.manifest.adapters, strict=True)
        ]
        names = [adapter.name for adapter in self.overlay.manifest.adapters]
        deltas = {
            target: [
                Delta(names[m.adapter], weights[m.adapter].path, m.pair.lora_a, m.pair.lora_b, m.pair.scale)
                for m in merges
            ]
            for target, merges in plan.merges.items()
        }
        (self.scratch / "transformer").mkdir(exist_ok=True)
        changed = [paths[base.location, shard] for shard in plan.shards if plan.is_changed(shard)]
        with tqdm(total=sum(s.part.size for s in changed), desc="Merging adapters", unit="B", unit_scale=True) as bar:
            for source in changed:
                name = f"transformer/{source.part.name}"
                if name in finished:
                    bar.update(source.part.size)
                else:
                    scratch = self.scratch / f"{name}.tmp"
                    finished[name] = fuse_shard(source.path, scratch, deltas, bar.update)
                    scratch.replace(self.scratch / name)
                    write_json(self.scratch / _JOURNAL_FILE, finished)
                self._record(name, "fused", finished[name])
        fused = [{"name": name, "sha256": file.sha256} for name, file in zip(names, weights, strict=True)]
        self._write("transformer/config.json", self._transformer_config(plan, fused))
        weight_map = {name: shard for shard, header in plan.shards.items() for name in header}
        weight_map |= dict.fromkeys(plan.branch, BRANCH_FILE)
        entries = [entry for header in (*plan.shards.values(), plan.branch) for entry in header.values()]
        total = sum(entry.end - entry.begin for entry in entries)
        self._write(f"transformer/{INDEX_FILE}", {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _transformer_config(self, plan: TransformerPlan, fused: list[dict[str, str]]) -> dict[str, Any]:
        return {
            **plan.config,
            "_class_name": COMPONENT_CLASSES["transformer"][1],
            "hybrid_attention": self.overlay.manifest.hybrid_attention.to_dict(),
            "fused_adapters": fused,
        }

    def _link(self, fetched: list[FetchedPart]) -> None:
        for part in fetched:
            if part.part.target is not None:
                target = self.scratch / part.part.target
                target.parent.mkdir(parents=True, exist_ok=True)
                link_file(part.path, target)
                self._record(part.part.target, "linked", part.sha256)

    def _write_configs(self, plan: TransformerPlan | None) -> None:
        sampling, version = self.overlay.manifest.sampling, metadata.version("diffusers")
        shifts = {"scheduler": sampling.video_shift, "audio_scheduler": sampling.audio_shift}
        for name, shift in shifts.items():
            if name in self.components:
                config = {"_class_name": COMPONENT_CLASSES[name][1], "_diffusers_version": version, "shift": shift}
                self._write(f"{name}/scheduler_config.json", config)
        index = {
            name: list(origin) if name in self.components else [None, None]
            for name, origin in COMPONENT_CLASSES.items()
        }
        index |= {
            "_class_name": "VDNH3Pipeline",
            "_diffusers_version": version,
            "num_inference_steps": sampling.num_inference_steps,
        }
        self._write("model_index.json", index)

    def _finish(self, inputs: list[dict[str, Any]]) -> None:
        record = provenance(self.overlay, self.digest, self.components, inputs, self.outputs)
        write_json(self.scratch / RECORD_FILE, record)
        (self.scratch / _JOURNAL_FILE).unlink(missing_ok=True)
        for folder in {(self.scratch / name).parent for name in self.outputs}:
            sync_folder(folder)
        if self.target.exists():
            self.target.rename(self.retired)
        self.scratch.rename(self.target)
        sync_folder(self.target.parent)
        shutil.rmtree(self.retired, ignore_errors=True)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
        self._record(name, "written", sha256_of(path))

    def _record(self, name: str, origin: str, sha256: str) -> None:
        size = (self.scratch / name).stat().st_size
        self.outputs[name] = {"bytes": size, "sha256": sha256, "origin": origin}


def _finished_shards(scratch: Path) -> dict[str, str]:
    """Return the shards an interrupted run finished, by digest, and remove everything else it left."""
    journal = scratch / _JOURNAL_FILE
    try:
        listed = read_json(journal) if journal.is_file() else {}
    except ManifestError:
        listed = {}
    finished = {
        name: digest
        for name, digest in listed.items()
        if (scratch / name).is_file() and sha256_of(scratch / name) == digest
    }
    if not finished:
        shutil.rmtree(scratch, ignore_errors=True)
        return {}
    for path in scratch.rglob("*"):
        if not path.is_dir() and path != journal and path.relative_to(scratch).as_posix() not in finished:
            path.unlink()
    return finished

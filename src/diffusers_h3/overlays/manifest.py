"""The overlay manifest: a declarative description of where every part comes from and how it must look."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any

from ..hybrid.config import HybridAttentionConfig
from .errors import ManifestError, UnpinnedRevisionError
from .files import read_json


SCHEMA_VERSION = 1
# Library and class of every component, fixed here: a manifest cannot name code.
COMPONENT_CLASSES = {
    "transformer": ("diffusers_h3", "VDNH3Transformer3DModel"),
    "vae": ("diffusers", "AutoencoderKLMiniMaxH3"),
    "audio_vae": ("diffusers", "AutoencoderKLMiniMaxH3Audio"),
    "text_encoder": ("transformers", "Qwen3VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "processor": ("transformers", "Qwen3VLProcessor"),
    "scheduler": ("diffusers", "MiniMaxH3Scheduler"),
    "audio_scheduler": ("diffusers", "MiniMaxH3Scheduler"),
}
# Components whose files come from a source; the two schedulers are written from the sampling contract.
SOURCED_COMPONENTS = ("vae", "audio_vae", "text_encoder", "tokenizer", "processor")
COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class FolderSource:
    """A folder: `subfolder` of `repo` at `revision`, or, where both are null, beside the manifest itself."""

    repo: str | None
    revision: str | None
    subfolder: str


@dataclass(frozen=True)
class WeightsFile:
    """A safetensors file; `sha256`, `bytes` and `tensors` are null where nothing was published."""

    file: str
    sha256: str | None
    bytes: int | None
    tensors: int | None


@dataclass(frozen=True)
class BaseTransformer:
    """The stock transformer the overlay is laid over."""

    source: FolderSource
    shards: int | None


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter that is merged into the base transformer."""

    name: str
    source: FolderSource
    weights: WeightsFile
    pairs: int | None


@dataclass(frozen=True)
class LinearBranch:
    """The weights hybrid attention adds to every block."""

    source: FolderSource
    weights: WeightsFile


@dataclass(frozen=True)
class Sampling:
    """How the weights are meant to be sampled: transformer calls (null: any) and the two schedulers' shifts."""

    num_inference_steps: int | None
    recommended_num_inference_steps: int
    video_shift: float
    audio_shift: float


@dataclass(frozen=True)
class OverlayManifest:
    """Everything needed to build a pipeline folder; `adapters` are merged in their order.

    Examples:
        >>> from diffusers_h3.overlays import OverlayManifest, builtin_overlays
        >>> manifest = builtin_overlays()["vdn-h3-8step"]
        >>> manifest.base_transformer.source.revision
        '18be6bcc4ee72585eee322ba28b5ccac2cf85ef0'
        >>> OverlayManifest.from_dict(manifest.to_dict()) == manifest
        True
    """

    schema_version: int
    name: str
    description: str
    license_note: str
    base_transformer: BaseTransformer
    hybrid_attention: HybridAttentionConfig
    adapters: tuple[Adapter, ...]
    linear_branch: LinearBranch
    components: dict[str, FolderSource]
    sampling: Sampling

    @classmethod
    def from_dict(
        cls, content: dict[str, Any], *, allow_unpinned: bool = False, origin: str = "The manifest"
    ) -> "OverlayManifest":
        """Read a manifest's JSON object; the first problem is raised with its path.

        Raises:
            ManifestError: For an unknown, missing or illegal field.
            UnpinnedRevisionError: For a revision that is not a commit, unless `allow_unpinned`.
        """
        try:
            manifest = cls(**_manifest_fields(allow_unpinned)(content, ""))
        except (ManifestError, UnpinnedRevisionError) as error:
            raise type(error)(f"{origin}: {error}") from error
        return manifest

    @classmethod
    def from_file(cls, path: str | Path, *, allow_unpinned: bool = False) -> "OverlayManifest":
        """Read a manifest file.

        Examples:
            >>> import json
            >>> from pathlib import Path
            >>> from diffusers_h3.overlays import OverlayManifest, builtin_overlays
            >>> manifest = builtin_overlays()["vdn-h3-8step"]
            >>> characters = Path("mine.json").write_text(json.dumps(manifest.to_dict()))
            >>> OverlayManifest.from_file("mine.json") == manifest
            True
        """
        return cls.from_dict(read_json(Path(path)), allow_unpinned=allow_unpinned, origin=str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object `from_dict` reads."""
        return {
            **asdict(self),
            "hybrid_attention": self.hybrid_attention.to_dict(),
            "adapters": [asdict(adapter) for adapter in self.adapters],
        }

    def sources(self) -> list[FolderSource]:
        """Return the source of every part, the base transformer's first."""
        return [
            self.base_transformer.source,
            *(adapter.source for adapter in self.adapters),
            self.linear_branch.source,
            *self.components.values(),
        ]


def builtin_overlays() -> dict[str, OverlayManifest]:
    """Return the manifests that come with the package, by name.

    Examples:
        >>> from diffusers_h3.overlays import builtin_overlays
        >>> sorted(builtin_overlays())
        ['vdn-h3-50step', 'vdn-h3-8step']
    """
    folder = resources.files(__package__) / "manifests"
    manifests = {}
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        with resources.as_file(entry) as path:
            manifest = OverlayManifest.from_file(path)
        manifests[manifest.name] = manifest
    return manifests


# Readers: each takes a JSON value and its path and returns the parsed value or raises with the path.
Reader = Callable[[Any, str], Any]


def _refuse(path: str, expected: str, value: Any):
    raise ManifestError(f"field `{path or 'top level'}` must be {expected}, got {value!r}.")


def _object(fields: dict[str, Reader], build: Callable[..., Any] = dict) -> Reader:
    """Read an object with exactly `fields`."""

    def read(value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            _refuse(path, "an object", value)
        prefix = f"{path}." if path else ""
        for kind, names in (("unknown", set(value) - set(fields)), ("missing", set(fields) - set(value))):
            if names:
                raise ManifestError(
                    f"{kind} field {', '.join(f'`{prefix}{name}`' for name in sorted(names))}; "
                    f"{f'`{path}`' if path else 'a manifest'} holds exactly {', '.join(fields)}."
                )
        return build(**{name: reader(value[name], prefix + name) for name, reader in fields.items()})

    return read


def _list(item: Reader) -> Reader:
    def read(value: Any, path: str) -> tuple:
        if not isinstance(value, list):
            _refuse(path, "a list", value)
        return tuple(item(entry, f"{path}[{index}]") for index, entry in enumerate(value))

    return read


def _optional(reader: Reader) -> Reader:
    return lambda value, path: None if value is None else reader(value, path)


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str) or not value.strip():
        _refuse(path, "a text", value)
    return value


def _pattern(pattern: re.Pattern, expected: str) -> Reader:
    def read(value: Any, path: str) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            _refuse(path, expected, value)
        return value

    return read


def _count(value: Any, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _refuse(path, "a positive integer", value)
    return value


def _shift(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        _refuse(path, "a positive number", value)
    return float(value)


def _subfolder(value: Any, path: str) -> str:
    if not isinstance(value, str) or "\\" in value or PurePosixPath(value).is_absolute() or ".." in value.split("/"):
        _refuse(path, "a relative path with forward slashes and no '..' (may be empty)", value)
    return PurePosixPath(value).as_posix() if value else ""


def _schema_version(value: Any, path: str) -> int:
    if value != SCHEMA_VERSION or isinstance(value, bool):
        _refuse(path, f"{SCHEMA_VERSION} for this version of diffusers-h3", value)
    return value


def _hybrid_attention(value: Any, path: str) -> HybridAttentionConfig:
    try:
        return HybridAttentionConfig.from_dict(value)
    except ValueError as error:
        raise ManifestError(f"field `{path}`: {error}") from error


def weights_file_name(value: Any, path: str) -> str:
    """Accept a plain safetensors file name; pickled weights could run code, so they are refused by name."""
    if not isinstance(value, str) or "/" in value or "\\" in value or not value.endswith(".safetensors"):
        _refuse(path, "the plain name of a .safetensors file (no other format of weights is read)", value)
    return value


def _source(allow_unpinned: bool) -> Reader:
    fields = _object(
        {
            "repo": _optional(_pattern(REPOSITORY, "null or 'owner/name'")),
            "revision": _optional(_text),
            "subfolder": _subfolder,
        },
        FolderSource,
    )

    def read(value: Any, path: str) -> FolderSource:
        source = fields(value, path)
        if (source.repo is None) != (source.revision is None):
            _refuse(path, "a repo with its revision, or null for both (beside the manifest)", value)
        if source.repo is not None and not COMMIT.fullmatch(source.revision) and not allow_unpinned:
            raise UnpinnedRevisionError(f"field `{path}.revision` {unpinned_message(source.repo, source.revision)}")
        return source

    return read


def unpinned_message(repo: str, revision: str | None) -> str:
    """Say why `revision` is refused and what to pass instead."""
    return (
        f"{revision!r} of {repo} is not a commit (40 lowercase hexadecimal digits), so its content can change. "
        "Give the commit, or pass `allow_unpinned=True`."
    )


def _manifest_fields(allow_unpinned: bool) -> Reader:
    source, name = _source(allow_unpinned), _pattern(_NAME, "a name of letters, digits, '.', '_' and '-'")
    weights = _object(
        {
            "file": weights_file_name,
            "sha256": _optional(_pattern(re.compile(r"[0-9a-f]{64}"), "null or 64 lowercase hexadecimal digits")),
            "bytes": _optional(_count),
            "tensors": _optional(_count),
        },
        WeightsFile,
    )
    adapter = _object({"name": name, "source": source, "weights": weights, "pairs": _optional(_count)}, Adapter)
    sampling = _object(
        {
            "num_inference_steps": _optional(_count),
            "recommended_num_inference_steps": _count,
            "video_shift": _shift,
            "audio_shift": _shift,
        },
        Sampling,
    )

    def adapters(value: Any, path: str) -> tuple[Adapter, ...]:
        found = _list(adapter)(value, path)
        names = [entry.name for entry in found]
        if len(set(names)) != len(names):
            _refuse(path, "a list of adapters with different names", names)
        return found

    return _object(
        {
            "schema_version": _schema_version,
            "name": name,
            "description": _text,
            "license_note": _text,
            "base_transformer": _object({"source": source, "shards": _optional(_count)}, BaseTransformer),
            "hybrid_attention": _hybrid_attention,
            "adapters": adapters,
            "linear_branch": _object({"source": source, "weights": weights}, LinearBranch),
            "components": _object(dict.fromkeys(SOURCED_COMPONENTS, source)),
            "sampling": sampling,
        }
    )

"""Read the layout OpenVDN publishes (`h3-base` and `stage-*`) as a manifest."""

from pathlib import PurePosixPath
from typing import Any

from .errors import ManifestError, SourceError, some_of
from .manifest import SCHEMA_VERSION, SOURCED_COMPONENTS, FolderSource, OverlayManifest, builtin_overlays
from .plan import BASE_CLASS
from .sources import Folder, read_folder_json


BASE_FOLDER = "h3-base"
STAGE_MARKER = "model_spec.json"

_DEFAULT_CALLS = 50

# Where ComfyUI keeps models of the kinds an overlay has.
_SINGLE_FILE_FOLDERS = {"diffusion_models", "split_files", "text_encoders", "checkpoints", "unet"}


def stages(files: dict[str, int]) -> list[str]:
    """Return the folders directly below a release's root that hold an overlay."""
    paths = (PurePosixPath(name) for name in files)
    return sorted(path.parent.name for path in paths if len(path.parts) == 2 and path.name == STAGE_MARKER)


def read_release(root: Folder, stage: str | None, choose: str) -> OverlayManifest:
    """Describe one stage of a release as a manifest whose sources lie beside it.

    What the release does not publish (digests, counts) is null; without a licence note of its own it is under the
    MiniMax-H3 licence. Text encoder, tokenizer and processor come from
    `h3-base` where it has them, else from the pinned repository the built-in overlays use.

    Args:
        root (`Folder`): The folder that holds `h3-base` and the stages.
        stage (`str`, *optional*): The stage; needed where there are several.
        choose (`str`): How the caller's user names a stage, with `{stage}` for its name; for messages.

    Raises:
        SourceError: If there is no such stage, or several and none is named.
        ManifestError: If the release's own description is not one this version reads.
    """
    files = root.files()
    found = stages(files)
    if not any(name.startswith(f"{BASE_FOLDER}/transformer/") for name in files) or not found:
        raise SourceError(
            f"{root.location} holds no overlay: looked for overlay.json, or {BASE_FOLDER}/transformer beside folders "
            f"with {STAGE_MARKER}; found {some_of(sorted({name.split('/')[0] for name in files}), 8) or 'nothing'}."
            f"{_other_kind(files)}"
        )
    if stage is None and len(found) > 1:
        raise SourceError(
            f"{root.location} holds several overlays: {', '.join(found)}. "
            f"Name one, for example {choose.format(stage=found[0])!r}."
        )
    stage = stage or found[0]
    if stage not in found:
        raise SourceError(f"{root.location} has no overlay {stage!r}; it holds {', '.join(found)}.")

    folder = root.child(stage)
    hybrid_attention = _read_transform(folder)
    metadata = _read_metadata(folder)
    sampling = _sampling(metadata)
    adapters = [_adapter(stage, name, files) for name in _adapter_names(folder, stage, files, sampling)]
    builtin = builtin_overlays()["vdn-h3-8step"]
    content = {
        "schema_version": SCHEMA_VERSION,
        "name": stage,
        "description": f"{stage} of the release {root.location}.",
        "license_note": metadata.get("license_note", builtin.license_note),
        "base_transformer": {"source": _beside(f"{BASE_FOLDER}/transformer"), "shards": None},
        "hybrid_attention": hybrid_attention,
        "adapters": adapters,
        "linear_branch": {
            "source": _beside(f"{stage}/linear_branch"),
            "weights": _unpublished(_weights_name(f"{stage}/linear_branch", files, "model.safetensors")),
        },
        "components": {name: _component(name, files, builtin.components[name]) for name in SOURCED_COMPONENTS},
        "sampling": sampling,
    }
    return OverlayManifest.from_dict(content, origin=f"{root.location}/{stage}")


def _other_kind(files: dict[str, int]) -> str:
    """Say what files that are no release look like and what takes them; empty where they look like nothing known."""
    weights = [PurePosixPath(name) for name in files if name.endswith((".safetensors", ".gguf"))]
    if any("pruned" in path.name.lower() for path in weights):
        return (
            " Its weights are pruned (AdaLN input 8 instead of 2688), and no overlay fits those: take the full base "
            "in Diffusers' layout, as in MiniMaxAI/MiniMax-H3."
        )
    if "transformer/config.json" in files:
        return " It looks like a base in Diffusers' layout: a manifest of your own can name it as `base_transformer`."
    if any(path.suffix == ".gguf" or _SINGLE_FILE_FOLDERS.intersection(path.parts[:-1]) for path in weights):
        return (
            " It looks like single-file checkpoints for another program, which are not read: take the base in "
            "Diffusers' layout, as in MiniMaxAI/MiniMax-H3."
        )
    if weights:
        return " If its weights are a LoRA, load them beside a pipeline's own with `load_lora_weights`."
    return ""


def _beside(subfolder: str) -> dict[str, Any]:
    return {"repo": None, "revision": None, "subfolder": subfolder}


def _unpublished(file: str) -> dict[str, Any]:
    return {"file": file, "sha256": None, "bytes": None, "tensors": None}


def _component(name: str, files: dict[str, int], pinned: FolderSource) -> dict[str, Any]:
    subfolder = f"{BASE_FOLDER}/{name}"
    # The autoencoders are always a part of the release's base; the text side may stay with its publisher.
    if name in ("vae", "audio_vae") or any(file.startswith(f"{subfolder}/") for file in files):
        return _beside(subfolder)
    return {"repo": pinned.repo, "revision": pinned.revision, "subfolder": pinned.subfolder}


def _adapter_names(folder: Folder, stage: str, files: dict[str, int], sampling: dict[str, Any]) -> list[str]:
    """Return the adapters in merge order, which for the published `default` and `turbo` is the alphabet's."""
    parts = (PurePosixPath(name).parts for name in files)
    names = sorted({part[2] for part in parts if len(part) == 4 and part[:2] == (stage, "adapters")})
    needed = "default" if sampling["num_inference_steps"] is None else "turbo"
    if needed not in names:
        raise SourceError(
            f"{folder.location} is incomplete: its metadata calls for the adapter {needed!r}, adapters/ holds "
            f"{some_of(names) or 'none'}. Fetch the release again, or describe what you have with a manifest."
        )
    return names


def _adapter(stage: str, name: str, files: dict[str, int]) -> dict[str, Any]:
    subfolder = f"{stage}/adapters/{name}"
    file = _weights_name(subfolder, files, "adapter_model.safetensors")
    return {"name": name, "source": _beside(subfolder), "weights": _unpublished(file), "pairs": None}


def _weights_name(subfolder: str, files: dict[str, int], expected: str) -> str:
    if f"{subfolder}/{expected}" in files:
        return expected
    found = sorted(name.removeprefix(f"{subfolder}/") for name in files if name.startswith(f"{subfolder}/"))
    raise SourceError(
        f"Looked for {expected} in {subfolder}; found {some_of(found, 8) or 'no files'}. "
        "Only .safetensors weights are read."
    )


def _read_transform(folder: Folder) -> dict[str, Any]:
    spec = read_folder_json(folder, (STAGE_MARKER,))
    where = f"{folder.location}/{STAGE_MARKER}"
    if spec.get("format_version") != 2:
        raise ManifestError(f"{where}: `format_version` must be 2, got {spec.get('format_version')!r}.")
    base = spec.get("base")
    if not isinstance(base, dict) or base.get("class_name") != BASE_CLASS:
        raise ManifestError(f"{where}: `base.class_name` must be {BASE_CLASS!r}, got {base!r}.")
    transforms = spec.get("transforms")
    if not isinstance(transforms, list) or len(transforms) != 1:
        raise ManifestError(f"{where}: `transforms` must hold one hybrid_attention transform, got {transforms!r}.")
    return transforms[0]


def _read_metadata(folder: Folder) -> dict[str, Any]:
    metadata = read_folder_json(folder, ("metadata.json",)).get("metadata")
    missing = [name for name in ("video_shift", "audio_shift") if name not in (metadata or {})]
    if not isinstance(metadata, dict) or missing:
        raise ManifestError(
            f"{folder.location}/metadata.json: missing {', '.join(f'`metadata.{n}`' for n in missing)}."
        )
    return metadata


def _sampling(metadata: dict[str, Any]) -> dict[str, Any]:
    calls = metadata.get("turbo_num_steps")
    return {
        "num_inference_steps": calls,
        "recommended_num_inference_steps": calls or _DEFAULT_CALLS,
        "video_shift": metadata["video_shift"],
        "audio_shift": metadata["audio_shift"],
    }

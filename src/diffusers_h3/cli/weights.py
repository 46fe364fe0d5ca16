"""From what the user names to a folder a pipeline loads, the same way for every command."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..overlays import Overlay, OverlayError, UnpinnedRevisionError, load_overlay
from .console import UsageError, messages, option_names


if TYPE_CHECKING:
    import torch

    from ..models.transformer_vdn_h3 import VDNH3Transformer3DModel
    from ..pipelines.pipeline_vdn_h3 import VDNH3Pipeline

_INDEX_FILE = "model_index.json"
_PIPELINE_CLASS = "VDNH3Pipeline"


@dataclass(frozen=True)
class Access:
    """How repositories are reached, and where downloads and finished folders go; the same for every part."""

    cache_dir: Path | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class Running:
    """How the models of a pipeline folder run.

    Args:
        device (`torch.device`): Where.
        dtype (`str`): A dtype's name, or `"auto"`: float32 on the CPU, bfloat16 elsewhere.
        offload (`str`): `"none"`, `"model"` or `"group"`, by block and on a CUDA device with streams.
        fp8 (`bool`): Whether the transformer's wide linear layers are in fp8.
        compiled (`bool`): Whether the transformer's blocks are compiled.
    """

    device: "torch.device"
    dtype: str = "auto"
    offload: str = "none"
    fp8: bool = False
    compiled: bool = False


def find_overlay(source: str, revision: str | None, allow_unpinned: bool, access: Access) -> Overlay:
    """Read an overlay's description; no weights are downloaded.

    Raises:
        UsageError: If `source` is no overlay on this machine and no repository, or the revision is not a commit.
        OverlayError: If a repository cannot be read.
    """
    try:
        return load_overlay(
            source,
            revision,
            allow_unpinned=allow_unpinned,
            cache_dir=access.cache_dir,
            local_files_only=access.local_files_only,
        )
    except OverlayError as error:
        # Only a repository can fail for reasons that are not in the argument.
        if Path(source).exists() or "/" not in source or isinstance(error, UnpinnedRevisionError):
            raise UsageError(option_names(str(error))) from error
        raise


def make_folder(overlay: Overlay, access: Access, components: tuple[str, ...] | None = None) -> Path:
    """Say what the weights' licence is and materialise the overlay."""
    from ..notices import warn_once
    from ..overlays import materialize_overlay

    warn_once(overlay.manifest.license_note)
    return materialize_overlay(
        overlay, cache_dir=access.cache_dir, components=components, local_files_only=access.local_files_only
    )


def materialized_folders(cache_dir: Path | None) -> list[tuple[Path, dict[str, Any]]]:
    """Return every folder made of an overlay below `cache_dir`, with its record."""
    from ..overlays import ManifestError, default_cache_dir
    from ..overlays.record import RECORD_FILE, read_record

    found = []
    for path in sorted((cache_dir or default_cache_dir()).glob(f"*/{RECORD_FILE}")):
        try:
            found.append((path.parent, read_record(path.parent)))
        except ManifestError as error:
            messages.print(f"Leaving out {path.parent}: {error}", markup=False)
    return found


def open_folder(folder: Path) -> int | None:
    """Say what the licence of a pipeline folder's weights is, if it was made of an overlay, and read its contract.

    Returns:
        `int`, *optional*: The transformer calls the weights were made for; None if any number will do.

    Raises:
        UsageError: If the folder holds another pipeline.
    """
    try:
        index = json.loads((folder / _INDEX_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{folder / _INDEX_FILE} is not valid JSON: {error}.") from error
    if index.get("_class_name") != _PIPELINE_CLASS:
        raise UsageError(f"{folder} holds a {index.get('_class_name')}, and this command runs {_PIPELINE_CLASS} only.")
    from ..notices import warn_once
    from ..overlays.record import RECORD_FILE, read_record

    if (folder / RECORD_FILE).is_file():
        warn_once(read_record(folder)["manifest"]["license_note"])
    return index.get("num_inference_steps")


def is_pipeline_folder(source: str) -> bool:
    """Return whether `source` is a folder that `materialize` or `save_pretrained` wrote."""
    return (Path(source) / _INDEX_FILE).is_file()


def check_fp8(running: Running) -> None:
    """Check that fp8 linear layers, if they are asked for, can be computed here.

    Raises:
        UsageError: If the device or the dtype is another one than they need, or torchao is missing.
    """
    if not running.fp8:
        return
    if running.device.type != "cuda":
        raise UsageError(f"--fp8 needs a CUDA device, and this runs on {running.device}; leave it out.")
    if running.dtype not in ("auto", "bfloat16"):
        raise UsageError(f"--fp8 goes with --dtype bfloat16, not {running.dtype}.")
    from ..models.quantization import fp8_quantization_config

    try:
        fp8_quantization_config()
    except (ImportError, RuntimeError) as error:
        reason = str(error).replace("load without `quantization_config`", "leave it out")
        raise UsageError(f"--fp8: {reason}") from error


def load_pipeline(folder: Path, running: Running, without: tuple[str, ...] = ()) -> "VDNH3Pipeline":
    """Load a pipeline folder, all but the components `without` names, and place it where it runs."""
    import torch

    from ..pipelines.pipeline_vdn_h3 import VDNH3Pipeline

    device, dtype = running.device, running.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    components = dict.fromkeys(without)
    if running.fp8 and "transformer" not in without:
        components["transformer"] = _load_fp8(folder, running)
    pipeline = VDNH3Pipeline.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True, **components)
    if running.compiled and "transformer" not in without:
        for block in pipeline.transformer.transformer_blocks:
            # Not the block itself: the hooks of an offload must stay around what is compiled.
            block.forward = torch.compile(block.forward, fullgraph=True)
    if running.offload == "model":
        pipeline.enable_model_cpu_offload(device=device)
    elif running.offload == "group":
        pipeline.enable_group_offload(device, num_blocks_per_group=1, use_stream=device.type == "cuda")
    else:
        pipeline.to(device)
    return pipeline


def _load_fp8(folder: Path, running: Running) -> "VDNH3Transformer3DModel":
    import torch

    from ..models.quantization import fp8_quantization_config
    from ..models.transformer_vdn_h3 import VDNH3Transformer3DModel

    # Layer by layer on the card, unless the weights are not to stay there.
    placement = {"device_map": str(running.device)} if running.offload == "none" else {}
    return VDNH3Transformer3DModel.from_pretrained(
        folder,
        subfolder="transformer",
        dtype=torch.bfloat16,
        quantization_config=fp8_quantization_config(),
        local_files_only=True,
        **placement,
    )

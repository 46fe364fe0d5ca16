"""Write a release in the layout OpenVDN publishes: `h3-base`, and a folder per stage with its branch and adapters."""

from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from diffusers_h3 import HybridAttentionConfig
from diffusers_h3.demo.release import DIGESTS_FILE
from diffusers_h3.overlays.files import sha256_of, write_json

from .components import AUDIO_SHIFT, VIDEO_SHIFT


TURBO_STAGE, MANY_STEP_STAGE = "stage-dmd-step-250", "stage-b-step-2000"
DEFAULT_ADAPTER, TURBO_ADAPTER = "default", "turbo"


@dataclass(frozen=True)
class Adapter:
    """A low-rank adapter.

    Attributes:
        tensors (`dict[str, torch.Tensor]`): By the names Diffusers has, ``MODULE.lora_A.ADAPTER.weight`` and `lora_B`.
        rank (`int`), alpha (`float`): Of every module that the patterns do not name; its scale is `alpha / rank`.
        rank_pattern (`dict[str, int]`), alpha_pattern (`dict[str, float]`): Other values, by module.
    """

    tensors: dict[str, torch.Tensor]
    rank: int
    alpha: float
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)


def write_release(
    directory: str | Path,
    base: dict[str, Any],
    hybrid_attention: HybridAttentionConfig,
    branch: dict[str, torch.Tensor],
    default: Adapter,
    turbo: Adapter,
    turbo_calls: int = 8,
    max_shard_size: str = "10GB",
    license_note: str | None = None,
) -> Path:
    """Write a base, the overlay of many transformer calls and the distilled one into `directory`.

    Branch and adapters are stored in bfloat16, the base as it is. The release appears only when complete, with the
    SHA-256 of each of its files in `digests.json`.

    Args:
        directory (`str` or `Path`): Where the release goes. It must not exist, or be an empty directory.
        base (`dict[str, Any]`): Every component of the pipeline by name, with its own `save_pretrained`.
        hybrid_attention (`HybridAttentionConfig`): What makes the base transformer a hybrid one.
        branch (`dict[str, torch.Tensor]`): The linear branch of every block, by the transformer's names.
        default (`Adapter`): The adapter of both overlays.
        turbo (`Adapter`): The adapter of the distilled overlay alone.
        turbo_calls (`int`): Transformer calls the latter was distilled for.
        max_shard_size (`str`): Size of the base transformer's files.
        license_note (`str`, *optional*): What whoever loads the overlays is told; the MiniMax-H3 licence by default.

    Returns:
        `Path`: the absolute path of `directory`.

    Raises:
        FileExistsError: If `directory` exists and is not an empty directory.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists already; name a directory that does not, or remove it first.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    sampling = {"video_shift": VIDEO_SHIFT, "audio_shift": AUDIO_SHIFT}
    if license_note is not None:
        sampling["license_note"] = license_note
    stages = {
        TURBO_STAGE: ({DEFAULT_ADAPTER: default, TURBO_ADAPTER: turbo}, {**sampling, "turbo_num_steps": turbo_calls}),
        MANY_STEP_STAGE: ({DEFAULT_ADAPTER: default}, sampling),
    }
    with TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        staged = Path(scratch) / directory.name
        for name, component in base.items():
            options = {"max_shard_size": max_shard_size} if name == "transformer" else {}
            component.save_pretrained(staged / "h3-base" / name, **options)
        for name, (adapters, metadata) in stages.items():
            _write_stage(staged / name, hybrid_attention, branch, adapters, metadata)
        write_digests(staged)
        staged.replace(directory)
    return directory


def write_digests(release: Path) -> None:
    """Write the SHA-256 of every file of a release into its `digests.json`."""
    files = sorted(path for path in release.rglob("*") if path.is_file() and path.name != DIGESTS_FILE)
    write_json(release / DIGESTS_FILE, {path.relative_to(release).as_posix(): sha256_of(path) for path in files})


def _write_stage(
    directory: Path,
    hybrid_attention: HybridAttentionConfig,
    branch: dict[str, torch.Tensor],
    adapters: dict[str, Adapter],
    metadata: dict[str, Any],
) -> None:
    transform = hybrid_attention.to_dict()
    (directory / "linear_branch").mkdir(parents=True)
    base = {"class_name": "MiniMaxH3Transformer3DModel", "source": "h3-base"}
    write_json(directory / "model_spec.json", {"format_version": 2, "base": base, "transforms": [transform]})
    write_json(
        directory / "metadata.json",
        {"checkpoint_format_version": 2, "kind": "weights", "weights_dtype": "bfloat16", "metadata": metadata},
    )
    write_json(directory / "linear_branch" / "config.json", transform)
    save_file(_bfloat16(branch), directory / "linear_branch" / "model.safetensors")
    for name, adapter in adapters.items():
        _write_adapter(directory / "adapters" / name, adapter)


def _write_adapter(directory: Path, adapter: Adapter) -> None:
    directory.mkdir(parents=True)
    config = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "rank_pattern": adapter.rank_pattern,
        "alpha_pattern": adapter.alpha_pattern,
    }
    write_json(directory / "adapter_spec.json", {"config": config})
    # The release trained its adapters on a model whose blocks wrap the stock attention as `attn.orig`.
    renamed = {
        name.replace(".attn.", ".attn.orig.") if name.startswith("transformer_blocks.") else name: value
        for name, value in adapter.tensors.items()
    }
    save_file(_bfloat16(renamed), directory / "adapter_model.safetensors")


def _bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}

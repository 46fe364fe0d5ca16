"""Stage `export`: write a run as a release in the layout OpenVDN publishes."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio
from safetensors.torch import load_file, save_file
from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from diffusers_h3.demo.components import AUDIO_SHIFT, VIDEO_SHIFT, make_schedulers

from . import components
from .dense import round_to_release
from .hybrid import BRANCH_MODULES, DEFAULT_ADAPTER, DEFAULT_RANK
from .loop import WEIGHTS_FILE, load_weights
from .turbo import TURBO_ADAPTER, TURBO_CALLS, TURBO_RANK


TURBO_STAGE, MANY_STEP_STAGE = "stage-dmd-step-250", "stage-b-step-2000"


def export_release(run: Path, directory: Path) -> Path:
    """Write the release of a finished run into `directory`, which appears only when complete.

    Transformer, branch and adapters are bfloat16 with the base's float32 islands. The autoencoders are stored in
    float16, which keeps more of a small network than bfloat16; load them with `dtype=torch.float32`.

    Raises:
        FileExistsError: If `directory` exists.
        FileNotFoundError: If a stage has not run.
    """
    directory = directory.absolute()
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; name a directory that does not.")
    for stage in ("video_vae", "audio_vae", "dense", "hybrid", "turbo"):
        if not (run / stage / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(f"{run / stage / WEIGHTS_FILE} is missing: run the stage {stage!r} first.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
        staged = Path(scratch) / directory.name
        _write_base(run, staged / "h3-base")
        trained = load_file(run / "hybrid" / WEIGHTS_FILE)
        branch = {
            name: value for name, value in trained.items() if not set(name.split(".")).isdisjoint(BRANCH_MODULES)
        }
        default = {name: value for name, value in trained.items() if name not in branch}
        turbo = load_file(run / "turbo" / WEIGHTS_FILE)
        for stage, calls in ((TURBO_STAGE, TURBO_CALLS), (MANY_STEP_STAGE, None)):
            _write_stage(staged / stage, branch, calls)
            _write_adapter(staged / stage / "adapters" / DEFAULT_ADAPTER, default, DEFAULT_RANK)
        _write_adapter(staged / TURBO_STAGE / "adapters" / TURBO_ADAPTER, turbo, TURBO_RANK)
        staged.replace(directory)
    return directory


def _write_base(run: Path, directory: Path) -> None:
    """Write every component with its own `save_pretrained`."""
    text = run / "text"
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(text / "text_encoder")
    transformer = components.make_transformer(encoder.config.text_config.hidden_size)
    load_weights(transformer, run / "dense")
    round_to_release(transformer)
    transformer.save_pretrained(directory / "transformer")
    encoder.save_pretrained(directory / "text_encoder")
    Qwen2TokenizerFast.from_pretrained(text / "tokenizer").save_pretrained(directory / "tokenizer")
    Qwen3VLProcessor.from_pretrained(text / "processor").save_pretrained(directory / "processor")
    for name, model_class in (("vae", AutoencoderKLMiniMaxH3), ("audio_vae", AutoencoderKLMiniMaxH3Audio)):
        stage = "video_vae" if name == "vae" else name
        model = model_class.from_pretrained(run / stage / "model", local_files_only=True)
        model.half().save_pretrained(directory / name)
    for name, scheduler in zip(("scheduler", "audio_scheduler"), make_schedulers(), strict=True):
        scheduler.save_pretrained(directory / name)


def _write_stage(directory: Path, branch: dict[str, torch.Tensor], calls: int | None) -> None:
    """Write what an overlay is beside its adapters; one distilled for a number of `calls` says so."""
    transform = components.HYBRID_ATTENTION.to_dict()
    base = {"class_name": "MiniMaxH3Transformer3DModel", "source": "h3-base"}
    _write_json(directory / "model_spec.json", {"format_version": 2, "base": base, "transforms": [transform]})
    sampling = {"video_shift": VIDEO_SHIFT, "audio_shift": AUDIO_SHIFT}
    if calls is not None:
        sampling["turbo_num_steps"] = calls
    _write_json(
        directory / "metadata.json",
        {"checkpoint_format_version": 2, "kind": "weights", "weights_dtype": "bfloat16", "metadata": sampling},
    )
    _write_json(directory / "linear_branch" / "config.json", transform)
    save_file(_bfloat16(branch), directory / "linear_branch" / "model.safetensors")


def _write_adapter(directory: Path, weights: dict[str, torch.Tensor], rank: int) -> None:
    """Write a trained adapter of scale 1 in the release's spelling, blocks' attention below `attn.orig`."""
    config = {"rank": rank, "alpha": float(rank), "rank_pattern": {}, "alpha_pattern": {}}
    _write_json(directory / "adapter_spec.json", {"config": config})
    renamed = {
        name.replace(".attn.", ".attn.orig.") if name.startswith("transformer_blocks.") else name: value
        for name, value in weights.items()
    }
    save_file(_bfloat16(renamed), directory / "adapter_model.safetensors")


def _bfloat16(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}


def _write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

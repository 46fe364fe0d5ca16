"""Stage `export`: write a run as a release in the layout OpenVDN publishes."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from . import components
from .autoencoders import load_autoencoders
from .dense import round_to_release
from .hybrid import BRANCH_MODULES, DEFAULT_RANK
from .loop import WEIGHTS_FILE, load_weights
from .release import Adapter, write_release
from .turbo import TURBO_CALLS, TURBO_RANK


_LICENSE_NOTE = "These weights were trained from nothing by diffusers-h3 and share its licence, Apache 2.0."


def export_release(run: Path, directory: Path) -> Path:
    """Write the release of a finished run into `directory`, which appears only when complete.

    Transformer, branch and adapters are bfloat16 with the base's float32 islands. The autoencoders are stored in
    float16, which keeps more of a small network than bfloat16; load them with `dtype=torch.float32`.

    Raises:
        FileExistsError: If `directory` exists and is not an empty directory.
        FileNotFoundError: If a stage has not run.
    """
    for stage in ("video_vae", "audio_vae", "dense", "hybrid", "turbo"):
        if not (run / stage / WEIGHTS_FILE).is_file():
            raise FileNotFoundError(f"{run / stage / WEIGHTS_FILE} is missing: run the stage {stage!r} first.")
    trained = load_file(run / "hybrid" / WEIGHTS_FILE)
    branch = {name: value for name, value in trained.items() if not set(name.split(".")).isdisjoint(BRANCH_MODULES)}
    default = {name: value for name, value in trained.items() if name not in branch}
    turbo = load_file(run / "turbo" / WEIGHTS_FILE)
    return write_release(
        directory,
        _load_base(run),
        components.HYBRID_ATTENTION,
        branch,
        Adapter(default, DEFAULT_RANK, float(DEFAULT_RANK)),
        Adapter(turbo, TURBO_RANK, float(TURBO_RANK)),
        turbo_calls=TURBO_CALLS,
        license_note=_LICENSE_NOTE,
    )


def _load_base(run: Path) -> dict[str, Any]:
    """Return every component of the pipeline by name, as the release stores it."""
    text = run / "text"
    encoder = Qwen3VLForConditionalGeneration.from_pretrained(text / "text_encoder")
    transformer = components.make_transformer(encoder.config.text_config.hidden_size)
    load_weights(transformer, run / "dense")
    round_to_release(transformer)
    vae, audio_vae = load_autoencoders(run, torch.device("cpu"))
    for autoencoder in (vae, audio_vae):
        # Where the run is concerns nobody who has the release.
        autoencoder.register_to_config(_name_or_path="")
    scheduler, audio_scheduler = components.make_schedulers()
    return {
        "transformer": transformer,
        "vae": vae.half(),
        "audio_vae": audio_vae.half(),
        "text_encoder": encoder,
        "tokenizer": Qwen2TokenizerFast.from_pretrained(text / "tokenizer"),
        "processor": Qwen3VLProcessor.from_pretrained(text / "processor"),
        "scheduler": scheduler,
        "audio_scheduler": audio_scheduler,
    }

"""Write a complete tiny release in the layout OpenVDN publishes, so that one code path serves it and the real one."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import save_file

from ..hybrid.config import HybridAttentionConfig
from . import components


# Small enough that the transformer is split over several files, as the released one is.
_MAX_SHARD_SIZE = "48KB"

_ATTENTION_LINEARS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")
_FEED_FORWARD_LINEARS = ("ff.net.0.proj", "ff.net.2")


def build_release(directory: str | Path, seed: int = 0) -> Path:
    """Write the tiny release into `directory`: the same bytes for the same seed and library versions.

    The layout is the published one: `h3-base` holds every component, `stage-dmd-step-250` the 8-step overlay (adapters
    `default` and `turbo`, of several ranks and alphas) and `stage-b-step-2000` the many-step overlay (`default` only).
    Weights are random, so what it generates is noise, but every path of a real release is taken.

    Args:
        directory (`str` or `Path`): Where the release goes. It must not exist, or be an empty directory; it appears
            only when complete.
        seed (`int`): Seed of every weight.

    Returns:
        `Path`: the absolute path of `directory`.

    Raises:
        FileExistsError: If `directory` exists and is not an empty directory.
    """
    directory = Path(directory).absolute()
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists already; name a directory that does not, or remove it first.")
    directory.parent.mkdir(parents=True, exist_ok=True)

    # Only the CPU generator is seeded, and given back as it was: callers keep their own random numbers.
    with (
        TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch,
        torch.random.fork_rng(devices=()),
        torch.device("cpu"),
    ):
        torch.default_generator.manual_seed(seed)
        staged = Path(scratch) / directory.name
        transformer = _write_base(staged / "h3-base")
        _write_stage(staged / "stage-dmd-step-250", transformer, turbo_num_steps=8)
        _write_stage(staged / "stage-b-step-2000", transformer, turbo_num_steps=None)
        staged.replace(directory)
    return directory


def _write_base(directory: Path) -> MiniMaxH3Transformer3DModel:
    """Write every component with its own `save_pretrained` and return the transformer."""
    transformer = components.make_transformer()
    transformer.save_pretrained(directory / "transformer", max_shard_size=_MAX_SHARD_SIZE)
    components.make_vae().save_pretrained(directory / "vae")
    components.make_audio_vae().save_pretrained(directory / "audio_vae")
    tokenizer = components.make_tokenizer()
    tokenizer.save_pretrained(directory / "tokenizer")
    components.make_processor(tokenizer).save_pretrained(directory / "processor")
    components.make_text_encoder(tokenizer).save_pretrained(directory / "text_encoder")
    scheduler, audio_scheduler = components.make_schedulers()
    scheduler.save_pretrained(directory / "scheduler")
    audio_scheduler.save_pretrained(directory / "audio_scheduler")
    return transformer


def _write_stage(directory: Path, transformer: MiniMaxH3Transformer3DModel, turbo_num_steps: int | None) -> None:
    """Write one overlay; a distilled one (`turbo_num_steps` given) has the second adapter."""
    hybrid_attention = HybridAttentionConfig(linear_head_dim=transformer.config.attention_head_dim).to_dict()
    _write_json(
        directory / "model_spec.json",
        {
            "format_version": 2,
            "base": {"class_name": type(transformer).__name__, "source": "h3-base"},
            "transforms": [hybrid_attention],
        },
    )
    sampling = {"video_shift": components.VIDEO_SHIFT, "audio_shift": components.AUDIO_SHIFT}
    if turbo_num_steps is not None:
        sampling["turbo_num_steps"] = turbo_num_steps
    _write_json(
        directory / "metadata.json",
        {"checkpoint_format_version": 2, "kind": "weights", "weights_dtype": "bfloat16", "metadata": sampling},
    )

    _write_json(directory / "linear_branch" / "config.json", hybrid_attention)
    save_file(_branch_tensors(transformer), directory / "linear_branch" / "model.safetensors")

    blocks = [f"transformer_blocks.{index}" for index in range(transformer.config.num_layers)]
    refiners = [f"token_refiner.refiner_blocks.{index}" for index in range(transformer.config.num_refiner_layers)]
    attention = [f"{block}.{linear}" for block in [*blocks, *refiners] for linear in _ATTENTION_LINEARS]
    _write_adapter(directory / "adapters" / "default", transformer, attention, rank=4, alpha=4.0)
    if turbo_num_steps is not None:
        feed_forward = [f"{block}.{linear}" for block in [*blocks, *refiners] for linear in _FEED_FORWARD_LINEARS]
        modulation = [*(f"{block}.adaln_proj.linear" for block in blocks), "norm_out.linear"]
        _write_adapter(
            directory / "adapters" / "turbo",
            transformer,
            [*attention, *feed_forward, *modulation],
            rank=3,
            alpha=6.0,
            rank_pattern={**dict.fromkeys(modulation, 2), feed_forward[0]: 5},
            alpha_pattern={modulation[0]: 5.0, attention[0]: 1.5},
        )


def _write_adapter(
    directory: Path,
    transformer: MiniMaxH3Transformer3DModel,
    modules: list[str],
    rank: int,
    alpha: float,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
) -> None:
    """Write a low-rank adapter over `modules` under its directory's name, bfloat16, with its specification."""
    rank_pattern, alpha_pattern = rank_pattern or {}, alpha_pattern or {}
    _write_json(
        directory / "adapter_spec.json",
        {"config": {"rank": rank, "alpha": alpha, "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern}},
    )
    tensors = {}
    for module in modules:
        out_features, in_features = transformer.get_submodule(module).weight.shape
        module_rank = rank_pattern.get(module, rank)
        # The release trained its adapters on a model whose blocks wrap the stock attention as `attn.orig`.
        key = module.replace(".attn.", ".attn.orig.") if module.startswith("transformer_blocks.") else module
        # `B @ A` then has entries of about a fifth of the weight's own: small, and far above bfloat16 rounding.
        tensors[f"{key}.lora_A.{directory.name}.weight"] = _normal(module_rank, in_features, std=in_features**-0.5)
        tensors[f"{key}.lora_B.{directory.name}.weight"] = _normal(out_features, module_rank, std=0.1)
    save_file(tensors, directory / "adapter_model.safetensors")


def _branch_tensors(transformer: MiniMaxH3Transformer3DModel) -> dict[str, torch.Tensor]:
    """Draw the linear branch of every block, in bfloat16 under the release's names.

    Projections keep unit variance, decay rates are spread around 0.05 per frame and the convolutions pass their centre
    on, so that the state holds many frames and the readout is as large as the window's output.
    """
    config = transformer.config
    heads, head_dim, hidden = config.num_attention_heads, config.attention_head_dim, config.hidden_size
    inner = heads * head_dim
    tensors = {}
    for index in range(config.num_layers):
        branch = {
            "linear_attention.alpha.A_log": _normal(heads, std=0.5),
            "linear_attention.alpha.down.weight": _normal(head_dim, hidden, std=hidden**-0.5),
            "linear_attention.alpha.dt_bias": _normal(inner, mean=-3.0),
            "linear_attention.alpha.up.weight": _normal(inner, head_dim, std=head_dim**-0.5),
            "linear_attention.beta_proj.weight": _normal(heads, hidden, std=hidden**-0.5),
            "linear_attention.norm.weight": _normal(head_dim, mean=1.0, std=0.1),
            "linear_attention.output_gate.down.weight": _normal(head_dim, hidden, std=hidden**-0.5),
            "linear_attention.output_gate.up.bias": _normal(inner, std=0.1),
            "linear_attention.output_gate.up.weight": _normal(inner, head_dim, std=head_dim**-0.5),
            "softmax_gate.up.bias": _normal(heads, std=0.1),
            "softmax_gate.up.weight": _normal(heads, hidden, std=hidden**-0.5),
            "to_out_linear.weight": _normal(hidden, inner, std=inner**-0.5),
        }
        for target in HybridAttentionConfig().short_conv_targets:
            spatial, temporal = _normal(inner, 1, 5, 5, std=0.1), _normal(inner, 1, 5, std=0.1)
            spatial[:, :, 2, 2] += 1.0
            temporal[:, :, 2] += 1.0
            branch[f"linear_attention.short_conv.{target}_sp.weight"] = spatial
            branch[f"linear_attention.short_conv.{target}_tm.weight"] = temporal
        tensors.update({f"transformer_blocks.{index}.attn.{name}": value for name, value in branch.items()})
    return tensors


def _normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    return (mean + std * torch.randn(shape)).to(torch.bfloat16)


def _write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")

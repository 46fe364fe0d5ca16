"""A complete release of a few megabytes with random weights: odd sizes, ranks and alphas, and a base in several files.

Sizes are chosen so that different things have different numbers: the attention width (3 × 16) is not the hidden size
(32), 12 of 16 head channels are rotated, and the latent, text and audio widths all differ. What it generates is noise,
but every path of a real release is taken.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLMiniMaxH3, AutoencoderKLMiniMaxH3Audio, MiniMaxH3Transformer3DModel
from training.components import make_schedulers
from training.dense import round_to_release
from training.hybrid import attention_linears
from training.qwen import TEXT_DIM, make_processor, make_text_encoder, make_tokenizer
from training.release import DEFAULT_ADAPTER, TURBO_ADAPTER, Adapter, write_release
from training.turbo import turbo_linears

from diffusers_h3 import HybridAttentionConfig


_VIDEO_LATENT_CHANNELS = 4
_AUDIO_LATENT_CHANNELS = 8

# Small enough that the transformer is split over several files, as the released one is.
_MAX_SHARD_SIZE = "48KB"


def build_release(directory: str | Path, seed: int = 0) -> Path:
    """Write the release into `directory`: the same bytes for the same seed and library versions."""
    # Only the CPU generator is seeded, and given back as it was: callers keep their own random numbers.
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        transformer = _make_transformer()
        tokenizer = make_tokenizer()
        scheduler, audio_scheduler = make_schedulers()
        base = {
            "transformer": transformer,
            "vae": _make_vae(),
            "audio_vae": _make_audio_vae(),
            "text_encoder": make_text_encoder(tokenizer),
            "tokenizer": tokenizer,
            "processor": make_processor(tokenizer),
            "scheduler": scheduler,
            "audio_scheduler": audio_scheduler,
        }
        attention, everything = attention_linears(transformer), turbo_linears(transformer)
        modulation = [name for name in everything if "adaln_proj" in name or name == "norm_out.linear"]
        feed_forward = next(name for name in everything if ".ff." in name)
        default = _make_adapter(DEFAULT_ADAPTER, transformer, attention, rank=4, alpha=4.0)
        turbo = _make_adapter(
            TURBO_ADAPTER,
            transformer,
            everything,
            rank=3,
            alpha=6.0,
            rank_pattern={**dict.fromkeys(modulation, 2), feed_forward: 5},
            alpha_pattern={modulation[0]: 5.0, attention[0]: 1.5},
        )
        return write_release(
            directory,
            base,
            HybridAttentionConfig(linear_head_dim=transformer.config.attention_head_dim),
            _branch_tensors(transformer),
            default,
            turbo,
            max_shard_size=_MAX_SHARD_SIZE,
        )


def _make_transformer() -> MiniMaxH3Transformer3DModel:
    """Build the base transformer in the release's mixed precision: bfloat16 with float32 islands."""
    transformer = MiniMaxH3Transformer3DModel(
        num_attention_heads=3,
        attention_head_dim=16,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=48,
        in_channels=_VIDEO_LATENT_CHANNELS,
        audio_in_channels=_AUDIO_LATENT_CHANNELS,
        text_dim=TEXT_DIM,
        freq_dim=16,
        time_embed_hidden_dim=24,
        time_embed_dim=12,
        rope_freq_dim=2,
    )
    round_to_release(transformer)
    return transformer.eval()


def _make_vae() -> AutoencoderKLMiniMaxH3:
    """Build the video VAE: 16× smaller in space, 17 frames to 5 latents in time."""
    vae = AutoencoderKLMiniMaxH3(
        latent_channels=_VIDEO_LATENT_CHANNELS,
        block_out_channels=(8,) * 6,
        layers_per_block=1,
        norm_num_groups=4,
        decoder_num_layers=2,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=(0.1, -0.2, 0.0, 0.3),
        latents_std=(0.8, 1.2, 1.0, 0.9),
    )
    # A fresh decoder scales every block's contribution by zero and starts its register tokens at zero.
    for name, parameter in vae.decoder.named_parameters():
        if name == "register_tokens" or name.endswith((".scale1", ".scale2")):
            torch.nn.init.normal_(parameter, std=0.5)
    return vae.eval()


def _make_audio_vae() -> AutoencoderKLMiniMaxH3Audio:
    """Build the audio VAE: 800 mono samples at 32 kHz to one latent, as released, by a shorter decoder.

    The released decoder's seven stages of three kernels each would take most of a tiny pipeline's time and bytes.
    """
    audio_vae = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        latent_dim=128,
        latent_channels=_AUDIO_LATENT_CHANNELS,
        num_attention_heads=2,
        decoder_dim=32,
        decoder_rates=(10, 10, 8),
        decoder_kernel_sizes=(20, 20, 16),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1, 3),),
        latents_mean=[0.05 * channel for channel in range(_AUDIO_LATENT_CHANNELS)],
        latents_std=[1.0 + 0.05 * channel for channel in range(_AUDIO_LATENT_CHANNELS)],
    )
    # A fresh decoder ends near silence, around an offset that its biases make. Without biases and louder, what one
    # hears follows the latents, and does not clip.
    for name, parameter in audio_vae.decoder.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    torch.nn.init.zeros_(audio_vae.dec_in_proj.bias)
    audio_vae.decoder.conv_post.weight_g.data.mul_(15.0)
    return audio_vae.eval()


def _make_adapter(
    name: str, transformer: MiniMaxH3Transformer3DModel, modules: list[str], rank: int, alpha: float, **patterns: dict
) -> Adapter:
    """Draw a low-rank adapter over `modules`."""
    tensors = {}
    for module in modules:
        out_features, in_features = transformer.get_submodule(module).weight.shape
        module_rank = patterns.get("rank_pattern", {}).get(module, rank)
        # `B @ A` then has entries of about a fifth of the weight's own: small, and far above bfloat16 rounding.
        tensors[f"{module}.lora_A.{name}.weight"] = _normal(module_rank, in_features, std=in_features**-0.5)
        tensors[f"{module}.lora_B.{name}.weight"] = _normal(out_features, module_rank, std=0.1)
    return Adapter(tensors, rank, alpha, **patterns)


def _branch_tensors(transformer: MiniMaxH3Transformer3DModel) -> dict[str, torch.Tensor]:
    """Draw the linear branch of every block under the release's names.

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
    return mean + std * torch.randn(shape)

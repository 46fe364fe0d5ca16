"""Tiny instances of every component a MiniMax-H3 pipeline loads, with random weights.

Sizes are chosen so that different things have different numbers: the attention width (3 × 16) is not the hidden size
(32), 12 of 16 head channels are rotated, and the latent, text and audio widths all differ. Nothing here is seeded; the
caller seeds PyTorch's generator.
"""

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)


VIDEO_SHIFT = 12.0
AUDIO_SHIFT = 3.0

_VIDEO_LATENT_CHANNELS = 4
_AUDIO_LATENT_CHANNELS = 8
_TEXT_DIM = 24
_VISION_PATCH_SIZE = 16

# The tokens the keyframe presentation needs are a part of Qwen3-VL's own list, in its order.
_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def make_transformer() -> MiniMaxH3Transformer3DModel:
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
        text_dim=_TEXT_DIM,
        freq_dim=16,
        time_embed_hidden_dim=24,
        time_embed_dim=12,
        rope_freq_dim=2,
    )
    islands = transformer._keep_in_fp32_modules
    for name, parameter in transformer.named_parameters():
        if not any(island in name for island in islands):
            parameter.data = parameter.data.to(torch.bfloat16)
    return transformer.eval()


def make_vae() -> AutoencoderKLMiniMaxH3:
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


def make_audio_vae() -> AutoencoderKLMiniMaxH3Audio:
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


def make_tokenizer() -> Qwen2TokenizerFast:
    """Build a byte-level tokenizer without merges: one token per byte, then Qwen3-VL's special tokens."""
    vocabulary = {character: index for index, character in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2TokenizerFast(vocab=vocabulary, merges=[], model_max_length=32768)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    return tokenizer


def make_processor(tokenizer: Qwen2TokenizerFast) -> Qwen3VLProcessor:
    """Build the processor around `tokenizer`; images from 32×32 pixels pass through it unscaled."""
    vision = {"patch_size": _VISION_PATCH_SIZE, "temporal_patch_size": 2, "merge_size": 2}
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": 32 * 32, "longest_edge": 256 * 256}, **vision, **statistics
        ),
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 2 * 32 * 32, "longest_edge": 16 * 256 * 256}, **vision, **statistics
        ),
        tokenizer=tokenizer,
    )


def make_text_encoder(tokenizer: Qwen2TokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Build a bfloat16 Qwen3-VL of 51 decoder layers, the fewest of which hidden state 50 can be read."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _TEXT_DIM,
            "intermediate_size": 32,
            "num_hidden_layers": 51,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 32768,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": _VISION_PATCH_SIZE,
            "out_hidden_size": _TEXT_DIM,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.2,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        dtype="bfloat16",
    )
    return Qwen3VLForConditionalGeneration(config).to(torch.bfloat16).eval()


def make_schedulers() -> tuple[MiniMaxH3Scheduler, MiniMaxH3Scheduler]:
    """Build the video and the audio scheduler, each with its own shift."""
    return MiniMaxH3Scheduler(shift=VIDEO_SHIFT), MiniMaxH3Scheduler(shift=AUDIO_SHIFT)

"""A tiny Qwen3-VL with random weights: tokenizer, processor and text encoder. The caller seeds PyTorch's generator."""

import torch
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


TEXT_DIM = 24

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
            "hidden_size": TEXT_DIM,
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
            "out_hidden_size": TEXT_DIM,
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

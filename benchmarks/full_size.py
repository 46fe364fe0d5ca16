"""Full-size MiniMax-H3 and Wan models with random weights, built on the device, and their inputs."""

import re

import torch
from diffusers import AutoencoderKLMiniMaxH3, MiniMaxH3Transformer3DModel, WanTransformer3DModel
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import audio_latent_num_frames

from diffusers_h3 import HybridAttentionConfig, VDNH3Transformer3DModel
from diffusers_h3.models.quantization import FP8_LINEARS, fp8_quantization_config


# A model small enough for any device, to try the scripts with; heads × channels differ from the hidden size.
TINY = {
    "num_attention_heads": 3,
    "attention_head_dim": 32,
    "hidden_size": 64,
    "ffn_dim": 96,
    "rope_freq_dim": 4,
    "num_refiner_layers": 1,
    "text_dim": 48,
    "time_embed_dim": 32,
    "time_embed_hidden_dim": 64,
}
TINY_VAE = {
    "block_out_channels": (8,) * 6,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "decoder_num_layers": 2,
    "decoder_num_attention_heads": 2,
    "decoder_attention_head_dim": 16,
}
TINY_HYBRID = TINY | {"hybrid_attention": HybridAttentionConfig(linear_head_dim=32).to_dict()}

# Wan 2.1 1.3B, as far as it is not Diffusers' default.
WAN = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
TINY_WAN = {"num_attention_heads": 4, "ffn_dim": 64, "num_layers": 2}


def sizes(hybrid: bool, tiny: bool) -> dict:
    """Return what a model's configuration adds to the released one: nothing, or what makes it small."""
    return (TINY_HYBRID if hybrid else TINY) if tiny else {}


def random_transformer(hybrid: bool, fp8: bool, device: str, num_layers: int = 50, **config):
    """Return a transformer with random weights in the released shapes and dtypes.

    Weights are drawn on the device one layer at a time and quantised at once, by the card's own fp8 recipe, so that
    the peak stays under the size of the finished model plus one layer.
    """
    model_class = VDNH3Transformer3DModel if hybrid else MiniMaxH3Transformer3DModel
    with torch.device("meta"):
        model = model_class(num_layers=num_layers, **config)
    if fp8:
        from torchao.quantization import quantize_

        layer_config = fp8_quantization_config().quant_type.fqn_to_config[FP8_LINEARS]
    generator = torch.Generator(device).manual_seed(0)
    float32 = model._keep_in_fp32_modules
    for name, module in [*model.named_modules()]:
        for key, parameter in [*module.named_parameters(recurse=False)]:
            full_name = f"{name}.{key}"
            dtype = torch.float32 if any(part in float32 for part in full_name.split(".")) else torch.bfloat16
            value = _random_parameter(full_name, parameter.shape, generator, device, dtype)
            setattr(module, key, torch.nn.Parameter(value, requires_grad=False))
        for key, buffer in [*module.named_buffers(recurse=False)]:
            setattr(module, key, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
        if fp8 and isinstance(module, torch.nn.Linear) and re.fullmatch(FP8_LINEARS.removeprefix("re:"), name):
            quantize_(module, layer_config)
    rope = model.rope
    exponents = torch.arange(0, 2 * rope.rope_freq_dim, 2, dtype=torch.float32, device=device)
    rope.inv_freq = 1.0 / (model.config.rope_theta ** (exponents / (2 * rope.rope_freq_dim)))
    return model.eval()


def _random_parameter(name, shape, generator, device, dtype):
    if name.endswith(("norm_q.weight", "norm_k.weight", "norm.weight", "norm1.weight", "norm2.weight")):
        return torch.ones(shape, dtype=dtype, device=device)
    if "A_log" in name:
        return torch.full(shape, -2.0, dtype=dtype, device=device)
    if name.endswith("bias") and "dt_bias" not in name:
        return torch.zeros(shape, dtype=dtype, device=device)
    fan_in = max(1, torch.Size(shape[1:]).numel())
    return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(fan_in**-0.5)


def random_wan(device: str, tiny: bool):
    """Return Wan 2.1 1.3B with fresh weights in bfloat16, and the arguments of a call at 832×480×81."""
    size = (1, 16, 2, 8, 8) if tiny else (1, 16, 21, 60, 104)
    with torch.device(device):
        model = WanTransformer3DModel(**(TINY_WAN if tiny else WAN)).to(torch.bfloat16).requires_grad_(False).eval()
        inputs = {
            "hidden_states": torch.randn(size, dtype=torch.bfloat16),
            "timestep": torch.tensor([500]),
            "encoder_hidden_states": torch.randn((1, 512, 4096), dtype=torch.bfloat16),
        }
    return model, inputs


def random_vae(device: str, **config):
    """Return a video VAE with fresh weights, in the dtypes that loading the released one in bfloat16 gives."""
    with torch.device(device):
        vae = AutoencoderKLMiniMaxH3(**config)
    for name, parameter in vae.named_parameters():
        parameter.requires_grad_(False)
        if not any(part in vae._keep_in_fp32_modules for part in name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return vae.eval()


def request_inputs(model, height: int, width: int, num_frames: int, text_rows: int, device: str):
    """Return the keyword arguments of one transformer call for a T2VA request, at the first of eight steps."""
    config = model.config
    latent_frames = (num_frames - 5) // 17 * 5 + 2
    packed = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.ones(text_rows, dtype=torch.long),
        latent_frames,
        height // 16,
        width // 16,
        audio_latent_num_frames(num_frames),
        tuple(config.patch_size),
        audio_channels=2,
        audio_tag=2,
        video_tag=0,
    )
    position_ids, token_tags, video_indices, audio_indices, text_indices, *_ = packed
    timestep, timestep_indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
        video_indices, audio_indices, 0, 0, text_rows, 0.0102, 0.0427, 0.999, 1.0
    )
    generator = torch.Generator(device).manual_seed(1)

    def noise(rows, channels):
        return torch.randn((1, rows, channels), generator=generator, device=device)

    patch = config.in_channels * config.patch_size[1] * config.patch_size[2]
    return {
        "hidden_states": noise(video_indices.numel(), patch),
        "audio_hidden_states": noise(audio_indices.numel(), config.audio_in_channels),
        "encoder_hidden_states": noise(text_rows, config.text_dim).bfloat16(),
        "timestep": timestep.to(device),
        "timestep_indices": timestep_indices.to(device),
        "token_tags": token_tags.to(device),
        "position_ids": position_ids.to(device),
        "video_indices": video_indices.to(device),
        "audio_indices": audio_indices.to(device),
        "text_indices": text_indices.to(device),
        "return_dict": False,
    }

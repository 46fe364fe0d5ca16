"""Tiny real models of the kinds the processor serves, and inputs for them."""

import torch
from diffusers import MiniMaxH3Transformer3DModel, WanTransformer3DModel


WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "cross_attn_norm": True,
}

H3 = {
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "hidden_size": 64,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "ffn_dim": 64,
    "in_channels": 4,
    "audio_in_channels": 8,
    "text_dim": 16,
    "freq_dim": 16,
    "time_embed_hidden_dim": 32,
    "time_embed_dim": 16,
    "rope_freq_dim": 16,
}


def make_model(kind, **changes):
    """Build a tiny transformer: `"wan"`, `"wan_i2v"`, `"wan_expand_timesteps"` or `"h3"`."""
    torch.manual_seed(1)
    if kind == "h3":
        model = MiniMaxH3Transformer3DModel(**H3 | changes)
    else:
        extra = {"image_dim": 32, "added_kv_proj_dim": 128} if kind == "wan_i2v" else {}
        model = WanTransformer3DModel(**WAN | extra | changes)
    # Norm weights of one and zero biases would hide a step left out.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("norm" in name and parameter.ndim == 1) or "bias" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval().requires_grad_(False)


def make_inputs(kind, batch=1, dtype=torch.float32, text=5, audio=3, frames=2, height=4, width=6):
    """Return the arguments of one forward call; batch, rows and dtype can differ."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    if kind == "h3":
        rows = frames * (height // 2) * (width // 2)
        total = text + audio + rows
        grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height // 2), torch.arange(width // 2)).float()
        line = torch.arange(text + audio).float()[:, None].expand(-1, 3)
        return {
            "hidden_states": normal(batch, rows, 16),
            "audio_hidden_states": normal(batch, audio, 8),
            "encoder_hidden_states": normal(batch, text, 16),
            "timestep": torch.tensor([0.7, 0.3]),
            "timestep_indices": torch.tensor([0] * (text + audio) + [1] * rows),
            "token_tags": torch.tensor([1] * text + [2] * audio + [0] * rows),
            "position_ids": torch.cat([line, grid]),
            "text_indices": torch.arange(text),
            "audio_indices": torch.arange(text, text + audio),
            "video_indices": torch.arange(text + audio, total),
        }
    inputs = {
        "hidden_states": normal(batch, 4, frames, height, width),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": normal(batch, 512 if kind == "wan_i2v" else 9, 16),
    }
    if kind == "wan_i2v":
        inputs["encoder_hidden_states_image"] = normal(batch, 257, 32)
    if kind == "wan_expand_timesteps":
        rows = frames * (height // 2) * (width // 2)
        inputs["timestep"] = torch.linspace(100, 900, rows).expand(batch, -1)
    return inputs

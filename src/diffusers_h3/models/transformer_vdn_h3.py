"""VDN-H3: MiniMax-H3 with hybrid attention, as a model class of its own."""

import os
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading

from ..hybrid.config import HybridAttentionConfig
from .adapters import (
    adapter_shapes,
    check_adapter,
    file_sha256,
    find_adapter_file,
    refuse_fusing,
    refuse_merged_adapter,
    refuse_unfused_projections,
)
from .install import FLOAT32_PARAMETERS, apply_hybrid_attention


class VDNH3Transformer3DModel(MiniMaxH3Transformer3DModel):
    """MiniMax-H3's transformer with a windowed softmax and a linear branch in every block.

    It takes and returns what [`MiniMaxH3Transformer3DModel`] does, so every MiniMax-H3 modular block accepts it. The
    token refiner stays dense.

    Args:
        hybrid_attention (`dict`, *optional*): The version 2 hybrid attention transform (`HybridAttentionConfig`);
            the released configuration by default.
        fused_adapters (`list[dict]`, *optional*): The adapters already merged into the weights, each with its `name`
            and `sha256`. Loading one of them again is refused.
        All others: See [`MiniMaxH3Transformer3DModel`].
    """

    _keep_in_fp32_modules = [*MiniMaxH3Transformer3DModel._keep_in_fp32_modules, *FLOAT32_PARAMETERS]

    @register_to_config
    def __init__(
        self,
        num_attention_heads: int = 56,
        attention_head_dim: int = 128,
        hidden_size: int = 5376,
        num_layers: int = 50,
        num_refiner_layers: int = 2,
        ffn_dim: int = 14336,
        in_channels: int = 24,
        audio_in_channels: int = 32,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        text_dim: int = 5120,
        freq_dim: int = 256,
        time_embed_hidden_dim: int = 5376,
        time_embed_dim: int = 2688,
        rope_freq_dim: int = 16,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        qk_norm_eps: float = 1e-5,
        final_norm_eps: float = 1e-5,
        hybrid_attention: dict[str, Any] | None = None,
        fused_adapters: list[dict[str, str]] | None = None,
    ) -> None:
        super().__init__(
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_refiner_layers=num_refiner_layers,
            ffn_dim=ffn_dim,
            in_channels=in_channels,
            audio_in_channels=audio_in_channels,
            patch_size=patch_size,
            text_dim=text_dim,
            freq_dim=freq_dim,
            time_embed_hidden_dim=time_embed_hidden_dim,
            time_embed_dim=time_embed_dim,
            rope_freq_dim=rope_freq_dim,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
            qk_norm_eps=qk_norm_eps,
            final_norm_eps=final_norm_eps,
        )
        config = (
            HybridAttentionConfig() if hybrid_attention is None else HybridAttentionConfig.from_dict(hybrid_attention)
        )
        # The config file of a saved model says what it runs with, also where the default was taken.
        self.register_to_config(hybrid_attention=config.to_dict())
        apply_hybrid_attention(self, config)

    def load_lora_adapter(
        self,
        pretrained_model_name_or_path_or_dict: str | os.PathLike | dict[str, torch.Tensor],
        prefix: str | None = "transformer",
        hotswap: bool = False,
        **kwargs,
    ) -> None:
        """Load a LoRA adapter beside the weights, unless it is merged into them already.

        Args:
            pretrained_model_name_or_path_or_dict, prefix, hotswap, kwargs: See the parent's method. A file is looked
                up once and that file is loaded.

        Raises:
            ValueError: For an adapter of `config.fused_adapters`, recognised by the sha256 of its file or by the
                adapter name in its keys, and for one that does not fit in whole: another spelling, modules this model
                does not have or that do not run, other shapes. Nothing is loaded then.
        """
        source = pretrained_model_name_or_path_or_dict
        fused = self.config.fused_adapters or []
        if isinstance(source, dict):
            shapes, sha256 = {name: tensor.shape for name, tensor in source.items()}, None
        else:
            file = find_adapter_file(source, kwargs)
            shapes, sha256 = adapter_shapes(file), file_sha256(file)
            source, kwargs["weight_name"] = str(file), file.name
        refuse_merged_adapter(fused, shapes, sha256)
        if shapes:
            check_adapter(self, shapes, prefix)
        super().load_lora_adapter(source, prefix=prefix, hotswap=hotswap, **kwargs)
        if kwargs.get("_pipeline") is None:
            # With a pipeline, Diffusers itself lets the offload take in the new layers.
            _maybe_remove_and_reapply_group_offloading(self)

    def fuse_lora(
        self, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Add the active LoRAs to the weights.

        Raises:
            ValueError: If the weights are quantised or offloaded; nothing is changed then.
        """
        refuse_fusing(self)
        super().fuse_lora(lora_scale, safe_fusing, adapter_names)

    def unfuse_lora(self) -> None:
        """Subtract the fused LoRAs from the weights again, up to rounding.

        Raises:
            ValueError: If the weights are quantised or offloaded; nothing is changed then.
        """
        refuse_fusing(self)
        super().unfuse_lora()

    def fuse_qkv_projections(self) -> None:
        """Run Q, K and V of every attention as one projection.

        Raises:
            ValueError: If a LoRA runs beside one of them.
        """
        refuse_unfused_projections(self)
        super().fuse_qkv_projections()

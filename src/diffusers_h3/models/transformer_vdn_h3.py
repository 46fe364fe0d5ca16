"""VDN-H3: MiniMax-H3 with hybrid attention, as a model class of its own."""

import os
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.configuration_utils import register_to_config
from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading
from diffusers.utils import get_adapter_name

from ..hybrid.config import HybridAttentionConfig
from .adapters import (
    active_adapters,
    adapter_tensors,
    check_adapter,
    file_sha256,
    find_adapter_file,
    merged_adapters,
    refuse_fusing,
    refuse_fusing_twice,
    refuse_merged_adapter,
    refuse_unfused_projections,
    tensors_sha256,
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
            and `sha256`: an overlay's of its file, a LoRA's that `fuse_lora` added of its tensors. Loading or fusing
            one of them again is refused.
        All others: See [`MiniMaxH3Transformer3DModel`].

    Examples:
        >>> from diffusers_h3 import VDNH3Transformer3DModel, load_overlay, materialize_overlay
        >>> from diffusers_h3.demo.release import STAGE, embedded_release
        >>> overlay = load_overlay(embedded_release() / STAGE)  # or a name: load_overlay("vdn-h3-8step")
        >>> folder = materialize_overlay(overlay, components=("transformer",))
        >>> transformer = VDNH3Transformer3DModel.from_pretrained(folder, subfolder="transformer")
        >>> [adapter["name"] for adapter in transformer.config.fused_adapters]
        ['default', 'turbo']
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
        # Of the tensors that were loaded under each name, before PEFT gave them the weights' dtype.
        self._adapter_digests: dict[str, str] = {}

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
            ValueError: For an adapter of `config.fused_adapters`, recognised by the sha256 of its file or tensors or
                by the adapter name in its keys, and for one that does not fit in whole: another spelling, modules this
                model does not have or that do not run, other shapes. Nothing is loaded then.
        """
        source = pretrained_model_name_or_path_or_dict
        fused = self.config.fused_adapters or []
        if isinstance(source, dict):
            tensors, digests = source, []
        else:
            file = find_adapter_file(source, kwargs)
            tensors, digests = adapter_tensors(file), [file_sha256(file)]
            source, kwargs["weight_name"] = str(file), file.name
        digest = tensors_sha256(tensors, prefix)
        refuse_merged_adapter(fused, tensors, [*digests, digest])
        if tensors:
            check_adapter(self, {name: tensor.shape for name, tensor in tensors.items()}, prefix)
        name = kwargs["adapter_name"] = kwargs.get("adapter_name") or get_adapter_name(self)
        if hotswap and name in merged_adapters(self):
            raise ValueError(f"The adapter {name!r} is fused and cannot be exchanged: call `unfuse_lora` first.")
        super().load_lora_adapter(source, prefix=prefix, hotswap=hotswap, **kwargs)
        self._adapter_digests[name] = digest
        if kwargs.get("_pipeline") is None:
            # With a pipeline, Diffusers itself lets the offload take in the new layers.
            _maybe_remove_and_reapply_group_offloading(self)

    def add_adapter(self, adapter_config, adapter_name: str = "default") -> None:
        """Add a new adapter to train, as Diffusers does."""
        super().add_adapter(adapter_config, adapter_name)
        self._adapter_digests.pop(adapter_name, None)

    def fuse_lora(
        self, lora_scale: float = 1.0, safe_fusing: bool = False, adapter_names: list[str] | None = None
    ) -> None:
        """Add the active LoRAs to the weights, and their names and digests to `config.fused_adapters`.

        Raises:
            ValueError: If the weights are quantised or offloaded, or hold one of the LoRAs already; nothing is changed
                then.
        """
        refuse_fusing(self)
        names = sorted(active_adapters(self)) if adapter_names is None else adapter_names
        digests = {name: self._digest_of(name) for name in names if name in getattr(self, "peft_config", {})}
        refuse_fusing_twice(self.config.fused_adapters or [], merged_adapters(self), digests)
        try:
            super().fuse_lora(lora_scale, safe_fusing, adapter_names)
        finally:
            # Also where `safe_fusing` stopped half way: the weights hold a part.
            self.record_fused_adapters()

    def unfuse_lora(self) -> None:
        """Subtract the fused LoRAs from the weights again, up to rounding, and take them out of the config's record.

        LoRAs whose layers are unloaded stay in both.

        Raises:
            ValueError: If the weights are quantised or offloaded; nothing is changed then.
        """
        refuse_fusing(self)
        super().unfuse_lora()
        self.record_fused_adapters()

    def record_fused_adapters(self) -> None:
        """Bring `config.fused_adapters` up to date with the adapters that are loaded; the others in it stay."""
        loaded = {
            name: {"name": name, "sha256": digest}
            for name, digest in self._adapter_digests.items()
            if name in getattr(self, "peft_config", {})
        }
        others = [entry for entry in self.config.fused_adapters or [] if entry not in loaded.values()]
        fused = [loaded[name] for name in sorted(merged_adapters(self) & loaded.keys())]
        self.register_to_config(fused_adapters=[*others, *fused] or None)

    def _digest_of(self, name: str) -> str:
        """Return the digest of a loaded adapter; of one that was not loaded but trained here, as it is now."""
        if name not in self._adapter_digests:
            from peft.utils import get_peft_model_state_dict

            self._adapter_digests[name] = tensors_sha256(get_peft_model_state_dict(self, adapter_name=name))
        return self._adapter_digests[name]

    def fuse_qkv_projections(self) -> None:
        """Run Q, K and V of every attention as one projection.

        Raises:
            ValueError: If a LoRA runs beside one of them.
        """
        refuse_unfused_projections(self)
        super().fuse_qkv_projections()

"""LoRA loading that knows which adapters are merged already, and loads others in whole or not at all."""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.loaders import MiniMaxH3LoraLoaderMixin

from ..models.adapters import (
    adapter_shapes,
    check_adapter,
    file_sha256,
    find_adapter_file,
    refuse_fusing,
    refuse_merged_adapter,
)
from ..models.transformer_vdn_h3 import VDNH3Transformer3DModel


class VDNH3LoraLoaderMixin(MiniMaxH3LoraLoaderMixin):
    """Diffusers' LoRA loading for MiniMax-H3, which refuses the adapters that overlays merge."""

    # One transformer; the stock list also names the partition of reference-to-video.
    _lora_loadable_modules = ["transformer"]

    @classmethod
    def lora_state_dict(
        cls, pretrained_model_name_or_path_or_dict: str | dict[str, torch.Tensor], **kwargs
    ) -> dict[str, torch.Tensor] | tuple[dict[str, torch.Tensor], dict[str, Any] | None]:
        """Read a LoRA as Diffusers does, with alphas that are tensors (`<module>.alpha`) taken into `lora_B`.

        Raises:
            ValueError: If no key is for the transformer, or alphas are given twice.
        """
        wants_metadata = kwargs.pop("return_lora_metadata", False)
        tensors, metadata = super().lora_state_dict(
            pretrained_model_name_or_path_or_dict, return_lora_metadata=True, **kwargs
        )
        if not any(name.startswith((f"{cls.transformer_name}.", f"{cls.transformer_ref_name}.")) for name in tensors):
            raise ValueError(
                f"This is no layout of a MiniMax-H3 LoRA that Diffusers knows; its keys begin {sorted(tensors)[:2]}. "
                f"Diffusers' own begin with `{cls.transformer_name}.`; load what `save_lora_adapter` wrote with "
                "`pipe.transformer.load_lora_adapter(file, prefix=None)`."
            )
        alphas = [name for name in tensors if name.endswith(".alpha")]
        if alphas and metadata is not None:
            raise ValueError(f"This LoRA has alphas in its metadata and as tensors ({alphas[0]}): remove one of them.")
        tensors = {name: _scaled(tensors, name) for name in tensors if name not in alphas}
        return (tensors, metadata) if wants_metadata else tensors

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | dict[str, torch.Tensor],
        adapter_name: str | None = None,
        hotswap: bool = False,
        **kwargs,
    ) -> None:
        """Load a LoRA beside the weights as Diffusers does, unless it is merged into them already.

        Raises:
            ValueError: For an adapter of the transformer's `fused_adapters`, for any in an OpenVDN release's spelling
                (materialise it with an overlay instead), and for one that would be loaded in part: an unknown layout,
                modules the transformer does not have, other shapes. Nothing is loaded then.
        """
        source = pretrained_model_name_or_path_or_dict
        fused = self.transformer.config.get("fused_adapters") or []
        if isinstance(source, dict):
            refuse_merged_adapter(fused, source)
        else:
            file = find_adapter_file(source, kwargs)
            refuse_merged_adapter(fused, adapter_shapes(file), [file_sha256(file)])
            source, kwargs["weight_name"] = str(file), file.name
        super().load_lora_weights(source, adapter_name, hotswap, **kwargs)

    @classmethod
    def load_lora_into_transformer(
        cls, state_dict: dict[str, torch.Tensor], transformer: torch.nn.Module, **kwargs
    ) -> None:
        """Load a LoRA in Diffusers' layout into `transformer`, which may also be diffusers' own, if all of it fits."""
        check_adapter(transformer, {name: tensor.shape for name, tensor in state_dict.items()}, cls.transformer_name)
        super().load_lora_into_transformer(state_dict, transformer, **kwargs)

    def fuse_lora(
        self,
        components: Sequence[str] = ("transformer",),
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: list[str] | None = None,
        **kwargs,
    ) -> None:
        """Add the active LoRAs to the transformer's weights; a hybrid one records them in its `fused_adapters`.

        Raises:
            ValueError: If the weights are quantised or offloaded, or hold one of the LoRAs already; nothing is changed
                then.
        """
        refuse_fusing(self.transformer)
        super().fuse_lora(components, lora_scale, safe_fusing, adapter_names, **kwargs)

    def unfuse_lora(self, components: Sequence[str] = ("transformer",), **kwargs) -> None:
        """Subtract the fused LoRAs from the transformer's weights again, up to rounding, and from its record.

        Raises:
            ValueError: If the weights are quantised or offloaded; nothing is changed then.
        """
        refuse_fusing(self.transformer)
        super().unfuse_lora(components, **kwargs)
        if isinstance(self.transformer, VDNH3Transformer3DModel):
            # Diffusers reaches into the layers here, past the transformer's own `unfuse_lora`.
            self.transformer.record_fused_adapters()


def _scaled(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a tensor; the B of a module with an alpha times ``alpha / rank``."""
    module, _, rest = name.partition(".lora_B.")
    alpha = tensors.get(f"{module}.alpha")
    return (
        tensors[name] if alpha is None or rest != "weight" else tensors[name] * (alpha.item() / tensors[name].shape[1])
    )

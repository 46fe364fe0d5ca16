"""LoRA loading that knows which adapters are merged into the weights already."""

import torch
from diffusers.loaders import MiniMaxH3LoraLoaderMixin

from ..models.adapters import adapter_keys, file_sha256, find_adapter_file, refuse_merged_adapter


class VDNH3LoraLoaderMixin(MiniMaxH3LoraLoaderMixin):
    """Diffusers' LoRA loading for MiniMax-H3, which refuses the adapters that overlays merge."""

    # One transformer; the stock list also names the partition of reference-to-video.
    _lora_loadable_modules = ["transformer"]

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | dict[str, torch.Tensor],
        adapter_name: str | None = None,
        hotswap: bool = False,
        **kwargs,
    ) -> None:
        """Load a LoRA beside the weights as Diffusers does, unless it is merged into them already.

        Raises:
            ValueError: For an adapter of the transformer's `fused_adapters`, and for any in an OpenVDN release's
                spelling, which would be loaded in part: materialise it with an overlay instead.
        """
        source = pretrained_model_name_or_path_or_dict
        fused = self.transformer.config.get("fused_adapters") or []
        if isinstance(source, dict):
            refuse_merged_adapter(fused, source)
        else:
            file = find_adapter_file(source, kwargs)
            refuse_merged_adapter(fused, adapter_keys(file), file_sha256(file))
            source, kwargs["weight_name"] = str(file), file.name
        super().load_lora_weights(source, adapter_name, hotswap, **kwargs)

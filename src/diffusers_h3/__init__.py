"""MiniMax-H3 and Wan video models in Diffusers: faster attention, VDN-H3 hybrid attention, video with sound.

Every public name is imported on first use, so `import diffusers_h3` needs no GPU and none of the optional packages.
"""

import importlib
from typing import TYPE_CHECKING

from ._registration import register as _register
from ._version import __version__


_PUBLIC_NAMES = {
    "FlashInferProcessor": "attention_processors.flashinfer",
    "HybridAttentionConfig": "hybrid.config",
    "HybridAttnProcessor": "attention_processors.hybrid",
    "Overlay": "overlays",
    "SequenceLayout": "hybrid.layout",
    "VDNH3Pipeline": "pipelines.pipeline_vdn_h3",
    "VDNH3PipelineOutput": "pipelines.pipeline_output",
    "VDNH3Transformer3DModel": "models.transformer_vdn_h3",
    "apply_hybrid_attention": "models.install",
    "fp8_quantization_config": "models.quantization",
    "load_overlay": "overlays",
    "materialize_overlay": "overlays",
}

__all__ = [
    "FlashInferProcessor",
    "HybridAttentionConfig",
    "HybridAttnProcessor",
    "Overlay",
    "SequenceLayout",
    "VDNH3Pipeline",
    "VDNH3PipelineOutput",
    "VDNH3Transformer3DModel",
    "__version__",
    "apply_hybrid_attention",
    "fp8_quantization_config",
    "load_overlay",
    "materialize_overlay",
]


_register()


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from .attention_processors.flashinfer import FlashInferProcessor
    from .attention_processors.hybrid import HybridAttnProcessor
    from .hybrid.config import HybridAttentionConfig
    from .hybrid.layout import SequenceLayout
    from .models.install import apply_hybrid_attention
    from .models.quantization import fp8_quantization_config
    from .models.transformer_vdn_h3 import VDNH3Transformer3DModel
    from .overlays import Overlay, load_overlay, materialize_overlay
    from .pipelines.pipeline_output import VDNH3PipelineOutput
    from .pipelines.pipeline_vdn_h3 import VDNH3Pipeline

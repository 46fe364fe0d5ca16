"""FlashInfer's dense attention as a processor for Wan's and MiniMax-H3's transformers."""

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from ..ops.prefill import PrefillOptions
from ..ops.prefill.machine import machine_refusal
from .flashinfer_backend import backend_for
from .shared import inherits_parallel_config


STOCK_PROCESSORS = (WanAttnProcessor, MiniMaxH3AttnProcessor)


@inherits_parallel_config
class FlashInferProcessor:
    """Compute attention with FlashInfer and everything around it with Diffusers' own processor. Inference only.

    Diffusers' processors read the attention backend from themselves, so this one runs the stock processor's code of
    the attention class it is called with and names a FlashInfer backend. One instance serves every layer, model,
    thread and stream: `transformer.set_attn_processor(FlashInferProcessor())`. A later `set_attention_backend` takes
    precedence, and `reset_attention_backend` brings FlashInfer back.

    Args:
        prefill (`str`, *optional*): `"single"`: one kernel per batch item; `"cudnn"`: one for the whole batch;
            `"auto"`: what was measured faster. Defaults to `DIFFUSERS_H3_FLASHINFER_PREFILL`, or `"auto"`.
        kernel (`str`): `"fa2"` or `"fa3"` pins the kernel of `prefill="single"`; `"auto"` takes fa3 on Hopper.
        fp8 (`bool`): Whether to quantise queries, keys and values to float8 e4m3 per head. Hopper only.
        fallback (`str`): `"error"`: what FlashInfer cannot do raises an error; `"sdpa"`: it runs on PyTorch's
            attention after one warning, also where FlashInfer cannot run at all.

    Raises:
        ValueError: For an unknown option.
        RuntimeError: Where FlashInfer cannot run on this machine and `fallback` is `"error"`.

    Examples:
        >>> from diffusers import WanTransformer3DModel
        >>> from diffusers_h3 import FlashInferProcessor
        >>> sizes = {"num_attention_heads": 2, "attention_head_dim": 64, "text_dim": 64, "freq_dim": 64, "ffn_dim": 64}
        >>> transformer = WanTransformer3DModel(num_layers=1, **sizes)
        >>> transformer.set_attn_processor(FlashInferProcessor(prefill="cudnn", fallback="sdpa"))
        >>> {type(processor).__name__ for processor in transformer.attn_processors.values()}
        {'FlashInferProcessor'}
    """

    _parallel_config = None

    def __init__(self, prefill: str | None = None, kernel: str = "auto", fp8: bool = False, fallback: str = "error"):
        self.options = PrefillOptions.with_environment(prefill, kernel=kernel, fp8=fp8, fallback=fallback)
        refusal = machine_refusal(self.options)
        if refusal is not None and fallback == "error":
            raise RuntimeError(refusal)
        self._own_backend = backend_for(self.options)
        self._other_backend = None

    @property
    def _attention_backend(self) -> AttentionBackendName:
        """The backend in force: the one Diffusers was told to use on this processor, or this processor's own."""
        return self._own_backend if self._other_backend is None else self._other_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: AttentionBackendName | None) -> None:
        self._other_backend = backend

    def __call__(self, attn: torch.nn.Module, *args, **kwargs) -> torch.Tensor:
        """Attend as the stock processor of `attn` does; its arguments and result.

        Raises:
            TypeError: For an attention class other than Wan's and MiniMax-H3's.
            ValueError: For a layer with a linear branch, and for what FlashInfer cannot do under `fallback="error"`.
        """
        stock = getattr(type(attn), "_default_processor_cls", None)
        if stock not in STOCK_PROCESSORS:
            raise TypeError(
                f"FlashInferProcessor serves Wan's and MiniMax-H3's attention, not {type(attn).__name__}: use "
                "`model.set_attention_backend('flashinfer')`, which keeps the model's own processors."
            )
        if hasattr(attn, "linear_attention"):
            raise ValueError(
                "This layer has a linear attention branch, which dense attention would leave out: keep its "
                "HybridAttnProcessor."
            )
        return stock.__call__(self, attn, *args, **kwargs)

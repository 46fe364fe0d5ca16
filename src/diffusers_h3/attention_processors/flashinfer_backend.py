"""FlashInfer as an attention backend of Diffusers: `transformer.set_attention_backend("flashinfer")`.

Diffusers has no entry point for backends of other packages: names are members of an enumeration and functions sit in a
registry, both in `diffusers.models.attention_dispatch`. This file alone adds to them. Made for diffusers 0.42.
"""

import functools
import threading
from typing import TYPE_CHECKING

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    _templated_context_parallel_attention,
    dispatch_attention_fn,
)

from ..notices import warn_once
from ..ops.prefill import PrefillOptions, prefill_attention, prefill_refusal
from ..ops.prefill.machine import machine_refusal


if TYPE_CHECKING:
    from diffusers.models._modeling_parallel import ParallelConfig

PUBLIC_NAME = "flashinfer"

_registration_lock = threading.Lock()


def backend_for(options: PrefillOptions) -> AttentionBackendName:
    """Return the backend that computes with these options, registering it on first use.

    The name carries the options, so that whatever Diffusers does with a backend's name (store it on a processor, check
    it, trace it) is safe in threads and constant in compiled graphs.
    """
    parts = (options.prefill, options.kernel, "fp8" if options.fp8 else "16bit", options.fallback)
    return _register("_".join(("", PUBLIC_NAME, *parts)), lambda: options)


def register_backend() -> None:
    """Make the backend name `"flashinfer"` known to Diffusers, unless Diffusers has one of its own.

    Its options are the defaults, with `DIFFUSERS_H3_FLASHINFER_PREFILL` read at its first call.
    """
    _register(PUBLIC_NAME, PrefillOptions.with_environment)


def _register(name: str, make_options) -> AttentionBackendName:
    with _registration_lock:
        if name not in AttentionBackendName._value2member_map_:
            member = _add_member(name)
            register = _AttentionBackendRegistry.register(member, supports_context_parallel=True)
            register(_make_backend(make_options))
        return AttentionBackendName(name)


def _add_member(name: str) -> AttentionBackendName:
    """Extend the enumeration by one member, as its own body would have."""
    member = str.__new__(AttentionBackendName, name)
    member._value_ = name
    member._name_ = name.upper()
    member._sort_order_ = len(AttentionBackendName._member_names_)
    type.__setattr__(AttentionBackendName, member._name_, member)
    AttentionBackendName._member_names_.append(member._name_)
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[name] = member
    return member


def _make_backend(make_options):
    """Return the function that Diffusers' dispatch calls for one backend name."""

    @torch.compiler.assume_constant_result
    def resolved_options() -> PrefillOptions:
        return _options_and_refusal(make_options)[0]

    @torch.compiler.assume_constant_result
    def refusal_of_machine() -> str | None:
        return _options_and_refusal(make_options)[1]

    def flashinfer_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: "ParallelConfig | None" = None,
    ) -> torch.Tensor:
        """Attend over ``[B, S, H, D]`` tensors; see `prefill_refusal` for what is taken."""
        options = resolved_options()
        if return_lse:
            raise ValueError("The FlashInfer attention backend returns no log-sum-exp (`return_lse=True`).")
        if _parallel_config is not None:
            _check_parallel(_parallel_config, query)
        refusal = refusal_of_machine()
        if refusal is None and dropout_p != 0.0:
            refusal = f"FlashInfer's kernels are for inference and take no dropout; got dropout_p={dropout_p}."
        if refusal is None:
            refusal = _refusal_of_call(query, key, value, attn_mask, is_causal, scale, options, _parallel_config)
        if refusal is not None:
            if options.fallback == "error":
                raise ValueError(refusal)
            warn_once(f"FlashInfer attention falls back to PyTorch's: {refusal}")
            return dispatch_attention_fn(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa or query.shape[2] != key.shape[2],
                backend=AttentionBackendName.NATIVE,
                parallel_config=_parallel_config,
            )
        if _parallel_config is None:
            return prefill_attention(query, key, value, attn_mask, is_causal, scale, options)

        def attend_to_whole_sequence(context, query, key, value, attn_mask, dropout_p, is_causal, scale, *_, **__):
            # Diffusers has exchanged rows for heads: each rank holds every row of its share of the heads.
            return flashinfer_attention(query, key, value, attn_mask, dropout_p, is_causal, scale)

        return _templated_context_parallel_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            forward_op=attend_to_whole_sequence,
            backward_op=None,  # never called: inputs that require gradients are refused above
            _parallel_config=_parallel_config,
        )

    return flashinfer_attention


@functools.cache
def _options_and_refusal(make_options) -> tuple[PrefillOptions, str | None]:
    """Find out once, at a backend's first call: environment and machine stay as they are."""
    options = make_options()
    return options, machine_refusal(options)


def _refusal_of_call(query, key, value, attn_mask, is_causal, scale, options, parallel_config) -> str | None:
    # A rank's own rows say nothing about the shape of the mask; the whole sequence's are checked after the exchange.
    if parallel_config is not None:
        attn_mask, is_causal = None, False
    return prefill_refusal(query, key, value, attn_mask, is_causal, scale, options)


def _check_parallel(parallel_config: "ParallelConfig", query: torch.Tensor) -> None:
    config = parallel_config.context_parallel_config
    if config.ring_degree > 1:
        raise ValueError(
            "The FlashInfer attention backend supports Ulysses context parallelism, not ring attention: use "
            f"`ContextParallelConfig(ulysses_degree={config.ring_degree * config.ulysses_degree})`."
        )
    if query.shape[2] % config.ulysses_degree != 0 and not config.ulysses_anything:
        raise ValueError(
            f"{query.shape[2]} attention heads cannot be shared by {config.ulysses_degree} ranks: choose a "
            "`ulysses_degree` that divides them, or pass `ulysses_anything=True` to `ContextParallelConfig`."
        )


# At the end of the import, whichever of this module and Diffusers' dispatch was asked for first.
register_backend()

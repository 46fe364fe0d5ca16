"""VDN-H3's attention layer as a Diffusers attention processor."""

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3AttnProcessor,
    _apply_rotary_emb,
)

from ..hybrid.layout import SequenceLayout, plan_branch, plan_window
from ..ops.window_attention import BACKENDS, window_attention
from .shared import inherits_parallel_config


@inherits_parallel_config
class HybridAttnProcessor:
    """Run a softmax window plus the linear branch on every layer that has one, and dense attention on the others.

    One stateless instance serves all layers: the weights are submodules of the attention module (see
    `apply_hybrid_attention`), and the row layout is its `sequence_layout`, set by the model's forward pass.

    Args:
        backend (`str`): How the window is computed. `"sdpa"` runs on any device, with gradients, through Diffusers'
            attention dispatch (`set_attention_backend` applies and selects it). `"flashinfer"`, `"flash_attn"`,
            `"cudnn"` and `"torch_flash"` are inference only and gather no keys. `"auto"` takes the first of them that
            runs on the device and logs it, and `"sdpa"` on a CPU or with gradients.
        fp8 (`bool`): Quantise the window's query, key and value to e4m3, per head. FlashInfer on Hopper only.

    Raises:
        ValueError: For an unknown backend, and for `fp8` on one that has none.
    """

    _attention_backend = None

    def __init__(self, backend: str = "auto", fp8: bool = False):
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"`backend` must be one of {['auto', *BACKENDS]}, got {backend!r}.")
        if fp8 and backend not in ("auto", "flashinfer"):
            raise ValueError(f"`fp8=True` runs on the 'flashinfer' backend only, got {backend!r}.")
        self.backend = backend
        self.fp8 = fp8

    @property
    def _parallel_config(self):
        """Diffusers' context-parallel configuration; none is accepted."""
        return None

    @_parallel_config.setter
    def _parallel_config(self, config):
        if config is not None:
            raise ValueError(
                "HybridAttnProcessor does not run under context parallelism: window and linear branch need the whole "
                "sequence on one device. Do not call `enable_parallelism` on this transformer."
            )

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over one packed sequence.

        Args:
            attn (`MiniMaxH3Attention`): The layer.
            hidden_states (`torch.Tensor`): ``[B, T, C]``.
            rotary_emb (`tuple[torch.Tensor, torch.Tensor]`, *optional*): Cosines and sines, ``[T, rotary]`` each.
            attention_mask (`torch.Tensor`, *optional*): Only layers without a linear branch take one.

        Returns:
            `torch.Tensor`: ``[B, T, C]``.

        Raises:
            ValueError: On a block without a linear branch, where no layout is set, where it is of another length than
                the sequence (as on one shard of it), and for a mask on a hybrid layer.
        """
        branch = getattr(attn, "linear_attention", None)
        if branch is None:
            if rotary_emb is not None:
                raise ValueError(
                    "This layer has no linear branch, and only the token refiner runs dense. Call "
                    "`apply_hybrid_attention` on the transformer, or use another processor for a dense model."
                )
            dense = MiniMaxH3AttnProcessor()
            dense._attention_backend = self._attention_backend
            return dense(attn, hidden_states, rotary_emb, attention_mask)
        layout = _checked_layout(attn, hidden_states, attention_mask)
        config = branch.config

        if attn.fused_projections:
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)

        gate = attn.softmax_gate(hidden_states) if config.enable_softmax_gate else None
        window = self._window(attn, query, key, value, rotary_emb, plan_window(config, layout), gate)
        output = attn.to_out[0](window.flatten(2))
        output = attn.to_out[1](output)
        del window

        plan = plan_branch(config, layout)
        if plan.num_frames:
            start, stop = layout.frame_range(plan.first_frame, plan.first_frame + plan.num_frames)
            carried = attn.to_out_linear(branch(hidden_states, query, key, value, layout))
            output[:, start:stop] += carried
        return output

    def _window(
        self,
        attn: MiniMaxH3Attention,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None,
        groups: tuple,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the window's output, ``[B, T, H, D]``, gated where `gate` is given."""
        query, key, value = (rows.unflatten(-1, (attn.heads, -1)) for rows in (query, key, value))
        query, key = attn.norm_q(query), attn.norm_k(key)
        if rotary_emb is not None:
            query, key = _apply_rotary_emb(query, *rotary_emb), _apply_rotary_emb(key, *rotary_emb)

        def attention(query, key, value):
            return dispatch_attention_fn(query, key, value, backend=self._attention_backend)

        backend = "sdpa" if self._attention_backend is not None else self.backend
        return window_attention(query, key, value, groups, attention, gate, backend, self.fp8)


def _checked_layout(
    attn: MiniMaxH3Attention, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None
) -> SequenceLayout:
    layout = getattr(attn, "sequence_layout", None)
    if layout is None:
        raise ValueError(
            "No sequence layout is set on this attention layer. Call the whole transformer, which derives it from "
            "`position_ids`, `video_indices` and `text_indices`, or set `attn.sequence_layout` yourself."
        )
    if layout.seq_len != hidden_states.shape[1]:
        raise ValueError(
            f"The sequence layout describes {layout.seq_len} rows but the layer got {hidden_states.shape[1]}. Hybrid "
            "attention needs the whole sequence: a sharded one (context parallelism) is not supported."
        )
    if attention_mask is not None:
        raise ValueError(
            "A hybrid attention layer takes no `attention_mask`: its window decides which rows see each other."
        )
    return layout

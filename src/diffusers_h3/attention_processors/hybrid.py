"""VDN-H3's attention layer as a Diffusers attention processor."""

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_minimax_h3 import (
    MiniMaxH3Attention,
    MiniMaxH3AttnProcessor,
    _apply_rotary_emb,
)

from ..hybrid.config import HybridAttentionConfig
from ..hybrid.layout import SequenceLayout, plan_branch, plan_window
from ..hybrid.parallel import HeadSplit, check_config
from ..ops.window_attention import BACKENDS, window_attention
from .shared import inherits_parallel_config


@inherits_parallel_config
class HybridAttnProcessor:
    """Run a softmax window plus the linear branch on every layer that has one, and dense attention on the others.

    One stateless instance serves all layers: the weights are submodules of the attention module (see
    `apply_hybrid_attention`), and the row layout comes beside the rotary embedding, from the model's forward pass.

    Args:
        backend (`str`): How the window is computed. `"sdpa"` runs on any device, with gradients, through Diffusers'
            attention dispatch (`set_attention_backend` applies and selects it). `"flashinfer"`, `"flash_attn"`,
            `"cudnn"` and `"torch_flash"` are inference only and gather no keys. `"auto"` takes the first of them that
            runs on the device and logs it, and `"sdpa"` on a CPU, in float32 or with gradients.
        fp8 (`bool`): Quantise the window's query, key and value to e4m3, per head. FlashInfer on Hopper only.

    Raises:
        ValueError: For an unknown backend, and for `fp8` on one that has none.

    Examples:
        >>> from diffusers_h3 import HybridAttnProcessor, VDNH3Pipeline
        >>> from diffusers_h3.demo.release import STAGE, embedded_release
        >>> pipe = VDNH3Pipeline.from_pretrained(embedded_release() / STAGE)
        >>> pipe.transformer.set_attn_processor(HybridAttnProcessor(backend="sdpa"))
        >>> output = pipe("a red circle moves left to right", height=96, width=96, output_type="latent")
    """

    _attention_backend = None

    def __init__(self, backend: str = "auto", fp8: bool = False):
        if backend not in ("auto", *BACKENDS):
            raise ValueError(f"`backend` must be one of {['auto', *BACKENDS]}, got {backend!r}.")
        if fp8 and backend not in ("auto", "flashinfer"):
            raise ValueError(f"`fp8=True` runs on the 'flashinfer' backend only, got {backend!r}.")
        self.backend = backend
        self.fp8 = fp8
        self._accepted_config = None

    @property
    def _parallel_config(self):
        """Diffusers' parallel configuration, which `enable_parallelism` sets; Ulysses is accepted."""
        return self._accepted_config

    @_parallel_config.setter
    def _parallel_config(self, config):
        if config is not None:
            check_config(config.context_parallel_config)
        self._accepted_config = config

    def __call__(
        self,
        attn: MiniMaxH3Attention,
        hidden_states: torch.Tensor,
        rotary_emb: tuple[torch.Tensor, torch.Tensor, SequenceLayout] | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over one packed sequence.

        Args:
            attn (`MiniMaxH3Attention`): The layer.
            hidden_states (`torch.Tensor`): ``[B, T, C]``; under context parallelism, this rank's rows of them.
            rotary_emb (`tuple[torch.Tensor, torch.Tensor, SequenceLayout]`, *optional*): Cosines and sines,
                ``[T, rotary]`` each, and the layout of the rows, always of the whole sequence. Only layers without a
                linear branch do without.
            attention_mask (`torch.Tensor`, *optional*): Only layers without a linear branch take one.

        Returns:
            `torch.Tensor`: The shape of `hidden_states`.

        Raises:
            ValueError: On a block without a linear branch, where no layout is given or one that does not belong to
                these rows (as on one shard of them without `enable_parallelism`), for a mask on a hybrid layer, and
                for gradients, rows or heads that the ranks cannot share.
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
        layout = _checked_layout(rotary_emb, attention_mask)
        config = branch.config
        parallel = self._parallel_config and self._parallel_config.context_parallel_config
        split = HeadSplit.of(parallel, layout.seq_len, attn.heads)
        _check_rows(split, hidden_states, rotary_emb)

        # Every exchange runs beside the projection after it.
        if attn.fused_projections:
            projected = attn.to_qkv(hidden_states).chunk(3, dim=-1)
            pending = [split.to_heads(rows.unflatten(-1, (attn.heads, -1))) for rows in projected]
        else:
            projections = (attn.to_q, attn.to_k, attn.to_v)
            pending = [
                split.to_heads(project(hidden_states).unflatten(-1, (attn.heads, -1))) for project in projections
            ]
        gate = split.to_heads(attn.softmax_gate(hidden_states)) if config.enable_softmax_gate else None
        query, key, value = (rows() for rows in pending)
        del pending

        # The branch is the last to need the projections as they are, and its result travels beneath the window.
        plan = plan_branch(config, layout.num_frames)
        start, stop = layout.rows(plan.first_frame, plan.first_frame + plan.num_frames)
        if plan.num_frames:
            raw = (rows.flatten(2) for rows in (query, key, value))
            readout = branch(hidden_states, *raw, layout, split)
            pending = split.to_rows(readout.unflatten(-1, (split.num_heads, -1)), start, stop)

        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key = _apply_rotary_emb(query, *rotary_emb[:2]), _apply_rotary_emb(key, *rotary_emb[:2])
        window = self._window(query, key, value, layout, config, None if gate is None else gate())
        del query, key, value
        window = split.to_rows(window, 0, layout.seq_len)
        output = attn.to_out[0](window().flatten(2))
        output = attn.to_out[1](output)
        del window

        if plan.num_frames:
            # Also where none of the rows are this rank's: what is not waited for is never freed.
            readout, own = pending(), split.own_rows(start, stop)
            if own.start < own.stop:
                output[:, own] += attn.to_out_linear(readout.flatten(2))
        return output

    def _window(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: SequenceLayout,
        config: HybridAttentionConfig,
        gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the window's output, ``[B, T, H, D]``, gated where `gate` is given."""

        def attention(query, key, value):
            return dispatch_attention_fn(query, key, value, backend=self._attention_backend)

        groups = plan_window(config, layout.num_frames)
        backend = "sdpa" if self._attention_backend is not None else self.backend
        return window_attention(query, key, value, groups, attention, gate, backend, self.fp8, layout.rows)


def _checked_layout(rotary_emb: tuple, attention_mask: torch.Tensor | None) -> SequenceLayout:
    if rotary_emb is None or len(rotary_emb) != 3:
        raise ValueError(
            "No sequence layout came with the rotary embedding. Call the whole transformer, which derives it from "
            "`position_ids`, `video_indices` and `text_indices`, or pass `(cos, sin, SequenceLayout(...))` yourself."
        )
    if attention_mask is not None:
        raise ValueError(
            "A hybrid attention layer takes no `attention_mask`: its window decides which rows see each other."
        )
    return rotary_emb[2]


def _check_rows(split: HeadSplit, hidden_states: torch.Tensor, rotary_emb: tuple) -> None:
    cosines, _, layout = rotary_emb
    own = split.row_counts[split.rank]
    if hidden_states.shape[1] != own or cosines.shape[0] != layout.seq_len:
        raise ValueError(
            f"The sequence layout describes {layout.seq_len} rows but the layer got {hidden_states.shape[1]} with "
            f"{cosines.shape[0]} rotary angles, and this rank has {own} of the rows. Under context "
            "parallelism, shard with `transformer.enable_parallelism` and the model's own plan: it keeps all angles."
        )

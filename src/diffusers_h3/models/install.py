"""Turn a MiniMax-H3 transformer into the hybrid one, in place."""

import inspect
import threading
import weakref
from typing import Any

import torch
from diffusers import MiniMaxH3Transformer3DModel

from ..attention_processors.hybrid import HybridAttnProcessor
from ..hybrid.branch import SoftmaxGate, VideoDeltaAttention
from ..hybrid.config import HybridAttentionConfig
from ..hybrid.layout import SequenceLayout
from ..hybrid.parallel import check_shares


# Parameters the release computes with in float32 whatever the model's dtype: exponentials of them decay the state.
FLOAT32_PARAMETERS = ("A_log", "dt_bias")

_BRANCH_MODULES = ("linear_attention", "softmax_gate", "to_out_linear")
_FORWARD_SIGNATURE = inspect.signature(MiniMaxH3Transformer3DModel.forward)


def apply_hybrid_attention(
    transformer: MiniMaxH3Transformer3DModel,
    config: HybridAttentionConfig | dict[str, Any],
    state_dict: dict[str, torch.Tensor] | None = None,
) -> MiniMaxH3Transformer3DModel:
    """Attach the linear branch to every block, set `HybridAttnProcessor` and hook the row layout.

    Args:
        transformer (`MiniMaxH3Transformer3DModel`): The stock transformer, changed in place.
        config (`HybridAttentionConfig` or `dict`): The layer's configuration, or a version 2 transform.
        state_dict (`dict[str, torch.Tensor]`, *optional*): The branch's weights under the release's names
            (`transformer_blocks.N.attn.…`). Without it the branch starts at its defaults: identity convolutions and
            a zero output projection, so the layer computes the gated window alone.

    Returns:
        `MiniMaxH3Transformer3DModel`: The same `transformer`.

    Raises:
        ValueError: Where the transformer already is hybrid or runs in parallel, where `linear_head_dim` is not its
            head dimension, and where the weights do not fit; the transformer is unchanged then.

    Examples:
        >>> from diffusers import MiniMaxH3Transformer3DModel
        >>> from diffusers_h3 import HybridAttentionConfig, apply_hybrid_attention
        >>> from diffusers_h3.demo.release import embedded_release
        >>> transformer = MiniMaxH3Transformer3DModel.from_pretrained(embedded_release() / "h3-base/transformer")
        >>> transformer = apply_hybrid_attention(transformer, HybridAttentionConfig(linear_head_dim=64))
        >>> type(transformer.transformer_blocks[0].attn.linear_attention).__name__
        'VideoDeltaAttention'
    """
    if not isinstance(config, HybridAttentionConfig):
        config = HybridAttentionConfig.from_dict(config)
    blocks = transformer.transformer_blocks
    if any(hasattr(block.attn, name) for block in blocks for name in _BRANCH_MODULES):
        raise ValueError("This transformer already has hybrid attention.")
    if transformer._parallel_config is not None:
        raise ValueError(
            "Parallelism is already enabled on this transformer, for dense attention: call `apply_hybrid_attention` "
            "first and `enable_parallelism` after it."
        )
    head_dim = transformer.config.attention_head_dim
    if config.linear_head_dim != head_dim:
        raise ValueError(
            f"`linear_head_dim` must equal the transformer's head dimension {head_dim}, got {config.linear_head_dim}."
        )

    hidden_size = transformer.config.hidden_size
    branches = []
    for block in blocks:
        weight = block.attn.to_out[0].weight
        modules = {
            "linear_attention": VideoDeltaAttention(hidden_size, block.attn.heads, config),
            "to_out_linear": torch.nn.Linear(block.attn.inner_dim, hidden_size, bias=False),
        }
        if config.enable_softmax_gate:
            modules["softmax_gate"] = SoftmaxGate(hidden_size, block.attn.heads)
        torch.nn.init.zeros_(modules["to_out_linear"].weight)
        branch = torch.nn.ModuleDict(modules).to(weight.device, weight.dtype)
        for name, parameter in branch.named_parameters():
            if name.rpartition(".")[2] in FLOAT32_PARAMETERS:
                parameter.data = parameter.data.float()
        branches.append(branch)
    if state_dict is not None:
        _load_branches(branches, state_dict)

    for block, branch in zip(blocks, branches, strict=True):
        for name, module in branch.items():
            block.attn.add_module(name, module)
    transformer.set_attn_processor(HybridAttnProcessor())
    transformer._keep_in_fp32_modules = [
        *(name for name in transformer._keep_in_fp32_modules if name not in FLOAT32_PARAMETERS),
        *FLOAT32_PARAMETERS,
    ]
    # After the exchange a rank has its heads of all rows, so it needs the rotary angles of all rows.
    transformer._cp_plan = {name: plan for name, plan in transformer._cp_plan.items() if name != "rope"}
    carrier = _LayoutCarrier()
    transformer.register_forward_pre_hook(carrier.derive, with_kwargs=True)
    transformer.rope.register_forward_hook(carrier.attach)
    return transformer


class _LayoutCarrier:
    """Derive the layout from the model's inputs and let it ride to the layers beside the rotary embedding.

    The pre-hook runs before anything shards the inputs. As an argument of the blocks, and not state of theirs, the
    layout stays with the call it belongs to (checkpointing runs blocks again later, threads share models), and
    `torch.compile` takes its numbers as variables. The layout of the last inputs is kept while those tensors live
    unchanged, so a denoising loop, which passes the same ones at every step, reads them on the host once.
    """

    def __init__(self):
        self._calls = threading.local()

    def __reduce__(self):
        # What is remembered belongs to tensors of this process; a copy of the model starts afresh.
        return type(self), ()

    @torch.compiler.disable
    def derive(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the transformer."""
        inputs = _FORWARD_SIGNATURE.bind_partial(module, *args, **kwargs).arguments
        tensors = [inputs.get(name) for name in ("position_ids", "video_indices", "text_indices")]
        if any(tensor is None for tensor in tensors):
            return  # the forward pass itself names the missing argument
        if not self._remembers(tensors):
            self._calls.layout = SequenceLayout.from_indices(*tensors)
            # Inference tensors do not count their changes, so they are read anew every time.
            counted = not any(tensor.is_inference() for tensor in tensors)
            self._calls.sources = [(weakref.ref(tensor), tensor._version) for tensor in tensors] if counted else []
        parallel = module._parallel_config and module._parallel_config.context_parallel_config
        if parallel:
            check_shares(parallel, self._calls.layout.seq_len, module.config.num_attention_heads)

    def attach(self, module: torch.nn.Module, args: tuple, output: tuple) -> tuple:
        """Forward hook of `rope`: ``(cos, sin)`` to ``(cos, sin, layout)``."""
        return *output, self._calls.layout

    def _remembers(self, tensors: list[torch.Tensor]) -> bool:
        sources = getattr(self._calls, "sources", None)
        return bool(sources) and all(
            source() is tensor and version == tensor._version
            for (source, version), tensor in zip(sources, tensors, strict=True)
        )


def _load_branches(branches: list[torch.nn.Module], state_dict: dict[str, torch.Tensor]) -> None:
    """Load the weights of all blocks after checking every name and shape."""
    prefixes = [f"transformer_blocks.{index}.attn." for index in range(len(branches))]
    expected = {
        prefix + name: parameter.shape
        for prefix, branch in zip(prefixes, branches, strict=True)
        for name, parameter in branch.state_dict().items()
    }
    problems = [f"missing {name}" for name in expected.keys() - state_dict.keys()]
    problems += [f"unexpected {name}" for name in state_dict.keys() - expected.keys()]
    problems += [
        f"{name} of shape {tuple(state_dict[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in state_dict and state_dict[name].shape != shape
    ]
    if problems:
        shown = ", ".join(sorted(problems)[:4])
        raise ValueError(f"The linear branch's weights do not fit: {shown} ({len(problems)} differences in all).")
    for prefix, branch in zip(prefixes, branches, strict=True):
        branch.load_state_dict({name: state_dict[prefix + name] for name in branch.state_dict()})

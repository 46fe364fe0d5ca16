"""Stages `align` and `hybrid`: give the dense transformer a linear branch, layer by layer, then end to end."""

from functools import partial
from pathlib import Path

import torch
from diffusers import MiniMaxH3Transformer3DModel
from peft import LoraConfig

from diffusers_h3 import HybridAttnProcessor, apply_hybrid_attention

from .backward import Losses
from .components import HYBRID_ATTENTION
from .dense import distance, flow_parts, load_dense
from .latents import LatentPool
from .loop import Schedule, fit, load_weights
from .packing import velocity
from .release import DEFAULT_ADAPTER


BRANCH_MODULES = ("linear_attention", "softmax_gate", "to_out_linear")
DEFAULT_RANK = 8

_ATTENTION_LINEARS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0")


def attention_linears(transformer: MiniMaxH3Transformer3DModel) -> list[str]:
    """Return the names of the attention projections of all blocks and refiner blocks."""
    blocks = [f"transformer_blocks.{index}" for index in range(transformer.config.num_layers)]
    blocks += [f"token_refiner.refiner_blocks.{index}" for index in range(transformer.config.num_refiner_layers)]
    return [f"{block}.{linear}" for block in blocks for linear in _ATTENTION_LINEARS]


def add_adapter(transformer: MiniMaxH3Transformer3DModel, name: str, modules: list[str], rank: int) -> None:
    """Attach a fresh low-rank adapter of scale 1 to `modules`, active beside those that are there."""
    transformer.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=modules), adapter_name=name)
    transformer.set_adapters(list(transformer.peft_config))


def train_only(transformer: MiniMaxH3Transformer3DModel, *names: str) -> None:
    """Ask for gradients of the parameters one of whose dotted names is in `names`, and of no others."""
    for path, parameter in transformer.named_parameters():
        parameter.requires_grad_(not set(names).isdisjoint(path.split(".")))


def make_hybrid(transformer: MiniMaxH3Transformer3DModel) -> MiniMaxH3Transformer3DModel:
    """Give a dense transformer the tiny branch, and a window that runs the same with and without gradients."""
    transformer = apply_hybrid_attention(transformer, HYBRID_ATTENTION)
    transformer.set_attn_processor(HybridAttnProcessor(backend="sdpa"))
    return transformer


def load_hybrid(run: Path, device: torch.device, text_dim: int, stage: str) -> MiniMaxH3Transformer3DModel:
    """Load the hybrid transformer as `stage` (`"align"` or `"hybrid"`) left it, frozen.

    After `"hybrid"` it carries the adapter `default` beside the rounded dense weights.
    """
    transformer = make_hybrid(load_dense(run, device, text_dim))
    if stage == "hybrid":
        add_adapter(transformer, DEFAULT_ADAPTER, attention_linears(transformer), DEFAULT_RANK)
    load_weights(transformer, run / stage)
    return transformer.requires_grad_(False)


class AttentionTap:
    """Hold what goes into and comes out of every block's attention, and optionally replace what goes in.

    Args:
        transformer (`MiniMaxH3Transformer3DModel`): The transformer to listen to.
        source (`AttentionTap`, *optional*): Feed every layer the input this other tap saw, so that each layer is
            compared with its counterpart on equal terms.
    """

    def __init__(self, transformer: MiniMaxH3Transformer3DModel, source: "AttentionTap | None" = None):
        count = len(transformer.transformer_blocks)
        self.inputs: list[torch.Tensor | None] = [None] * count
        self.outputs: list[torch.Tensor | None] = [None] * count
        for index, block in enumerate(transformer.transformer_blocks):
            block.attn.register_forward_pre_hook(self._before(index, source))
            block.attn.register_forward_hook(self._after(index))

    def _before(self, index: int, source: "AttentionTap | None"):
        def hook(module, arguments):
            hidden_states, *others = arguments
            if source is not None:
                hidden_states = source.inputs[index]
            self.inputs[index] = hidden_states
            return hidden_states, *others

        return hook

    def _after(self, index: int):
        def hook(module, arguments, output):
            self.outputs[index] = output

        return hook


def train_align(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    pool: LatentPool,
    batch: int = 32,
    parts: int = 2,
    seed: int = 0,
) -> MiniMaxH3Transformer3DModel:
    """Fit each layer's branch to what the dense layer computes from the same input, all layers at once."""
    torch.manual_seed(seed)
    teacher = load_dense(run, device, pool.text_dim)
    student = make_hybrid(load_dense(run, device, pool.text_dim))
    train_only(student, *BRANCH_MODULES)
    taught = AttentionTap(teacher)
    learnt = AttentionTap(student, source=taught)

    def losses(packing, video, audio, text, timestep, timestep_indices, *_) -> Losses:
        rows = packing, video, audio, text, (timestep, timestep_indices)
        with torch.no_grad():
            velocity(teacher, *rows)
        velocity(student, *rows)
        # Relative errors: every layer counts the same, whatever the size of its output.
        errors = [
            (mine.float() - theirs.float()).square().mean() / theirs.float().square().mean()
            for mine, theirs in zip(learnt.outputs, taught.outputs, strict=True)
        ]
        return {"loss": sum(errors) / len(errors), "first": errors[0], "last": errors[-1]}

    draw = partial(flow_parts, pool, batch, parts)
    fit(run / "align", student, draw, losses, schedule, device, seed)
    return student


def train_hybrid(
    run: Path,
    schedule: Schedule,
    device: torch.device,
    pool: LatentPool,
    batch: int = 32,
    parts: int = 4,
    seed: int = 0,
) -> MiniMaxH3Transformer3DModel:
    """Train branch and adapter `default` end to end, on the clips and on the dense teacher's velocities alike."""
    torch.manual_seed(seed)
    teacher = load_dense(run, device, pool.text_dim)
    student = load_hybrid(run, device, pool.text_dim, "align")
    add_adapter(student, DEFAULT_ADAPTER, attention_linears(student), DEFAULT_RANK)
    train_only(student, *BRANCH_MODULES, DEFAULT_ADAPTER)

    def losses(packing, video, audio, text, timestep, timestep_indices, *flow) -> Losses:
        rows = packing, video, audio, text, (timestep, timestep_indices)
        with torch.no_grad():
            taught = velocity(teacher, *rows)
        predicted = velocity(student, *rows)
        data, teaching = distance(predicted, flow)["loss"], distance(predicted, taught)["loss"]
        return {"loss": data + teaching, "data": data, "teacher": teaching}

    draw = partial(flow_parts, pool, batch, parts)
    fit(run / "hybrid", student, draw, losses, schedule, device, seed)
    return student

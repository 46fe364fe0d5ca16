"""Run the cases of a file on this rank, and write what became of them: `layers_and_models.py CASES RESULTS`.

`test_layers_and_models.py` makes the cases and explains them.
"""

import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks import apply_group_offloading
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.device_mesh import init_device_mesh

from diffusers_h3 import HybridAttnProcessor
from diffusers_h3.hybrid import parallel


class Recorder:
    """Count what the layers send: every collective by name, with the numbers in its argument."""

    def __init__(self, collectives):
        self.sent = []
        self._collectives = collectives
        self.AsyncCollectiveTensor = collectives.AsyncCollectiveTensor

    def __getattr__(self, name):
        def call(states, *arguments):
            self.sent.append([name, states.numel()])
            return getattr(self._collectives, name)(states, *arguments)

        return call


def parallel_config(anything=False, ring=False):
    ranks = dist.get_world_size()
    shape = (ranks, 1) if ring else (1, ranks)
    return ContextParallelConfig(
        ring_degree=shape[0],
        ulysses_degree=shape[1],
        ulysses_anything=anything,
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses")),
    )


def run_model(model, request, switches, options, expected):
    actions = {
        "parallel": lambda: model.enable_parallelism(config=parallel_config(**options)),
        "stock": lambda: model.set_attn_processor(MiniMaxH3AttnProcessor()),
        "hybrid": lambda: model.set_attn_processor(HybridAttnProcessor()),
        "offload": lambda: apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level"),
        "compile": lambda: model.compile_repeated_blocks(fullgraph=True, backend="eager"),
        "native": lambda: model.set_attention_backend("native"),
        "gradients": lambda: torch.set_grad_enabled(True),
    }
    for switch in switches:
        actions[switch]()
    actual = model(**request, return_dict=False)
    return max(map(relative_error, actual, expected))


def run_layer(layer, inputs, rotary_emb, options, expected):
    config = ParallelConfig(context_parallel_config=parallel_config(**options))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config.setup(rank, ranks, torch.device("cpu"), mesh=config.context_parallel_config.mesh)
    layer.processor._parallel_config = config
    own, wanted = (states.tensor_split(ranks, dim=1)[rank] for states in (inputs, expected))
    return relative_error(layer(own, rotary_emb), wanted)


def relative_error(actual, expected):
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


def main():
    dist.init_process_group("gloo")
    torch.set_grad_enabled(False)
    results = {}
    for name, (kind, *case) in torch.load(sys.argv[1], weights_only=False).items():
        recorder = Recorder(parallel.collectives)
        if name != "compiled":  # which traces the real ones
            parallel.collectives = recorder
        try:
            error = {"model": run_model, "layer": run_layer}[kind](*case)
            # Of exchanges that nothing waited for, whose memory is never freed.
            results[name] = {"error": error, "sent": recorder.sent, "open": _get_work_registry_size()}
        except ValueError as refusal:
            results[name] = {"refusal": str(refusal)}
        finally:
            torch.set_grad_enabled(False)
            parallel.collectives = recorder._collectives
    # Every rank must have met the same end before any says so.
    dist.barrier()
    pathlib.Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Let Diffusers' context parallelism run on CPU processes: `cpu_ranks.py PROGRAM ARGUMENT...`, a file or a module."""

import os
import pathlib
import runpy
import sys

import torch
import torch.distributed as dist
from diffusers.hooks import context_parallel


def make_possible() -> None:
    """Let `enable_parallelism` run without an accelerator, and sequences be gathered that do not divide."""
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: int(os.environ["LOCAL_WORLD_SIZE"])
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
    torch.accelerator.is_available = lambda: False
    # Gloo gathers equal shards only; NCCL takes any.
    context_parallel._all_gather_anything = gather_by_broadcast


def gather_by_broadcast(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather shards of any sizes along `dim`, as Diffusers' function of the same arguments does on NCCL."""
    sizes = context_parallel.gather_size_by_comm(tensor.shape[dim], group)
    shards = []
    for rank, size in enumerate(sizes):
        shape = [*tensor.shape]
        shape[dim] = size
        shard = tensor.contiguous() if rank == dist.get_rank(group) else tensor.new_empty(shape)
        dist.broadcast(shard, src=dist.get_global_rank(group, rank), group=group)
        shards.append(shard)
    return torch.cat(shards, dim=dim)


if __name__ == "__main__":
    make_possible()
    sys.argv = sys.argv[1:]
    program = sys.argv[0]
    if pathlib.Path(program).is_file():
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__")

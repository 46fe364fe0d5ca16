"""Several processes for one clip: who has which GPU, where they meet, and how they share a sequence."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from .console import UsageError


if TYPE_CHECKING:
    import torch

    from ..pipelines.pipeline_vdn_h3 import VDNH3Pipeline

# How long a process waits for the others: for all to begin, and within a step for one that stopped answering.
_PATIENCE = timedelta(minutes=10)


def num_processes() -> int:
    """Return how many processes `torchrun` or `accelerate launch` started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_gpus() -> None:
    """Check that this machine has a GPU for every process started on it: two would share its memory unasked."""
    import torch

    started, available = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if started > available:
        raise UsageError(
            f"Each process needs a GPU of its own, but this machine has {available} for {started} processes. Start "
            "fewer (--num_processes of accelerate launch, --nproc-per-node of torchrun); with --prompts, --device cpu "
            "is possible too."
        )


def own_device(device: "torch.device", name: str | None) -> "torch.device":
    """Return this process's own GPU where several processes make one clip; alone, it has `device`."""
    if num_processes() == 1:
        return device
    import torch

    if name is not None and torch.device(name).index is not None:
        raise UsageError(
            f"--device {name}: each of the {num_processes()} processes takes a GPU of its own; leave it out."
        )
    check_gpus()
    device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(device).set_device(device)
    return device


def join(folder: Path, device: "torch.device") -> None:
    """Meet the other processes, once the weights are there: making them may take any one process hours."""
    count = num_processes()
    if count == 1:
        return
    heads = json.loads((folder / "transformer" / "config.json").read_text(encoding="utf-8"))["num_attention_heads"]
    if count > heads:
        raise UsageError(f"{count} processes cannot share {heads} attention heads; start {heads} at most.")
    import torch

    device = None if device.type == "cpu" else device
    torch.distributed.init_process_group(timeout=_PATIENCE, device_id=device)


def share_sequence(pipeline: "VDNH3Pipeline") -> None:
    """Let the processes share the transformer's work, and the first one alone show progress."""
    count = num_processes()
    if count == 1:
        return
    from diffusers import ContextParallelConfig

    # The prompt decides the length of the sequence, which need not divide.
    config = ContextParallelConfig(ulysses_degree=count, ulysses_anything=True)
    pipeline.transformer.enable_parallelism(config=config)
    pipeline.set_progress_bar_config(disable=os.environ["RANK"] != "0")


def leave() -> None:
    """Part from the other processes; what is left to do is the first one's."""
    if num_processes() > 1:
        import torch

        torch.distributed.destroy_process_group()

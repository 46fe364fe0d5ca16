"""One of two processes that run tiny models under Ulysses: `context_parallel_worker.py RANK STORE CASE...`.

Prints one JSON object: for every case its refusal, or its error against one process and the shapes of its queries.
`test_flashinfer_context_parallel.py` starts it and explains the cases.
"""

import json
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from diffusers.hooks import context_parallel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.distributed.device_mesh import init_device_mesh

from diffusers_h3 import FlashInferProcessor
from diffusers_h3.attention_processors.flashinfer_backend import register_backend


sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "parallel"))

from cpu_ranks import gather_by_broadcast
from flashinfer_stand_in import install, pretend_hopper
from tiny_models import make_inputs, make_model


def run(model, inputs):
    with torch.inference_mode():
        return model(**inputs, return_dict=False)


def result_of(case: str) -> dict:
    """Run one case, `KIND-SWITCHES-MODE`."""
    monkeypatch = pytest.MonkeyPatch()
    pretend_hopper(monkeypatch)
    # Diffusers divides the ranks among the accelerators and exchanges lengths on them; this machine may have none.
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    kind, switches, mode = case.split("-")
    monkeypatch.setattr(context_parallel, "_all_gather_anything", gather_by_broadcast)
    odd_rows = {"text": 6} if kind == "h3" else {"frames": 1, "height": 6}
    inputs = make_inputs(kind, **(odd_rows if mode == "odd" else {}))
    model = make_model(kind, **({"num_attention_heads": 3} if mode in ("heads", "anything", "odd") else {}))
    expected = run(model, inputs)

    recorder = install(monkeypatch)
    ring, ulysses = (2, 1) if mode == "ring" else (1, 2)
    config = ContextParallelConfig(
        ring_degree=ring,
        ulysses_degree=ulysses,
        ulysses_anything=mode in ("anything", "odd"),
        mesh=init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses")),
    )
    actions = {
        "processor": lambda: model.set_attn_processor(FlashInferProcessor()),
        "parallel": lambda: model.enable_parallelism(config=config),
        "backend": lambda: model.set_attention_backend("flashinfer"),
        "native": lambda: model.set_attention_backend("native"),
    }
    try:
        for switch in switches.split("+"):
            actions[switch]()
        actual = run(model, inputs)
    except ValueError as refusal:
        return {"refusal": str(refusal)}
    finally:
        monkeypatch.undo()
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    errors = [((got - wanted).norm() / wanted.norm()).item() for got, wanted in zip(actual, expected, strict=True)]
    return {"error": max(errors), "queries": sorted({tuple(call.arguments["q"].shape) for call in recorder.calls})}


def main() -> None:
    rank, store, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    register_backend()
    print(json.dumps({case: result_of(case) for case in cases}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

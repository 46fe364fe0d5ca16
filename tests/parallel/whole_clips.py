"""Make clips on this rank with a tiny pipeline: `whole_clips.py PIPELINE REQUESTS RESULTS`.

`test_pipeline.py` makes the requests and explains them.
"""

import os
import sys

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

from diffusers_h3 import VDNH3Pipeline


def main():
    folder, requests, results = sys.argv[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    pipeline = VDNH3Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ranks, ulysses_anything=True))
    made = {}
    for name, request in torch.load(requests, weights_only=False).items():
        seed = request.pop("seed")
        if seed is not None:
            request["generator"] = torch.Generator().manual_seed(seed)
        for argument, values in request.pop("by_rank", {}).items():
            request[argument] = values[rank % len(values)]
        try:
            output = pipeline(**request)
            made[name] = (output.frames, output.audio)
            if request["output_type"] == "np":
                output.save(f"{results}.{rank}.mp4")
        except ValueError as refusal:
            made[name] = str(refusal)
    dist.barrier()
    torch.save(made, f"{results}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

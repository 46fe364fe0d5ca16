"""Ulysses context parallelism with two processes: the same result in either order of the switches, or an error."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).with_name("context_parallel_worker.py")

# A call's rows, heads and channels. All 12 rows of Wan's and 20 of MiniMax-H3's sequence, with one of two heads. Wan's
# cross-attention keeps a rank's own 6 rows and both heads. The 5 text rows of MiniMax-H3's refiner are not sharded and
# so come from both ranks, every key twice, which softmax does not notice.
WAN = [[6, 2, 64], [12, 1, 64]]
H3 = [[10, 1, 128], [20, 1, 128]]
SAME = {
    "wan-processor+parallel-even": (WAN, WAN),
    "wan-parallel+processor-even": (WAN, WAN),
    "wan-parallel+native+processor-even": (WAN, WAN),
    "wan-backend+parallel-even": (WAN, WAN),
    "wan-parallel+backend-even": (WAN, WAN),
    "wan-processor+parallel+native-even": ([], []),
    "h3-processor+parallel-even": (H3, H3),
    "h3-parallel+processor-even": (H3, H3),
    # Three heads under `ulysses_anything`: two for the first rank, one for the second.
    "h3-parallel+processor-anything": ([[10, 2, 128], [20, 2, 128]], [[10, 1, 128], [20, 1, 128]]),
    # And odd rows: 21 with 6 of text for MiniMax-H3, 9 for Wan, of which the first rank has 5 in cross-attention.
    "h3-parallel+processor-odd": ([[12, 2, 128], [21, 2, 128]], [[12, 1, 128], [21, 1, 128]]),
    "h3-processor+parallel-odd": ([[12, 2, 128], [21, 2, 128]], [[12, 1, 128], [21, 1, 128]]),
    "wan-parallel+processor-odd": ([[5, 3, 64], [9, 2, 64]], [[4, 3, 64], [9, 1, 64]]),
    "wan-processor+parallel-odd": ([[5, 3, 64], [9, 2, 64]], [[4, 3, 64], [9, 1, 64]]),
}
REFUSED = {
    "wan-processor+parallel-ring": "use `ContextParallelConfig(ulysses_degree=2)`",
    "wan-parallel+processor-ring": "use `ContextParallelConfig(ulysses_degree=2)`",
    "wan-parallel+processor-heads": "3 attention heads cannot be shared by 2 ranks",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Both ranks' results of every case; starting a process costs more than all cases."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store), *SAME, *REFUSED],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("case", SAME)
def test_same_result_in_either_order(results, case):
    for result, queries in zip(results, SAME[case], strict=True):
        assert "refusal" not in result[case]
        # A float32 model with bfloat16 attention: 6e-4. A shard that attends to itself alone gave 4e-2.
        assert result[case]["error"] < 4e-3
        assert result[case]["queries"] == queries


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_work_is_refused_by_name(results, case):
    for result in results:
        assert REFUSED[case] in result[case]["refusal"]


def test_only_this_packages_processors_inherit(hopper, make_model):
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor

    from diffusers_h3 import FlashInferProcessor

    model, config = make_model("wan"), object()
    for processor in model.attn_processors.values():
        processor._parallel_config = config
    model.blocks[0].attn1.set_processor(WanAttnProcessor())
    assert model.blocks[0].attn1.processor._parallel_config is None
    processor = FlashInferProcessor()
    model.blocks[0].attn1.set_processor(processor)
    assert processor._parallel_config is None
    model.set_attn_processor(processor)
    assert processor._parallel_config is config

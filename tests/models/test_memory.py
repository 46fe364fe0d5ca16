"""Peak memory of the window at the size that broke elsewhere, on fake tensors: nothing is allocated.

47 latent frames of 1,736 rows and 2,772 text rows at full width, 84,890 rows: a boolean mask over all pairs would take
7.2 GB, scores of all pairs and heads 800 GB.
"""

import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusers_h3 import HybridAttentionConfig, SequenceLayout, VDNH3Transformer3DModel
from diffusers_h3.hybrid.layout import plan_window
from diffusers_h3.ops.window_attention import window_attention


HEADS, HEAD_DIM = 56, 128
INNER = HEADS * HEAD_DIM
LAYOUT = SequenceLayout(2772 + 526 + 47 * 1736, 2772, 2772 + 526, 47, (56, 31))


class TensorMemory(TorchDispatchMode):
    """Follow the bytes of every storage that is made, and the largest tensor."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            self.largest = max(self.largest, leaf.numel())
            storage = leaf.untyped_storage()
            if storage._cdata in known or storage in self._storages:
                continue
            self._storages.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, count):
        self.live -= count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_window_gathers_one_group_at_a_time(dtype):
    groups = plan_window(HybridAttentionConfig(), LAYOUT.num_frames)
    with FakeTensorMode(), torch.no_grad():
        query, key, value = (torch.empty(1, LAYOUT.seq_len, HEADS, HEAD_DIM, dtype=dtype) for _ in range(3))
        with TensorMemory() as memory:
            output = window_attention(
                query,
                key,
                value,
                groups,
                lambda query, key, value: torch.nn.functional.scaled_dot_product_attention(
                    query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
                ).transpose(1, 2),
                backend="sdpa",
                rows=LAYOUT.rows,
            )
    assert output.shape == query.shape
    assert memory.largest == LAYOUT.seq_len * INNER

    def rows(ranges):
        return sum(stop - start for start, stop in (LAYOUT.rows(*frames) for frames in ranges))

    # A group has its gathered query, key and value, its result with the log-sum-exp, and the result before it.
    itemsize = dtype.itemsize
    group_bytes = max(
        (rows(queries) + 2 * (rows(keys) if len(keys) > 1 else 0) + 2 * rows(queries)) * INNER * itemsize
        + rows(queries) * HEADS * 4
        for queries, keys in groups
    )
    output_bytes = LAYOUT.seq_len * INNER * itemsize
    assert output_bytes < memory.peak <= output_bytes + group_bytes
    # Gathered keys are those of three chunks, not of the clip.
    assert group_bytes < 1.5 * output_bytes


def test_a_full_size_layer_makes_no_tensor_over_pairs_of_rows():
    # Built on the meta device, since drawing weights one by one is slow on fake tensors.
    with torch.device("meta"):
        model = VDNH3Transformer3DModel(num_layers=1, num_refiner_layers=1)
    attn = model.transformer_blocks[0].attn.eval()
    with FakeTensorMode(), torch.no_grad():
        for module in attn.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    dtype = torch.float32 if name in ("A_log", "dt_bias") else torch.bfloat16
                    module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
        hidden_states = torch.empty(1, LAYOUT.seq_len, 5376, dtype=torch.bfloat16)
        rotary = tuple(torch.empty(LAYOUT.seq_len, 96) for _ in range(2))
        with TensorMemory() as memory:
            output = attn(hidden_states, (*rotary, LAYOUT))
    assert output.shape == hidden_states.shape
    # The temporal convolution pads the branch's 45 frames by two on either side; nothing is larger than that.
    assert memory.largest <= max(LAYOUT.seq_len, (45 + 4) * 1736) * INNER
    # Query, key and value, the input, and what one step of the branch holds in float32: 15 tensors of rows × channels
    # in bfloat16 all told. A single mask over pairs of rows would add 6.
    assert memory.peak < 18 * LAYOUT.seq_len * INNER * 2


def test_the_recorder_sees_a_mask_over_pairs():
    """The bound above would catch what it is there for."""
    with FakeTensorMode(), torch.no_grad():
        with TensorMemory() as memory:
            torch.ones(LAYOUT.seq_len, LAYOUT.seq_len, dtype=torch.bool)
        assert memory.peak == LAYOUT.seq_len**2
        assert memory.largest > 10 * max(LAYOUT.seq_len, (45 + 4) * 1736) * INNER
        assert memory.live == 0

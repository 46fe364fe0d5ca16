"""The golden layers through the processor with every kernel in its place, window included."""

import json
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention
from safetensors import safe_open
from safetensors.torch import load_file

from diffusers_h3 import HybridAttentionConfig, HybridAttnProcessor, SequenceLayout
from diffusers_h3.hybrid.branch import SoftmaxGate, VideoDeltaAttention
from diffusers_h3.ops import delta_rule, short_conv
from diffusers_h3.ops.delta_rule import triton as delta_rule_kernels
from diffusers_h3.ops.short_conv import triton as short_conv_kernels


GOLDEN = Path(__file__).parents[2] / "golden"

FEATURES = {"_convolved_features_kernel", "_pointwise_features_kernel"}
STATISTICS = FEATURES | {"_frame_statistics_kernel", "_delta_factors_kernel"}
BRANCH = STATISTICS | {"_scan_kernel", "_bridge_states_kernel", "_readout_kernel"}
LAYERS = {
    "released": BRANCH | {"_merge_two_kernel"},
    "anchors_none_short_text": BRANCH | {"_merge_two_kernel"},
    "frame_window_vdn_scaled": BRANCH | {"_merge_two_kernel"},
    "full_cover": set(),
}
# Kernels that are slow to interpret and do the same in every layer: `released` runs them, and layers named here take
# the reference instead. The scaled rule has factors of its own.
LEFT_OUT = {
    "anchors_none_short_text": FEATURES | {"_delta_factors_kernel"},
    "frame_window_vdn_scaled": FEATURES,
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, launches, monkeypatch):
    # A pixel a thread is quicker to interpret; `kernels_short_conv` has the tiles that are used.
    tile = short_conv_kernels.Tile(1, 1, 4)
    monkeypatch.setattr(short_conv_kernels, "TILES", dict.fromkeys((True, False), tile))
    left_out = LEFT_OUT.get(name, set())
    if left_out >= FEATURES:
        monkeypatch.setattr(short_conv, "use_triton", lambda *tensors: False)
    if "_delta_factors_kernel" in left_out:
        monkeypatch.setattr(delta_rule_kernels, "delta_factors", delta_rule.reference.solve_factors)
    path = GOLDEN / f"layer_{name}.safetensors"
    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
    tensors = load_file(path)
    config = HybridAttentionConfig.from_dict(case["transform"])
    attn = MiniMaxH3Attention(
        case["hidden_size"], case["heads"], case["head_dim"], processor=HybridAttnProcessor(backend="torch_flash")
    )
    attn.linear_attention = VideoDeltaAttention(case["hidden_size"], case["heads"], config)
    attn.softmax_gate = SoftmaxGate(case["hidden_size"], case["heads"])
    attn.to_out_linear = torch.nn.Linear(attn.inner_dim, case["hidden_size"], bias=False)
    weights = {
        key.partition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(("attn.", "branch."))
    }
    attn.load_state_dict(weights)
    layout = SequenceLayout(**{**case["layout"], "grid": tuple(case["layout"]["grid"])})

    output = attn(tensors["hidden_states"].unsqueeze(0), (tensors["cos"], tensors["sin"], layout))
    assert set(launches) == LAYERS[name] - left_out
    assert (output[0] - tensors["output"]).norm() <= 5e-6 * tensors["output"].norm()

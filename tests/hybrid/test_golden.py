"""Golden vectors of an independent implementation (`tests/golden/README.md`), in float32."""

import json
from pathlib import Path

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3Attention
from safetensors import safe_open
from safetensors.torch import load_file

from diffusers_h3 import HybridAttentionConfig, HybridAttnProcessor, SequenceLayout
from diffusers_h3.hybrid.branch import SoftmaxGate, VideoDeltaAttention
from diffusers_h3.hybrid.layout import plan_branch


GOLDEN = Path(__file__).parents[1] / "golden"
LAYERS = ("released", "anchors_none_short_text", "frame_window_vdn_scaled", "full_cover")
TOLERANCE = 2e-4


def _assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= TOLERANCE * expected.norm()


def _load(name):
    path = GOLDEN / f"layer_{name}.safetensors"
    with safe_open(path, "pt") as file:
        case = json.loads(file.metadata()["case"])
    tensors = load_file(path)
    config = HybridAttentionConfig.from_dict(case["transform"])
    layout = SequenceLayout(**{**case["layout"], "grid": tuple(case["layout"]["grid"])})
    attn = MiniMaxH3Attention(case["hidden_size"], case["heads"], case["head_dim"], processor=HybridAttnProcessor())
    attn.linear_attention = VideoDeltaAttention(case["hidden_size"], case["heads"], config)
    attn.softmax_gate = SoftmaxGate(case["hidden_size"], case["heads"])
    attn.to_out_linear = torch.nn.Linear(attn.inner_dim, case["hidden_size"], bias=False)
    attn.load_state_dict(
        {
            name.removeprefix("attn.").removeprefix("branch."): tensor
            for name, tensor in tensors.items()
            if name.startswith(("attn.", "branch."))
        }
    )
    return attn.eval(), layout, tensors


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    attn, layout, expected = _load(name)
    readouts = []
    attn.linear_attention.register_forward_hook(lambda module, inputs, output: readouts.append(output))
    with torch.no_grad():
        output = attn(expected["hidden_states"].unsqueeze(0), (expected["cos"], expected["sin"], layout))
    _assert_close(output[0], expected["output"])
    if name == "full_cover":
        assert readouts == []
        assert "readout" not in expected
        return
    (readout,) = readouts
    plan = plan_branch(attn.linear_attention.config, layout.num_frames)
    start = plan.first_frame * layout.rows_per_frame
    stop = start + plan.num_frames * layout.rows_per_frame
    _assert_close(readout[0], expected["readout"][start:stop])
    assert expected["readout"][:start].abs().sum() == 0
    assert expected["readout"][stop:].abs().sum() == 0


@pytest.mark.parametrize("name", LAYERS)
def test_window(name):
    """With the gate at one and an identity in place of `to_out`, the layer shows its window."""
    attn, layout, expected = _load(name)
    torch.nn.init.zeros_(attn.softmax_gate.up.weight)
    torch.nn.init.constant_(attn.softmax_gate.up.bias, 100.0)  # a sigmoid of exactly one
    attn.to_out[0] = torch.nn.Identity()
    attn.to_out_linear = torch.nn.Linear(attn.inner_dim, attn.inner_dim, bias=False)
    torch.nn.init.zeros_(attn.to_out_linear.weight)
    with torch.no_grad():
        output = attn(expected["hidden_states"].unsqueeze(0), (expected["cos"], expected["sin"], layout))
    _assert_close(output[0].unflatten(-1, (attn.heads, -1)), expected["window"])

"""The layer against the float64 frame loop of `conftest.py`, over every axis of its configuration and its inputs."""

import random
from itertools import combinations, product

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor

from diffusers_h3 import HybridAttentionConfig, SequenceLayout


# `frames` counts from the chunk (the window's width where there are no chunks); numbers stand for themselves.
AXES = {
    "anchor_frames": ("none", "columns", "rows", "both"),
    "delta_rule": ("vdn_solve", "vdn_scaled", "sana_scaled"),
    "bridge": ("alpha", "none"),
    "short_conv_targets": ((), ("q",), ("k",), ("v",), ("q", "k"), ("k", "v"), ("q", "k", "v")),
    "chunk": (0, 1, 3, 5),
    "radius": (0, 1, 2),
    "enable_softmax_gate": (True, False),
    "enable_text_state": (True, False),
    "a_fp32": (True, False),
    "frames": (1, 2, 3, 23, "chunk-1", "chunk", "chunk+1", "2*chunk+1"),
    "text": (0, 1, 4),
    "keyframes": ((), ("first",), ("last",), ("first", "last")),
    "audio": (0, 2),
    "grid": ((5, 2), (3, 4), (1, 1), (7, 3)),
    "batch": (1, 2),
}
CONFIG_FIELDS = tuple(AXES)[:9]


def _pairs(case):
    return set(combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def _covering_cases():
    """Pick cases greedily until every pair of values of every two axes occurs in one of them."""
    generator = random.Random(0)
    missing = set()
    for (first, first_values), (second, second_values) in combinations(sorted(AXES.items()), 2):
        missing |= {((first, a), (second, b)) for a, b in product(first_values, second_values)}
    cases = []
    while missing:
        # Every candidate holds one of the missing pairs, so each round makes progress.
        wanted = sorted(missing, key=repr)
        candidates = []
        for _ in range(40):
            case = {name: generator.choice(values) for name, values in AXES.items()}
            case |= dict(generator.choice(wanted))
            candidates.append(case)
        best = max(candidates, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        cases.append(best)
    return cases


CASES = _covering_cases()

# What the axes name, with everything else as released: one deviation per case, on a clip longer than the window.
RELEASED = {
    "anchor_frames": "both",
    "delta_rule": "vdn_solve",
    "bridge": "alpha",
    "short_conv_targets": ("k", "v"),
    "chunk": 5,
    "radius": 1,
    "enable_softmax_gate": True,
    "enable_text_state": True,
    "a_fp32": True,
    "frames": 23,
    "text": 4,
    "keyframes": (),
    "audio": 2,
    "grid": (5, 2),
    "batch": 1,
}
DEVIATIONS = [
    {**RELEASED, name: value} for name, values in AXES.items() for value in values if value != RELEASED[name]
]


def _case_id(case):
    return "-".join(str(value).replace(" ", "") for value in case.values())


def _num_frames(case):
    unit = case["chunk"] or 2 * case["radius"] + 1
    named = {"chunk-1": unit - 1, "chunk": unit, "chunk+1": unit + 1, "2*chunk+1": 2 * unit + 1}
    return max(1, named.get(case["frames"], case["frames"]) if isinstance(case["frames"], str) else case["frames"])


def _relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.fixture
def compare(make_rows, make_layer, make_inputs, reference_layer, pack):
    """A function running a case in both precisions and through the reference."""

    def run(case):
        config = HybridAttentionConfig(linear_head_dim=8, **{name: case[name] for name in CONFIG_FIELDS})
        num_frames, grid = _num_frames(case), case["grid"]
        rows_per_frame = grid[0] * grid[1]
        video_start = case["text"] + len(case["keyframes"]) * rows_per_frame + 2 * case["audio"]
        seq_len = video_start + num_frames * rows_per_frame
        rows = make_rows(case["text"], video_start, num_frames, grid, seq_len)
        layout = SequenceLayout.from_indices(*pack(case["text"], num_frames, grid, case["audio"], case["keyframes"]))
        hidden_states, cos, sin = make_inputs(seq_len, case["batch"])
        outputs = {}
        for dtype in (torch.float64, torch.float32):
            attn, weights = make_layer(config, dtype)
            with torch.no_grad():
                outputs[dtype] = attn(hidden_states.to(dtype), (cos.to(dtype), sin.to(dtype), layout))
        expected = [reference_layer(config, rows, weights, item, cos, sin, attn.heads) for item in hidden_states]
        return outputs, expected

    return run


def _check(outputs, expected):
    target = torch.stack([result.output for result in expected])
    assert outputs[torch.float64].shape == target.shape
    assert _relative_error(outputs[torch.float64], target) <= 1e-9
    assert _relative_error(outputs[torch.float32], target) <= 2e-5


def test_the_cases_cover_every_pair_of_values():
    covered = set().union(*(_pairs(case) for case in CASES))
    for (first, first_values), (second, second_values) in combinations(sorted(AXES.items()), 2):
        for a, b in product(first_values, second_values):
            assert ((first, a), (second, b)) in covered


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_layer_equals_the_frame_loop(case, compare):
    _check(*compare(case))


@pytest.mark.parametrize("case", DEVIATIONS, ids=_case_id)
def test_one_deviation_from_the_released_layer_equals_the_frame_loop(case, compare):
    _check(*compare(case))


@pytest.mark.parametrize("anchor_frames", ["none", "both"])
def test_the_branch_counts(anchor_frames, compare):
    """Guards the comparisons above: a branch of no weight would make them blind to it."""
    outputs, (result,) = compare({**RELEASED, "anchor_frames": anchor_frames})
    _check(outputs, [result])
    carried = result.readout.unflatten(0, (23, 10)).norm(dim=(1, 2))
    empty = [0, 22] if anchor_frames == "both" else []
    assert [frame for frame in range(23) if carried[frame] == 0] == empty
    assert result.readout.norm() > 0.1 * result.window.norm()


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("num_frames", [1, 2, 7, 10])
def test_full_cover_is_dense_attention_and_never_calls_the_branch(num_frames, gate, make_layer, make_inputs, pack):
    """Every frame's bounds reach over the clip: one dense attention of all rows, times the gate."""
    config = HybridAttentionConfig(linear_head_dim=8, enable_softmax_gate=gate)
    attn, _ = make_layer(config)
    layout = SequenceLayout.from_indices(*pack(num_frames=num_frames))
    called = []
    branch_modules = [*attn.linear_attention.modules(), attn.to_out_linear]
    handles = [module.register_forward_hook(lambda module, *_: called.append(module)) for module in branch_modules]
    hidden_states, cos, sin = (states.double() for states in make_inputs(layout.seq_len, 2))
    with torch.no_grad():
        output = attn(hidden_states, (cos, sin, layout))
        assert called == []
        # A window of radius 1 covers two chunks of frames at most; the eleventh frame turns the branch on.
        layout = SequenceLayout.from_indices(*pack(num_frames=11))
        longer, cos_longer, sin_longer = (states.double() for states in make_inputs(layout.seq_len))
        attn(longer, (cos_longer, sin_longer, layout))
        assert set(called) == set(branch_modules)
        for handle in handles:
            handle.remove()

        query, key, value = (
            projection(hidden_states).unflatten(-1, (3, -1)) for projection in (attn.to_q, attn.to_k, attn.to_v)
        )
        query, key = attn.norm_q(query), attn.norm_k(key)

        def rotate(states):
            first, second, rest = states[..., :3], states[..., 3:6], states[..., 6:]
            c, s = cos[:, None, :3], sin[:, None, :3]
            return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)

        weights = torch.einsum("bthd,bshd->bhts", rotate(query), rotate(key)) / 8**0.5
        dense = torch.einsum("bhts,bshd->bthd", weights.softmax(-1), value)
        if gate:
            dense = dense * torch.sigmoid(attn.softmax_gate.up(hidden_states)).unsqueeze(-1)
        expected = attn.to_out[0](dense.flatten(2))
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        if not gate:
            attn.set_processor(MiniMaxH3AttnProcessor())
            assert torch.equal(output, attn(hidden_states, (cos, sin)))


def test_two_frames_between_anchors_read_nothing(make_layer, make_inputs, pack):
    """Under `both` a two-frame clip leaves the branch no frame, also where the window does not cover it."""
    config = HybridAttentionConfig(linear_head_dim=8, chunk=1, radius=0)
    attn, _ = make_layer(config)
    layout = SequenceLayout.from_indices(*pack(num_frames=2))
    hidden_states, cos, sin = (states.double() for states in make_inputs(layout.seq_len))
    attn.linear_attention.register_forward_hook(lambda *_: pytest.fail("the branch has no frame to run over"))
    with torch.no_grad():
        both = attn(hidden_states, (cos, sin, layout))
        # Rows of anchors see everything and all see anchors: the same as a window over both frames.
        dense, _ = make_layer(HybridAttentionConfig(linear_head_dim=8, chunk=2, radius=0))
        torch.testing.assert_close(both, dense(hidden_states, (cos, sin, layout)), rtol=1e-12, atol=1e-12)


def test_batch_items_do_not_mix(make_layer, make_inputs, pack):
    attn, _ = make_layer(HybridAttentionConfig(linear_head_dim=8, chunk=1))
    layout = SequenceLayout.from_indices(*pack(num_frames=9))
    hidden_states, cos, sin = (states.double() for states in make_inputs(layout.seq_len, 3))
    with torch.no_grad():
        together = attn(hidden_states, (cos, sin, layout))
        alone = torch.cat([attn(item.unsqueeze(0), (cos, sin, layout)) for item in hidden_states])
    torch.testing.assert_close(together, alone, rtol=1e-11, atol=1e-11)
    assert (together[0] - together[1]).norm() > 1.0


def test_branch_refuses_a_covered_clip(make_layer, make_inputs, pack):
    attn, _ = make_layer(HybridAttentionConfig(linear_head_dim=8))
    layout = SequenceLayout.from_indices(*pack(num_frames=7))
    states = torch.zeros(1, layout.seq_len, 20, dtype=torch.float64)
    projected = torch.zeros(1, layout.seq_len, 24, dtype=torch.float64)
    with pytest.raises(ValueError, match="covers all 7 frames"):
        attn.linear_attention(states, projected, projected, projected, layout)


def test_folded_scan_equals_the_frame_loop_inside_the_branch(make_layer, make_inputs, pack):
    attn, _ = make_layer(HybridAttentionConfig(linear_head_dim=8, chunk=3))
    layout = SequenceLayout.from_indices(*pack(num_frames=17, text=5))
    hidden_states, _, _ = make_inputs(layout.seq_len)
    hidden_states = hidden_states.double()
    with torch.no_grad():
        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        folded = attn.linear_attention(hidden_states, query, key, value, layout, folded=True)
        walked = attn.linear_attention(hidden_states, query, key, value, layout, folded=False)
    assert folded.shape == (1, 15 * 6, 24)
    torch.testing.assert_close(folded, walked, rtol=1e-11, atol=1e-11)

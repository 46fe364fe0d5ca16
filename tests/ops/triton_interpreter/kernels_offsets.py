"""Offsets past 2³¹: the last program of launches whose tensors have more elements than 32 bits can count.

The tensors are allocated and never written but where the last program reads, so the memory behind them stays virtual.
The interpreter computes 32-bit offsets in 32 bits, as a card does: one that wraps lands outside the tensor.
"""

import pytest
import torch
from triton.runtime import interpreter

from diffusers_h3.ops import delta_rule, frame_statistics, linear_state, short_conv
from diffusers_h3.ops.window_attention.merge import merge_gated


EDGE = 2**31
GRID = (24, 42)
FRAMES, ROWS, HEADS, DIM = 300, 1008, 56, 128
# Statistics and states pass the edge by their heads, so that a scan has few frames to walk.
STATE_FRAMES, STATE_HEADS = 5, 27_000


@pytest.fixture(autouse=True)
def _poisoned():
    """Leave allocations untouched here: gigabytes of NaN would not stay virtual."""


@pytest.fixture(autouse=True)
def _last_program_only(monkeypatch):
    """Run one program, with the index of the last one of the grid."""
    builder = interpreter.interpreter_builder
    original = interpreter.GridExecutor.__call__

    def call(self, *arguments, **options):
        last = tuple(count - 1 for count in (*self.grid, 1, 1)[:3])
        monkeypatch.setattr(builder, "set_grid_idx", lambda *_: setattr(builder, "grid_idx", last))
        self.grid = (1, 1, 1)
        return original(self, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
    # Tensors of the CPU are used in place; copying them back onto themselves would write every page.
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)


def _rows(*shape, dtype=torch.bfloat16):
    rows = torch.empty(shape, dtype=dtype)
    assert rows.numel() > EDGE
    return rows


def _matrices():
    return _rows(1, STATE_FRAMES, STATE_HEADS, DIM, DIM, dtype=torch.float32)


def _assert_close(actual, exact, limit=1e-5):
    assert exact.norm() > 0
    assert (actual.double() - exact).norm() <= limit * exact.norm()


@pytest.mark.parametrize(("heads", "packed"), [(3400, 1), (1200, 3)])
def test_convolved_features(heads, packed, draw):
    """As rows of their own, so that the output passes the edge as well, and as the last third of a projection.

    The last program walks all frames of the last rows and columns.
    """
    features, channels = _rows(1, 5, ROWS, packed * heads * DIM)[..., -heads * DIM :], heads * DIM
    spatial, temporal = (torch.empty(channels, 1, *size, dtype=torch.bfloat16) for size in ((5, 5), (5,)))
    for rows in (features, spatial.movedim(0, -1), temporal.movedim(0, -1)):
        rows[..., -DIM:] = draw(*rows.shape[:-1], DIM).bfloat16()
    output = short_conv.convolved_features(features, spatial, temporal, GRID, heads, True)
    corner = (features[..., -DIM:].double(), spatial[-DIM:].double(), temporal[-DIM:].double())
    exact = short_conv.convolved_features(*corner, GRID, 1, True)
    output, exact = (rows[:, :, :, -1].unflatten(2, GRID)[:, :, -2:, -2:] for rows in (output, exact))
    _assert_close(output, exact, 2**-8)


@pytest.mark.parametrize("packed", [False, True])
def test_pointwise_features(packed, draw):
    channels = HEADS * DIM
    features = _rows(1, 102, ROWS, 3 * channels)[..., 2 * channels :] if packed else _rows(1, FRAMES, ROWS, channels)
    features[:, -1, -16:, -DIM:] = draw(1, 16, DIM).bfloat16()
    output = short_conv.pointwise_features(features, HEADS, True)
    exact = short_conv.pointwise_features(features[:, -1:, -16:, -DIM:].double(), 1, True)
    _assert_close(output[:, -1:, -16:, -1:], exact, 2**-8)


def test_frame_statistics_inputs(draw):
    packed = _rows(1, 102, ROWS, 3 * HEADS * DIM).unflatten(-1, (3, HEADS, DIM))
    packed[:, -1, :, 1:, -1] = draw(1, ROWS, 2, DIM).bfloat16()
    key, value = packed[:, :, :, 1], packed[:, :, :, 2]
    beta = torch.sigmoid(draw(1, 102, ROWS, HEADS)).bfloat16()
    gram, cross = frame_statistics.frame_statistics(key, value, beta)
    corner = (rows[:, -1:, :, -1:].double() for rows in (key, value, beta))
    exact_gram, exact_cross = frame_statistics.frame_statistics(*corner)
    _assert_close(gram[:, -1:, -1:], exact_gram)
    _assert_close(cross[:, -1:, -1:], exact_cross)


def test_frame_statistics_outputs(draw):
    key, value = (draw(1, STATE_FRAMES, 3, 1, DIM).bfloat16() for _ in range(2))
    beta = torch.sigmoid(draw(1, STATE_FRAMES, 3, 1)).bfloat16()
    exact = frame_statistics.frame_statistics(*(rows[:, -1:].double() for rows in (key, value, beta)))
    key, value = (rows.expand(-1, -1, -1, STATE_HEADS, -1) for rows in (key, value))
    results = frame_statistics.frame_statistics(key, value, beta.expand(-1, -1, -1, STATE_HEADS))
    for actual, expected in zip(results, exact, strict=True):
        assert actual.numel() > EDGE
        _assert_close(actual[:, -1:, -1:], expected)


def test_delta_factors(draw):
    gram, cross = _matrices(), _matrices()
    rows = draw(100, DIM)
    gram[0, -1, -1], cross[0, -1, -1] = (rows.T @ rows / 100).float(), draw(DIM, DIM).float()
    alpha = torch.sigmoid(draw(1, STATE_FRAMES, 1, DIM)).float().expand(-1, -1, STATE_HEADS, -1)
    results = delta_rule.delta_factors(gram, cross, alpha, "vdn_solve", ROWS)
    corner = (tensor[:, -1:, -1:].double() for tensor in (gram, cross, alpha))
    for actual, exact in zip(results, delta_rule.delta_factors(*corner, "vdn_solve", ROWS), strict=True):
        _assert_close(actual[:, -1:, -1:], exact)


@pytest.mark.parametrize("reverse", [False, True])
def test_scan(reverse, draw):
    transition, update = _matrices(), _matrices()
    for maps in (transition, update):
        maps[0, :, -1] = draw(STATE_FRAMES, DIM, DIM).float() / DIM**0.5
    initial = torch.zeros(1, STATE_HEADS, DIM, DIM)
    cuts = list(range(STATE_FRAMES + 1))
    states = delta_rule.boundary_scan(transition, update, initial, cuts, reverse)
    corner = (tensor[:, :, -1:].double() for tensor in (transition, update))
    exact = delta_rule.boundary_scan(*corner, initial[:, -1:].double(), cuts, reverse)
    # The last program of a head holds the last tile of its state's rows.
    _assert_close(states[:, :, -1:, -32:], exact[:, :, :, -32:])


def test_bridge_states(draw):
    from diffusers_h3.ops.linear_state.triton import bridge_states

    front, back = _matrices(), _matrices()
    front[0, -1, -1], back[0, -1, -1] = draw(DIM, DIM).float(), draw(DIM, DIM).float()
    log_alpha = -draw(1, STATE_FRAMES, 1, DIM).abs().float().expand(-1, -1, STATE_HEADS, -1)
    slots = [STATE_FRAMES - 1] * STATE_FRAMES
    windows = ([STATE_FRAMES - 1] * STATE_FRAMES, [STATE_FRAMES] * STATE_FRAMES)
    states = bridge_states(front, back, log_alpha, slots, slots, *windows, True)
    exact = (front[0, -1, -1].double() + back[0, -1, -1].double()) * log_alpha[0, -1, -1].double().exp()
    _assert_close(states[0, -1, -1], exact)


def test_readout_rows(draw):
    query, gate = _rows(1, FRAMES, ROWS, HEADS, DIM), _rows(1, FRAMES, ROWS, HEADS * DIM)
    states, weight = torch.empty(1, FRAMES, HEADS, DIM, DIM), draw(DIM).bfloat16()
    tile = ROWS % 64
    states[0, -1, -1] = draw(DIM, DIM).float()
    query[:, -1, -tile:, -1], gate[:, -1, -tile:, -DIM:] = draw(1, tile, DIM).bfloat16(), draw(1, tile, DIM).bfloat16()
    output = linear_state.readout(states, query, gate, weight, 1e-6)
    corner = (states[:, -1:, -1:], query[:, -1:, -tile:, -1:], gate[:, -1:, -tile:, -DIM:], weight)
    exact = linear_state.readout(*(tensor.double() for tensor in corner), 1e-6)
    _assert_close(output[:, -1:, -tile:, -DIM:], exact, 2**-7)


def test_readout_states(draw):
    states, weight = _matrices(), draw(DIM).float()
    states[0, -1, -1] = draw(DIM, DIM).float()
    query = draw(1, STATE_FRAMES, 1, 1, DIM).float().expand(-1, -1, -1, STATE_HEADS, -1)
    gate = draw(1, STATE_FRAMES, 1, STATE_HEADS * DIM).float()
    output = linear_state.readout(states, query, gate, weight, 1e-6)
    corner = (states[:, -1:, -1:], query[:, -1:, :, -1:], gate[:, -1:, :, -DIM:], weight)
    exact = linear_state.readout(*(tensor.double() for tensor in corner), 1e-6)
    _assert_close(output[:, -1:, :, -DIM:], exact)


def test_merge(draw):
    outputs = [_rows(FRAMES * ROWS, HEADS, DIM) for _ in range(3)]
    lse = [torch.empty(HEADS, FRAMES * ROWS).T for _ in range(2)]
    tile = 16
    for rows, logits in zip(outputs, lse, strict=False):
        rows[-tile:, -1], logits[-tile:, -1] = draw(tile, DIM).bfloat16(), draw(tile).float()
    merge_gated(list(zip(outputs, lse, strict=False)), None, outputs[2])
    share = torch.sigmoid(lse[0][-tile:, -1] - lse[1][-tile:, -1]).double().unsqueeze(-1)
    exact = share * outputs[0][-tile:, -1].double() + (1 - share) * outputs[1][-tile:, -1].double()
    _assert_close(outputs[2][-tile:, -1], exact, 2**-8)

"""Rows, bytes and operations against the published figures and the model itself."""

import re

import pytest
import torch

from diffusers_h3 import VDNH3Transformer3DModel
from diffusers_h3.models.quantization import FP8_LINEARS
from diffusers_h3.planning import workload
from diffusers_h3.planning.cards import find_card
from diffusers_h3.planning.workload import attention_pairs, model_seconds, resolve_clip


@pytest.fixture(scope="module")
def parameters():
    """Name, elements and bytes of every parameter of the released transformer, without storage."""
    with torch.device("meta"):
        model = VDNH3Transformer3DModel()

    def itemsize(name):
        return 4 if any(part in model._keep_in_fp32_modules for part in name.split(".")) else 2

    return [(name, weight.numel(), weight.numel() * itemsize(name)) for name, weight in model.named_parameters()]


def test_block_and_outside_bytes_are_the_models(parameters):
    first_block = sum(size for name, _, size in parameters if name.startswith("transformer_blocks.0."))
    outside = sum(size for name, _, size in parameters if not name.startswith("transformer_blocks."))
    branch = ("linear_attention", "softmax_gate", "to_out_linear")
    stock = sum(size for name, _, size in parameters if not any(part in name for part in branch))
    assert first_block == workload.BLOCK_BYTES
    assert outside == workload.OUTSIDE_BYTES
    assert stock == workload.STOCK_BYTES
    assert sum(size for *_, size in parameters) == workload.weight_bytes("bf16") == 70_560_472_480


def test_fp8_takes_one_byte_a_weight_of_the_listed_layers(parameters):
    listed = [
        (name, count)
        for name, count, _ in parameters
        if re.fullmatch(FP8_LINEARS.removeprefix("re:"), name.removesuffix(".weight"))
    ]
    assert sum(count for _, count in listed) == 50 * workload.WIDE_WEIGHTS
    # Three projections and the fused SwiGLU have their own widths, the outputs end in the hidden size.
    assert workload.WIDE_ROWS == 3 * 7168 + 2 * 14336 + 3 * 5376
    assert len(listed) == 50 * 7
    # Measured with fp8 weights: 49.41 GB, the allocator's rounding included.
    assert workload.weight_bytes("fp8") / 1e9 == pytest.approx(49.41, abs=0.1)


def test_the_largest_layer_is_adaln(parameters):
    sizes = {}
    for name, _, size in parameters:
        layer = name.rpartition(".")[0]
        sizes[layer] = sizes.get(layer, 0) + size
    largest = max(sizes, key=sizes.get)
    assert largest.endswith("adaln_proj.linear")
    assert sizes[largest] == workload.LARGEST_LAYER_BYTES


@pytest.mark.parametrize(
    ("precision", "offload", "expected"),
    [
        ("bf16", "none", 70_560_472_480),
        ("bf16", "block", 1_376_744_528 + 1_723_246_080),
        ("fp8", "block", 1_376_744_528 - 423_886_848 + 4 * 66_304 + 1_723_246_080),
        ("fp8", "leaf", 520_418_304),
    ],
)
def test_what_stays_on_the_gpu(precision, offload, expected):
    assert workload.resident_bytes(precision, offload) == expected


@pytest.mark.parametrize(
    ("frames", "latent_frames", "audio_rows", "rows"),
    [(124, 37, 414, 37_910), (345, 102, 1150, 104_166)],
)
def test_rows_of_the_measured_requests(frames, latent_frames, audio_rows, rows):
    clip = resolve_clip(768, 1344, frames, 200)
    assert (clip.latent_frames, clip.rows_per_frame, clip.audio_rows, clip.rows) == (
        latent_frames,
        1008,
        audio_rows,
        rows,
    )


def test_without_a_size_the_canvas_is_the_pipelines():
    assert resolve_clip(None, None, 124, 1) == resolve_clip(768, 1344, 124, 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((848, 1000, 124, 1), "848; nearest: 832 or 864"),
        ((768, None, 124, 1), "together"),
        ((768, 1344, 360, 1), "360, nearest: 345"),
        ((768, 1344, 81, 1), "81, nearest: 124"),
    ],
)
def test_illegal_requests_are_refused_with_the_nearest_legal_values(arguments, named):
    with pytest.raises(ValueError, match=named):
        resolve_clip(*arguments)


def test_attention_pairs_are_those_of_the_window():
    """Against every pair spelled out, on a clip of 37 frames with one row each."""
    clip = workload.Clip(32, 32, 124, 37, 1, audio_rows=2, text_rows=1)
    rows = clip.rows
    frames = [None] * 3 + list(range(37))

    def sees(query, key):
        if query is None or key is None or {query, key} & {0, 36}:
            return True
        return (query // 5 - 1) * 5 <= key <= (query // 5 + 2) * 5 - 1

    assert rows == 40
    assert attention_pairs(clip) == sum(sees(query, key) for query in frames for key in frames)


def test_attention_of_the_long_clip_is_what_was_published():
    # 0.0526 PFLOP of the window's frames and about 0.01 of anchors and global rows, one layer at 345 frames.
    clip = resolve_clip(768, 1344, 345, 200)
    assert 4 * attention_pairs(clip) * 7168 / 1e15 == pytest.approx(0.0526 + 0.0101, abs=0.002)


def test_the_model_gives_the_call_it_was_fitted_to():
    clip = resolve_clip(768, 1344, 345, 200)
    assert model_seconds(clip, "fp8", "bf16", find_card("H200").rates) == pytest.approx(9.82, rel=0.02)

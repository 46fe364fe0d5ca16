import math

import pytest

from diffusers_h3.planning.cards import Card, find_card
from diffusers_h3.planning.estimate import (
    EXTRAPOLATED,
    INTERPOLATED,
    MEASURED,
    Settings,
    estimate,
    precision_refusal,
)
from diffusers_h3.planning.workload import model_seconds, resolve_clip


H200 = find_card("H200")


def clip(frames=345, text_rows=200, height=768, width=1344):
    return resolve_clip(height, width, frames, text_rows)


def test_a_measured_request_comes_back_unchanged(measured_runs, run_of):
    measured_runs(run_of(124, 4.0, 76.0), run_of(345, 12.0, 88.0))
    for frames, seconds, peak in ((124, 4.0, 76.0), (345, 12.0, 88.0)):
        found = estimate(Settings(clip(frames)), H200)
        assert found.basis == MEASURED
        assert found.seconds_per_call == pytest.approx(seconds)
        assert found.peak_gb == pytest.approx(peak)
        assert (found.weights_gb, found.available_gb, found.fits) == (70.0, 140.0, True)
        assert not found.is_lower_bound
        assert found.reasons == (
            "runs on NVIDIA H200 of 124 and 345 frames of 1344×768, bf16, attention bf16 (2026-12-02)",
        )


def test_between_two_lengths_the_cost_above_the_model_is_interpolated_in_log_log(measured_runs, run_of):
    """Runs at twice and four times the model's seconds: between them the factor is a power of the length."""
    short, long, middle = clip(124), clip(345), clip(209)
    seconds = {request: model_seconds(request, "bf16", "bf16", H200.rates) for request in (short, long, middle)}
    # Activations of 100 and 400 KB a row.
    measured_runs(
        run_of(124, 2 * seconds[short], 70 + 37_910 * 1e-4), run_of(345, 4 * seconds[long], 70 + 104_166 * 4e-4)
    )
    found = estimate(Settings(middle), H200)
    share = math.log(middle.rows / 37_910) / math.log(104_166 / 37_910)
    assert found.basis == INTERPOLATED
    assert found.seconds_per_call == pytest.approx(2 * 2**share * seconds[middle])
    assert found.activations_gb == pytest.approx(middle.rows * 1e-4 * 4**share)


def test_beyond_the_measured_lengths_cost_grows_with_the_rows(measured_runs, run_of):
    measured_runs(run_of(124, 4.0, 76.0))
    found = estimate(Settings(clip(345)), H200)
    assert found.basis == EXTRAPOLATED
    assert found.activations_gb == pytest.approx(6.0 * 104_166 / 37_910)
    # Windows at the ends are shorter, so a frame costs a little more in a long clip.
    assert 4.0 * 104_166 / 37_910 < found.seconds_per_call < 4.0 * 104_166 / 37_910 * 1.1


def test_another_canvas_is_extrapolated_though_its_rows_lie_between(measured_runs, run_of):
    measured_runs(run_of(124, 4.0, 76.0), run_of(345, 12.0, 88.0))
    found = estimate(Settings(clip(345, height=480, width=832)), H200)
    assert 37_910 < clip(345, height=480, width=832).rows < 104_166
    assert found.basis == EXTRAPOLATED


def test_more_text_than_was_measured_is_not_called_measured(measured_runs, run_of):
    measured_runs(run_of(124, 4.0, 76.0), run_of(345, 12.0, 88.0))
    assert estimate(Settings(clip(124, text_rows=300)), H200).basis == INTERPOLATED
    assert estimate(Settings(clip(345, text_rows=300)), H200).basis == EXTRAPOLATED


def test_of_two_runs_of_one_request_the_newer_counts_and_of_one_day_the_faster(measured_runs, run_of):
    old, slow, fast = (
        run_of(345, seconds, peak, date=date)
        for seconds, peak, date in ((9.0, 80.0, "2026-12-01"), (12.0, 85.0, "2026-12-05"), (11.0, 90.0, "2026-12-05"))
    )
    measured_runs(fast, slow, old)
    found = estimate(Settings(clip()), H200)
    assert (found.seconds_per_call, found.peak_gb) == (pytest.approx(11.0), pytest.approx(90.0))


def test_compiled_blocks_and_others_are_not_mixed(measured_runs, run_of):
    """Eager fp8 takes half as much memory again, so that one does not stand for the other."""
    measured_runs(run_of(124, 4.9, 77.0, compiled=False), run_of(345, 12.0, 88.0, compiled=None))
    compiled, eager = (estimate(Settings(clip(), compiled=compiled), H200) for compiled in (True, False))
    assert (compiled.basis, compiled.peak_gb) == (MEASURED, pytest.approx(88.0))
    assert "of 345 frames" in compiled.reasons[0]
    assert eager.basis == EXTRAPOLATED
    assert eager.activations_gb == pytest.approx(7.0 * 104_166 / 37_910)
    assert "of 124 (blocks not compiled) frames" in eager.reasons[0]


def test_compiled_linear_layers_are_what_offload_by_leaf_compiles(measured_runs, run_of):
    layers = {"offload": "leaf", "compiled": False, "compiled_parts": "layers"}
    measured_runs(
        run_of(345, 12.4, 19.0, 1.0, **layers),
        run_of(345, 20.0, 30.0, 1.0, **layers | {"compiled_parts": "nothing"}),
    )
    for compiled, seconds in ((True, 12.4), (False, 20.0)):
        found = estimate(Settings(clip(), offload="leaf", compiled=compiled), H200)
        assert (found.basis, found.seconds_per_call) == (MEASURED, pytest.approx(seconds))


def test_eager_blocks_that_ran_under_an_offload_alone_stand_for_those_without(measured_runs, run_of):
    """Their activations are the same; the time is no lower bound, since nothing is moved."""
    measured_runs(
        run_of(345, 10.0, 65.0, 49.4, precision="fp8"),
        run_of(345, 15.4, 32.9, 3.6, precision="fp8", offload="block", use_stream=True, compiled=False),
    )
    found = estimate(Settings(clip(), "fp8", compiled=False), H200)
    assert (found.weights_gb, found.activations_gb) == (pytest.approx(49.4, abs=0.1), pytest.approx(29.3))
    assert (found.seconds_per_call, found.is_lower_bound) == (pytest.approx(15.4), False)
    assert (found.basis, found.reasons[1]) == (EXTRAPOLATED, "no run without offload")


def test_a_table_without_eager_runs_says_so(measured_runs, run_of):
    measured_runs(run_of(345, 12.0, 88.0))
    with pytest.raises(LookupError, match="bf16 of blocks that are not compiled"):
        estimate(Settings(clip(), compiled=False), H200)


def test_dense_runs_say_nothing_about_the_hybrid_model(measured_runs, run_of):
    measured_runs(run_of(345, 33.0, 80.0, model="dense"))
    with pytest.raises(LookupError, match="bf16"):
        estimate(Settings(clip()), H200)


def test_fp8_attention_is_taken_as_bf16_until_it_is_measured(measured_runs, run_of):
    bf16 = run_of(345, 9.8, 64.0, 49.4, precision="fp8")
    measured_runs(bf16)
    wanted = Settings(clip(), "fp8", "fp8")
    found = estimate(wanted, H200)
    assert (found.basis, found.seconds_per_call) == (EXTRAPOLATED, pytest.approx(9.8))
    assert "no run with fp8 attention: taken to cost what bf16 attention does" in found.reasons

    measured_runs(bf16, run_of(345, 8.3, 64.0, 49.4, precision="fp8", attention_precision="fp8"))
    found = estimate(wanted, H200)
    assert (found.basis, found.seconds_per_call) == (MEASURED, pytest.approx(8.3))


def test_offload_keeps_part_of_the_weights_and_moves_all_of_them(measured_runs, run_of):
    measured_runs(run_of(345, 12.0, 88.0))
    block, leaf = (estimate(Settings(clip(), offload=offload), H200) for offload in ("block", "leaf"))
    # Two blocks of 1.377 GB and 1.723 GB beside them; two layers of 0.520 GB.
    assert block.weights_gb == pytest.approx(4.47674, abs=1e-4)
    assert leaf.weights_gb == pytest.approx(1.04084, abs=1e-4)
    for found in (block, leaf):
        assert found.activations_gb == pytest.approx(18.0)
        # 70.56 GB over PCIe at 64 GB/s.
        assert found.seconds_per_call == pytest.approx(12.0 + 70.56047 / 64, abs=1e-4)
        assert found.is_lower_bound
        assert found.basis == EXTRAPOLATED


def test_measured_offload_is_used_as_it_was_measured(measured_runs, run_of):
    measured_runs(run_of(345, 12.0, 88.0), run_of(345, 20.0, 24.0, 5.0, offload="block"))
    found = estimate(Settings(clip(), offload="block"), H200)
    assert (found.basis, found.seconds_per_call, found.is_lower_bound) == (MEASURED, pytest.approx(20.0), False)
    assert (found.weights_gb, found.activations_gb) == (5.0, pytest.approx(19.0))


def test_another_card_is_scaled_by_its_peaks(measured_runs, run_of):
    measured_runs(run_of(345, 12.0, 88.0))
    found = estimate(Settings(clip()), find_card("B200"))
    # 2.25 times the operations and 1.67 times the bandwidth.
    assert 12.0 * 989 / 2250 < found.seconds_per_call < 12.0 * 4800 / 8000
    assert found.basis == EXTRAPOLATED
    assert "scaled to B200 by published peaks (NVIDIA DGX B200 datasheet, one of eight)" in found.reasons
    assert found.peak_gb == pytest.approx(88.0)


def test_a_card_of_unknown_speed_has_memory_alone(measured_runs, run_of):
    measured_runs(run_of(345, 12.0, 88.0))
    for memory, fits in ((88.5, False), (89.0, True)):
        found = estimate(Settings(clip()), Card("mine", memory))
        assert (found.seconds_per_call, found.basis) == (None, EXTRAPOLATED)
        assert found.fits is fits, "one GB is the process's own"
        assert "no speed is known for mine" in found.reasons


@pytest.mark.parametrize(
    ("card", "precision", "attention", "named"),
    [
        ("A100 80GB", "fp8", "bf16", ["8.9", "A100 80GB has 8.0"]),
        ("RTX 3090", "fp8", "bf16", ["8.9", "RTX 3090 has 8.6"]),
        ("RTX 4090", "fp8", "fp8", ["fp8 attention", "9.0 alone", "RTX 4090 has 8.9"]),
        ("B200", "bf16", "fp8", ["fp8 attention", "9.0 alone", "B200 has 10.0"]),
    ],
)
def test_precisions_a_card_has_no_units_for(card, precision, attention, named):
    refusal = precision_refusal(find_card(card), precision, attention)
    for text in named:
        assert text in refusal


def test_precisions_a_card_has():
    assert precision_refusal(H200, "fp8", "fp8") is None
    assert precision_refusal(find_card("RTX 4090"), "fp8", "bf16") is None
    assert precision_refusal(find_card("A100 80GB"), "bf16", "bf16") is None
    assert precision_refusal(Card("mine", 24.0), "fp8", "fp8") is None, "nothing is known against it"
    assert "8.0 or newer, and Tesla T4 has 7.5" in precision_refusal(Card("Tesla T4", 15, (7, 5)), "bf16", "bf16")

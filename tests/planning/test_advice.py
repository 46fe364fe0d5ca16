from dataclasses import replace

import pytest

from diffusers_h3.planning.advice import alternatives
from diffusers_h3.planning.cards import Card, find_card
from diffusers_h3.planning.estimate import Settings, estimate
from diffusers_h3.planning.workload import resolve_clip


@pytest.fixture(autouse=True)
def runs(measured_runs, run_of):
    """Activations of 150 KB a row in bf16 and 120 KB in fp8."""
    measured_runs(
        run_of(345, 12.0, 70.8 + 104_166 * 1.5e-4, 70.8),
        run_of(345, 9.8, 49.4 + 104_166 * 1.2e-4, 49.4, precision="fp8"),
    )


def settings(frames=345, precision="bf16", **canvas):
    return Settings(resolve_clip(canvas.get("height", 768), canvas.get("width", 1344), frames, 200), precision)


def words(found):
    return [tuple(change.partition(" (")[0] for change in alternative.changes) for alternative in found]


def test_one_change_is_enough_on_80_gb():
    found = alternatives(settings(), find_card("H100 SXM"))
    # 79 GB leave 8.2 GB for activations, 54,666 rows: 175 frames keep to them, and 510 rows a frame (53,370 in all).
    assert words(found) == [
        ("fp8 linear layers",),
        ("group offload by block",),
        ("group offload by leaf",),
        ("175 frames",),
        ("960×544",),
    ]
    assert [alternative.settings.precision for alternative in found] == ["fp8", *["bf16"] * 4]


def test_advised_lengths_and_canvases_fit_and_the_next_larger_do_not():
    card = find_card("H100 SXM")
    *_, shorter, smaller = alternatives(settings(), card)
    assert shorter.estimate.fits
    assert not estimate(settings(192), card).fits
    assert smaller.estimate.fits
    assert (smaller.settings.clip.height, smaller.settings.clip.width) == (544, 960)
    assert not estimate(settings(height=576, width=1024), card).fits


def test_everything_advised_fits():
    for memory in (8, 12, 24, 48):
        found = alternatives(settings(), Card("mine", memory))
        assert found
        for alternative in found:
            assert alternative.estimate.fits
            assert alternative.estimate == estimate(alternative.settings, Card("mine", memory))
            assert alternative.settings != settings()


def test_fp8_is_not_advised_where_the_card_has_none():
    found = alternatives(settings(), find_card("A100 80GB"))
    assert words(found)[0] == ("group offload by block",)
    assert all(alternative.settings.precision == "bf16" for alternative in found)


def test_fp8_is_not_advised_twice():
    assert words(alternatives(settings(precision="fp8"), find_card("RTX 4090"))) == [
        ("group offload by block",),
        ("group offload by leaf",),
    ]


def test_two_changes_where_one_is_not_enough():
    # In bf16, activations alone are 15.6 GB; in fp8 12.5 GB, with two layers (1.0) beside them.
    found = alternatives(settings(), Card("mine", 14.8))
    assert words(found)[0] == ("fp8 linear layers", "group offload by leaf")
    assert all(len(alternative.changes) == 2 for alternative in found)


def test_compiling_the_blocks_is_a_change_like_any_other(measured_runs, run_of):
    measured_runs(
        run_of(345, 12.0, 86.0, 70.8),
        run_of(345, 14.0, 90.0, 70.8, compiled=False),
        run_of(345, 9.8, 65.0, 49.4, precision="fp8"),
        run_of(345, 15.0, 79.0, 49.4, precision="fp8", compiled=False),
    )
    found = alternatives(replace(settings(), compiled=False), Card("mine", 88.0))
    assert words(found)[:2] == [("compiled blocks",), ("fp8 linear layers",)]
    assert [each.settings.compiled for each in found[:2]] == [True, False]
    assert not any("compiled blocks" in changes for changes in words(alternatives(settings(), Card("mine", 80.0))))


def test_nothing_fits_a_card_without_room():
    assert alternatives(settings(), Card("mine", 1.5)) == []


def test_a_canvas_of_an_untrained_shape_has_no_smaller_one():
    wide = Settings(resolve_clip(256, 2048, 345, 200))
    found = alternatives(wide, Card("mine", 77.0))
    assert found
    assert not any("×" in change for alternative in found for change in alternative.changes)

import numpy as np
import pytest
import torch

from training import data, evaluate, recognise


def test_true_clips_are_recognised():
    """At least 99 % of colour, shape, motion, pitch and pan, on scenes of every kind."""
    scenes = [data.draw_scenes(30, seed=11), data.draw_scenes(18, seed=12, held_out=True)]
    figures = evaluate.score(clip for group in scenes for clip in evaluate.ground_truth(group))
    assert figures["clips"] == 48
    assert {name: value for name, value in figures.items() if value < 0.99} == {}


def test_what_is_not_there_is_not_recognised():
    rng = np.random.default_rng(0)
    grey = np.repeat(rng.random((60, 64, 64, 1)), 3, axis=3)
    sight = recognise.see(grey)
    assert (sight.colour, sight.shape, sight.motion) == (None, None, None)
    silence = recognise.hear(np.zeros((2, 32000)), sight.centres)
    assert silence.shape is None
    assert not silence.pan_follows
    hum = np.tile(np.sin(2 * np.pi * 100 * np.arange(32000) / 32000), (2, 1))
    assert recognise.hear(hum, sight.centres).shape is None


@pytest.mark.parametrize("wrong", ["colour", "shape", "motion", "pitch", "pan"])
def test_each_thing_that_is_wrong_is_counted(wrong):
    from dataclasses import replace

    (clip,) = evaluate.ground_truth(data.held_out_scenes()[torch.tensor([0])])
    assert (clip.colour, clip.shape, clip.motion) == ("red", "circle", "right")
    changed = {
        "colour": {"frames": clip.frames[..., ::-1]},
        "shape": {"shape": "square", "audio": clip.audio},
        "motion": {"frames": clip.frames[::-1].copy(), "audio": clip.audio[:, ::-1].copy()},
        "pitch": {"audio": np.repeat(clip.audio, 2, axis=1)[:, : clip.audio.shape[1]]},
        "pan": {"audio": clip.audio[::-1]},
    }
    figures = evaluate.score([replace(clip, **changed[wrong])])
    failed = {name for name, value in figures.items() if value == 0}
    # A square that is a circle also sounds like one, and half the speed moves the pan as well.
    expected = {"shape": {"shape", "pitch"}, "pitch": {"pitch", "pan"}}.get(wrong, {wrong})
    assert failed == expected | {"all"}

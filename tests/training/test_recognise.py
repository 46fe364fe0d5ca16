import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from training import data, evaluate, recognise, train


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


def test_the_evaluation_writes_what_the_documentation_shows(tmp_path, monkeypatch):
    """One clip for 18, as it is drawn; the dense model's are given the colours of others."""
    stages = [("dense", 50), ("hybrid", 50), ("turbo", 8)]
    made = []

    def generate(pipeline, scenes, calls, seed=0):
        made.append((pipeline, calls, len(scenes)))
        for clip in evaluate.ground_truth(scenes[:1]):
            yield replace(clip, frames=clip.frames[..., ::-1]) if pipeline == "dense" else clip

    monkeypatch.setattr(evaluate, "release_pipeline", lambda release, stage, device, cache: stage)
    monkeypatch.setattr(evaluate, "generate", generate)
    # It would change the precision of every test after this one.
    monkeypatch.setattr(train, "_open", torch.device)
    result = CliRunner().invoke(train.app, ["evaluate", str(tmp_path), "--output", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert made == [(stage, calls, 18) for stage, calls in stages for _ in range(3)]
    figures = json.loads((tmp_path / "figures.json").read_text())
    right = {"colour": 1.0, "shape": 1.0, "motion": 1.0, "pitch": 1.0, "pan": 1.0, "all": 1.0, "clips": 3}
    assert figures == {"dense": {**right, "colour": 0.0, "all": 0.0}, "hybrid": right, "turbo": right}
    assert json.loads((tmp_path / "turbo.json").read_text()) == right
    assert (tmp_path / "turbo.png").is_file()

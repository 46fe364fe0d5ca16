"""What the embedded model makes of prompts it was never trained on is recognised by geometry."""

from dataclasses import replace

import pytest
import torch

from diffusers_h3.demo.release import embedded_release
from training import data, evaluate


ATTRIBUTES = ("colour", "shape", "motion", "pitch", "pan")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Six held-out combinations: every colour, every shape twice, every motion."""
    threads = torch.get_num_threads()
    # Small tensors: more threads only wait for each other where several test processes share the cores.
    torch.set_num_threads(1)
    pipeline = evaluate.release_pipeline(
        embedded_release(), "turbo", torch.device("cpu"), tmp_path_factory.mktemp("cache")
    )
    scenes = data.held_out_scenes()[torch.tensor([0, 8, 16, 1, 9, 17])]
    clips = list(evaluate.generate(pipeline, scenes, calls=8))
    torch.set_num_threads(threads)
    return clips


def share(clips):
    """Return the share of attributes that are right, over all clips."""
    figures = evaluate.score(clips)
    return sum(figures[name] for name in ATTRIBUTES) / len(ATTRIBUTES)


@pytest.mark.slow
def test_prompts_are_held_out_and_of_every_kind(clips):
    combinations = {(clip.colour, clip.shape, clip.motion) for clip in clips}
    kinds = [set(kind) for kind in zip(*combinations, strict=True)]
    assert [len(kind) for kind in kinds] == [6, 3, 6]
    names = [data.COLOUR_NAMES, data.SHAPE_NAMES, data.MOTION_NAMES]
    indices = torch.tensor([[group.index(x) for group, x in zip(names, c, strict=True)] for c in combinations])
    assert data.is_held_out(*indices.unbind(1)).all()


@pytest.mark.slow
def test_nine_of_ten_attributes_are_recognised(clips):
    figures = evaluate.score(clips)
    assert share(clips) >= 0.9, figures
    # No attribute is wrong throughout behind the mean.
    assert min(figures[name] for name in ATTRIBUTES) >= 0.6, figures


@pytest.mark.slow
def test_clips_of_other_prompts_would_not_pass(clips):
    """The measure reads the clips: with the pictures and sounds of another prompt each, it finds them wrong."""
    others = clips[1:] + clips[:1]
    swapped = [
        replace(clip, frames=other.frames, audio=other.audio) for clip, other in zip(clips, others, strict=True)
    ]
    figures = evaluate.score(swapped)
    # The sound still follows the picture it belongs to; nothing else fits but by accident.
    assert max(figures[name] for name in ATTRIBUTES if name != "pan") < 0.35, figures
    assert share(swapped) < 0.5, figures

"""`VDNH3Pipeline` and the command line on several CPU processes under `torchrun`."""

import json

import pytest
import torch
from PIL import Image

from diffusers_h3 import VDNH3Pipeline
from diffusers_h3.demo.probe import probe_media
from diffusers_h3.pipelines.ranks import Ranks


pytestmark = pytest.mark.slow

SMALL = {"prompt": "a red fox", "height": 64, "width": 64, "num_inference_steps": 2, "force_num_inference_steps": True}
LATENTS = {**SMALL, "output_type": "latent"}


@pytest.fixture(scope="module")
def folder(tiny_release, tmp_path_factory):
    """The tiny 8-step overlay as a pipeline folder; its transformer has three heads."""
    from diffusers_h3 import load_overlay, materialize_overlay

    overlay = load_overlay(str(tiny_release / "stage-dmd-step-250"))
    return materialize_overlay(overlay, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def keyframes():
    return {
        "image": Image.new("RGB", (80, 64), (200, 40, 40)),
        "last_image": Image.new("RGB", (64, 64), (20, 90, 200)),
    }


@pytest.fixture(scope="module", params=[2])
def clips(request, folder, keyframes, torchrun, tmp_path_factory):
    """What every rank made of every request, and the file of the first."""
    place = tmp_path_factory.mktemp("clips")
    requests = {
        "text": {**LATENTS, "seed": 7},
        "longer-text": {**LATENTS, "prompt": "a red fox in the snows", "seed": 7},
        "keyframes": {**LATENTS, **keyframes, "seed": 7},
        "own-seeds": {**LATENTS, "seed": None},
        "decoded": {**SMALL, "output_type": "np", "seed": 7},
        "other-prompts": {**LATENTS, "seed": 7, "by_rank": {"prompt": ["a fox", "a bear"]}},
        "other-images": {**LATENTS, "seed": 7, "by_rank": {"image": [keyframes["image"], Image.new("RGB", (80, 64))]}},
    }
    torch.save(requests, place / "requests")
    finished = torchrun(request.param, "whole_clips.py", folder, place / "requests", place / "results")
    assert finished.returncode == 0, finished.stderr
    return place, [torch.load(place / f"results.{rank}", weights_only=False) for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone(folder, keyframes):
    """What one process makes."""
    pipeline = VDNH3Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)

    def make(**request):
        output = pipeline(**{**LATENTS, **request}, generator=torch.Generator().manual_seed(7))
        return output.frames, output.audio

    return {
        "text": make(),
        "longer-text": make(prompt="a red fox in the snows"),
        "keyframes": make(**keyframes),
        "decoded": make(output_type="np"),
    }


@pytest.mark.parametrize("name", ["text", "longer-text", "keyframes"])
def test_a_seed_gives_the_latents_of_one_process_on_every_rank(name, clips, alone):
    for made in clips[1]:
        for actual, expected in zip(made[name], alone[name], strict=True):
            assert (actual - expected).norm() <= 2e-5 * expected.norm()


def test_keyframes_are_not_ignored(alone):
    video, _ = alone["text"]
    assert (alone["keyframes"][0] - video).norm() > 0.01 * video.norm()


def test_without_a_generator_the_ranks_share_one_noise(clips, alone):
    first, *others = (made["own-seeds"] for made in clips[1])
    for made in others:
        assert torch.equal(made[0], first[0])
        assert torch.equal(made[1], first[1])
    assert not torch.equal(first[0], alone["text"][0])


def test_the_first_rank_alone_decodes_and_saves(clips, alone):
    place, (first, *others) = clips
    frames, audio = first["decoded"]
    assert abs(frames - alone["decoded"][0]).max() < 1e-3
    assert audio.shape == alone["decoded"][1].shape
    assert [made["decoded"] for made in others] == [(None, None)] * len(others)
    assert [path.name for path in place.glob("*.mp4")] == ["results.0.mp4"]
    assert probe_media(place / "results.0.mp4").frames == 124


@pytest.mark.parametrize(("name", "argument"), [("other-prompts", "prompt"), ("other-images", "image")])
def test_ranks_asked_for_different_videos_are_told_which_argument_differs(name, argument, clips):
    for made in clips[1]:
        assert f"different videos: `{argument}` must be the same on every rank" in made[name]


def test_the_command_line_makes_one_clip_with_both_processes(folder, torchrun, tmp_path):
    output = tmp_path / "fox.mp4"
    size = ("--height", 64, "--width", 64, "--device", "cpu", "--seed", 7, "--steps", 2, "--force-steps", "--json")
    finished = torchrun(2, "diffusers_h3", "generate", "a red fox", "--overlay", folder, "-o", output, *size)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["output"] == str(output)
    assert probe_media(output).frames == 124
    assert [path.name for path in tmp_path.iterdir()] == ["fox.mp4"]


def test_a_killed_process_ends_the_job_with_one_message(folder, torchrun, tmp_path):
    """The second process dies in its second step, without a word; the first one waits for its rows."""
    output = tmp_path / "fox.mp4"
    size = ("--height", 64, "--width", 64, "--device", "cpu")
    finished = torchrun(2, "killed_rank.py", "generate", "a red fox", "--overlay", folder, "-o", output, *size)
    assert finished.returncode != 0
    assert list(tmp_path.iterdir()) == []
    *_, cause = finished.stderr.partition("Root Cause")
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause
    # `torchrun` ends the first process as soon as it sees the other's end, maybe in the middle of this line.
    message = "error: Another process of this job ended or stopped answering"
    errors = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) <= 1
    assert all(message.startswith(line[: len(message)]) for line in errors)


class _Lost(torch.distributed.DistBackendError):
    pass


@pytest.mark.parametrize(
    "error", [RuntimeError("[/gloo/transport/tcp/pair.cc:545] Read error: Connection reset by peer"), _Lost("NCCL")]
)
def test_a_lost_process_is_named_as_the_cause(error):
    ranks = Ranks.__new__(Ranks)
    ranks._group = object()
    with pytest.raises(RuntimeError, match="Another process of this job ended or stopped answering"), ranks.together():
        raise error
    with pytest.raises(RuntimeError, match="out of memory"), ranks.together():
        raise RuntimeError("CUDA out of memory")
    ranks._group = None
    with pytest.raises(type(error)) as raised, ranks.together():
        raise error
    assert raised.value is error

"""`generate --prompts`: what is refused, what is made once, and what a run that ended early leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_h3.cli.batch import Batch
from diffusers_h3.cli.console import UsageError
from diffusers_h3.cli.prompts_file import read_clips
from diffusers_h3.cli.results_file import Results
from diffusers_h3.cli.weights import Running
from diffusers_h3.demo.probe import probe_media


DEFAULTS = {
    "seed": 0,
    "image": None,
    "last_image": None,
    "height": 64,
    "width": 64,
    "num_frames": 124,
    "num_inference_steps": None,
}
SMALL = ("--height", "64", "--width", "64", "--device", "cpu")


@pytest.fixture
def write(tmp_path):
    """A function writing a prompts file of one object, or text as it is, a line."""

    def write(*lines, name="clips.jsonl"):
        path = tmp_path / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n")
        return path

    return write


@pytest.fixture
def start(run, folder, tmp_path):
    """A function running a batch of the tiny release into the folder `out`."""

    def start(path, *options):
        return run("generate", "--prompts", path, "--out", tmp_path / "out", "--overlay", folder, *SMALL, *options)

    return start


@pytest.fixture
def pipeline_class():
    from diffusers_h3 import VDNH3Pipeline

    return VDNH3Pipeline


@pytest.fixture
def requests(pipeline_class, monkeypatch):
    """The requests generated, each answered with four grey frames instead of a video."""
    from diffusers_h3 import VDNH3PipelineOutput

    made = []

    def answer(self, **request):
        made.append(request | {"seed": request["generator"].initial_seed()})
        return VDNH3PipelineOutput(np.full((1, 4, 64, 64, 3), 0.5, np.float32), torch.zeros(1, 2, 5333), 32000)

    monkeypatch.setattr(pipeline_class, "__call__", answer)
    return made


@pytest.fixture
def encoded(pipeline_class, monkeypatch):
    """The prompts encoded."""
    prompts = []
    encode = pipeline_class.encode_prompt

    def count(self, prompt, *arguments):
        prompts.append(prompt)
        return encode(self, prompt, *arguments)

    monkeypatch.setattr(pipeline_class, "encode_prompt", count)
    return prompts


def _records(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def _statuses(folder):
    return {record["file"]: record["status"] for record in _records(folder)}


# How far two encodings of the same frames may lie apart, in steps of 1/255: x264's threads do not repeat themselves.
_ENCODINGS = 0.5


def _distance(first, second):
    """Return the mean distance of the pixels of two clips, in steps of 1/255."""
    clips = []
    for path in (first, second):
        with av.open(str(path)) as container:
            clips.append(np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]))
    return float(np.abs(clips[0].astype(float) - clips[1]).mean())


def _files(folder):
    """What is in a folder beside the manifest and its lock."""
    return sorted(path.name for path in folder.iterdir() if path.name not in ("results.jsonl", ".results.lock"))


WRONG_LINES = {
    "not JSON": ("{prompt: fox}", ["valid JSON"]),
    "no object": ('"fox"', ["JSON object", '"fox"']),
    "unknown keys": ({"prompt": "x", "colour": "red", "fps": 24}, ["'colour'", "'fps'", "num_frames"]),
    "key twice": ('{"prompt": "x", "prompt": "y"}', ["'prompt'", "more than once"]),
    "no prompt": ({"seed": 3}, ["`prompt`", "`image`"]),
    "empty prompt": ({"prompt": "  "}, ["`prompt`"]),
    "several prompts": ({"prompt": ["x", "y"]}, ["`prompt`", "text"]),
    "seed of text": ({"prompt": "x", "seed": "7"}, ["`seed`", '"7"', "integer"]),
    "true as a seed": ({"prompt": "x", "seed": True}, ["`seed`", "true"]),
    "fraction of frames": ({"prompt": "x", "num_frames": 124.5}, ["`num_frames`", "124.5"]),
    "negative seed": ({"prompt": "x", "seed": -1}, ["`seed`", "-1"]),
    "huge seed": ({"prompt": "x", "seed": 2**63}, ["`seed`", "2^63"]),
    "no steps": ({"prompt": "x", "num_inference_steps": 0}, ["`num_inference_steps`", "0"]),
    "size between": ({"prompt": "x", "height": 848, "width": 1000}, ["`height`", "848", "832", "864"]),
    "too short": ({"prompt": "x", "num_frames": 81}, ["`num_frames`", "81", "124"]),
    "no image": ({"prompt": "x", "image": "absent.png"}, ["`image`", "absent.png"]),
    "text as image": ({"prompt": "x", "last_image": "clips.jsonl"}, ["`last_image`", "clips.jsonl"]),
    "id of nothing": ({"prompt": "x", "id": "../"}, ["`id`", "'../'"]),
    "empty id": ({"prompt": "x", "id": ""}, ["`id`"]),
    "id too long": ({"prompt": "x", "id": "x" * 201}, ["`id`", "200"]),
}


@pytest.mark.parametrize(("line", "named"), WRONG_LINES.values(), ids=WRONG_LINES)
def test_a_wrong_line_is_named_before_anything_is_made(run, write, tmp_path, line, named):
    path = write({"prompt": "fine"}, line)
    finished = run("generate", "--prompts", path, "--out", tmp_path / "out", "--device", "cpu")
    assert (finished.code, finished.out) == (2, "")
    message, hint = finished.error_lines
    assert message.startswith(f"error: {path} line 2: ")
    assert hint == "Try 'diffusers-h3 generate --help'."
    for text in named:
        assert text in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["clips.jsonl"]


def test_all_wrong_lines_are_named_at_once(write):
    path = write({"prompt": ""}, {"prompt": "fine"}, *[{"seed": -1}] * 12)
    with pytest.raises(UsageError) as caught:
        read_clips(path, DEFAULTS)
    lines = caught.value.message.splitlines()
    assert [line.split(": ")[0] for line in lines[:-1]] == [f"{path} line {n}" for n in (1, *range(3, 12))]
    assert lines[-1] == "and 3 more"


COLLISIONS = {
    "equal ids": ({"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}, "x.mp4"),
    "equal when sanitised": ({"prompt": "a", "id": "a/b"}, {"prompt": "b", "id": "a b"}, "a-b.mp4"),
    "equal but for case": ({"prompt": "a", "id": "Fox"}, {"prompt": "b", "id": "fox"}, "fox.mp4"),
    "composed and decomposed": ({"prompt": "a", "id": "é"}, {"prompt": "b", "id": "e\u0301"}, "é.mp4"),
    "the same clip": ({"prompt": "a"}, {"prompt": "a", "seed": 0}, "the same as line 1"),
}


@pytest.mark.parametrize(("first", "second", "named"), COLLISIONS.values(), ids=COLLISIONS)
def test_two_clips_for_one_file_are_refused(write, first, second, named):
    path = write(first, second)
    with pytest.raises(UsageError, match="line 2: ") as caught:
        read_clips(path, DEFAULTS)
    assert named in caught.value.message
    assert "line 1" in caught.value.message


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("fox", "fox.mp4"),
        ("Scene 1: the fox", "Scene-1-the-fox.mp4"),
        ("../../etc/passwd", "etc-passwd.mp4"),
        (".hidden", "hidden.mp4"),
        ("雪の狐", "雪の狐.mp4"),
        ("a\nb\0c", "a-b-c.mp4"),
    ],
)
def test_an_id_becomes_a_file_name(write, given, file):
    (clip,) = read_clips(write({"prompt": "x", "id": given}), DEFAULTS)
    assert (clip.id, clip.file) == (given, file)


def test_a_name_without_id_follows_the_settings_and_not_the_line(write):
    prompt = "A red fox, running: through fresh snow at dawn"
    (alone,) = read_clips(write({"prompt": prompt}), DEFAULTS)
    _, moved, other = read_clips(write({"prompt": "y"}, {"prompt": prompt}, {"prompt": prompt, "seed": 1}), DEFAULTS)
    assert alone.file == moved.file
    assert alone.file != other.file
    assert alone.file.startswith("a-red-fox-running-through-fresh-")
    (long,) = read_clips(write({"prompt": "狐" * 400}), DEFAULTS)
    assert len(long.file.encode()) < 100


def test_lines_take_defaults_and_leave_them(write, tmp_path):
    path = write(
        {"prompt": "a", "seed": None},
        "",
        {"prompt": "b", "seed": 5, "height": 96, "width": 128, "num_frames": 141, "num_inference_steps": 4, "id": "b"},
    )
    first, second = read_clips(path, {**DEFAULTS, "seed": 9, "num_inference_steps": 8})
    assert (first.line, first.seed, first.height, first.width, first.num_frames) == (1, 9, 64, 64, 124)
    assert first.num_inference_steps == 8
    assert (second.line, second.seed, second.height, second.width, second.num_frames) == (3, 5, 96, 128, 141)
    assert second.num_inference_steps == 4


def test_images_are_beside_the_prompts(write, tmp_path, monkeypatch):
    Image.new("RGB", (64, 128), "red").save(tmp_path / "red.png")
    path = write({"prompt": "x", "image": "red.png"})
    monkeypatch.chdir("/")
    (clip,) = read_clips(path, {**DEFAULTS, "height": None, "width": None})
    assert clip.image == tmp_path / "red.png"
    # The canvas has the keyframe's shape.
    assert (clip.height, clip.width) == (1440, 704)
    before = clip.settings["image"]
    Image.new("RGB", (64, 128), "blue").save(tmp_path / "red.png")
    (changed,) = read_clips(path, {**DEFAULTS, "height": None, "width": None})
    assert changed.settings["image"] != before


def test_text_holds_a_prompt_a_line(write):
    clips = read_clips(write("\ufeffA fox.", "", '  {"prompt": "x"}  ', name="clips.txt"), DEFAULTS)
    assert [(clip.line, clip.prompt) for clip in clips] == [(1, "A fox."), (3, '{"prompt": "x"}')]


WRONG_CALLS = {
    "prompt and prompts": ("x --prompts {}/good.txt --out {}/out", ["PROMPT", "--prompts", "both"]),
    "no folder": ("--prompts {}/good.txt", ["--out"]),
    "output": ("--prompts {}/good.txt --out {}/out --output x.mp4", ["--output", "--out"]),
    "folder of one clip": ("x --out {}/out", ["--out", "--prompts", "--output"]),
    "another ending": ("--prompts {}/good.csv --out {}/out", [".jsonl", ".txt", "good.csv"]),
    "no file": ("--prompts {}/absent.txt --out {}/out", ["absent.txt"]),
    "empty file": ("--prompts {}/empty.jsonl --out {}/out", ["empty.jsonl", "no prompt"]),
    "not UTF-8": ("--prompts {}/latin.txt --out {}/out", ["latin.txt"]),
    "folder below a file": ("--prompts {}/good.txt --out {}/good.txt/out", ["--out", "not a folder"]),
    "folder is a file": ("--prompts {}/good.txt --out {}/good.txt", ["--out", "not a folder"]),
    "a file of the user's": ("--prompts {}/fox.jsonl --out {}/mine", ["fox.mp4", "line 1", "--overwrite"]),
    "another manifest": ("--prompts {}/good.txt --out {}/other", ["results.jsonl line 1", "--out"]),
    "steps of other weights": ("--prompts {}/steps.jsonl --out {}/out", ["steps.jsonl line 1", "30", "--force-steps"]),
    "steps of all lines": ("--prompts {}/good.txt --out {}/out --steps 30", ["good.txt line 1", "30", "8"]),
    "seed of all lines": ("--prompts {}/good.txt --out {}/out --seed -1", ["--seed", "-1"]),
}


@pytest.mark.parametrize(("line", "named"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_code_2(run, tmp_path, line, named):
    (tmp_path / "good.txt").write_text("A fox.\n")
    (tmp_path / "good.csv").write_text("A fox.\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("Füchse".encode("latin-1"))
    (tmp_path / "fox.jsonl").write_text('{"prompt": "A fox.", "id": "fox"}')
    (tmp_path / "steps.jsonl").write_text('{"prompt": "A fox.", "num_inference_steps": 30}')
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "fox.mp4").write_bytes(b"mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.jsonl").write_text('{"score": 1}\n')
    before = sorted(tmp_path.rglob("*"))
    finished = run("generate", "--device", "cpu", *line.format(*[tmp_path] * 2).split())
    assert finished.code == 2, finished.err
    message, hint = finished.error_lines
    assert hint.startswith("Try 'diffusers-h3")
    for text in named:
        assert text in message
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "mine" / "fox.mp4").read_bytes() == b"mine"


@pytest.mark.slow
def test_clips_are_those_of_single_calls(run, start, folder, write, tmp_path, encoded):
    """Prompts encoded beforehand, by a pipeline without transformer, and models loaded without the text encoder."""
    Image.radial_gradient("L").save(tmp_path / "first.png")
    path = write(
        {"prompt": "A lantern.", "seed": 4, "id": "four"},
        {"prompt": "A lantern.", "seed": 5, "id": "five", "num_inference_steps": 2},
        {"prompt": "A lantern.", "image": "first.png", "id": "from an image"},
    )
    finished = start(path, "--force-steps", "--steps", "1", "--json")
    assert finished.code == 0, finished.err
    # With a keyframe the encoder sees more than the text.
    assert encoded == ["A lantern.", "A lantern."]
    assert {name: finished.json[name] for name in ("made", "skipped", "failed")} == {
        "made": 3,
        "skipped": 0,
        "failed": 0,
    }
    out = tmp_path / "out"
    assert _files(out) == ["five.mp4", "four.mp4", "from-an-image.mp4"]
    records = _records(out)
    assert records == finished.json["clips"]
    assert [(record["id"], record["seed"], record["status"], record["error"]) for record in records] == [
        ("four", 4, "done", None),
        ("five", 5, "done", None),
        ("from an image", 0, "done", None),
    ]
    assert [record["settings"]["num_inference_steps"] for record in records] == [1, 2, 1]
    assert all(record["bytes"] == (out / record["file"]).stat().st_size for record in records)
    assert all(0 < record["seconds"] < 300 for record in records)

    single = ("generate", "A lantern.", "--overlay", folder, "--force-steps", *SMALL)
    for file, options in {
        "five.mp4": ("--seed", "5", "--steps", "2"),
        "from-an-image.mp4": ("--steps", "1", "--image", tmp_path / "first.png"),
    }.items():
        assert run(*single, *options, "--output", tmp_path / file).code == 0
        assert _distance(tmp_path / file, out / file) < _ENCODINGS
    assert _distance(out / "four.mp4", out / "five.mp4") > 4 * _ENCODINGS
    report = probe_media(out / "four.mp4")
    assert (report.frames, report.width, report.height, report.audio_channels) == (124, 64, 64, 2)


def test_one_failure_never_stops_the_rest_and_is_tried_again(
    start, write, tmp_path, requests, pipeline_class, encoded
):
    path = write(*[{"prompt": f"clip {n}", "id": f"c{n}", "seed": n} for n in range(3)])
    out = tmp_path / "out"
    works = pipeline_class.__call__

    def fail_once(self, **request):
        if request["generator"].initial_seed() == 1:
            raise RuntimeError("out of memory\nwhile allocating")
        return works(self, **request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_class, "__call__", fail_once)
        finished = start(path)
    assert finished.code == 1
    assert finished.out == f"2 made, 0 skipped, 1 failed: {out / 'results.jsonl'}\n"
    assert "c1.mp4 failed: RuntimeError: out of memory" in finished.err
    assert _statuses(out) == {"c0.mp4": "done", "c1.mp4": "failed", "c2.mp4": "done"}
    assert _records(out)[1]["error"] == "RuntimeError: out of memory\nwhile allocating"
    assert _files(out) == [".prompts", "c0.mp4", "c2.mp4"]
    assert [request["seed"] for request in requests] == [0, 2]

    finished = start(path)
    assert finished.code == 0, finished.err
    assert finished.out == f"1 made, 2 skipped, 0 failed: {out / 'results.jsonl'}\n"
    assert [request["seed"] for request in requests] == [0, 2, 1]
    assert encoded == ["clip 0", "clip 1", "clip 2"], "a prompt is encoded once, also over two runs"
    assert _statuses(out) == {"c0.mp4": "done", "c1.mp4": "done", "c2.mp4": "done"}
    assert [record["error"] for record in _records(out)] == [None, None, None]
    assert _files(out) == ["c0.mp4", "c1.mp4", "c2.mp4"]


def test_a_prompt_that_cannot_be_encoded_fails_its_clips_alone(start, write, tmp_path, requests, pipeline_class):
    path = write({"prompt": "bad", "id": "a"}, {"prompt": "good", "id": "b"}, {"prompt": "bad", "id": "c", "seed": 1})
    encode = pipeline_class.encode_prompt

    def fail(self, prompt, *arguments):
        if prompt == "bad":
            raise ValueError("too long")
        return encode(self, prompt, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_class, "encode_prompt", fail)
        assert start(path).code == 1
    assert _statuses(tmp_path / "out") == {"a.mp4": "failed", "b.mp4": "done", "c.mp4": "failed"}
    assert [request["seed"] for request in requests] == [0]
    assert start(path).code == 0
    assert set(_statuses(tmp_path / "out").values()) == {"done"}


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_a_clip_of_nan_is_a_failure(start, write, tmp_path, monkeypatch, pipeline_class, modality):
    from diffusers_h3 import VDNH3PipelineOutput

    frames, audio = np.full((1, 4, 64, 64, 3), 0.5, np.float32), torch.zeros(1, 2, 5333)
    output = VDNH3PipelineOutput(frames, audio, 32000, nonfinite=(modality,))
    monkeypatch.setattr(pipeline_class, "__call__", lambda self, **request: output)
    assert start(write({"prompt": "x", "id": "x"})).code == 1
    (record,) = _records(tmp_path / "out")
    assert record["error"] == f"ValueError: NaN or infinity in the generated {modality}."
    assert _files(tmp_path / "out") == [".prompts"]


def test_only_what_changed_is_made_again(start, write, tmp_path, requests):
    lines = [{"prompt": f"clip {n}", "id": f"c{n}", "seed": n} for n in range(4)]
    out = tmp_path / "out"
    assert start(write(*lines)).code == 0
    assert [request["seed"] for request in requests] == [0, 1, 2, 3]
    assert start(write(*lines)).out.startswith("0 made, 4 skipped")

    requests.clear()
    lines[0]["prompt"] = "another text"
    lines[2]["num_frames"] = 141
    (out / "c1.mp4").unlink()
    (out / "c3.mp4").write_bytes((out / "c3.mp4").read_bytes()[:-1])
    assert start(write(*reversed(lines), {"prompt": "new", "id": "new", "seed": 9})).code == 0
    assert [request["seed"] for request in requests] == [3, 2, 1, 0, 9]
    assert [request["num_frames"] for request in requests] == [124, 141, 124, 124, 124]
    # In the order of the file; those of another file stay.
    assert list(_statuses(out)) == ["c3.mp4", "c2.mp4", "c1.mp4", "c0.mp4", "new.mp4"]
    assert start(write(lines[1])).out.startswith("0 made, 1 skipped")
    assert list(_statuses(out)) == ["c3.mp4", "c2.mp4", "c1.mp4", "c0.mp4", "new.mp4"]


def test_other_weights_make_other_clips(run, start, write, tmp_path, cache, tiny_release, requests):
    path = write({"prompt": "x", "id": "x"})
    assert start(path).code == 0
    other = tiny_release / "stage-b-step-2000"
    finished = run(
        "generate", "--prompts", path, "--out", tmp_path / "out", "--overlay", other, "--cache-dir", cache, *SMALL
    )
    assert finished.code == 0, finished.err
    assert finished.out.startswith("1 made, 0 skipped")
    assert len(requests) == 2


def test_a_finished_batch_loads_no_model(start, write, requests, monkeypatch):
    path = write({"prompt": "x"})
    assert start(path).code == 0
    monkeypatch.setattr("diffusers_h3.cli.weights.load_pipeline", lambda *arguments: pytest.fail("a model is loaded"))
    assert start(path).code == 0


def test_a_users_file_is_replaced_only_on_request(start, write, tmp_path, requests):
    out = tmp_path / "out"
    out.mkdir()
    (out / "x.mp4").write_bytes(b"mine")
    path = write({"prompt": "x", "id": "x"})
    assert start(path).code == 2
    assert (out / "x.mp4").read_bytes() == b"mine"
    assert start(path, "--overwrite").code == 0
    assert probe_media(out / "x.mp4").frames == 4


def test_interrupted_and_taken_up_again(start, write, tmp_path, requests, pipeline_class):
    path = write(*[{"prompt": "clip", "id": f"c{n}", "seed": n} for n in range(3)])
    out = tmp_path / "out"
    works = pipeline_class.__call__

    def interrupt(self, **request):
        if request["generator"].initial_seed() == 1:
            raise KeyboardInterrupt
        return works(self, **request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_class, "__call__", interrupt)
        finished = start(path)
    assert finished.code == 130
    assert _statuses(out) == {"c0.mp4": "done", "c1.mp4": "started"}
    assert _files(out) == [".prompts", "c0.mp4"]
    # What a run leaves that was killed while it wrote, and after the file was complete but not yet recorded.
    (out / ".partial-c1").mkdir()
    (out / ".partial-c1" / "c1.mp4").write_bytes(b"half")
    (out / "c1.mp4").write_bytes(b"whole")
    assert start(path).code == 0
    assert [request["seed"] for request in requests] == [0, 1, 2]
    assert _files(out) == ["c0.mp4", "c1.mp4", "c2.mp4"]
    assert probe_media(out / "c1.mp4").frames == 4


@pytest.mark.slow
def test_killed_between_clips_and_taken_up_again(command, quiet_environment, start, folder, write, tmp_path):
    path = write(*[{"prompt": "clip", "id": f"c{n}", "seed": n} for n in range(3)])
    out = tmp_path / "out"
    words = [*command, "generate", "--prompts", path, "--out", out, "--overlay", folder, *SMALL]
    words += ["--steps", "1", "--force-steps"]
    process = subprocess.Popen(words, env=quiet_environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not (out / "c0.mp4").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "c2.mp4").exists()
    first = (out / "c0.mp4").read_bytes()

    done = start(path, "--steps", "1", "--force-steps")
    assert done.code == 0, done.err
    assert _files(out) == ["c0.mp4", "c1.mp4", "c2.mp4"]
    assert set(_statuses(out).values()) == {"done"}
    assert (out / "c0.mp4").read_bytes() == first
    for first, second in ("01", "02", "12"):
        assert _distance(out / f"c{first}.mp4", out / f"c{second}.mp4") > 4 * _ENCODINGS


# Runs in every process: one clip fails, and each process notes which clips it made.
TWO_PROCESSES = """
import os, sys
from pathlib import Path
from diffusers_h3 import VDNH3Pipeline
from diffusers_h3.cli import main

generate, encode = VDNH3Pipeline.__call__, VDNH3Pipeline.encode_prompt
notes = Path(sys.argv.pop(1)) / os.environ["RANK"]

def noted(self, **request):
    seed = request["generator"].initial_seed()
    with notes.open("a") as handle:
        print("seed", seed, file=handle)
    if seed == 0:
        raise RuntimeError("no luck")
    return generate(self, **request)

def noted_encode(self, prompt, *arguments):
    with notes.open("a") as handle:
        print("prompt", prompt, file=handle)
    return encode(self, prompt, *arguments)

VDNH3Pipeline.__call__, VDNH3Pipeline.encode_prompt = noted, noted_encode
main()
"""


@pytest.mark.slow
def test_two_processes_share_the_clips_and_the_prompts(quiet_environment, folder, write, tmp_path):
    """The first clip of the first process fails; the second process makes its clips all the same."""
    texts = ["one", "two", "one", "two", "one"]
    path = write(*[{"prompt": text, "id": f"c{n}", "seed": n} for n, text in enumerate(texts)])
    out = tmp_path / "out"
    script = tmp_path / "noted.py"
    script.write_text(TWO_PROCESSES)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    words = ["generate", "--prompts", path, "--out", out, "--overlay", folder, *SMALL, "--steps", "1", "--force-steps"]
    done = subprocess.run(
        [*launcher, script, tmp_path, *words], env=quiet_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == f"4 made, 0 skipped, 1 failed: {out / 'results.jsonl'}\n"
    assert (tmp_path / "0").read_text().split("\n")[:-1] == ["prompt one", "seed 0", "seed 2", "seed 4"]
    assert (tmp_path / "1").read_text().split("\n")[:-1] == ["prompt two", "seed 1", "seed 3"]
    assert _statuses(out) == {
        "c0.mp4": "failed",
        "c1.mp4": "done",
        "c2.mp4": "done",
        "c3.mp4": "done",
        "c4.mp4": "done",
    }
    assert [record["line"] for record in _records(out)] == [1, 2, 3, 4, 5]
    assert _files(out) == [".prompts", "c1.mp4", "c2.mp4", "c3.mp4", "c4.mp4"]


def test_a_clip_in_fp8_is_another_clip_but_its_prompt_is_encoded_the_same(write, tmp_path):
    """Compiled, offloaded or on another device it is the same one."""
    (clip,) = read_clips(write({"prompt": "x"}), DEFAULTS)
    same = [Running(torch.device("cuda")), Running(torch.device("cpu"), offload="group", compiled=True)]
    batches = [Batch([clip], tmp_path, tmp_path, each, False, None) for each in (*same, replace(same[0], fp8=True))]
    plain, moved, fp8 = (batch._digest(clip) for batch in batches)
    assert plain == moved != fp8
    assert len({batch._encoding(clip) for batch in batches}) == 1


def test_fp8_is_refused_before_weights_are_prepared(write, tmp_path, monkeypatch, run):
    monkeypatch.setattr("diffusers_h3.cli.generate._prepare_weights", lambda *arguments: pytest.fail("too late"))
    words = ["--prompts", write({"prompt": "x"}), "--out", tmp_path / "out"]
    for target in (words, ["x", "-o", tmp_path / "x.mp4"]):
        finished = run("generate", *target, "--device", "cpu", "--fp8")
        assert finished.code == 2
        assert "--fp8 needs a CUDA device" in finished.error_lines[-2]
    assert list(tmp_path.glob("*.mp4")) == []


def test_more_processes_than_gpus_are_refused_before_they_meet(write, tmp_path, monkeypatch, folder, run):
    """On one GPU, Accelerate would put both processes on it, and the second one's weights would not fit."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("diffusers_h3.cli.generate._check_device", lambda name, offload: torch.device("cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setattr("diffusers_h3.cli.batch.join_processes", lambda device: pytest.fail("waits for the others"))
    out = tmp_path / "out"
    finished = run("generate", "--prompts", write({"prompt": "x"}), "--out", out, "--overlay", folder)
    assert finished.code == 2
    assert "this machine has 1 for 2 processes" in finished.error_lines[-2]
    assert not out.exists()


def test_a_device_for_several_processes_is_refused(start, write, tmp_path, monkeypatch, folder, run):
    class Two:
        num_processes = 2

    monkeypatch.setattr("diffusers_h3.cli.batch.join_processes", lambda device: Two())
    finished = run(
        "generate",
        "--prompts",
        write({"prompt": "x"}),
        "--out",
        tmp_path / "out",
        "--overlay",
        folder,
        "--device",
        "cpu:0",
    )
    assert finished.code == 2
    assert "--device cpu:0" in finished.error_lines[-2]
    assert "2 processes" in finished.error_lines[-2]
    assert not (tmp_path / "out").exists()


def test_records_of_many_writers_are_all_kept(tmp_path):
    """Each with a lock of its own, as processes have."""

    def record(n):
        Results(tmp_path, ["f3"]).update([{"file": f"f{n}", "status": "done"}])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(40)))
    files = list(Results(tmp_path).read())
    assert files[0] == "f3"
    assert sorted(files) == sorted(f"f{n}" for n in range(40))
    assert sorted(os.listdir(tmp_path)) == [".results.lock", "results.jsonl"]


def test_a_manifest_survives_a_writer_that_dies(tmp_path, monkeypatch):
    results = Results(tmp_path)
    results.update([{"file": "a", "status": "done"}])

    def die(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffusers_h3.cli.results_file.flush", die)
    with pytest.raises(OSError, match="No space"):
        results.update([{"file": "b", "status": "done"}])
    assert results.read() == {"a": {"file": "a", "status": "done"}}
    monkeypatch.undo()
    results.update([{"file": "c", "status": "done"}])
    assert list(results.read()) == ["a", "c"]
    assert sorted(os.listdir(tmp_path)) == [".results.lock", "results.jsonl"]


@pytest.mark.parametrize("line", ["{", "[]", '{"file": "a"}', '{"file": "a", "status": "finished"}'])
def test_a_broken_manifest_is_named_by_line(tmp_path, line):
    path = Path(tmp_path) / "results.jsonl"
    path.write_text(f'{{"file": "b", "status": "done"}}\n{line}\n')
    with pytest.raises(UsageError, match=r"results\.jsonl line 2"):
        Results(tmp_path).read()

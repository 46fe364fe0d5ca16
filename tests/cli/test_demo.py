import json
import shutil
import signal
import subprocess
import sys
import time

import av
import numpy as np
import pytest
from PIL import Image

from diffusers_h3.demo.grammar import BACKGROUNDS, COLOURS, MOTIONS, PITCHES
from diffusers_h3.demo.probe import MediaReport
from diffusers_h3.demo.release import embedded_release


@pytest.fixture(scope="module")
def demo(run, cache, tmp_path_factory):
    """One run of the demo: what it printed and the file it made, a contact sheet beside it."""
    output = tmp_path_factory.mktemp("demo") / "new" / "clip.mp4"
    sheet = output.with_suffix(".png")
    finished = run("demo", "--output", output, "--contact-sheet", sheet, "--cache-dir", cache, "--json")
    assert finished.code == 0, finished.err
    return finished, output


def test_demo_makes_video_and_sound_of_equal_length(demo):
    _, output = demo
    assert sorted(path.name for path in output.parent.iterdir()) == ["clip.mp4", "clip.png"]
    with av.open(str(output)) as container:
        (video,), (audio,) = container.streams.video, container.streams.audio
        assert len(container.streams) == 2
        assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
        assert (video.average_rate, video.width, video.height) == (24, 96, 96)
        assert (audio.rate, audio.channels, audio.layout.name) == (32000, 2, "stereo")
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video)]
    with av.open(str(output)) as container:
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert len(frames) == 124
    # An AAC frame holds 1024 samples, a video frame lasts 32000 / 24 of them.
    assert abs(sound.shape[1] - 124 * 32000 / 24) <= max(1024, 32000 / 24)
    assert np.stack(frames).std() > 5, "the video is one flat colour"
    assert sound.std() > 0.01, "the sound is silence"
    assert np.abs(sound[0] - sound[1]).max() > 0.001, "both channels are the same"


def test_demo_json_is_what_was_decoded(demo):
    finished, output = demo
    report = finished.json
    assert abs(report.pop("audio_seconds") - 124 / 24) <= 1024 / 32000
    assert report == {
        "output": str(output),
        "contact_sheet": str(output.with_suffix(".png")),
        "prompt": "a red circle moves left to right",
        "seed": 0,
        "frames": 124,
        "fps": 24.0,
        "width": 96,
        "height": 96,
        "video_seconds": 124 / 24,
        "audio_channels": 2,
        "sampling_rate": 32000,
    }
    assert "MiniMax" not in finished.err, "the demo's weights are nobody's but this package's"
    assert "not trained on this prompt" not in finished.err


def test_demo_table_and_second_run(run, demo, cache, tmp_path):
    """A second run finds the merged folder in the cache, and the same seed makes the same clip."""
    _, first = demo
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    output, sheet = tmp_path / "clip.mp4", tmp_path / "clip.png"
    finished = run("demo", "--output", output, "--contact-sheet", sheet, "--cache-dir", cache)
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert lines[0] == f"file   {output}"
    assert lines[1] == "video  124 frames, 24 fps, 96x96, 5.167 s"
    assert lines[2].startswith("sound  2 channels, 32000 Hz, 5.1")
    assert lines[3:] == [f"sheet  {sheet}"]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == before
    # Frames and waveforms without loss; x264's threads may spend the bits of equal frames in different ways.
    assert sheet.read_bytes() == first.with_suffix(".png").read_bytes()


def test_demo_contact_sheet_shows_the_clip(demo):
    _, output = demo
    sheet = np.asarray(Image.open(output.with_suffix(".png")))
    # A caption, eight frames twice as large, two waveforms.
    assert sheet.shape == (14 + 2 * 96 + 2 * 40 + 6, 8 * 2 * 96, 3)
    with av.open(str(output)) as container:
        first = next(container.decode(video=0)).to_ndarray(format="rgb24")
    shown = sheet[14 : 14 + 192 : 2, :192:2]
    assert np.abs(shown.astype(float) - first).mean() < 12, "more than H.264 loses"


def test_a_prompt_outside_the_grammar_is_generated_with_a_hint(run, tmp_path, cache, monkeypatch):
    made = []

    def make(output, prompt, *others):
        made.append(prompt)
        return MediaReport(124, 24.0, 96, 96, 124 / 24, 2, 32000, 124 / 24)

    monkeypatch.setattr("diffusers_h3.demo.run.make_demo_video", make)
    finished = run("demo", "--prompt", "A red circle, moving to the left.", "--output", tmp_path / "clip.mp4")
    assert finished.code == 0
    assert made == ["A red circle, moving to the left."]
    (hint,) = finished.error_lines
    assert hint.startswith("The demo's model was not trained on this prompt; the nearest it knows: 'a red circle ")
    assert hint.count("'a ") == 3


def test_a_damaged_installation_is_one_line_and_nothing_written(run, tmp_path, monkeypatch):
    weights = tmp_path / "weights"
    shutil.copytree(embedded_release(), weights)
    (weights / "h3-base" / "vae" / "config.json").write_text("{}")
    monkeypatch.setattr("diffusers_h3.demo.release._RELEASE", weights)
    finished = run("demo", "--output", tmp_path / "clip.mp4", "--cache-dir", tmp_path / "cache")
    assert (finished.code, finished.out) == (1, "")
    assert finished.error_lines == [
        f"error: The demo's model in {weights} is broken: h3-base/vae/config.json changed. Install diffusers-h3 again."
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_help_names_every_word_of_the_grammar(run):
    text = " ".join(run("demo", "--help").out.split())
    for word in [*COLOURS, *PITCHES, *MOTIONS.values(), *BACKGROUNDS]:
        assert word in text
    assert "noise" not in text.replace("Seed of the noise", "")


@pytest.mark.parametrize(
    "stage",
    [
        "diffusers_h3.pipelines.blocks.VDNH3DenoiseStep.loop_step",
        "diffusers_h3.pipelines.media.encode_video",
        "diffusers_h3.pipelines.media.os.replace",
    ],
)
def test_interrupted_anywhere_leaves_nothing(run, tmp_path, cache, demo, monkeypatch, stage):
    def interrupt(*arguments, **options):
        if "output_path" in options:
            # An encoder that has written half of its file.
            with open(options["output_path"], "wb") as file:
                file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, interrupt)
    finished = run("demo", "--output", tmp_path / "clip.mp4", "--cache-dir", cache)
    assert finished.code == 130
    assert finished.out == ""
    assert finished.error_lines[-1] == "Interrupted; nothing was left half written."
    assert "Traceback" not in finished.err
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == []


# Runs the command line with a denoising step that says when it was reached and then takes its time.
STALLING = """
import signal, sys, time
from diffusers_h3.cli import main
from diffusers_h3.pipelines.blocks import VDNH3DenoiseStep

def stall(*arguments, **options):
    print("denoising", file=sys.stderr, flush=True)
    time.sleep(60)

VDNH3DenoiseStep.loop_step = stall
# A shell that starts the tests in the background lets them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_process_with_130_and_no_file(quiet_environment, cache, demo, tmp_path):
    output = tmp_path / "clip.mp4"
    words = ["demo", "--output", str(output), "--cache-dir", str(cache), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", STALLING, *words],
        env=quiet_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "denoising" in line:
                break
        assert "denoising" in seen[-1], "".join(seen)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - started < 20
    assert (process.returncode, out) == (130, "")
    assert "Interrupted; nothing was left half written." in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_first_runs_at_once(command, quiet_environment, tmp_path):
    """Both find the release merged once, and both end with their file."""
    options = ["--cache-dir", "cache", "--json"]
    running = [
        subprocess.Popen(
            [*command, "demo", "--output", f"{name}.mp4", "--contact-sheet", f"{name}.png", *options],
            cwd=tmp_path,
            env=quiet_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert json.loads(out)["frames"] == 124
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert len(list((tmp_path / "cache").glob("stage-*"))) == 1

import json
import signal
import subprocess
import sys
import time

import av
import numpy as np
import pytest


@pytest.fixture(scope="module")
def demo(run, cache, tmp_path_factory):
    """One run of the demo: what it printed and the file it made."""
    output = tmp_path_factory.mktemp("demo") / "new" / "clip.mp4"
    finished = run("demo", "--output", output, "--cache-dir", cache, "--json")
    assert finished.code == 0, finished.err
    return finished, output


def test_demo_makes_video_and_sound_of_equal_length(demo):
    _, output = demo
    assert [path.name for path in output.parent.iterdir()] == ["clip.mp4"]
    with av.open(str(output)) as container:
        (video,), (audio,) = container.streams.video, container.streams.audio
        assert len(container.streams) == 2
        assert (video.codec_context.name, audio.codec_context.name) == ("h264", "aac")
        assert (video.average_rate, video.width, video.height) == (24, 64, 64)
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
        "seed": 0,
        "frames": 124,
        "fps": 24.0,
        "width": 64,
        "height": 64,
        "video_seconds": 124 / 24,
        "audio_channels": 2,
        "sampling_rate": 32000,
    }
    assert "License" not in finished.err, "the demo's weights are nobody's but this package's"


def test_demo_table_and_second_run(run, demo, cache, tmp_path):
    """A second run finds release and merged folder in the cache, and the same seed makes the same file."""
    _, first = demo
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    finished = run("demo", "--output", tmp_path / "clip.mp4", "--cache-dir", cache)
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert lines[0] == f"file   {tmp_path / 'clip.mp4'}"
    assert lines[1] == "video  124 frames, 24 fps, 64x64, 5.167 s"
    assert lines[2].startswith("sound  2 channels, 32000 Hz, 5.1")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == before
    assert (tmp_path / "clip.mp4").read_bytes() == first.read_bytes()


@pytest.mark.parametrize(
    "stage",
    [
        "diffusers_h3.demo.release.save_file",
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

    # Only a release that is not there yet is built.
    cache = tmp_path / "cache" if stage.endswith("save_file") else cache
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
import sys, time
from diffusers_h3.cli import main
from diffusers_h3.pipelines.blocks import VDNH3DenoiseStep

def stall(*arguments, **options):
    print("denoising", file=sys.stderr, flush=True)
    time.sleep(60)

VDNH3DenoiseStep.loop_step = stall
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
    """Both find the release built and merged once, and both end with their file."""
    running = [
        subprocess.Popen(
            [*command, "demo", "--output", f"{name}.mp4", "--cache-dir", "cache", "--json"],
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
    assert (tmp_path / "one.mp4").read_bytes() == (tmp_path / "two.mp4").read_bytes()
    assert len(list((tmp_path / "cache").glob("stage-*"))) == 1

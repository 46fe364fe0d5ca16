import av
import numpy as np
import pytest

from diffusers_h3.demo.probe import MediaReport, probe_media


def write(path, num_frames=0, num_samples=0, channels=2):
    """Encode gray frames of 48×32 pixels at 12 fps and a constant sound at 16 kHz."""
    with av.open(str(path), "w") as container:
        if num_frames:
            video = container.add_stream("libx264", rate=12)
            video.width, video.height, video.pix_fmt = 48, 32, "yuv420p"
        if num_samples:
            layout = "stereo" if channels == 2 else "mono"
            audio = container.add_stream("aac", rate=16000, layout=layout)
        for _ in range(num_frames):
            picture = np.full((32, 48, 3), 128, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        if num_frames:
            container.mux(video.encode())
        if num_samples:
            frame = av.AudioFrame.from_ndarray(np.zeros((channels, num_samples), np.float32), "fltp", layout)
            frame.sample_rate = 16000
            container.mux(audio.encode(frame))
            container.mux(audio.encode())
    return path


@pytest.mark.parametrize("channels", [1, 2])
def test_counts_what_can_be_decoded(tmp_path, channels):
    report = probe_media(write(tmp_path / "clip.mp4", num_frames=18, num_samples=24 * 1024, channels=channels))
    samples = round(report.audio_seconds * 16000)
    assert 24 * 1024 <= samples <= 26 * 1024, "AAC pads by at most two frames of 1024 samples"
    assert report == MediaReport(18, 12.0, 48, 32, 1.5, channels, 16000, samples / 16000)


@pytest.mark.parametrize(
    ("parts", "found"), [({"num_frames": 5}, "1 and 0"), ({"num_samples": 4096}, "0 and 1")], ids=["silent", "blind"]
)
def test_a_missing_stream_is_named(tmp_path, parts, found):
    path = write(tmp_path / "clip.mp4", **parts)
    with pytest.raises(ValueError, match=f"one video and one audio stream, got {found}"):
        probe_media(path)


def test_a_file_that_is_no_media(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_text("not a video")
    with pytest.raises(av.error.InvalidDataError):
        probe_media(path)

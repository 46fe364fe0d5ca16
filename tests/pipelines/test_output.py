"""`save` writes an mp4 whose video and sound are what was generated, of equal length, complete or not at all."""

import math
import wave

import av
import numpy as np
import pytest
import torch
from PIL import Image

from diffusers_h3 import VDNH3PipelineOutput
from diffusers_h3.pipelines import media
from diffusers_h3.pipelines.pipeline_output import NonFiniteOutputError


RATE = 32000
FRAMES = 48


def _tone(frequency, samples, level=0.5):
    return level * torch.sin(2 * math.pi * frequency / RATE * torch.arange(samples))


def _frames(count=FRAMES, height=64, width=96):
    """Grey frames that get brighter, with a red left half: order, orientation and channels can be told."""
    video = torch.linspace(0.2, 0.8, count).reshape(1, count, 1, 1, 1).repeat(1, 1, 3, height, width)
    video[:, :, 1:, :, : width // 2] = 0
    return video


def _output(frames=None, audio=None, **options):
    frames = _frames() if frames is None else frames
    if audio is None:
        samples = FRAMES * RATE // 24 + 500
        audio = torch.stack([_tone(440, samples), _tone(1000, samples)])[None]
    return VDNH3PipelineOutput(frames, audio, RATE, **options)


def _decode(path):
    with av.open(str(path)) as container:
        streams = {kind: [s for s in container.streams if s.type == kind] for kind in ("video", "audio")}
        assert len(container.streams) == len(streams["video"]) + len(streams["audio"])
        info = {
            kind: [(stream.codec_context.name, float(stream.duration * stream.time_base)) for stream in found]
            for kind, found in streams.items()
        }
        if streams["video"]:
            info["fps"] = streams["video"][0].average_rate
        if streams["audio"]:
            info["rate"], info["channels"] = streams["audio"][0].rate, streams["audio"][0].channels
    with av.open(str(path)) as container:
        info["frames"] = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    if streams["audio"]:
        with av.open(str(path)) as container:
            info["sound"] = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    return info


def _loudest(signal):
    spectrum = np.abs(np.fft.rfft(signal))
    return np.argmax(spectrum) * RATE / len(signal)


def test_a_generated_video_is_saved_with_sound_of_equal_length(pipeline, tmp_path):
    output = pipeline(
        "a red fox in the snow",
        height=64,
        width=96,
        num_inference_steps=1,
        generator=torch.Generator().manual_seed(0),
    )
    path = output.save(tmp_path / "fox.mp4")
    assert path == tmp_path / "fox.mp4"
    info = _decode(path)
    [(video_codec, video_seconds)], [(audio_codec, audio_seconds)] = info["video"], info["audio"]
    assert (video_codec, audio_codec) == ("h264", "aac")
    assert info["fps"] == 24
    assert info["frames"].shape == (124, 64, 96, 3)
    assert (info["rate"], info["channels"]) == (32000, 2)
    assert video_seconds == pytest.approx(124 / 24, abs=1e-6)
    assert audio_seconds == pytest.approx(124 / 24, abs=1 / 24)
    assert audio_seconds == pytest.approx(video_seconds, abs=1 / 1000)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["pt", "np", "pil", "gpu dtype"])
def test_pixels_survive_whatever_the_output_type(kind, tmp_path):
    frames = _frames()
    channels_last = frames.permute(0, 1, 3, 4, 2).numpy()
    given = {
        "pt": frames,
        "np": channels_last,
        "pil": [[Image.fromarray(frame) for frame in (channels_last[0] * 255).round().astype("uint8")]],
        "gpu dtype": frames.bfloat16(),
    }[kind]
    decoded = _decode(_output(given).save(tmp_path / "x.mp4"))["frames"].astype(float)
    assert decoded.shape == (FRAMES, 64, 96, 3)
    levels = np.linspace(0.2, 0.8, FRAMES) * 255
    inner = decoded[:, 8:-8]
    assert np.abs(inner[:, :, 56:88].mean(axis=(1, 2)) - levels[:, None]).max() < 4
    red = inner[:, :, 8:40].mean(axis=(1, 2))
    assert np.abs(red - np.stack([levels, 0 * levels, 0 * levels], axis=1)).max() < 12


def test_channels_are_neither_swapped_nor_mixed(tmp_path):
    sound = _decode(_output().save(tmp_path / "x.mp4"))["sound"]
    assert sound.shape[0] == 2
    assert _loudest(sound[0]) == pytest.approx(440, abs=1)
    assert _loudest(sound[1]) == pytest.approx(1000, abs=1)
    for channel in sound:
        assert channel[2000:-4000].max() == pytest.approx(0.5, abs=0.03)


def test_sound_starts_with_the_video(tmp_path):
    audio = torch.zeros(1, 2, FRAMES * RATE // 24)
    audio[:, 0, 20000:20040] = 0.9
    sound = _decode(_output(audio=audio).save(tmp_path / "x.mp4"))["sound"]
    assert np.abs(sound[0]).argmax() == pytest.approx(20020, abs=RATE / 1000)


@pytest.mark.parametrize("samples", [1, 30000, FRAMES * RATE // 24, 165600])
def test_sound_is_cut_or_padded_to_the_frames(samples, tmp_path):
    audio = torch.stack([_tone(440, samples), _tone(1000, samples)])[None]
    info = _decode(_output(audio=audio).save(tmp_path / "x.mp4"))
    [(_, video_seconds)], [(_, audio_seconds)] = info["video"], info["audio"]
    assert video_seconds == pytest.approx(2, abs=1e-6)
    assert audio_seconds == pytest.approx(2, abs=1 / 1000)
    if samples == 30000:
        assert np.abs(info["sound"][:, 33000:]).max() < 0.01


REFUSED_AUDIO = {
    "mono batch": torch.zeros(1, 1, 64000),
    "batch of two": torch.zeros(2, 2, 64000),
    "mono rows": torch.zeros(1, 64000),
    "stereo without batch": torch.zeros(2, 64000),
    "flat": torch.zeros(64000),
    "channels last": torch.zeros(1, 64000, 2),
    "surround": torch.zeros(1, 6, 64000),
    "empty": torch.zeros(1, 2, 0),
}


@pytest.mark.parametrize("case", REFUSED_AUDIO)
def test_sound_of_another_shape_is_refused_before_writing(case, tmp_path):
    audio = REFUSED_AUDIO[case]
    with pytest.raises(ValueError, match=r"one stereo soundtrack of shape \(1, 2, samples\), got") as error:
        _output(audio=audio).save(tmp_path / "x.mp4")
    assert str(tuple(audio.shape)) in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros(1, 24, 37, 4, 4), r"shape \(1, frames, 3, height, width\), got \(1, 24, 37, 4, 4\); latents"),
        (torch.zeros(2, 8, 3, 64, 64), r"got \(2, 8, 3, 64, 64\)"),
        (torch.zeros(8, 3, 64, 64), r"got \(8, 3, 64, 64\)"),
        (torch.zeros(1, 0, 3, 64, 64), r"got \(1, 0, 3, 64, 64\)"),
        (np.zeros((1, 8, 3, 64, 64)), r"shape \(1, frames, height, width, 3\), got \(1, 8, 3, 64, 64\)"),
        (torch.zeros(1, 8, 3, 63, 64), "even height and width, got 63x64"),
        (np.zeros((1, 8, 64, 65, 3)), "even height and width, got 64x65"),
        (torch.zeros(1, 8, 3, 64, 64, dtype=torch.uint8), r"floating-point pixels in \[0, 1\], got torch.uint8"),
        (np.zeros((1, 8, 64, 64, 3), dtype="uint8"), r"floating-point pixels in \[0, 1\], got uint8"),
        (torch.full((1, 8, 3, 64, 64), 255.0), r"pixels in \[0, 1\], got values from 255 to 255"),
        (_frames() * 2 - 1, r"pixels in \[0, 1\], got values from -1 to "),
        ([Image.new("RGB", (64, 64))], "a list with one list of PIL images"),
        ([[]], "a list with one list of PIL images"),
        ([[Image.new("RGB", (64, 64)), Image.new("RGB", (32, 64))]], "RGB images of one size"),
        ([[Image.new("L", (64, 64))]], "RGB images of one size"),
        ("frames", "PIL images, an array or a tensor, got str"),
    ],
)
def test_frames_of_another_shape_are_refused_before_writing(frames, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _output(frames).save(tmp_path / "x.mp4")
    assert list(tmp_path.iterdir()) == []


def test_paths_are_checked_before_encoding(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "encode_video", lambda *_, **__: pytest.fail("encoding started"))
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "old.mp4").write_bytes(b"old")
    for path, error, message in [
        ("x.avi", ValueError, r"must end in \.mp4, got 'x.avi'"),
        ("x", ValueError, r"must end in \.mp4, got 'x'"),
        ("missing/x.mp4", FileNotFoundError, "folder .*missing does not exist; create it first"),
        ("folder.mp4", IsADirectoryError, "folder.mp4 is a folder; name a file in it"),
        ("old.mp4", FileExistsError, "old.mp4 exists already; pass `overwrite=True`"),
    ]:
        with pytest.raises(error, match=message):
            _output().save(tmp_path / path, overwrite=False)
    assert (tmp_path / "old.mp4").read_bytes() == b"old"


def test_an_existing_file_is_replaced_by_default(tmp_path):
    (tmp_path / "x.mp4").write_bytes(b"old")
    _output().save(str(tmp_path / "x.mp4"))
    assert _decode(tmp_path / "x.mp4")["frames"].shape[0] == FRAMES


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_encode_leaves_what_was_there(error, tmp_path, monkeypatch):
    def fail(_frames, *, output_path, **_options):
        with open(output_path, "wb") as file:
            file.write(b"half")
        raise error

    monkeypatch.setattr(media, "encode_video", fail)
    (tmp_path / "old.mp4").write_bytes(b"old")
    for name in ("new.mp4", "old.mp4"):
        with pytest.raises(type(error)):
            _output().save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old.mp4"]
    assert (tmp_path / "old.mp4").read_bytes() == b"old"


def _with(tensor, value):
    tensor = tensor.clone()
    tensor.view(-1)[tensor.numel() // 2] = value
    return tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_sound_is_reported_and_the_video_saved_alone(value, tmp_path):
    audio = _with(torch.zeros(1, 2, 64000), value)
    with pytest.raises(
        NonFiniteOutputError, match=r"NaN or infinity in the generated audio; .*saved as .*x.mp4"
    ) as error:
        _output(audio=audio).save(tmp_path / "x.mp4")
    assert (error.value.modalities, error.value.saved) == (("audio",), tmp_path / "x.mp4")
    info = _decode(tmp_path / "x.mp4")
    assert info["frames"].shape[0] == FRAMES
    assert info["audio"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_broken_video_is_reported_and_the_sound_saved_alone(kind, tmp_path):
    frames = _with(_frames(), math.nan)
    if kind == "np":
        frames = frames.permute(0, 1, 3, 4, 2).numpy()
    with pytest.raises(
        NonFiniteOutputError, match=r"NaN or infinity in the generated video; .*saved as .*x.wav"
    ) as error:
        _output(frames).save(tmp_path / "x.mp4")
    assert (error.value.modalities, error.value.saved) == (("video",), tmp_path / "x.wav")
    with wave.open(str(tmp_path / "x.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth()) == (2, 32000, 2)
        assert file.getnframes() == FRAMES * RATE // 24
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, 2) / 32767
    expected = torch.stack([_tone(440, len(samples)), _tone(1000, len(samples))], dim=1).numpy()
    assert np.abs(samples - expected).max() < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["x.wav"]


def test_nothing_is_saved_when_both_are_broken(tmp_path):
    output = _output(_with(_frames(), math.inf), _with(torch.zeros(1, 2, 64000), math.nan))
    with pytest.raises(
        NonFiniteOutputError, match=r"NaN or infinity in the generated video and audio; nothing was saved"
    ) as error:
        output.save(tmp_path / "x.mp4")
    assert (error.value.modalities, error.value.saved) == (("video", "audio"), None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_the_pipeline_names_the_modality_that_overflowed(modality, pipeline, tmp_path, caplog):
    def break_it(_pipeline, _step, _timestep, tensors):
        name = {"video": "latents", "audio": "audio_latents"}[modality]
        return {name: torch.full_like(tensors[name], math.nan)}

    output = pipeline(
        "a red fox in the snow",
        height=64,
        width=64,
        num_inference_steps=1,
        callback_on_step_end=break_it,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    assert output.nonfinite == (modality,)
    assert f"The generated {modality} holds NaN or infinity" in caplog.text
    # Images cannot hold NaN, so the output has to remember.
    assert len(output.frames[0]) == 124
    with pytest.raises(NonFiniteOutputError, match=f"in the generated {modality}"):
        output.save(tmp_path / "x.mp4")
    [saved] = tmp_path.iterdir()
    assert saved.name == {"video": "x.wav", "audio": "x.mp4"}[modality]

import numpy as np

from diffusers_h3.demo.contact_sheet import Clip, contact_sheet


CAPTION, FRAME, WAVE, GAP = 14, 96, 40, 6


def clip(prompt="a clip"):
    """124 frames of 48×48 pixels in which a red square moves from left to right, its sound from ear to ear."""
    frames = np.zeros((124, 48, 48, 3))
    for index, frame in enumerate(frames):
        left = round(index / 123 * 38)
        frame[20:30, left : left + 10, 0] = 1.0
    tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 3200)
    pan = np.linspace(0, 1, 16000)
    return Clip(prompt, frames, np.stack([(1 - pan) * tone, pan * tone]))


def test_eight_frames_from_first_to_last_twice_as_large():
    sheet = np.asarray(contact_sheet([clip()]))
    assert sheet.shape == (CAPTION + FRAME + 2 * WAVE + GAP, 8 * FRAME, 3)
    centres = []
    for index in range(8):
        frame = sheet[CAPTION : CAPTION + FRAME, index * FRAME : (index + 1) * FRAME]
        rows, columns = np.nonzero((frame == (255, 0, 0)).all(axis=-1))
        assert (rows.min(), rows.max(), len(rows)) == (40, 59, 400)
        centres.append(columns.mean())
        # A line parts it from the frame before.
        assert (frame[:, :2] == 255).all() == (index > 0)
    assert centres[0] == 9.5
    assert centres[-1] == 38 * 2 + 9.5
    assert all(np.diff(centres) > 5)


def test_the_waves_of_both_channels_lie_under_the_frames():
    sheet = np.asarray(contact_sheet([clip()]))
    waves = sheet[CAPTION + FRAME : CAPTION + FRAME + 2 * WAVE + 2]
    left, right = (waves == (0, 0, 128)).all(axis=-1), (waves == (139, 0, 0)).all(axis=-1)
    half = sheet.shape[1] // 2
    assert left[:, :half].sum() > 2 * left[:, half:].sum()
    assert right[:, half:].sum() > 2 * right[:, :half].sum()
    assert np.nonzero(left)[0].mean() < np.nonzero(right)[0].mean()


def test_clips_are_rows_with_their_prompts_over_them():
    sheet = np.asarray(contact_sheet([clip("first"), clip("")]))
    first, second = np.split(sheet, 2)
    assert first[:CAPTION].min() < 128
    assert second[:CAPTION].min() == 255
    assert np.array_equal(first[CAPTION:], second[CAPTION:])


def test_sound_louder_than_full_scale_stays_in_its_strip():
    loud = clip()
    loud = Clip(loud.prompt, loud.frames, 100 * loud.audio)
    sheet = np.asarray(contact_sheet([loud]))
    quiet = np.asarray(contact_sheet([clip()]))
    assert np.array_equal(sheet[: CAPTION + FRAME], quiet[: CAPTION + FRAME])
    assert sheet[CAPTION + FRAME + 2 * WAVE + 4 :].min() == 255

import pytest
import torch

from training import data


def test_one_seed_draws_and_renders_the_same_clips():
    first, second, other = (data.draw_scenes(6, seed) for seed in (3, 3, 4))
    assert torch.equal(
        data.render_video(first, num_frames=2, size=32), data.render_video(second, num_frames=2, size=32)
    )
    assert torch.equal(data.render_audio(first, 4), data.render_audio(second, 4))
    assert data.prompts(first, 1) == data.prompts(second, 1)
    assert not torch.equal(first.lane, other.lane)


def test_half_of_the_dark_backgrounds_and_no_other_go_unmentioned():
    scenes = data.draw_scenes(600, seed=0)
    sentences = data.prompts(scenes, seed=0)
    mentioned = torch.tensor(["background" in sentence for sentence in sentences])
    assert mentioned[scenes.background > 0].all()
    assert 0.35 < mentioned[scenes.background == 0].float().mean() < 0.65


def test_the_held_out_combinations_are_never_trained_on():
    held_out = data.held_out_scenes()
    kept = {tuple(row) for row in torch.stack((held_out.colour, held_out.shape, held_out.motion), 1).tolist()}
    trained = data.draw_scenes(5000, seed=0)
    seen = {tuple(row) for row in torch.stack((trained.colour, trained.shape, trained.motion), 1).tolist()}
    assert (len(kept), len(seen)) == (18, 90)
    assert kept.isdisjoint(seen)
    drawn = data.draw_scenes(500, seed=1, held_out=True)
    assert set(map(tuple, torch.stack((drawn.colour, drawn.shape, drawn.motion), 1).tolist())) == kept
    # Every colour, shape and motion occurs in what is trained on, so nothing held out is a new word.
    assert [len({row[axis] for row in seen}) for axis in range(3)] == [6, 3, 6]


@pytest.mark.parametrize(
    ("motion", "start", "middle", "end"),
    [
        ("right", (0.17, 0.5), (0.5, 0.5), (0.83, 0.5)),
        ("left", (0.83, 0.5), (0.5, 0.5), (0.17, 0.5)),
        ("up", (0.5, 0.83), (0.5, 0.5), (0.5, 0.17)),
        ("down", (0.5, 0.17), (0.5, 0.5), (0.5, 0.83)),
        ("bounce", (0.5, 0.83), (0.5, 0.23), (0.5, 0.83)),
        # One and a half turns: half way it has gone round three quarters and is at the top.
        ("orbit", (0.77, 0.5), (0.5, 0.23), (0.23, 0.5)),
    ],
)
def test_motions_go_where_they_say(motion, start, middle, end):
    scenes = data.held_out_scenes()[torch.tensor([data.MOTION_NAMES.index(motion)])]
    seconds = torch.tensor([[0.0, 61.5, 123.0]]) / 24
    expected = torch.tensor([start, middle, end])
    torch.testing.assert_close(data.positions(scenes, seconds)[0], expected, atol=1e-4, rtol=0)


def test_a_window_of_a_clip_is_that_part_of_it():
    scenes = data.draw_scenes(2, seed=0)
    whole = data.render_video(scenes, size=32)
    window = data.render_video(scenes, torch.tensor([10, 40]), 22, size=32)
    torch.testing.assert_close(window[0], whole[0, :, 10:32])
    torch.testing.assert_close(window[1], whole[1, :, 40:62])


def test_a_steady_tone_repeats_from_latent_to_latent():
    scenes = data.held_out_scenes()
    still = scenes[torch.tensor([data.MOTION_NAMES.index("up") + 6 * shape for shape in range(3)])]
    audio = data.render_audio(still, 4).unflatten(-1, (4, 800))
    assert audio.square().mean() > 0.05
    torch.testing.assert_close(audio[..., 1, :], audio[..., 0, :], atol=1e-5, rtol=0)
    torch.testing.assert_close(audio[..., 3, :], audio[..., 0, :], atol=1e-5, rtol=0)

"""One seed gives the latents, frames and sound of diffusers' own modular pipeline."""

import numpy as np
import pytest
import torch


REQUESTS = {
    "t2va": (),
    "i2va": ("image",),
    "l2va": ("last_image",),
    "fl2va": ("image", "last_image"),
}


def _images(keyframes, names):
    return {name: image for name, image in zip(("image", "last_image"), keyframes, strict=True) if name in names}


def _run_modular(pipeline, prompt="a red fox in the snow", seed=7, steps=2, **options):
    options = {"height": 64, "width": 96, "num_frames": 124, **options}
    # Its steps count the grid's points: one more than transformer calls.
    return pipeline(
        prompt=prompt, num_inference_steps=steps + 1, generator=torch.Generator().manual_seed(seed), **options
    )


@pytest.mark.parametrize("task", REQUESTS)
@pytest.mark.parametrize("kind", ["hybrid", "stock"])
def test_latents_are_bitwise_equal(
    kind, task, components, tiny_components, make_pipeline, modular_pipeline, generate, keyframes
):
    own = components if kind == "hybrid" else tiny_components
    images = _images(keyframes, REQUESTS[task])
    video, audio = generate(make_pipeline(transformer=own["transformer"]), **images)
    modular = modular_pipeline(own)
    modular._blocks.sub_blocks.pop("decode")
    expected = _run_modular(modular, **images)
    assert video.shape == (1, own["vae"].config.latent_channels, 37, 4, 6)
    assert torch.equal(video, expected.get("latents"))
    assert torch.equal(audio, expected.get("audio_latents"))


def test_the_hybrid_transformer_differs_from_the_stock_one(make_pipeline, tiny_components, generate):
    hybrid = generate(make_pipeline())
    stock = generate(make_pipeline(transformer=tiny_components["transformer"]))
    assert (hybrid[0] - stock[0]).abs().max() > 1e-3
    assert (hybrid[1] - stock[1]).abs().max() > 1e-3


def test_keyframes_change_the_result_each_in_its_way(pipeline, generate, keyframes):
    results = [generate(pipeline, **_images(keyframes, names))[0] for names in REQUESTS.values()]
    for index, first in enumerate(results):
        for second in results[index + 1 :]:
            assert (first - second).abs().max() > 1e-3


@pytest.fixture(scope="module")
def expected_output(components, modular_pipeline):
    state = _run_modular(modular_pipeline(components), steps=1, output_type="pt")
    return state.get("videos"), state.get("audio")


@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
def test_decoded_output_is_that_of_the_modular_pipeline(output_type, expected_output, pipeline):
    output = pipeline(
        "a red fox in the snow",
        height=64,
        width=96,
        num_inference_steps=1,
        generator=torch.Generator().manual_seed(7),
        output_type=output_type,
    )
    frames, audio = expected_output
    channels_last = frames.permute(0, 1, 3, 4, 2).numpy()
    if output_type == "np":
        assert output.frames.shape == (1, 124, 64, 96, 3)
        assert np.array_equal(output.frames, channels_last)
    elif output_type == "pt":
        assert output.frames.shape == (1, 124, 3, 64, 96)
        assert torch.equal(output.frames, frames)
    else:
        assert [len(video) for video in output.frames] == [124]
        assert np.array_equal(np.stack(output.frames[0]), (channels_last[0] * 255).round().astype("uint8"))
    assert torch.equal(output.audio, audio)
    assert output.audio.shape == (1, 2, 207 * 800)
    assert output.audio.dtype == torch.float32
    assert (output.sampling_rate, output.fps, output.nonfinite) == (32000, 24, ())


def test_calls_in_a_row_do_not_influence_each_other(make_pipeline, generate, keyframes):
    requests = [
        {"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 1},
        {
            "prompt": "a very long and detailed prompt about a ship at sea, at night, in a storm",
            "seed": 1,
            "num_inference_steps": 1,
        },
        {"prompt": "a fox", "height": 96, "width": 64, "num_frames": 141, "image": keyframes[0]},
        {"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 1},
    ]
    shared = make_pipeline()
    results = [generate(shared, **request) for request in requests]
    for request, (video, audio) in zip(requests, results, strict=True):
        fresh_video, fresh_audio = generate(make_pipeline(), **request)
        assert torch.equal(video, fresh_video)
        assert torch.equal(audio, fresh_audio)
    assert [tuple(video.shape[2:]) for video, _ in results] == [(37, 4, 4), (37, 4, 6), (42, 6, 4), (37, 4, 4)]
    assert [audio.shape[2] for _, audio in results] == [207, 207, 235, 207]
    assert torch.equal(results[0][0], results[3][0])


def test_another_seed_gives_another_video(pipeline, generate):
    first, second = (generate(pipeline, seed=seed, num_inference_steps=1) for seed in (1, 2))
    assert (first[0] - second[0]).abs().mean() > 0.1
    assert (first[1] - second[1]).abs().mean() > 0.1


def test_a_tuple_is_returned_on_request(pipeline, generate):
    frames, audio = pipeline(
        "a red fox in the snow",
        height=64,
        width=96,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
        output_type="latent",
        return_dict=False,
    )
    expected = generate(pipeline)
    assert torch.equal(frames, expected[0])
    assert torch.equal(audio, expected[1])

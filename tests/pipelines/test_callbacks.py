"""Step callbacks, interruption, the progress bar, injected noise and encoded prompts."""

import pytest
import torch


def test_the_callback_sees_every_step_and_its_tensors(pipeline, generate):
    seen = []

    def record(pipe, step, timestep, tensors):
        seen.append((pipe, step, float(timestep), {name: tuple(tensor.shape) for name, tensor in tensors.items()}))

    generate(
        pipeline,
        num_inference_steps=2,
        callback_on_step_end=record,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents", "prompt_embeds"],
    )
    assert [entry[0] is pipeline for entry in seen] == [True, True]
    assert [entry[1] for entry in seen] == [0, 1]
    # Two calls of shift 12: sigma 1, then 12 * 0.5 / (1 + 11 * 0.5).
    assert [entry[2] for entry in seen] == pytest.approx([0.0, 1 - 12 / 13], abs=1e-6)
    config = pipeline.transformer.config
    for *_, shapes in seen:
        assert shapes["latents"] == (37 * 2 * 3, config.in_channels * 4)
        assert shapes["audio_latents"] == (2 * 207, config.audio_in_channels)
        assert shapes["prompt_embeds"][::2] == (1, config.text_dim)


def test_tensors_kept_by_a_callback_do_not_change(pipeline, generate):
    kept, copies = [], []

    def keep(_pipe, _step, _timestep, tensors):
        kept.append(tensors["latents"])
        copies.append(tensors["latents"].clone())
        return tensors

    generate(pipeline, num_inference_steps=3, callback_on_step_end=keep)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(kept, copies, strict=True))
    assert not torch.equal(kept[0], kept[1])


def test_a_callback_that_returns_what_it_got_changes_nothing(pipeline, generate):
    names = ["latents", "audio_latents", "prompt_embeds"]
    plain = generate(pipeline)
    same = generate(
        pipeline,
        callback_on_step_end=lambda _pipe, _step, _timestep, tensors: tensors,
        callback_on_step_end_tensor_inputs=names,
    )
    assert torch.equal(plain[0], same[0])
    assert torch.equal(plain[1], same[1])


def test_returned_tensors_are_used(pipeline, generate):
    def replace(_pipe, _step, _timestep, tensors):
        return {"latents": torch.full_like(tensors["latents"], 5.0)}

    video, audio = generate(pipeline, num_inference_steps=1, callback_on_step_end=replace)
    assert torch.equal(video, torch.full_like(video, 5.0))
    assert torch.equal(audio, generate(pipeline, num_inference_steps=1)[1])


def test_a_returned_prompt_is_used_from_the_next_step_on(pipeline, generate):
    def replace(_pipe, step, _timestep, tensors):
        return {"prompt_embeds": tensors["prompt_embeds"] * (0 if step == 0 else 1)}

    options = {"callback_on_step_end": replace, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    assert torch.equal(
        generate(pipeline, num_inference_steps=1, **options)[0], generate(pipeline, num_inference_steps=1)[0]
    )
    difference = generate(pipeline, num_inference_steps=2, **options)[0] - generate(pipeline, num_inference_steps=2)[0]
    assert difference.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"audio_latents": torch.zeros(1)}, "'audio_latents', which it did not ask for"),
        ({"latents": torch.zeros(3, 4)}, r"'latents' in its own shape \(222, \d+\), got \(3, 4\)"),
    ],
)
def test_returned_tensors_must_be_asked_for_and_keep_their_shape(returned, message, pipeline, generate):
    with pytest.raises(ValueError, match=message):
        generate(pipeline, num_inference_steps=1, callback_on_step_end=lambda *_: returned)


def test_interruption_stops_before_the_next_call_and_the_next_request_runs_again(pipeline, generate):
    steps = []

    def stop_after_second(pipe, step, _timestep, _tensors):
        steps.append(step)
        pipe._interrupt = step == 1

    interrupted = generate(pipeline, num_inference_steps=4, callback_on_step_end=stop_after_second)
    assert steps == [0, 1]
    assert pipeline.interrupt
    rows = []

    def keep(_pipe, _step, _timestep, tensors):
        rows.append(tensors["latents"])

    generate(pipeline, num_inference_steps=4, callback_on_step_end=keep)
    assert not pipeline.interrupt
    assert len(rows) == 4
    assert torch.equal(interrupted[0].flatten().sort().values, rows[1].flatten().sort().values)


def test_the_progress_bar_is_the_pipelines(make_pipeline, generate, capsys):
    pipeline = make_pipeline()
    pipeline.set_progress_bar_config(desc="denoising", disable=False)
    generate(pipeline, num_inference_steps=2)
    assert "denoising: 100%" in capsys.readouterr().err
    pipeline.set_progress_bar_config(disable=True)
    generate(pipeline, num_inference_steps=2)
    assert "denoising" not in capsys.readouterr().err


def test_injected_noise_replaces_the_draws(pipeline, generate):
    generator = torch.Generator().manual_seed(7)
    config = pipeline.transformer.config
    video = torch.randn(1, config.in_channels, 37, 4, 6, generator=generator)
    # The audio noise is drawn as rows, one per channel and latent.
    audio = torch.randn(2 * 207, config.audio_in_channels, generator=generator).reshape(2, 207, -1).transpose(1, 2)
    drawn = generate(pipeline, seed=7)
    injected = generate(pipeline, seed=123, latents=video, audio_latents=audio)
    assert torch.equal(drawn[0], injected[0])
    assert torch.equal(drawn[1], injected[1])


def test_half_precision_noise_is_taken(pipeline, generate):
    shape = (1, pipeline.transformer.config.in_channels, 37, 4, 6)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(
        generate(pipeline, num_inference_steps=1, latents=noise)[0],
        generate(pipeline, num_inference_steps=1, latents=noise.float())[0],
    )


@pytest.mark.parametrize("names", [(), ("image",), ("image", "last_image")])
def test_an_encoded_prompt_gives_the_same_video_without_the_text_encoder(names, make_pipeline, generate, keyframes):
    images = dict(zip(names, keyframes, strict=False))
    pipeline = make_pipeline()
    embeds, tags = pipeline.encode_prompt("a red fox in the snow", **images, height=64, width=96)
    assert embeds.shape == (1, len(tags), pipeline.transformer.config.text_dim)
    assert set(tags.tolist()) == ({0, 1} if names else {1})

    without_encoder = make_pipeline(text_encoder=None, tokenizer=None, processor=None)
    reused = generate(without_encoder, None, prompt_embeds=embeds, text_token_tags=tags, **images)
    expected = generate(pipeline, **images)
    assert torch.equal(reused[0], expected[0])
    assert torch.equal(reused[1], expected[1])


def test_keyframes_of_any_mode_are_read_as_rgb(pipeline, generate, keyframes):
    image = keyframes[0].convert("L")
    grey = generate(pipeline, num_inference_steps=1, image=image)
    assert torch.equal(grey[0], generate(pipeline, num_inference_steps=1, image=image.convert("RGB"))[0])

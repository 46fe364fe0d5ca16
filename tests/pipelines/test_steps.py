"""Steps are transformer calls, on two clocks, and distilled weights run with their own number."""

import pytest
import torch


# 12 s / (1 + 11 s) and 3 s / (1 + 2 s) for s = 1, 7/8, …, 0.
VIDEO_SIGMAS = [1.0, 84 / 85, 36 / 37, 20 / 21, 12 / 13, 36 / 41, 4 / 5, 12 / 19, 0.0]
AUDIO_SIGMAS = [1.0, 21 / 22, 9 / 10, 5 / 6, 3 / 4, 9 / 14, 1 / 2, 3 / 10, 0.0]


@pytest.fixture
def calls(monkeypatch, hybrid_transformer):
    """Replace the transformer's work by a constant velocity of one, and record what it was called with."""
    recorded = []

    # The blocks hand over only what the signature names.
    def forward(
        hidden_states,
        audio_hidden_states,
        encoder_hidden_states,
        timestep,
        timestep_indices,
        video_indices,
        audio_indices,
        attention_kwargs,
        return_dict,
    ):
        recorded.append(
            {
                "timestep": timestep,
                "timestep_indices": timestep_indices,
                "video_indices": video_indices,
                "audio_indices": audio_indices,
            }
        )
        return torch.ones_like(hidden_states), torch.ones_like(audio_hidden_states)

    monkeypatch.setattr(hybrid_transformer, "forward", forward)
    return recorded


@pytest.mark.parametrize("steps", [1, 2, 8, 50])
def test_steps_are_transformer_calls(steps, pipeline, generate, calls):
    generate(pipeline, num_inference_steps=steps)
    assert len(calls) == steps
    assert pipeline.num_timesteps == steps


def test_the_default_is_fifty_calls_for_weights_that_run_with_any(pipeline, generate, calls):
    generate(pipeline, num_inference_steps=None)
    assert len(calls) == 50


def test_distilled_weights_run_with_their_own_number(make_pipeline, generate, calls):
    pipeline = make_pipeline(num_inference_steps=8)
    generate(pipeline, num_inference_steps=None)
    assert len(calls) == 8
    generate(pipeline, num_inference_steps=8)
    assert len(calls) == 16


def test_distilled_weights_refuse_another_number_unless_forced(make_pipeline, generate, calls):
    pipeline = make_pipeline(num_inference_steps=8)
    for steps in (1, 7, 9, 50):
        with pytest.raises(
            ValueError, match=rf"distilled for 8 .*num_inference_steps={steps}.*force_num_inference_steps"
        ):
            generate(pipeline, num_inference_steps=steps)
    assert calls == []
    generate(pipeline, num_inference_steps=4, force_num_inference_steps=True)
    assert len(calls) == 4


def test_sigmas_of_eight_calls_are_exact(pipeline, generate, calls):
    generate(pipeline, num_inference_steps=8)
    assert pipeline.scheduler.sigmas.tolist() == pytest.approx(VIDEO_SIGMAS, abs=1e-7)
    assert pipeline.audio_scheduler.sigmas.tolist() == pytest.approx(AUDIO_SIGMAS, abs=1e-7)


def test_every_row_gets_its_own_clock(pipeline, generate, calls, keyframes):
    generate(pipeline, num_inference_steps=8, image=keyframes[0])
    rows_per_frame = 2 * 3
    for step, call in enumerate(calls):
        row_times = call["timestep"][call["timestep_indices"]]
        keyframe, video = call["video_indices"].split([rows_per_frame, 37 * rows_per_frame])
        assert row_times[video].tolist() == pytest.approx([1 - VIDEO_SIGMAS[step]] * len(video), abs=1e-6)
        assert row_times[call["audio_indices"]].unique().tolist() == pytest.approx([1 - AUDIO_SIGMAS[step]], abs=1e-6)
        assert row_times[keyframe].unique().tolist() == pytest.approx([0.999], abs=1e-6)


def test_each_modality_moves_exactly_one_under_constant_velocity(pipeline, generate, calls, components):
    video = torch.zeros(1, components["vae"].config.latent_channels, 37, 4, 6)
    audio = torch.zeros(2, components["audio_vae"].config.latent_channels, 207)
    moved = []

    def record(_pipeline, step, timestep, tensors):
        moved.append([tensors[name].unique().tolist() for name in ("latents", "audio_latents")])

    end = generate(
        pipeline,
        num_inference_steps=8,
        latents=video,
        audio_latents=audio,
        callback_on_step_end=record,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    for step, (video_values, audio_values) in enumerate(moved, start=1):
        assert video_values == pytest.approx([1 - VIDEO_SIGMAS[step]], abs=1e-6)
        assert audio_values == pytest.approx([1 - AUDIO_SIGMAS[step]], abs=1e-6)
    assert len(moved) == 8
    for latents in end:
        assert torch.allclose(latents, torch.ones_like(latents), atol=1e-6)
    assert video.count_nonzero() == audio.count_nonzero() == 0, "injected noise must stay as it was"

"""Requests that cannot be served are refused by name before any model runs."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image


PROMPT = "a red fox in the snow"
IMAGE = Image.new("RGB", (64, 64))


@pytest.fixture
def idle_pipeline(make_pipeline, components, monkeypatch):
    """A pipeline whose models fail the test as soon as one of them runs."""

    def forbidden(*_arguments, **_options):
        pytest.fail("a model ran before the request was refused")

    for name in ("transformer", "text_encoder", "vae", "audio_vae"):
        monkeypatch.setattr(components[name], "forward", forbidden)
    monkeypatch.setattr(components["text_encoder"].model, "forward", forbidden)
    for name in ("vae", "audio_vae"):
        monkeypatch.setattr(components[name], "decode", forbidden)
        monkeypatch.setattr(components[name], "encode", forbidden)
    return make_pipeline()


REFUSED = {
    "no prompt": ({"prompt": None}, "either `prompt` or `prompt_embeds` .*neither"),
    "two prompts": ({"prompt_embeds": torch.zeros(1, 3, 16)}, "either `prompt` or `prompt_embeds` .*both"),
    "list of prompts": ({"prompt": ["one", "two"]}, "`prompt` must be one string, got list: .*once per prompt"),
    "empty prompt": ({"prompt": ""}, "`prompt` is empty"),
    "tags without embeds": ({"text_token_tags": torch.ones(3)}, "`text_token_tags` belongs to `prompt_embeds`"),
    "height alone": ({"height": 64, "width": None}, "together or not at all, got 64 and None"),
    "width alone": ({"height": None, "width": 64}, "together or not at all, got None and 64"),
    "height 848": ({"height": 848}, "`height` must be a positive multiple of 32 pixels, got 848; nearest: 832 or 864"),
    "width 1000": (
        {"width": 1000},
        "`width` must be a positive multiple of 32 pixels, got 1000; nearest: 992 or 1024",
    ),
    "height 31": ({"height": 31}, "got 31; nearest: 32"),
    "height 0": ({"height": 0}, "got 0; nearest: 32"),
    "height -64": ({"height": -64}, "got -64; nearest: 32"),
    "height float": ({"height": 64.0}, "`height` must be an integer, got 64.0"),
    "81 frames": ({"num_frames": 81}, r"124, 141, …, 345; got 81, nearest: 124"),
    "1 frame": ({"num_frames": 1}, "got 1, nearest: 124"),
    "0 frames": ({"num_frames": 0}, "got 0, nearest: 124"),
    "107 frames": ({"num_frames": 107}, "got 107, nearest: 124"),
    "346 frames": ({"num_frames": 346}, "got 346, nearest: 345"),
    "360 frames": ({"num_frames": 360}, "5 to 15 seconds at 24 frames per second.*got 360, nearest: 345"),
    "frames float": ({"num_frames": 124.0}, "`num_frames` must be an integer, got 124.0"),
    "frames bool": ({"num_frames": True}, "`num_frames` must be an integer, got True"),
    "0 steps": ({"num_inference_steps": 0}, "`num_inference_steps` must be at least 1, got 0"),
    "steps float": ({"num_inference_steps": 8.0}, "`num_inference_steps` must be an integer, got 8.0"),
    "output type": ({"output_type": "mp4"}, "`output_type` must be one of pil, np, pt, latent, got 'mp4'"),
    "image path": ({"image": "fox.png"}, "`image` must be one PIL image, got str: .*load_image"),
    "image list": ({"last_image": [IMAGE]}, "`last_image` must be one PIL image, got list"),
    "image array": ({"image": np.zeros((64, 64, 3))}, "`image` must be one PIL image, got ndarray"),
    "keyframe too wide": (
        {"image": Image.new("RGB", (640, 64)), "height": None, "width": None},
        "aspect ratios from 1:4 to 4:1, got 640:64",
    ),
    "generator list": ({"generator": [torch.Generator()]}, "one torch.Generator or None, got list"),
    "seed": ({"generator": 3}, "one torch.Generator or None, got int"),
    "latents array": ({"latents": np.zeros(3)}, "`latents` must be a floating-point tensor, got ndarray"),
    "latents integers": (
        {"latents": torch.zeros(1, dtype=torch.int)},
        "`latents` must be a floating-point tensor, got torch.int32",
    ),
    "latents shape": (
        {"latents": torch.zeros(1, 4, 36, 4, 4)},
        r"`latents` must have shape \(1, \d+, 37, 4, 4\) for this size and length, got \(1, 4, 36, 4, 4\)",
    ),
    "audio latents shape": (
        {"audio_latents": torch.zeros(1, 2, 8, 207)},
        r"`audio_latents` must have shape \(2, \d+, 207\) for this size and length, got \(1, 2, 8, 207\)",
    ),
    "callback": ({"callback_on_step_end": "print"}, "`callback_on_step_end` must be a function, got str"),
    "callback arguments": (
        {"callback_on_step_end": lambda step: None},
        r"`callback_on_step_end` must take \(pipeline, step, timestep, tensors\)",
    ),
    "callback tensors": (
        {"callback_on_step_end_tensor_inputs": ["latents", "noise_pred"]},
        "may name latents, audio_latents, prompt_embeds, got noise_pred",
    ),
    "references": ({"references": [IMAGE]}, r"`references` \(ref2va\) is not supported: .*not trained"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests_are_refused_before_any_model_runs(case, idle_pipeline):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        idle_pipeline(**{"prompt": PROMPT, "height": 64, "width": 64, **options})


EMBEDS = {
    "no tags": ({"text_token_tags": None}, "`prompt_embeds` needs the `text_token_tags`"),
    "no batch": ({"shape": (3, None)}, r"shape \(1, tokens, \d+\), got \(3, \d+\)"),
    "batch of two": ({"shape": (2, 3, None)}, r"shape \(1, tokens, \d+\), got \(2, 3, \d+\)"),
    "no tokens": ({"shape": (1, 0, None)}, r"shape \(1, tokens, \d+\), got \(1, 0, \d+\)"),
    "other width": ({"shape": (1, 3, 7)}, r"shape \(1, tokens, \d+\), got \(1, 3, 7\)"),
    "tags too long": ({"text_token_tags": torch.ones(4, dtype=torch.long)}, r"shape \(3,\), got \(4,\)"),
    "tags float": (
        {"text_token_tags": torch.ones(3)},
        "`text_token_tags` must be an integer tensor, got torch.float32",
    ),
    "audio tags": ({"text_token_tags": torch.tensor([1, 2, 1])}, r"1 \(text\) and 0 \(keyframe\) only, got \[1, 2\]"),
    "encoded with a keyframe": (
        {"text_token_tags": torch.tensor([1, 0, 1])},
        r"encoded with 1 keyframe\(s\), but the request has 0",
    ),
    "encoded without keyframes": ({"image": IMAGE}, r"encoded with 0 keyframe\(s\), but the request has 1"),
    "encoded with two keyframes": (
        {"text_token_tags": torch.tensor([0, 1, 0]), "last_image": IMAGE},
        r"encoded with 2 keyframe\(s\), but the request has 1",
    ),
}


@pytest.mark.parametrize("case", EMBEDS)
def test_encoded_prompts_must_fit_model_and_keyframes(case, idle_pipeline):
    options, message = EMBEDS[case]
    options = {"text_token_tags": torch.ones(3, dtype=torch.long), **options}
    shape = options.pop("shape", (1, 3, None))
    width = idle_pipeline.transformer.config.text_dim
    embeds = torch.zeros(*(width if size is None else size for size in shape))
    with pytest.raises(ValueError, match=message):
        idle_pipeline(prompt_embeds=embeds, height=64, width=64, **options)


@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        (("text_encoder",), {"prompt": PROMPT}, "no text_encoder, so it cannot encode `prompt`: pass `prompt_embeds`"),
        (("tokenizer", "processor"), {"prompt": PROMPT}, "no tokenizer, processor, so it cannot encode"),
        (("vae",), {"prompt": PROMPT}, "no vae, so it cannot decode video: pass `output_type='latent'`"),
        (
            ("vae",),
            {"prompt": PROMPT, "image": IMAGE, "output_type": "latent"},
            "no vae, so it cannot encode keyframes",
        ),
        (("audio_vae",), {"prompt": PROMPT}, "no audio_vae, so it cannot decode sound"),
    ],
)
def test_what_a_request_needs_must_be_there(missing, options, message, make_pipeline, idle_pipeline):
    pipeline = make_pipeline(**dict.fromkeys(missing))
    with pytest.raises(ValueError, match=message):
        pipeline(height=64, width=64, **options)


def test_latents_need_no_vae(make_pipeline, generate, pipeline):
    video, audio = generate(make_pipeline(vae=None, audio_vae=None), num_inference_steps=1)
    expected = generate(pipeline, num_inference_steps=1)
    assert torch.equal(video, expected[0])
    assert torch.equal(audio, expected[1])


def _other_audio_vae(audio_vae, **changes):
    config = {name: value for name, value in audio_vae.config.items() if not name.startswith("_")}
    return type(audio_vae)(**{**config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sampling_rate": 16000},
            "32000 Hz with 800 samples per latent, but the audio_vae decodes at 16000 Hz with 800",
        ),
        (
            {
                "encoder_rates": (2, 4, 4, 5, 4),
                "decoder_dim": 32,
                "decoder_rates": (20, 16, 2),
                "decoder_kernel_sizes": (20, 16, 4),
            },
            "32000 Hz with 800 samples per latent, but the audio_vae decodes at 32000 Hz with 640",
        ),
        ({"latent_channels": 16}, r"works on \d+ audio latent channels, but the audio_vae has 16"),
    ],
)
def test_the_audio_contract_is_checked_before_denoising(changes, message, make_pipeline, components, idle_pipeline):
    pipeline = make_pipeline(audio_vae=_other_audio_vae(components["audio_vae"], **changes))
    with pytest.raises(ValueError, match=message):
        pipeline(PROMPT, height=64, width=64)


@pytest.mark.parametrize(
    ("requested", "generated", "latent_frames"), [(120, 124, 37), (125, 141, 42), (340, 345, 102)]
)
def test_frame_counts_in_between_are_rounded_up_with_a_warning(requested, generated, latent_frames, pipeline, caplog):
    with caplog.at_level(logging.WARNING, logger="diffusers_h3"):
        video = pipeline(
            PROMPT, height=32, width=32, num_frames=requested, num_inference_steps=1, output_type="latent"
        ).frames
    assert video.shape[2] == latent_frames
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("diffusers_h3.pipelines")]
    assert messages == [f"`num_frames` must be of the form 17 * n + 5: rounding {requested} up to {generated}."]


def test_without_a_size_the_canvas_follows_the_first_keyframe_or_is_16_to_9(pipeline):
    from diffusers_h3.pipelines.blocks import VDNH3Components
    from diffusers_h3.pipelines.request import resolve_geometry

    components = VDNH3Components(pipeline)
    sizes = {
        (): (768, 1344),
        ((1, 1),): (768, 768),
        ((90, 160), (1, 1)): (1344, 768),
        ((400, 100),): (512, 2016),
    }
    for keyframes, size in sizes.items():
        images = [Image.new("RGB", shape) for shape in keyframes]
        geometry = resolve_geometry(components, images, None, None, 345)
        assert (geometry.height, geometry.width) == size
        assert geometry.latents_shape[2:] == (102, size[0] // 16, size[1] // 16)
        assert geometry.audio_latents_shape[::2] == (2, 575)


def test_encode_prompt_checks_its_arguments_too(idle_pipeline):
    for arguments, message in [
        ({"prompt": ["a"]}, "must be one string"),
        ({"prompt": "a", "image": "fox.png"}, "one PIL image"),
        ({"prompt": "a", "image": IMAGE, "height": 100, "width": 64}, "nearest: 96 or 128"),
    ]:
        with pytest.raises(ValueError, match=message):
            idle_pipeline.encode_prompt(**arguments)

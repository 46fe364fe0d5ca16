"""Checks of a generation request that cost nothing and run before any model does."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MINIMAX_H3_AUDIO_LATENTS_PER_SECOND,
    MiniMaxH3ModularPipeline,
    align_num_frames,
    audio_latent_num_frames,
    resolve_canvas_size,
    video_latent_num_frames,
)
from PIL import Image

from .blocks import VDNH3Components


logger = logging.getLogger(__name__)

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
CALLBACK_TENSOR_INPUTS = ("latents", "audio_latents", "prompt_embeds")

# The contract of the soundtrack: what the transformer was trained to generate and what `save` writes.
SAMPLING_RATE = 32000
DEFAULT_NUM_INFERENCE_STEPS = 50


@dataclass(frozen=True)
class Geometry:
    """Sizes of one request: pixels, frames, and the latents that follow from them.

    `latents_shape` is ``(1, channels, latent_frames, height / 16, width / 16)`` and `audio_latents_shape` is
    ``(2, channels, audio_latents)``, one batch item per stereo channel.
    """

    height: int
    width: int
    num_frames: int
    latents_shape: tuple[int, ...]
    audio_latents_shape: tuple[int, ...]


def resolve_geometry(
    components: MiniMaxH3ModularPipeline,
    keyframes: list[Image.Image],
    height: int | None,
    width: int | None,
    num_frames: int,
) -> Geometry:
    """Resolve canvas and frame count by diffusers' rules, or refuse them with the nearest legal values.

    A `MiniMaxH3ModularPipeline()` without components stands for the released models' geometry.
    """
    height, width = resolve_canvas(components, keyframes, height, width)
    num_frames = resolve_num_frames(components, num_frames)
    ratio = components.vae_spatial_compression_ratio
    latent_frames = video_latent_num_frames(
        num_frames, components.vae_frames_per_chunk, components.vae_latents_per_chunk
    )
    return Geometry(
        height,
        width,
        num_frames,
        (1, components.vae_latent_channels, latent_frames, height // ratio, width // ratio),
        (components.audio_channels, components.audio_latent_channels, audio_latent_num_frames(num_frames)),
    )


def resolve_canvas(
    components: MiniMaxH3ModularPipeline, keyframes: list[Image.Image], height: int | None, width: int | None
) -> tuple[int, int]:
    """Return `(height, width)`: as given, or for the first keyframe's aspect ratio, or for 16:9."""
    if (height is None) != (width is None):
        raise ValueError(f"`height` and `width` must be given together or not at all, got {height} and {width}.")
    if height is None:
        return resolve_canvas_size(
            *(keyframes[0].size if keyframes else (16, 9)),
            components.canvas_multiple,
            components.config.canvas_short_edge,
            components.config.canvas_max_pixels,
        )
    for name, size in (("height", height), ("width", width)):
        _require_integer(name, size)
        multiple = components.canvas_multiple
        if size < multiple or size % multiple:
            below = size // multiple * multiple
            nearest = f"{below} or {below + multiple}" if below > 0 else str(multiple)
            raise ValueError(
                f"`{name}` must be a positive multiple of {multiple} pixels, got {size}; nearest: {nearest}."
            )
    return height, width


def resolve_num_frames(components: MiniMaxH3ModularPipeline, num_frames: int) -> int:
    """Return the frame count the video VAE can decode: `num_frames` or the next larger one, with a warning."""
    _require_integer("num_frames", num_frames)
    step, offset = components.vae_frames_per_chunk, components.vae_latents_per_chunk
    shortest = align_num_frames(int(components.min_duration * components.fps), step, offset)
    longest = int(components.max_duration * components.fps)
    longest -= (longest - offset) % step
    aligned = align_num_frames(max(num_frames, 1), step, offset)
    if not shortest <= aligned <= longest:
        raise ValueError(
            f"`num_frames` must be of the form {step} * n + {offset} and make {components.min_duration:g} to "
            f"{components.max_duration:g} seconds at {components.fps} frames per second, that is {shortest}, "
            f"{shortest + step}, …, {longest}; got {num_frames}, nearest: "
            f"{shortest if num_frames < shortest else longest}."
        )
    if aligned != num_frames:
        logger.warning(
            "`num_frames` must be of the form %d * n + %d: rounding %d up to %d.", step, offset, num_frames, aligned
        )
    return aligned


def resolve_num_inference_steps(requested: int | None, trained: int | None, force: bool) -> int:
    """Return the number of transformer calls; `trained` is what the weights were distilled for, None for any."""
    if requested is None:
        return trained if trained is not None else DEFAULT_NUM_INFERENCE_STEPS
    _require_integer("num_inference_steps", requested)
    if requested < 1:
        raise ValueError(f"`num_inference_steps` must be at least 1, got {requested}.")
    if trained is not None and requested != trained and not force:
        raise ValueError(
            f"These weights were distilled for {trained} transformer calls, got `num_inference_steps={requested}`: "
            f"leave it out, or pass `force_num_inference_steps=True` to run another count all the same."
        )
    return requested


def check_keyframes(image: Image.Image | None, last_image: Image.Image | None) -> list[Image.Image]:
    """Return the keyframes given, in packed order; only PIL images are taken."""
    keyframes = []
    for name, keyframe in (("image", image), ("last_image", last_image)):
        if keyframe is None:
            continue
        if not isinstance(keyframe, Image.Image):
            raise ValueError(
                f"`{name}` must be one PIL image, got {type(keyframe).__name__}: open paths and URLs with "
                "`diffusers.utils.load_image`."
            )
        keyframes.append(keyframe)
    return keyframes


def check_prompt(
    components: VDNH3Components,
    prompt: str | None,
    prompt_embeds: torch.Tensor | None,
    text_token_tags: torch.Tensor | None,
    num_keyframes: int,
) -> None:
    """Check that the request has one prompt, as text or encoded, and that encoded text fits model and keyframes."""
    if (prompt is None) == (prompt_embeds is None):
        given = "neither" if prompt is None else "both"
        raise ValueError(f"Pass either `prompt` or `prompt_embeds` with `text_token_tags`, got {given}.")
    if prompt_embeds is None:
        if text_token_tags is not None:
            raise ValueError(
                "`text_token_tags` belongs to `prompt_embeds`; pass it only with them, not with `prompt`."
            )
        if not isinstance(prompt, str):
            raise ValueError(
                f"`prompt` must be one string, got {type(prompt).__name__}: a request is one packed sequence, so call "
                "the pipeline once per prompt."
            )
        if not prompt and not num_keyframes:
            raise ValueError("`prompt` is empty: there is nothing to condition on without text or a keyframe.")
        missing = [name for name in ("text_encoder", "tokenizer", "processor") if getattr(components, name) is None]
        if missing:
            raise ValueError(
                f"This pipeline has no {', '.join(missing)}, so it cannot encode `prompt`: pass `prompt_embeds` and "
                "`text_token_tags` from `encode_prompt` of a pipeline that has."
            )
        return
    text_dim = components.transformer.config.text_dim
    _require_tensor("prompt_embeds", prompt_embeds, floating=True)
    shape = tuple(prompt_embeds.shape)
    if len(shape) != 3 or shape[0] != 1 or shape[1] == 0 or shape[2] != text_dim:
        raise ValueError(f"`prompt_embeds` must have shape (1, tokens, {text_dim}), got {shape}.")
    if text_token_tags is None:
        raise ValueError("`prompt_embeds` needs the `text_token_tags` that `encode_prompt` returned with it.")
    _require_tensor("text_token_tags", text_token_tags, floating=False)
    if text_token_tags.shape != prompt_embeds.shape[1:2]:
        raise ValueError(
            f"`text_token_tags` must have one entry per token, shape ({prompt_embeds.shape[1]},), got "
            f"{tuple(text_token_tags.shape)}."
        )
    legal = {components.text_tag, components.video_tag}
    if not set(text_token_tags.tolist()) <= legal:
        raise ValueError(
            f"`text_token_tags` may hold {components.text_tag} (text) and {components.video_tag} (keyframe) only, got "
            f"{sorted(set(text_token_tags.tolist()))}."
        )
    # Every keyframe's vision tokens are one run of video tags behind a text label.
    is_vision = (text_token_tags == components.video_tag).int()
    num_encoded = int(is_vision[0] + (is_vision.diff() == 1).sum())
    if num_encoded != num_keyframes:
        raise ValueError(
            f"`prompt_embeds` were encoded with {num_encoded} keyframe(s), but the request has {num_keyframes}: pass "
            "the same `image` and `last_image` to `encode_prompt` and to the pipeline."
        )


def check_latents(name: str, latents: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Check injected noise against the shape the request needs."""
    if latents is None:
        return
    _require_tensor(name, latents, floating=True)
    if tuple(latents.shape) != shape:
        raise ValueError(f"`{name}` must have shape {shape} for this size and length, got {tuple(latents.shape)}.")


def check_generator(generator: torch.Generator | None) -> None:
    """Check that the request has one generator: video and audio noise are drawn from it in turn."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"`generator` must be one torch.Generator or None, got {type(generator).__name__}.")


def check_output_type(output_type: str) -> None:
    """Check the name of the output type."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"`output_type` must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}.")


def check_callback(callback: Callable | None, tensor_inputs: list[str]) -> None:
    """Check that the step callback can be called and asks for tensors the loop has."""
    if callback is not None:
        if not callable(callback):
            raise ValueError(f"`callback_on_step_end` must be a function, got {type(callback).__name__}.")
        try:
            inspect.signature(callback).bind("pipeline", 0, 0.0, {})
        except TypeError as error:
            raise ValueError(
                f"`callback_on_step_end` must take (pipeline, step, timestep, tensors), but {error}."
            ) from error
    unknown = [name for name in tensor_inputs if name not in CALLBACK_TENSOR_INPUTS]
    if unknown:
        raise ValueError(
            f"`callback_on_step_end_tensor_inputs` may name {', '.join(CALLBACK_TENSOR_INPUTS)}, got "
            f"{', '.join(map(str, unknown))}."
        )


def check_components(components: VDNH3Components, needs_encoder: bool, needs_decoders: bool) -> None:
    """Check that the VAEs a request needs are there and fit the transformer, and that audio comes out as promised."""
    vae, audio_vae = components.vae, components.audio_vae
    if vae is None and (needs_encoder or needs_decoders):
        purpose = "encode keyframes" if needs_encoder else "decode video: pass `output_type='latent'`"
        raise ValueError(f"This pipeline has no vae, so it cannot {purpose}, or load one.")
    if audio_vae is None and needs_decoders:
        raise ValueError("This pipeline has no audio_vae, so it cannot decode sound: pass `output_type='latent'`.")
    if vae is not None and vae.config.latent_channels != components.vae_latent_channels:
        raise ValueError(
            f"The transformer works on {components.vae_latent_channels} video latent channels, but the vae has "
            f"{vae.config.latent_channels}: they are from different models."
        )
    if audio_vae is None:
        return
    if audio_vae.config.latent_channels != components.audio_latent_channels:
        raise ValueError(
            f"The transformer works on {components.audio_latent_channels} audio latent channels, but the audio_vae "
            f"has {audio_vae.config.latent_channels}: they are from different models."
        )
    hop_length = SAMPLING_RATE // MINIMAX_H3_AUDIO_LATENTS_PER_SECOND
    if components.audio_sampling_rate != SAMPLING_RATE or audio_vae.hop_length != hop_length:
        raise ValueError(
            f"MiniMax-H3 generates sound at {SAMPLING_RATE} Hz with {hop_length} samples per latent, but the "
            f"audio_vae decodes at {components.audio_sampling_rate} Hz with {audio_vae.hop_length}: sound and video "
            "would not be of equal length."
        )


def _require_integer(name: str, value: int) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")


def _require_tensor(name: str, value: torch.Tensor, floating: bool) -> None:
    kind = "a floating-point" if floating else "an integer"
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"`{name}` must be {kind} tensor, got {type(value).__name__}.")
    if value.is_floating_point() != floating:
        raise ValueError(f"`{name}` must be {kind} tensor, got {value.dtype}.")

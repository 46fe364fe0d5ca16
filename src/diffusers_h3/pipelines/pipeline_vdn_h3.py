"""Text and keyframes to video with sound: MiniMax-H3 and VDN-H3 weights as a `DiffusionPipeline`."""

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    DiffusionPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
    ModelMixin,
)
from diffusers.hooks import apply_group_offloading
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3ResizeStep
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AudioDecodeStep, MiniMaxH3VideoDecodeStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3KeyframeVaeEncoderStep,
    MiniMaxH3TextEncoderStep,
)
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from PIL import Image
from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from . import request
from .blocks import VDNH3Components, VDNH3CoreDenoiseStep, VDNH3KeyframesCoreDenoiseStep
from .lora import VDNH3LoraLoaderMixin
from .memory import check_memory
from .offload import offload_as_one_group
from .pipeline_output import VDNH3PipelineOutput
from .ranks import Ranks
from .source import resolve_source


logger = logging.getLogger(__name__)


class VDNH3Pipeline(DiffusionPipeline, VDNH3LoraLoaderMixin):
    """Generate video with sound from a prompt and up to two keyframes.

    Packing, text and keyframe encoding, noise draws and decoding are diffusers' own MiniMax-H3 blocks, so one seed
    gives the latents that `MiniMaxH3ModularPipeline` gives with the same transformer. The weights are
    guidance-distilled: there is no negative prompt and every step is one transformer call.

    Args:
        transformer (`MiniMaxH3Transformer3DModel`): The denoiser, stock or `VDNH3Transformer3DModel`.
        scheduler (`MiniMaxH3Scheduler`): The video schedule, shift 12 in the release.
        audio_scheduler (`MiniMaxH3Scheduler`): The audio schedule, shift 3 in the release.
        vae (`AutoencoderKLMiniMaxH3`, *optional*): Needed to decode video and to encode keyframes.
        audio_vae (`AutoencoderKLMiniMaxH3Audio`, *optional*): Needed to decode sound.
        text_encoder (`Qwen3VLForConditionalGeneration`, *optional*): Needed, with the next two, to encode prompts.
        tokenizer (`Qwen2TokenizerFast`, *optional*): Its tokenizer.
        processor (`Qwen3VLProcessor`, *optional*): Its processor.
        num_inference_steps (`int`, *optional*): The number of transformer calls the weights were distilled for;
            None if they run with any number.

    Examples:
        >>> import torch
        >>> from diffusers_h3 import VDNH3Pipeline
        >>> from diffusers_h3.demo.release import STAGE, embedded_release
        >>> pipe = VDNH3Pipeline.from_pretrained(embedded_release() / STAGE)
        >>> generator = torch.Generator().manual_seed(0)
        >>> output = pipe("a red circle moves left to right", height=96, width=96, generator=generator)
        >>> len(output.frames[0]), output.audio.shape
        (124, torch.Size([1, 2, 165600]))
        >>> output.save("circle.mp4").name
        'circle.mp4'
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae->audio_vae"
    _optional_components = ["vae", "audio_vae", "text_encoder", "tokenizer", "processor"]
    _callback_tensor_inputs = list(request.CALLBACK_TENSOR_INPUTS)

    def __init__(
        self,
        transformer: MiniMaxH3Transformer3DModel,
        scheduler: MiniMaxH3Scheduler,
        audio_scheduler: MiniMaxH3Scheduler,
        vae: AutoencoderKLMiniMaxH3 | None = None,
        audio_vae: AutoencoderKLMiniMaxH3Audio | None = None,
        text_encoder: Qwen3VLForConditionalGeneration | None = None,
        tokenizer: Qwen2TokenizerFast | None = None,
        processor: Qwen3VLProcessor | None = None,
        num_inference_steps: int | None = None,
    ):
        super().__init__()
        self.register_modules(
            transformer=transformer,
            scheduler=scheduler,
            audio_scheduler=audio_scheduler,
            vae=vae,
            audio_vae=audio_vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            processor=processor,
        )
        self.register_to_config(num_inference_steps=num_inference_steps)
        self._interrupt = False
        self._num_timesteps = 0

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        revision: str | None = None,
        allow_unpinned: bool = False,
        cache_dir: str | os.PathLike | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **kwargs,
    ) -> "VDNH3Pipeline":
        """Load a pipeline from a folder or repository of diffusers' layout, or from an overlay.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): A directory or repository that `save_pretrained`
                wrote, or anything `load_overlay` takes: the name of a built-in overlay, an overlay repository with its
                `revision`, a manifest file, or an OpenVDN release directory. An overlay is fused with its base on
                disk first, once; later calls find it in the cache.
            revision (`str`, *optional*): Commit of a repository.
            allow_unpinned (`bool`): Take an overlay revision that is not a full commit hash.
            cache_dir (`str` or `os.PathLike`, *optional*): Cache of downloads and fused overlays.
            token (`str` or `bool`, *optional*): Access token for the hub.
            local_files_only (`bool`): Use cached and local files only; nothing is asked of the network.
            kwargs: Handed to `DiffusionPipeline.from_pretrained`: `dtype`, `device_map`, `quantization_config`,
                components, …

        Examples:
            >>> import torch
            >>> from diffusers_h3 import VDNH3Pipeline
            >>> from diffusers_h3.demo.release import STAGE, embedded_release
            >>> source = embedded_release() / STAGE  # or "vdn-h3-8step"
            >>> pipe = VDNH3Pipeline.from_pretrained(source, dtype=torch.bfloat16)
            >>> pipe.text_encoder.dtype, pipe.config.num_inference_steps
            (torch.bfloat16, 8)
        """
        hub = {"cache_dir": cache_dir, "token": token, "local_files_only": local_files_only}
        source, revision = resolve_source(pretrained_model_name_or_path, revision, allow_unpinned, **hub)
        return super().from_pretrained(source, revision=revision, **hub, **kwargs)

    @property
    def interrupt(self) -> bool:
        """Whether the running call is to stop before its next step; a callback sets `_interrupt`."""
        return self._interrupt

    @property
    def num_timesteps(self) -> int:
        """Transformer calls of the last request."""
        return self._num_timesteps

    def enable_group_offload(
        self,
        onload_device: torch.device,
        offload_device: torch.device = torch.device("cpu"),  # noqa: B008
        offload_type: str = "block_level",
        num_blocks_per_group: int | None = None,
        *,
        exclude_modules: str | list[str] | None = None,
        **kwargs,
    ) -> None:
        """Keep weights on `offload_device` and move them in small groups while they are needed.

        As `DiffusionPipeline.enable_group_offload`, except for what these components cannot do. `audio_vae` stays on
        `onload_device`, because its weight norms run before its hooks would. The work of `text_encoder` and `vae`
        starts in a method other than `forward`, where the hook of the top-level group of `block_level` never fires, so
        whatever `offload_type` says, `text_encoder` is offloaded per leaf and `vae` as one group, without streams: it
        is on the device while it encodes or decodes, and each weight is copied once for all tiles of a clip.

        Examples:
            >>> import torch
            >>> from diffusers_h3 import VDNH3Pipeline
            >>> from diffusers_h3.demo.release import STAGE, embedded_release
            >>> pipe = VDNH3Pipeline.from_pretrained(embedded_release() / STAGE)
            >>> onload = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            >>> pipe.enable_group_offload(onload, num_blocks_per_group=1)
        """
        excluded = [exclude_modules] if isinstance(exclude_modules, str) else list(exclude_modules or [])
        unknown = sorted(set(excluded) - set(self.components))
        if unknown:
            raise ValueError(
                f"`exclude_modules` names {', '.join(unknown)}, but has only {', '.join(self.components)}."
            )
        for name, component in self.components.items():
            if not isinstance(component, torch.nn.Module):
                continue
            if name == "audio_vae" or name in excluded:
                component.to(onload_device)
                continue
            options = {**kwargs, "onload_device": onload_device, "offload_device": offload_device}
            options.update(offload_type=offload_type, num_blocks_per_group=num_blocks_per_group)
            if name == "text_encoder":
                options["offload_type"] = "leaf_level"
            if name == "vae":
                offload_as_one_group(component, ("encode", "decode"), **options)
            elif isinstance(component, ModelMixin):
                component.enable_group_offload(**options)
            else:
                apply_group_offloading(component, **options)

    @torch.no_grad()
    def encode_prompt(
        self,
        prompt: str,
        image: Image.Image | None = None,
        last_image: Image.Image | None = None,
        height: int | None = None,
        width: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode a prompt, with the keyframes the text encoder is to see, for later calls.

        The result works with a pipeline whose `text_encoder` is None. With keyframes, pass the same ones and the same
        size to the call: the encoder sees them on the canvas of the video.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: `prompt_embeds` of shape ``(1, tokens, text_dim)`` in the encoder's
            dtype, and `text_token_tags` of shape ``(tokens,)``, the modality of every token.

        Examples:
            >>> from diffusers_h3 import VDNH3Pipeline
            >>> from diffusers_h3.demo.release import STAGE, embedded_release
            >>> pipe = VDNH3Pipeline.from_pretrained(embedded_release() / STAGE)
            >>> prompt_embeds, text_token_tags = pipe.encode_prompt("a cyan square rises to the top")
            >>> pipe.text_encoder = None  # its memory is free now
            >>> encoded = {"prompt_embeds": prompt_embeds, "text_token_tags": text_token_tags}
            >>> output = pipe(**encoded, height=96, width=96, output_type="latent")
        """
        components = VDNH3Components(self)
        keyframes = request.check_keyframes(image, last_image)
        request.check_prompt(components, prompt, None, None, len(keyframes))
        height, width = request.resolve_canvas(components, keyframes, height, width)
        state = _new_state(prompt=prompt, image=image, last_image=last_image, height=height, width=width)
        _encode_text(components, state, keyframes)
        self.maybe_free_model_hooks()
        return state.get("prompt_embeds"), state.get("text_token_tags")

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | None = None,
        image: Image.Image | None = None,
        last_image: Image.Image | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int = 124,
        num_inference_steps: int | None = None,
        generator: torch.Generator | None = None,
        latents: torch.Tensor | None = None,
        audio_latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        text_token_tags: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[["VDNH3Pipeline", int, torch.Tensor, dict], dict | None] | None = None,
        callback_on_step_end_tensor_inputs: list[str] | tuple[str, ...] = ("latents",),
        attention_kwargs: dict[str, Any] | None = None,
        force_num_inference_steps: bool = False,
        references: Any = None,
    ) -> VDNH3PipelineOutput | tuple:
        """Generate one video with sound.

        Args:
            prompt (`str`, *optional*): What to generate; one string.
            image (`PIL.Image.Image`, *optional*): Keyframe the video starts from.
            last_image (`PIL.Image.Image`, *optional*): Keyframe the video ends on, alone or together with `image`.
            height (`int`, *optional*): Height in pixels, a multiple of 32.
            width (`int`, *optional*): Width in pixels, a multiple of 32. Without `height` and `width` the canvas has
                the first keyframe's aspect ratio, or 16:9, at the size the model was trained for.
            num_frames (`int`): Frames at 24 per second: 124, 141, …, 345. Other counts in between are rounded up.
            num_inference_steps (`int`, *optional*): Transformer calls; by default what the weights were distilled
                for, or 50.
            generator (`torch.Generator`, *optional*): Source of all noise of the request. Under context parallelism
                every rank draws what rank 0's generator gives.
            latents (`torch.Tensor`, *optional*): Video noise of shape ``(1, 24, latent_frames, height / 16,
                width / 16)`` instead of a draw; it is left unchanged.
            audio_latents (`torch.Tensor`, *optional*): Audio noise of shape ``(2, 32, audio_latents)``.
            prompt_embeds (`torch.Tensor`, *optional*): Encoded prompt from `encode_prompt`, instead of `prompt`.
            text_token_tags (`torch.Tensor`, *optional*): The tags `encode_prompt` returned with it.
            output_type (`str`): `"pil"`, `"np"`, `"pt"`, or `"latent"` to skip decoding.
            return_dict (`bool`): Whether to return a `VDNH3PipelineOutput`; otherwise `(frames, audio)`.
            callback_on_step_end (`Callable`, *optional*): Called as `callback(pipeline, step, timestep, tensors)`
                after every step; tensors it returns by name replace those of the loop.
            callback_on_step_end_tensor_inputs (`list[str]`): Which of `latents`, `audio_latents` (both packed: one
                row per token, keyframe rows first) and `prompt_embeds` the callback gets.
            attention_kwargs (`dict`, *optional*): Handed to the transformer, for instance `{"scale": 0.5}` for LoRA.
            force_num_inference_steps (`bool`): Run distilled weights with another number of calls all the same.
            references (*optional*): Refused: reference-to-video needs other weights.

        Returns:
            [`VDNH3PipelineOutput`] or `tuple`: frames as `output_type` says, audio ``(1, 2, samples)`` in [-1, 1] at
            `sampling_rate`. With `output_type="latent"` the two hold the latents. Under context parallelism every rank
            has the latents and rank 0 alone decodes: on the others, frames and audio are None and `save` does nothing.

        Raises:
            ValueError: If the request is not one the weights can serve, its activations cannot fit on the GPU, or
                ranks that share the transformer ask for different videos; checked before any model runs.
            RuntimeError: Under context parallelism, if another rank ended or stopped answering.

        Examples:
            >>> from PIL import Image
            >>> from diffusers_h3 import VDNH3Pipeline
            >>> from diffusers_h3.demo.release import STAGE, embedded_release
            >>> pipe = VDNH3Pipeline.from_pretrained(embedded_release() / STAGE)
            >>> keyframe = Image.new("RGB", (96, 64), "orange")
            >>> output = pipe("a red circle moves left to right", image=keyframe, height=64, width=96, num_frames=141)
            >>> len(output.frames[0]), output.frames[0][0].size, output.sampling_rate
            (141, (96, 64), 32000)
        """
        if references is not None:
            raise ValueError(
                "`references` (ref2va) is not supported: these weights were not trained for it. Use `image` and "
                "`last_image`, or diffusers' MiniMaxH3ModularPipeline with the `transformer_ref` of the base model."
            )
        components = VDNH3Components(self)
        keyframes = request.check_keyframes(image, last_image)
        request.check_output_type(output_type)
        request.check_components(components, bool(keyframes), output_type != "latent")
        request.check_prompt(components, prompt, prompt_embeds, text_token_tags, len(keyframes))
        geometry = request.resolve_geometry(components, keyframes, height, width, num_frames)
        request.check_latents("latents", latents, geometry.latents_shape)
        request.check_latents("audio_latents", audio_latents, geometry.audio_latents_shape)
        request.check_generator(generator)
        request.check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        steps = request.resolve_num_inference_steps(
            num_inference_steps, self.config.num_inference_steps, force_num_inference_steps
        )
        check_memory(components, geometry, len(keyframes), prompt_embeds)
        ranks = Ranks(self.transformer)
        ranks.agree(
            prompt=prompt,
            image=image,
            last_image=last_image,
            height=geometry.height,
            width=geometry.width,
            num_frames=geometry.num_frames,
            num_inference_steps=steps,
            latents=latents,
            audio_latents=audio_latents,
            prompt_embeds=prompt_embeds,
            text_token_tags=text_token_tags,
            output_type=output_type,
        )
        generator = ranks.share_generator(generator)

        self._interrupt = False
        self._num_timesteps = steps
        state = _new_state(
            prompt=prompt,
            image=image,
            last_image=last_image,
            height=geometry.height,
            width=geometry.width,
            num_frames=geometry.num_frames,
            # The blocks count the points of the schedule, of which the last, sigma 0, needs no transformer call.
            num_inference_steps=steps + 1,
            generator=generator,
            latents=latents,
            audio_latents=audio_latents,
            attention_kwargs=attention_kwargs,
            callback_on_step_end=callback_on_step_end,
            callback_on_step_end_tensor_inputs=list(callback_on_step_end_tensor_inputs),
        )
        _encode_text(components, state, keyframes, prompt_embeds, text_token_tags)
        if keyframes:
            MiniMaxH3KeyframeVaeEncoderStep()(components, state)
        with ranks.together():
            (VDNH3KeyframesCoreDenoiseStep if keyframes else VDNH3CoreDenoiseStep)()(components, state)
        output = _decode(components, state, output_type, ranks)
        self.maybe_free_model_hooks()
        return output if return_dict else (output.frames, output.audio)


def _new_state(**inputs) -> PipelineState:
    """Return the state that diffusers' blocks read a request from."""
    state = PipelineState()
    for name, value in inputs.items():
        state.set(name, value)
    return state


def _encode_text(
    components: VDNH3Components,
    state: PipelineState,
    keyframes: list[Image.Image],
    prompt_embeds: torch.Tensor | None = None,
    text_token_tags: torch.Tensor | None = None,
) -> None:
    """Put keyframes on the canvas, and into the state the encoded prompt: the one given or a new one."""
    if keyframes:
        # The blocks read exactly three channels.
        for name in ("image", "last_image"):
            if state.get(name) is not None:
                state.set(name, state.get(name).convert("RGB"))
        MiniMaxH3ResizeStep()(components, state)
    if prompt_embeds is not None:
        state.set("prompt_embeds", prompt_embeds.to(components._execution_device))
        state.set("text_token_tags", text_token_tags.cpu())
    elif keyframes:
        MiniMaxH3FL2VATextEncoderStep()(components, state)
    else:
        MiniMaxH3TextEncoderStep()(components, state)


def _decode(components: VDNH3Components, state: PipelineState, output_type: str, ranks: Ranks) -> VDNH3PipelineOutput:
    """Decode both modalities unless latents are asked for, and name the ones that hold NaN or infinity."""
    if output_type != "latent" and not ranks.decodes:
        return VDNH3PipelineOutput(None, None, components.audio_sampling_rate)
    tensors = {"video": [state.get("latents")], "audio": [state.get("audio_latents")]}
    if output_type != "latent":
        # Frames are asked for as tensors: in 8-bit images NaN could not be told from black.
        state.set("output_type", "pt")
        MiniMaxH3VideoDecodeStep()(components, state)
        MiniMaxH3AudioDecodeStep()(components, state)
        # The latents stay in the check, because the decoder clamps infinity to a valid pixel.
        tensors["video"].append(state.get("videos"))
        tensors["audio"].append(state.get("audio"))
    nonfinite = tuple(name for name, parts in tensors.items() if not all(part.isfinite().all() for part in parts))
    for name in nonfinite:
        logger.warning(
            "The generated %s holds NaN or infinity; float16 overflows, load the pipeline in bfloat16 or float32.",
            name,
        )
    frames, audio = tensors["video"][-1], tensors["audio"][-1].cpu()
    if output_type == "pil":
        frames = frames.nan_to_num()
    if output_type in ("pil", "np"):
        frames = components.video_processor.postprocess_video(frames.transpose(1, 2), output_type)
    return VDNH3PipelineOutput(frames, audio, components.audio_sampling_rate, nonfinite=nonfinite)

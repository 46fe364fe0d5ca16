"""diffusers' MiniMax-H3 blocks, put to work for a `DiffusionPipeline`: shared components and our denoising loop."""

import torch
from diffusers.modular_pipelines.minimax_h3.denoise import MiniMaxH3DenoiseStep
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3FL2VACoreDenoiseStep,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam


class VDNH3Components(MiniMaxH3ModularPipeline):
    """The components and constants that diffusers' MiniMax-H3 blocks read, shared with a `VDNH3Pipeline`.

    Built anew for every call, so that a component replaced on the pipeline is the one that runs.
    """

    def __init__(self, pipeline):
        # `fl2va` is the workflow with the most components that need no second transformer.
        super().__init__(workflow="fl2va")
        self.pipeline = pipeline
        for name, component in pipeline.components.items():
            setattr(self, name, component)

    @property
    def _execution_device(self) -> torch.device:
        """The pipeline's device, which knows the pipeline's offloading hooks."""
        return self.pipeline._execution_device

    @property
    def vae_latent_channels(self) -> int:
        """Channels of the video latents; the transformer decides, since latents can be made without a VAE."""
        return self.transformer.config.in_channels

    @property
    def audio_latent_channels(self) -> int:
        """Channels of the audio latents, as the transformer takes them."""
        return self.transformer.config.audio_in_channels


class VDNH3DenoiseStep(MiniMaxH3DenoiseStep):
    """diffusers' denoising loop with the pipeline's progress bar, interruption and step callback."""

    @property
    def loop_inputs(self) -> list[InputParam]:
        """The stock inputs and the step callback of the request."""
        return [
            *super().loop_inputs,
            InputParam(
                name="callback_on_step_end",
                description="Called after every step as `callback(pipeline, step, timestep, tensors)`.",
            ),
            InputParam(
                name="callback_on_step_end_tensor_inputs",
                type_hint=list[str],
                description="Names of the tensors handed to the callback.",
            ),
        ]

    @torch.no_grad()
    def __call__(self, components: VDNH3Components, state: PipelineState) -> tuple[VDNH3Components, PipelineState]:
        """Denoise the packed rows over both schedules, one transformer call per step."""
        pipeline = components.pipeline
        block_state = self.get_block_state(state)
        with pipeline.progress_bar(total=len(block_state.timesteps)) as progress_bar:
            for step, timestep in enumerate(block_state.timesteps):
                if pipeline.interrupt:
                    break
                components, block_state = self.loop_step(components, block_state, i=step, t=timestep)
                if block_state.callback_on_step_end is not None:
                    _run_callback(pipeline, block_state, step, timestep)
                progress_bar.update()
        self.set_block_state(state, block_state)
        return components, state


def _run_callback(pipeline, block_state, step: int, timestep: torch.Tensor) -> None:
    """Call the step callback and take over the tensors it returns."""
    names = block_state.callback_on_step_end_tensor_inputs
    # The scheduler step writes the rows in place: a callback that keeps a tensor must not see it change later.
    tensors = {name: getattr(block_state, name).clone() for name in names}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    returned = block_state.callback_on_step_end(pipeline, step, timestep, tensors)
    if returned is None:
        return
    for name, tensor in returned.items():
        if name not in shapes:
            raise ValueError(
                f"`callback_on_step_end` returned {name!r}, which it did not ask for: name it in "
                f"`callback_on_step_end_tensor_inputs`, now {list(names)}."
            )
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"`callback_on_step_end` must return {name!r} in its own shape {tuple(shapes[name])}, got "
                f"{tuple(tensor.shape)}."
            )
        setattr(block_state, name, tensor.clone())


def _with_own_loop(blocks: list) -> list:
    """Replace diffusers' denoising loop in a list of block classes by ours."""
    return [VDNH3DenoiseStep if block is MiniMaxH3DenoiseStep else block for block in blocks]


class VDNH3CoreDenoiseStep(MiniMaxH3CoreDenoiseStep):
    """diffusers' `t2va` denoising workflow around our loop."""

    block_classes = _with_own_loop(MiniMaxH3CoreDenoiseStep.block_classes)


class VDNH3KeyframesCoreDenoiseStep(MiniMaxH3FL2VACoreDenoiseStep):
    """diffusers' keyframe denoising workflow around our loop."""

    block_classes = _with_own_loop(MiniMaxH3FL2VACoreDenoiseStep.block_classes)

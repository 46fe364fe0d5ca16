"""Generate from held-out prompts with the pipeline and count what is recognised."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import MiniMaxH3Transformer3DModel

from diffusers_h3 import VDNH3Pipeline
from diffusers_h3.demo.contact_sheet import Clip

from . import data
from .autoencoders import load_autoencoders, pixel_statistics, to_pixels
from .components import make_schedulers
from .dense import load_dense
from .hybrid import load_hybrid
from .latents import latent_shape
from .recognise import hear, see
from .release import MANY_STEP_STAGE, TURBO_STAGE
from .text import PromptEncoder
from .turbo import load_turbo


# What each stage's transformer is sampled with.
CALLS = {"dense": 50, "hybrid": 50, "turbo": 8}


@dataclass(frozen=True)
class LabelledClip(Clip):
    """A clip and what it should show."""

    colour: str
    shape: str
    motion: str


def run_pipeline(run: Path, stage: str, device: torch.device) -> VDNH3Pipeline:
    """Assemble a pipeline around the transformer as a stage of a run left it, adapters beside the weights."""
    prompt_encoder = PromptEncoder(run, device)
    vae, audio_vae = load_autoencoders(run, device)
    loaders = {
        "dense": load_dense,
        "hybrid": lambda *arguments: load_hybrid(*arguments, stage="hybrid"),
        "turbo": load_turbo,
    }
    scheduler, audio_scheduler = make_schedulers()
    return VDNH3Pipeline(
        transformer=loaders[stage](run, device, prompt_encoder.text_dim).eval(),
        scheduler=scheduler,
        audio_scheduler=audio_scheduler,
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=prompt_encoder.encoder,
        tokenizer=prompt_encoder.tokenizer,
        processor=prompt_encoder.processor,
    )


def release_pipeline(release: Path, stage: str, device: torch.device, cache_dir: Path) -> VDNH3Pipeline:
    """Load a published stage through its overlay, merged, in float32; `"dense"` is its base alone."""
    folders = {"dense": MANY_STEP_STAGE, "hybrid": MANY_STEP_STAGE, "turbo": TURBO_STAGE}
    options = {"local_files_only": True, "dtype": torch.float32}
    pipeline = VDNH3Pipeline.from_pretrained(release / folders[stage], cache_dir=cache_dir, **options)
    if stage == "dense":
        # Put in afterwards: `from_pretrained` takes no transformer of another class than the folder names.
        base = MiniMaxH3Transformer3DModel.from_pretrained(release / "h3-base" / "transformer", **options)
        pipeline.register_modules(transformer=base)
    return pipeline.to(device)


def generate(
    pipeline: VDNH3Pipeline,
    scenes: data.Scenes,
    calls: int,
    seed: int = 0,
    num_frames: int = data.NUM_FRAMES,
    size: int = data.SIZE,
) -> Iterator[LabelledClip]:
    """Generate a clip for the sentence of every scene, each from a seed of its own."""
    pipeline.set_progress_bar_config(disable=True)
    for index, prompt in enumerate(data.prompts(scenes, seed)):
        result = pipeline(
            prompt=prompt,
            height=size,
            width=size,
            num_frames=num_frames,
            num_inference_steps=calls,
            generator=torch.Generator().manual_seed(1000 * seed + index),
            output_type="np",
        )
        yield _clip(scenes[index], prompt, result.frames[0], result.audio[0].cpu().numpy())


@torch.no_grad()
def ground_truth(
    scenes: data.Scenes, run: Path | None = None, device: torch.device | None = None
) -> Iterator[LabelledClip]:
    """Yield the clips of scenes as they are drawn or, given a run, as its autoencoders give them back."""
    if run is not None:
        vae, audio_vae = load_autoencoders(run, device)
    for index, prompt in enumerate(data.prompts(scenes, seed=0)):
        scene = scenes[index : index + 1]
        video = data.render_video(scene)
        audio = data.render_audio(scene, latent_shape(data.NUM_FRAMES, data.SIZE).audio)[0]
        if run is not None:
            video = vae(to_pixels(video).to(device)).sample.cpu()
            mean, std = pixel_statistics(video.device)
            video = (video * std + mean).clamp(0, 1)
            audio = audio_vae(audio[:, None].to(device)).sample[:, 0].cpu()
        yield _clip(scenes[index], prompt, video[0].permute(1, 2, 3, 0).numpy(), audio.numpy())


def score(clips: Iterable[LabelledClip]) -> dict[str, float]:
    """Return the parts of clips whose colour, shape, motion, pitch and pan are right, and that are right in all."""
    verdicts = []
    for clip in clips:
        sight = see(clip.frames)
        sound = hear(clip.audio, sight.centres)
        verdict = {
            "colour": sight.colour == clip.colour,
            "shape": sight.shape == clip.shape,
            "motion": sight.motion == clip.motion,
            "pitch": sound.shape == clip.shape,
            "pan": sound.pan_follows,
        }
        verdicts.append(verdict | {"all": all(verdict.values())})
    if not verdicts:
        raise ValueError("There are no clips to score.")
    return {name: sum(verdict[name] for verdict in verdicts) / len(verdicts) for name in verdicts[0]} | {
        "clips": len(verdicts)
    }


def save_clips(path: Path, clips: list[Clip]) -> None:
    """Save clips as `.npz`: `prompts`, `frames` in 8 bits ``[N, T, H, W, 3]`` and `audio` in 16 bits ``[N, 2, S]``."""
    np.savez_compressed(
        path,
        prompts=np.array([clip.prompt for clip in clips]),
        frames=np.stack([(clip.frames * 255).round().astype(np.uint8) for clip in clips]),
        audio=np.stack([(clip.audio.clip(-1, 1) * 32767).astype(np.int16) for clip in clips]),
    )


def _clip(scene: data.Scenes, prompt: str, frames: np.ndarray, audio: np.ndarray) -> LabelledClip:
    names = data.COLOUR_NAMES[scene.colour], data.SHAPE_NAMES[scene.shape], data.MOTION_NAMES[scene.motion]
    return LabelledClip(prompt, frames, audio, *names)

"""The demo: the embedded release takes the very path of a real one, from overlay to pipeline to mp4."""

from pathlib import Path

import torch

from ..overlays import load_overlay, materialize_overlay
from ..pipelines.media import write_complete
from ..pipelines.pipeline_vdn_h3 import VDNH3Pipeline
from .contact_sheet import Clip, contact_sheet
from .grammar import NUM_FRAMES, SIZE
from .probe import MediaReport, probe_media
from .release import STAGE, embedded_release


def make_demo_video(
    output: str | Path,
    prompt: str,
    seed: int = 0,
    sheet: str | Path | None = None,
    cache_dir: str | Path | None = None,
    overwrite: bool = False,
) -> MediaReport:
    """Generate a clip with the embedded release on the CPU, save it, and decode what was saved.

    Args:
        output (`str` or `Path`): The mp4 to write; missing folders are created.
        prompt (`str`): The prompt, best a sentence of the grammar.
        seed (`int`): Seed of the noise. The weights are always the same.
        sheet (`str` or `Path`, *optional*): A picture to write as well: frames with the waveforms under them.
        cache_dir (`str` or `Path`, *optional*): Where the materialised folder is kept.
        overwrite (`bool`): Whether `output` and `sheet` may be replaced.

    Returns:
        `MediaReport`: what the mp4 holds.
    """
    overlay = load_overlay(embedded_release() / STAGE)
    # The autoencoders are stored in half precision, which a CPU computes slowly or not at all.
    pipeline = VDNH3Pipeline.from_pretrained(
        materialize_overlay(overlay, cache_dir=cache_dir), dtype=torch.float32, local_files_only=True
    )
    result = pipeline(
        prompt=prompt,
        height=SIZE,
        width=SIZE,
        num_frames=NUM_FRAMES,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    saved = result.save(output, overwrite=overwrite)
    if sheet is not None:
        sheet = Path(sheet)
        sheet.parent.mkdir(parents=True, exist_ok=True)
        write_complete(sheet, contact_sheet([Clip(prompt, result.frames[0], result.audio[0].numpy())]).save, overwrite)
    return probe_media(saved)

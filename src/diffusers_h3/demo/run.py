"""The demo: the embedded release takes the very path of a real one, from overlay to pipeline to mp4."""

import shutil
from pathlib import Path

import torch
from filelock import FileLock

from .._version import __version__
from ..overlays import default_cache_dir, load_overlay, materialize_overlay
from ..pipelines.pipeline_vdn_h3 import VDNH3Pipeline
from .probe import MediaReport, probe_media
from .release import build_release


STAGE = "stage-dmd-step-250"

# The smallest canvas of two by two patches, and the shortest clip the model makes.
_HEIGHT = _WIDTH = 64
_NUM_FRAMES = 124


def cached_release(cache_dir: str | Path | None = None) -> Path:
    """Return the embedded release below `cache_dir`, building it on first use; safe for several processes at once."""
    folder = (Path(cache_dir) if cache_dir is not None else default_cache_dir()) / "demo"
    # The seed and this version decide the content, so another version builds its own.
    release = folder / f"release-{__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{release.name}.lock"):
        if not release.is_dir():
            for leftover in folder.glob(f".{release.name}-*"):
                # The scratch folder of a build that was killed.
                shutil.rmtree(leftover, ignore_errors=True)
            build_release(release)
    return release


def make_demo_video(
    output: str | Path,
    prompt: str,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    overwrite: bool = False,
) -> MediaReport:
    """Generate a clip with the embedded release on the CPU, save it, and decode what was saved.

    Args:
        output (`str` or `Path`): The mp4 to write; missing folders are created.
        prompt (`str`): The prompt.
        seed (`int`): Seed of the noise. The weights are always the same.
        cache_dir (`str` or `Path`, *optional*): Where release and materialised folder are kept.
        overwrite (`bool`): Whether `output` may be replaced.

    Returns:
        `MediaReport`: what the file holds.
    """
    overlay = load_overlay(cached_release(cache_dir) / STAGE)
    pipeline = VDNH3Pipeline.from_pretrained(materialize_overlay(overlay, cache_dir=cache_dir), local_files_only=True)
    result = pipeline(
        prompt=prompt,
        height=_HEIGHT,
        width=_WIDTH,
        num_frames=_NUM_FRAMES,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    )
    output = Path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    return probe_media(result.save(output, overwrite=overwrite))

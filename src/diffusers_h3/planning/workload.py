"""What one transformer call of the released VDN-H3 weights computes and holds, from shapes alone."""

from dataclasses import dataclass
from functools import cache

from ..hybrid.config import HybridAttentionConfig
from .cards import Rates


# The released transformer: heads × channels, and bytes in its stored dtypes (bf16 with float32 islands).
NUM_BLOCKS = 50
INNER_DIM = 7168
BLOCK_BYTES = 1_376_744_528
OUTSIDE_BYTES = 1_723_246_080
# MiniMax-H3's own transformer, without the linear branch.
STOCK_BYTES = 66_280_430_080
# The largest single layer, a block's AdaLN projection, which fp8 does not touch.
LARGEST_LAYER_BYTES = 520_418_304
# Weights of one block that fp8 stores in one byte instead of two, and the rows that get a float32 scale each.
WIDE_WEIGHTS = 423_886_848
WIDE_ROWS = 66_304

# Shares of the published peaks that an H200 reached at 345 frames in fp8, by the profile in benchmarks/RESULTS.md:
# 4.41 PFLOP of matrix products in 2.99 s, 3.13 PFLOP of attention in 4.89 s, everything else in 1.94 s at 4.8 TB/s.
_MATRIX_SHARE = 0.746
_ATTENTION_SHARE = 0.647
_OTHER_BYTES_PER_ROW = 1.79e6

OFFLOADS = ("none", "block", "leaf")


@dataclass(frozen=True)
class Clip:
    """A request in pixels, frames and rows of the packed sequence."""

    height: int
    width: int
    num_frames: int
    latent_frames: int
    rows_per_frame: int
    audio_rows: int
    text_rows: int

    @property
    def video_rows(self) -> int:
        """Rows of the target video."""
        return self.latent_frames * self.rows_per_frame

    @property
    def rows(self) -> int:
        """Length of the packed sequence."""
        return self.text_rows + self.audio_rows + self.video_rows


@cache
def resolve_clip(height: int | None, width: int | None, num_frames: int, text_rows: int) -> Clip:
    """Apply the pipeline's own rules of size and length; without a size it is 16:9, as in the pipeline.

    Raises:
        ValueError: For an illegal size or length, with the nearest legal values.
    """
    from diffusers.modular_pipelines import MiniMaxH3ModularPipeline

    from ..pipelines.memory import count_rows
    from ..pipelines.request import resolve_geometry

    # Without components, it has the geometry of the released weights.
    released = MiniMaxH3ModularPipeline()
    geometry = resolve_geometry(released, [], height, width, num_frames)
    latent_frames = geometry.latents_shape[2]
    audio_channels, _, audio_latents = geometry.audio_latents_shape
    audio_rows = audio_channels * audio_latents
    video_rows = count_rows(released, geometry, 0, 0) - audio_rows
    return Clip(
        geometry.height,
        geometry.width,
        geometry.num_frames,
        latent_frames,
        video_rows // latent_frames,
        audio_rows,
        text_rows,
    )


def attention_pairs(clip: Clip) -> int:
    """Return how many (query, key) pairs one layer's window holds, anchors and global rows included."""
    config = HybridAttentionConfig()
    global_rows = clip.rows - clip.video_rows
    last = clip.latent_frames - 1
    # Global rows and the two anchor frames see everything and are seen by all.
    pairs = (global_rows + 2 * clip.rows_per_frame) * clip.rows
    for frame in range(1, last):
        chunk = frame // config.chunk
        first_seen = max((chunk - config.radius) * config.chunk, 0)
        last_seen = min((chunk + config.radius + 1) * config.chunk - 1, last)
        frames_seen = last_seen - first_seen + 1 + (first_seen > 0) + (last_seen < last)
        pairs += clip.rows_per_frame * (global_rows + frames_seen * clip.rows_per_frame)
    return pairs


def model_seconds(clip: Clip, precision: str, attention_precision: str, rates: Rates) -> float:
    """Return the seconds one call would take at the shares of the peaks that were measured once.

    Estimates use it for ratios only: between lengths, canvases and cards.
    """
    products = 2 * clip.rows * WIDE_WEIGHTS * NUM_BLOCKS
    attention = 4 * attention_pairs(clip) * INNER_DIM * NUM_BLOCKS
    other = clip.rows * NUM_BLOCKS * _OTHER_BYTES_PER_ROW
    return (
        products / (rates.operations(precision) * _MATRIX_SHARE)
        + attention / (rates.operations(attention_precision) * _ATTENTION_SHARE)
        + other / (rates.memory * 1e9)
    )


def block_bytes(precision: str) -> int:
    """Return the bytes of one block's weights."""
    return BLOCK_BYTES - (WIDE_WEIGHTS - 4 * WIDE_ROWS if precision == "fp8" else 0)


def weight_bytes(precision: str) -> int:
    """Return the bytes of the transformer's weights."""
    return NUM_BLOCKS * block_bytes(precision) + OUTSIDE_BYTES


def resident_bytes(precision: str, offload: str, use_stream: bool = False) -> int:
    """Return the bytes of the weights that are on the GPU at once.

    Group offload by block keeps one block and everything outside the blocks; by leaf, one layer. Streams bring the
    next one while one is in use.
    """
    groups = 2 if use_stream else 1
    return {
        "none": weight_bytes(precision),
        "block": groups * block_bytes(precision) + OUTSIDE_BYTES,
        "leaf": groups * LARGEST_LAYER_BYTES,
    }[offload]


def moved_bytes(precision: str, offload: str) -> int:
    """Return the bytes of weights that one call moves to the GPU."""
    return 0 if offload == "none" else weight_bytes(precision)

"""Refuse requests whose activations cannot fit on the GPU, before any model runs."""

import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import align_num_frames

from .blocks import VDNH3Components
from .request import Geometry, resolve_geometry


# Activations of one row at the peak, in units of one row of queries. Measured on an H200 at the released shapes as
# peak above the weights: 9.1 with dense attention and 9.8 with hybrid attention and fp8 linears, both compiled, and
# 12.7 with hybrid attention, eager. It is below the least of them, because what fits must never be refused.
_QUERIES_PER_ROW = 9


def activation_bytes(transformer: MiniMaxH3Transformer3DModel, rows: int, dtype: torch.dtype) -> int:
    """Return a lower bound, in bytes, of what a forward pass over `rows` rows in `dtype` needs beside the weights.

    With `enable_parallelism` it is the share of one process.
    """
    inner_dim = transformer.config.num_attention_heads * transformer.config.attention_head_dim
    # No sharding, of the sequence or of the heads, leaves a process less than its share of the world.
    processes = 1 if transformer._parallel_config is None else torch.distributed.get_world_size()
    return rows * inner_dim * dtype.itemsize * _QUERIES_PER_ROW // processes


def count_rows(components: VDNH3Components, geometry: Geometry, num_keyframes: int, num_text_rows: int) -> int:
    """Return the length of the packed sequence: text, keyframes, audio and video."""
    _, _, latent_frames, latent_height, latent_width = geometry.latents_shape
    audio_channels, _, num_audio_latents = geometry.audio_latents_shape
    _, patch_height, patch_width = components.patch_size
    rows_per_frame = (latent_height // patch_height) * (latent_width // patch_width)
    return num_text_rows + audio_channels * num_audio_latents + (num_keyframes + latent_frames) * rows_per_frame


def check_memory(
    components: VDNH3Components, geometry: Geometry, num_keyframes: int, prompt_embeds: torch.Tensor | None
) -> None:
    """Refuse a request whose activations alone exceed the memory of the CUDA device it runs on.

    The bound is a lower one: it leaves out the text of a prompt that is not encoded yet, and counts weights only where
    they stay on the device. Other devices are not checked.

    Raises:
        ValueError: With the sizes, and the longest video and largest canvas that would pass.
    """
    device = components._execution_device
    if device.type != "cuda":
        return
    transformer = components.transformer
    num_text_rows = 0 if prompt_embeds is None else prompt_embeds.shape[1]

    def needed_bytes(candidate: Geometry) -> int:
        rows = count_rows(components, candidate, num_keyframes, num_text_rows)
        return activation_bytes(transformer, rows, transformer.dtype)

    device, available, total = _device_memory(transformer, device)
    needed = needed_bytes(geometry)
    if needed <= available:
        return

    ways_out = [
        f"`num_frames={shorter.num_frames}` or less"
        for shorter in _shorter(components, geometry)
        if needed_bytes(shorter) <= available
    ][:1]
    ways_out += [
        f"`height={smaller.height}, width={smaller.width}` or less"
        for smaller in _smaller(components, geometry)
        if needed_bytes(smaller) <= available
    ][:1]
    if needed <= total:
        ways_out.append("fp8 weights (`quantization_config`) or `enable_group_offload`, which leave more memory free")
    ways_out.append("a GPU with more memory")
    rows = count_rows(components, geometry, num_keyframes, num_text_rows)
    raise ValueError(
        f"{geometry.num_frames} frames of {geometry.width} × {geometry.height} make {rows} rows, which need at least "
        f"{needed / 1e9:.1f} GB for activations, but {device} has {available / 1e9:.1f} GB for them.\n"
        f"What helps: {'; '.join(ways_out)}."
    )


def _device_memory(transformer: MiniMaxH3Transformer3DModel, device: torch.device) -> tuple[torch.device, int, int]:
    """Return the device that activations have most room on, the bytes available there, and its total bytes."""
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    weight_devices = {parameter.device for parameter in transformer.parameters()}
    is_hooked = any(hasattr(module, "_hf_hook") for module in transformer.modules())
    if weight_devices == {device} and not is_hooked:
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return device, free + unused, total
    # Hooks move weights while the pipeline runs, so what is free now says nothing. A transformer that lies on several
    # GPUs, or on another one than the pipeline's first component, is judged by the largest.
    candidates = {device, *(other for other in weight_devices if other.type == "cuda")}
    totals = {candidate: torch.cuda.mem_get_info(candidate)[1] for candidate in candidates}
    largest = max(totals, key=totals.get)
    return largest, totals[largest], totals[largest]


def _shorter(components: VDNH3Components, geometry: Geometry) -> list[Geometry]:
    """Return the same canvas at all shorter lengths, longest first."""
    step = components.vae_frames_per_chunk
    shortest = align_num_frames(int(components.min_duration * components.fps), step, components.vae_latents_per_chunk)
    counts = range(geometry.num_frames - step, shortest - 1, -step)
    return [resolve_geometry(components, [], geometry.height, geometry.width, count) for count in counts]


def _smaller(components: VDNH3Components, geometry: Geometry) -> list[Geometry]:
    """Return the same length on smaller canvases of nearly the same aspect ratio, largest first."""
    multiple = components.canvas_multiple
    columns, rows = geometry.width // multiple, geometry.height // multiple
    # Along the longer edge, so that every step is as small as the grid allows.
    longer = max(columns, rows)
    scaled = [(rows * edge // longer, columns * edge // longer) for edge in range(longer - 1, 0, -1)]
    return [
        resolve_geometry(components, [], height * multiple, width * multiple, geometry.num_frames)
        for height, width in scaled
        if height and width
    ]

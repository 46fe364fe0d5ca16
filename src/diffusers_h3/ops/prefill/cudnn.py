"""One cuDNN call for a whole batch, through FlashInfer's `cudnn_batch_prefill_with_kv_cache`.

What FlashInfer 0.6's call leaves to its caller: it caches cuDNN graphs by shape alone, so strides and the softmax
scale must follow from the shape (contiguous inputs, the default scale); offsets count elements, not rows, one more
than there are items; and it keeps one cuDNN handle per process, which belongs to the first device and has one stream
at a time.
"""

import functools
import threading

import torch


HEAD_DIMS = (128,)

# FlashInfer's documentation gives 128 MiB as enough for prefill.
_WORKSPACE_BYTES = 128 * 1024**2

_handle_lock = threading.Lock()
_handle_devices: list[int | None] = []
_workspaces: dict[tuple[torch.device, int], torch.Tensor] = {}


@torch.compiler.assume_constant_result
def device_refusal(device_index: int | None) -> str | None:
    """Say why cuDNN prefill cannot run on a device in this process, or return None."""
    if not _handle_devices or _handle_devices[0] == device_index:
        return None
    return (
        f"FlashInfer's cuDNN prefill already runs on device {_handle_devices[0]} of this process and keeps one "
        f"handle, so it cannot run on device {device_index}: use `prefill='single'`, or one process per device."
    )


def cudnn_prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, softmax_scale: float
) -> torch.Tensor:
    """Attend over every batch item in one launch.

    Args:
        query (`torch.Tensor`): float16 or bfloat16 ``[B, Q, H, D]``.
        key, value (`torch.Tensor`): ``[B, K, H_kv, D]``.

    Returns:
        `torch.Tensor`: ``[B, Q, H, D]``.
    """
    from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache

    batch, num_queries, num_heads, head_dim = query.shape
    _, num_keys, num_key_heads, _ = key.shape
    device = query.device
    query_lengths, query_offsets = _lengths_and_offsets(batch, num_queries, num_heads * head_dim, device)
    key_lengths, key_offsets = _lengths_and_offsets(batch, num_keys, num_key_heads * head_dim, device)
    # The handle is shared: its stream must not change between being set and being used.
    with _handle_lock, torch.cuda.device_of(query):
        if refusal := device_refusal(device.index):
            raise RuntimeError(refusal)
        if not _handle_devices:
            _handle_devices.append(device.index)
        output, _ = cudnn_batch_prefill_with_kv_cache(
            query.contiguous().flatten(0, 1),
            key.contiguous().flatten(0, 1),
            value.contiguous().flatten(0, 1),
            softmax_scale,
            _workspace(device),
            max_token_per_sequence=num_queries,
            max_sequence_kv=num_keys,
            actual_seq_lens_q=query_lengths,
            actual_seq_lens_kv=key_lengths,
            causal=is_causal,
            return_lse=False,
            batch_offsets_q=query_offsets,
            batch_offsets_k=key_offsets,
            batch_offsets_v=key_offsets,
            batch_offsets_o=query_offsets,
        )
    return output.unflatten(0, (batch, num_queries))


@functools.lru_cache(maxsize=64)
def _lengths_and_offsets(batch: int, rows: int, row_size: int, device: torch.device):
    """Return int32 ``[B, 1, 1, 1]`` row counts and int64 ``[B + 1, 1, 1, 1]`` element offsets.

    The offsets have 64 bits: three MiniMax-H3 clips of 104,512 rows pass 2^31 elements.
    """
    lengths = torch.full((batch, 1, 1, 1), rows, dtype=torch.int32, device=device)
    offsets = torch.arange(batch + 1, dtype=torch.int64, device=device) * (rows * row_size)
    return lengths, offsets.view(-1, 1, 1, 1)


def _workspace(device: torch.device) -> torch.Tensor:
    """Return the scratch memory of a device's current stream; calls on one stream run one after the other."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _workspaces:
        _workspaces[device, stream] = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _workspaces[device, stream]

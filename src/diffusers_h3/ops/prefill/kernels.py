"""The FlashInfer calls behind one PyTorch operator, so that `torch.compile` never traces FlashInfer's compilation."""

import threading

import torch

from .cudnn import cudnn_prefill
from .masks import boolean_matrix


# Per kernel: other head dimensions give wrong values or illegal accesses in FlashInfer 0.6, with no error of its own.
SINGLE_HEAD_DIMS = (64, 128, 256)

# A kernel's first call compiles and loads it; two threads doing so at once would do it twice.
_launch_lock = threading.Lock()


@torch.library.custom_op("diffusers_h3::flashinfer_prefill", mutates_args=())
def prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    query_scales: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    is_causal: bool,
    softmax_scale: float,
    kernel: str,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Attend over every batch item.

    Args:
        query (`torch.Tensor`): float16, bfloat16 or float8_e4m3fn ``[B, Q, H, D]``, any strides.
        key, value (`torch.Tensor`): ``[B, K, H_kv, D]`` of the same dtype.
        mask (`torch.Tensor`, *optional*): Boolean ``[1 or B, 1 or Q, K]``; a row without any key gives zeros.
        query_scales, key_scales, value_scales (`torch.Tensor`, *optional*): float32 ``[B, heads]`` for float8 inputs.
        is_causal (`bool`): Whether query i sees the keys 0 to i alone.
        softmax_scale (`float`): What the logits are multiplied by.
        kernel (`str`): `"fa2"`, `"fa3"` or `"cudnn"`.
        output_dtype (`torch.dtype`): float16 or bfloat16.

    Returns:
        `torch.Tensor`: Contiguous ``[B, Q, H, D]``.
    """
    if kernel == "cudnn":
        return cudnn_prefill(query, key, value, is_causal, softmax_scale)
    from flashinfer.prefill import single_prefill_with_kv_cache

    num_queries, num_keys = query.shape[1], key.shape[1]
    # Kernels align the last query with the last key; PyTorch the first with the first. The two agree on a square.
    explicit_mask = mask is not None or (is_causal and num_queries != num_keys)
    outputs, allowed = [], None
    for item in range(query.shape[0]):
        if explicit_mask and (allowed is None or (mask is not None and mask.shape[0] > 1)):
            item_mask = None if mask is None else mask[item % mask.shape[0]]
            allowed = boolean_matrix(item_mask, num_queries, num_keys, is_causal, query.device)
        arguments = {}
        if query_scales is not None:
            arguments = {
                "scale_q": query_scales[item],
                "scale_k": key_scales[item],
                "scale_v": value_scales[item],
                "o_dtype": output_dtype,
            }
        with _launch_lock, torch.cuda.device_of(query):
            output = single_prefill_with_kv_cache(
                _loadable(query[item]),
                _loadable(key[item]),
                _loadable(value[item]),
                custom_mask=allowed,
                causal=is_causal and not explicit_mask,
                kv_layout="NHD",
                sm_scale=softmax_scale,
                backend=kernel,
                **arguments,
            )
        if allowed is not None:
            # The kernel masks with a finite number, so such a row comes out as the mean of all values.
            output.masked_fill_(~allowed.any(dim=1)[:, None, None], 0)
        outputs.append(output)
    return outputs[0].unsqueeze(0) if len(outputs) == 1 else torch.stack(outputs)


@prefill.register_fake
def _(
    query, key, value, mask, query_scales, key_scales, value_scales, is_causal, softmax_scale, kernel, output_dtype
) -> torch.Tensor:
    return query.new_empty(query.shape, dtype=output_dtype)


def _loadable(rows: torch.Tensor) -> torch.Tensor:
    """Return ``[S, H, D]`` rows whose channels are adjacent and whose heads start at multiples of 16 bytes."""
    strides = (rows.stride(0) * rows.itemsize, rows.stride(1) * rows.itemsize, rows.data_ptr())
    if rows.stride(2) == 1 and all(stride % 16 == 0 for stride in strides):
        return rows
    return rows.clone(memory_format=torch.contiguous_format)

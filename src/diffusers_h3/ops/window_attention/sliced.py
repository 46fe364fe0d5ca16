"""Window attention on kernels that return their log-sum-exp."""

import torch

from .kernels import resolve_kernel
from .merge import merge_gated
from .reference import gather_rows, scatter_rows
from .slices import SlicedWindow


def sliced_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    window: SlicedWindow,
    backend: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Run the window as one operator, opaque to `torch.compile`.

    Args:
        query, key, value (`torch.Tensor`): ``[B, T, H, D]``, all of one dtype.
        gate (`torch.Tensor`, *optional*): ``[B, T, H]``, before the sigmoid.
        scales (`tuple`, *optional*): Per-head scales ``[B, H]`` float32 of fp8 query, key and value.
        window (`SlicedWindow`): From `slice_groups`, in rows.
        backend (`str`): A kernel backend or `"auto"`.
        dtype (`torch.dtype`): Of the output.
    """
    flat = [[bound for bounds in ranges for bound in bounds] for ranges in window]
    return _sliced_attention(query, key, value, gate, list(scales) if scales else [], *flat, backend, dtype)


@torch.library.custom_op("diffusers_h3::sliced_attention", mutates_args=())
def _sliced_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    scales: list[torch.Tensor],
    dense: list[int],
    shared: list[int],
    queries: list[int],
    slices: list[int],
    backend: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    attend = resolve_kernel(backend, query)
    flat_ranges = (dense, shared, queries, slices)
    window = SlicedWindow(*(tuple(zip(flat[::2], flat[1::2], strict=True)) for flat in flat_ranges))
    output = torch.empty(query.shape, dtype=dtype, device=query.device)
    for item in range(query.shape[0]):
        item_scales = [scale[item] for scale in scales] or None

        def run(query, key, value, item_scales=item_scales):
            return attend(query[0], key[0], value[0], item_scales, dtype)

        rows = slice(item, item + 1)
        item_gate = None if gate is None else gate[rows]
        _attend_window(query[rows], key[rows], value[rows], item_gate, window, run, output[rows])
    return output


@_sliced_attention.register_fake
def _(query, key, value, gate, scales, dense, shared, queries, slices, backend, dtype):
    return torch.empty(query.shape, dtype=dtype, device=query.device)


def _attend_window(query, key, value, gate, window: SlicedWindow, run, output) -> None:
    """Fill `output` of one batch item, ``[1, T, H, D]``."""
    if window.dense:
        attended = run(gather_rows(query, window.dense), key, value)[0].unsqueeze(0)
        if gate is not None:
            attended = attended * torch.sigmoid(gather_rows(gate, window.dense)).unsqueeze(-1).to(attended.dtype)
        scatter_rows(output, window.dense, attended)
    if not window.queries:
        return
    shared_output = shared_lse = None
    order = sorted(range(len(window.queries)), key=window.queries.__getitem__)
    if window.shared:
        shared_rows = gather_rows(query, _joined([window.queries[index] for index in order]))
        shared_output, shared_lse = run(
            shared_rows, gather_rows(key, window.shared), gather_rows(value, window.shared)
        )
    position = 0
    for index in order:
        (start, stop), (key_start, key_stop) = window.queries[index], window.slices[index]
        parts = []
        if key_start < key_stop:
            own_keys = (key[:, key_start:key_stop], value[:, key_start:key_stop])
            parts.append(run(query[:, start:stop], *own_keys))
        if shared_output is not None:
            rows = slice(position, position + stop - start)
            parts.append((shared_output[rows], shared_lse[rows]))
        item_gate = None if gate is None else gate[0, start:stop]
        merge_gated(parts, item_gate, output[0, start:stop])
        position += stop - start


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join sorted ranges that touch, so that gathering them is a view where they are one."""
    joined = [ranges[0]]
    for start, stop in ranges[1:]:
        if start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined

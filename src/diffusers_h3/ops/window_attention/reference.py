"""Window attention through any dense attention function."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch


# Half open. In rows, or in whatever units the caller's `rows` turns into rows (frames).
Range = tuple[int, int]
Groups = Sequence[tuple[Sequence[Range], Sequence[Range]]]
DenseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Groups,
    attention: DenseAttention,
    rows: Callable[[int, int], Range],
) -> torch.Tensor:
    """Attend group by group; only one group's keys and values are gathered at a time.

    Args:
        query, key, value (`torch.Tensor`): ``[B, T, H, D]``.
        groups (`Sequence`): ``(query ranges, key ranges)`` pairs.
        attention (`Callable`): Dense, unmasked attention on ``[B, L, H, D]`` tensors.
        rows (`Callable`): Returns the rows of a range.

    Returns:
        `torch.Tensor`: ``[B, T, H, D]`` in the dtype of `query`.

    Raises:
        ValueError: Where the groups do not cover every row exactly once.
    """
    check_cover(groups, rows, query.shape[1])
    output = torch.empty_like(query)
    for queries, keys in groups:
        queries, keys = place(queries, rows), place(keys, rows)
        if not queries:
            continue
        attended = attention(gather_rows(query, queries), gather_rows(key, keys), gather_rows(value, keys))
        scatter_rows(output, queries, attended)
    return output


def place(ranges: Sequence[Range], rows: Callable[[int, int], Range]) -> list[Range]:
    """Return the rows of ranges, those without any left out."""
    placed = [rows(*bounds) for bounds in ranges]
    return [(start, stop) for start, stop in placed if start < stop]


def check_cover(groups: Groups, rows: Callable[[int, int], Range], seq_len: int) -> None:
    """Raise a `ValueError` unless every row is a query of exactly one group."""
    start, stop = rows(*covered_range(groups))
    if start != 0 or stop != seq_len:
        raise ValueError(f"The queries do not cover {seq_len} rows exactly once, but rows {start} to {stop}.")


def covered_range(groups: Groups) -> Range:
    """Return the range the queries of all groups make up; a gap or an overlap is a `ValueError`."""
    covered = sorted(bounds for queries, _ in groups for bounds in queries)
    if any(left[1] != right[0] for left, right in pairwise(covered)):
        raise ValueError(f"The query ranges {covered} do not cover the rows between them exactly once.")
    return covered[0][0], covered[-1][1]


def gather_rows(rows: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """Return the rows of several ranges of dimension 1; a single range is a view."""
    parts = [rows[:, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def scatter_rows(output: torch.Tensor, ranges: Sequence[Range], rows: torch.Tensor) -> None:
    """Write `rows` to several ranges of dimension 1 of `output`."""
    lengths = [stop - start for start, stop in ranges]
    for (start, stop), part in zip(ranges, rows.split(lengths, dim=1), strict=True):
        output[:, start:stop] = part

"""Window attention through any dense attention function."""

from collections.abc import Callable, Sequence

import torch


RowRange = tuple[int, int]
DenseAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Sequence[tuple[Sequence[RowRange], Sequence[RowRange]]],
    attention: DenseAttention,
) -> torch.Tensor:
    """Attend group by group; only one group's keys and values are gathered at a time.

    Args:
        query, key, value (`torch.Tensor`): ``[B, T, H, D]``.
        groups (`Sequence`): ``(query ranges, key ranges)`` pairs of half-open row ranges.
        attention (`Callable`): Dense, unmasked attention on ``[B, L, H, D]`` tensors.

    Returns:
        `torch.Tensor`: ``[B, T, H, D]`` in the dtype of `query`.

    Raises:
        ValueError: Where the groups do not cover every row exactly once.
    """
    check_cover(groups, query.shape[1])
    output = torch.empty_like(query)
    for queries, keys in groups:
        attended = attention(gather_rows(query, queries), gather_rows(key, keys), gather_rows(value, keys))
        scatter_rows(output, queries, attended)
    return output


def check_cover(groups: Sequence[tuple[Sequence[RowRange], Sequence[RowRange]]], seq_len: int) -> None:
    """Raise a `ValueError` unless every row is a query of exactly one group."""
    covered = sorted(rows for queries, _ in groups for rows in queries)
    if [start for start, _ in covered] + [seq_len] != [0] + [stop for _, stop in covered]:
        raise ValueError(f"The query ranges {covered} do not cover {seq_len} rows exactly once.")


def gather_rows(rows: torch.Tensor, ranges: Sequence[RowRange]) -> torch.Tensor:
    """Return the rows of several ranges of dimension 1; a single range is a view."""
    parts = [rows[:, start:stop] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def scatter_rows(output: torch.Tensor, ranges: Sequence[RowRange], rows: torch.Tensor) -> None:
    """Write `rows` to several ranges of dimension 1 of `output`."""
    lengths = [stop - start for start, stop in ranges]
    for (start, stop), part in zip(ranges, rows.split(lengths, dim=1), strict=True):
        output[:, start:stop] = part

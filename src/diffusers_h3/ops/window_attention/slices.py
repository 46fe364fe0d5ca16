"""Split the groups of a window into contiguous slices of keys and the keys all groups share."""

from collections.abc import Sequence
from typing import NamedTuple

from ..plans import cached_plan
from .reference import Range, covered_range


class SlicedWindow(NamedTuple):
    """A window without gathered copies of the keys, in the units of the groups it was derived from.

    Attributes:
        dense (`Sequence[Range]`): Queries that see every row.
        shared (`Sequence[Range]`): Keys that all other queries see.
        queries (`Sequence[Range]`): The other queries, one range per slice.
        slices (`Sequence[Range]`): The contiguous keys each of them sees beside the shared ones; may be empty.
    """

    dense: Sequence[Range]
    shared: Sequence[Range]
    queries: Sequence[Range]
    slices: Sequence[Range]


@cached_plan
def slice_groups(groups: tuple[tuple[tuple[Range, ...], tuple[Range, ...]], ...]) -> SlicedWindow:
    """Derive the sliced form of a window's groups.

    Args:
        groups (`tuple`): ``(query ranges, key ranges)`` pairs, both sorted and disjoint.

    Raises:
        ValueError: Where a group's own keys are not contiguous, or the queries overlap or leave a gap.
    """
    everything = (covered_range(groups),)
    dense = tuple(bounds for queries, keys in groups if keys == everything for bounds in queries)
    windows = [(queries, keys) for queries, keys in groups if keys != everything]
    shared = _shared_keys([keys for _, keys in windows])
    query_ranges, slices = [], []
    for queries, keys in windows:
        own = _subtract(keys, shared)
        if len(own) > 1:
            raise ValueError(f"The keys {keys} beside the shared ones {shared} are not contiguous.")
        for bounds in queries:
            query_ranges.append(bounds)
            slices.append(own[0] if own else (0, 0))
    return SlicedWindow(dense, shared, tuple(query_ranges), tuple(slices))


def _shared_keys(key_sets: list[tuple[Range, ...]]) -> tuple[Range, ...]:
    """Return the keys of every set, less the ranges that would cut one set's own keys in two."""
    shared = key_sets[0] if key_sets else ()
    for keys in key_sets[1:]:
        shared = _intersect(shared, keys)
    while True:
        own_keys = [_subtract(keys, shared) for keys in key_sets]
        inside = [rows for rows in shared if any(own and own[0][0] < rows[0] < own[-1][0] for own in own_keys)]
        if not inside:
            return shared
        shared = _subtract(shared, tuple(inside))


def _intersect(left: tuple[Range, ...], right: tuple[Range, ...]) -> tuple[Range, ...]:
    ranges = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return tuple((start, stop) for start, stop in ranges if start < stop)


def _subtract(ranges: tuple[Range, ...], removed: tuple[Range, ...]) -> tuple[Range, ...]:
    for start, stop in removed:
        cut = ((a, min(b, start), max(a, stop), b) for a, b in ranges)
        ranges = tuple(part for a, b, c, d in cut for part in ((a, b), (c, d)) if part[0] < part[1])
    return ranges

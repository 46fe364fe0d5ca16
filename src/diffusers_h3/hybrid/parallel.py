"""Ulysses context parallelism of one layer: ranks share the rows outside attention and the heads inside it.

Window and branch are both separate per head, so after one exchange every rank computes its own heads over the whole
sequence exactly as one process would. `HeadSplit` knows who has what, from Diffusers' configuration and the layout
alone: no rank ever asks another for a size. Inference only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ..ops.precision import accumulation_dtype


if torch.distributed.is_available():
    from torch.distributed import _functional_collectives as collectives

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig
    from torch.distributed import ProcessGroup

# What an exchange returns: a call waits for the result, so that work between the two runs beside the transfer.
Pending = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class HeadSplit:
    """Who has which rows and heads of one layer; alone, a process has all of them.

    Rows and heads are dealt out in order, the first ranks taking one more where they do not divide, as
    `torch.tensor_split` does and Diffusers shards sequences.

    Attributes:
        row_counts (`tuple[int, ...]`): Rows of every rank.
        head_counts (`tuple[int, ...]`): Heads of every rank.
        rank (`int`): This process.
        group (`ProcessGroup`, *optional*): The ranks; None for a process alone.
    """

    row_counts: tuple[int, ...]
    head_counts: tuple[int, ...]
    rank: int = 0
    group: "ProcessGroup | None" = None

    @classmethod
    def of(cls, config: "ContextParallelConfig | None", num_rows: int, num_heads: int) -> "HeadSplit":
        """Return the split of a layer under Diffusers' configuration, or of a process alone without one.

        Raises:
            ValueError: For rows or heads that cannot be shared that way.
        """
        if config is None:
            return cls((num_rows,), (num_heads,))
        check_shares(config, num_rows, num_heads)
        mesh, degree = config._ulysses_mesh, config.ulysses_degree
        rank, group = config._ulysses_local_rank, mesh.get_group()
        return cls(_shares(num_rows, degree), _shares(num_heads, degree), rank, group)

    @property
    def num_heads(self) -> int:
        """This rank's heads."""
        return self.head_counts[self.rank]

    @property
    def heads(self) -> slice:
        """Where this rank's heads are among all."""
        return _own(self.head_counts, self.rank)

    def channels(self, head_dim: int) -> slice:
        """Return where the channels of this rank's heads are among all."""
        return slice(self.heads.start * head_dim, self.heads.stop * head_dim)

    @property
    def rows(self) -> slice:
        """Where this rank's rows are in the sequence."""
        return _own(self.row_counts, self.rank)

    def own_rows(self, start: int, stop: int) -> slice:
        """Return which of this rank's rows, counted from its first one, are in `start`…`stop` of the sequence."""
        return _overlap(self.rows, start, stop)

    def to_heads(self, states: torch.Tensor) -> Pending:
        """Exchange this rank's rows of all heads ``[B, rows, H, …]`` for its heads of all rows ``[B, T, heads, …]``.

        Raises:
            ValueError: With gradients, which would end here.
        """
        if self.group is None:
            return lambda: states
        if torch.is_grad_enabled() and states.requires_grad:
            raise ValueError(
                "Hybrid attention under context parallelism is inference only: use `torch.no_grad()`, or one process."
            )
        pieces = [piece.transpose(0, 1) for piece in states.split(self.head_counts, dim=2)]
        row = pieces[self.rank].shape[1:]
        exchanged = self._exchange(pieces, [count * row.numel() for count in self.row_counts])
        shape = (sum(self.row_counts), *row)
        return lambda: _wait(exchanged).view(shape).transpose(0, 1).contiguous()

    def to_rows(self, states: torch.Tensor, start: int, stop: int) -> Pending:
        """Exchange rows `start`…`stop` of this rank's heads ``[B, stop − start, heads, …]`` back.

        The result has those of the range that are `own_rows`, with all heads: ``[B, own rows, H, …]``.
        """
        if self.group is None:
            return lambda: states
        batch, _, _, *rest = states.shape
        shares = [_overlap(_own(self.row_counts, rank), start, stop) for rank in range(len(self.row_counts))]
        counts = [share.stop - share.start for share in shares]
        pieces = [piece.transpose(0, 1) for piece in states.split(counts, dim=1)]
        shapes = [(counts[self.rank], batch, heads, *rest) for heads in self.head_counts]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        exchanged = self._exchange(pieces, sizes)

        def wait() -> torch.Tensor:
            parts = [part.view(shape) for part, shape in zip(_wait(exchanged).split(sizes), shapes, strict=True)]
            return torch.cat(parts, dim=2).transpose(0, 1).contiguous()

        return wait

    def gather(self, states: torch.Tensor) -> Pending:
        """Collect all rows of what is small and the same for all heads: ``[B, rows, C]`` to ``[B, T, C]``."""
        if self.group is None:
            return lambda: states
        longest = max(self.row_counts)
        padded = F.pad(states, (0, 0, 0, longest - states.shape[1])).transpose(0, 1).contiguous()
        gathered = collectives.all_gather_tensor(padded, 0, self.group)

        def wait() -> torch.Tensor:
            parts = _wait(gathered).split(longest)
            parts = [part[:count] for part, count in zip(parts, self.row_counts, strict=True)]
            return torch.cat(parts).transpose(0, 1).contiguous()

        return wait

    def frame_means(self, states: torch.Tensor, start: int, num_frames: int, rows_per_frame: int) -> Pending:
        """Average the rows of every frame, the first from row `start` on: ``[B, rows, C]`` to ``[B, F, C]``.

        Accumulated in float32 (float64 for float64) and rounded to the dtype of `states`. Every rank sums its rows.
        """
        own = self.own_rows(start, start + num_frames * rows_per_frame)
        dtype = accumulation_dtype(states.dtype)
        if self.group is None:
            mean = states[:, own].unflatten(1, (num_frames, rows_per_frame)).mean(dim=2, dtype=dtype).to(states.dtype)
            return lambda: mean
        first = self.rows.start + own.start - start
        sums = _frame_sums(states[:, own], first, num_frames, rows_per_frame, dtype)
        total = collectives.all_reduce(sums, "sum", self.group)
        return lambda: (_wait(total) / rows_per_frame).to(states.dtype)

    def _exchange(self, pieces: list[torch.Tensor], received: list[int]) -> torch.Tensor:
        """Send piece after piece to the ranks in order and start receiving flat pieces of the given sizes."""
        sizes = [piece.numel() for piece in pieces]
        buffer = pieces[0].new_empty(sum(sizes))
        for piece, place in zip(pieces, buffer.split(sizes), strict=True):
            place.view(piece.shape).copy_(piece)
        return collectives.all_to_all_single(buffer, received, sizes, self.group)


def check_shares(config: "ContextParallelConfig", num_rows: int, num_heads: int) -> None:
    """Check that rows and heads can be shared by the ranks.

    Raises:
        ValueError: With the number that does not fit and what would.
    """
    for name, count in (("rows of the packed sequence", num_rows), ("attention heads", num_heads)):
        if count < config.ulysses_degree:
            raise ValueError(
                f"{count} {name} cannot be shared by {config.ulysses_degree} ranks, of which each needs one: use a "
                f"`ulysses_degree` of at most {count}."
            )
        if count % config.ulysses_degree and not config.ulysses_anything:
            raise ValueError(
                f"{count} {name} cannot be shared equally by {config.ulysses_degree} ranks: use "
                f"`ContextParallelConfig(ulysses_degree={config.ulysses_degree}, ulysses_anything=True)`."
            )


def check_config(config: "ContextParallelConfig") -> None:
    """Check that Diffusers' configuration is one of Ulysses.

    Raises:
        ValueError: For a ring.
    """
    if config.ring_degree > 1:
        raise ValueError(
            f"Hybrid attention does not run as a ring (`ring_degree={config.ring_degree}`): its linear branch carries "
            "a state over all frames of a head, which no rank of a ring holds. Use "
            f"`ContextParallelConfig(ulysses_degree={config.ring_degree * config.ulysses_degree})`."
        )


def _shares(count: int, ranks: int) -> tuple[int, ...]:
    return tuple(count // ranks + (rank < count % ranks) for rank in range(ranks))


def _own(counts: tuple[int, ...], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def _overlap(rows: slice, start: int, stop: int) -> slice:
    """Return where the rows of both are, counted from the first of `rows`; empty where there are none."""
    first = min(max(rows.start, start), rows.stop)
    last = max(min(rows.stop, stop), first)
    return slice(first - rows.start, last - rows.start)


def _frame_sums(
    states: torch.Tensor, first: int, num_frames: int, rows_per_frame: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sum ``[B, rows, C]`` per frame, where the first row is row `first` of all frames: ``[B, F, C]``."""
    sums = states.new_zeros((states.shape[0], num_frames, states.shape[-1]), dtype=dtype)
    stop = first + states.shape[1]
    # Whole frames at once, and what there is of the frames before and behind them.
    whole = min(-(-first // rows_per_frame) * rows_per_frame, stop)
    rest = max(stop // rows_per_frame * rows_per_frame, whole)
    for begin, end in ((first, whole), (whole, rest), (rest, stop)):
        if begin < end:
            frames = slice(begin // rows_per_frame, -(-end // rows_per_frame))
            part = states[:, begin - first : end - first].unflatten(1, (frames.stop - frames.start, -1))
            sums[:, frames] += part.sum(dim=2, dtype=dtype)
    return sums


def _wait(states: torch.Tensor) -> torch.Tensor:
    # Traced collectives are plain tensors, which the compiler makes wait.
    return states.wait() if isinstance(states, collectives.AsyncCollectiveTensor) else states

"""Rows that ranks bring to a round: an *arena* beside the mailboxes of each table.

Rows are not added up as they come: a row that one rank brings, another does not. They
are written behind those of the ranks that are in, where the table in force names
nothing, and the same store that takes the rank in (see
:mod:`daskps.shards.rounds.mailbox`) names them. So a process that dies on the way has
brought nothing. The process that completes the round adds them up by id, along the tree
over the ranks.

An arena has room for :data:`~daskps.limits.MOST_PUSHED_ROWS` rows, or for all of a smaller
piece from each rank: what they come to then fits the undo log of their table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.errors import PushRejectedError
from daskps.kernels.row_merge import Brought, merge_rows
from daskps.kernels.row_moves import gather
from daskps.layout.arrays import FLOATS, align, compute_dtype
from daskps.limits import MOST_PUSHED_ROWS
from daskps.reduction import split

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from daskps.layout.tables import TablePiece
    from daskps.reduction import Reducer
    from daskps.typing import Array


class RankRows(NamedTuple):
    """Gradients of rows of one table piece, none of them twice."""

    ids: Array
    #: Of shape (m, dim); row `at[k]` of it is that of id k, or row k.
    data: Array
    at: Array | None = None


class RowSpan(NamedTuple):
    """Where the rows of one rank are in an arena."""

    start: int
    n: int


def room_of(piece: TablePiece, n_ranks: int, reduce: str | Reducer) -> int:
    """Return how many rows of a piece a round takes from all ranks together."""
    if callable(reduce) or piece.table.dtype not in FLOATS:
        return 0
    if not piece.table.is_bounded:
        return MOST_PUSHED_ROWS
    return min(n_ranks * piece.n_rows, MOST_PUSHED_ROWS)


class Arena:
    """The room for rows of one table piece.

    Parameters
    ----------
    piece : TablePiece
        The piece.
    n_ranks : int
        Number of trainers P.
    room : int
        How many rows it holds.
    buffer : ndarray, shape (n,), uint8
        Its memory, of :meth:`nbytes_of`.
    """

    def __init__(
        self, piece: TablePiece, n_ranks: int, room: int, buffer: Array
    ) -> None:
        self.piece, self.room, self._n_ranks = piece, room, n_ranks
        dtype, dim = np.dtype(compute_dtype(piece.table.dtype)), piece.table.dim
        self._ids = buffer[: 8 * room].view(np.int64)
        at, nbytes = align(8 * room), room * dim * dtype.itemsize
        self._rows = buffer[at : at + nbytes].view(dtype).reshape(room, dim)
        #: Where sums are formed, used again each round: new memory takes longer to get.
        self._sums = np.empty((0, dim), dtype)

    @staticmethod
    def nbytes_of(piece: TablePiece, room: int) -> int:
        """Return the bytes that so many rows and their ids take."""
        itemsize = np.dtype(compute_dtype(piece.table.dtype)).itemsize
        return align(8 * room) + align(room * piece.table.dim * itemsize)

    def check(self, taken: Iterable[RowSpan], n: int) -> None:
        """Refuse rows for which there is no room beside those of other ranks.

        Raises
        ------
        PushRejectedError
            Naming the table and how many there are.
        """
        others = sum(span.n for span in taken)
        if others + n > self.room:
            name = self.piece.table.name[:60]
            raise PushRejectedError(
                f"{n:,} rows of table {name!r} came to a round of which shard "
                f"{self.piece.shard} has {others:,} of other trainers: it takes "
                f"{self.room:,} of all together; nothing was applied, use more shards, "
                f"or smaller batches"
            )

    def place(self, taken: Iterable[RowSpan], came: RankRows, scale: float) -> RowSpan:
        """Write a rank's rows, times `scale`, behind those that are taken."""
        start = max((span.start + span.n for span in taken), default=0)
        n = len(came.ids)
        part = slice(start, start + n)
        self._ids[part], out = came.ids, self._rows[part]
        source = came.data
        if came.at is not None:
            gather(came.data, came.at, out)
            source = out
        if scale != 1.0:
            np.multiply(source, scale, out=out)
        elif source is not out:
            np.copyto(out, source)
        return RowSpan(start, n)

    def merge(
        self,
        spans: Mapping[int, RowSpan],
        weights: Mapping[int, float] | None,
        cache_dir: str | None,
    ) -> tuple[Array, Array]:
        """Return the ids and the sums of what ranks have brought.

        The sums are divided by the ranks' weights together, where these are given, and
        good until the next call, or until more rows are placed.
        """
        divisor = 1.0 if weights is None else tree_sum(weights, 0, self._n_ranks)
        if len(spans) == 1 and divisor == 1.0:
            # As in each round of the task graph: they are the sums.
            ((start, n),) = spans.values()
            return self._ids[start : start + n], self._rows[start : start + n]
        brought = [Brought(*spans[rank], rank) for rank in sorted(spans)]
        return merge_rows(
            brought,
            self._ids,
            self._rows,
            self._n_ranks,
            divisor,
            out=self._make,
            cache_dir=cache_dir,
        )

    def _make(self, n: int) -> Array:
        if len(self._sums) < n:
            self._sums = np.empty((n, self.piece.table.dim), self._rows.dtype)
        return self._sums[:n]


def tree_sum(weights: Mapping[int, float], lo: int, hi: int) -> float:
    """Return the sum of the weights of ranks [lo, hi), in the order of their tree.

    Some of these ranks have one, and no others.
    """
    if len(weights) < 2:
        return sum(weights.values())
    border = split(lo, hi)
    left = {rank: w for rank, w in weights.items() if rank < border}
    right = {rank: w for rank, w in weights.items() if rank >= border}
    return tree_sum(left, lo, border) + tree_sum(right, border, hi)

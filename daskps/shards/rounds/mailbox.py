"""The mailboxes of one BSP run in one shard: memory that several processes may share.

::

    header      128 B   magic, format, ranks, run, number and bytes of slices, bytes of
                        arenas, turn word
    table 0             the round it is of; kind, weight and progress of that round; a
    table 1             word and the next sequence number per rank; the ranks that each
                        slice holds the sum of; a bit per rank that has pushed
                        before its tick; in shards with tables the weight of each rank
                        and, per table and rank, where its rows are and how many
    slices              weight of every piece, NaN where nobody delivers it; then the
                        pieces in their compute dtype, each 64-byte aligned
    arenas              for each table ids and rows that ranks have brought, see
                        :mod:`daskps.shards.rounds.arena`

All words are little-endian int64, weights float64. A *delivery* writes a slice, and rows
of an arena, that the table in force does not name, then the table that is not in force,
and then adds one to the *turn word*, whose parity selects the table: a process that dies
anywhere before that store has delivered nothing.

Arrays that a rank pushes before its tick stay in the process that got them. The rank's
bit in the table in force says so: whoever takes the shard over does not have these
arrays.

A table of another round than the open one counts as empty, so the one store that
publishes a round in the segment also empties the mailboxes. The caller holds the
segment's lock.
"""

from __future__ import annotations

from array import array
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.backend.host import PAGE_NBYTES
from daskps.errors import ProtocolError
from daskps.layout.arrays import align, compute_dtype
from daskps.shards.arrays.payload import NUMPY, Payload
from daskps.shards.memory.format import integers
from daskps.shards.rounds.arena import Arena, RowSpan, room_of
from daskps.shards.rounds.words import HEAD, MASK, N_BROUGHT, ROUND, SHIFT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.parameters import Piece
    from daskps.layout.tables import TablePiece
    from daskps.reduction import Node, Reducer
    from daskps.typing import Array

MAGIC = 0x584F_424C_4941_4D  # "MAILBOX"
FORMAT = 3
HEADER_WORDS = 16
#: Words of the header.
MAGIC_AT, FORMAT_AT, N_RANKS_AT, RUN_AT, N_SLICES_AT, NBYTES_AT, ROWS_AT, TURNS = range(
    8
)


def n_slices(n_ranks: int, reduce: str | Reducer) -> int:
    """Return how many slices are enough for a run in any order of arrival.

    Of a sum no table ever names more than ``ceil(P / 2)``: of two ranks that pair up
    never both. One more is free to be written.
    """
    return n_ranks if callable(reduce) else -(-n_ranks // 2) + 1


class MailboxTable:
    """One of the two tables, as views of the mailbox: plain integers, quickly read."""

    def __init__(self, words: Array, n_ranks: int, n_slices: int) -> None:
        #: Its words as the compiled functions take them, and one by one.
        self.array, self.words = words, integers(words)
        self.ranks = self.words[HEAD : HEAD + n_ranks]
        self.next = self.words[HEAD + n_ranks : HEAD + 2 * n_ranks]
        at = HEAD + 2 * n_ranks
        #: Ranks [first, last) whose sum each slice holds.
        self.first = self.words[at : at + n_slices]
        self.last = self.words[at + n_slices : at + 2 * n_slices]
        at, n_bits = at + 2 * n_slices, _n_bits(n_ranks)
        self.bits = self.words[at : at + n_bits]
        at += n_bits
        #: With which weight each rank has brought rows.
        self.weights: memoryview[float] = (
            words[at : at + n_ranks].data.cast("B").cast("d")
        )
        #: By table and rank one more than how many rows it has brought, 0 where it has
        #: not named the table; and where they are.
        self._rows = words[at + n_ranks :].reshape(-1, 2, n_ranks)

    @staticmethod
    def n_words(n_ranks: int, n_slices: int, n_tables: int = 0) -> int:
        """Return the length of a table."""
        of_rows = n_ranks * (1 + 2 * n_tables) if n_tables else 0
        return HEAD + 2 * n_ranks + 2 * n_slices + _n_bits(n_ranks) + of_rows

    def spans(self, ordinal: int) -> dict[int, RowSpan]:
        """Return where the rows of one table are, by the ranks that have named it."""
        if not self.words[N_BROUGHT]:
            return {}
        counts, starts = self._rows[ordinal]
        return {
            rank: RowSpan(starts.item(rank), counts.item(rank) - 1)
            for rank in np.flatnonzero(counts).tolist()
        }

    def note_rows(self, rank: int, weight: float, spans: Mapping[int, RowSpan]) -> None:
        """Note where a rank's rows are, by the number of their table."""
        self.words[N_BROUGHT] += 1
        self.weights[rank] = weight
        for ordinal, (start, n) in spans.items():
            self._rows[ordinal, :, rank] = n + 1, start

    def has_pushed(self, rank: int) -> bool:
        """Return whether a rank that has not ticked has pushed in this round."""
        return bool(self.bits[rank >> SHIFT] & 1 << (rank & MASK))

    def note_pushed(self, rank: int, pushed: bool) -> None:
        """Note whether a rank has pushed in this round before its tick."""
        word, bit = self.bits[rank >> SHIFT], 1 << (rank & MASK)
        self.bits[rank >> SHIFT] = word | bit if pushed else word & ~bit


class Slice:
    """The contents of one slice: an array and a weight per piece."""

    def __init__(
        self, buffer: Array, pieces: Sequence[Piece], payload: Payload
    ) -> None:
        at = align(8 * len(pieces))
        self.weights: memoryview[float] = buffer[: 8 * len(pieces)].data.cast("d")
        memory = buffer[at:]
        if payload.device is not None:
            memory = payload.allocate(len(buffer) - at, np.uint8)
        self.arrays, at = [], 0
        for piece, dtype in _dtypes(pieces):
            nbytes = piece.size * dtype.itemsize
            self.arrays.append(memory[at : at + nbytes].view(dtype))
            at += align(nbytes)

    def weigh(self, weights: list[float]) -> None:
        """Say with which weight each piece is there."""
        self.weights[:] = memoryview(array("d", weights))

    def node(self) -> Node:
        """Return what it holds as a contribution."""
        weights = enumerate(self.weights.tolist())
        present: dict[int, float] = {p: w for p, w in weights if not isnan(w)}
        return {p: self.arrays[p] for p in present}, present


class Mailbox:
    """The views into the mailboxes of one shard and run.

    Parameters
    ----------
    pieces : sequence of Piece
        The pieces of the shard.
    n_ranks : int
        Number of trainers P.
    reduce : "mean", "sum" or callable
        How contributions become one gradient.
    buffer : ndarray, shape (nbytes,), uint8
        Memory to use.
    tables : sequence of TablePiece, default ()
        The pieces of tables of the shard.
    payload : Payload, optional
        The functions of the memory that the arrays of slices are in: on a device they
        are beside `buffer`.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        n_ranks: int,
        reduce: str | Reducer,
        buffer: Array,
        *,
        tables: Sequence[TablePiece] = (),
        payload: Payload = NUMPY,
    ) -> None:
        self.n_ranks, self.n_slices = n_ranks, n_slices(n_ranks, reduce)
        self._pieces, self._payload = pieces, payload
        #: All of it.
        self.memory = buffer
        self._slice_nbytes = _slice_nbytes(pieces)
        rooms = [room_of(piece, n_ranks, reduce) for piece in tables]
        arenas = [*map(Arena.nbytes_of, tables, rooms)]
        self._arenas_nbytes = sum(arenas)
        needed = self.nbytes_of(pieces, n_ranks, reduce, tables)
        if len(buffer) < needed:
            raise ProtocolError(
                f"mailboxes of {n_ranks} trainers need {needed:,} bytes of memory, "
                f"found {len(buffer):,}"
            )
        self.words = integers(buffer[: HEADER_WORDS * 8])
        n_table = MailboxTable.n_words(n_ranks, self.n_slices, len(tables)) * 8
        at = align(HEADER_WORDS * 8)
        self.tables = tuple(
            MailboxTable(buffer[i : i + n_table].view(np.int64), n_ranks, self.n_slices)
            for i in (at, at + align(n_table))
        )
        self._slices_at = align(at + 2 * align(n_table), PAGE_NBYTES)
        self._slices: list[Slice | None] = [None] * self.n_slices
        at = self._slices_at + self.n_slices * self._slice_nbytes
        starts = [at + sum(arenas[:i]) for i in range(len(arenas))]
        #: By the number of their table.
        self.arenas = [
            Arena(piece, n_ranks, room, buffer[start : start + nbytes])
            for piece, room, start, nbytes in zip(
                tables, rooms, starts, arenas, strict=True
            )
        ]

    @staticmethod
    def nbytes_of(
        pieces: Sequence[Piece],
        n_ranks: int,
        reduce: str | Reducer,
        tables: Sequence[TablePiece] = (),
    ) -> int:
        """Return the memory that a run's mailboxes need for some pieces."""
        rooms = [room_of(piece, n_ranks, reduce) for piece in tables]
        arenas = sum(map(Arena.nbytes_of, tables, rooms))
        n = n_slices(n_ranks, reduce)
        return _needed(pieces, n_ranks, n, len(tables)) + arenas

    def clear(self, run: int) -> None:
        """Give the memory to a run; nobody else may be using it."""
        words = [0, *self._identity(run), *[0] * HEADER_WORDS][:HEADER_WORDS]
        self.words[:] = packed(words)
        for table in self.tables:
            table.words[ROUND] = -1
        self.words[MAGIC_AT] = MAGIC

    def check(self, run: int) -> None:
        """Refuse memory that does not hold the mailboxes of a run.

        Raises
        ------
        ProtocolError
            Saying what was found instead.
        """
        found = self.words[: ROWS_AT + 1].tolist()
        wanted = [MAGIC, *self._identity(run)]
        if found != wanted:
            raise ProtocolError(
                f"no mailboxes of run {run}: expected magic, format, ranks, run, "
                f"slices, bytes of a slice and of arenas {wanted}, found {found}; "
                f"deliver through the shard's worker"
            )

    def _identity(self, run: int) -> list[int]:
        sizes = self.n_slices, self._slice_nbytes, self._arenas_nbytes
        return [FORMAT, self.n_ranks, run, *sizes]

    def slice(self, index: int) -> Slice:
        """Return a slice by its index."""
        found = self._slices[index]
        if found is None:
            at = self._slices_at + index * self._slice_nbytes
            memory = self.memory[at : at + self._slice_nbytes]
            found = self._slices[index] = Slice(memory, self._pieces, self._payload)
        return found


def _n_bits(n_ranks: int) -> int:
    """Return the words that have a bit for each rank."""
    return (n_ranks + MASK) >> SHIFT


def packed(words: list[int]) -> memoryview[int]:
    """Return integers as memory to assign to words."""
    return memoryview(array("q", words))


def _dtypes(pieces: Sequence[Piece]) -> list[tuple[Piece, np.dtype[Any]]]:
    return [(p, np.dtype(compute_dtype(p.parameter.dtype))) for p in pieces]


def _slice_nbytes(pieces: Sequence[Piece]) -> int:
    arrays = (align(p.size * dtype.itemsize) for p, dtype in _dtypes(pieces))
    return align(8 * len(pieces)) + sum(arrays)


def _needed(pieces: Sequence[Piece], n_ranks: int, n_slices: int, n_tables: int) -> int:
    table = align(MailboxTable.n_words(n_ranks, n_slices, n_tables) * 8)
    head = align(align(HEADER_WORDS * 8) + 2 * table, PAGE_NBYTES)
    return head + n_slices * _slice_nbytes(pieces)

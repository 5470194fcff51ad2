"""The memory format of a shard: one flat buffer that holds everything it knows.

::

    header      128 B   magic, format, number of pieces, flip word, writing word,
                        generation, gate, nonce
    record 0            version, rounds, run, counters; steps and last change per
    record 1            piece; one row per rank; one row per producer; the producers
                        that lost their row last
    weights 0           from a page on, slice of every dtype's flat vector, each
                        64-byte aligned
    weights 1           the same
    slots               optimizer state, one block per (piece, slot), 64-byte aligned

All words are little-endian int64. A *publication* writes the weights and the record
that are not current and then adds one to the *flip word*, whose parity selects both:
everything an update changes becomes visible in that one store. The *writing word* is
set to the coming flip before its first byte, so a copy taken at flip *f* is whole iff
``writing <= f + 1`` afterwards. Where nobody writes and the two words differ, a
publication stopped half-way: the weights that are not current are worthless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.layout import Layout, Piece, align, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAGIC = 0x5350_4B53_4144  # "DASKPS"
FORMAT = 2
HEADER_WORDS = 16
#: Words of the header.
MAGIC_AT, FORMAT_AT, N_PIECES_AT, FLIP, WRITING, GENERATION, GATE, NONCE = range(8)
#: Weights begin at a page: copies into fresh memory, which does too, took 9 ms for
#: 64 MiB then, and 12 to 17 ms from other places within a page.
PAGE_NBYTES = 4096
MAX_RANKS = 1024
MAX_PRODUCERS = 1024
#: Words at the head of a record; the names index them.
HEAD = 10
(
    VERSION,
    ROUNDS,
    RUN,
    POLICY,
    STALENESS,
    N_RANKS,
    N_PRODUCERS,
    TURN,
    N_EXPIRED,
    FORGOTTEN,
) = range(HEAD)
#: Columns of a rank's row: ticks, next sequence number, whether it is waited for, and
#: the sequence number its open clock began with.
RANK_WORDS = 4
CLOCK, NEXT, LIVE, FIRST = range(RANK_WORDS)
#: Columns of a producer's row.
PRODUCER_WORDS = 4
PRODUCER, HIGH, SEEN, CLOSED = range(PRODUCER_WORDS)

Words = np.ndarray[Any, np.dtype[np.int64]]
Array = np.ndarray[Any, np.dtype[Any]]


class Record:
    """One of the two control records of a shard, as views of its segment."""

    def __init__(self, words: Words, n_pieces: int) -> None:
        #: Head, then steps applied per piece, then flip of the last change per piece.
        self.fixed = words[: HEAD + 2 * n_pieces]
        self.steps = words[HEAD : HEAD + n_pieces]
        self.changed = words[HEAD + n_pieces : HEAD + 2 * n_pieces]
        at = HEAD + 2 * n_pieces
        ranks, at = words[at : at + RANK_WORDS * MAX_RANKS], at + RANK_WORDS * MAX_RANKS
        self.ranks = ranks.reshape(MAX_RANKS, RANK_WORDS)
        rows = words[at : at + PRODUCER_WORDS * MAX_PRODUCERS]
        self.producers = rows.reshape(MAX_PRODUCERS, PRODUCER_WORDS)
        #: A ring of the producers that lost their row last.
        self.expired = words[at + PRODUCER_WORDS * MAX_PRODUCERS :]

    @staticmethod
    def n_words(n_pieces: int) -> int:
        """Return the length of a record for `n_pieces` pieces."""
        ranks, rows = RANK_WORDS * MAX_RANKS, (PRODUCER_WORDS + 1) * MAX_PRODUCERS
        return HEAD + 2 * n_pieces + ranks + rows

    def copy_from(self, other: Record) -> None:
        """Take over everything `other` says."""
        self.fixed[:] = other.fixed
        n = other.fixed[N_RANKS]
        self.ranks[:n] = other.ranks[:n]
        n = other.fixed[N_PRODUCERS]
        self.producers[:n] = other.producers[:n]
        n = other.fixed[N_EXPIRED]
        self.expired[:n] = other.expired[:n]

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return int(self.fixed[VERSION])

    @property
    def live(self) -> Words:
        """Rows of the ranks that are still waited for."""
        rows = self.ranks[: self.fixed[N_RANKS]]
        live: Words = rows[rows[:, LIVE] == 1]
        return live


class Segment:
    """One shard's memory and the views into it.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    shard : int
        Index of the shard.
    slots : mapping of int to sequence of float
        For each parameter index the initial value of each optimizer slot.
    buffer : ndarray, shape (nbytes,), uint8, optional
        Memory to use; private memory is taken by default.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        slots: Mapping[int, Sequence[float]],
        buffer: Array | None = None,
    ) -> None:
        self.pieces: tuple[Piece, ...] = layout.pieces[shard]
        n_record = Record.n_words(len(self.pieces)) * 8
        extents = [(d, layout.extent(shard, d)) for d in layout.lengths]
        self._regions: dict[str, tuple[int, int]] = {}
        at = 0
        for dtype, (start, stop) in extents:
            self._regions[dtype] = (at, stop - start)
            at += align((stop - start) * np.dtype(dtype).itemsize)
        self.weights_nbytes = align(at, PAGE_NBYTES)
        head = align(HEADER_WORDS * 8)
        self._weights_at = align(head + 2 * align(n_record), PAGE_NBYTES)
        self._slots_at = self._weights_at + 2 * self.weights_nbytes
        self.nbytes = self.needed_nbytes(layout, shard, slots)
        self.buffer = private(self.nbytes) if buffer is None else buffer
        words: Words = self.buffer[:head].view(np.int64)
        self.words = words
        self.records = tuple(
            Record(self._view(head + i * align(n_record), n_record, np.int64), n)
            for i, n in enumerate((len(self.pieces),) * 2)
        )
        self.vectors = tuple(self._vectors(i) for i in (0, 1))
        self.weights = tuple(
            [v[p.parameter.dtype][p.local : p.local + p.size] for p in self.pieces]
            for v in self.vectors
        )
        self.slots = self._slot_views(slots)
        #: For each piece the initial value of each optimizer slot.
        self.slot_init = [
            tuple(map(float, slots.get(p.parameter.index, ()))) for p in self.pieces
        ]
        # Memory that holds a shard already is taken over as it is.
        if words[MAGIC_AT] != MAGIC:
            self.reset_slots()
            words[[MAGIC_AT, FORMAT_AT, N_PIECES_AT]] = MAGIC, FORMAT, len(self.pieces)

    def _view(self, at: int, nbytes: int, dtype: Any) -> Array:
        return self.buffer[at : at + nbytes].view(dtype)

    def _vectors(self, side: int) -> dict[str, Array]:
        base = self._weights_at + side * self.weights_nbytes
        return {
            d: self._view(base + at, n * np.dtype(d).itemsize, d)
            for d, (at, n) in self._regions.items()
        }

    @staticmethod
    def needed_nbytes(
        layout: Layout, shard: int, slots: Mapping[int, Sequence[float]]
    ) -> int:
        """Return the size of a segment without making one."""
        pieces = layout.pieces[shard]
        records = 2 * align(Record.n_words(len(pieces)) * 8)
        weights = 0
        for dtype in layout.lengths:
            start, stop = layout.extent(shard, dtype)
            weights += align((stop - start) * np.dtype(dtype).itemsize)
        state = sum(
            align(p.size * np.dtype(compute_dtype(p.parameter.dtype)).itemsize)
            * len(slots.get(p.parameter.index, ()))
            for p in pieces
        )
        head = align(align(HEADER_WORDS * 8) + records, PAGE_NBYTES)
        return head + 2 * align(weights, PAGE_NBYTES) + state

    def _slot_views(
        self, slots: Mapping[int, Sequence[float]]
    ) -> list[tuple[Array, ...]]:
        at = self._slots_at
        views = []
        for piece in self.pieces:
            dtype = compute_dtype(piece.parameter.dtype)
            nbytes = piece.size * np.dtype(dtype).itemsize
            arrays = []
            for _ in slots.get(piece.parameter.index, ()):
                arrays.append(self._view(at, nbytes, dtype))
                at += align(nbytes)
            views.append(tuple(arrays))
        return views

    def reset_slots(self) -> None:
        """Give every optimizer slot its initial value."""
        for arrays, values in zip(self.slots, self.slot_init, strict=True):
            for array, value in zip(arrays, values, strict=True):
                array[:] = value

    @property
    def flip(self) -> int:
        """Number of publications; its parity selects weights and record."""
        return int(self.words[FLIP])

    @flip.setter
    def flip(self, value: int) -> None:
        self.words[FLIP] = value

    @property
    def writing(self) -> int:
        """The flip being written, or the last one that was."""
        return int(self.words[WRITING])

    @writing.setter
    def writing(self, value: int) -> None:
        self.words[WRITING] = value

    def record(self, flip: int) -> Record:
        """Return the record of a flip: the current one, or the one before it."""
        return self.records[flip & 1]

    @property
    def current(self) -> Record:
        """The record in force."""
        return self.records[self.flip & 1]


def private(nbytes: int) -> Array:
    """Return zeroed private memory whose pages exist, aligned to a page.

    Writing the zeros takes the page faults here instead of in the first update.
    """
    raw = np.empty(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_NBYTES
    raw[start : start + nbytes] = 0
    return raw[start : start + nbytes]

"""The memory format of a shard: one flat buffer that holds everything it knows.

::

    header      256 B   magic, format, number of pieces, flip word, writing word,
                        generation, gate, nonce; number of slot buffers, how far a run
                        in rounds that is fenced may go, the flip of a withdrawal;
                        counters, two words for a lock; 16 words that are free
    record 0            version, rounds, run, counters; per piece steps, last change and
    record 1            the buffers of its weights and slots; one row per rank; one row
                        per producer; the producers that lost their row last
    weights 0           from a page on, slice of every dtype's flat vector, each
                        64-byte aligned
    weights 1           the same
    slots 0             optimizer state, one block per (piece, slot), 64-byte aligned
    slots 1             the same, in a durable segment only

All words are little-endian int64. The parity of the *flip word* selects a record, and
the record says for each piece which of the two buffers, or *sides*, holds its weights.
A *publication* writes the pieces that it changes to the side that the record in force
does not name, writes the other record, and adds one to the flip word: everything an
update changes becomes visible in that one store, and what it leaves alone stays where
it is. The *writing word* is set to the coming flip before its first byte. What record
*f* names is written again by publication *f* + 2 at the earliest, as that record is, so
a copy taken at flip *f* is whole iff ``writing <= f + 1`` afterwards. Where nobody
writes and the two words differ, a publication stopped half-way: the record that is not
current, and all that the current one does not name, are worthless.

A segment is *durable* if a process that is killed in the middle of an update leaves
the publication before it whole, for others to go on with. It has two buffers for the
slots as well, and each record says for each piece which of them holds its slots, apart
from its weights: what is no gradient changes the weights only. Private memory goes
with its only process:
its slots have one buffer and are updated in place, but during a run in rounds, whose
last round may have to be taken back: for so long they have a second one beside it.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.errors import ProtocolError
from daskps.layout.arrays import Layout, Piece, align, compute_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.typing import Array

MAGIC = 0x5350_4B53_4144  # "DASKPS"
FORMAT = 6
HEADER_WORDS = 32
#: Words of the header.
MAGIC_AT, FORMAT_AT, N_PIECES_AT, FLIP, WRITING, GENERATION, GATE, NONCE = range(8)
N_SIDES_AT = 8
#: The run in rounds that is being fenced, and the round from which on it completes none.
#: The flip of a publication that withdraws a round, from before its first byte on: where
#: that stopped half-way, the round it goes back to is whole all the same.
FENCED, LIMIT, WITHDRAWS = 9, 10, 11
#: Counted after the flip, for statistics: a kill between the two loses a count.
N_APPLIED, N_DUPLICATES = 12, 13
#: For a lock: who holds it, and whether others want it.
HOLDER, WANTED = 14, 15
#: Weights begin at a page: copies into fresh memory, which does too, took 9 ms for
#: 64 MiB then, and 12 to 17 ms from other places within a page.
PAGE_NBYTES = 4096
MAX_RANKS = 1024
MAX_PRODUCERS = 1024
#: Words at the head of a record; the names index them.
HEAD = 11
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
    SIDE,
) = range(HEAD)
#: What SIDE says, where not all weights lie in one buffer.
MIXED = -1
#: Words of a record per piece.
PIECE_WORDS = 4
#: Shards with so many bytes of weights at most keep them in one buffer at all times:
#: to copy what a push leaves alone takes less than to read it piece by piece.
TOGETHER_NBYTES = 2**16
#: Columns of a rank's row: ticks, next sequence number, whether it is waited for, and
#: the sequence number its open clock began with.
RANK_WORDS = 4
CLOCK, NEXT, LIVE, FIRST = range(RANK_WORDS)
#: Columns of a producer's row: its number, the newest of its pushes and a bit for each of
#: the 64 up to that, when it was closed; and of the newest push, below which number all
#: were settled then, and a bit for each shard it is meant for, 0 for all.
PRODUCER_WORDS = 6
PRODUCER, HIGH, SEEN, CLOSED, FLOOR, MEANT = range(PRODUCER_WORDS)

Words = np.ndarray[Any, np.dtype[np.int64]]


class Record:
    """One of the two control records of a shard, as views of its segment."""

    def __init__(self, words: Words, n_pieces: int) -> None:
        at = HEAD + PIECE_WORDS * n_pieces
        #: All of it, and the same as plain integers.
        self.words, self.plain = words, integers(words)
        #: Head, then for each piece the steps applied, the flip of its last change
        #: and the buffers of its slots and of its weights.
        self.fixed = words[:at]
        columns = words[HEAD:at].reshape(PIECE_WORDS, -1)
        self.steps, self.changed, self.slot_sides, _ = columns
        #: As plain integers, which every update looks at.
        self.weight_sides = self.plain[at - n_pieces : at]
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
        return HEAD + PIECE_WORDS * n_pieces + ranks + rows

    def copy_from(self, other: Record) -> None:
        """Take over everything `other` says."""
        mine, theirs = self.plain, other.plain
        at = len(self.fixed)
        stop = at + RANK_WORDS * theirs[N_RANKS]
        mine[:stop] = theirs[:stop]
        at += RANK_WORDS * MAX_RANKS
        self._copy_producers(other, at)

    def take_producers(self, other: Record) -> None:
        """Take over what `other` says of producers, and nothing else."""
        for at in (N_PRODUCERS, TURN, N_EXPIRED, FORGOTTEN):
            self.plain[at] = other.plain[at]
        self._copy_producers(other, len(self.fixed) + RANK_WORDS * MAX_RANKS)

    def _copy_producers(self, other: Record, at: int) -> None:
        mine, theirs = self.plain, other.plain
        for room, n in (
            (PRODUCER_WORDS * MAX_PRODUCERS, PRODUCER_WORDS * theirs[N_PRODUCERS]),
            (MAX_PRODUCERS, theirs[N_EXPIRED]),
        ):
            if n:
                mine[at : at + n] = theirs[at : at + n]
            at += room

    @property
    def version(self) -> int:
        """Number of updates applied."""
        return self.plain[VERSION]

    @property
    def side(self) -> int:
        """The buffer that holds the weights of all pieces, MIXED where both do."""
        sides = self.weight_sides.tolist()
        first = sides[0] if sides else 0
        return first if sides.count(first) == len(sides) else MIXED

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
        Memory to use, zeroed or with a shard in it, which is taken over as it is;
        private memory is taken by default.
    durable : bool, default False
        Whether the slots have two buffers, so that a process killed in an update
        leaves a shard that others can go on with.

    Raises
    ------
    ProtocolError
        If `buffer` holds something else: another format, or another shard.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        slots: Mapping[int, Sequence[float]],
        buffer: Array | None = None,
        *,
        durable: bool = False,
    ) -> None:
        self.pieces: tuple[Piece, ...] = layout.pieces[shard]
        #: How many buffers the slots have.
        self.n_sides = 2 if durable else 1
        self.is_durable = durable
        self.nbytes = self.needed_nbytes(layout, shard, slots, durable=durable)
        self.buffer = private(self.nbytes) if buffer is None else buffer
        self._check_length(HEADER_WORDS * 8)
        self.words: Words = self.buffer[: HEADER_WORDS * 8].view(np.int64)
        #: The same words as plain integers, which are read on every call.
        self.header = integers(self.words)
        holds = self._holds()
        n_record = Record.n_words(len(self.pieces)) * 8
        head = align(HEADER_WORDS * 8)
        self.records = tuple(
            Record(self._view(head + i * align(n_record), n_record, np.int64), n)
            for i, n in enumerate((len(self.pieces),) * 2)
        )
        weights_at = align(head + 2 * align(n_record), PAGE_NBYTES)
        self.weights_nbytes = align(_weights_nbytes(layout, shard), PAGE_NBYTES)
        self.vectors = tuple(
            self._vectors(layout, shard, weights_at + i * self.weights_nbytes)
            for i in (0, 1)
        )
        self.weights = tuple(
            [v[p.parameter.dtype][p.local : p.local + p.size] for p in self.pieces]
            for v in self.vectors
        )
        #: Whether all of them lie in one buffer at all times.
        self.is_together = self.weights_nbytes <= TOGETHER_NBYTES
        #: For each piece the initial value of each optimizer slot.
        self.slot_init = [
            tuple(map(float, slots.get(p.parameter.index, ()))) for p in self.pieces
        ]
        self._slots_at = weights_at + 2 * self.weights_nbytes
        sizes = zip(map(_slot_nbytes, self.pieces), self.slot_init, strict=True)
        self._slots_nbytes = sum(align(n) * len(init) for n, init in sizes)
        self._slots = tuple(self._slot_views(side) for side in range(self.n_sides))
        #: What :mod:`daskps.shards.memory.publication` makes ready once, by piece and buffers.
        self.updates: dict[tuple[int, int, int, bool], Any] = {}
        if not holds:
            self._begin()

    def _holds(self) -> bool:
        """Return whether the memory holds a shard, which must be this one's."""
        magic, n = int(self.words[MAGIC_AT]), len(self.pieces)
        if magic not in (0, MAGIC):
            raise ProtocolError(
                f"this memory holds no shard of daskps: it begins with {magic:#x} "
                f"instead of {MAGIC:#x}; remove it, or give another place"
            )
        found = tuple(map(int, self.words[[FORMAT_AT, N_PIECES_AT, N_SIDES_AT]]))
        if magic and found[0] != FORMAT:
            raise ProtocolError(
                f"this memory holds a shard in format {found[0]}, this version of "
                f"daskps reads format {FORMAT}; run the same version of daskps in "
                f"all processes"
            )
        if magic and found[1:] != (n, self.n_sides):
            raise ProtocolError(
                f"this memory holds a shard of {found[1]} pieces and {found[2]} slot "
                f"buffers, expected were {n} and {self.n_sides}; it is another shard, "
                f"or one end made it durable and the other did not"
            )
        self._check_length(self.nbytes)
        return bool(magic)

    def _check_length(self, needed: int) -> None:
        if len(self.buffer) < needed:
            raise ProtocolError(
                f"this memory has {len(self.buffer)} bytes, a shard of this layout "
                f"takes {self.nbytes}; it was cut short, or is another shard"
            )

    def _begin(self) -> None:
        """Make a shard of zeroed memory; the magic number says that it is one."""
        for arrays, values in zip(self._slots[0], self.slot_init, strict=True):
            for array, value in zip(arrays, values, strict=True):
                array[:] = value
        at = [FORMAT_AT, N_PIECES_AT, N_SIDES_AT]
        self.words[at] = FORMAT, len(self.pieces), self.n_sides
        self.words[MAGIC_AT] = MAGIC

    def _view(self, at: int, nbytes: int, dtype: Any) -> Array:
        return self.buffer[at : at + nbytes].view(dtype)

    def _vectors(self, layout: Layout, shard: int, at: int) -> dict[str, Array]:
        vectors = {}
        for dtype in layout.lengths:
            start, stop = layout.extent(shard, dtype)
            nbytes = (stop - start) * np.dtype(dtype).itemsize
            vectors[dtype] = self._view(at, nbytes, dtype)
            at += align(nbytes)
        return vectors

    @staticmethod
    def needed_nbytes(
        layout: Layout,
        shard: int,
        slots: Mapping[int, Sequence[float]],
        *,
        durable: bool = False,
    ) -> int:
        """Return the size of a segment without making one."""
        pieces = layout.pieces[shard]
        records = 2 * align(Record.n_words(len(pieces)) * 8)
        weights = align(_weights_nbytes(layout, shard), PAGE_NBYTES)
        state = sum(
            align(_slot_nbytes(p)) * len(slots.get(p.parameter.index, ()))
            for p in pieces
        )
        head = align(align(HEADER_WORDS * 8) + records, PAGE_NBYTES)
        return head + 2 * weights + (2 if durable else 1) * state

    def _slot_views(self, side: int) -> list[tuple[Array, ...]]:
        """Return the slots of every piece in one of their buffers."""
        at = self._slots_at + side * self._slots_nbytes
        return self._views_in(self.buffer, at)

    def _views_in(self, buffer: Array, at: int) -> list[tuple[Array, ...]]:
        views = []
        for piece, init in zip(self.pieces, self.slot_init, strict=True):
            dtype, nbytes = compute_dtype(piece.parameter.dtype), _slot_nbytes(piece)
            starts = [at + i * align(nbytes) for i in range(len(init))]
            views.append(tuple(buffer[s : s + nbytes].view(dtype) for s in starts))
            at += len(init) * align(nbytes)
        return views

    @property
    def more_nbytes(self) -> int:
        """Bytes that a run in rounds takes beside this memory, for slots."""
        return 0 if self.is_durable else self._slots_nbytes

    def double_slots(self) -> None:
        """Give slots of one buffer a second one: a round may have to be taken back."""
        if self.n_sides == 1 and self._slots_nbytes:
            self._slots = (
                self._slots[0],
                self._views_in(untouched(self._slots_nbytes), 0),
            )
            self.n_sides = 2

    def single_slots(self) -> None:
        """Free the second buffer of slots that had one to begin with."""
        if not self.is_durable and self.n_sides == 2:
            # Which keeps what was made ready for that buffer.
            self.updates.clear()
            self._slots, self.n_sides = self._slots[:1], 1

    def slots_of(self, record: Record, position: int) -> tuple[Array, ...]:
        """Return the optimizer slots of a piece as a record has them."""
        return self._slots[record.slot_sides.item(position)][position]

    @cached_property
    def places(self) -> dict[str, tuple[list[int], list[int]]]:
        """For each dtype where its pieces begin in the vector, and their positions."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for position, piece in enumerate(self.pieces):
            starts, positions = found.setdefault(piece.parameter.dtype, ([], []))
            starts.append(piece.local)
            positions.append(position)
        return found

    def weights_of(self, record: Record, position: int) -> Array:
        """Return the weights of a piece as a record has them."""
        return self.weights[record.weight_sides[position]][position]

    @property
    def flip(self) -> int:
        """Number of publications; its parity selects the record."""
        return self.header[FLIP]

    @flip.setter
    def flip(self, value: int) -> None:
        self.header[FLIP] = value

    @property
    def writing(self) -> int:
        """The flip being written, or the last one that was."""
        return self.header[WRITING]

    @writing.setter
    def writing(self, value: int) -> None:
        self.header[WRITING] = value

    @property
    def withdraws(self) -> int:
        """The flip of the withdrawal that was begun last."""
        return self.header[WITHDRAWS]

    @withdraws.setter
    def withdraws(self, value: int) -> None:
        self.header[WITHDRAWS] = value

    @property
    def limit(self) -> int | None:
        """The round from which on the run in progress completes none, if it has one."""
        header = self.header
        run = self.records[header[FLIP] & 1].plain[RUN]
        return header[LIMIT] if run and header[FENCED] == run else None

    def fence(self, limit: int) -> None:
        """Let the run in progress complete no round from `limit` on."""
        header = self.header
        # In this order: a limit without its run says nothing.
        header[LIMIT] = limit
        header[FENCED] = self.current.plain[RUN]

    def record(self, flip: int) -> Record:
        """Return the record of a flip: the current one, or the one before it."""
        return self.records[flip & 1]

    @property
    def current(self) -> Record:
        """The record in force."""
        return self.records[self.header[FLIP] & 1]


def _weights_nbytes(layout: Layout, shard: int) -> int:
    extents = [(d, layout.extent(shard, d)) for d in layout.lengths]
    return sum(align((b - a) * np.dtype(d).itemsize) for d, (a, b) in extents)


def _slot_nbytes(piece: Piece) -> int:
    return piece.size * np.dtype(compute_dtype(piece.parameter.dtype)).itemsize


def integers(words: Words) -> memoryview[int]:
    """Return words of memory as plain integers: far quicker than NumPy's, one by one."""
    return words.data.cast("B").cast("q")


def untouched(nbytes: int) -> Array:
    """Return zeroed private memory, aligned to a page, whose pages are taken as they fill."""
    raw = np.zeros(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_NBYTES
    return raw[start : start + nbytes]


def private(nbytes: int) -> Array:
    """Return zeroed private memory whose pages exist, aligned to a page.

    Writing the zeros takes the page faults here instead of in the first update.
    """
    raw = np.empty(nbytes + PAGE_NBYTES, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE_NBYTES
    raw[start : start + nbytes] = 0
    return raw[start : start + nbytes]

"""The memory format of a shard: one flat buffer that holds everything it knows.

::

    header      256 B   magic, format, number of pieces, flip word, writing word,
                        generation, gate, nonce; number of slot buffers, how far a run
                        in rounds that is fenced may go, the flip of a withdrawal;
                        counters, two words for a lock; the run that ended last; the
                        row that the record in force has changed; three words of tables;
                        11 words that are free
    record      twice   version, rounds, run, counters, epochs, factor of learning
                        rates; per piece, and per table, steps and last change; per
                        piece the buffers of its slots and weights; per table how many
                        entries its feed has, and its clock; one row per rank; one row
                        per producer; the producers that lost their row last; pushes
                        that were given up and not applied
    weights     twice   for each dtype the shard's part of its flat vector, both buffers
                        from a page on
    slot0 ...           optimizer state, one for each slot of each piece; twice in a
                        durable segment only
    undo                of each table, from here on: 64 B, the undo word first
    rows                its rows, from a page on
    slot0 ...           optimizer state of the rows, one for each slot
    log ids             the undo log: which rows,
    log, log slot0 ...  what they held, and what their slots held
    feed head           the feed: 64 B, how much of it there is,
    feed entries        which publication has changed how many rows, by whose push,
    feed ids            and which rows

Each line is an *area*, or several of that name: arrays of one dtype and shape, in one
buffer or two, one behind the other. :func:`daskps.shards.memory.areas.areas_of` has the
table of them, which says where each begins; header and record are the words below.
Rows are changed in place: :mod:`daskps.shards.memory.undo` says how, and
:mod:`daskps.shards.memory.feed` how others hear of it.

All words are little-endian int64. The parity of the *flip word* selects a record, and
the record says for each piece which of the two buffers, or *sides*, holds its weights.
A *publication* writes the pieces that it changes to the side that the record in force
does not name, writes the other record, and adds one to the flip word: everything an
update changes becomes visible in that one store, and what it leaves alone stays where
it is. The *writing word* is set to the coming flip before its first byte. Publication
*f* + 2 is the first to write again what record *f* names, as it writes that record, so
a copy taken at flip *f* is whole iff ``writing <= f + 1`` afterwards. Where no process
writes and the two words differ, a publication stopped half-way: the record that is not
current, and all that the current one does not name, are worthless.

A segment is *durable* if a process that is killed in the middle of an update leaves
the publication before it whole, for others to go on with. It has two buffers for the
slots as well, and each record says for each piece which of them holds its slots, apart
from its weights: what is no gradient changes the weights only. Private memory goes
with its only process: its slots have one buffer and are updated in place, but during a
run in rounds, whose last round may have to be taken back: for so long they have a
second one beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.errors import ProtocolError

if TYPE_CHECKING:
    from daskps.typing import Array


MAGIC = 0x5350_4B53_4144  # "DASKPS"
FORMAT = 17
HEADER_WORDS = 32
#: Words of the header.
MAGIC_AT, FORMAT_AT, N_PIECES_AT, FLIP, WRITING, GENERATION, GATE, NONCE = range(8)
N_SIDES_AT = 8
#: The run in rounds that is being fenced, and the round from which on it completes none;
#: less than 0 where that is until all shards have heard that a trainer has finished.
#: The flip of a publication that withdraws a round, from before its first byte on: where
#: that stopped half-way, the round it goes back to is whole all the same.
FENCED, LIMIT, WITHDRAWS = 9, 10, 11
#: Counted after the flip, for statistics: a kill between the two loses a count.
N_APPLIED, N_DUPLICATES = 12, 13
#: For a lock: who holds it, and whether others want it.
HOLDER, WANTED = 14, 15
#: The run that ended last: its beginning may be late, and must not come after.
ENDED = 16
#: Where in the record in force the only row of a rank or a producer begins in which it
#: differs from the other record, where that is whole; 0 where it may be any rows.
CHANGED_ROW = 17
#: How many tables there are, and the row sequence: odd while rows are changed in place.
#: Last, the word for the changes that a publication makes to tables after all others,
#: with its flip above the lower bits.
N_TABLES_AT, ROWS_SEQUENCE, FORWARD = 18, 19, 20
#: Of the last run that measures delays, counted after the flip too: gradients that were
#: too old, and all of them by their delay, see `delay_bucket`.
N_DROPPED, DELAYS, N_DELAYS = 21, 22, 10
MAX_RANKS = 1024
MAX_PRODUCERS = 1024
#: Words at the head of a record; the names index them. Three of the last ones say where
#: the store is in its epochs: the first one of the run in progress, or of the last, its
#: rounds of an epoch, and how many of them there were before the run, or in all, see
#: `Epochs`. The last but one is the bits of a float64 number.
HEAD = 16
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
    EPOCH,
    PER_EPOCH,
    TICKS,
    DAMPING,
    N_KEPT,
) = range(HEAD)
#: The value of SIDE where not all weights lie in one buffer.
MIXED = -1
#: Words of a record per piece, and per table.
PIECE_WORDS, TABLE_WORDS = 5, 5
#: Columns of a rank's row: ticks, next sequence number, whether it is waited for, the
#: sequence number its open clock began with, and below which number all its steps were
#: answered or given up.
RANK_WORDS = 5
CLOCK, NEXT, LIVE, FIRST, RANK_FLOOR = range(RANK_WORDS)
#: Columns of a producer's row: its number, the newest of its pushes and a bit for each of
#: the 64 up to that, when it was closed; and of the newest push, below which number all
#: were settled then, and a bit for each shard it is meant for, 0 for all. From where to
#: where lie those that were given up, and for which there was no room among the kept.
PRODUCER_WORDS = 8
PRODUCER, HIGH, SEEN, CLOSED, FLOOR, MEANT, LOST_FROM, LOST_TO = range(PRODUCER_WORDS)
#: Columns of the pushes that were given up and not applied, and are below the window: of
#: a producer, by which 64 numbers, a bit for each.
KEPT_WORDS, MAX_KEPT = 3, 512
KEPT_OF, KEPT_BLOCK, KEPT_BITS = range(KEPT_WORDS)

Words = np.ndarray[Any, np.dtype[np.int64]]


def integers(words: Words) -> memoryview[int]:
    """Return words of memory as plain integers: far quicker than NumPy's, one by one."""
    return words.data.cast("B").cast("q")


class Record:
    """One of the two control records of a shard, as views of its segment."""

    def __init__(self, words: Words, n_pieces: int, n_tables: int = 0) -> None:
        at = HEAD + PIECE_WORDS * n_pieces + TABLE_WORDS * n_tables
        #: All of it, and the same as plain integers.
        self.words, self.plain = words, integers(words)
        #: Head, then for each piece and each table the steps applied and the flip of its
        #: last change and the factor of its learning rate, for each piece the buffers of
        #: its slots and of its weights, and for each table how many entries its feed
        #: has, and its clock.
        self.fixed = words[:at]
        #: Where the rows of the ranks begin.
        self.ranks_at = at
        #: Of each table, how many pushes have named it, whichever shards have their rows.
        self.clocks = self.plain[at - n_tables : at]
        at -= 2 * n_tables
        #: As plain integers, which every update looks at.
        self.told = self.plain[at : at + n_tables]
        _, self.changed, _ = words[HEAD : at - 2 * n_pieces].reshape(3, -1)
        n = len(self.changed)
        self.steps = self.plain[HEAD : HEAD + n]
        #: By what learning rates are multiplied, see :mod:`daskps.optim.factors`.
        self.factors = self.plain[HEAD + 2 * n : at - 2 * n_pieces]
        #: The words that hold for this segment alone: buffers, flips, entries of feeds.
        self.own = (
            slice(SIDE, SIDE + 1),
            slice(HEAD + n, HEAD + 2 * n),
            slice(at - 2 * n_pieces, at + n_tables),
        )
        self.slot_sides = words[at - 2 * n_pieces : at - n_pieces]
        self.weight_sides = self.plain[at - n_pieces : at]
        at = self.ranks_at
        ranks, at = words[at : at + RANK_WORDS * MAX_RANKS], at + RANK_WORDS * MAX_RANKS
        self.ranks = ranks.reshape(MAX_RANKS, RANK_WORDS)
        rows = words[at : at + PRODUCER_WORDS * MAX_PRODUCERS]
        self._producers_at = at
        #: Rows of producers as this process has found them last: where to look first.
        self.known: dict[int, int] = {}
        self.producers = rows.reshape(MAX_PRODUCERS, PRODUCER_WORDS)
        at += PRODUCER_WORDS * MAX_PRODUCERS
        #: A ring of the producers that lost their row last.
        self.expired, at = words[at : at + MAX_PRODUCERS], at + MAX_PRODUCERS
        self.kept = words[at : at + KEPT_WORDS * MAX_KEPT].reshape(MAX_KEPT, KEPT_WORDS)

    @staticmethod
    def n_words(n_pieces: int, n_tables: int = 0) -> int:
        """Return the length of a record for so many pieces and tables."""
        ranks, rows = RANK_WORDS * MAX_RANKS, (PRODUCER_WORDS + 1) * MAX_PRODUCERS
        rows += KEPT_WORDS * MAX_KEPT
        return HEAD + PIECE_WORDS * n_pieces + TABLE_WORDS * n_tables + ranks + rows

    def copy_from(self, other: Record, row: int = 0) -> None:
        """Take over everything `other` says, where all rows are equal but the one at `row`.

        With 0 any of them may differ. With a thousand producers these are most of it.
        """
        mine, theirs = self.plain, other.plain
        at = self.ranks_at
        if row:
            mine[:at] = theirs[:at]
            mine[row : row + PRODUCER_WORDS] = theirs[row : row + PRODUCER_WORDS]
            return
        for part in other.used():
            mine[part] = theirs[part]

    def take_producers(self, other: Record) -> None:
        """Take over what `other` says of producers, and nothing else."""
        for at in (N_PRODUCERS, TURN, N_EXPIRED, FORGOTTEN, N_KEPT):
            self.plain[at] = other.plain[at]
        for part in other.used()[1:]:
            self.plain[part] = other.plain[part]

    def used(self) -> list[slice]:
        """Return the words that say something: first those up to ranks, then producers."""
        words, at = self.plain, self._producers_at
        found = [slice(0, self.ranks_at + RANK_WORDS * words[N_RANKS])]
        for room, n in (
            (PRODUCER_WORDS * MAX_PRODUCERS, PRODUCER_WORDS * words[N_PRODUCERS]),
            (MAX_PRODUCERS, min(MAX_PRODUCERS, words[N_EXPIRED])),
            (KEPT_WORDS * MAX_KEPT, KEPT_WORDS * words[N_KEPT]),
        ):
            if n:
                found.append(slice(at, at + n))
            at += room
        return found

    def producer(self, at: int) -> memoryview[int]:
        """Return the row of a producer as plain integers."""
        start = self.start_of(at)
        return self.plain[start : start + PRODUCER_WORDS]

    def start_of(self, at: int) -> int:
        """Return which of its words the row of a producer begins at."""
        return self._producers_at + PRODUCER_WORDS * at

    def index_of(self, row: Words, column: int) -> int:
        """Return which of its words a column of one of its rows is."""
        return (row.ctypes.data - self.words.ctypes.data) // row.itemsize + column

    @property
    def version(self) -> int:
        """Number of the state: it rises with updates, and with a round withdrawn."""
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


class Identity(NamedTuple):
    """The numbers in a header that tell its shard from another one."""

    n_pieces: int
    n_sides: int
    n_tables: int
    #: Bytes of the memory that such a shard takes.
    nbytes: int

    def check_header(self, buffer: Array) -> None:
        """Refuse memory that has no room for a header.

        Raises
        ------
        ProtocolError
            If it is too short.
        """
        self._check_length(buffer, 8 * HEADER_WORDS)

    def is_in(self, words: Array, buffer: Array) -> bool:
        """Return whether memory holds a shard, which must be this one; else it is empty.

        Raises
        ------
        ProtocolError
            If it holds something else, or is too short.
        """
        magic, n = int(words[MAGIC_AT]), self.n_pieces
        if magic not in (0, MAGIC):
            raise ProtocolError(
                f"this memory holds no shard of daskps: it begins with {magic:#x} "
                f"instead of {MAGIC:#x}; remove it, or give another place"
            )
        found = tuple(map(int, words[[FORMAT_AT, N_PIECES_AT, N_SIDES_AT]]))
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
        if magic and words[N_TABLES_AT] != self.n_tables:
            raise ProtocolError(
                f"this memory holds a shard of {words[N_TABLES_AT]} tables, "
                f"expected were {self.n_tables}; it is another shard"
            )
        self._check_length(buffer, self.nbytes)
        return bool(magic)

    def write(self, words: Array) -> None:
        """Say in a header that all behind it is this shard's; the magic number last."""
        words[[FORMAT_AT, N_PIECES_AT, N_SIDES_AT, N_TABLES_AT]] = (
            *(FORMAT, self.n_pieces),
            *(self.n_sides, self.n_tables),
        )
        words[MAGIC_AT] = MAGIC

    def _check_length(self, buffer: Array, needed: int) -> None:
        if len(buffer) < needed:
            raise ProtocolError(
                f"this memory has {len(buffer)} bytes, a shard of this layout "
                f"takes {self.nbytes}; it was cut short, or is another shard"
            )

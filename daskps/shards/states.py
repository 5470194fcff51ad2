"""States: all that has changed in a shard since a moment, for a copy of it elsewhere.

The owner of a shard takes a state from the memory alone, whichever process made the
changes, and however many there were: the record has the flip of each piece's last
change, a feed the ids of rows. A copy installs it as one publication of its own, whole
or not at all. It runs no rule and no code of a user, so it has the same bits on any
processor.

A copy begins as a new shard that is filled from a frozen one, see
:mod:`daskps.shards.installation`; states come after that. Its own flips, buffers and
feeds are its own: a flip of the owner means nothing in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.errors import LayoutError, ProtocolError
from daskps.kernels.row_index import NoRoomError
from daskps.kernels.row_moves import scatter
from daskps.limits import MOST_PUSHED_ROWS
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.memory import undo
from daskps.shards.memory.areas import HEADER, RECORD
from daskps.shards.memory.format import (
    CHANGED_ROW,
    DELAYS,
    ENDED,
    FENCED,
    LIMIT,
    N_APPLIED,
    N_DELAYS,
    N_DROPPED,
    N_DUPLICATES,
    N_RANKS,
    POLICY,
    RANK_WORDS,
)
from daskps.shards.memory.growth import provide
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.room import Need, has_room
from daskps.shards.reader import BSP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.shards.arrays.unbounded_rows import KnownIds
    from daskps.shards.memory.segment import Segment
    from daskps.shards.memory.table_memory import TableMemory
    from daskps.typing import Array

#: Words of the header that a copy has too, in the order in which each alone is right.
_HEADER: Final = (
    *(LIMIT, FENCED, ENDED, N_APPLIED, N_DUPLICATES, N_DROPPED),
    *range(DELAYS, DELAYS + N_DELAYS),
)


class Mark(NamedTuple):
    """A moment of a shard."""

    flip: int
    #: The version that it had then.
    version: int


class PieceState(NamedTuple):
    """One piece of an array, or the part of it that has changed."""

    position: int
    start: int
    weights: Array
    slots: tuple[Array, ...]


class RowsState(NamedTuple):
    """Rows of one table."""

    ordinal: int
    ids: Array
    #: Of shape (n, dim), and (n, width) each.
    rows: Array
    slots: tuple[Array, ...]
    #: Of an unbounded table: all ids that have changed, with and without rows.
    known: KnownIds | None = None
    #: Whether these are all that there are: nobody knows which have changed.
    whole: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """The changes between two moments of a shard."""

    since: Mark
    now: Mark
    #: Parts of the record, and the word of it that each begins at.
    words: Sequence[tuple[int, Array]]
    header: Array
    pieces: Sequence[PieceState]
    tables: Sequence[RowsState]
    #: Whether a round was taken back between the two.
    goes_back: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = [self.header, *(array for _, array in self.words)]
        for *_, weights, slots in self.pieces:
            arrays += [weights, *slots]
        for _, ids, rows, slots, known, _ in self.tables:
            arrays += [ids, rows, *slots, *(known or ())]
        return sum(array.nbytes for array in arrays)


def follow(segment: Segment) -> Mark:
    """Have the feeds of all tables note what changes from now on; return this moment.

    Under the shard's lock, by its owner.
    """
    undo.roll_back(segment)
    for table in segment.tables:
        table.feed.follow(segment.current, table.n_rows, segment.memory)
    return Mark(segment.flip, segment.current.version)


def take(
    segment: Segment, since: Mark, own: Callable[[Array], Array] | None = None
) -> State | None:
    """Return what has changed since a moment; under the shard's lock.

    Pieces are as `own` returns them, which may be itself where nothing changes the shard
    any more; by default copies.

    None where nobody knows any more which of too many rows have: the copy has to be
    filled anew.
    """
    undo.roll_back(segment)
    record, payload, n = segment.current, segment.payload, len(segment.pieces)
    changed = record.changed > since.flip
    tables = []
    for table in segment.tables:
        if changed[n + table.ordinal]:
            ids = None
            if since.flip >= table.feed.began:
                ids = table.feed.read(record, since.version, 0)
            if is_whole := ids is None:
                ids = _all_of(table)
            # Of a table that has grown it keeps more from here on.
            table.feed.follow(record, table.n_rows, segment.memory)
            if is_whole and len(ids) > MOST_PUSHED_ROWS:
                return None
            rows = _rows_of(segment, table, ids)
            tables.append(rows._replace(whole=is_whole))
    pieces, own = [], own or payload.fetch
    for position in np.flatnonzero(changed[:n]).tolist():
        start, stop = segment.part_since(since.flip, position)
        slots = [own(slot[start:stop]) for slot in segment.slots_of(record, position)]
        weights = own(segment.weights_of(record, position)[start:stop])
        pieces.append(PieceState(position, start, weights, tuple(slots)))
    segment.parts = {}
    words = [(part.start, np.array(record.words[part])) for part in record.used()]
    now = Mark(segment.flip, record.version)
    header, goes_back = segment.words[[*_HEADER]], segment.withdraws > since.flip
    return State(since, now, words, header, pieces, tables, goes_back)


def _all_of(table: TableMemory) -> Array:
    """Return all ids that a table knows."""
    if (unbounded := table.unbounded) is None:
        first = table.piece.first_row
        return np.arange(first, first + table.n_rows)
    return np.concatenate([unbounded.ids(0)[0], unbounded.index.candidates()[0]])


def _rows_of(segment: Segment, table: TableMemory, ids: Array) -> RowsState:
    """Return rows and slots of some ids."""
    known, numbers, first = None, ids, table.piece.first_row
    if table.unbounded is not None:
        known, numbers = table.unbounded.known(ids)
        ids, first = known.ids, 0

    def gathered(array: Array) -> Array:
        out = np.empty((len(ids), array.shape[1]), array.dtype)
        where = {"first": first, "cache_dir": segment.cache_dir}
        segment.payload.read_rows(array, numbers, out, **where)
        return out

    slots = tuple(map(gathered, table.slots))
    return RowsState(table.ordinal, ids, gathered(table.rows), slots, known)


def receive(segment: Segment, state: State) -> State:
    """Return a state whose arrays are still to come, with places for large pieces.

    These are the buffers that are not in force, which hold nothing until it is installed.
    Slots of one buffer stay where they are. So do all where the owner went back: the copy
    may have to do so by itself.

    Raises
    ------
    ProtocolError
        For pieces of another shard; nothing was changed.
    """
    if not _has_pieces(segment, state):
        raise _not_of_it()
    if segment.is_together or state.goes_back or not state.pieces:
        return state
    record, segment.writing = segment.current, segment.flip + 1
    pieces = []
    for at, start, weights, slots in state.pieces:
        part = slice(start, start + len(weights))
        if segment.n_sides > 1:
            mine = segment.slots[1 - record.slot_sides.item(at)][at]
            slots = tuple([slot[part] for slot in mine])
        weights = segment.weights[1 - record.weight_sides[at]][at][part]
        pieces.append(PieceState(at, start, weights, slots))
    return replace(state, pieces=pieces)


def in_parts(segment: Segment, state: State) -> Iterator[State]:
    """Give a state in parts that the log of a copy has room for, the last one with all else.

    Each is installed before the next; in between the copy is of no moment.
    """
    tables = [_with_all_gone(segment, of) for of in state.tables]
    for at in range(len(tables)):
        while len(tables[at].ids) > MOST_PUSHED_ROWS:
            first, tables[at] = _cut(tables[at], MOST_PUSHED_ROWS)
            used, words = segment.current.used(), segment.current.words
            own = [(part.start, np.array(words[part])) for part in used]
            header = segment.words[[*_HEADER]]
            yield replace(state, words=own, header=header, pieces=(), tables=[first])
    yield replace(state, tables=tables)


def _cut(of: RowsState, n: int) -> tuple[RowsState, RowsState]:
    """Return the first rows, with what has become of all other ids, and the rest."""

    def part(which: slice) -> RowsState:
        arrays = of.ids[which], of.rows[which], tuple([s[which] for s in of.slots])
        known = of.known
        if known is not None:
            known = known._replace(ids=known.ids[which], states=known.states[which])
        return RowsState(of.ordinal, *arrays, known)

    first, rest = part(slice(n)), part(slice(n, None))
    if rest.known is not None:
        nobody = rest.known.without[:0]
        known = rest.known._replace(without=nobody, counted=nobody, counts=nobody)
        rest = rest._replace(known=known)
    return first, rest


def install(segment: Segment, state: State) -> None:
    """Bring a copy to the moment of a state, by one publication; under its lock.

    Raises
    ------
    LayoutError
        Where there is no memory for more rows; nothing was changed.
    ProtocolError
        For a state of another shard; nothing was changed.
    """
    _check(segment, state)
    state = replace(state, tables=[_with_all_gone(segment, of) for of in state.tables])
    for of in state.tables:
        _provide(segment, of)
    if state.now.flip > state.since.flip:
        try:
            _Successor(segment, state).commit()
        except NoRoomError as error:
            undo.roll_back(segment)
            raise _too_many(segment, state.tables) from error
    else:
        # Marks in the record that are no publication: a copy keeps the one before.
        words = segment.current.words
        own = {
            at
            for part in segment.current.own
            for at in range(*part.indices(len(words)))
        }
        for start, theirs in state.words:
            differ = np.flatnonzero(words[start : start + len(theirs)] != theirs)
            pairs = [(start + i, int(theirs[i])) for i in differ.tolist()]
            segment.amend(RECORD, [pair for pair in pairs if pair[0] not in own])
    segment.amend(HEADER, [*zip(_HEADER, state.header.tolist(), strict=True)])
    if segment.current.plain[POLICY] == BSP:
        # Its round may have to be taken back.
        segment.double_slots()
    else:
        segment.single_slots()


def _with_all_gone(segment: Segment, of: RowsState) -> RowsState:
    """Return rows of a table; all of them with the ids that are here and must go."""
    if of.known is None or not of.whole:
        return of
    named = np.concatenate([of.ids, of.known.counted])
    gone = np.setdiff1d(_all_of(segment.tables[of.ordinal]), named)
    without = np.union1d(of.known.without, gone)
    return of._replace(known=of.known._replace(without=without), whole=False)


def _provide(segment: Segment, of: RowsState) -> None:
    """Take the memory for rows before a publication that brings them."""
    table, n = segment.tables[of.ordinal], len(of.ids)
    need = Need(n, 0, 0, n)
    if table.unbounded is not None and of.known is not None:
        fresh = int(np.count_nonzero(table.unbounded.find(of.ids) < 0))
        n_new = fresh + len(of.known.counted)
        need = Need(n, n_new, len(of.known.without), n + fresh)
        provide(segment, table, table.unbounded, need)
    if not has_room(table, need):
        raise _too_many(segment, [of])


def _too_many(segment: Segment, tables: Sequence[RowsState]) -> LayoutError:
    of = [(len(t.ids), segment.tables[t.ordinal].piece.table.name) for t in tables]
    named = " and ".join(f"{n} rows of table {name[:60]!r}" for n, name in of)
    return LayoutError(
        f"{named} in one state change more than the undo log has room for; fill the "
        f"copy anew"
    )


class _Successor(Publication):
    """The publication that installs a state.

    Parameters
    ----------
    segment : Segment
        The memory of the copy.
    state : State
        It follows on what the copy has.
    """

    def __init__(self, segment: Segment, state: State) -> None:
        self._state = state
        super().__init__(segment)

    def _begin(self) -> None:
        """Say what is being written, and begin with the record of the owner."""
        record, header = self.record, self.segment.header
        header[CHANGED_ROW] = 0
        self.segment.writing = self.flip
        for start, theirs in self._state.words:
            record.words[start : start + len(theirs)] = theirs
        for part in record.own:
            record.words[part] = self.old.words[part]
        record.known.clear()

    def commit(self) -> None:
        """Write rows and pieces as they are, and flip."""
        segment, state, record = self.segment, self._state, self.record
        if state.tables:
            ordinals = [of.ordinal for of in state.tables]
            undo.begin(segment, self.flip, ordinals)
            self._rows = {ordinal: [] for ordinal in ordinals}
            for of in state.tables:
                record.changed[len(segment.pieces) + of.ordinal] = self.flip
                self._put_rows(of)
        if segment.is_together and 0 < len(state.pieces) < len(segment.pieces):
            self._take_along()
        for position, start, weights, slots in state.pieces:
            record.changed[position] = self.flip
            part = slice(start, start + len(weights))
            (old, new), (olds, news) = self._weights(position), self._slots(position)
            both = zip((old, *olds), (new, *news), (weights, *slots), strict=True)
            for before, into, values in both:
                if into is not before:
                    segment.payload.copy(into[:start], before[:start])
                    segment.payload.copy(into[part.stop :], before[part.stop :])
                if not np.may_share_memory(into, values):  # else it came there
                    segment.payload.write(into[part], values)
        if record.plain[POLICY] != BSP:
            self.gather_slots()
        super().commit()

    def _put_rows(self, of: RowsState) -> None:
        """Write rows and slots in place, after their log."""
        segment, table = self.segment, self.segment.tables[of.ordinal]
        numbers, first = of.ids, table.piece.first_row
        if table.unbounded is not None and of.known is not None:
            numbers, first = table.unbounded.bring(of.known, self.flip), 0
        update = RowUpdate(numbers, of.rows, replace=True)
        update.apply(table.buffers, self.flip, segment.cache_dir)
        for slot, values in zip(table.slots, of.slots, strict=True):
            scatter(slot, numbers, values, first=first, cache_dir=segment.cache_dir)


def _check(segment: Segment, state: State) -> None:
    """Refuse a state that does not fit a shard."""
    record = segment.current
    (start, fixed), *others = state.words
    n_words = record.ranks_at + RANK_WORDS * int(fixed[N_RANKS])
    fits = (start, len(fixed)) == (0, n_words) and len(state.header) == len(_HEADER)
    fits = fits and all(0 < at <= len(record.words) - len(w) for at, w in others)
    fits = fits and _has_pieces(segment, state)
    for ordinal, ids, rows, slots, known, _ in state.tables:
        fits = fits and 0 <= ordinal < len(segment.tables)
        table, n = segment.tables[ordinal if fits else 0], slice(len(ids))
        theirs = table.rows[n], *(slot[n] for slot in table.slots)
        fits = fits and table.piece.holds(ids, cache_dir=segment.cache_dir)
        fits = fits and _kinds(rows, *slots) == _kinds(*theirs)
        fits = fits and (known is None) == (table.unbounded is None)
    if not fits:
        raise _not_of_it()


def _has_pieces(segment: Segment, state: State) -> bool:
    """Return whether the pieces of a state are some of a shard."""
    fits = True
    for position, start, weights, slots in state.pieces:
        fits = fits and 0 <= position < len(segment.pieces) and start >= 0
        at, part = position if fits else 0, slice(start, start + len(weights))
        mine = segment.weights[0][at], *segment.slots[0][at]
        fits = fits and _kinds(weights, *slots) == _kinds(*(a[part] for a in mine))
    return fits


def _not_of_it() -> ProtocolError:
    return ProtocolError(
        "a state that is none of this shard; it was sent to another one, or its owner "
        "runs another version of daskps"
    )


def _kinds(*arrays: Array) -> list[Any]:
    """Return the shapes and dtypes of arrays."""
    return [(a.shape, a.dtype) for a in arrays]

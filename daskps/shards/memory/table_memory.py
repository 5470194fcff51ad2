"""The memory of the tables of a shard: their rows, slots and undo logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.kernels import index_probe
from daskps.kernels.row_log import TableRows, UndoLog, oldest_entries
from daskps.layout.spans import IDS, ROWS, TOUCHED, slot_area
from daskps.layout.tables import UnboundedPiece
from daskps.shards.arrays.row_operations import (
    RowBuffers,
    entries_of,
    flip_of,
    undo_word,
)
from daskps.shards.arrays.unbounded_rows import LOG_ROOM, UnboundedRows
from daskps.shards.memory.feed import Feed
from daskps.shards.memory.format import integers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from daskps.layout.tables import TablePiece
    from daskps.shards.arrays.payload import Payload
    from daskps.shards.memory.areas import Area
    from daskps.shards.memory.format import Record
    from daskps.typing import Array


class TableMemory(NamedTuple):
    """One table piece and its arrays."""

    piece: TablePiece
    buffers: RowBuffers
    #: The initial value of each slot.
    slot_init: tuple[float, ...]
    #: The changes of its rows, by version.
    feed: Feed
    #: The rows there are, where it is an unbounded table.
    unbounded: UnboundedRows | None = None
    #: Its number among the tables of the store.
    ordinal: int = 0

    def since(self, record: Record) -> int:
        """Return the lowest state of a row of any id that is there; 0 for any."""
        if self.unbounded is None:
            return 0
        return self.unbounded.since(record.clocks[self.ordinal])

    @property
    def n_rows(self) -> int:
        """How many rows there are."""
        return self.piece.n_rows if self.unbounded is None else self.unbounded.n_rows

    @property
    def room(self) -> int:
        """How many entries the log of rows has memory for."""
        if self.unbounded is None:
            return self.buffers.room
        return int(self.unbounded.own[LOG_ROOM])

    def begin(self, flip: int) -> None:
        """Say whose undo logs these are, with no entries yet."""
        if self.unbounded is not None:
            # First: a process that finds the other word of a flip takes both logs for
            # those of that flip.
            self.unbounded.begin(flip)
        self.buffers.undo[0] = undo_word(flip, 0)

    def roll_back(self) -> None:
        """Take back what the logs have."""
        self.buffers.roll_back()
        if self.unbounded is not None:
            self.unbounded.roll_back()

    def put_back(
        self,
        flip: int,
        ids: Array,
        rows: Array,
        at: Array | None,
        *,
        cache_dir: str | None,
    ) -> None:
        """Put what rows were at a flip over what was read of them since.

        Of a table of n rows, and where at most one publication has begun to change rows
        since, as :func:`~daskps.shards.memory.undo.is_logged` says.

        Parameters
        ----------
        flip : int
            That which was in force.
        ids, rows, at
            The rows that were read, as :func:`~daskps.kernels.row_log.oldest_entries`
            has them.
        cache_dir : str or None
            Where the compiled loop is kept.
        """
        word = self.buffers.undo[0]
        if flip_of(word) > flip and (n := entries_of(word)):
            log, first = self.buffers.log, self.piece.first_row
            found = oldest_entries(log, n, ids, at, first=first, cache_dir=cache_dir)
            entries, places = found
            read = self.buffers.payload.read_rows
            read(log.w, entries, rows, places, cache_dir=cache_dir)

    def fill_slots(self, fill: Callable[[Array, float], object]) -> None:
        """Give the slots of all rows their first values."""
        end = len(self.rows) if self.unbounded is None else self.unbounded.end
        for slot, value in zip(self.slots, self.slot_init, strict=True):
            fill(slot[:end].reshape(-1), value)

    @property
    def by_area(self) -> dict[str, Array]:
        """The arrays of its rows by area, of two dimensions; of an unbounded one also the ids."""
        found = {ROWS: self.rows}
        found |= {slot_area(i): slot for i, slot in enumerate(self.slots)}
        if self.unbounded is not None:
            found[IDS] = self.unbounded.keys.reshape(-1, 1)
            if self.unbounded.is_stamped:
                found[TOUCHED] = self.unbounded.state.reshape(-1, 1)
        return found

    @property
    def rows(self) -> Array:
        """The rows themselves, of shape (n_rows, dim)."""
        return self.buffers.table.w

    @property
    def slots(self) -> tuple[Array, ...]:
        """The slots of the rows, each of shape (n_rows, dim) or (n_rows, 1)."""
        return self.buffers.table.slots


def tables_of(
    pieces: Iterable[TablePiece],
    areas: Iterable[tuple[Area, tuple[Array, ...]]],
    slots: Mapping[int, Sequence[float]],
    *,
    memory: Array,
    payload: Payload,
) -> Iterator[TableMemory]:
    """Yield the memory of each piece, whose areas follow one another as `areas_of` says."""
    rest = iter(areas)
    views = (arrays[0] for _, arrays in rest)
    for ordinal, piece in enumerate(pieces):
        init = tuple(map(float, slots.get(piece.table.index, ())))
        undo, rows = next(views), next(views)
        in_place = tuple([next(views) for _ in init])
        ids, *logs = [next(views) for _ in range(2 + len(init))]
        log_rows, *log_slots = logs
        table = TableRows(rows, in_place, piece.first_row)
        log = UndoLog(ids, log_rows, tuple(log_slots), undo[:1], 0)
        unbounded = None
        if isinstance(piece, UnboundedPiece):
            unbounded = _unbounded(piece, rest, memory, own=undo, slot_init=init)
        buffers = RowBuffers(table, log, integers(undo), {}, payload)
        head, entries, ids = [next(views) for _ in range(3)]
        feed = Feed(ordinal, head=head, entries=entries, ids=ids)
        yield TableMemory(piece, buffers, init, feed, unbounded, ordinal)


def _unbounded(
    piece: UnboundedPiece,
    areas: Iterator[tuple[Area, tuple[Array, ...]]],
    memory: Array,
    **own: Any,
) -> UnboundedRows:
    """Return what says which rows a piece has; it takes the next areas."""
    (log,) = next(areas)[1]
    words = memory[: len(memory) // 8 * 8].view(np.int64)
    index = [next(areas)[0] for _ in range(index_probe.N_AREAS)]
    places = np.array([[a.offset // 8, a.shape[0]] for a in index]).reshape(-1)
    return UnboundedRows(piece, words=words, places=places, log=log, **own)

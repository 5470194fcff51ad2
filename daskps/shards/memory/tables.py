"""The memory of the tables of a shard: their rows, slots and undo logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from daskps.kernels.interface import TableRows, UndoLog
from daskps.shards.arrays.rows import RowBuffers
from daskps.shards.memory.format import integers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from daskps.layout.tables import TablePiece
    from daskps.shards.memory.areas import Area
    from daskps.typing import Array


class TableMemory(NamedTuple):
    """One table piece and its arrays."""

    piece: TablePiece
    buffers: RowBuffers
    #: The initial value of each slot.
    slot_init: tuple[float, ...]

    @property
    def rows(self) -> Array:
        """The rows themselves, of shape (n_rows, dim)."""
        return self.buffers.table.w

    @property
    def slots(self) -> tuple[Array, ...]:
        """The slots of the rows, each of shape (n_rows, dim)."""
        return self.buffers.table.slots


def tables_of(
    pieces: Iterable[TablePiece],
    areas: Iterable[Area],
    memory: Array,
    slots: Mapping[int, Sequence[float]],
) -> Iterator[TableMemory]:
    """Yield the memory of each piece, whose areas follow one another as `areas_of` says."""
    views = (area.views(memory)[0] for area in areas)
    for piece in pieces:
        init = tuple(map(float, slots.get(piece.table.index, ())))
        undo, rows = next(views), next(views)
        in_place = tuple([next(views) for _ in init])
        ids, *logs = [next(views) for _ in range(2 + len(init))]
        log_rows, *log_slots = logs
        table = TableRows(rows, in_place, piece.first_row)
        log = UndoLog(ids, log_rows, tuple(log_slots), undo[:1], 0)
        yield TableMemory(piece, RowBuffers(table, log, integers(undo), {}), init)

"""Updates of rows: in place, after what they replace has gone to an undo log.

The log of a table is written a few rows at a time: their numbers and what they hold,
then the *undo word*, then the rows themselves. The word says in one store whose log it
is and how much of it holds: a flip and a number of entries. A row that is changed in
place therefore always stands in the log below that number, and one that stands above it
is untouched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from daskps.kernels.row_log import TableRows, UndoLog

if TYPE_CHECKING:
    from daskps.kernels.rule_kernel import FixedRows
    from daskps.shards.arrays.payload import Payload
    from daskps.typing import Array

#: Bits of an undo word that count entries; the flip is above them.
UNDO_BITS: Final = 24
_ENTRIES: Final = (1 << UNDO_BITS) - 1


def undo_word(flip: int, n: int) -> int:
    """Return the word that says: `n` entries of the publication of a flip."""
    return flip << UNDO_BITS | n


def flip_of(word: int) -> int:
    """Return whose entries the log has."""
    return word >> UNDO_BITS


def entries_of(word: int) -> int:
    """Return how many entries hold."""
    return word & _ENTRIES


class RowRule(Protocol):
    """An update rule, bound to the dtype of a table."""

    def fixed_rows(self, table: TableRows, log: UndoLog, /) -> FixedRows:
        """Return what updates rows of one table by the rule."""


class RowBuffers(NamedTuple):
    """The arrays of a table piece: its rows and slots, and the log of both."""

    table: TableRows
    log: UndoLog
    #: The undo word, which is that of the log.
    undo: memoryview[int]
    #: By rule the object that updates these rows by it.
    made: dict[RowRule, FixedRows]
    #: The functions of the memory that they are in; numbers of rows are the host's.
    payload: Payload

    @property
    def room(self) -> int:
        """How many entries the log has."""
        return len(self.log.rows)

    def roll_back(self) -> None:
        """Put back what the log has, the newest first: a row may be in it twice."""
        word = self.undo[0]
        self.payload.restore(self.table, self.log, entries_of(word))
        self.payload.wait()
        self.undo[0] = undo_word(flip_of(word), 0)


class RowUpdate(NamedTuple):
    """Rows on their way into one piece of a table."""

    #: The ids of these rows in the table; none twice.
    ids: Array
    #: One for each, of shape (n, dim).
    data: Array
    #: The row of `data` that is meant for each, None for one after the other.
    at: Array | None = None
    #: None for a plain `+=` or, with `replace`, an assignment.
    binding: RowRule | None = None
    scalars: tuple[float, ...] = ()
    replace: bool = False
    #: Whether NaN and infinity are looked for in the pass.
    check: bool = False
    #: Whether they are forgotten, of an unbounded table; there are no data then.
    forget: bool = False
    #: In an unbounded table the row of each, -1 for none, when this was planned; before
    #: it is applied `ids` become numbers of rows.
    rows: Array | None = None
    #: The producer whose push it is, 0 for no producer's.
    by: int = 0

    def apply(self, target: RowBuffers, flip: int, cache_dir: str | None) -> bool:
        """Update rows; False for data that was to be looked at and is not finite.

        Then rows before it are updated, and their log is there to roll them back.
        """
        begin, base = target.undo[0] & _ENTRIES, flip << UNDO_BITS
        what = self.ids, self.at, self.data
        if (binding := self.binding) is not None:
            update = target.made.get(binding)
            if update is None:
                update = binding.fixed_rows(target.table, target.log)
                target.made[binding] = update
            return update(*what, self.scalars, base, begin, self.check)
        ids, kept, of_slots, word, *_ = target.log
        log = UndoLog(ids, kept, of_slots, word, base, begin)
        # Slots stay as they are, but are put back with their rows.
        entries, payload = slice(begin, begin + len(self.ids)), target.payload
        for slot, its_log in zip(target.table.slots, of_slots, strict=True):
            out = its_log[entries]
            where = {"first": target.table.first, "cache_dir": cache_dir}
            payload.gather(slot, self.ids, out, **where)
        write = payload.assign_rows if self.replace else payload.add_rows
        bare, log = target.table._replace(slots=()), log._replace(slots=())
        with np.errstate(all="ignore"):
            return write(bare, *what, log, check=self.check, cache_dir=cache_dir)

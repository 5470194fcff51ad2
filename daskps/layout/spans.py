"""Names of ranges of a shard's memory, by which elements are copied out of it."""

from __future__ import annotations

from typing import Final, NamedTuple

#: Areas of which a piece has elements of its own dtype; :func:`slot_area` names others.
WEIGHTS: Final = "weights"
_SLOT: Final = "slot"
#: Of the piece of a table.
ROWS: Final = "rows"
#: Of the piece of an unbounded table: that of each row, in a copy of all of them.
IDS: Final = "ids"
#: Of the same: the clock of the table at the last push of each row, where it counts
#: them;
TOUCHED: Final = "touched"
#: and the ids that have no row yet, and how often each has been pushed.
CANDIDATES: Final = "candidates"
COUNTS: Final = "counts"


class Span(NamedTuple):
    """Elements [start, stop) of what an area has of the piece at a position."""

    area: str
    position: int
    start: int
    stop: int


def slot_area(slot: int) -> str:
    """Return the name of the areas of a slot of the update rules."""
    return f"{_SLOT}{slot}"


def is_slot(area: str) -> bool:
    """Return whether an area is of a slot of the update rules."""
    return area.startswith(_SLOT)

"""Copies of elements and of rows out of a shard, all of one version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.shards.reads import copy_parts
from daskps.shards.row_reads import copy_rows, copy_rows_locked
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.shards.memory.segment import Segment
    from daskps.shards.row_reads import RowsRead
    from daskps.shards.steps import Ticket
    from daskps.typing import Array


def ready_of(ticket: Ticket) -> Ready:
    """Return the outcome of a ticket that may read now."""
    if not isinstance(ticket.outcome, Ready):
        raise TypeError(f"nothing to read: {ticket.outcome!r}")
    return ticket.outcome


def latest(segment: Segment, ready: Ready) -> Ready:
    """Return the same read at the flip in force."""
    flip = segment.flip
    return Ready(flip, segment.record(flip).version, ready.duplicate, ready.lag)


def copy_both(
    segment: Segment,
    ready: Ready,
    *,
    parts: Sequence[tuple[str, int, int, Array]],
    rows: Sequence[RowsRead],
    copy: Callable[[Array, Array], None],
    locked: bool = False,
) -> Ready | None:
    """Copy elements and rows out.

    Parameters
    ----------
    segment : Segment
        The shard's memory.
    ready : Ready
        The flip to read, and its version.
    parts : sequence of (dtype, start, stop, out)
        Elements, as of :func:`~daskps.shards.reads.copy_parts`.
    rows : sequence of RowsRead
        Rows of tables.
    copy : callable
        Copies the second array to the first.
    locked : bool
        Whether the caller has the shard's lock: then it can also read rows that a
        process has left half-way, and those of the publication before.

    Returns
    -------
    Ready or None
        The flip that was read, or None if an update overwrote a copy's source.
    """
    if not rows:
        return copy_parts(segment, ready, parts, copy)
    copied = copy_rows_locked if locked else copy_rows
    if not copied(segment, ready.flip, rows):
        return None
    return copy_parts(segment, ready, parts, copy)

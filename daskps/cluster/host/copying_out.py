"""Copies of ranges and rows out of a shard: without its lock, or in the read's turn."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from daskps.cluster.host import copy_routine
from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.host.row_copies import copy_both, latest, ready_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.wire.messages import Range
    from daskps.shards.row_reads import RowsRead
    from daskps.shards.steps import Ready, Ticket
    from daskps.typing import Array


def copy_out(
    hosted: HostedShard,
    ticket: Ticket,
    ranges: Sequence[Range],
    outs: Sequence[Array],
    *,
    seconds: float = LOCK_SECONDS,
    rows: Sequence[RowsRead] = (),
) -> Ready:
    """Copy ranges into `outs`, and rows, each whole and all of one version.

    If updates overwrite two copies, or if readers take the lock, the reader waits for
    its turn, for `seconds` at most; with 0, as an event loop must, it does not wait. If
    the turn does not come, it raises ShardBusyError; if only one version will do and
    that is overwritten, it raises the shard's error.
    """
    segment, ready = hosted.shard.segment, ready_of(ticket)
    if rows and not ready.exact:
        # A table has no earlier rows to read.
        ready = latest(segment, ready)
    parts = [(*r, out) for r, out in zip(ranges, outs, strict=True)]
    copier = copy_routine.copier(sum(out.nbytes for out in outs))
    copy = partial(copy_both, segment, parts=parts, rows=rows, copy=copier)
    # Any update of a table spoils a read of rows, so a second try would fail as well.
    for _ in range(0 if hosted.locks_reads else 1 if rows else 2):
        if copy(ready):
            return ready
        if not ready.exact:
            ready = latest(segment, ready)
        elif not rows:
            # The update that spoiled the copy has begun to overwrite that version.
            raise hosted.shard.overrun(ticket)
    try:
        with hosted.turn(seconds):
            if not copy(ready, locked=True):
                if ready.exact:
                    raise hosted.shard.overrun(ticket)
                # Also if a writer died in between: it leaves the latest version whole.
                ready = latest(segment, ready)
                copy(ready, locked=True)
    finally:
        # A thread that came meanwhile found the mutex taken and left its ticket.
        hosted.serve()
    return ready

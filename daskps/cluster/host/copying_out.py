"""Ranges and rows of a shard, copied out whole: without its lock, or in its turn."""

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

    Where updates run into two copies, or readers take the lock, it waits for its
    turn, so long at most; with 0 not at all, as an event loop must. Then it raises
    ShardBusyError, and the shard's error where that version alone will do and is
    gone.
    """
    segment, ready = hosted.shard.segment, ready_of(ticket)
    if rows and not ready.exact:
        # Of rows there are no earlier ones to read.
        ready = latest(segment, ready)
    parts = [(*r, out) for r, out in zip(ranges, outs, strict=True)]
    copier = copy_routine.copier(sum(out.nbytes for out in outs))
    copy = partial(copy_both, segment, parts=parts, rows=rows, copy=copier)
    # Any update of a table spoils a read of rows, and so the next one as well.
    for _ in range(0 if hosted.locks_reads else 1 if rows else 2):
        if copy(ready):
            return ready
        if not ready.exact:
            ready = latest(segment, ready)
        elif not rows:
            # What has run into the copy has begun to overwrite that version.
            raise hosted.shard.overrun(ticket)
    try:
        with hosted.turn(seconds):
            if not copy(ready, locked=True):
                if ready.exact:
                    raise hosted.shard.overrun(ticket)
                # Also where a writer died on the way: it leaves the latest whole.
                ready = latest(segment, ready)
                copy(ready, locked=True)
    finally:
        # A thread that came meanwhile found the mutex taken and left its ticket.
        hosted.serve()
    return ready

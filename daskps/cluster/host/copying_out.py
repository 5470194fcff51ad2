"""Copies of ranges and rows out of a shard: without its lock, or in the read's turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.shards.reader import ShardReader
from daskps.shards.steps import Ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.protocol.messages import Range
    from daskps.shards.reader import RowsRead
    from daskps.shards.steps import Ticket
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
    ready = ticket.outcome
    if not isinstance(ready, Ready):
        raise TypeError(f"nothing to read: {ready!r}")
    shard = hosted.shard
    parts = [(one, i, slice(0, one[2] - one[1])) for i, one in enumerate(ranges)]
    reader = ShardReader(shard.segment, parts)
    if rows and not ready.exact:
        # A table has no earlier rows to read.
        ready = reader.latest(ready)
    # Any update of a table spoils a read of rows, so a second try would fail as well.
    for _ in range(0 if hosted.locks_reads else 1 if rows else 2):
        if reader.read_at(ready.flip, outs, rows):
            return ready
        if not ready.exact:
            ready = reader.latest(ready)
        elif not rows:
            # The update that spoiled the copy has begun to overwrite that version.
            raise shard.overrun(ticket)
    with hosted.turn(seconds):
        if not reader.read_at(ready.flip, outs, rows, locked=True):
            if ready.exact:
                raise shard.overrun(ticket)
            # Also if a writer died in between: it leaves the latest version whole.
            ready = reader.latest(ready)
            reader.read_at(ready.flip, outs, rows, locked=True)
    return ready

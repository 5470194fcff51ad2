"""One message to a host: its template, a ticket for each of its shards, and their answers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.copying_out import copy_out
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.protocol.wellformed import refused
from daskps.cluster.sockets.frames import MOST_TEXT, unpack_text
from daskps.cluster.sockets.templates import key_of, unpack_template
from daskps.errors import ConsistencyError, ShardBusyError
from daskps.shards.deputy import NotHereError
from daskps.shards.reader import RowsRead
from daskps.shards.steps import Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.protocol.row_messages import RowRequest
    from daskps.cluster.sockets.templates import FrameTemplate
    from daskps.layout.arrays import Layout
    from daskps.reduction import Empty
    from daskps.typing import Array

#: A read may wait at least this long for its turn, however late it is.
_MIN_SECONDS = 0.01
#: Templates that a host keeps, the latest.
_MOST_KEPT = 256

Started = tuple[HostedShard, Part, Ticket]


class Templates:
    """The templates that a host was told last, for messages and sockets; safe for threads.

    Parameters
    ----------
    layout_of : callable
        Returns the layout of a store by its name and one of its shards, or raises.
    owned : bool
        Whether shards may keep and change arrays that come.
    """

    def __init__(
        self, layout_of: Callable[[str, int], Layout], *, owned: bool = True
    ) -> None:
        self._layout_of, self._owned = layout_of, owned
        self._known: dict[bytes, FrameTemplate] = {}
        self._lock = threading.Lock()

    def find(self, key: Any) -> FrameTemplate | None:
        """Return the template with a key; None where the host does not know it."""
        return self._known.get(key) if type(key) is bytes else None

    def learn(self, text: bytes) -> FrameTemplate:
        """Return the template with a text.

        Raises
        ------
        DaskPSError
            If no call can have that template.
        """
        key = key_of(text)
        with self._lock:
            template = self._known.pop(key, None)
        if template is None:
            try:
                template = unpack_template(
                    unpack_text(text), self._layout_of, owned=self._owned
                )
            except Exception as error:
                raise refused(error, "a template") from error
        if len(text) <= MOST_TEXT:
            with self._lock:
                self._known[key] = template
                while len(self._known) > _MOST_KEPT:
                    del self._known[next(iter(self._known))]
        return template


class Countdown:
    """Counts the open tickets of a call; calls back after the last one."""

    def __init__(self, n: int, callback: Callable[[], None]) -> None:
        self._left = n
        self.done = False
        self._lock = threading.Lock()
        self._callback = callback

    def one_done(self) -> None:
        """Count one ticket as done."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self.done = True
            self._callback()


def start_call(
    hosted_shards: Sequence[HostedShard],
    call: Call,
    callback: Callable[[], None],
) -> tuple[Countdown, list[Started]]:
    """Put a call into the inboxes of its shards.

    Parameters
    ----------
    hosted_shards : sequence of HostedShard
        The shards of the call's parts.
    call : Call
        The call.
    callback : callable
        Called once all shards are done with the call.

    Returns
    -------
    pending : Countdown
        Counts the open tickets; `done` is true after the last.
    started : list of (HostedShard, Part, Ticket)
        One for each part.
    """
    pending = Countdown(len(hosted_shards), callback)
    started = [
        (hosted, part, Ticket(part.step, owner=pending))
        for hosted, part in zip(hosted_shards, call.parts, strict=True)
    ]
    for hosted, _, ticket in started:
        hosted.put(ticket)
    return pending, started


def answers_of(
    started: Sequence[Started], empty: Empty | None, *, seconds: float
) -> list[Answer]:
    """Return the shards' answers, with values that may be read; see :func:`copy_out`.

    All reads together get `seconds` for their turns; a read whose turn does not come
    waits on. With 0 it raises ShardBusyError. Without `empty` there is no memory for
    values, and all reads wait on.
    """
    end, found = time.monotonic() + seconds, []
    for one in started:
        left = max(_MIN_SECONDS, end - time.monotonic()) if seconds else 0.0
        found.append(_answer(one, empty, left))
    return found


def _answer(started: Started, empty: Empty | None, seconds: float) -> Answer:
    hosted, part, ticket = started
    outcome = ticket.outcome
    if isinstance(outcome, Exception):
        return Answer(part.shard, error=outcome, applied=ticket.applied)
    if outcome is None or (part.reads and empty is None):
        return Answer(part.shard, parked=True, applied=ticket.applied)
    version = ticket.version or outcome.version
    outs: tuple[Array, ...] = ()
    if part.reads and empty is not None:
        flats = tuple(empty(stop - start, dtype) for dtype, start, stop in part.ranges)
        rows = [_read_of(asked, empty) for asked in part.rows]
        marks = (read.found for read in rows if read.found is not None)
        outs = (*flats, *(read.out for read in rows), *marks)
        try:
            outcome = copy_out(
                hosted, ticket, part.ranges, flats, seconds=seconds, rows=rows
            )
        except ShardBusyError:
            if not seconds:
                raise
            return Answer(part.shard, parked=True, applied=ticket.applied)
        except (ConsistencyError, NotHereError) as error:
            return Answer(part.shard, error=error, applied=ticket.applied)
        version = outcome.version
    return Answer(
        part.shard,
        version=version,
        lag=outcome.lag,
        arrays=outs,
    )


def _read_of(asked: RowRequest, empty: Empty) -> RowsRead:
    """Return a read of rows, with memory for them."""
    out = empty(len(asked.ids) * asked.dim, asked.dtype)
    if not asked.is_marked:
        return RowsRead(asked.position, asked.ids, out)
    # The read does not write absent rows: zeros hide the earlier content of the memory.
    out[:] = 0
    marks = empty(len(asked.ids), "uint8")
    return RowsRead(asked.position, asked.ids, out, found=marks)

"""The calls to a host: their templates, the tickets at its shards, and the answers.

While a call waits its tickets are at their shards, and no thread waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.protocol.messages import Answer, Part
from daskps.cluster.protocol.wellformed import refused
from daskps.cluster.sockets.frames import MOST_TEXT, unpack_text
from daskps.cluster.sockets.templates import key_of, unpack_template
from daskps.errors import ConsistencyError, ShardBusyError
from daskps.shards.deputy import NotHereError
from daskps.shards.reader import RowsRead, ShardReader
from daskps.shards.steps import ASK, Ready, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.protocol.messages import Range
    from daskps.cluster.protocol.row_messages import RowRequest
    from daskps.cluster.sockets.templates import FrameTemplate
    from daskps.layout.arrays import Layout
    from daskps.reduction import Empty
    from daskps.typing import Array

    #: A shard, its part of a call and the ticket for it.
    Started = tuple[HostedShard, Part, Ticket]
    #: Returns the frame that answers the tickets, or a call that waits for a copy to
    #: have that; gets the seconds that a read may wait for its turn.
    Finish = Callable[[Sequence[Started], float], "list[Any] | Parked"]


#: A read may wait at least this long for its turn, however late it is.
_MIN_SECONDS = 0.01
#: The part of a ticket that waits for no step of its own.
NO_PART = Part(-1, Step())
#: Templates that a host keeps, the latest.
_MOST_KEPT = 256


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


def _do_nothing() -> None: ...


class CallTickets:
    """The tickets of one call: a call by message has these alone.

    Parameters
    ----------
    look : callable
        Has the host check its shards regularly: other processes wake no thread here.
        By default none can.
    """

    __slots__ = ("_callback", "_lock", "_look", "started")

    def __init__(self, look: Callable[[], None] = _do_nothing) -> None:
        self._look = look
        self.started: list[Started] = []
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None

    def add(self, hosted: HostedShard, part: Part = NO_PART) -> Ticket:
        """Return a new ticket for a shard's part of the call."""
        ticket = Ticket(part.step, owner=self)
        self.started.append((hosted, part, ticket))
        return ticket

    @property
    def done(self) -> bool:
        """Whether none of the tickets waits any more."""
        return None not in [ticket.outcome for _, _, ticket in self.started]

    def one_done(self) -> None:
        """Hear that a ticket is done, in the thread that has served its shard."""
        if self._callback is not None and self.done:
            with self._lock:
                callback, self._callback = self._callback, None
            if callback is not None:
                callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Call a function once all are done, in the thread that serves the last shard.

        If they are done already, this thread calls the function.
        """
        self._callback = callback
        self.one_done()
        if self._callback is not None:
            self._look_if_shared()

    async def wait(self) -> None:
        """Wait until all are done, without a thread; raise the error of one."""
        woken: Future[None] = Future()
        self.then(partial(woken.set_result, None))
        # Nobody cancels this future: a thread that completes them later sets it.
        await asyncio.shield(asyncio.wrap_future(woken))
        outcomes = [ticket.outcome for _, _, ticket in self.started]
        error = next((one for one in outcomes if isinstance(one, Exception)), None)
        self.forget()
        del outcomes
        if error is not None:
            try:
                raise error
            finally:
                # Else it would refer to itself by this frame, and keep what others hold.
                del error

    def take_back(self) -> list[Future[None]]:
        """Take back unfinished tickets: the caller is gone, or will wait elsewhere.

        Another thread may read the arrays of a ticket until its future is done.
        """
        all_of = [hosted.take_back(ticket) for hosted, _, ticket in self.started]
        gone = [one for one in all_of if one is not None and not one.done()]
        if gone:
            self._look_if_shared()
        return gone

    def forget(self) -> None:
        """Let go of the tickets, which refer to this object as their owner.

        Such a cycle would keep their arrays, and the mapped memory of shards, until the
        garbage collector runs.
        """
        self._callback = None
        self.started = []

    def _look_if_shared(self) -> None:
        if True in [hosted.is_shared for hosted, _, _ in self.started]:
            self._look()


async def all_backed(
    shards: Iterable[HostedShard | None], run_for: Callable[..., Awaitable[None]]
) -> None:
    """Wait until the second copies of shards have what these have now."""
    tickets = CallTickets()
    for hosted in shards:
        if hosted is not None and hosted.behind > 0:
            await run_for(hosted, partial(hosted.back, tickets.add(hosted)))
    if tickets.started:
        await tickets.wait()


class Parked(CallTickets):
    """A call of a socket with tickets at their shards.

    The thread that takes the call either finishes or cancels it, once.

    Parameters
    ----------
    end : float
        The latest time to finish it, by `time.monotonic`.
    answer : callable
        Returns the frame that answers it.
    look : callable
        As for :class:`CallTickets`.
    """

    __slots__ = ("_answer", "end")

    def __init__(
        self, end: float, answer: Finish, look: Callable[[], None] = _do_nothing
    ) -> None:
        super().__init__(look)
        self.end, self._answer = end, answer

    def offer(
        self,
        hosted: HostedShard,
        part: Part,
        version: int,
        seconds: float,
    ) -> None:
        """Give a shard its part of the call as a ticket.

        Parameters
        ----------
        hosted : HostedShard
            The shard.
        part : Part
            The shard's part of the call; only its reads if its step was taken before.
        version : int
            Version after that step; ASK if it was not taken.
        seconds : float
            How long to wait for the lock. With 0 and a taken lock the ticket stays in
            the inbox, and the host serves it later.

        Raises
        ------
        ShardBusyError
            Where another process kept the lock.
        """
        ticket = self.add(hosted, part)
        if version != ASK:
            ticket.applied, ticket.version = True, version
            if not part.ranges:
                ticket.outcome = Ready(0, version)
                return
        try:
            hosted.offer(ticket, seconds)
        except ShardBusyError:
            if seconds:
                self.started.pop()  # the shard has not seen it
                raise
            hosted.put(ticket)

    def finish(self, seconds: float) -> list[Any] | Parked:
        """Return the frame that answers it; it reports unfinished tickets as parked.

        Or another call, to wait for in its place: its answer is made, and a second copy
        has yet to have what it tells.

        Parameters
        ----------
        seconds : float
            How long a read may wait for its turn, if updates have spoiled it.

        Raises
        ------
        ShardBusyError
            If it would have to wait and may not. The caller may ask again.
        """
        self.take_back()
        frame = self._answer(self.started, seconds)
        self.forget()
        return frame

    def cancel(self) -> None:
        """Take back unfinished tickets; their arrays belong to this call."""
        self.take_back()
        self.forget()


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

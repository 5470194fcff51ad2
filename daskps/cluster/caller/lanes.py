"""Lanes of a caller: sockets to the hosts of a store, for calls from threads.

A lane carries what a message would, in the caller's own thread. It only ever takes a
call that is answered at once and without an error. All else goes on by message, under
the same sequence numbers: what is late, refused, or cut off half way, and what has to be
waited for. So there is one road for that, `far`.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster import upstream
from daskps.cluster.lane.channel import Channel
from daskps.cluster.lane.fetches import check_fetched, pack_fetch, text_nbytes
from daskps.cluster.lane.forms import form_of, pack_frame, say_form
from daskps.cluster.lane.frames import (
    ANSWER,
    FORM,
    MOST_FORMS,
    REFUSAL,
    ROW_NBYTES,
    Head,
    pack_text,
    unpack_rows,
    unpack_text,
)
from daskps.cluster.wire.messages import PROTOCOL
from daskps.cluster.wire.replies import unpack_reply
from daskps.errors import ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.wires import Counters
    from daskps.cluster.wire.messages import Answer, Call
    from daskps.typing import Array

logger = logging.getLogger(__name__)
#: Calls to a host by message before a lane to it is opened, and lanes to one host.
CALLS_BEFORE, MOST_LANES = 4, 4
#: Without a byte for so long, a lane is given up.
PATIENCE_SECONDS = 1.5
#: What a host takes in and applies in a second at least: that adds to the patience.
SLOW_NBYTES = 100_000_000
#: How long a lane may take to open, and pauses after one that failed.
OPEN_SECONDS, PAUSE_SECONDS, MOST_PAUSE_SECONDS = 10.0, 1.0, 60.0


class Lane:
    """The caller's end of one lane; one thread at a time has it.

    Parameters
    ----------
    channel : Channel
        The socket.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.mutex = threading.Lock()
        #: Numbers of the forms that the host has been told, the latest last.
        self._forms: dict[Hashable, int] = {}
        self._number = 0

    def send(self, call: Call) -> None:
        """Send a call, and before it its form where the host does not know it."""
        form = self._form(call)
        self._number += 1
        self.channel.send(pack_frame(call, form, self._number))

    def receive(self, call: Call, outs: Sequence[Array]) -> list[Answer]:
        """Return the answers to a call without their arrays, which are in `outs` then.

        Raises
        ------
        OSError
            Where the host is gone, or silent for too long.
        LaneRefusedError
            Where it leaves the call to messages.
        ProtocolError
            Where it says what answers nothing.
        """
        head = self._receive_head()
        row_nbytes = ROW_NBYTES * len(call.parts)
        if head.nbytes < row_nbytes:
            raise ProtocolError(f"an answer of {head.nbytes} bytes")
        answers = unpack_rows(self.channel.receive_bytes(row_nbytes), call)
        waiting, wanted = iter(outs), list[Any]()
        for answer, part in zip(answers, call.parts, strict=True):
            arrays = [next(waiting) for _ in part.ranges]
            wanted += [] if answer.parked else arrays
        if head.nbytes != row_nbytes + sum(out.nbytes for out in wanted):
            raise ProtocolError(f"an answer of {head.nbytes} bytes")
        for out in wanted:
            self._receive_array(out)
        self.channel.end_frame()
        return answers

    def fetch(self, what: str, about: Mapping[str, Any]) -> None:
        """Ask for what :meth:`fetched` returns."""
        self._number += 1
        self.channel.send(pack_fetch(what, about, self._number))

    def fetched(
        self, make: Callable[[Any], Sequence[Array]]
    ) -> tuple[Any, Sequence[Array]]:
        """Return what was asked for: what is said of it, and arrays.

        Parameters
        ----------
        make : callable
            Returns arrays to receive into, for what is said of them. It refuses what
            is no answer.

        Raises
        ------
        OSError, LaneRefusedError, ProtocolError
            As :meth:`receive`.
        """
        head = self._receive_head()
        value = unpack_text(self.channel.receive_bytes(text_nbytes(head)))
        arrays = make(value)
        check_fetched(head, arrays)
        for array in arrays:
            self._receive_array(array)
        self.channel.end_frame()
        return value, arrays

    def _receive_head(self) -> Head:
        """Return the head of the answer to the last frame, unless it is a refusal."""
        head = self.channel.receive_head()
        if head.number != self._number & 0xFFFF_FFFF:
            raise ProtocolError(f"an answer to frame {head.number} of a lane")
        if head.kind == REFUSAL:
            text = self.channel.receive_bytes(head.nbytes)
            self.channel.end_frame()
            raise LaneRefusedError(str(unpack_text(text)))
        if head.kind != ANSWER:
            raise ProtocolError(f"an answer of kind {head.kind}")
        return head

    def _receive_array(self, out: Array) -> None:
        if not out.nbytes:
            return
        if out.flags.c_contiguous:
            self.channel.receive_into(out)
        else:
            found = np.empty(out.shape, out.dtype)
            self.channel.receive_into(found)
            np.copyto(out, found)

    def _form(self, call: Call) -> int:
        """Return the number of a call's form, which the host knows then."""
        key = form_of(call)
        number = self._forms.get(key)
        if number is None:
            number = len(self._forms)
            if number == MOST_FORMS:
                number = self._forms.pop(next(iter(self._forms)))
            self._number += 1
            self.channel.send(pack_text(FORM, say_form(call), self._number, number))
            if self._receive_head().nbytes:
                raise ProtocolError("an answer to a form that says more than that")
            self._forms[key] = number
        return number


class LaneRefusedError(Exception):
    """A host leaves a call to messages; the lane is as it was."""


def reason_of(error: Exception) -> str:
    """Return why a lane had no answer, in as many texts as there are kinds of it."""
    if isinstance(error, LaneRefusedError):
        return f"refused: {str(error).partition(':')[0]}"
    return type(error).__name__


class Lanes:
    """The lanes from one handle or trainer to the hosts of its store.

    Threads: any may take a lane; the event loop opens them.

    Parameters
    ----------
    link : Link
        The way to the cluster.
    store : str
        The store.
    counters : Counters
        What they count in.
    """

    def __init__(self, link: Link, store: str, counters: Counters) -> None:
        self.link, self._store = link, store
        self.counters = counters
        self._lanes: dict[str, list[Lane]] = {}
        #: By worker: calls for which there was no lane, and before when none is opened.
        self._wanted: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        self._opening: set[str] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        _ALL.add(self)
        weakref.finalize(self, _close_all, self._lanes)

    def take(self, worker: str) -> Lane | None:
        """Return a lane to a worker that nobody uses, and have it; None for messages."""
        lanes = self._lanes.get(worker, ())
        for lane in lanes:
            if lane.mutex.acquire(blocking=False):
                if lane.channel.is_open:
                    return lane
                self._end(worker, lane)
        self._want(worker)
        return None

    def give_back(self, worker: str, lane: Lane) -> None:
        """Let others have a lane that has ended its call."""
        self._pauses.pop(worker, None)
        lane.mutex.release()
        if self._is_closed:
            self._close_idle(lane)

    def end(self, worker: str, lane: Lane) -> None:
        """Close a lane that ended inside of a call; another one is opened in a while."""
        self._pause(worker)
        self._end(worker, lane)

    def close(self) -> None:
        """Close all lanes; who is at one closes it at the end of its call."""
        self._is_closed = True
        with self._lock:
            lanes = [lane for of in self._lanes.values() for lane in of]
            self._lanes.clear()
            self.counters.lanes = 0
        for lane in lanes:
            self._close_idle(lane)

    def _close_idle(self, lane: Lane) -> None:
        if lane.mutex.acquire(blocking=False):
            lane.channel.close()
            lane.mutex.release()

    def _end(self, worker: str, lane: Lane) -> None:
        """Close a lane that this thread has."""
        with self._lock:
            of = self._lanes.get(worker, [])
            if lane in of:
                of.remove(lane)
                self.counters.lanes -= 1
        lane.channel.close()
        lane.mutex.release()

    def _want(self, worker: str) -> None:
        """Have a lane opened to a worker that is called often, unless that is vain."""
        if self._is_closed or time.monotonic() < self._not_before.get(worker, 0.0):
            return
        with self._lock:
            n = self._wanted[worker] = self._wanted.get(worker, 0) + 1
            if (
                n < CALLS_BEFORE
                or worker in self._opening
                or len(self._lanes.get(worker, ())) >= MOST_LANES
            ):
                return
            self._wanted[worker] = 0
            self._opening.add(worker)
        self.link.start(partial(self._open, worker))

    async def _open(self, worker: str) -> None:
        lane = None
        try:
            lane = await self._opened(worker)
        finally:
            with self._lock:
                # At once with its lane: who wants one in between would open one too many.
                self._opening.discard(worker)
                is_kept = lane is not None and not self._is_closed
                if lane is not None and is_kept:
                    self._lanes.setdefault(worker, []).append(lane)
                    self.counters.lanes += 1
        if lane is not None and not is_kept:
            lane.channel.close()

    async def _opened(self, worker: str) -> Lane | None:
        """Ask a worker for a lane; None, and a pause, where it gives none."""
        node = self.link.node
        upstream.at_close(node, "daskps-lanes", partial(_close_of, node))
        message = {
            "op": "daskps_lane",
            "protocol": PROTOCOL,
            "store": self._store,
            "token": uuid.uuid4().hex,
        }
        taken: socket.socket | None = None
        try:
            reply, taken = await upstream.ask_for_socket(
                self.link.pool, worker, message, OPEN_SECONDS
            )
            unpack_reply(reply, f"worker {worker}")
        except Exception as error:  # noqa: BLE001 - messages go on, and stats() says why
            logger.info("no lane to %s: %r", worker, error)
            if taken is not None:
                taken.close()
            self.counters.fell_back(f"no lane: {type(error).__name__}")
            self._pause(worker)
            return None
        return None if taken is None else Lane(Channel(taken, PATIENCE_SECONDS))

    def _pause(self, worker: str) -> None:
        """Open no lane to a worker for a while, longer each time in a row."""
        with self._lock:
            pause = self._pauses.get(worker, PAUSE_SECONDS)
            self._pauses[worker] = min(2 * pause, MOST_PAUSE_SECONDS)
            self._not_before[worker] = time.monotonic() + pause


#: Those of this process, which end with their client or worker.
_ALL: weakref.WeakSet[Lanes] = weakref.WeakSet()


def _close_all(lanes: Mapping[str, Sequence[Lane]]) -> None:
    """Close the lanes that nobody can take any more."""
    for lane in [lane for of in lanes.values() for lane in of]:
        lane.channel.close()


def _close_of(node: Any) -> None:
    for lanes in list(_ALL):
        if lanes.link.node is node:
            lanes.close()

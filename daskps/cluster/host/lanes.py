"""Lanes of a host: sockets that callers were given, and the threads that serve them.

A call that comes by a lane is served as one that comes by message, in a thread of its
own instead of the event loop: the same tickets, in the same inboxes.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.host.calls import answers_of, start_call
from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.lane.channel import Channel
from daskps.cluster.lane.forms import LEAST, Form, read_form
from daskps.cluster.lane.frames import (
    ANSWER,
    CALL,
    FORM,
    HAS_LEAST,
    Head,
    pack_answers,
    pack_head,
    pack_refusal,
    unpack_text,
)
from daskps.cluster.wire.encoding import widened
from daskps.cluster.wire.messages import PROTOCOL
from daskps.cluster.wire.replies import refusal
from daskps.cluster.wire.wellformed import fits, refused
from daskps.errors import DaskPSError, ProtocolError, StoreClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.wire.messages import Answer, Call
    from daskps.layout.arrays import Layout

logger = logging.getLogger(__name__)
#: Lanes of one host; each has a thread.
MOST_LANES = 64
#: Seconds without a byte after which a caller is given up in the middle of a frame.
PATIENCE_SECONDS = 30.0
#: How long a call may wait here before its caller takes a message.
MOST_WAIT_SECONDS = 1.0
#: What a read gets to wait for its turn, however late it is.
MIN_SECONDS = 0.1
#: How long a closing host waits for the threads of its lanes, all together.
JOIN_SECONDS = 1.0


def give_lanes(host: ShardHost) -> None:
    """Have a host give lanes to those who ask for one."""
    host.lanes = lanes = HostLanes(host)
    host.worker.serve("daskps_lane", lanes.handle)


class HostLanes:
    """The lanes of one host.

    Parameters
    ----------
    host : ShardHost
        Whose shards they reach.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._is_allowed = config.load().lane_way
        self._lanes: dict[HostLane, None] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    async def handle(
        self, comm: Any, protocol: Any = None, store: Any = None, token: Any = None
    ) -> Any:
        """Give the connection of this message to a caller that asks for it."""
        try:
            self._check(protocol, store, token)
        except DaskPSError as error:
            return refusal(error)
        try:
            taken = await upstream.give_socket(comm, {"status": "OK", "value": None})
        except OSError as error:
            logger.info("no lane for %.60s: %s", token, error)
            return Status.dont_reply
        lane = HostLane(self._host, store, Channel(taken, PATIENCE_SECONDS))
        with self._lock:
            self._lanes[lane] = None
        lane.start(self._ended)
        if self._is_closed:  # meanwhile
            lane.stop()
        return Status.dont_reply

    def _check(self, protocol: Any, store: Any, token: Any) -> None:
        where = f"worker {self._host.worker.address}"
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"a lane of protocol {protocol!r:.60} was asked for at {where}, which "
                f"has {PROTOCOL}; install the same daskps everywhere"
            )
        if not (fits(store, str) and fits(token, str) and len(token) <= 64):
            raise ProtocolError(f"a lane to store {store!r:.60} for {token!r:.60}")
        self._host.of(store)
        if not self._is_allowed or self._host.is_leaving or self._is_closed:
            raise StoreClosedError(f"{where} gives no lanes")
        if len(self._lanes) >= MOST_LANES:
            raise StoreClosedError(f"{where} has {MOST_LANES} lanes already")

    def _ended(self, lane: HostLane) -> None:
        with self._lock:
            self._lanes.pop(lane, None)

    def drop(self, store: str) -> None:
        """End the lanes to a store that is gone."""
        with self._lock:
            lanes = [lane for lane in self._lanes if lane.store == store]
        for lane in lanes:
            lane.stop()

    def close(self) -> None:
        """End all lanes: none answers any more when this returns."""
        self._is_closed = True
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.stop()
        end = time.monotonic() + JOIN_SECONDS
        for lane in lanes:
            lane.thread.join(max(0.0, end - time.monotonic()))

    def __len__(self) -> int:
        return len(self._lanes)


class HostLane:
    """One lane, and the thread that serves it.

    Parameters
    ----------
    host : ShardHost
        Whose shards it reaches.
    store : str
        The store that it was asked for; it serves no other one.
    channel : Channel
        Its end of the lane.
    """

    def __init__(self, host: ShardHost, store: str, channel: Channel) -> None:
        self.store = store
        self._host, self._channel = host, channel
        self._forms: dict[int, Form] = {}
        #: Set for whoever waits here: what it waits for is done, or this ends.
        self._woken = threading.Event()
        self.thread = threading.Thread(
            target=self._run, name="daskps-lane", daemon=True
        )

    def start(self, ended: Callable[[HostLane], None]) -> None:
        """Begin to serve; `ended` is told at the end."""
        self._ended = ended
        self.thread.start()

    def stop(self) -> None:
        """Have its thread end soon; from any thread."""
        self._channel.shut()
        self._woken.set()

    def _run(self) -> None:
        try:
            while True:
                head = self._channel.receive_head(idle=True)
                self._channel.send(self._serve(head))
        except OSError:
            pass  # its caller is gone, or this was stopped
        except ProtocolError as error:
            logger.warning("a lane to store %s was closed: %s", self.store, error)
        except Exception:
            logger.exception("a lane to store %s failed", self.store)
        finally:
            self._channel.close()
            self._ended(self)

    def _serve(self, head: Head) -> list[Any]:
        """Return the frame that answers one.

        Raises
        ------
        ProtocolError
            Where what follows cannot be told from the body of this frame.
        """
        if head.kind == FORM:
            text = self._channel.receive_bytes(head.nbytes)
            try:
                self._forms.pop(head.form, None)
                self._forms[head.form] = read_form(unpack_text(text), self._layout)
            except Exception as error:  # noqa: BLE001 - its caller gets a refusal
                return pack_refusal(refused(error, "a form"), head.number)
            return [pack_head(Head(ANSWER, number=head.number))]
        form = self._forms.get(head.form)
        if head.kind != CALL or form is None:
            raise ProtocolError(f"a frame that nobody has asked for: {head!r:.200}")
        form.check(head)
        call = self._receive(form, head)
        try:
            return pack_answers(self._answers(call), head.number)
        except (DaskPSError, ValueError, TypeError) as error:
            return pack_refusal(error, head.number)
        except Exception as error:
            logger.exception("a call by a lane failed")
            return pack_refusal(refused(error, "a call"), head.number)

    def _layout(self, store: str, shard: int) -> Layout:
        if store != self.store:
            raise ProtocolError(f"a form of store {store!r:.60} on a lane of another")
        return self._host.get_shard(store, shard).layout

    def _receive(self, form: Form, head: Head) -> Call:
        """Receive the body of a call into arrays that its shards may keep."""
        least: list[int] | None = None
        if head.flags & HAS_LEAST:
            buffer = self._host.empty(len(form.template.parts), LEAST)
            self._channel.receive_into(buffer)
            least = buffer.tolist()
        arrays = []
        for dtype, n in form.arrays:
            array = self._host.empty(n, dtype)
            if n:
                self._channel.receive_into(array)
            arrays.append(array)
        return form.call(head, least, iter(arrays))

    def _answers(self, call: Call) -> list[Answer]:
        """Serve a call, as `ShardHost.call` does on the event loop."""
        host = self._host
        end = time.monotonic() + min(call.wait_seconds, MOST_WAIT_SECONDS)
        hosted_shards = [host.get_shard(call.store, p.shard) for p in call.parts]
        if producer := call.step.producer:
            for hosted in hosted_shards:
                host.make_room(hosted, producer, MOST_WAIT_SECONDS)
        if call.codec:
            call = widened(call, hosted_shards[0].layout, host.empty)
        self._woken.clear()
        pending, tickets = start_call(hosted_shards, call, self._woken.set)
        try:
            for hosted in hosted_shards:
                hosted.serve(MOST_WAIT_SECONDS)
            if not pending.done and self._channel.is_open:
                if any(hosted.is_shared for hosted in hosted_shards):
                    # Who publishes in another process wakes nobody here.
                    host.worker.loop.add_callback(host.keep_looking)
                self._woken.wait(max(0.0, end - time.monotonic()))
        finally:
            if not pending.done:
                for hosted, _, ticket in tickets:
                    # Until then somebody may be reading its arrays.
                    hosted.take_back(ticket, LOCK_SECONDS)
        left = max(MIN_SECONDS, end - time.monotonic())
        return answers_of(tickets, host.empty, seconds=left)

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
from daskps.cluster.host.lane_calls import LaneCalls, Parked
from daskps.cluster.lane.channel import Channel
from daskps.cluster.wire.messages import PROTOCOL
from daskps.cluster.wire.replies import refusal
from daskps.cluster.wire.wellformed import fits
from daskps.errors import DaskPSError, ProtocolError, StoreClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.host.host import ShardHost

logger = logging.getLogger(__name__)
#: Lanes of one host; each has a thread.
MOST_LANES = 64
#: Seconds without a byte after which a caller is given up in the middle of a frame.
PATIENCE_SECONDS = 30.0
#: How long a call waits for the lock of a shard.
LOCK_SECONDS = 1.0
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
        lane = HostLane(self._host, Channel(taken, PATIENCE_SECONDS))
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
    channel : Channel
        Its end of the lane.
    """

    def __init__(self, host: ShardHost, channel: Channel) -> None:
        self._channel = channel
        self._calls = LaneCalls(host)
        #: Set for the thread that waits: what it waits for is done, or the lane ends.
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
                body = self._calls.wanted(head)
                for buffer in body:
                    self._channel.receive_into(buffer)
                found = self._calls.begin(head, body, LOCK_SECONDS)
                if isinstance(found, Parked):
                    found = self._wait(found)
                self._channel.send(found)
        except OSError:
            pass  # its caller is gone, or this was stopped
        except ProtocolError as error:
            logger.warning("a lane was closed: %s", error)
        except Exception:
            logger.exception("a lane failed")
        finally:
            self._channel.close()
            self._ended(self)

    def _wait(self, parked: Parked) -> list[Any]:
        """Wait until a call is done, or its time is up; return what answers it."""
        self._woken.clear()
        parked.then(self._woken.set)
        if self._channel.is_open:
            self._woken.wait(max(0.0, parked.end - time.monotonic()))
        return parked.finish(LOCK_SECONDS)

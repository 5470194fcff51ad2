"""A shard that comes here: its copy, and the socket by which it asks for states.

A state is installed by one thread at a time. A large one is received where it belongs,
in the buffers of the copy that are not in force: its install begins with the first of
these bytes, and ends where the rest never comes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.host.moving import LOOKS
from daskps.cluster.host.opening import open_socket
from daskps.cluster.protocol.states import pack_arrays, unpack_arrays
from daskps.cluster.sockets.connection import SMALL_NBYTES
from daskps.cluster.sockets.fetches import text_nbytes
from daskps.cluster.sockets.frames import (
    ANSWER,
    FETCH,
    Head,
    Rest,
    pack_head,
    text_of,
    unpack_text,
)
from daskps.errors import ConsistencyError, DaskPSError, ProtocolError
from daskps.shards import states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.host.node import OpenSockets
    from daskps.shards.states import Mark, State
    from daskps.typing import Array

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Coming:
    """A shard that moves here: its copy, and the moment that it has."""

    move: str
    hosted: HostedShard
    source: str
    mark: Mark
    #: Of a second copy: the task that follows the owner, and set once the owner waits
    #: for it.
    following: asyncio.Future[None] | None = None
    counts: asyncio.Event = field(default_factory=asyncio.Event)
    #: Held by who has it become the owner.
    owning: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: The only one who may install states, and the install under way.
    turn: object = None
    installing: Future[None] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, turn: object) -> Future[None]:
        """Begin to install a state, in any thread that has the turn; return its end."""
        with self.lock:
            if self.turn is not turn:
                raise ConsistencyError("the copy has stopped, or follows another one")
            self.installing = done = Future[None]()
        return done

    def install(self, state: State, done: Future[None]) -> None:
        """Bring the copy to a state, once that has begun."""
        try:
            if state.since != self.mark:
                raise ProtocolError(f"a state since {state.since}, not {self.mark}")
            shard = self.hosted.shard
            # Until it counts nobody sees what it is in between, or goes back there.
            is_whole = self.counts.is_set() or shard.run_state.is_bsp
            parts = [state] if is_whole else states.in_parts(shard.segment, state)
            for part in parts:
                states.install(shard.segment, part)
            self.mark = state.now
        finally:
            done.set_result(None)

    def end(self) -> Future[None] | None:
        """Follow no more; return the install under way, if any."""
        if self.following is not None:
            # Its frames refer to this copy, whose memory such a cycle would keep.
            following, self.following = self.following, None
            following.cancel()
        with self.lock:
            self.turn = object()
        return self.installing

    async def stop(self) -> None:
        """Follow no more; an install under way ends first."""
        self.end()
        await self.rest()

    async def rest(self, turn: object = None) -> None:
        """Take the turn from who has that one; an install under way ends first."""
        with self.lock:
            if self.turn is turn:
                self.turn = object()
        if (installing := self.installing) is not None:
            await asyncio.shield(asyncio.wrap_future(installing))

    def close(self) -> None:
        """Free its memory, once no install writes there."""
        if (installing := self.end()) is not None:
            installing.add_done_callback(lambda _: self.hosted.close())
        else:
            self.hosted.close()


class Asking:
    """A copy that asks for states, by a socket: each one is answered by the next ask.

    The socket is served here as it is at its other end, by the same threads. They know
    this object as the calls of the socket.

    Parameters
    ----------
    host : ShardHost
        The host of the copy.
    coming : Coming
        The copy, which follows its owner from now on.
    of : mapping of str to object
        Store, number and move of the shard, and who asks.
    """

    def __init__(self, host: ShardHost, coming: Coming, of: Mapping[str, Any]) -> None:
        self._host, self._coming, self._of = host, coming, of
        self._turn = coming.turn = object()
        self._silent = 0
        #: A state that is coming to its place, and the end of its install.
        self._receiving: tuple[State, Future[None]] | None = None
        segment = coming.hosted.shard.segment
        arrays = [*segment.weights[0], *(s for of in segment.slots[0] for s in of)]
        self._nbytes = sum(array.nbytes for array in arrays)

    async def go_on(self, sockets: OpenSockets) -> None:
        """Ask by a socket for as long as there is one.

        Raises
        ------
        OSError
            Where the owner was silent for too long.
        """
        source, store, token = self._coming.source, self._of["store"], self._of["move"]
        about = self._host.worker.server.rpc, source, store
        self._turn = self._coming.turn = object()
        seconds = config.load().suspect_after_seconds
        try:
            taken = await open_socket(*about, token=token, seconds=seconds)
            first = self._ask(text_of(["copy_next", self._of]))
            channel = sockets.serve(taken, self, token, first)
        except (OSError, DaskPSError) as error:
            logger.info("a copy asks %s by messages: %r", source, error)
            return
        try:
            while channel.is_open:
                await asyncio.sleep(seconds / LOOKS)
                self._silent += 1
                is_still = time.monotonic() - channel.moved > seconds
                if self._silent >= LOOKS and is_still:
                    raise TimeoutError(f"{source} is silent")
        finally:
            channel.shut()
            # A thread may yet install its last state, and messages bring the next.
            await self._coming.rest(self._turn)

    def _ask(self, text: bytes = b"") -> list[Any]:
        """Return the frame that asks for what comes after the state that is here."""
        self._silent = 0
        flip, version = self._coming.mark
        head = Head(FETCH, len(text), 0, 0, 0, flip, self._nbytes, version)
        return [pack_head(head) + text]

    # -- the calls of its socket -----------------------------------------------

    def read_now(self, data: Any) -> None:
        """No state is without a body."""

    def wanted(self, head: Head) -> list[Any]:
        """Return the buffers for a state; refuse what is none."""
        if head.kind != ANSWER:
            raise ConnectionAbortedError("a message will say why")
        text = bytearray(text_nbytes(head))
        data = self._host.empty(head.nbytes - len(text), "uint8")
        if not self.is_long(head):
            return [text, data]
        return [text, Rest(len(data), partial(self._place, text, data))]

    def _place(self, text: bytearray, data: Array) -> list[Array]:
        """Begin to install a large state; return the buffers that the rest goes to."""
        state, installing = self._receiving = self._begun(text, data)
        state = states.receive(self._coming.hosted.shard.segment, state)
        self._receiving = state, installing
        arrays = pack_arrays(state)[1]
        if (n := sum([array.nbytes for array in arrays])) != len(data):
            raise ProtocolError(f"{n:,} bytes of a state in {len(data):,}")
        return arrays

    def _begun(self, text: bytearray, data: Array) -> tuple[State, Future[None]]:
        """Return a state, and the end of its install, which has begun."""
        state = unpack_arrays(unpack_text(text), data)
        try:
            return state, self._coming.begin(self._turn)
        except ConsistencyError as error:  # as where its store is deleted
            raise ConnectionAbortedError(*error.args) from error

    def is_long(self, head: Head) -> bool:
        """Return whether its installation takes long."""
        return head.nbytes > SMALL_NBYTES

    def begin(self, head: Head, body: Sequence[Any], seconds: float) -> list[Any]:
        """Install a state; return the frame that asks for the next one."""
        receiving, self._receiving = self._receiving, None
        self._coming.install(*(receiving or self._begun(body[0], body[1])))
        return self._ask()

    def closed(self) -> None:
        """Give up a state that has come in part."""
        if self._receiving is not None:
            _, installing = self._receiving
            installing.set_result(None)

    def let_go(self) -> None:
        """Keep the shard: it is the copy's own."""

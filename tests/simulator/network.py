"""The network between simulated processes: a comm scheme of Dask's, ``sim://``.

Messages go through Dask's own serialisation, so that nothing is shared by reference.
A connection is a stream: it keeps the order, and breaks as a whole. What happens to a
message is decided when it is written.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any

from distributed.comm.core import BaseListener, Comm, CommClosedError, Connector
from distributed.comm.registry import Backend, backends
from distributed.comm.utils import from_frames, to_frames

from tests.simulator.ground import CHANCE, CLOCK
from tests.simulator.loop import NUMBERS, PROCESS, Process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

#: What every message takes, and on average in addition.
LEAST_SECONDS, MEAN_SECONDS = 50e-6, 300e-6
#: How much later the end of a stream comes.
END_SECONDS = 1e-4
#: Messages that may be lost with their connection: ours, which are sent again.
LOSSY = ("daskps_call", "daskps_control")
_END = object()


class DeadError(BaseException):
    """The process that was at work has died: nobody hears of it."""


class Network:
    """All links; one to a simulation.

    Attributes
    ----------
    loss : float
        Share of messages that are lost, half of them after they were handled.
    late : float
        Share of messages that are late, by up to half a second.
    """

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.listeners: dict[str, SimListener] = {}
        self.comms: dict[str, list[SimComm]] = {}
        self.loss = self.late = 0.0
        self.n_sent = self.n_lost = 0
        #: Called with a process after each message that it has sent or got.
        self.after: Callable[[Process], None] = lambda process: None
        #: Links, from and to, that pass nothing on, and what waits at them.
        self._cut: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._healed = asyncio.Event()
        #: What the trace is a digest of.
        self.lines: list[bytes] = []
        self._trace = hashlib.blake2b(digest_size=8)

    # -- what is recorded ----------------------------------------------------

    @property
    def trace(self) -> str:
        """Digest of all that was sent, when and between whom."""
        return self._trace.hexdigest()

    def note(self, *what: object) -> None:
        """Have the trace contain something."""
        line = f"{CLOCK.elapsed:.7f} {' '.join(map(str, what))}\n".encode()
        self.lines.append(line)
        self._trace.update(line)

    # -- links ---------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Hold everything back from one process to another, but not the way back."""
        self._cut.setdefault((source, target), [])

    def mend(self, source: str, target: str) -> None:
        """Let everything through again, and deliver what was held back."""
        for deliver in self._cut.pop((source, target), ()):
            deliver()
        self._healed.set()
        self._healed = asyncio.Event()

    def heal(self) -> None:
        """Mend all links."""
        for source, target in list(self._cut):
            self.mend(source, target)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing passes from one process to another."""
        return (source, target) in self._cut

    async def joined(self, source: str, target: str) -> None:
        """Wait until two processes reach each other."""
        while self.is_cut(source, target) or self.is_cut(target, source):
            await self._healed.wait()

    def pass_on(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver something, now or when the link is there again."""
        held = self._cut.get((source, target))
        if held is None:
            deliver()
        else:
            held.append(deliver)

    def crash(self, process: Process, silence: float) -> None:
        """End a process; its peers see the end of their streams after a silence."""
        process.is_dead = True
        self.note("crash", process.name)
        self.listeners.pop(process.name, None)
        loop = asyncio.get_running_loop()
        for comm in self.comms.pop(process.name, []):
            loop.call_later(silence, comm.peer.arrive, _END, context=comm.peer.context)


NETWORK: list[Network] = []


def network() -> Network:
    """Return the network of this simulation."""
    return NETWORK[-1]


class SimComm(Comm):
    """One end of a connection."""

    peer: SimComm

    def __init__(self, process: Process, peer: str, deserialize: bool) -> None:
        self._number = next(NUMBERS)
        super().__init__(deserialize=deserialize)
        self.process, self.context = process, process.context()
        self._local_addr, self._peer_addr = f"sim://{process.name}", f"sim://{peer}"
        self._is_closed = False
        #: Whether the next message that is written here is lost.
        self.loses_next = False
        self._inbox: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._last = 0.0
        network().comms.setdefault(process.name, []).append(self)

    def __hash__(self) -> int:
        return self._number

    @property
    def local_address(self) -> str:
        """Address of this end."""
        return self._local_addr

    @property
    def peer_address(self) -> str:
        """Address of the other end."""
        return self._peer_addr

    def closed(self) -> bool:
        """Return whether nothing more can be read or written."""
        return self._is_closed or bool(self._inbox and self._inbox[0] is _END)

    async def read(self, deserializers: Any = None) -> Any:
        """Return the next message."""
        while not self._inbox:
            if self._is_closed:
                raise CommClosedError("the connection is closed")
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        found = self._inbox.popleft()
        if found is _END:
            self._shut()
            raise CommClosedError("the connection was closed by the other side")
        return await from_frames(
            found,
            deserialize=self.deserialize,
            deserializers=deserializers,
            allow_offload=False,
        )

    async def write(
        self, msg: Any, serializers: Any = None, on_error: Any = "message"
    ) -> int:
        """Send a message, or lose it."""
        if self.closed():
            raise CommClosedError("the connection is closed")
        frames = await to_frames(
            msg,
            allow_offload=False,
            serializers=serializers,
            on_error=on_error,
            context={
                "sender": self.local_info,
                "recipient": self.remote_info,
                **self.handshake_options,
            },
        )
        # Copied: arrays of the sender must not be seen to change on the way.
        copies = [memoryview(bytearray(frame)) for frame in frames]
        self._send(copies, *_named(msg))
        return sum(frame.nbytes for frame in copies)

    def _send(self, frames: Sequence[memoryview], what: str, method: str) -> None:
        net = network()
        net.n_sent += 1
        payload = b"".join(frames) if what in LOSSY else b""
        digest = hashlib.blake2b(payload, digest_size=8).hexdigest()
        net.note(self._local_addr, self._peer_addr, what, method, digest)
        net.after(self.process)
        if self.loses_next:
            # The answer: it was handled, and nobody hears of it.
            self.abort()
            raise CommClosedError("the network has lost an answer")
        delay = LEAST_SECONDS + CHANCE.expovariate(1 / MEAN_SECONDS)
        if what in LOSSY and CHANCE.random() < net.loss:
            net.n_lost += 1
            if CHANCE.random() < 0.5:
                self.abort()
                raise CommClosedError("the network has lost a message")
            self.peer.loses_next = True
        elif CHANCE.random() < net.late:
            delay += CHANCE.uniform(0.0, 0.5)
        self._deliver(frames, delay)

    def _deliver(self, what: Any, delay: float) -> None:
        """Have something arrive, after all that was sent before."""
        loop, peer = asyncio.get_running_loop(), self.peer

        def deliver() -> None:
            at = self._last = max(CLOCK.now + delay, self._last + 1e-9)
            loop.call_at(at, peer.arrive, what, context=peer.context)

        net = network()
        net.pass_on(self.process.name, peer.process.name, deliver)

    def arrive(self, what: Any) -> None:
        """Take what comes from the other end; in this end's process."""
        if self._is_closed:
            return
        self._inbox.append(what)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def close(self) -> None:
        """Close both ends."""
        self.abort()

    def abort(self) -> None:
        """Close both ends."""
        if not self._is_closed:
            self._deliver(_END, END_SECONDS)
            self._shut()

    def _shut(self) -> None:
        self._is_closed = True
        self._inbox.clear()
        comms = network().comms.get(self.process.name)
        if comms is not None and self in comms:
            comms.remove(self)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _named(message: Any) -> tuple[str, str]:
    """Return what a message is: its operation, and its method if it has one."""
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        return type(message).__name__, "-"
    return message["op"], str(message.get("method", "-"))


class SimListener(BaseListener):
    """Where a process takes connections."""

    prefix = "sim"

    def __init__(
        self, name: str, handle: Callable[[Comm], Awaitable[None]], deserialize: bool
    ) -> None:
        super().__init__()
        self._name, self._handle, self._deserialize = name, handle, deserialize

    async def start(self) -> None:
        """Begin to listen."""
        network().listeners[self._name] = self

    def stop(self) -> None:
        """Listen no more."""
        network().listeners.pop(self._name, None)

    @property
    def listen_address(self) -> str:
        """The address."""
        return f"sim://{self._name}"

    contact_address = listen_address

    def accept(self, source: str) -> SimComm:
        """Return this end of a new connection, and begin to serve it."""
        process = network().processes[self._name]
        comm = SimComm(process, source, self._deserialize)
        loop = asyncio.get_running_loop()
        # Once the other end is there.
        loop.call_soon(self._begin, process, comm, context=process.context())
        return comm

    def _begin(self, process: Process, comm: SimComm) -> None:
        process.spawn(self._serve(comm))

    async def _serve(self, comm: SimComm) -> None:
        try:
            await self.on_connection(comm)
        except CommClosedError:
            return
        await self._handle(comm)


class SimConnector(Connector):
    """How a process reaches another one."""

    async def connect(
        self, address: str, deserialize: bool = True, **connection_args: Any
    ) -> SimComm:
        """Return this end of a new connection, or raise OSError."""
        process, net = PROCESS.get(), network()
        if process is None:
            raise RuntimeError("only simulated processes connect")
        await asyncio.sleep(LEAST_SECONDS + CHANCE.expovariate(1 / MEAN_SECONDS))
        await net.joined(process.name, address)
        target, listener = net.processes.get(address), net.listeners.get(address)
        if listener is None or target is None or target.is_dead:
            raise OSError(f"nobody listens at sim://{address}")
        comm = SimComm(process, address, deserialize)
        comm.peer = listener.accept(process.name)
        comm.peer.peer = comm
        return comm


class SimBackend(Backend):
    """The scheme: addresses are ``sim://machine:number``."""

    def get_connector(self) -> SimConnector:
        """Return what connects."""
        return SimConnector()

    def get_listener(
        self, loc: str, handle_comm: Any, deserialize: bool, **connection_args: Any
    ) -> SimListener:
        """Return what listens."""
        return SimListener(loc, handle_comm, deserialize)

    def get_address_host(self, loc: str) -> str:
        """Return the machine of an address."""
        return loc.split(":")[0]

    def get_address_host_port(self, loc: str) -> tuple[str, int]:
        """Return machine and number of an address."""
        machine, number = loc.split(":")
        return machine, int(number)

    def resolve_address(self, loc: str) -> str:
        """Return the same."""
        return loc

    def get_local_address_for(self, loc: str) -> str:
        """Return an address from which another one can be reached."""
        process = PROCESS.get()
        return loc if process is None else process.name


def register() -> None:
    """Make the scheme known to Dask."""
    backends["sim"] = SimBackend()

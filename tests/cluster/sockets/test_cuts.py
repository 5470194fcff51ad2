"""A socket that is cut after every byte of its frames: a model of both ends, in one thread.

The caller's end and the host's are the real ones. What waits for the other end has that
go on; after so many bytes in one direction nothing more arrives in either. The call
goes on by message then, before or after the host has heard of the end.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps import consistency, optim
from daskps.cluster.caller.call_socket import CallSocket, SocketPayload
from daskps.cluster.caller.call_template import CallTemplate, SocketFrame
from daskps.cluster.caller.routes import Reply, Request, push
from daskps.cluster.caller.row_routes import IdSplit, RowBatch, slices_of
from daskps.cluster.caller.socket_carrier import SocketCarrier
from daskps.cluster.caller.socket_route import SocketRoutes
from daskps.cluster.caller.targets import ReadSlice, Target
from daskps.cluster.caller.thread_call import ThreadCall
from daskps.cluster.counters import Counters
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.socket_calls import SocketCalls
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.messages import Call, Part
from daskps.cluster.sockets.connection import ANSWERED, OTHERS, Connection
from daskps.cluster.sockets.served import ServedChannel
from daskps.errors import ProtocolError
from daskps.layout.arrays import Layout
from daskps.shards.steps import ADD, GRADIENT, NO_WAIT, READ, Item, Step
from tests.cluster.by_socket import arrived, hosted_shards
from tests.cluster.callers import map_of
from tests.cluster.hosted import bare_host

LAYOUT = Layout.build({"w": ((4,), "float64")}, 2, tables={"emb": (4, 1, "float64")})
RUN, N_RANKS = 7, 2
FOREVER, ADD_ROWS, ROWS = Deadline(None, "a call"), "add rows", "gradient of rows"
WITH_ROWS = {ADD_ROWS: ADD, ROWS: GRADIENT}
RANGE = ("float64", 0, 2)
READS = {
    0: [ReadSlice(RANGE, 0, slice(0, 2))],
    1: [ReadSlice(RANGE, 0, slice(2, 4))],
}
SLICES = (("w", 0, 2), ("w", 2, 4))
#: Rows that are pushed and read, of both shards.
PUSHED, READ_IDS = np.array([2, 0, 3, 1]), np.array([3, 1, 0, 2])


def is_ready(end: socket.socket) -> bool:
    """Return whether there is something to receive; `select` takes 1,024 files alone."""
    looked_at = select.poll()
    looked_at.register(end, select.POLLIN)
    return bool(looked_at.poll(0))


class HostEnd:
    """The host's end, which goes on when it is told to."""

    def __init__(self, host: ShardHost, there: socket.socket) -> None:
        channel = ServedChannel(there, 0.01)
        self.connection = Connection(channel, SocketCalls(host))
        self._there, self._buffer = there, memoryview(bytearray(65_536))
        self.has_ended = False

    def go_on(self) -> None:
        """Do whatever can be done without more bytes."""
        connection = self.connection
        while not self.has_ended:
            try:
                if (waiting := connection.waiting) is not None:
                    if waiting.done:
                        frame = waiting.finish(0.0)
                        assert isinstance(frame, list)
                        connection.answer(frame)
                    elif self._is_ready():  # as a thread hears of it
                        raise ConnectionResetError("hung up")
                    else:
                        return
                if connection.go_on(self._buffer, 0.0) not in (ANSWERED, OTHERS):
                    return
            except (OSError, ProtocolError):
                self.has_ended = True
                connection.end()

    def _is_ready(self) -> bool:
        return is_ready(self._there)


class CutSocket(socket.socket):
    """The caller's socket: cut after so many bytes that it sends, or receives."""

    def __init__(self, there: HostEnd, fd: int) -> None:
        super().__init__(fileno=fd)
        self._host = there
        self.n_out, self.n_in = 0, 0
        #: After how many bytes, and whether the caller is told so by an error; whether
        #: the host goes on until the caller has done something else.
        self.out_at = self.in_at = 10**9
        self.is_told, self.is_late = False, False
        #: What happens where the caller waits for an answer and there is none.
        self.meanwhile: Callable[[], None] | None = None
        self.is_cut = False

    def sendmsg(self, buffers: Any, *_: Any) -> int:
        data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
        goes = data[: max(0, self.out_at - self.n_out)]
        self.n_out += len(goes)
        if not self.is_cut and goes:
            super().sendall(goes)
        if len(goes) < len(data):
            self._cut(BrokenPipeError)
        return len(data)

    def recv_into(self, view: Any, *_: Any) -> int:
        if not (self.is_cut and self.is_late):
            self._host.go_on()
        if self.meanwhile is not None and not self._is_ready():
            self.meanwhile()
            self._host.go_on()
        left = min(self.in_at - self.n_in, len(view))
        if left <= 0:
            self._cut(ConnectionResetError)
        if self.is_cut:
            return 0
        got = super().recv_into(view, left, socket.MSG_DONTWAIT)
        self.n_in += got
        return got

    def _is_ready(self) -> bool:
        return is_ready(self)

    def _cut(self, error: type[OSError]) -> None:
        if not self.is_cut:
            self.is_cut = True
            socket.socket.shutdown(self, socket.SHUT_RDWR)
        if self.is_told:
            raise error


class Model:
    """Shards of a host, and one who calls them by sockets that are cut."""

    def __init__(self, loop: Any, host: ShardHost) -> None:
        self.loop, self.host, self.counters = loop, host, Counters()
        self.n = self.n_messages = 0
        self.given_back = 0
        self.out = np.zeros(4)
        #: What a caller knows of the store, and its ways by sockets.
        self.meta = map_of(host.shards["s", 0], ["a", "a"])
        self.sockets: Any
        self.sockets = SimpleNamespace(give_back=self._give_back, end=self._end)
        self.rows = SocketRoutes(self.meta)
        #: What comes before a message, which would wait for it.
        self.first: Callable[[], None] | None = None

    def send(self, request: Call | Request, shards: Any, _: Any) -> Any:
        """Send a call by message, as `remote` does."""
        self.n_messages += 1
        if self.first is not None:
            self.first()
        target = None
        if isinstance(request, Request):
            target, request = request.target, request.call(self.meta, shards, 30.0, "")
        done: Future[Reply] = Future()
        answers = self.loop.run_until_complete(self.host.call(arrived(request, LAYOUT)))
        for answer in answers:
            if answer.error is not None:
                raise answer.error
            if target is not None:
                target.fill(answer.shard, answer.arrays)
                continue
            [out] = answer.arrays or [self.out[:0]]
            at = READS[answer.shard][0].where
            self.out[at][: len(out)] = out
        done.set_result(Reply.of(answers))
        return SimpleNamespace(result=done.result, stop=lambda: None)

    def call_socket(self) -> tuple[CallSocket, HostEnd, CutSocket]:
        here, there = socket.socketpair()
        host = HostEnd(self.host, there)
        cut = CutSocket(host, here.detach())
        return CallSocket(cut, 30.0), host, cut

    def call_rows(self, call_socket: CallSocket, step: Step) -> Reply:
        """Push rows and read some, as a thread does that has this socket."""
        self.out[:] = -1
        table, n = LAYOUT.tables[0], LAYOUT.n_shards
        rows = slices_of(LAYOUT, IdSplit.of(table, READ_IDS, n), 0, 0)
        target = Target({}, [self.out], dict, {s: (of,) for s, of in rows.items()})
        given = RowBatch(IdSplit.of(table, PUSHED, n), np.ones(4))
        request = push(self.meta, {}, step, target=target, rows=[given])
        route = self.rows.find(request, [0, 1])
        assert route is not None
        return self._made(call_socket, SocketCarrier.of(self, route, request, FOREVER))  # type: ignore[arg-type]  # a stand-in

    def call(self, call_socket: CallSocket, step: Step) -> Reply:
        """Make a call as a thread does that has this socket."""
        if step.kind in WITH_ROWS:
            return self.call_rows(call_socket, step._replace(kind=WITH_ROWS[step.kind]))
        data = np.ones(4)
        parts = []
        for shard in (0, 1):
            items = (Item(0, 0, data[2 * shard : 2 * shard + 2]),)
            ranges = (RANGE,) if step.wait == READ else ()
            parts.append(Part(shard, step._replace(items=items), ranges))
        call = Call("s", tuple(parts), 30.0)
        reads: Any = [READS[s] for s in (0, 1)] if step.wait == READ else [(), ()]
        frame = SocketFrame(CallTemplate("a", call), SLICES, reads, nbytes=32)
        self.out[:] = -1
        route: Any = SimpleNamespace(
            frames=[frame],
            run=step.run,
            may_wait=bool(step.run),
            words=(),
        )
        said = SocketPayload(
            step.clock,
            step.sequence,
            step.floor,
            step.weight,
            arrays={"w": data},
            outs=[self.out] if step.wait == READ else [],
        )
        made: Any = SocketCarrier(
            self,  # type: ignore[arg-type]  # a stand-in
            route,
            said,
            make=lambda: call,  # type: ignore[arg-type,return-value]  # a stand-in
            deadline=FOREVER,
        )
        return self._made(call_socket, made)

    def _made(self, call_socket: CallSocket, made: SocketCarrier) -> Reply:
        self.sockets.take = lambda *_: call_socket
        # Not `run`: the loop of the messages is this thread's.
        whole = ThreadCall(made, FOREVER, self.send)
        whole.begin()
        return whole.result()

    def _give_back(self, *_: Any) -> None:
        self.given_back += 1

    def _end(self, _: str, call_socket: CallSocket, **__: Any) -> None:
        call_socket.close()

    def check(self) -> None:
        """See that each push has counted once."""
        for hosted in self.host.shards.values():
            assert hosted.shard.segment.current.version == self.n
            assert not hosted.shard.waiting


def adds(model: Model) -> tuple[Step, None]:
    """What adds outside runs, and reads what is there then."""
    step = Step(ADD, producer=3, sequence=model.n, floor=model.n, wait=READ)
    return step, None


def adds_rows(model: Model) -> tuple[Step, None]:
    """The same of rows of a table."""
    step = Step(ADD_ROWS, producer=3, sequence=model.n, floor=model.n)
    return step, None


def steps_last(model: Model) -> tuple[Step, None]:
    """A trainer's step that completes its round, and reads the next weights."""
    steps_of(model, 1)
    return trainers(model, 0), None


def steps_first(model: Model) -> tuple[Step, Callable[[], None]]:
    """A trainer's step that has to wait for the other one."""
    return trainers(model, 0), lambda: steps_of(model, 1)


def steps_rows(model: Model) -> tuple[Step, Callable[[], None]]:
    """The same with rows of a table."""
    return trainers(model, 0)._replace(kind=ROWS), lambda: steps_of(model, 1, rows=True)


def trainers(model: Model, rank: int) -> Step:
    n = model.n
    return Step(GRADIENT, run=RUN, rank=rank, clock=n, tick=True, sequence=n, wait=READ)


def steps_of(model: Model, rank: int, *, rows: bool = False) -> None:
    """Have another trainer make its step, by message."""
    step, parts = trainers(model, rank)._replace(wait=NO_WAIT), []
    for shard in (0, 1):
        item = Item(0, 0, np.ones(2))
        if rows:
            item = Item(1, 0, np.ones(2), np.arange(2 * shard, 2 * shard + 2))
        parts.append(Part(shard, step._replace(items=(item,))))
    model.loop.run_until_complete(model.host.call(Call("s", tuple(parts), 30.0)))


@pytest.fixture
def model() -> Iterator[Model]:
    loop = asyncio.new_event_loop()

    async def made() -> ShardHost:
        return stack.__enter__()

    stack = bare_host(loop, *hosted_shards(LAYOUT, optim.SGD(1.0)))
    host = loop.run_until_complete(made())
    try:
        yield Model(loop, host)
    finally:
        stack.__exit__(None, None, None)
        loop.close()


def one(model: Model, kind: Any, **cut: Any) -> CutSocket:
    """Make one call of a kind on a socket that is cut somewhere; return its socket."""
    step, meanwhile = kind(model)
    call_socket, host, there = model.call_socket()
    for name, value in cut.items():
        setattr(there, name, value)
    state = {"is_done": False}

    def complete() -> None:
        if not state["is_done"]:
            state["is_done"] = True
            meanwhile()

    if meanwhile is not None:
        there.meanwhile = model.first = complete
    before = model.n_messages
    model.call(call_socket, step)
    model.first = None
    model.n += 1
    # What the host has not heard yet: it comes after the same call by message.
    host.go_on()
    assert host.has_ended == there.is_cut
    assert (model.n_messages > before) == there.is_cut
    value = model.n if kind in (adds, adds_rows) else -model.n
    assert model.out.tolist() == [value] * 4
    model.check()
    call_socket.close()
    host.go_on()
    return there


@pytest.mark.parametrize("kind", [adds, adds_rows, steps_last, steps_first, steps_rows])
def test_a_push_counts_once_wherever_its_socket_is_cut(model, kind):
    if kind not in (adds, adds_rows):
        for hosted in model.host.shards.values():
            hosted.shard.begin_run(RUN, consistency.policy("bsp"), N_RANKS)
    whole = one(model, kind)
    n_out, n_in = whole.n_out, whole.n_in
    # Template, head and arrays; what answers the template, head, rows and arrays.
    assert n_out > 64 + 100 + 64 + 32
    assert n_in == 64 + 64 + 64 + 32
    # The template is said as calls of any kind say it. Rows come with their numbers and
    # ids.
    rows = 32 + 64 if kind in (adds_rows, steps_rows) else 0
    template, its_answer = (0, 0) if kind is adds else (n_out - 64 - rows - 32, 64)
    places = [("out_at", at) for at in range(template, n_out)]
    places += [("in_at", at) for at in range(its_answer, n_in)]
    for k, (name, at) in enumerate(places):
        how = {"is_told": bool(k & 1), "is_late": bool(k & 2)}
        assert one(model, kind, **{name: at}, **how).is_cut
    assert model.n == model.given_back + model.n_messages == 1 + len(places)

"""Pushes of many sockets by one thread: each counts once, each caller has its turn."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.socket_calls import Parked, SocketCalls
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.sockets import serving
from daskps.cluster.sockets.connection import ANSWERED, OTHERS, Connection
from daskps.cluster.sockets.frames import (
    HEAD_NBYTES,
    REFUSAL,
    ROW_NBYTES,
    TEMPLATE,
    Head,
    pack_text,
    unpack_head,
    unpack_rows,
)
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.templates import pack_template
from daskps.shards.memory.format import LOST_FROM, LOST_TO
from daskps.shards.producers import find_row
from daskps.shards.steps import ADD, GRADIENT, READ, Item, Step
from tests.cluster.by_socket import hosted_shards, pack_frame
from tests.cluster.callers import counted
from tests.cluster.hosted import bare_host, shared_shard
from tests.cluster.sockets.served import Calls, frame, served

BUFFER = memoryview(bytearray(65_536))
#: Calls of Python that these take of their host, from the bytes to those of the answer.
#: To be lowered by who makes the route shorter.
ADD_CALLS, PUSH_CALLS = 157, 73
N_SOCKETS = 32


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with bare_host(None, *hosted_shards()) as made:
        yield made


def push(producer: int, sequence: int, kind: str = ADD) -> Call:
    items = (Item(0, 0, np.full(30, producer, "f4")),)
    step = Step(kind, items, producer=producer, sequence=sequence, owned=True)
    return Call("s", (Part(0, step),), wait_seconds=30.0)


class CallSocket:
    """A socket whose host's end this thread serves."""

    def __init__(self, host: ShardHost, call: Call) -> None:
        here, self.socket = socket.socketpair()
        self.socket.settimeout(10)
        self.connection = Connection(ServedChannel(here, 0.001), SocketCalls(host))
        self.socket.sendall(b"".join(pack_text(TEMPLATE, pack_template(call), 1, 0)))
        assert self.connection.go_on(BUFFER, 0.0) == ANSWERED
        self.socket.recv(HEAD_NBYTES)

    def send(self, call: Call) -> None:
        self.socket.sendall(b"".join(bytes(b) for b in pack_frame(call, 0, 2)))

    def receive(self) -> Answer | None:
        """Return the answer for its only shard, None for a refusal."""
        data = self.socket.recv(10_000)
        if unpack_head(data[:HEAD_NBYTES]).kind == REFUSAL:
            return None
        (row,) = unpack_rows(
            data[HEAD_NBYTES : HEAD_NBYTES + ROW_NBYTES], [unpack_first(data)]
        )
        return row

    def close(self) -> None:
        self.connection.end()
        self.socket.close()


def unpack_first(data: bytes) -> int:
    return int(np.frombuffer(data, "q", 1, HEAD_NBYTES)[0])


@pytest.fixture
def sockets(host) -> Iterator[list[CallSocket]]:
    made = [CallSocket(host, push(k + 1, 1)) for k in range(4)]
    yield made
    for call_socket in made:
        call_socket.close()


def go_on(sockets: list[CallSocket], calls: list[Call]) -> list[int]:
    """Have each socket serve a call."""
    for call_socket, call in zip(sockets, calls, strict=True):
        call_socket.send(call)
    return [call_socket.connection.go_on(BUFFER, 0.0) for call_socket in sockets]


def weight(host: ShardHost, shard: int = 0) -> float:
    segment = host.shards["s", shard].shard.segment
    return float(segment.weights_of(segment.current, 0)[0])


def test_each_push_has_a_version_of_its_own(host, sockets):
    assert go_on(sockets, [push(k + 1, 1) for k in range(4)]) == [ANSWERED] * 4
    assert [call_socket.receive().version for call_socket in sockets] == [1, 2, 3, 4]
    assert weight(host) == 1 + 2 + 3 + 4


def test_a_push_that_comes_twice_counts_once(host, sockets):
    twice = CallSocket(host, push(1, 1))
    go_on([sockets[0], twice], [push(1, 1), push(1, 1)])
    assert weight(host) == 1
    # And again later, beside a new one.
    go_on([twice, sockets[0]], [push(1, 1), push(1, 2)])
    assert weight(host) == 2
    twice.close()


def test_one_that_is_refused_leaves_the_others(host, sockets):
    go_on([sockets[1]], [push(2, 100)])
    assert sockets[1].receive() is not None
    # Nobody can tell any more whether it is a repeat: no room was left to keep that.
    row = find_row(host.shards["s", 0].shard.segment.current, 2)
    assert row is not None
    row[[LOST_FROM, LOST_TO]] = 0, 64
    go_on(sockets[:3], [push(1, 1), push(2, 1), push(3, 1)])
    found = [call_socket.receive() for call_socket in sockets[:3]]
    assert [row and row.version for row in found] == [2, None, 3]
    assert weight(host) == 2 + 1 + 3
    host.shards["s", 0].shard.generation += 1
    go_on(sockets[:3], [push(k + 1, 200) for k in range(3)])
    assert [call_socket.receive() for call_socket in sockets[:3]] == [None] * 3
    assert weight(host) == 2 + 1 + 3


def test_what_another_one_is_at_is_answered_by_that_one(host, sockets):
    hosted = host.shards["s", 0]
    with hosted._mutex:
        assert go_on(sockets, [push(k + 1, 1) for k in range(4)]) == [OTHERS] * 4
    told = []
    for call_socket in sockets:
        waiting = call_socket.connection.waiting
        assert waiting is not None
        waiting.then(lambda: told.append(1))
    assert not told
    segment = hosted.shard.segment
    hosted.serve()
    assert len(told) == 4
    # Pushes that queue up share a pass over memory.
    assert (segment.flip, weight(host)) == (1, 10.0)


def test_a_socket_that_ends_takes_back_what_was_not_applied(host, sockets):
    hosted = host.shards["s", 0]
    with hosted._mutex:
        go_on(sockets, [push(k + 1, 1) for k in range(4)])
    sockets[0].connection.end()
    hosted.serve()
    assert weight(host) == 2 + 3 + 4


def test_a_caller_that_is_gone_has_pushed_all_the_same(host, sockets):
    sockets[0].send(push(1, 1))
    sockets[0].socket.close()
    with pytest.raises(OSError, match="pipe"):
        sockets[0].connection.go_on(BUFFER, 0.0)
    go_on(sockets[1:], [push(k + 1, 1) for k in range(1, 4)])
    assert weight(host) == 10


def test_the_leader_waits_for_no_other_process(tmp_path):
    hosted = shared_shard(tmp_path)
    looks: list[Any] = []
    call = push(1, 1)
    item = Item(0, 0, np.ones(1000))
    call = call._replace(parts=(Part(0, call.step._replace(items=(item,))),))
    with bare_host(None, hosted) as host, ExitStack() as stack:
        hosted.shard.segment.words[5] = hosted.shard.generation
        node: Any = host.worker
        node.loop = SimpleNamespace(add_callback=looks.append)
        call_socket = CallSocket(host, call)
        stack.callback(call_socket.close)
        assert hosted.block is not None
        other = hosted.block.lock()
        other.acquire(0)
        assert go_on([call_socket], [call]) == [OTHERS]
        waiting = call_socket.connection.waiting
        assert isinstance(waiting, Parked)
        told: list[int] = []
        waiting.then(lambda: told.append(1))
        # Nobody here hears when it is free: the host looks.
        assert (len(looks), told) == (1, [])
        other.release()
        hosted.look()
        assert told == [1]
        assert weight(host) == 1
    hosted.close()


def test_a_read_of_what_is_to_come_is_parked(host):
    step = Step(wait=READ, at_least=2)
    read = Call("s", (Part(0, step, (("float32", 0, 30),)),), wait_seconds=30.0)
    reader, call_socket = CallSocket(host, read), CallSocket(host, push(1, 1))
    assert go_on([reader, call_socket], [read, push(1, 1)]) == [OTHERS, ANSWERED]
    assert go_on([call_socket], [push(1, 2)]) == [ANSWERED]
    waiting = reader.connection.waiting
    assert waiting is not None
    assert waiting.done
    reader.close()
    call_socket.close()


@pytest.mark.parametrize(("kind", "most"), [(ADD, ADD_CALLS), (GRADIENT, PUSH_CALLS)])
def test_a_push_takes_few_calls(host, kind, most):
    """Beside others: each copies what the shard knows of all who push."""
    made = [CallSocket(host, push(k + 1, 1, kind)) for k in range(N_SOCKETS)]

    def serve() -> None:
        for call_socket in made:
            assert call_socket.connection.go_on(BUFFER, 0.0) == ANSWERED

    for sequence in (1, 2, 3):
        for k, call_socket in enumerate(made):
            call_socket.send(push(k + 1, sequence, kind))
        found = counted(serve)
    assert len(found) / N_SOCKETS <= most
    for call_socket in made:
        call_socket.close()


# -- turns ---------------------------------------------------------------------------


class Gate(Calls):
    """Keeps the leader until all of a test's callers have said something."""

    def __init__(self) -> None:
        super().__init__()
        self.is_begun, self.may_end = threading.Event(), threading.Event()

    def begin(self, head: Head, body: Any, seconds: float) -> Any:
        self.is_begun.set()
        assert self.may_end.wait(10)
        return super().begin(head, body, seconds)


def test_who_says_much_at_once_takes_turns_with_the_others(monkeypatch):
    """Its second frame is served when all were answered who came with the first."""
    monkeypatch.setattr(serving, "FEW_SOCKETS", 0)
    answered: list[int] = []
    told = select.poll()

    class Much(Calls):
        def begin(self, head: Head, body: Any, seconds: float) -> Any:
            answered.append(len(told.poll(0)))
            return super().begin(head, body, seconds)

    with served() as sockets:
        gate, much = sockets.connect(), sockets.connect()
        little = [sockets.connect() for _ in range(5)]
        for peer in little:
            told.register(peer.socket, select.POLLIN)
        held = Gate()
        gate.connection._calls, much.connection._calls = held, Much()
        gate.send()
        assert held.is_begun.wait(10)
        much.socket.sendall(frame() * 100)
        for peer in little:
            peer.send()
        held.may_end.set()
        for _ in range(100):
            much.receive()
    assert answered == [0] + [5] * 99

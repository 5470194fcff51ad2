"""Small reads, which are answered out of one buffer, beside all else of a socket."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.socket_answers import NOW_NBYTES
from daskps.cluster.host.socket_calls import SocketCalls
from daskps.cluster.protocol.messages import Call, Part
from daskps.cluster.sockets.connection import ANSWERED, ROOM, Connection
from daskps.cluster.sockets.frames import (
    ANSWER,
    CALL,
    FETCH,
    HAS_LEAST,
    HAS_LR,
    HEAD_NBYTES,
    REFUSAL,
    TEMPLATE,
    Head,
    pack_head,
    pack_text,
    unpack_head,
)
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.serving import SocketServer
from daskps.cluster.sockets.templates import pack_template
from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.shards.memory.format import VERSION
from daskps.shards.memory.publication import Publication
from daskps.shards.steps import ADD, MODEL, READ, Item, Step, Ticket
from tests.cluster.by_socket import LAYOUT, calling, hosted_shards, pack_frame
from tests.cluster.hosted import bare_host
from tests.shards.making import held
from tests.support import PATIENCE

RUN = 7
LONG_SIZE = 2**19
LONG = Layout.build({"w": ((LONG_SIZE,), "float32")}, 1)
RANGES = (("float32", 2, 30),)


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with bare_host(None) as made:
        # Given now: of those it had from the beginning somebody else holds a list.
        made.shards.update({("s", h.index): h for h in hosted_shards(rule=None)})
        yield made


class CallSocket:
    """A socket of a host, which a server serves; and who calls."""

    def __init__(self, host: ShardHost, server: SocketServer) -> None:
        self.socket, there = socket.socketpair()
        self.socket.settimeout(20)
        channel = ServedChannel(there, 0.2)
        self.calls = SocketCalls(host)
        self.connection = Connection(channel, self.calls)
        server.add(self.connection)
        self._templates: dict[str, int] = {}
        self._number = 0

    def send(self, call: Call) -> None:
        """Send a call, after its template if that is new."""
        self._number += 1
        said = pack_template(call)
        template = self._templates.get(repr(said))
        if template is None:
            template = self._templates[repr(said)] = len(self._templates)
            text = pack_text(TEMPLATE, said, self._number, template)
            self.socket.sendall(b"".join(text))
            assert self.receive()[0].kind == ANSWER
            self._number += 1
        frame = pack_frame(call, template, self._number)
        self.socket.sendall(b"".join(bytes(memoryview(b).cast("B")) for b in frame))

    def receive(self) -> tuple[Head, bytes]:
        head = unpack_head(self.exactly(HEAD_NBYTES))
        assert head.number == self._number
        return head, self.exactly(head.nbytes)

    def exactly(self, n: int) -> bytes:
        found = bytearray()
        while len(found) < n:
            got = self.socket.recv(n - len(found))
            assert got, "the socket has ended"
            found += got
        return bytes(found)

    def ask(self, call: Call) -> bytes:
        self.send(call)
        head, body = self.receive()
        assert head.kind == ANSWER
        return body


def read_call(shard: int = 0) -> Call:
    return Call("s", (Part(shard, Step(wait=READ), RANGES),))


@pytest.fixture
def server() -> Iterator[SocketServer]:
    made = SocketServer(lambda _: None)
    yield made
    made.close(10)


@pytest.fixture
def call_socket(host, server) -> Iterator[CallSocket]:
    made = CallSocket(host, server)
    with made.socket:
        yield made


def add(host: ShardHost, sequence: int) -> None:
    for (_, index), hosted in host.shards.items():
        given = tuple(
            Item(at, 0, np.full(piece.size, 1, piece.parameter.dtype))
            for at, piece in enumerate(LAYOUT.pieces[index])
        )
        step = Step(ADD, given, producer=1, sequence=sequence)
        hosted.shard.submit([Ticket(step)])


def test_small_reads_have_what_others_have_pushed(host, call_socket):
    call, first = read_call(), call_socket.ask(read_call())
    for n in range(40):
        assert call_socket.ask(call)[32:] == first[32:]
        if n % 10 == 9:
            add(host, n)
            shard = host.shards["s", 0].shard
            [weights, *_] = held(shard.segment)
            first = b" " * 32 + weights[2:30].tobytes()


def test_reads_and_pushes_in_turn(host, call_socket):
    """So many that a thread stays with the socket."""
    call = read_call()
    given = (Item(0, 0, np.ones(LAYOUT.pieces[0][0].size, "f4")),)
    for n in range(100):
        step = Step(ADD, given, producer=2, sequence=n)
        call_socket.ask(Call("s", (Part(0, step),)))
        found = np.frombuffer(call_socket.ask(call)[32:], "f4")
        assert set(found) == {n + 1.0}


def test_small_reads_and_large_ones_in_turn(host, call_socket):
    [hosted, *_] = hosted_shards(layout=LONG, rule=None)
    host.shards["s", 0] = hosted
    short, long = (
        Call("s", (Part(0, Step(wait=READ), (("float32", 0, n),)),))
        for n in (10, LONG_SIZE)
    )
    for _ in range(3):
        assert len(call_socket.ask(short)) == 32 + 40
        assert len(call_socket.ask(long)) == 32 + 4 * LONG_SIZE


def test_a_small_answer_that_is_not_taken_at_once_goes_on(host):
    """Its buffer is that of the next read."""
    here, there = socket.socketpair()
    here.settimeout(20)
    call = Call("s", (Part(0, Step(wait=READ), RANGES),))
    connection = Connection(ServedChannel(there, 0.2), SocketCalls(host))
    buffer = memoryview(bytearray(65_536))
    here.sendall(b"".join(pack_text(TEMPLATE, pack_template(call), 1, 0)))
    assert connection.go_on(buffer, 0.0) == ANSWERED
    here.recv(HEAD_NBYTES)
    n, frame = 0, b"".join(map(bytes, pack_frame(call, 0, 2)))
    while connection.go_on(buffer, 0.0) != ROOM:
        here.sendall(frame)
        n += 1
    with calling(host) as other:
        # By another socket, whose answers are other buffers.
        add(host, 1)
        [answer] = other.call(call)
    found = bytearray()
    while connection.n_unsent or len(found) < n * (HEAD_NBYTES + 32 + 4 * 28):
        found += here.recv(10**6)
        connection.go_on(buffer, 0.0)
    assert answer.arrays[0].tolist() == [1.0] * 28
    one = HEAD_NBYTES + 32 + 4 * 28
    assert len(found) == n * one
    assert {bytes(found[k : k + one]) for k in range(0, n * one, one)} == {
        bytes(found[:one])
    }
    connection.end()
    here.close()


def test_a_call_that_waits_is_answered_before_a_read_behind_it(
    host, server, call_socket
):
    for hosted in host.shards.values():
        hosted.shard.begin_run(RUN, BSP(), 2)
    call = read_call()
    call_socket.ask(call)
    other = CallSocket(host, server)
    with other.socket:
        for clock in range(5):
            pulled = Step(run=RUN, rank=0, clock=clock + 1, wait=READ)
            waits = Call("s", (Part(0, pulled, RANGES),))
            call_socket.send(waits)
            for rank in (0, 1):
                data = np.ones(LAYOUT.pieces[0][0].size, "f4")
                step = Step(
                    MODEL,
                    (Item(0, 0, data),),
                    run=RUN,
                    rank=rank,
                    clock=clock,
                    tick=True,
                    sequence=clock,
                )
                other.ask(Call("s", (Part(0, step),)))
            head, _ = call_socket.receive()
            assert head.kind in (ANSWER, REFUSAL)
            call_socket.ask(call)


def test_an_idle_socket_lets_go_of_a_shard_that_is_gone(host, call_socket):
    call_socket.ask(read_call(0))
    call_socket.ask(read_call(1))
    call_socket.ask(read_call(0))
    hosted = weakref.ref(host.shards["s", 0])
    host.shards.pop(("s", 0)).close()
    call_socket.calls.let_go()
    # Of what is there it goes on.
    call_socket.ask(read_call(1))
    call_socket.send(read_call(0))
    assert call_socket.receive()[0].kind == REFUSAL
    gc.collect()
    assert hosted() is None


OTHER = {
    "a body": Head(CALL, 8, template=0),
    "versions": Head(CALL, 8, flags=HAS_LEAST),
    "a rate": Head(CALL, flags=HAS_LR),
    "a weight": Head(CALL, weight=2.0),
    "no weight": Head(CALL, weight=float("nan")),
    "no clock": Head(CALL, clock=-2),
    "no sequence": Head(CALL, sequence=-2),
    "no floor": Head(CALL, floor=-2),
    "a template": Head(TEMPLATE, 0),
    "a fetch": Head(FETCH, 0),
    "an answer": Head(ANSWER),
    "a template that nobody said": Head(CALL, template=5),
    "a push": Head(CALL, template=1),
    "a tick": Head(CALL, template=2),
}


@pytest.mark.parametrize("n", [NOW_NBYTES // 4, NOW_NBYTES // 4 + 1])
def test_a_form_keeps_no_buffer_for_more_than_a_little(host, n):
    """A host may have thousands of sockets, and each of them many templates."""
    [hosted, *_] = hosted_shards(layout=LONG, rule=None)
    host.shards["s", 0] = hosted
    call = Call("s", (Part(0, Step(wait=READ), (("float32", 0, n),)),))
    calls = SocketCalls(host)
    calls.begin(
        Head(TEMPLATE), [pack_text(TEMPLATE, pack_template(call), 1, 0)[1]], 0.0
    )
    calls.begin(Head(CALL), [], 0.0)
    found = calls.read_now(pack_head(Head(CALL)))
    assert (found is not None) == (4 * n <= NOW_NBYTES)


@pytest.mark.parametrize("head", OTHER.values(), ids=list(OTHER))
def test_a_frame_that_is_no_plain_read_is_looked_at_closely(host, head):
    calls = SocketCalls(host)
    given = (Item(0, 0, np.ones(LAYOUT.pieces[0][0].size, "f4")),)
    push = Step(ADD, given, producer=2, sequence=0)
    tick = Step(run=RUN, rank=0, clock=0, tick=True, sequence=0)
    for template, call in enumerate(
        [read_call(), *(Call("s", (Part(0, step),)) for step in (push, tick))]
    ):
        text = pack_text(TEMPLATE, pack_template(call), 1, template)[1]
        answer: Any = calls.begin(Head(TEMPLATE, template=template), [text], 0.0)
        assert unpack_head(answer[0]).kind == ANSWER
    read = pack_head(Head(CALL))
    calls.begin(Head(CALL), [], 0.0)
    assert calls.read_now(read) is not None
    assert calls.read_now(pack_head(head)) is None
    assert calls.read_now(b"GET / HTTP/1.1\r\n".ljust(64)) is None


@pytest.mark.parametrize("n", [2**8, 2**12, 2**16], ids=["now", "small", "straight"])
def test_no_answer_is_torn(host, server, n):
    """By a thread that publishes about as often as an answer is copied."""
    layout = Layout.build({"w": ((n,), "int64"), "v": ((64,), "int32")}, 1)
    [hosted, *_] = hosted_shards(layout=layout, rule=None)
    host.shards["s", 0] = hosted
    segment, rng = hosted.shard.segment, np.random.default_rng(0)
    pauses = rng.integers(0, 20_000, 1000).tolist()
    ranges = tuple((dtype, 0, size) for dtype, size in layout.lengths.items())
    call, over = Call("s", (Part(0, Step(wait=READ), ranges),)), threading.Event()

    def publish() -> None:
        publication = Publication(segment)
        side, version = 1 - publication.old.weight_sides[0], publication.flip
        for at, weights in enumerate(segment.weights[side]):
            publication.record.weight_sides[at] = side
            # What is copied first and last: more would only make it slower.
            weights[0] = weights[-1] = version
        publication.record.plain[VERSION] = version
        publication.commit()

    def run() -> None:
        while not over.is_set():
            # In its turn, as a reader that updates overtake twice takes one too.
            with hosted.turn(PATIENCE):
                publish()
            sum(range(pauses[segment.flip % 1000]))

    thread, versions = threading.Thread(target=run), list[int]()
    call_socket = CallSocket(host, server)
    # Else a reader that has got its turn waits for the interpreter, 5 ms each time.
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        for _ in range(400):
            call_socket.send(call)
            try:
                head, said = call_socket.receive()
            except AssertionError:  # its answer has no end
                call_socket.socket.close()
                # It is sent from where it lies again: that is what is looked at.
                segment.copied_until, call_socket = 0.0, CallSocket(host, server)
                continue
            if head.kind == REFUSAL:
                continue
            data = np.frombuffer(said, "u1")
            w, v = data[32 : 32 + 8 * n].view("i8"), data[32 + 8 * n :].view("i4")
            found = {*data[8:16].view("i8").tolist(), *w[[0, -1]], *v[[0, -1]]}
            assert len(found) == 1
            versions += found
    finally:
        over.set()
        thread.join(10)
        sys.setswitchinterval(before)
        call_socket.socket.close()
    assert versions == sorted(versions)
    assert versions[-1] > 10

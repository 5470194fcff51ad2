"""Small reads, which are answered out of one buffer, beside all else of a lane."""

from __future__ import annotations

import gc
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.lane_answers import NOW_NBYTES
from daskps.cluster.host.lane_calls import LaneCalls
from daskps.cluster.lane.connection import ANSWERED, ROOM, Connection
from daskps.cluster.lane.forms import say_form
from daskps.cluster.lane.frames import (
    ANSWER,
    CALL,
    FETCH,
    FORM,
    HAS_LEAST,
    HAS_LR,
    HEAD_NBYTES,
    REFUSAL,
    Head,
    pack_head,
    pack_text,
    unpack_head,
)
from daskps.cluster.lane.served import ServedChannel
from daskps.cluster.lane.serving import LaneServer
from daskps.cluster.wire.messages import Call, Part
from daskps.consistency import BSP
from daskps.layout.arrays import Layout
from daskps.shards.memory.format import VERSION
from daskps.shards.memory.publication import Publication
from daskps.shards.steps import ADD, MODEL, READ, Item, Step, Ticket
from tests.cluster.hosted import bare_host
from tests.cluster.laned import LAYOUT, calling, hosted_shards, pack_frame
from tests.shards.making import held

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


class Lane:
    """A lane of a host, which a server serves; and who calls."""

    def __init__(self, host: ShardHost, server: LaneServer) -> None:
        self.socket, there = socket.socketpair()
        self.socket.settimeout(20)
        channel = ServedChannel(there, 0.2)
        self.calls = LaneCalls(host)
        self.connection = Connection(channel, self.calls)
        server.add(self.connection)
        self._forms: dict[str, int] = {}
        self._number = 0

    def send(self, call: Call) -> None:
        """Send a call, after its form if that is new."""
        self._number += 1
        said = say_form(call)
        form = self._forms.get(repr(said))
        if form is None:
            form = self._forms[repr(said)] = len(self._forms)
            text = pack_text(FORM, said, self._number, form)
            self.socket.sendall(b"".join(text))
            assert self.receive()[0].kind == ANSWER
            self._number += 1
        frame = pack_frame(call, form, self._number)
        self.socket.sendall(b"".join(bytes(memoryview(b).cast("B")) for b in frame))

    def receive(self) -> tuple[Head, bytes]:
        head = unpack_head(self.exactly(HEAD_NBYTES))
        assert head.number == self._number
        return head, self.exactly(head.nbytes)

    def exactly(self, n: int) -> bytes:
        found = bytearray()
        while len(found) < n:
            got = self.socket.recv(n - len(found))
            assert got, "the lane has ended"
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
def server() -> Iterator[LaneServer]:
    made = LaneServer(lambda _: None)
    yield made
    made.close(10)


@pytest.fixture
def lane(host, server) -> Iterator[Lane]:
    made = Lane(host, server)
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


def test_small_reads_have_what_others_have_pushed(host, lane):
    call, first = read_call(), lane.ask(read_call())
    for n in range(40):
        assert lane.ask(call)[32:] == first[32:]
        if n % 10 == 9:
            add(host, n)
            shard = host.shards["s", 0].shard
            [weights, *_] = held(shard.segment)
            first = b" " * 32 + weights[2:30].tobytes()


def test_reads_and_pushes_in_turn(host, lane):
    """So many that a thread stays with the lane."""
    call = read_call()
    given = (Item(0, 0, np.ones(LAYOUT.pieces[0][0].size, "f4")),)
    for n in range(100):
        step = Step(ADD, given, producer=2, sequence=n)
        lane.ask(Call("s", (Part(0, step),)))
        found = np.frombuffer(lane.ask(call)[32:], "f4")
        assert set(found) == {n + 1.0}


def test_small_reads_and_large_ones_in_turn(host, lane):
    [hosted, *_] = hosted_shards(layout=LONG, rule=None)
    host.shards["s", 0] = hosted
    short, long = (
        Call("s", (Part(0, Step(wait=READ), (("float32", 0, n),)),))
        for n in (10, LONG_SIZE)
    )
    for _ in range(3):
        assert len(lane.ask(short)) == 32 + 40
        assert len(lane.ask(long)) == 32 + 4 * LONG_SIZE


def test_a_small_answer_that_is_not_taken_at_once_goes_on(host):
    """Its buffer is that of the next read."""
    here, there = socket.socketpair()
    here.settimeout(20)
    call = Call("s", (Part(0, Step(wait=READ), RANGES),))
    connection = Connection(ServedChannel(there, 0.2), LaneCalls(host))
    buffer = memoryview(bytearray(65_536))
    here.sendall(b"".join(pack_text(FORM, say_form(call), 1, 0)))
    assert connection.go_on(buffer, 0.0) == ANSWERED
    here.recv(HEAD_NBYTES)
    n, frame = 0, b"".join(map(bytes, pack_frame(call, 0, 2)))
    while connection.go_on(buffer, 0.0) != ROOM:
        here.sendall(frame)
        n += 1
    with calling(host) as other:
        # By another lane, whose answers are other buffers.
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


def test_a_call_that_waits_is_answered_before_a_read_behind_it(host, server, lane):
    for hosted in host.shards.values():
        hosted.shard.begin_run(RUN, BSP(), 2)
    call = read_call()
    lane.ask(call)
    other = Lane(host, server)
    with other.socket:
        for clock in range(5):
            pulled = Step(run=RUN, rank=0, clock=clock + 1, wait=READ)
            waits = Call("s", (Part(0, pulled, RANGES),))
            lane.send(waits)
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
            head, _ = lane.receive()
            assert head.kind in (ANSWER, REFUSAL)
            lane.ask(call)


def test_an_idle_lane_lets_go_of_a_shard_that_is_gone(host, lane):
    lane.ask(read_call(0))
    lane.ask(read_call(1))
    lane.ask(read_call(0))
    hosted = weakref.ref(host.shards["s", 0])
    host.shards.pop(("s", 0)).close()
    lane.calls.let_go()
    # Of what is there it goes on.
    lane.ask(read_call(1))
    lane.send(read_call(0))
    assert lane.receive()[0].kind == REFUSAL
    gc.collect()
    assert hosted() is None


OTHER = {
    "a body": Head(CALL, 8, form=0),
    "versions": Head(CALL, 8, flags=HAS_LEAST),
    "a rate": Head(CALL, flags=HAS_LR),
    "a weight": Head(CALL, weight=2.0),
    "no weight": Head(CALL, weight=float("nan")),
    "no clock": Head(CALL, clock=-2),
    "no sequence": Head(CALL, sequence=-2),
    "no floor": Head(CALL, floor=-2),
    "a form": Head(FORM, 0),
    "a fetch": Head(FETCH, 0),
    "an answer": Head(ANSWER),
    "a form that nobody said": Head(CALL, form=5),
    "a push": Head(CALL, form=1),
    "a tick": Head(CALL, form=2),
}


@pytest.mark.parametrize("n", [NOW_NBYTES // 4, NOW_NBYTES // 4 + 1])
def test_a_form_keeps_no_buffer_for_more_than_a_little(host, n):
    """A host may have thousands of lanes, and each of them many forms."""
    [hosted, *_] = hosted_shards(layout=LONG, rule=None)
    host.shards["s", 0] = hosted
    call = Call("s", (Part(0, Step(wait=READ), (("float32", 0, n),)),))
    calls = LaneCalls(host)
    calls.begin(Head(FORM), [pack_text(FORM, say_form(call), 1, 0)[1]], 0.0)
    calls.begin(Head(CALL), [], 0.0)
    found = calls.read_now(pack_head(Head(CALL)))
    assert (found is not None) == (4 * n <= NOW_NBYTES)


@pytest.mark.parametrize("head", OTHER.values(), ids=list(OTHER))
def test_a_frame_that_is_no_plain_read_is_looked_at_closely(host, head):
    calls = LaneCalls(host)
    given = (Item(0, 0, np.ones(LAYOUT.pieces[0][0].size, "f4")),)
    push = Step(ADD, given, producer=2, sequence=0)
    tick = Step(run=RUN, rank=0, clock=0, tick=True, sequence=0)
    for form, call in enumerate(
        [read_call(), *(Call("s", (Part(0, step),)) for step in (push, tick))]
    ):
        text = pack_text(FORM, say_form(call), 1, form)[1]
        answer: Any = calls.begin(Head(FORM, form=form), [text], 0.0)
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
        sum(range(pauses[version % 1000]))

    def run() -> None:
        while not over.is_set():
            publish()

    thread, versions = threading.Thread(target=run), list[int]()
    lane = Lane(host, server)
    thread.start()
    try:
        for _ in range(400):
            lane.send(call)
            try:
                head, said = lane.receive()
            except AssertionError:  # its answer has no end
                lane.socket.close()
                # It is sent from where it lies again: that is what is looked at.
                segment.copied_until, lane = 0.0, Lane(host, server)
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
        lane.socket.close()
    assert versions == sorted(versions)
    assert versions[-1] > 10

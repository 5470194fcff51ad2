"""Plain reads that the threads of lanes answer without Python, beside all else."""

from __future__ import annotations

import ctypes
import gc
import select
import socket
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from daskps.cluster.host.compiled_reads import CompiledReads
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.lane_calls import LaneCalls
from daskps.cluster.lane import plain_reads
from daskps.cluster.lane.connection import Connection
from daskps.cluster.lane.forms import say_form
from daskps.cluster.lane.frames import (
    ANSWER,
    FORM,
    HEAD_NBYTES,
    REFUSAL,
    Head,
    pack_text,
    unpack_head,
)
from daskps.cluster.lane.served import ServedChannel
from daskps.cluster.lane.serving import LaneServer
from daskps.cluster.wire.messages import Call, Part
from daskps.config import cache_dir
from daskps.consistency import BSP
from daskps.kernels import system
from daskps.layout.arrays import Layout
from daskps.shards.steps import ADD, MODEL, READ, Item, Step, Ticket
from tests.cluster.hosted import bare_host
from tests.cluster.laned import LAYOUT, hosted_shards, pack_frame
from tests.shards.making import held

pytestmark = pytest.mark.skipif(not system.IS_KNOWN, reason="no such C library")
RUN = 7
LONG_SIZE = 2**19
LONG = Layout.build({"w": ((LONG_SIZE,), "float32")}, 1)
RANGES = (("float32", 2, 30),)


@pytest.fixture(autouse=True)
def loops() -> None:
    plain_reads.compiled(cache_dir())


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
        self.reads = CompiledReads(channel.fileno())
        self.calls = LaneCalls(host, self.reads)
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


def test_reads_are_answered_without_python_once_their_form_is_known(host, lane):
    call, first = read_call(), lane.ask(read_call())
    for n in range(40):
        assert lane.ask(call)[32:] == first[32:]
        if n % 10 == 9:
            add(host, n)
            shard = host.shards["s", 0].shard
            [weights, *_] = held(shard.segment)
            first = b" " * 32 + weights[2:30].tobytes()
    assert lane.reads.counted[0] == 41
    # Also while this thread keeps the interpreter, from the question to the answer.
    library = ctypes.PyDLL(None)
    asked = b"".join(pack_frame(call, 0, lane._number + 1))
    polled = ctypes.c_int64(lane.socket.fileno() | select.POLLIN << 32)
    assert library.send(lane.socket.fileno(), asked, len(asked), 0) == len(asked)
    assert library.poll(ctypes.byref(polled), ctypes.c_ulong(1), 20_000) == 1
    lane._number += 1
    assert lane.receive()[1][32:] == first[32:]
    assert lane.reads.counted[0] == 42


def test_a_busy_lane_with_a_thread_of_its_own_goes_on_so(host, lane):
    """Of other calls and reads in turn, so many that it is busy."""
    call = read_call()
    given = (Item(0, 0, np.ones(LAYOUT.pieces[0][0].size, "f4")),)
    for n in range(100):
        step = Step(ADD, given, producer=2, sequence=n)
        lane.ask(Call("s", (Part(0, step),)))
        found = np.frombuffer(lane.ask(call)[32:], "f4")
        assert set(found) == {n + 1.0}
    assert lane.reads.counted[0] >= 98


def test_a_frame_that_takes_long_is_not_left_for_reads(host, lane):
    """It is whole, and handed to a thread that answers plain reads too."""
    [hosted, *_] = hosted_shards(layout=LONG, rule=None)
    host.shards["s", 0] = hosted
    short, long = (
        Call("s", (Part(0, Step(wait=READ), (("float32", 0, n),)),))
        for n in (10, LONG_SIZE)
    )
    for n in range(3):
        assert len(lane.ask(short)) == 32 + 40
        assert len(lane.ask(long)) == 32 + 4 * LONG_SIZE
        assert lane.reads.counted[0] == n + 1


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
            n = lane.reads.counted[0]
            lane.ask(call)
            assert lane.reads.counted[0] == n + 1


def test_an_idle_lane_lets_go_of_a_shard_that_is_gone(host, lane):
    lane.ask(read_call(0))
    lane.ask(read_call(1))
    lane.ask(read_call(0))
    assert lane.reads.counted[0] == 3
    hosted = weakref.ref(host.shards["s", 0])
    host.shards.pop(("s", 0)).close()
    assert lane.calls.let_go()
    lane.connection.home.take(lane.connection)
    # Of what is there it goes on.
    lane.ask(read_call(1))
    lane.send(read_call(0))
    assert lane.receive()[0].kind == REFUSAL
    assert len(lane.reads) == 1
    gc.collect()
    assert hosted() is None

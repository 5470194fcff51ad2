"""Frames of many lanes that are served together: each push once, each caller in turn."""

from __future__ import annotations

import gc
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
from daskps.cluster.host.lane_calls import LaneCalls, Parked
from daskps.cluster.lane import serving
from daskps.cluster.lane.batch import MOST_FRAMES, FrameBatch
from daskps.cluster.lane.connection import Connection
from daskps.cluster.lane.forms import say_form
from daskps.cluster.lane.frames import (
    CALL,
    FORM,
    HEAD_NBYTES,
    REFUSAL,
    ROW_NBYTES,
    Head,
    pack_head,
    pack_text,
    unpack_head,
    unpack_rows,
)
from daskps.cluster.lane.served import ServedChannel
from daskps.cluster.lane.waits import ANSWERED, BATCH, OTHERS, ROOM
from daskps.cluster.wire.messages import Answer, Call, Part
from daskps.shards.memory.format import LOST_FROM, LOST_TO
from daskps.shards.producers import find_row
from daskps.shards.steps import ADD, GRADIENT, READ, Item, Step
from tests.cluster.callers import counted
from tests.cluster.hosted import bare_host, shared_shard
from tests.cluster.lane.served import MANY, PARK, Calls, Peer, frame, served, unserved
from tests.cluster.laned import hosted_shards, pack_frame
from tests.seams import mutex_of

BUFFER = memoryview(bytearray(65_536))
#: Calls of Python that these take of their host in a full batch, from the bytes to those
#: of the answer. To be lowered by who makes the road shorter.
ADD_CALLS, PUSH_CALLS = 112, 80


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with bare_host(None, *hosted_shards()) as made:
        yield made


def push(producer: int, sequence: int, kind: str = ADD) -> Call:
    items = (Item(0, 0, np.full(30, producer, "f4")),)
    step = Step(kind, items, producer=producer, sequence=sequence, owned=True)
    return Call("s", (Part(0, step),), wait_seconds=30.0)


class Lane:
    """A lane whose host's end this thread serves."""

    def __init__(self, host: ShardHost, call: Call) -> None:
        here, self.socket = socket.socketpair()
        self.socket.settimeout(10)
        self.connection = Connection(ServedChannel(here, 0.001), LaneCalls(host))
        self.socket.sendall(b"".join(pack_text(FORM, say_form(call), 1, 0)))
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
def lanes(host) -> Iterator[list[Lane]]:
    made = [Lane(host, push(k + 1, 1)) for k in range(4)]
    yield made
    for lane in made:
        lane.close()


def take(lanes: list[Lane], calls: list[Call]) -> FrameBatch[Connection]:
    """Have a batch take a call of each lane."""
    batch: FrameBatch[Connection] = FrameBatch()
    for lane, call in zip(lanes, calls, strict=True):
        lane.send(call)
        assert lane.connection.go_on(BUFFER, 0.0, batch) == BATCH
    return batch


def finish(batch: FrameBatch[Connection]) -> list[int]:
    return [connection.reply(found) for connection, found in batch.serve()]


def weight(host: ShardHost, shard: int = 0) -> float:
    segment = host.shards["s", shard].shard.segment
    return float(segment.weights_of(segment.current, 0)[0])


def test_pushes_of_a_batch_are_applied_in_one_pass(host, lanes):
    segment = host.shards["s", 0].shard.segment
    batch = take(lanes, [push(k + 1, 1) for k in range(4)])
    assert (segment.flip, weight(host)) == (0, 0.0)
    assert finish(batch) == [ANSWERED] * 4
    assert segment.flip == 1
    # One after the other: each of them has a version of its own.
    assert [lane.receive().version for lane in lanes] == [1, 2, 3, 4]
    assert weight(host) == 1 + 2 + 3 + 4
    assert finish(batch) == []


def test_a_push_that_comes_twice_in_a_batch_counts_once(host, lanes):
    twice = Lane(host, push(1, 1))
    batch = take([lanes[0], twice], [push(1, 1), push(1, 1)])
    finish(batch)
    assert weight(host) == 1
    # And again in a later one, beside a new one.
    finish(take([twice, lanes[0]], [push(1, 1), push(1, 2)]))
    assert weight(host) == 2
    twice.close()


def test_one_that_is_refused_leaves_the_others(host, lanes):
    finish(take([lanes[1]], [push(2, 100)]))
    assert lanes[1].receive() is not None
    # Nobody can tell any more whether it is a repeat: no room was left to keep that.
    row = find_row(host.shards["s", 0].shard.segment.current, 2)
    assert row is not None
    row[[LOST_FROM, LOST_TO]] = 0, 64
    finish(take(lanes[:3], [push(1, 1), push(2, 1), push(3, 1)]))
    found = [lane.receive() for lane in lanes[:3]]
    assert [row and row.version for row in found] == [2, None, 3]
    assert weight(host) == 2 + 1 + 3
    host.shards["s", 0].shard.generation += 1
    finish(take(lanes[:3], [push(k + 1, 200) for k in range(3)]))
    assert [lane.receive() for lane in lanes[:3]] == [None] * 3
    assert weight(host) == 2 + 1 + 3


def test_who_serves_the_shard_meanwhile_serves_a_batch(host, lanes):
    batch = take(lanes, [push(k + 1, 1) for k in range(4)])
    host.shards["s", 0].serve()
    assert weight(host) == 10
    assert finish(batch) == [ANSWERED] * 4
    assert weight(host) == 10


def test_what_another_one_is_at_is_answered_by_that_one(host, lanes):
    hosted = host.shards["s", 0]
    batch = take(lanes, [push(k + 1, 1) for k in range(4)])
    with mutex_of(hosted):
        assert finish(batch) == [OTHERS] * 4
    told = []
    for lane in lanes:
        waiting = lane.connection.waiting
        assert waiting is not None
        waiting.then(lambda: told.append(1))
    assert not told
    hosted.serve()
    assert len(told) == 4
    assert weight(host) == 10


def test_a_shard_that_cannot_be_served_ends_no_lane(host, lanes, monkeypatch):
    """All of a host's lanes have the thread that serves it."""
    hosted = host.shards["s", 0]

    def fail() -> None:
        raise OSError("the file with the locks is gone")

    with monkeypatch.context() as patch:
        patch.setattr(hosted, "serve", fail)
        batch = take(lanes, [push(k + 1, 1) for k in range(4)])
        assert finish(batch) == [OTHERS] * 4
    hosted.serve()
    assert weight(host) == 10


def test_a_lane_that_ends_takes_back_what_was_not_applied(host, lanes):
    hosted = host.shards["s", 0]
    batch = take(lanes, [push(k + 1, 1) for k in range(4)])
    with mutex_of(hosted):
        finish(batch)
    lanes[0].connection.end()
    hosted.serve()
    assert weight(host) == 2 + 3 + 4


def test_a_caller_that_is_gone_has_pushed_all_the_same(host, lanes):
    batch = take(lanes, [push(k + 1, 1) for k in range(4)])
    lanes[0].connection.channel.shut()
    [first, *others] = batch.serve()
    with pytest.raises(OSError, match="pipe"):
        first[0].reply(first[1])
    for connection, found in others:
        assert connection.reply(found) == ANSWERED
    assert weight(host) == 10


def test_a_batch_waits_for_no_other_process(tmp_path):
    hosted = shared_shard(tmp_path)
    looks: list[Any] = []
    call = push(1, 1)
    item = Item(0, 0, np.ones(1000))
    call = call._replace(parts=(Part(0, call.step._replace(items=(item,))),))
    with bare_host(None, hosted) as host, ExitStack() as stack:
        hosted.shard.segment.words[5] = hosted.shard.generation
        node: Any = host.worker
        node.loop = SimpleNamespace(add_callback=looks.append)
        lane = Lane(host, call)
        stack.callback(lane.close)
        assert hosted.block is not None
        other = hosted.block.lock()
        other.acquire(0)
        assert finish(take([lane], [call])) == [OTHERS]
        waiting = lane.connection.waiting
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


def test_a_read_of_a_batch_that_waits_is_parked(host):
    step = Step(wait=READ, at_least=2)
    read = Call("s", (Part(0, step, (("float32", 0, 30),)),), wait_seconds=30.0)
    reader, lane = Lane(host, read), Lane(host, push(1, 1))
    # What it waits for comes in the same batch, but for one.
    assert finish(take([reader, lane], [read, push(1, 1)])) == [OTHERS, ANSWERED]
    assert finish(take([lane], [push(1, 2)])) == [ANSWERED]
    waiting = reader.connection.waiting
    assert waiting is not None
    assert waiting.done
    reader.close()
    lane.close()


def test_a_full_batch_brings_no_collection_of_garbage(host):
    """Each would be a step towards one of all objects, which takes longer than all else."""
    found: list[int] = []

    class Last:
        """Is served after the shards, when there is most."""

        def serve(self) -> None:
            found.append(gc.get_count()[0])

    with ExitStack() as opened:
        made = [Lane(host, push(k + 1, 1)) for k in range(MOST_FRAMES)]
        for lane in made:
            opened.callback(lane.close)
        finish(take(made, [push(k + 1, 1) for k in range(MOST_FRAMES)]))
        gc.disable()
        opened.callback(gc.enable)
        # Other threads of this process make objects too: what counts is the least.
        for turn in range(2, 7):
            batch: FrameBatch[Connection] = FrameBatch()
            for k, lane in enumerate(made):
                lane.receive()
                lane.send(push(k + 1, turn))
            gc.collect(0)
            for lane in made:
                assert not batch.is_full
                lane.connection.go_on(BUFFER, 0.0, batch)
            assert batch.is_full
            batch.queues[Last()] = None
            finish(batch)
    assert 0 < min(found) < gc.get_threshold()[0]


@pytest.mark.parametrize(("kind", "most"), [(ADD, ADD_CALLS), (GRADIENT, PUSH_CALLS)])
def test_a_push_in_a_batch_takes_few_calls(host, kind, most):
    made = [Lane(host, push(k + 1, 1, kind)) for k in range(MOST_FRAMES)]
    batch: FrameBatch[Connection] = FrameBatch()

    def go_on() -> None:
        for lane in made:
            lane.connection.go_on(BUFFER, 0.0, batch)
        finish(batch)

    for sequence in (1, 2, 3):
        for k, lane in enumerate(made):
            lane.send(push(k + 1, sequence, kind))
        found = counted(go_on)
    assert len(found) / MOST_FRAMES <= most
    for lane in made:
        lane.close()


# -- connections without shards ------------------------------------------------------


@pytest.fixture
def peer() -> Iterator[Peer]:
    with unserved() as found:
        yield found


def test_a_frame_of_a_batch_is_answered_with_it(peer):
    batch: FrameBatch[Connection] = FrameBatch()
    peer.socket.sendall(frame(b"a") + frame(b"b"))
    for body in (b"a", b"b"):
        assert peer.connection.go_on(BUFFER, 0.0, batch) == BATCH
        assert peer.connection.is_mine
        assert finish(batch) == [ANSWERED]
        assert peer.receive()[1] == body


def test_the_answer_of_a_batch_that_is_not_taken_is_kept(peer):
    batch: FrameBatch[Connection] = FrameBatch()
    peer.send(form=MANY, clock=10**6)
    assert peer.connection.go_on(BUFFER, 0.0, batch) == BATCH
    assert finish(batch) == [ROOM]
    found = b""
    while peer.connection.go_on(BUFFER, 0.0) == ROOM:
        found += peer.socket.recv(10**6)
    found += peer.exactly(HEAD_NBYTES + 10**6 - len(found))
    assert found[HEAD_NBYTES:] == b"\1" * 10**6


def test_a_read_of_a_batch_whose_turn_does_not_come_waits(peer):
    batch: FrameBatch[Connection] = FrameBatch()
    peer.send(form=PARK)
    assert peer.connection.go_on(BUFFER, 0.0, batch) == BATCH
    [parked] = peer.calls.parked
    parked.done = parked.is_busy = True
    assert finish(batch) == [OTHERS]
    assert peer.connection.claim(parked) is parked


# -- turns ---------------------------------------------------------------------------


class Gate(Calls):
    """Keeps the selector until all of a test's callers have said something."""

    def __init__(self) -> None:
        super().__init__()
        self.is_begun, self.may_end = threading.Event(), threading.Event()

    def begin(self, head: Head, body: Any, seconds: float, queues: Any = None) -> Any:
        self.is_begun.set()
        assert self.may_end.wait(10)
        return super().begin(head, body, seconds, queues)


def test_who_says_much_at_once_takes_turns_with_the_others(monkeypatch):
    """Its second frame is served when all were answered who came with the first."""
    monkeypatch.setattr(serving, "MOST_STAYING", 0)
    answered: list[int] = []
    told = select.poll()

    class Much(Calls):
        def begin(
            self, head: Head, body: Any, seconds: float, queues: Any = None
        ) -> Any:
            answered.append(len(told.poll(0)))
            return super().begin(head, body, seconds, queues)

    with served() as lanes:
        gate, much = lanes.connect(), lanes.connect()
        little = [lanes.connect() for _ in range(5)]
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


def test_a_head_of_a_batch_is_looked_at_alone():
    """Bytes that are no frame end their lane, and no other of the batch."""
    batch: FrameBatch[Connection] = FrameBatch()
    peers = []
    for _ in range(2):
        here, there = socket.socketpair()
        calls = Calls()
        connection = Connection(ServedChannel(here, 0.001), calls)
        peers.append(Peer(there, connection, calls))
    peers[0].socket.sendall(pack_head(Head(CALL, 1, 7)) + b"x")
    assert peers[0].connection.go_on(BUFFER, 0.0, batch) == BATCH
    peers[1].socket.sendall(b"GET / HTTP/1.1" + bytes(50))
    with pytest.raises(Exception, match="no frame"):
        peers[1].connection.go_on(BUFFER, 0.0, batch)
    assert finish(batch) == [ANSWERED]
    for peer in peers:
        peer.connection.end()
        peer.socket.close()

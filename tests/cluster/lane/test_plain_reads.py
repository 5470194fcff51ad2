"""The loop that answers plain reads: what it says, and what it leaves to Python."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.cluster.host.compiled_reads import MOST_NBYTES, CompiledReads
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.host.shard_reads import ShardRead
from daskps.cluster.lane import plain_answers, plain_reads
from daskps.cluster.lane.desk import Desk, SharedDesk
from daskps.cluster.lane.frames import (
    ANSWER,
    CALL,
    FORM,
    HAS_LEAST,
    HAS_LR,
    MOST_FORMS,
    Head,
    pack_answers,
    pack_head,
    unpack_head,
)
from daskps.cluster.lane.plain_reads import Loops
from daskps.cluster.lane.plain_words import ASKED, QUIET, TORN, UNSENT, WOKEN
from daskps.cluster.lane.tail import TAIL_NBYTES
from daskps.cluster.wire.messages import Answer, Call, Part
from daskps.config import cache_dir
from daskps.kernels import system
from daskps.layout.arrays import Layout
from daskps.shards.deputy import CLOSED, set_gate
from daskps.shards.memory.format import VERSION
from daskps.shards.memory.publication import Publication
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, BARRIER, GRADIENT, READ, Item, Step
from tests.shards.making import RUN, bsp, make, send, step

pytestmark = pytest.mark.skipif(not system.IS_KNOWN, reason="no such C library")

LAYOUT = Layout.build({"w": ((9,), "float32"), "b": ((4,), "float64")}, 2)


#: As they are written.
INTERPRETED = Loops(plain_reads.serve_one, plain_reads.serve_many)


@pytest.fixture(scope="module", params=["python", "compiled"])
def loops(request) -> Any:
    python = request.param == "python"
    return INTERPRETED if python else plain_reads.compiled(cache_dir())


def hosted_of(shard: Shard, layout: Layout = LAYOUT, index: int = 0) -> HostedShard:
    return HostedShard("s", layout, index, shard)


class Lane:
    """Both ends of a lane, and two shards that it reads."""

    def __init__(self, loops: Loops) -> None:
        self.desk = Desk(loops, MOST_NBYTES, 1)
        self.here, self.there = socket.socketpair()
        self.here.settimeout(10.0)
        self.reads = CompiledReads(self.there.fileno())
        self.shards = [make(LAYOUT, index, ruled=()) for index in (0, 1)]
        self.hosted = [hosted_of(s, LAYOUT, i) for i, s in enumerate(self.shards)]
        self.parts = tuple(Part(i, Step(wait=READ), self.ranges(i)) for i in (0, 1))

    def ranges(self, index: int) -> tuple[tuple[str, int, int], ...]:
        n = LAYOUT.n_elements[index]["float32"]
        return ("float32", 1, n), ("float64", 0, 2)

    def serve(self, idle_ms: int = 10_000) -> tuple[int, bytes]:
        """Return why the loop ends, and what is still in the socket."""
        why = self.desk.serve(self.reads.address, idle_ms)
        self.there.setblocking(False)
        try:
            return why, self.there.recv(1 << 16)
        except BlockingIOError:
            return why, b""

    def learn(self, form: int = 0) -> None:
        assert self.reads.learn(form, Call("s", self.parts), self.hosted)

    def add(self, value: float = 1.0) -> None:
        for shard in self.shards:
            add(shard, value)

    def wanted(self, number: int) -> bytes:
        """Return what answers a frame of that number."""
        answers = []
        for part, shard in zip(self.parts, self.shards, strict=True):
            record = shard.segment.current
            vectors = shard.segment.vectors[record.side]
            arrays = tuple(vectors[dtype][a:b] for dtype, a, b in part.ranges)
            answers.append(Answer(part.shard, version=record.version, arrays=arrays))
        return b"".join(bytes(b) for b in pack_answers(answers, number))

    def received(self) -> bytes:
        self.here.setblocking(False)
        try:
            return self.here.recv(1 << 20)
        except BlockingIOError:
            return b""
        finally:
            self.here.settimeout(10.0)


def add(shard: Shard, value: float = 1.0, slope: float = 0.0) -> None:
    given = tuple(
        Item(
            at,
            0,
            (value + slope * np.arange(piece.size)).astype(piece.parameter.dtype),
        )
        for at, piece in enumerate(shard.segment.pieces)
    )
    send(shard, Step(ADD, given, producer=1, sequence=shard.segment.flip))


@pytest.fixture
def lane(loops) -> Iterator[Lane]:
    made = Lane(loops)
    with made.here, made.there:
        yield made


def head(**said: Any) -> bytes:
    return pack_head(Head(CALL, **said))


#: What is no read that the loop may answer, whatever it is.
OTHER = head(form=1, number=99)


# -- what it answers ----------------------------------------------------------------


def test_it_says_what_python_would(lane):
    lane.learn()
    for number in (1, 2**31, 2**32 - 1):
        lane.add(number)
        lane.here.sendall(head(number=number) + OTHER)
        assert lane.serve() == (ASKED, OTHER)
        assert lane.received() == lane.wanted(number)
    assert lane.reads.counted == (3, 3 * len(lane.wanted(0)))


def test_reads_wait_for_versions(lane):
    lane.learn()
    lane.add()
    for least in ((1, 1), (0, 1)):
        frame = head(flags=HAS_LEAST, nbytes=16) + struct.pack("<qq", *least)
        lane.here.sendall(frame + OTHER)
        assert lane.serve() == (ASKED, OTHER)
        assert lane.received() == lane.wanted(0)
    late = head(flags=HAS_LEAST, nbytes=16) + struct.pack("<qq", 1, 2)
    lane.here.sendall(late)
    assert lane.serve() == (ASKED, late)
    lane.here.sendall(frame[:-1])
    # Which is for Python to wait for.
    assert lane.serve() == (ASKED, frame[:-1])
    assert lane.received() == b""


def test_a_trainer_reads_at_its_clock(loops):
    shard = bsp(2)
    hosted = hosted_of(shard)
    with_run = Step(run=RUN, rank=1, clock=7, wait=READ)
    call = Call("s", (Part(0, with_run, (("float64", 0, 6),)),))
    here, there = socket.socketpair()
    with here, there:
        reads, desk = CompiledReads(there.fileno()), Desk(loops, 1000, 1)
        assert reads.learn(3, call, [hosted])
        here.sendall(head(form=3, clock=0) + head(form=3, clock=1))
        assert desk.serve(reads.address, 10_000) == ASKED
        assert unpack_head(here.recv(64)).nbytes == len(here.recv(1000)) == 32 + 48
        send(shard, step(0, 0), step(1, 0))
        # A version is nothing that a trainer waits for.
        other = head(form=3, clock=1, flags=HAS_LEAST, nbytes=8) + bytes(8)
        here.sendall(other)
        assert desk.serve(reads.address, 10_000) == ASKED
        assert there.recv(1000) == other
        assert np.frombuffer(here.recv(1000)[96:]).tolist() == [1, 1, 0, 0, 0, 0]


# -- what it leaves -----------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [
        OTHER,
        head(nbytes=8),
        head(flags=HAS_LEAST),
        head(flags=HAS_LEAST, nbytes=8),
        head(flags=HAS_LR),
        head(flags=HAS_LR | HAS_LEAST, nbytes=16),
        pack_head(Head(FORM, 10, 1, 0)),
        pack_head(Head(ANSWER)),
        head(clock=-2),
        head(sequence=-2),
        head(floor=-2),
        head(weight=float("inf")),
        head(weight=float("nan")),
        head(form=MOST_FORMS),
        head(form=2**16 - 1),
        b"GET / HTTP/1.1\r\n".ljust(64),
        b"\xff" * 64,
    ],
)
def test_a_frame_that_is_no_plain_read_is_left_as_it_came(lane, frame):
    lane.learn()
    lane.here.sendall(frame + bytes(8))
    assert lane.serve() == (ASKED, frame + bytes(8))
    assert lane.received() == b""
    assert lane.reads.counted == (0, 0)


def close(lane: Lane) -> None:
    set_gate(lane.shards[1].segment, CLOSED)


def forget(lane: Lane) -> None:
    lane.reads.forget(0)


def overwrite(lane: Lane) -> None:
    """Leave a shard with a publication before the last that was begun too."""
    lane.shards[1].segment.writing += 2


@pytest.mark.parametrize("change", [close, forget, overwrite])
def test_a_shard_that_cannot_be_read_is_left(lane, change: Callable[[Lane], None]):
    lane.learn()
    change(lane)
    lane.here.sendall(head(number=1))
    assert lane.serve() == (ASKED, head(number=1))
    assert lane.received() == b""


@given(
    st.integers(0, 3), st.sampled_from([OTHER, b"x" * 64, head(nbytes=5)]), st.data()
)
def test_no_byte_is_lost_or_looked_at_twice(n, rest, data):
    """Whatever comes, in whatever pieces: Python finds what was not answered."""
    lane = Lane(INTERPRETED)
    with lane.here, lane.there:
        lane.learn()
        stream = b"".join(head(number=i, clock=i) for i in range(n)) + rest
        cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=4)))
        found = b""
        for a, b in pairwise([0, *cuts, len(stream)]):
            lane.here.sendall(stream[a:b])
            if found:
                # Python is within a frame, and has what comes of it.
                found += lane.there.recv(1000)
                continue
            why, found = lane.serve(0)
            assert why in {ASKED, QUIET}
            assert bool(found) == (why == ASKED)
            if found and lane.reads.counted[0] < n:
                # Of a read that Python answers then.
                return
        assert found == rest
        assert lane.received() == b"".join(lane.wanted(i) for i in range(n))


# -- ends ---------------------------------------------------------------------------


@pytest.mark.parametrize("held", [b"", OTHER[:63]])
def test_the_end_of_a_lane_is_for_python(lane, held):
    lane.learn()
    lane.here.sendall(held)
    lane.here.shutdown(socket.SHUT_WR)
    assert lane.serve() == (ASKED, held)


def test_it_is_torn_where_its_answer_is_wanted_no_more(lane):
    lane.learn()
    lane.here.sendall(head())
    lane.here.close()
    assert lane.serve() == (TORN, b"")


def test_shutting_the_socket_ends_it(loops):
    """In the thread that waits, by another one."""
    lane = Lane(loops)
    with lane.here, lane.there:
        lane.learn()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(lane.serve()))
        thread.start()
        lane.here.sendall(head(number=1))
        assert lane.here.recv(1000) == lane.wanted(1)
        lane.there.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert found == [(ASKED, b"")]


def test_who_says_nothing_is_quiet(lane):
    lane.learn()
    assert lane.serve(1) == (QUIET, b"")


def test_what_is_not_taken_of_an_answer_is_for_python(loops):
    layout = Layout.build({"w": ((2**17,), "float32")}, 1)
    shard = make(layout, ruled=())
    add(shard, 2.5)
    here, there = socket.socketpair()
    with here, there:
        reads, desk = CompiledReads(there.fileno()), Desk(loops, MOST_NBYTES, 1)
        part = Part(0, Step(wait=READ), (("float32", 0, 2**17),))
        assert reads.learn(0, Call("s", (part,)), [hosted_of(shard, layout)])
        here.sendall(head(number=3) + OTHER)
        assert desk.serve(reads.address, 10_000) == UNSENT
        unsent = desk.unsent
        assert there.recv(1000) == OTHER
        assert 0 < len(unsent) < 2**19
        there.settimeout(10)
        sender = threading.Thread(target=there.sendall, args=(unsent,))
        sender.start()
        found = bytearray()
        while len(found) < 96 + 2**19:
            found += here.recv(1 << 20)
        sender.join(10)
        assert set(np.frombuffer(bytes(found[96:]), "f4")) == {2.5}


# -- long answers, from where they lie ------------------------------------------------


class Long:
    """Both ends of a lane, and a shard whose answers are sent from where they lie."""

    layout = Layout.build({"w": ((2**15,), "float64"), "v": ((5000,), "int32")}, 1)

    def __init__(self, loops: Loops, shard: Shard | None = None) -> None:
        self.shard = make(self.layout, ruled=()) if shard is None else shard
        add(self.shard, slope=1.0)
        self.here, self.there = socket.socketpair()
        self.there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self.here.settimeout(10.0)
        self.reads = CompiledReads(self.there.fileno())
        self.desk = Desk(loops, MOST_NBYTES, 1)
        ranges = ("float64", 1, 2**15 - 1), ("int32", 0, 0), ("int32", 3, 4000)
        self.part = Part(0, Step(wait=READ), ranges)
        hosted = hosted_of(self.shard, self.layout)
        assert self.reads.learn(0, Call("s", (self.part,)), [hosted])
        #: What is read before a pair of updates that are seen: a copy.
        self.read(0)

    def ask(self, number: int) -> int:
        """Return why the loop ends at the frame after a read."""
        self.here.sendall(head(number=number) + OTHER)
        why = self.desk.serve(self.reads.address, 10_000)
        if why == ASKED:
            assert self.there.recv(1000) == OTHER
        return why

    def read(self, number: int) -> None:
        wanted = self.wanted(number)
        assert self.ask(number) == ASKED
        assert self.received(len(wanted)) == wanted

    def received(self, n: int) -> bytes:
        found = bytearray()
        while len(found) < n:
            got = self.here.recv(n - len(found))
            assert got, "the lane has ended"
            found += got
        return bytes(found)

    def wanted(self, number: int) -> bytes:
        record = self.shard.segment.current
        vectors = self.shard.segment.vectors[record.side]
        arrays = tuple(vectors[d][a:b] for d, a, b in self.part.ranges if b > a)
        answer = Answer(0, version=record.version, arrays=arrays)
        return b"".join(bytes(b) for b in pack_answers([answer], number))


def add_often(shard: Shard, n: int) -> None:
    for _ in range(n):
        add(shard)


@pytest.fixture
def long(loops) -> Iterator[Long]:
    made = Long(loops)
    with made.here, made.there:
        yield made


@pytest.fixture
def sends(monkeypatch) -> Iterator[tuple[Long, list[Any], list[int]]]:
    """A lane in Python; what is done after a send of many bytes; ends that were copied."""
    made, then, copied = Long(INTERPRETED), list[Any](), list[int]()
    send_now, copy_now = system.send, system.copy

    def send(fd: int, address: int, nbytes: int, flags: int) -> int:
        found = send_now(fd, address, nbytes, flags)
        if nbytes > 2**16 and then:
            then.pop()()
        return found

    def copy(to: int, source: int, nbytes: int) -> None:
        copied.append(nbytes)
        copy_now(to, source, nbytes)

    monkeypatch.setattr(plain_answers, "send", send)
    monkeypatch.setattr(plain_answers, "copy", copy)
    with made.here, made.there:
        yield made, then, copied


def test_long_answers_say_what_python_would(long):
    for number in range(1, 6):
        long.read(number)
        for _ in range(1 + (number == 3)):
            add(long.shard, number)


def test_only_the_end_of_a_long_answer_is_copied(sends):
    lane, _, copied = sends
    lane.read(1)
    add(lane.shard)
    lane.read(2)
    assert copied == 2 * [TAIL_NBYTES]
    # Others are faster than this reader, so all of it is.
    add(lane.shard)
    add(lane.shard)
    lane.read(3)
    assert copied == 2 * [TAIL_NBYTES]
    lane.read(4)
    assert copied == 3 * [TAIL_NBYTES]


def test_an_update_beside_a_long_answer_leaves_it_whole(sends):
    lane, then, _ = sends
    wanted = lane.wanted(1)
    then.append(lambda: add(lane.shard))
    assert lane.ask(1) == ASKED
    assert lane.received(len(wanted)) == wanted
    assert lane.wanted(1) != wanted


def test_a_long_answer_that_updates_run_into_has_no_end(sends):
    lane, then, copied = sends
    wanted = lane.wanted(1)
    then.append(partial(add_often, lane.shard, 2))
    assert lane.ask(1) == TORN
    lane.there.shutdown(socket.SHUT_RDWR)
    found = b""
    while got := lane.here.recv(1 << 20):
        found += got
    assert 0 < len(found) <= len(wanted) - TAIL_NBYTES
    # By whatever lane, and by Python, it is copied for a while.
    now = time.monotonic_ns() // 1_000_000
    assert lane.shard.segment.copied_until[0] > now
    other = ShardRead(lane.shard.segment, lane.part.step, lane.part.ranges, 0)
    assert other.look(0) is None
    assert other.look(0) is None
    del copied[:]
    again = Long(INTERPRETED, lane.shard)
    with again.here, again.there:
        again.read(1)
        again.read(2)
    # No end alone.
    assert copied == []


@pytest.mark.parametrize("n_updates", [0, 1, 2])
def test_what_is_not_taken_of_a_long_answer_is_copied(sends, n_updates):
    lane, then, _ = sends
    lane.there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    wanted = lane.wanted(1)
    then.append(partial(add_often, lane.shard, n_updates))
    why = lane.ask(1)
    if n_updates == 2:
        assert why == TORN
        return
    assert why == UNSENT
    unsent = lane.desk.unsent
    assert TAIL_NBYTES < len(unsent) < len(wanted)
    add(lane.shard)
    add(lane.shard)
    assert lane.received(len(wanted) - len(unsent)) + unsent == wanted


def test_what_is_not_even_begun_of_a_long_answer_is_copied(sends, monkeypatch):
    lane, _, _ = sends
    wanted, send = lane.wanted(1), system.send

    def part(fd: int, address: int, nbytes: int, flags: int) -> int:
        """Take 50 bytes, then no more."""
        if nbytes == 96:
            return send(fd, address, 50, flags)
        ctypes.set_errno(errno.EAGAIN)
        return -1

    monkeypatch.setattr(plain_answers, "send", part)
    monkeypatch.setattr(plain_answers, "wait", lambda *_: False)
    lane.here.sendall(head(number=1))
    assert plain_reads.answer_next(lane.reads.address, lane.desk._at) == UNSENT
    assert lane.received(50) + lane.desk.unsent == wanted


def test_a_thread_that_is_wanted_comes_and_lets_go(lane):
    lane.learn()
    lane.learn(2)
    lane.reads.wake()
    assert lane.serve() == (WOKEN, b"")
    lane.reads.keep(lambda _: True)
    assert len(lane.reads) == 2
    lane.reads.keep(lambda hosted: hosted is not lane.hosted[1])
    assert len(lane.reads) == 0
    lane.here.sendall(head())
    assert lane.serve() == (ASKED, head())


# -- what is learnt -----------------------------------------------------------------


def test_forms_take_the_place_of_others(lane):
    for form in (0, MOST_FORMS - 1, 0):
        lane.learn(form)
    assert len(lane.reads) == 2
    lane.here.sendall(head(form=MOST_FORMS - 1, number=1) + head(number=2))
    lane.here.shutdown(socket.SHUT_WR)
    assert lane.serve() == (ASKED, b"")
    assert lane.received() == lane.wanted(1) + lane.wanted(2)
    pushing = Step(GRADIENT, (Item(0, 0, np.zeros(1)),), wait=READ)
    assert not lane.reads.learn(0, Call("s", (Part(0, pushing),)), lane.hosted[:1])
    assert len(lane.reads) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"wait": BARRIER},
        {"generation": 2},
        {"kind": GRADIENT},
        {"run": RUN, "rank": 0, "tick": True},
        {"run": RUN, "rank": -1},
        {"run": RUN, "rank": 2**40},
        {"rank": 1},
        {"producer": 1},
    ],
)
def test_only_plain_reads_are_learnt(lane, other):
    said = Step(**{"wait": READ, **other})
    assert not lane.reads.learn(0, Call("s", (Part(0, said),)), lane.hosted[:1])


def test_neither_words_nor_locked_nor_long_reads_are_learnt(lane):
    part, hosted = lane.parts[0], lane.hosted[0]
    assert not lane.reads.learn(0, Call("s", (part,), codec="bf16"), [hosted])
    hosted.locks_reads = True
    assert not lane.reads.learn(0, Call("s", (part,)), [hosted])
    layout = Layout.build({"w": ((MOST_NBYTES,), "int8")}, 1)
    shard = make(layout, ruled=())
    for n, may in ((MOST_NBYTES - 96, True), (MOST_NBYTES - 95, False)):
        long = Part(0, Step(wait=READ), (("int8", 0, n),))
        found = lane.reads.learn(0, Call("s", (long,)), [hosted_of(shard, layout)])
        assert found == may


# -- many lanes of one thread -------------------------------------------------------


@pytest.fixture
def many(loops) -> Iterator[tuple[list[Lane], SharedDesk, select.epoll]]:
    """Give three lanes, of which the desk answers the first two."""
    lanes = [Lane(loops) for _ in range(3)]
    with select.epoll() as epoll:
        desk = SharedDesk(loops, 500, epoll.fileno())
        for lane in lanes:
            lane.learn()
            epoll.register(lane.there, select.EPOLLIN)
        for lane in lanes[:2]:
            desk.put(lane.there.fileno(), lane.reads.address)
        yield lanes, desk, epoll
        for lane in lanes:
            lane.here.close()
            lane.there.close()


def test_one_thread_answers_the_reads_of_many(many):
    lanes, desk, _ = many
    assert desk.wait(0) == ([], 0, 0)
    for number, lane in enumerate(lanes):
        lane.here.sendall(head(number=number))
    # The third is for Python, which finds all of it.
    third = lanes[2].there.fileno()
    assert desk.wait(10_000) == ([(third, select.EPOLLIN)], 0, 0)
    assert [lane.received() for lane in lanes] == [
        lanes[0].wanted(0),
        lanes[1].wanted(1),
        b"",
    ]
    assert lanes[2].there.recv(100) == head(number=2)
    assert desk.wait(1) == ([], 0, 0)
    lanes[0].here.sendall(OTHER)
    lanes[1].here.close()
    events, why, _ = desk.wait(-1)
    assert why == 0
    assert {fd for fd, _ in events} == {lane.there.fileno() for lane in lanes[:2]}
    assert lanes[0].there.recv(100) == OTHER


def test_a_lane_is_taken_from_its_thread(many):
    lanes, desk, _ = many
    number = lanes[0].there.fileno()
    desk.put(number, 0)
    desk.put(10_000, 0)
    lanes[0].here.sendall(head())
    assert desk.wait(-1) == ([(number, select.EPOLLIN)], 0, 0)


def test_a_long_answer_is_for_others(many):
    lanes, _, epoll = many
    number = lanes[0].there.fileno()
    desk = SharedDesk(INTERPRETED, len(lanes[0].wanted(0)) - 1, epoll.fileno())
    desk.put(number, lanes[0].reads.address)
    lanes[0].here.sendall(head())
    assert desk.wait(0) == ([(number, select.EPOLLIN)], 0, 0)


def test_the_lane_at_fault_is_named(many):
    lanes, desk, _ = many
    fd = lanes[1].there.fileno()
    lanes[1].there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    n = 0
    while True:
        # Nobody takes the answers.
        n += 1
        lanes[1].here.sendall(head(number=n))
        found = desk.wait(0)
        if found != ([], 0, 0):
            break
    assert found == ([], UNSENT, fd)
    taken = bytearray()
    sent = n * len(lanes[1].wanted(0)) - len(desk.unsent)
    while len(taken) < sent:
        taken += lanes[1].here.recv(sent - len(taken))
    wanted = b"".join(lanes[1].wanted(i + 1) for i in range(n))
    assert bytes(taken) + desk.unsent == wanted
    lanes[1].here.close()


def test_a_time_that_is_over_ends_it_however_much_there_is_to_read(monkeypatch):
    """Else nobody would hear of the ends of calls that wait."""
    lane, looks = Lane(INTERPRETED), []
    lane.learn()

    def epoll_wait(*args: int) -> int:
        looks.append(args)
        lane.here.sendall(head(number=len(looks)))
        return system.epoll_wait(*args)

    monkeypatch.setattr(plain_reads, "epoll_wait", epoll_wait)
    clock = iter(range(1000))
    monkeypatch.setattr(plain_reads, "monotonic", lambda: next(clock))
    with select.epoll() as epoll:
        epoll.register(lane.there, select.EPOLLIN)
        desk = SharedDesk(INTERPRETED, 500, epoll.fileno())
        desk.put(lane.there.fileno(), lane.reads.address)
        assert desk.wait(10) == ([], 0, 0)
    assert 2 <= len(looks) < 10
    assert lane.received() == b"".join(lane.wanted(k + 1) for k in range(len(looks)))
    lane.here.close()
    lane.there.close()


# -- beside others ------------------------------------------------------------------


class Served:
    """A lane that a thread of its own serves, to one shard."""

    def __init__(self, shard: Shard, layout: Layout) -> None:
        self.here, self.there = socket.socketpair()
        fd = self.there.fileno()
        self._desk = Desk(plain_reads.compiled(cache_dir()), MOST_NBYTES, 1000)
        self.reads = CompiledReads(fd)
        ranges = tuple((dtype, 0, n) for dtype, n in layout.lengths.items())
        call = Call("s", (Part(0, Step(wait=READ), ranges),))
        assert self.reads.learn(0, call, [hosted_of(shard, layout)])
        self.nbytes = 96 + sum(np.dtype(d).itemsize * n for d, _, n in ranges)
        #: Reads that an update ran into so often that the shard would have been asked.
        self.n_asked = 0
        self.is_open = True
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while self.is_open:
            why = self._desk.serve(self.reads.address, 10_000)
            self.n_asked += why == ASKED
            if why == TORN:
                self.there.shutdown(socket.SHUT_RDWR)
                return

    def read(self, number: int) -> np.ndarray | None:
        """Return an answer; None where it has no end."""
        self.here.sendall(head(number=number))
        out = np.empty(self.nbytes, np.uint8)
        view: Any = memoryview(out.data)
        while view:
            got = self.here.recv_into(view)
            if not got:
                return None
            view = view[got:]
        return out

    def close(self) -> None:
        self.is_open = False
        self.here.close()
        self.thread.join(10)
        self.there.close()


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Have a thread do something again and again."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


def test_no_answer_is_torn():
    """By a thread that publishes about as often as an answer is copied."""
    layout = Layout.build({"w": ((2**16,), "int64"), "v": ((64,), "int32")}, 1)
    shard, rng = make(layout, ruled=()), np.random.default_rng(0)
    segment, pauses = shard.segment, rng.integers(0, 20_000, 1000).tolist()

    def publish() -> None:
        publication = Publication(segment)
        side, version = 1 - publication.old.weight_sides[0], publication.flip
        for at, weights in enumerate(segment.weights[side]):
            publication.record.weight_sides[at] = side
            # What is copied first and last: more would only make it slower.
            weights[0] = weights[-1] = version
        publication.record.plain[VERSION] = version
        publication.finish()
        sum(range(pauses[version % 1000]))

    lane, versions = Served(shard, layout), list[int]()
    try:
        with beside(publish):
            for number in range(400):
                said = lane.read(number)
                if said is None:
                    # It is sent from where it lies again: that is what is looked at.
                    lane.close()
                    segment.copied_until[0] = 0
                    lane = Served(shard, layout)
                    continue
                assert unpack_head(said[:64].tobytes()).number == number
                w, v = said[96 : 96 + 2**19].view("i8"), said[96 + 2**19 :].view("i4")
                found = {*said[72:80].view("i8").tolist(), *w[[0, -1]], *v[[0, -1]]}
                assert len(found) == 1
                versions += found
    finally:
        lane.close()
    assert versions == sorted(versions)
    assert versions[-1] > 10


def test_a_read_needs_no_interpreter():
    """This thread keeps it all the time, from the question to the answer."""
    layout = Layout.build({"w": ((64,), "int64")}, 1)
    lane = Served(make(layout, ruled=()), layout)
    # The C library, called without letting go of the interpreter.
    library, asked = ctypes.PyDLL(None), head(number=7)
    try:
        lane.read(1)
        fd = lane.here.fileno()
        polled = ctypes.c_int64(fd | select.POLLIN << 32)
        assert library.send(fd, asked, len(asked), 0) == len(asked)
        assert library.poll(ctypes.byref(polled), ctypes.c_ulong(1), 20_000) == 1
        assert unpack_head(lane.here.recv(64)).number == 7
    finally:
        lane.close()
    assert lane.reads.counted == (2, 2 * lane.nbytes)

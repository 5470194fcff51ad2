"""Who serves which lane when; over socket pairs, with calls that are made up."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from distributed.security import Security

from daskps.cluster.lane import connection, selecting, serving
from daskps.cluster.lane.connection import Connection
from daskps.cluster.lane.frames import HEAD_NBYTES
from daskps.cluster.lane.served import ServedChannel
from daskps.cluster.lane.staying import Staying
from daskps.cluster.lane.waits import ANSWERED, ROOM
from tests.cluster.forks import child
from tests.cluster.lane.served import (
    ECHO,
    LONG,
    MANY,
    PARK,
    Calls,
    Peer,
    Served,
    frame,
    served,
    unserved,
)
from tests.support import open_files, until

SELECTOR = "daskps-lane-selector"


@pytest.fixture
def lanes() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lane has a thread to itself."""
    monkeypatch.setattr(serving, "MOST_STAYING", 0)


@pytest.fixture(params=["selector", "thread"])
def peer(request, monkeypatch) -> Iterator[Peer]:
    """A lane with no thread, or with one to itself."""
    monkeypatch.setattr(serving, "MOST_STAYING", int(request.param == "thread"))
    monkeypatch.setattr(selecting, "BUSY_FRAMES", 1)
    monkeypatch.setattr(selecting, "BUSY_SECONDS", 1e9)
    with served(30.0) as found:
        made = found.connect()
        made.ask()
        made.ask()
        found.connect().ask()  # so the selector is done with the last one
        yield made
        is_away = made.connection.is_away
        assert is_away == (request.param == "thread")


def is_in(found: list[Any], one: Any) -> bool:
    return one in found


def has_more(found: list[Any], n: int) -> bool:
    return len(found) > n


def threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("daskps-lane")]


# -- many lanes, few threads ---------------------------------------------------------


def test_many_lanes_are_served_by_one_thread(lanes, alone):
    peers = [lanes.connect() for _ in range(50)]
    for k in range(3):
        for peer in peers:
            peer.send(bytes([k]) * 100)
        for peer in peers:
            assert peer.receive()[1] == bytes([k]) * 100
    assert {name for p in peers for name in p.calls.threads} == {SELECTOR}
    assert len(threads()) == 1


@pytest.mark.parametrize("n", [65_536, 65_537, 3_000_000])
def test_long_bodies_and_answers_are_for_other_threads(lanes, alone, n):
    peer = lanes.connect()
    body = os.urandom(n)
    assert peer.ask(body) == body
    assert peer.ask(form=LONG, clock=n) == b"\1" * n
    assert peer.ask(b"small") == b"small"
    first, second, third = peer.calls.threads
    assert (first == SELECTOR) == (n <= 65_536)
    assert second != SELECTOR
    assert third == SELECTOR


def test_a_busy_lane_has_a_thread_until_it_is_idle(monkeypatch):
    monkeypatch.setattr(serving, "MOST_STAYING", 1)
    monkeypatch.setattr(selecting, "BUSY_SECONDS", 1e9)
    with served(0.01) as lanes:
        first, second = lanes.connect(), lanes.connect()

        def has_one() -> bool:
            second.ask()
            first.ask()
            return first.connection.is_away and not second.connection.is_away

        for _ in range(selecting.BUSY_FRAMES):
            first.ask()
        # Until then this thread may have been kept away for so long that it was idle.
        until(has_one)
        assert first.calls.threads[-1] != SELECTOR
        until(lambda: not first.connection.is_away)
        assert first.ask(b"again") == b"again"
        assert first.calls.threads[-1] == SELECTOR


@pytest.mark.parametrize("form", [ECHO, LONG])
def test_a_lane_that_is_busy_with_long_frames_keeps_its_thread(monkeypatch, form):
    """To a thread and back took a quarter of the CPU time of 1 MB."""
    monkeypatch.setattr(serving, "MOST_STAYING", 1)
    monkeypatch.setattr(selecting, "BUSY_SECONDS", 1e9)
    body = os.urandom(100_000 if form == ECHO else 10)
    with served(30.0) as lanes:
        peer = lanes.connect()
        for _ in range(selecting.BUSY_FRAMES + 3):
            found = peer.ask(body, form, clock=100_000)
            assert found == (body if form == ECHO else b"\1" * 100_000)
        assert peer.connection.is_away
        last = peer.calls.threads[selecting.BUSY_FRAMES - 1 :]
        assert len(last) == 4
        assert len({*last}) == 1
        assert SELECTOR not in last


def test_frames_arrive_whole_however_they_are_cut(peer):
    body = os.urandom(100)
    data = frame(body)
    for k in range(1, len(data)):
        peer.socket.sendall(data[:k])
        peer.socket.sendall(data[k:])
        assert peer.receive()[1] == body


def test_a_caller_that_sends_a_byte_at_a_time_keeps_nobody(lanes):
    slow, other = lanes.connect(), lanes.connect()
    data = frame(b"x" * 1000)
    for k in range(len(data) - 1):
        slow.socket.sendall(data[k : k + 1])
        assert other.ask(b"y") == b"y"
    # It holds nothing but the array of its body.
    until(lambda: len(slow.connection.channel._buffer) < HEAD_NBYTES)
    slow.socket.sendall(data[-1:])
    assert slow.receive()[1] == b"x" * 1000


def test_slow_senders_of_long_bodies_hold_no_threads(monkeypatch):
    monkeypatch.setattr(serving, "MOST_THREADS", 1)
    monkeypatch.setattr(serving, "MOST_STAYING", 0)
    with served(0.001) as lanes:
        slow = [lanes.connect() for _ in range(5)]
        for peer in slow:
            peer.socket.sendall(frame(bytes(100_000))[:70_000])
        quick = lanes.connect()
        assert quick.ask(bytes(100_000)) == bytes(100_000)
        for peer in slow:
            peer.socket.sendall(bytes(100_000 + HEAD_NBYTES - 70_000))
            assert peer.receive()[1] == bytes(100_000)


def test_no_thread_waits_twice_for_a_slow_caller(monkeypatch):
    """A byte a second of many bodies would have all threads wait for ever."""
    monkeypatch.setattr(serving, "MOST_STAYING", 0)
    waits: list[bool] = []
    receive = ServedChannel._try_receive

    def noted(self: ServedChannel, view: Any, waits_now: bool, how: int = 0) -> int:
        waits.append(waits_now)
        return receive(self, view, waits_now, how)

    data = frame(bytes(100_000))
    with served(0.001) as lanes:
        slow = lanes.connect()
        slow.socket.sendall(data[:70_000])
        until(lambda: slow.connection.is_slow)
        until(lambda: not slow.connection.is_away)
        monkeypatch.setattr(ServedChannel, "_try_receive", noted)
        for k in range(70_000, 70_005):
            n = len(waits)
            slow.socket.sendall(data[k : k + 1])
            until(partial(has_more, waits, n + 1))
        assert not any(waits)
        slow.socket.sendall(data[70_005:])
        assert slow.receive()[1] == bytes(100_000)
        assert not slow.connection.is_slow
        # Of the next one it is waited for again.
        assert slow.ask(bytes(100_000)) == bytes(100_000)
        assert any(waits)


@pytest.mark.parametrize("form", [MANY, LONG])
def test_a_caller_that_does_not_read_keeps_nobody(monkeypatch, form):
    monkeypatch.setattr(serving, "MOST_THREADS", 1)
    monkeypatch.setattr(serving, "MOST_STAYING", 0)
    n = 5_000_000
    with served(0.001) as lanes:
        slow = [lanes.connect() for _ in range(3)]
        for peer in slow:
            peer.send(form=form, clock=n)
        assert lanes.connect().ask(b"y") == b"y"
        assert lanes.connect().ask(form=LONG, clock=9) == b"\1" * 9
        for peer in slow:
            assert peer.receive()[1] == b"\1" * n
            assert peer.ask(b"z") == b"z"


def test_a_thread_is_given_back_after_one_wait_for_who_takes_little(monkeypatch):
    """Who takes a byte now and then had a thread for as long as it liked."""
    n, sent = 1_000_000, list[int]()
    with unserved() as peer:
        kernel = peer.connection.channel._socket

        class Dribble:
            """The kernel waits each time, and takes ten bytes."""

            def sendmsg(self, buffers: Any, about: Any, how: int) -> int:
                sent.append(how)
                return kernel.send(memoryview(buffers[0])[:10])

            def __getattr__(self, name: str) -> Any:
                return getattr(kernel, name)

        peer.send(form=LONG, clock=n)
        buffer = memoryview(bytearray(65_536))
        with monkeypatch.context() as patch:
            patch.setattr(peer.connection.channel, "_socket", Dribble())
            for k in range(1, 5):
                assert peer.connection.go_on(buffer, 1.0) == ROOM
                assert sent == [0] * k


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_slow_caller_has_no_thread_to_itself(monkeypatch, secured, is_tls):
    monkeypatch.setattr(selecting, "BUSY_FRAMES", 1)
    monkeypatch.setattr(selecting, "BUSY_SECONDS", 1e9)
    n = 5_000_000
    with served(30.0) as lanes:
        peer = lanes.connect() if not is_tls else secured.connect(lanes, 30.0)
        peer.ask()
        until(lambda: peer.connection.is_away)
        peer.connection.channel.stall = 0.001
        taken = peer.connection.channel._socket
        taken.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000)
        )
        peer.send(form=MANY, clock=n)
        until(lambda: peer.connection.n_frames == 2 and not peer.connection.is_away)
        assert peer.connection.is_slow
        assert peer.receive()[1] == b"\1" * n
        assert peer.ask(b"next") == b"next"
        assert not peer.connection.is_slow
        peer.socket.close()


def test_who_gives_a_lane_back_just_then_wakes_the_selector_again(lanes, monkeypatch):
    """While it takes in that it was woken."""
    peer = lanes.connect()
    read = os.eventfd_read

    def woken_in_between(number: int) -> int:
        peer.connection.home.wake()
        return read(number)

    monkeypatch.setattr(os, "eventfd_read", woken_in_between)
    for _ in range(3):
        assert peer.ask(form=LONG, clock=9) == b"\1" * 9


# -- calls that wait -----------------------------------------------------------------


def test_who_completes_a_call_sends_its_answer(peer):
    """That of a lane that has a thread; a thousand answers are the selector's."""
    parked = peer.park()
    is_busy = peer.connection.is_away

    def complete() -> None:
        assert not peer.connection.is_mine
        parked.complete()
        assert peer.connection.is_mine or not is_busy

    trainer = threading.Thread(target=complete, name="trainer")
    trainer.start()
    head, _ = peer.receive()
    trainer.join()
    assert head.flags == 1
    assert parked.by == ["trainer" if is_busy else SELECTOR]
    assert peer.ask(b"next") == b"next"


def test_the_event_loop_has_a_thread_of_lanes_send_an_answer(peer):
    """It has other things to do; here this thread has made the server, as it does."""
    parked = peer.park()
    parked.complete()
    assert peer.receive()[0].flags == 1
    assert parked.by[0].startswith("daskps-lane")


def test_a_thread_of_lanes_answers_its_own_caller_first(lanes, alone):
    waits, peer = lanes.connect(), lanes.connect()
    parked = waits.park()
    peer.calls.completes = parked
    assert peer.ask(b"mine") == b"mine"
    assert waits.receive()[0].flags == 1
    assert parked.by == [SELECTOR]


def test_a_read_whose_turn_does_not_come_waits_in_another_thread(peer):
    parked = peer.park()
    parked.is_busy = True
    trainer = threading.Thread(target=parked.complete, name="trainer")
    trainer.start()
    assert peer.receive()[0].flags == 1
    trainer.join()
    assert parked.by[0].startswith("daskps-lane")
    assert parked.by[0] != SELECTOR


@pytest.mark.parametrize("n", [10, 5_000_000])
def test_answers_of_all_sizes_after_a_wait(peer, n):
    peer.send(form=PARK, clock=n)
    until(lambda: peer.calls.parked)
    [parked] = peer.calls.parked
    trainer = threading.Thread(target=parked.complete, name="trainer")
    trainer.start()
    assert peer.receive()[1] == b"\1" * n
    trainer.join()
    assert peer.ask(b"next") == b"next"


def test_a_call_whose_time_is_up_is_told_so(peer):
    peer.calls.end = time.monotonic() + 0.01
    parked = peer.park()
    assert peer.receive()[0].flags == 0
    # What completes it later finds nobody.
    threading.Thread(target=parked.complete).start()
    assert len(parked.by) == 1
    assert peer.ask(b"next") == b"next"


def test_a_caller_that_hangs_up_leaves_no_call_behind(peer):
    parked = peer.park()
    peer.socket.close()
    until(lambda: parked.cancelled)
    assert not parked.by
    until(lambda: peer.connection.channel.fileno() < 0)


def test_a_caller_that_says_something_while_its_call_waits_is_none(peer):
    parked = peer.park()
    peer.socket.sendall(b"x")
    until(lambda: parked.cancelled)
    with pytest.raises(ConnectionResetError):
        peer.socket.recv(10)


def test_the_next_frame_waits_for_who_is_at_the_last_answer(peer):
    """Its home has heard it, and leaves the lane until it is given back."""
    parked = peer.park()
    claimed = peer.connection.claim()
    assert claimed is parked
    peer.connection.answer(parked.finish(1))
    peer.receive()
    peer.send(b"next")
    until(lambda: peer.connection._is_missed)
    assert len(peer.calls.threads) == 3
    peer.connection.give_back()
    assert peer.receive()[1] == b"next"


def test_only_one_thread_claims_a_call(lanes):
    peer = lanes.connect()
    parked = peer.park()
    found = peer.connection
    assert found.claim(object()) is None  # of another frame
    assert found.claim(parked) is parked
    assert found.claim() is None
    assert not found.is_mine
    found.give_back()
    assert found.is_mine


# -- ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n".ljust(64), bytes(64)])
def test_garbage_ends_that_lane_and_no_other(peer, data):
    peer.socket.sendall(data)
    assert peer.socket.recv(10) == b""


def test_callers_that_are_late_are_cut(lanes, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(selecting, "SWEEP_SECONDS", 0.0)
    idle = lanes.connect()
    for data in (frame()[:10], frame(b"x" * 100)[:90], frame(form=MANY, clock=10**7)):
        peer = lanes.connect()
        peer.socket.sendall(data)
        until(partial(is_in, lanes.ended, peer.connection))
    assert idle.ask(b"x" * 10) == b"x" * 10


def test_who_takes_nothing_of_an_answer_is_cut_sooner(lanes, monkeypatch):
    monkeypatch.setattr(connection, "TAKE_SECONDS", 0.0)
    monkeypatch.setattr(selecting, "SWEEP_SECONDS", 0.0)
    slow, peer = lanes.connect(), lanes.connect()
    slow.socket.sendall(frame(b"x" * 100)[:-1])
    peer.send(form=MANY, clock=10**7)
    until(partial(is_in, lanes.ended, peer.connection))
    slow.socket.sendall(b"x")
    assert slow.receive()[1] == b"x" * 100


def test_how_long_a_frame_may_take():
    now = time.monotonic()
    with served() as lanes:
        found = lanes.connect().connection
        assert not found.is_late(now + 1e9)  # idle
        found._expect(10**6 * 50)
        found.channel.moved = now + 100
        assert not found.is_late(now + 60)
        assert found.is_late(now + 100)  # however often a byte comes
        found.channel.moved = now
        assert found.is_late(now + 40)


@pytest.fixture
def bound(monkeypatch) -> None:
    """Three million bytes at most, looked at without end."""
    monkeypatch.setattr(selecting, "MOST_HELD", 3_000_000)
    monkeypatch.setattr(selecting, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(selecting, "LAG_SECONDS", 0.0)


def test_answers_that_nobody_takes_are_bounded(bound):
    with served(0.001) as lanes:
        peers = [lanes.connect() for _ in range(5)]
        for peer in peers:
            peer.send(form=MANY, clock=10**6)
        until(lambda: len(lanes.ended) == 2)
        left = [peer for peer in peers if peer.connection not in lanes.ended]
        for peer in left:
            assert len(peer.receive()[1]) == 10**6


def test_bodies_that_do_not_come_to_their_end_are_bounded(bound):
    with served(0.001) as lanes:
        peers = [lanes.connect() for _ in range(5)]
        body = os.urandom(10**6)
        for peer in peers:
            peer.socket.sendall(frame(body)[:-1])
        until(lambda: len(lanes.ended) == 2)
        for peer in peers:
            if peer.connection not in lanes.ended:
                peer.socket.sendall(body[-1:])
                assert peer.receive()[1] == body


def test_who_is_slow_is_behind_its_bytes():
    with served() as lanes:
        found = lanes.connect().connection
        assert found.lag(time.monotonic() + 100) == 0  # idle
        found._expect(10**7)
        now, wanted = found._begun, found._wanted
        wanted.append(memoryview(bytes(10**7)))
        assert (found.n_held, found.lag(now + 3)) == (0, 3)
        # What has come is memory, and has its time: a second for each million.
        wanted[0] = wanted[0][4 * 10**6 :]
        found.channel.moved = now + 2.5
        assert (found.n_held, found.lag(now + 3)) == (4 * 10**6, 0.5)
        # However often a byte comes.
        found.channel.moved = now + 7
        assert found.lag(now + 7) == 3
        # For whom no thread waits either.
        assert found.is_behind(now + 7)
        assert not found.is_behind(now + 4)
        wanted.clear()
        found._unsent.append(memoryview(bytes(9 * 10**6)))
        assert (found.n_held, found.lag(now + 7)) == (9 * 10**6, 6)
        found.end()
        assert (len(found._body), len(found._wanted), len(found._unsent)) == (0, 0, 0)


def test_an_idle_lane_has_no_buffer(lanes, alone):
    """Nor one that was used: they belong to threads."""
    peers = [lanes.connect() for _ in range(20)]
    for peer in peers:
        for n in (10, 60_000, 100_000):
            peer.ask(bytes(n))
            peer.ask(form=LONG, clock=n)
    peers[0].ask()  # so the selector is done with the last one
    for peer in peers:
        found = peer.connection
        held = [found.channel._buffer, *found._wanted, *found._unsent, *found._body]
        assert sum(memoryview(buffer).nbytes for buffer in held) == 0
        assert found.n_held == 0
    # Within a head there are its bytes, within a body that alone.
    peers[0].socket.sendall(frame(bytes(60_000))[: HEAD_NBYTES - 1])
    until(lambda: peers[0].connection.is_within)
    assert peers[0].connection.channel._buffer.nbytes == HEAD_NBYTES - 1
    peers[1].socket.sendall(frame(bytes(60_000))[:50_000])
    until(lambda: peers[1].connection._head is not None)
    until(lambda: peers[1].connection.channel._buffer.nbytes == 0)
    assert peers[1].connection.n_held == 50_000 - HEAD_NBYTES


# -- a process without descriptors or threads -----------------------------------------


def test_a_busy_lane_without_a_descriptor_for_its_thread_stays_where_it_is(
    lanes, monkeypatch
):
    monkeypatch.setattr(serving, "MOST_STAYING", 1)
    monkeypatch.setattr(selecting, "BUSY_FRAMES", 1)
    monkeypatch.setattr(selecting, "BUSY_SECONDS", 1e9)
    refused = threading.Event()

    def fail(*_: Any) -> Any:
        refused.set()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(serving, "Staying", fail)
    peer = lanes.connect()
    for k in range(20):
        assert peer.ask(b"%d" % k) == b"%d" % k
    assert refused.wait(10)
    until(lambda: not peer.connection.is_away)
    # Once there is one again it has its thread.
    monkeypatch.setattr(serving, "Staying", Staying)

    def has_one() -> bool:
        peer.ask()
        return peer.connection.is_away and peer.calls.threads[-1] != SELECTOR

    until(has_one)


def test_what_takes_long_without_a_thread_ends_its_lane_and_no_other(
    lanes, monkeypatch
):
    monkeypatch.setattr(serving, "MOST_STAYING", 0)
    peer, other = lanes.connect(), lanes.connect()
    other.ask()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        peer.send(form=LONG, clock=100_000)
        assert peer.socket.recv(1) == b""
    assert other.ask(b"more") == b"more"
    assert other.ask(form=LONG, clock=100_000) == b"\1" * 100_000


def test_nothing_is_left_of_a_server_that_has_closed():
    before = open_files()
    with served() as lanes:
        peers = [lanes.connect() for _ in range(10)]
        for peer in peers:
            peer.ask()
        parked = peers[0].park()
        for _ in range(50):
            peers[1].ask()
        peers[2].socket.sendall(frame(bytes(10**6))[:500_000])
        lanes.server.close(10)
        for peer in peers:
            peer.connection.channel.shut()
        assert threads() == []
        assert parked.cancelled
        assert not parked.by
    # What others close meanwhile is no business of this test.
    until(lambda: open_files() <= before)


def test_what_nobody_has_begun_ends_with_the_server(lanes, monkeypatch):
    """Frames and answers that take long, given to threads that end."""
    peers = [lanes.connect() for _ in range(3)]
    long, answers, busy = peers
    for peer in peers:
        peer.ask()
    parked = [busy.park(), answers.park()]
    answers.connection.claim()
    lanes.server._pool._is_closed = True
    long.send(form=LONG, clock=9)
    lanes.server._submit(
        partial(lanes.server._finish, answers.connection, parked[1], 1.0)
    )
    until(lambda: {*lanes.ended} == {long.connection, answers.connection})
    busy.connection.is_long = True
    parked[0].complete()
    lanes.server.close(10)
    assert {*lanes.ended} == {peer.connection for peer in peers}
    assert not any(found.by for found in parked)


def test_what_completes_a_call_after_the_end_harms_nobody(lanes):
    peer = lanes.connect()
    parked = peer.park()
    claimed = peer.connection.claim()
    peer.connection.channel.shut()
    lanes.server.close(10)
    assert peer.connection.channel.fileno() >= 0
    with pytest.raises(BrokenPipeError):
        peer.connection.answer(claimed.finish(1))
    peer.connection.give_back()
    assert peer.connection.channel.fileno() < 0
    parked.complete()


def file_of(number: int | str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""  # of the folder itself


def test_a_forked_process_closes_its_copies_and_ends_nothing(lanes):
    peers = [lanes.connect() for _ in range(3)]
    for peer in peers:
        peer.ask()
    sockets = {file_of(peer.connection.channel.fileno()) for peer in peers}
    assert len(sockets) == 3

    def closed(pipe: Any) -> None:
        left = {file_of(number) for number in os.listdir("/proc/self/fd")}
        assert not sockets & left
        assert lanes.server._selector._epoll.closed

    with child(closed) as forked:
        assert forked.end() == 0
    for peer in peers:
        assert peer.ask(b"still") == b"still"


# -- TLS -----------------------------------------------------------------------------


class Secured:
    """Callers by TLS, of a certificate that is made once."""

    def __init__(self) -> None:
        security = Security.temporary()
        self._host = security.get_listen_args("worker")["ssl_context"]
        self._caller = security.get_connection_args("worker")["ssl_context"]

    def connect(self, lanes: Served, stall: float = 0.2) -> Peer:
        peer = self.peer(stall)
        lanes.server.add(peer.connection)
        return peer

    def peer(self, stall: float = 0.2) -> Peer:
        found: list[ssl.SSLSocket] = []
        here, there = socket.socketpair()

        def ask() -> None:
            found.append(self._caller.wrap_socket(there))

        caller = threading.Thread(target=ask)
        caller.start()
        taken = self._host.wrap_socket(here, server_side=True)
        caller.join()
        calls = Calls()
        return Peer(found[0], Connection(ServedChannel(taken, stall), calls), calls)


@pytest.fixture(scope="module")
def secured() -> Secured:
    return Secured()


@pytest.mark.parametrize("n", [0, 10, 16_384, 65_536, 300_001, 5_000_000])
def test_frames_by_tls(lanes, alone, secured, n):
    peer, other = secured.connect(lanes), secured.connect(lanes)
    body = os.urandom(n)
    for _ in range(3):
        peer.socket.sendall(frame(body)[:50])
        assert other.ask(b"y") == b"y"
        peer.socket.sendall(frame(body)[50:])
        assert peer.receive()[1] == body
    peer.socket.close()
    other.socket.close()


def test_what_openssl_has_received_is_seen(secured):
    peer = secured.peer()
    buffer = memoryview(bytearray(100))
    peer.socket.sendall(frame(b"a") + frame(b"b"))
    # As much as one frame: the record has another, and the descriptor shows nothing.
    for body in (b"a", b"b"):
        assert peer.connection.go_on(buffer[:65], 0.0) == ANSWERED
        assert peer.receive()[1] == body
        assert peer.connection.channel.has_more == (body == b"a")
    peer.connection.end()
    peer.socket.close()


def test_what_openssl_has_received_is_served_before_the_socket_is_asked(
    lanes, alone, secured
):
    """A record of several frames shows at the descriptor once."""
    peer = secured.connect(lanes)
    peer.socket.sendall(frame(b"a" * 6000) + frame(b"b") + frame(b"c" * 6000)[:-1])
    assert peer.receive()[1] == b"a" * 6000
    assert peer.receive()[1] == b"b"
    peer.socket.sendall(b"c")
    assert peer.receive()[1] == b"c" * 6000
    peer.socket.close()


def test_a_busy_lane_by_tls(monkeypatch, secured):
    monkeypatch.setattr(selecting, "BUSY_FRAMES", 1)
    monkeypatch.setattr(selecting, "BUSY_SECONDS", 1e9)
    with served() as lanes:
        peer = secured.connect(lanes)
        for k in (10, 200_000, 5_000_000):
            assert peer.ask(bytes(k)) == bytes(k)
        assert peer.connection.is_away
        parked = peer.park()
        trainer = threading.Thread(target=parked.complete, name="trainer")
        trainer.start()
        assert peer.receive()[0].flags == 1
        trainer.join()
        assert peer.ask(b"x") == b"x"
        parked = peer.park()
        peer.socket.close()
        until(lambda: parked.cancelled)

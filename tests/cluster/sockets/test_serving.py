"""Threads that serve sockets; over socket pairs, with calls that are made up."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.security import Security

from daskps.cluster.sockets import connection, serving
from daskps.cluster.sockets.connection import ANSWERED, ROOM, Connection
from daskps.cluster.sockets.frames import HEAD_NBYTES
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.serving import SocketServer
from tests.cluster.forks import child
from tests.cluster.sockets.served import (
    ECHO,
    LONG,
    MANY,
    PARK,
    Calls,
    Parked,
    Peer,
    Served,
    frame,
    served,
    unserved,
)
from tests.support import open_files, until

SOCKET = "daskps-socket"


@pytest.fixture
def socket_pool() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many sockets: no thread stays with one of them."""
    monkeypatch.setattr(serving, "FEW_SOCKETS", 0)


@pytest.fixture(params=["set", "thread"])
def peer(request, monkeypatch) -> Iterator[Peer]:
    """A socket that is one of many, or one with which a thread stays."""
    stays = request.param == "thread"
    monkeypatch.setattr(serving, "FEW_SOCKETS", 8 * stays)
    monkeypatch.setattr(serving, "QUICK_FRAMES", 0)
    with served(30.0) as found:
        made = found.connect()
        made.ask()
        made.ask()
        found.connect().ask()
        until(lambda: made.connection.is_owned == stays)
        yield made


def is_in(found: list[Any], one: Any) -> bool:
    return one in found


def is_free(found: Connection) -> bool:
    return not found.is_owned


def has_more(found: list[Any], n: int) -> bool:
    return len(found) > n


def threads(socket_pool: Served) -> list[str]:
    """Return the names of the threads of a server, whatever others of this process have."""
    return [thread.name for thread in list(socket_pool.server._threads)]


class Gate(Calls):
    """Keeps the thread that serves it until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_begun, self.may_end = threading.Event(), threading.Event()

    def begin(self, head: Any, body: Any, seconds: float) -> Any:
        self.seconds = seconds
        self.is_begun.set()
        assert self.may_end.wait(10)
        return super().begin(head, body, seconds)


def held(socket_pool: Served, template: int = LONG) -> tuple[Peer, Gate]:
    """Return a caller whose frame a thread is at."""
    peer, gate = socket_pool.connect(), Gate()
    peer.connection._calls = peer.calls = gate
    peer.send(template=template, clock=9)
    assert gate.is_begun.wait(10)
    return peer, gate


# -- many sockets, few threads ---------------------------------------------------------


def test_many_sockets_are_served_by_one_thread(socket_pool, crowded):
    peers = [socket_pool.connect() for _ in range(50)]
    for k in range(3):
        for peer in peers:
            peer.send(bytes([k]) * 100)
        for peer in peers:
            assert peer.receive()[1] == bytes([k]) * 100
    assert {name for p in peers for name in p.calls.threads} == {SOCKET}
    assert threads(socket_pool) == [SOCKET]


def test_what_takes_long_keeps_no_other_socket(socket_pool, crowded):
    """Its thread has another one look at the sockets before."""
    long = [held(socket_pool) for _ in range(3)]
    assert [gate.seconds for _, gate in long] == [serving.LOCK_SECONDS] * 3
    other = socket_pool.connect()
    for n in (10, 100_000):
        assert other.ask(bytes(n)) == bytes(n)
    for peer, gate in long:
        gate.may_end.set()
        assert peer.receive()[1] == b"\1" * 9
    assert 4 <= len(threads(socket_pool)) <= 5


def test_the_last_thread_waits_for_nobody(monkeypatch, crowded):
    """It goes on with what takes long as far as that goes without."""
    monkeypatch.setattr(serving, "MOST_THREADS", 2)
    with served(30.0) as socket_pool:
        peer, gate = held(socket_pool)
        other, slow = socket_pool.connect(), socket_pool.connect()
        slow.socket.sendall(frame(bytes(100_000))[:70_000])
        body = os.urandom(3_000_000)
        assert other.ask(body) == body
        assert other.ask(template=LONG, clock=3_000_000) == b"\1" * 3_000_000
        slow.socket.sendall(bytes(100_000 + HEAD_NBYTES - 70_000))
        assert slow.receive()[1] == bytes(100_000)
        gate.may_end.set()
        assert peer.receive()[1] == b"\1" * 9
        assert len(threads(socket_pool)) == 2


def test_a_thread_that_has_nothing_to_do_ends(monkeypatch, crowded):
    monkeypatch.setattr(serving, "SPARE_SECONDS", 0.01)
    with served() as socket_pool:
        for _ in range(3):
            peer, gate = held(socket_pool)
            other = socket_pool.connect()
            assert other.ask(b"x") == b"x"
            gate.may_end.set()
            assert peer.receive()[1] == b"\1" * 9
            # The one that looks at the sockets stays.
            until(lambda: threads(socket_pool) == [SOCKET])
        assert other.ask(b"y") == b"y"


def test_a_thread_whose_time_is_over_leads_where_it_is_counted_on(
    socket_pool, monkeypatch
):
    """The leader has left it the sockets just when it gave up."""

    class Late:
        """Says that it was not taken in time, and is free."""

        def __init__(self) -> None:
            self.asked: list[Any] = []

        def acquire(self, **how: Any) -> bool:
            self.asked.append(how)
            return "timeout" not in how

    server = socket_pool.server
    socket_pool.connect().ask()  # so its own thread leads
    late: Any = Late()
    mine = serving._Thread(server._let_lead)
    with monkeypatch.context() as patch:
        patch.setattr(server, "_lead", late)
        patch.setattr(server, "_n_spare", 1)
        assert server._follow(mine)
        assert mine.leads
        assert late.asked == [{"timeout": serving.SPARE_SECONDS}, {"blocking": False}]
        assert server._n_spare == 0


def test_a_thread_stays_with_a_socket_until_it_is_quiet(monkeypatch):
    with served(0.01) as socket_pool:
        peer, other = socket_pool.connect(), socket_pool.connect()

        def has_one() -> bool:
            other.ask()
            for _ in range(serving.QUICK_FRAMES + 2):
                peer.ask()
            return peer.connection.is_owned and not other.connection.is_owned

        until(has_one)
        until(lambda: not peer.connection.is_owned)
        assert peer.connection.n_quick == 0
        assert peer.ask(b"again") == b"again"
        # Nor where there are many.
        monkeypatch.setattr(serving, "FEW_SOCKETS", 1)
        for _ in range(20):
            peer.ask()
        assert peer.connection.n_quick == 0


@pytest.mark.parametrize("template", [ECHO, LONG])
def test_a_socket_with_long_frames_keeps_its_thread(template):
    """To a thread and back took a quarter of the CPU time of 1 MB."""
    body = os.urandom(100_000 if template == ECHO else 10)
    with served(30.0) as socket_pool:
        peer = socket_pool.connect()
        for _ in range(serving.QUICK_FRAMES + 3):
            found = peer.ask(body, template, clock=100_000)
            assert found == (body if template == ECHO else b"\1" * 100_000)
        assert peer.connection.is_owned


def test_frames_arrive_whole_however_they_are_cut(peer):
    body = os.urandom(100)
    data = frame(body)
    for k in range(1, len(data)):
        peer.socket.sendall(data[:k])
        peer.socket.sendall(data[k:])
        assert peer.receive()[1] == body


def test_a_caller_that_sends_a_byte_at_a_time_keeps_nobody(socket_pool):
    slow, other = socket_pool.connect(), socket_pool.connect()
    data = frame(b"x" * 1000)
    for k in range(len(data) - 1):
        slow.socket.sendall(data[k : k + 1])
        assert other.ask(b"y") == b"y"
    # It holds nothing but the array of its body.
    until(lambda: len(slow.connection.channel._buffer) < HEAD_NBYTES)
    slow.socket.sendall(data[-1:])
    assert slow.receive()[1] == b"x" * 1000


def test_slow_senders_of_long_bodies_hold_no_threads(monkeypatch, crowded):
    monkeypatch.setattr(serving, "MOST_THREADS", 2)
    with served(0.001) as socket_pool:
        slow = [socket_pool.connect() for _ in range(5)]
        for peer in slow:
            peer.socket.sendall(frame(bytes(100_000))[:70_000])
        quick = socket_pool.connect()
        assert quick.ask(bytes(100_000)) == bytes(100_000)
        for peer in slow:
            peer.socket.sendall(bytes(100_000 + HEAD_NBYTES - 70_000))
            assert peer.receive()[1] == bytes(100_000)


def test_no_thread_waits_twice_for_a_slow_caller(monkeypatch):
    """A byte a second of many bodies would have all threads wait for ever."""
    monkeypatch.setattr(serving, "FEW_SOCKETS", 0)
    waits: list[bool] = []
    receive = ServedChannel._try_receive

    def noted(self: ServedChannel, view: Any, waits_now: bool, how: int = 0) -> int:
        waits.append(waits_now)
        return receive(self, view, waits_now, how)

    data = frame(bytes(100_000))
    with served(0.001) as socket_pool:
        slow = socket_pool.connect()
        slow.socket.sendall(data[:70_000])
        until(lambda: slow.connection.is_slow)
        until(lambda: not slow.connection.is_owned)
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


@pytest.mark.parametrize("template", [MANY, LONG])
def test_a_caller_that_does_not_read_keeps_nobody(monkeypatch, crowded, template):
    monkeypatch.setattr(serving, "MOST_THREADS", 2)
    n = 5_000_000
    with served(0.001) as socket_pool:
        slow = [socket_pool.connect() for _ in range(3)]
        for peer in slow:
            peer.send(template=template, clock=n)
        assert socket_pool.connect().ask(b"y") == b"y"
        assert socket_pool.connect().ask(template=LONG, clock=9) == b"\1" * 9
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

        peer.send(template=LONG, clock=n)
        buffer = memoryview(bytearray(65_536))
        with monkeypatch.context() as patch:
            patch.setattr(peer.connection.channel, "_socket", Dribble())
            for k in range(1, 5):
                assert peer.connection.go_on(buffer, 1.0) == ROOM
                assert sent == [0] * k


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_slow_caller_has_no_thread_to_itself(monkeypatch, secured, is_tls):
    monkeypatch.setattr(serving, "QUICK_FRAMES", 0)
    n = 5_000_000
    with served(30.0) as socket_pool:
        peer = (
            socket_pool.connect() if not is_tls else secured.connect(socket_pool, 30.0)
        )
        peer.ask()
        peer.connection.channel.stall = 0.001
        taken = peer.connection.channel._socket
        taken.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 1000)
        )
        peer.send(template=LONG, clock=n)
        until(lambda: peer.connection.is_slow and not peer.connection.is_owned)
        assert peer.receive()[1] == b"\1" * n
        assert peer.ask(b"next") == b"next"
        assert not peer.connection.is_slow
        peer.socket.close()


# -- calls that wait -----------------------------------------------------------------


def test_who_completes_a_call_sends_its_answer(peer):
    """Of few sockets; a thousand answers are for the threads of sockets."""
    parked = peer.park()
    is_few = serving.FEW_SOCKETS > 0

    def complete() -> None:
        assert peer.connection.waiting is parked
        parked.complete()
        assert peer.connection.waiting is None or not is_few

    trainer = threading.Thread(target=complete, name="trainer")
    trainer.start()
    head, _ = peer.receive()
    trainer.join()
    assert head.flags == 1
    assert parked.by == ["trainer" if is_few else SOCKET]
    assert peer.ask(b"next") == b"next"


def test_the_event_loop_has_a_thread_of_sockets_send_an_answer(peer):
    """It has other things to do; here this thread has made the server, as it does."""
    parked = peer.park()
    parked.complete()
    assert peer.receive()[0].flags == 1
    assert parked.by == [SOCKET]


def test_a_thread_of_sockets_answers_its_own_caller_first(socket_pool, crowded):
    waits, peer = socket_pool.connect(), socket_pool.connect()
    parked = waits.park()
    order = select.poll()
    order.register(peer.socket, select.POLLIN)
    answered: list[Any] = []
    finish = parked.finish

    def noted(seconds: float) -> Any:
        answered.append(order.poll(0))
        return finish(seconds)

    parked.finish = noted
    peer.calls.completes = parked
    peer.send(b"mine")
    assert waits.receive()[0].flags == 1
    assert parked.by == [SOCKET]
    assert answered == [[(peer.socket.fileno(), select.POLLIN)]]
    assert peer.receive()[1] == b"mine"


def test_a_thread_that_stays_with_a_socket_answers_others(monkeypatch):
    """Not only when that socket is quiet."""
    monkeypatch.setattr(serving, "QUICK_FRAMES", 0)
    with served(30.0) as socket_pool:
        waits, peer = socket_pool.connect(), socket_pool.connect()
        parked = waits.park()
        peer.ask()
        peer.calls.completes = parked
        assert peer.ask(b"mine") == b"mine"
        assert waits.receive()[0].flags == 1
        assert peer.connection.is_owned


def test_a_read_whose_turn_does_not_come_waits_in_a_thread_of_sockets(peer):
    parked = peer.park()
    parked.is_busy = True
    trainer = threading.Thread(target=parked.complete, name="trainer")
    trainer.start()
    assert peer.receive()[0].flags == 1
    trainer.join()
    assert parked.by == [SOCKET]
    assert peer.ask(b"next") == b"next"


@pytest.mark.parametrize("is_soon", [True, False])
def test_an_answer_may_have_to_wait_itself(peer, is_soon):
    """For a copy that is to have what it tells."""
    parked = peer.park()
    after = Parked(parked.head, parked.end)
    after.done, parked.finish = is_soon, lambda _: after
    parked.complete()
    if not is_soon:
        assert after.parked.wait(10)
        assert not after.by
        after.complete()
    assert peer.receive()[0].flags == 1
    assert len(after.by) == 1
    assert peer.ask(b"next") == b"next"


def test_what_is_done_while_it_is_parked_is_answered(socket_pool, monkeypatch):
    """By whoever has parked it: nobody else could own its socket."""
    peer = socket_pool.connect()

    class Soon(Calls):
        def begin(self, head: Any, body: Any, seconds: float) -> Any:
            parked = super().begin(head, body, seconds)
            parked.then = lambda callback: soon(parked, callback)
            return parked

    def soon(parked: Any, callback: Any) -> None:
        parked.done = True
        trainer = threading.Thread(target=callback, name="trainer")
        trainer.start()
        trainer.join()

    peer.connection._calls = peer.calls = Soon()
    peer.send(template=PARK)
    assert peer.receive()[0].flags == 1
    assert peer.calls.parked[0].by == [SOCKET]


@pytest.mark.parametrize("n", [10, 5_000_000])
def test_answers_of_all_sizes_after_a_wait(peer, n):
    peer.send(template=PARK, clock=n)
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


def test_calls_end_in_their_order(socket_pool):
    peers, begin = [socket_pool.connect() for _ in range(3)], time.monotonic() + 1e5
    for peer, end in zip(peers, (3, 1, 2), strict=True):
        peer.calls.end = begin + end
        peer.park()
        until(partial(is_free, peer.connection))
    socket_pool.server._look_around(begin + 1.5)
    assert peers[1].receive()[0].flags == 0
    assert socket_pool.server._next_look == begin + 2
    # A later call of a socket has an end of its own.
    peers[1].calls.end = begin + 9
    again = peers[1].park()
    until(partial(is_free, peers[1].connection))
    socket_pool.server._look_around(begin + 4)
    for peer in peers[0], peers[2]:
        assert peer.receive()[0].flags == 0
    assert not again.by
    assert socket_pool.server._next_look == begin + 9


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


def test_the_next_frame_waits_for_who_is_at_the_last_answer(socket_pool):
    """A thread has heard it, and leaves the socket to its owner."""
    peer = socket_pool.connect()
    parked, found = peer.park(), peer.connection
    until(lambda: found._event)
    assert found.claim(parked)
    found.answer(parked.finish(1))
    peer.receive()
    peer.send(b"next")
    until(lambda: not found._event)
    assert len(peer.calls.threads) == 1
    socket_pool.server._leave(found)
    assert peer.receive()[1] == b"next"


def test_an_event_of_another_socket_with_that_number_ends_no_call(socket_pool):
    """One that was taken from the set before the number was given again."""
    peer = socket_pool.connect()
    parked = peer.park()
    until(lambda: not peer.connection.is_owned)
    socket_pool.server._hear(
        peer.connection, serving._Thread(socket_pool.server._let_lead)
    )
    assert not parked.cancelled
    assert not peer.connection.is_owned
    parked.complete()
    assert peer.receive()[0].flags == 1


# -- ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n".ljust(64), bytes(64)])
def test_garbage_ends_that_socket_and_no_other(peer, data):
    peer.socket.sendall(data)
    assert peer.socket.recv(10) == b""


def test_callers_that_are_late_are_cut(socket_pool, monkeypatch):
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(serving, "SWEEP_SECONDS", 0.0)
    idle = socket_pool.connect()
    for data in (
        frame()[:10],
        frame(b"x" * 100)[:90],
        frame(template=MANY, clock=10**7),
    ):
        peer = socket_pool.connect()
        peer.socket.sendall(data)
        until(partial(is_in, socket_pool.ended, peer.connection))
    assert idle.ask(b"x" * 10) == b"x" * 10


def test_who_takes_nothing_of_an_answer_is_cut_sooner(socket_pool, monkeypatch):
    monkeypatch.setattr(connection, "TAKE_SECONDS", 0.0)
    monkeypatch.setattr(serving, "SWEEP_SECONDS", 0.0)
    slow, peer = socket_pool.connect(), socket_pool.connect()
    slow.socket.sendall(frame(b"x" * 100)[:-1])
    peer.send(template=MANY, clock=10**7)
    until(partial(is_in, socket_pool.ended, peer.connection))
    slow.socket.sendall(b"x")
    assert slow.receive()[1] == b"x" * 100


def test_how_long_a_frame_may_take():
    now = time.monotonic()
    with served() as socket_pool:
        found = socket_pool.connect().connection
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
    monkeypatch.setattr(serving, "MOST_HELD", 3_000_000)
    monkeypatch.setattr(serving, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(serving, "LAG_SECONDS", 0.0)


def test_answers_that_nobody_takes_are_bounded(bound):
    with served(0.001) as socket_pool:
        peers = [socket_pool.connect() for _ in range(5)]
        for peer in peers:
            peer.send(template=MANY, clock=10**6)
        until(lambda: len(socket_pool.ended) == 2)
        left = [peer for peer in peers if peer.connection not in socket_pool.ended]
        for peer in left:
            assert len(peer.receive()[1]) == 10**6


def test_bodies_that_do_not_come_to_their_end_are_bounded(bound):
    with served(0.001) as socket_pool:
        peers = [socket_pool.connect() for _ in range(5)]
        body = os.urandom(10**6)
        for peer in peers:
            peer.socket.sendall(frame(body)[:-1])
        until(lambda: len(socket_pool.ended) == 2)
        for peer in peers:
            if peer.connection not in socket_pool.ended:
                peer.socket.sendall(body[-1:])
                assert peer.receive()[1] == body


def test_who_is_slow_is_behind_its_bytes():
    with served() as socket_pool:
        found = socket_pool.connect().connection
        assert found.lag(time.monotonic() + 100) == 0  # idle
        found._expect(10**7)
        now, wanted = found._begun, found._wanted
        wanted.append(rest := memoryview(bytes(10**7)))
        assert (found.n_held, found.lag(now + 3)) == (0, 3)
        # What has come is memory, and has its time: a second for each million.
        wanted[0] = rest[4 * 10**6 :]
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


def test_an_idle_socket_has_no_buffer(socket_pool, crowded):
    """Nor one that was used: they belong to threads."""
    peers = [socket_pool.connect() for _ in range(20)]
    for peer in peers:
        for n in (10, 60_000, 100_000):
            peer.ask(bytes(n))
            peer.ask(template=LONG, clock=n)
    for peer in peers:
        until(partial(is_free, peer.connection))
        found = peer.connection
        held = [found.channel._buffer, *found._wanted, *found._unsent, *found._body]
        assert sum(memoryview(buffer).nbytes for buffer in held) == 0
        assert found.n_held == 0
    # Within a head there are its bytes, within a body that alone.
    peers[0].socket.sendall(frame(bytes(60_000))[: HEAD_NBYTES - 1])
    until(lambda: peers[0].connection.channel._buffer.nbytes == HEAD_NBYTES - 1)
    peers[1].socket.sendall(frame(bytes(60_000))[:50_000])
    until(lambda: peers[1].connection._head is not None)
    until(lambda: peers[1].connection.channel._buffer.nbytes == 0)
    assert peers[1].connection.n_held == 50_000 - HEAD_NBYTES


# -- a process without descriptors or threads -----------------------------------------


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_server_that_has_no_thread_is_none(monkeypatch):
    """Its host says so to who asks for a socket."""
    before = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            SocketServer(print)
    until(lambda: open_files() <= before)
    with monkeypatch.context() as patch:

        def full(*_: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files")

        patch.setattr(select, "epoll", full)
        with pytest.raises(OSError, match="Too many"):
            SocketServer(print)


def test_what_takes_long_without_another_thread_is_served(
    socket_pool, monkeypatch, crowded
):
    peer, other = socket_pool.connect(), socket_pool.connect()
    other.ask()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for n in (100_000, 3_000_000):
            assert peer.ask(template=LONG, clock=n) == b"\1" * n
            assert other.ask(bytes(n)) == bytes(n)
    assert threads(socket_pool) == [SOCKET]
    assert other.ask(template=LONG, clock=100_000) == b"\1" * 100_000
    assert len(threads(socket_pool)) == 2


def test_nothing_is_left_of_a_server_that_has_closed():
    before = open_files()
    with served() as socket_pool:
        peers = [socket_pool.connect() for _ in range(10)]
        for peer in peers:
            peer.ask()
        parked = peers[0].park()
        for _ in range(50):
            peers[1].ask()
        peers[2].socket.sendall(frame(bytes(10**6))[:500_000])
        socket_pool.server.close(10)
        for peer in peers:
            peer.connection.channel.shut()
        assert threads(socket_pool) == []
        assert parked.cancelled
        assert not parked.by
    # What others close meanwhile is no business of this test.
    until(lambda: open_files() <= before)


def test_what_is_under_way_ends_after_the_server(socket_pool, caplog):
    """The thread that is at a call ends its socket, and frees what there was."""
    peer, gate = held(socket_pool)
    socket_pool.server.close(0.01)
    assert "still at a call" in caplog.text
    assert not socket_pool.ended
    gate.may_end.set()
    until(lambda: socket_pool.ended == [peer.connection])
    until(lambda: socket_pool.server._events.closed)
    assert threads(socket_pool) == []


def test_what_completes_a_call_after_the_end_harms_nobody(socket_pool):
    peer, other = socket_pool.connect(), socket_pool.connect()
    parked, later = peer.park(), other.park()
    found = peer.connection
    until(lambda: not found.is_owned)
    assert found.claim(parked)
    socket_pool.server.close(10)
    assert socket_pool.server._events.closed
    assert found.channel.fileno() >= 0
    with pytest.raises(BrokenPipeError):
        found.answer(parked.finish(1))
    socket_pool.server._leave(found)
    assert found.channel.fileno() < 0
    parked.complete()
    later.complete()
    assert later.cancelled
    assert not later.by


def file_of(number: int | str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:
        return ""  # of the folder itself


def test_a_forked_process_closes_its_copies_and_ends_nothing(socket_pool):
    peers = [socket_pool.connect() for _ in range(3)]
    for peer in peers:
        peer.ask()
    sockets = {file_of(peer.connection.channel.fileno()) for peer in peers}
    assert len(sockets) == 3

    def closed(pipe: Any) -> None:
        left = {file_of(number) for number in os.listdir("/proc/self/fd")}
        assert not sockets & left
        assert socket_pool.server._events.closed

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

    def connect(self, socket_pool: Served, stall: float = 0.2) -> Peer:
        peer = self.peer(stall)
        socket_pool.server.add(peer.connection)
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
def test_frames_by_tls(socket_pool, crowded, secured, n):
    peer, other = secured.connect(socket_pool), secured.connect(socket_pool)
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
    socket_pool, crowded, secured
):
    """A record of several frames shows at the descriptor once."""
    peer = secured.connect(socket_pool)
    peer.socket.sendall(frame(b"a" * 6000) + frame(b"b") + frame(b"c" * 6000)[:-1])
    assert peer.receive()[1] == b"a" * 6000
    assert peer.receive()[1] == b"b"
    peer.socket.sendall(b"c")
    assert peer.receive()[1] == b"c" * 6000
    peer.socket.close()


def test_a_busy_socket_by_tls(monkeypatch, secured):
    monkeypatch.setattr(serving, "QUICK_FRAMES", 0)
    with served() as socket_pool:
        peer = secured.connect(socket_pool)
        for k in (10, 200_000, 5_000_000):
            assert peer.ask(bytes(k)) == bytes(k)
        parked = peer.park()
        trainer = threading.Thread(target=parked.complete, name="trainer")
        trainer.start()
        assert peer.receive()[0].flags == 1
        trainer.join()
        assert peer.ask(b"x") == b"x"
        parked = peer.park()
        peer.socket.close()
        until(lambda: parked.cancelled)


def test_an_error_that_stays_takes_no_core_and_ends_no_server(monkeypatch, caplog):
    """The thread waits after each error, and serves sockets once there is none."""
    look, waits = vars(SocketServer)["_look"], list[float]()

    def failing(self, *args):
        if len(waits) < 3:
            raise OSError("broken")
        return look(self, *args)

    monkeypatch.setattr(SocketServer, "_look", failing)
    time_of = SimpleNamespace(monotonic=time.monotonic, sleep=waits.append)
    monkeypatch.setattr(serving, "time", time_of)
    with served() as socket_pool:
        socket_pool.connect().ask()
    assert waits == [0.1] * 3
    assert caplog.text.count("a thread of sockets failed") == 3

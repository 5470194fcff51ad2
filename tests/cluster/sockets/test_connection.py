"""The state machine of one socket at its host, without the threads that run it."""

from __future__ import annotations

import select
from collections.abc import Iterator
from typing import Any

import pytest

from daskps.cluster.sockets.connection import ANSWERED, BYTES, OTHERS, ROOM
from daskps.cluster.sockets.frames import HEAD_NBYTES
from tests.cluster.sockets.served import ECHO, LONG, MANY, PARK, Peer, frame, unserved

BUFFER = memoryview(bytearray(65_536))


@pytest.fixture
def peer() -> Iterator[Peer]:
    with unserved() as found:
        yield found


class Events:
    """The set of sockets, with one socket in it."""

    def __init__(self, peer: Peer) -> None:
        self.set, self._number = select.epoll(), peer.connection.channel.fileno()
        peer.connection.is_owned = True

    def come(self) -> int:
        """Return what is about the socket; 0 for nothing."""
        found = dict(self.set.poll(0))
        return found.pop(self._number, 0)


@pytest.fixture
def events(peer) -> Iterator[Events]:
    found = Events(peer)
    with found.set:
        peer.connection.leave(found.set)
        yield found


def go_on(peer: Peer, seconds: float = 0.0) -> int:
    return peer.connection.go_on(BUFFER, seconds)


def park(peer: Peer, events: Events, clock: int = 0) -> Any:
    """Have a call of a socket parked, which is in the set then."""
    peer.send(template=PARK, clock=clock)
    assert events.come()
    assert peer.connection.own()
    assert go_on(peer) == OTHERS
    parked: Any = peer.connection.waiting
    assert not peer.connection.claim(parked)  # this thread owns it still
    peer.connection.leave(events.set)
    return parked


@pytest.mark.parametrize("seconds", [0.0, 1.0])
@pytest.mark.parametrize("cut", [1, HEAD_NBYTES - 1, HEAD_NBYTES, HEAD_NBYTES + 1])
def test_it_stops_where_there_are_no_bytes_and_goes_on_there(peer, cut, seconds):
    assert go_on(peer, seconds) == BYTES
    assert not peer.connection.is_within
    data = frame(b"x" * 100)
    peer.socket.sendall(data[:cut])
    assert go_on(peer, seconds) == BYTES
    assert peer.connection.is_within
    peer.socket.sendall(data[cut:])
    assert go_on(peer, seconds) == ANSWERED
    assert not peer.connection.is_within
    assert peer.receive()[1] == b"x" * 100


def test_frames_that_come_together_are_served_one_by_one(peer):
    peer.socket.sendall(frame(b"a") + frame(b"b") + frame(b"c")[:10])
    for body in (b"a", b"b"):
        assert go_on(peer) == ANSWERED
        assert peer.connection.channel.has_more
        assert peer.receive()[1] == body
    assert go_on(peer) == BYTES


@pytest.mark.parametrize("template", [ECHO, LONG])
def test_what_takes_long_is_said_before(peer, template):
    """Once for a thread that may wait then, and each time for one that may not."""
    body = bytes(70_000 if template == ECHO else 0)
    seconds, said = [0.0, 1.0], list[int]()

    def leave() -> float:
        said.append(len(peer.calls.threads))
        return seconds[len(said) > 2]

    peer.socket.sendall(frame(body, template, 5)[: HEAD_NBYTES + 50_000])
    if template == ECHO:
        assert peer.connection.go_on(BUFFER, 0.0, leave) == BYTES
        assert peer.connection.go_on(BUFFER, 0.0, leave) == BYTES
        peer.socket.sendall(bytes(20_000))
    assert peer.connection.go_on(BUFFER, 0.0, leave) == ANSWERED
    assert 0 < len(said) <= 4
    assert not any(said)
    # A thread that may wait has said so already; what is small nobody waits for.
    n = len(said)
    for wait in (1.0, 0.0):
        peer.send(b"x", ECHO if not wait else template)
        assert peer.connection.go_on(BUFFER, wait, leave) == ANSWERED
    assert len(said) == n


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_an_answer_that_its_caller_does_not_read(peer, seconds):
    peer.send(template=MANY, clock=10**6)
    assert go_on(peer, seconds) == ROOM
    n = peer.connection.n_unsent
    assert 0 < n <= 10**6
    assert go_on(peer, seconds) == ROOM
    found = peer.exactly(HEAD_NBYTES + 10**6 - n)
    while go_on(peer, seconds) == ROOM:
        found += peer.socket.recv(10**6)
    found += peer.exactly(HEAD_NBYTES + 10**6 - len(found))
    assert found[HEAD_NBYTES:] == b"\1" * 10**6
    assert not peer.connection.is_within


def test_a_socket_has_one_event_and_one_owner(peer, events):
    found = peer.connection
    assert not events.come()
    peer.send(b"a")
    assert events.come()
    assert not events.come()  # it came
    assert found.own()
    assert not found.own()  # late, of a thread that has heard the same
    assert go_on(peer) == ANSWERED
    peer.send(b"b")
    assert not events.come()
    found.leave(events.set)
    assert events.come()
    # Bytes that were received already bring an event as well.
    assert found.own()
    peer.socket.sendall(frame(b"c"))
    assert go_on(peer) == ANSWERED
    assert found.channel.has_more
    found.leave(events.set)
    assert events.come() == select.EPOLLOUT
    assert found.own()
    assert go_on(peer) == ANSWERED


def test_who_claims_a_call_is_alone_with_its_socket(peer, events):
    found = peer.connection
    parked = park(peer, events)
    assert not found.claim(object())  # of another frame
    assert found.claim(parked)
    assert not found.claim(parked)
    assert not found.own()  # who has heard its caller meanwhile
    found.answer(parked.finish(0.0))
    found.leave(events.set)
    assert not found.claim(parked)
    assert peer.receive()[0].number == 7
    assert not events.come()
    peer.send(b"next")
    assert events.come()


def test_an_event_that_its_owner_has_missed_comes_again(peer, events):
    found = peer.connection
    parked = park(peer, events)
    assert found.claim(parked)
    peer.send(b"next")
    assert events.come()
    assert not found.own()
    found.answer(parked.finish(0.0))
    assert not events.come()
    found.leave(events.set)
    assert events.come()


def test_an_answer_is_handed_to_who_hears_of_sockets(peer, events):
    found = peer.connection
    parked = park(peer, events)
    found.hand_over(events.set, object())
    assert not events.come()
    found.hand_over(events.set, parked)
    assert events.come() == select.EPOLLOUT
    assert found.own()
    found.hand_over(events.set, parked)
    assert not events.come()
    assert found.waiting is parked


def test_an_answer_that_was_not_sent_at_once_goes_on(peer, events):
    parked = park(peer, events, clock=10**6)
    found = peer.connection
    found.claim(parked)
    found.answer(parked.finish(0.0))
    found.leave(events.set)
    assert found.n_unsent
    got = bytearray()
    while found.n_unsent:
        got += peer.socket.recv(10**6)
        assert events.come() == select.EPOLLOUT
        found.own()
        go_on(peer)
        found.leave(events.set)
    got += peer.exactly(HEAD_NBYTES + 10**6 - len(got))
    assert got[HEAD_NBYTES:] == b"\1" * 10**6


def test_a_socket_whose_answer_failed_ends_at_its_next_event(peer, events):
    parked = park(peer, events)
    found = peer.connection
    found.claim(parked)
    found.channel.shut()
    with pytest.raises(BrokenPipeError):
        found.answer(parked.finish(0.0))
    found.leave(events.set)
    assert events.come()
    with pytest.raises(ConnectionError):
        go_on(peer)


def test_the_end_of_a_socket_takes_its_call_back(peer, events):
    parked = park(peer, events)
    peer.connection.end()
    assert parked.cancelled
    peer.connection.end()


def test_a_socket_is_idle_after_a_while_without_frames(peer, events):
    found = peer.connection
    assert not found.is_idle(found.used)
    assert found.is_idle(found.used + 2)
    parked = park(peer, events)
    assert not found.is_idle(found.used + 2)
    found.claim(parked)
    assert not found.is_idle(found.used + 2)
    found.leave(events.set)
    assert found.is_idle(found.used + 2)
    found.own()
    peer.socket.sendall(frame(b"x")[:-1])
    go_on(peer)
    found.leave(events.set)
    assert not found.is_idle(found.used + 2)


def test_whether_something_has_come_is_seen_without_taking_it(peer):
    channel = peer.connection.channel
    assert not channel.has_come
    peer.send(b"a")
    assert channel.has_come
    assert go_on(peer) == ANSWERED
    assert not channel.has_come
    peer.socket.close()
    assert channel.has_come

"""The state machine of one lane at its host, without the threads that run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from daskps.cluster.lane.connection import Connection
from daskps.cluster.lane.frames import HEAD_NBYTES
from daskps.cluster.lane.waits import ANSWERED, BYTES, OTHERS, ROOM, THREAD
from tests.cluster.lane.served import LONG, MANY, PARK, Peer, frame, unserved

BUFFER = memoryview(bytearray(65_536))


class Home:
    """Counts how often a connection is given to it."""

    def __init__(self) -> None:
        self.n_taken = 0

    def take(self, connection: Connection) -> None:
        self.n_taken += 1

    def forget(self, connection: Connection) -> None:
        """Nothing to forget."""


@pytest.fixture
def peer() -> Iterator[Peer]:
    with unserved() as found:
        yield found


@pytest.fixture
def home(peer) -> Home:
    found = peer.connection.home = Home()
    return found


def go_on(peer: Peer, seconds: float = 0.0) -> int:
    return peer.connection.go_on(BUFFER, seconds)


def park(peer: Peer, clock: int = 0) -> Any:
    peer.send(form=PARK, clock=clock)
    assert go_on(peer) == OTHERS
    return peer.connection.waiting


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


def test_what_takes_long_is_left_to_a_thread_that_may_wait(peer):
    peer.send(form=LONG, clock=5)
    assert go_on(peer) == go_on(peer) == THREAD
    assert not peer.calls.threads
    assert go_on(peer, 1.0) == ANSWERED
    assert peer.receive()[1] == b"\1" * 5
    peer.socket.sendall(frame(bytes(65_537))[:HEAD_NBYTES])
    assert go_on(peer) == THREAD
    peer.socket.sendall(frame(bytes(65_536))[:HEAD_NBYTES])  # the body of the last one
    assert go_on(peer, 1.0) == BYTES


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_an_answer_that_its_caller_does_not_read(peer, seconds):
    peer.send(form=MANY, clock=10**6)
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


def test_who_claims_a_call_is_alone_with_its_lane(peer, home):
    found = peer.connection
    assert found.claim() is None
    parked = park(peer)
    assert not found.is_mine
    assert found.claim(object()) is None  # of another frame
    assert found.claim(parked) is parked
    assert found.claim() is None
    assert not found.is_mine
    found.answer(parked.finish(0.0))
    found.give_back()
    assert found.is_mine
    assert peer.receive()[0].number == 7
    # Nobody has missed it, and all of it was sent.
    assert home.n_taken == 0


def test_a_home_that_has_missed_a_lane_is_told(peer, home):
    found = peer.connection
    assert not found.miss()
    park(peer)
    assert not found.miss()
    found.claim()
    assert found.miss()
    assert home.n_taken == 0
    found.give_back()
    assert home.n_taken == 1
    assert not found.miss()


def test_a_home_goes_on_with_an_answer_that_was_not_sent_at_once(peer, home):
    parked = park(peer, clock=10**6)
    peer.connection.claim()
    peer.connection.answer(parked.finish(0.0))
    peer.connection.give_back()
    assert home.n_taken == 1
    assert peer.connection.n_unsent
    found = bytearray()
    while peer.connection.n_unsent:
        found += peer.socket.recv(10**6)
        go_on(peer)
    found += peer.exactly(HEAD_NBYTES + 10**6 - len(found))
    assert found[HEAD_NBYTES:] == b"\1" * 10**6


def test_a_home_ends_a_lane_whose_answer_failed(peer, home):
    parked = park(peer)
    peer.connection.claim()
    peer.connection.channel.shut()
    with pytest.raises(BrokenPipeError):
        peer.connection.answer(parked.finish(0.0))
    peer.connection.give_back()
    assert home.n_taken == 1
    with pytest.raises(BrokenPipeError):
        go_on(peer)


def test_the_end_of_a_lane_takes_its_call_back(peer):
    parked = park(peer)
    peer.connection.end()
    assert parked.cancelled
    peer.connection.end()


def test_a_lane_is_idle_after_a_while_without_frames(peer):
    found = peer.connection
    assert not found.is_idle(found.used)
    assert found.is_idle(found.used + 2)
    parked = park(peer)
    assert not found.is_idle(found.used + 2)
    found.claim(parked)
    found.give_back()
    assert found.is_idle(found.used + 2)
    peer.socket.sendall(frame(b"x")[:-1])
    go_on(peer)
    assert not found.is_idle(found.used + 2)

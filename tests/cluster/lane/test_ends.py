"""The caller's end of a lane, against a host that says what answers nothing."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from daskps.cluster import connections, upstream
from daskps.cluster.caller import lanes
from daskps.cluster.caller.counters import Counters
from daskps.cluster.caller.lane import Lane, LaneRefusedError, LaneSaid
from daskps.cluster.caller.lane_form import LaneForm, LaneFrame
from daskps.cluster.caller.lanes import Lanes
from daskps.cluster.caller.routes import Reply
from daskps.cluster.caller.socket_carrier import Sockets
from daskps.cluster.caller.targets import ReadSlice
from daskps.cluster.lane.channel import BUFFER_NBYTES, Channel
from daskps.cluster.lane.frames import (
    ANSWER,
    APPLIED,
    CALL,
    HEAD_NBYTES,
    MOST_FORMS,
    PARKED,
    Head,
    pack_answers,
    pack_head,
    pack_refusal,
    unpack_head,
)
from daskps.cluster.wire.deadline import Deadline
from daskps.cluster.wire.messages import Answer, Call, Part
from daskps.errors import ProtocolError
from daskps.shards.steps import GRADIENT, Item, Step


def read_of(n: int, number: int = 0, start: int = 0) -> LaneFrame:
    """Return a read of so many numbers from the one shard."""
    asked = ("float64", 0, n)
    call = Call("store", (Part(0, Step(), (asked,)),))
    where = slice(start, start + n)
    reads = [[ReadSlice(asked, number, where)]]
    return LaneFrame(LaneForm("a", call), (), reads, nbytes=0)


READ = read_of(3)
NUMBERS = np.array([1.0, 2.0, 3.0])
WELL = Answer(0, version=7, arrays=(NUMBERS,))


class Host:
    """The other end: it answers the form by itself, and what it is told then."""

    def __init__(self, there: socket.socket) -> None:
        self._channel, self._there = Channel(there, 30.0), there

    def send(self, *buffers: bytes) -> None:
        self._channel.send(buffers)

    def left(self) -> int:
        """Return how many bytes the other end has not taken yet."""
        asked = fcntl.ioctl(self._there, termios.TIOCOUTQ, bytes(4))
        found: int = struct.unpack("i", asked)[0]
        return found

    def head(self) -> Head:
        head = self._channel.receive_head()
        self._channel.receive_bytes(head.nbytes)
        return head


@pytest.fixture
def ends() -> Iterator[tuple[Lane, Host]]:
    here, there = socket.socketpair()
    with here, there:
        yield Lane(here, 30.0), Host(there)


def ask(lane: Lane, host: Host, form: LaneFrame = READ) -> None:
    """Send a call whose form the host takes; the number of its frame is 2."""
    host.send(pack_head(Head(ANSWER, number=1)))
    lane.ask(form, LaneSaid())


def frames(*answers: Answer, number: int = 2) -> bytes:
    return b"".join(bytes(b) for b in pack_answers(answers, number))


def test_an_answer_fills_the_arrays_of_its_caller(ends):
    lane, host = ends
    ask(lane, host)
    host.send(frames(WELL))
    out = np.zeros(6)[::2]
    assert lane.answer(READ, [out]) == (0, 7, 0, APPLIED)
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize("n", [1, 3, BUFFER_NBYTES // 8, 100_000])
@pytest.mark.parametrize("cut", [1, 64, 96, 97])
def test_an_answer_that_comes_in_pieces_is_the_same(ends, n, cut):
    lane, host = ends
    form, numbers, out = read_of(n), np.arange(n, dtype="f8"), np.zeros(n)
    ask(lane, host, form)
    data = frames(Answer(0, version=7, arrays=(numbers,)))

    def send() -> None:
        host.send(data[:cut])
        while host.left():
            pass
        host.send(data[cut:])

    thread = threading.Thread(target=send)
    thread.start()
    assert lane.answer(form, [out]) == (0, 7, 0, APPLIED)
    thread.join()
    assert out.tolist() == numbers.tolist()
    # Nothing of it is left for the next one.
    lane.ask(form, LaneSaid())
    host.send(frames(Answer(0, parked=True, applied=False), number=3))
    assert lane.answer(form, [out]) == (0, 0, 0, PARKED)


def test_where_an_answer_goes_is_the_own_of_each_who_says_the_same_form(ends):
    lane, host = ends
    ask(lane, host)
    host.send(frames(WELL))
    first, second = np.zeros(3), np.zeros(5)
    lane.answer(READ, [first])
    other = read_of(3, number=1, start=2)
    assert other.key == READ.key
    for number, value in ((3, 4.0), (4, 5.0)):
        lane.ask(other, LaneSaid())
        answer = Answer(0, version=8, arrays=(np.full(3, value),))
        host.send(frames(answer, number=number))
        lane.answer(other, [first, second])
        assert second.tolist() == [0, 0, value, value, value]
    assert first.tolist() == [1, 2, 3]


def test_a_part_that_waits_has_no_arrays(ends):
    lane, host = ends
    ask(lane, host)
    host.send(frames(Answer(0, parked=True, applied=False)))
    out = np.zeros(3)
    assert lane.answer(READ, [out]) == (0, 0, 0, PARKED)
    assert out.tolist() == [0, 0, 0]


LONG = pack_head(Head(ANSWER, 32 + 32, 2)) + frames(WELL)[HEAD_NBYTES:] + bytes(8)


@pytest.mark.parametrize(
    "said",
    [
        frames(WELL, number=1),
        frames(WELL) + b"more",
        frames(Answer(1, arrays=(NUMBERS,))),
        frames(Answer(0, arrays=(NUMBERS[:2],))),
        LONG,
        pack_head(Head(ANSWER, 0, 2)),
        pack_head(Head(ANSWER, 2**60, 2)) + bytes(32),
        pack_head(Head(CALL, 0, 2)),
        b"HTTP/1.1 400 Bad Request\r\n".ljust(64),
    ],
    ids=["old", "more", "shard", "short", "long", "empty", "huge", "call", "http"],
)
def test_what_answers_nothing_is_found(ends, said):
    lane, host = ends
    ask(lane, host)
    host.send(said)
    with pytest.raises(ProtocolError):
        lane.answer(READ, [np.zeros(3)])


def test_a_refusal_leaves_the_lane_as_it_was(ends):
    lane, host = ends
    ask(lane, host)
    host.send(b"".join(pack_refusal(ValueError("the reason"), 2)))
    with pytest.raises(LaneRefusedError, match="ValueError: the reason"):
        lane.answer(READ, [np.zeros(3)])
    lane.ask(READ, LaneSaid())
    host.send(frames(WELL, number=3))
    assert lane.answer(READ, [np.zeros(3)])[1] == 7


def test_a_form_is_said_once_and_the_oldest_is_forgotten(ends):
    lane, host = ends

    def push(clock: int, run: int) -> list[Head]:
        """Return the heads of what is sent for a push of a run."""
        step = Step(GRADIENT, (Item(0, 0, NUMBERS),), run=run)
        form = LaneForm("a", Call("store", (Part(0, step),)))
        frame = LaneFrame(form, [("w", 1, 4)], [[]], nbytes=24)
        before, known = lane._number, len(lane._forms)
        # In case that it asks; else it answers nothing, and nobody looks.
        if run not in runs:
            host.send(pack_head(Head(ANSWER, number=before + 1)))
        lane.ask(frame, LaneSaid(clock, arrays={"w": np.zeros(5)}))
        assert len(lane._forms) >= known
        return [host.head() for _ in range(lane._number - before)]

    runs: set[int] = set()
    for run in range(MOST_FORMS):
        form, call = push(0, run)
        assert (form.form, call.form) == (run, run)
        runs.add(run)
    [call] = push(1, 5)
    assert (call.form, call.clock, call.nbytes) == (5, 1, 24)
    form, call = push(0, MOST_FORMS)
    assert (form.form, call.form) == (0, 0)
    runs.discard(0)
    form, call = push(0, 0)
    assert form.form == call.form == 1


def test_a_host_that_refuses_a_form_is_heard(ends):
    lane, host = ends
    host.send(b"".join(pack_refusal(ProtocolError("no such piece"), 1)))
    with pytest.raises(LaneRefusedError, match="no such piece"):
        lane.ask(READ, LaneSaid())
    assert unpack_head(pack_head(host.head())).kind != CALL
    host.send(pack_head(Head(ANSWER, number=2)))
    lane.ask(READ, LaneSaid())  # it is said again


def test_who_wants_a_lane_while_the_last_one_opens_opens_no_other(monkeypatch):
    """Wherever the event loop is with it: it says so until the lane is there."""
    monkeypatch.setattr(lanes, "CALLS_BEFORE", 1)
    monkeypatch.setattr(lanes, "MOST_LANES", 1)
    monkeypatch.setattr(upstream, "at_close", lambda *_: None)
    here, there = socket.socketpair()
    started: list[Any] = []
    link: Any = SimpleNamespace(node=None, pool=None, start=started.append)
    of = Lanes(link)

    async def ask_for_socket(*_: Any) -> Any:
        of.take("a", "store")
        return {"status": "OK", "value": None}, here

    def lane(*args: Any) -> Lane:
        of.take("a", "store")  # as another thread's call does meanwhile
        return Lane(*args)

    monkeypatch.setattr(connections, "ask_for_socket", ask_for_socket)
    monkeypatch.setattr(lanes, "Lane", lane)
    of.take("a", "store")
    asyncio.run(started[0]())
    assert len(started) == 1
    assert of.count(["a"]) == 1
    of.close()
    assert of.count(["a"]) == 0
    there.close()


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    monkeypatch.setattr(lanes, "CALLS_BEFORE", 1)
    made = Opening(monkeypatch)
    yield made
    made.of.close()
    for there in made.theirs:
        there.close()


class Opening:
    """Lanes that are opened at once, and the other ends of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.theirs: list[socket.socket] = []
        link: Any = SimpleNamespace(node=None, pool=None)
        link.start = lambda work: asyncio.run(work())
        monkeypatch.setattr(upstream, "at_close", lambda *_: None)
        monkeypatch.setattr(connections, "ask_for_socket", self._ask)
        self.of = Lanes(link)

    async def _ask(self, *_: Any) -> Any:
        here, there = socket.socketpair()
        self.theirs.append(there)
        return {"status": "OK", "value": None}, here

    def opened(self, worker: str) -> Lane:
        """Want a lane, which there is at the next call."""
        assert self.of.take(worker, "store") is None
        lane = self.of.take(worker, "store")
        assert lane is not None
        return lane


def test_a_lane_that_is_opened_is_in_the_log(opening, caplog):
    with caplog.at_level(logging.DEBUG, "daskps"):
        opening.of.give_back("there", opening.opened("there"))
    assert caplog.messages == ["a lane to there is open"]


def test_lanes_of_hosts_that_are_gone_end_when_the_next_is_opened(opening):
    """Their shards have other owners: nobody calls them, and hears of it."""
    gone, used = opening.opened("gone"), opening.opened("gone")
    opening.of.give_back("gone", gone)
    for there in opening.theirs:
        there.close()
    kept = opening.opened("kept")
    assert not gone.is_open
    assert used.is_open  # whoever has it finds out
    opening.of.give_back("kept", kept)
    opening.of.give_back("other", opening.opened("other"))
    assert kept.is_open
    assert opening.of.count(["gone", "kept", "other"]) == 3
    opening.of.end("gone", used, by_caller=False)
    assert opening.of.count(["gone"]) == 0


@pytest.mark.parametrize("by_caller", [True, False])
def test_only_a_host_that_fails_is_left_alone_for_a_while(opening, by_caller):
    """A caller with a short timeout, or Ctrl-C, ends its lane and may have another."""
    opening.of.end("a", opening.opened("a"), by_caller=by_caller)
    assert opening.of.take("a", "store") is None
    if lane := opening.of.take("a", "store"):
        opening.of.give_back("a", lane)
    assert opening.of.count(["a"]) == by_caller


class Away:
    """What sends by message, and says at once that it is vain to wait for a host."""

    def __init__(self) -> None:
        self.counters, self.asked = Counters(), list[Any]()
        self.sent: list[tuple[Any, Any]] = []

    def watch(self, worker: str, shards: Any, run: int, stop: Any) -> Any:
        self.asked.append((worker, shards, run))
        stop()
        return SimpleNamespace(stop=lambda: None)

    def send(self, request: Any, shards: Any, _: Any) -> Any:
        self.sent.append((request, shards))
        return SimpleNamespace(result=lambda: Reply([(0, 3)]), stop=lambda: None)


def test_a_call_that_waits_in_vain_goes_on_by_message(caplog):
    """The directory knows that its host is gone, which says nothing."""
    here, there = socket.socketpair()
    with here, there:
        lane, host, far = Lane(here, 30.0), Host(there), cast("Any", Away())
        form = read_of(3)
        form.patience = 0.001
        ended: list[Lane] = []
        pool: Any = SimpleNamespace(
            take=lambda *_: lane, end=lambda _, lane, **__: ended.append(lane)
        )
        about: Any = {"lanes": pool, "frames": [form], "words": ()}
        route: Any = SimpleNamespace(**about, run=7, may_wait=True)
        host.send(pack_head(Head(ANSWER, number=1)))
        call = Sockets(
            far,
            route,
            LaneSaid(outs=[np.zeros(3)]),
            make=lambda: cast("Any", "the same"),
            deadline=Deadline(None, "a pull"),
        )
        with caplog.at_level(logging.DEBUG, "daskps"):
            assert call.run() == Reply([(0, 3)])
        assert "a pull goes on by message: ConnectionResetError" in caplog.text
        assert far.asked == [("a", (0,), 7)]
        assert far.sent == [("the same", (0,))]
        assert (ended, lane.is_open) == ([lane], False)

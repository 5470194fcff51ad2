"""The caller's end of a socket, against a host that says what answers nothing."""

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
from daskps.cluster.caller import socket_pool
from daskps.cluster.caller.call_socket import (
    CallSocket,
    SocketPayload,
    SocketRefusedError,
)
from daskps.cluster.caller.call_template import CallTemplate, SocketFrame
from daskps.cluster.caller.routes import Reply
from daskps.cluster.caller.socket_carrier import SocketCarrier
from daskps.cluster.caller.socket_pool import SocketPool
from daskps.cluster.caller.targets import ReadSlice
from daskps.cluster.counters import Counters
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.sockets.channel import BUFFER_NBYTES, Channel
from daskps.cluster.sockets.frames import (
    ANSWER,
    APPLIED,
    CALL,
    HEAD_NBYTES,
    MOST_TEMPLATES,
    PARKED,
    Head,
    pack_answers,
    pack_head,
    pack_refusal,
    unpack_head,
)
from daskps.errors import ProtocolError
from daskps.shards.steps import GRADIENT, Item, Step


def read_of(n: int, number: int = 0, start: int = 0) -> SocketFrame:
    """Return a read of so many numbers from the one shard."""
    asked = ("float64", 0, n)
    call = Call("store", (Part(0, Step(), (asked,)),))
    where = slice(start, start + n)
    reads = [[ReadSlice(asked, number, where)]]
    return SocketFrame(CallTemplate("a", call), (), reads, nbytes=0)


READ = read_of(3)
NUMBERS = np.array([1.0, 2.0, 3.0])
WELL = Answer(0, version=7, arrays=(NUMBERS,))


class Node:
    """What stands for a client."""


class Host:
    """The other end: it answers the template by itself, and what it is told then."""

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
def ends() -> Iterator[tuple[CallSocket, Host]]:
    here, there = socket.socketpair()
    with here, there:
        yield CallSocket(here, 30.0), Host(there)


def ask(call_socket: CallSocket, host: Host, template: SocketFrame = READ) -> None:
    """Send a call whose template the host takes; the number of its frame is 2."""
    host.send(pack_head(Head(ANSWER, number=1)))
    call_socket.ask(template, SocketPayload())


def frames(*answers: Answer, number: int = 2) -> bytes:
    return b"".join(bytes(b) for b in pack_answers(answers, number))


def test_an_answer_fills_the_arrays_of_its_caller(ends):
    call_socket, host = ends
    ask(call_socket, host)
    host.send(frames(WELL))
    out = np.zeros(6)[::2]
    assert call_socket.answer(READ, [out]) == (0, 7, 0, APPLIED)
    assert out.tolist() == [1, 2, 3]


@pytest.mark.parametrize("n", [1, 3, BUFFER_NBYTES // 8, 100_000])
@pytest.mark.parametrize("cut", [1, 64, 96, 97])
def test_an_answer_that_comes_in_pieces_is_the_same(ends, n, cut):
    call_socket, host = ends
    template, numbers, out = read_of(n), np.arange(n, dtype="f8"), np.zeros(n)
    ask(call_socket, host, template)
    data = frames(Answer(0, version=7, arrays=(numbers,)))

    def send() -> None:
        host.send(data[:cut])
        while host.left():
            pass
        host.send(data[cut:])

    thread = threading.Thread(target=send)
    thread.start()
    assert call_socket.answer(template, [out]) == (0, 7, 0, APPLIED)
    thread.join()
    assert out.tolist() == numbers.tolist()
    # Nothing of it is left for the next one.
    call_socket.ask(template, SocketPayload())
    host.send(frames(Answer(0, parked=True, applied=False), number=3))
    assert call_socket.answer(template, [out]) == (0, 0, 0, PARKED)


def test_where_an_answer_goes_is_the_own_of_each_who_says_the_same_template(ends):
    call_socket, host = ends
    ask(call_socket, host)
    host.send(frames(WELL))
    first, second = np.zeros(3), np.zeros(5)
    call_socket.answer(READ, [first])
    other = read_of(3, number=1, start=2)
    assert other.key == READ.key
    for number, value in ((3, 4.0), (4, 5.0)):
        call_socket.ask(other, SocketPayload())
        answer = Answer(0, version=8, arrays=(np.full(3, value),))
        host.send(frames(answer, number=number))
        call_socket.answer(other, [first, second])
        assert second.tolist() == [0, 0, value, value, value]
    assert first.tolist() == [1, 2, 3]


def test_a_part_that_waits_has_no_arrays(ends):
    call_socket, host = ends
    ask(call_socket, host)
    host.send(frames(Answer(0, parked=True, applied=False)))
    out = np.zeros(3)
    assert call_socket.answer(READ, [out]) == (0, 0, 0, PARKED)
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
    call_socket, host = ends
    ask(call_socket, host)
    host.send(said)
    with pytest.raises(ProtocolError):
        call_socket.answer(READ, [np.zeros(3)])


def test_a_refusal_leaves_the_socket_as_it_was(ends):
    call_socket, host = ends
    ask(call_socket, host)
    host.send(b"".join(pack_refusal(ValueError("the reason"), 2)))
    with pytest.raises(SocketRefusedError, match="ValueError: the reason"):
        call_socket.answer(READ, [np.zeros(3)])
    call_socket.ask(READ, SocketPayload())
    host.send(frames(WELL, number=3))
    assert call_socket.answer(READ, [np.zeros(3)])[1] == 7


def test_a_form_is_said_once_and_the_oldest_is_forgotten(ends):
    call_socket, host = ends

    def push(clock: int, run: int) -> list[Head]:
        """Return the heads of what is sent for a push of a run."""
        step = Step(GRADIENT, (Item(0, 0, NUMBERS),), run=run)
        template = CallTemplate("a", Call("store", (Part(0, step),)))
        frame = SocketFrame(template, [("w", 1, 4)], [[]], nbytes=24)
        before, known = call_socket._number, len(call_socket._templates)
        # In case that it asks; else it answers nothing, and nobody looks.
        if run not in runs:
            host.send(pack_head(Head(ANSWER, number=before + 1)))
        call_socket.ask(frame, SocketPayload(clock, arrays={"w": np.zeros(5)}))
        assert len(call_socket._templates) >= known
        return [host.head() for _ in range(call_socket._number - before)]

    runs: set[int] = set()
    for run in range(MOST_TEMPLATES):
        template, call = push(0, run)
        assert (template.template, call.template) == (run, run)
        runs.add(run)
    [call] = push(1, 5)
    assert (call.template, call.clock, call.nbytes) == (5, 1, 24)
    template, call = push(0, MOST_TEMPLATES)
    assert (template.template, call.template) == (0, 0)
    runs.discard(0)
    template, call = push(0, 0)
    assert template.template == call.template == 1


def test_a_host_that_refuses_a_form_is_heard(ends):
    call_socket, host = ends
    host.send(b"".join(pack_refusal(ProtocolError("no such piece"), 1)))
    with pytest.raises(SocketRefusedError, match="no such piece"):
        call_socket.ask(READ, SocketPayload())
    assert unpack_head(pack_head(host.head())).kind != CALL
    host.send(pack_head(Head(ANSWER, number=2)))
    call_socket.ask(READ, SocketPayload())  # it is said again


def test_who_wants_a_socket_while_the_last_one_opens_opens_no_other(monkeypatch):
    """Wherever the event loop is with it: it says so until the socket is there."""
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    monkeypatch.setattr(socket_pool, "MOST_SOCKETS", 1)
    monkeypatch.setattr(upstream, "at_close", lambda *_: None)
    here, there = socket.socketpair()
    started: list[Any] = []
    link: Any = SimpleNamespace(node=Node(), pool=None, start=started.append)
    of = SocketPool(link)

    async def ask_for_socket(*_: Any) -> Any:
        of.take("a", "store")
        return {"status": "OK", "value": None}, here

    def call_socket(*args: Any) -> CallSocket:
        of.take("a", "store")  # as another thread's call does meanwhile
        return CallSocket(*args)

    monkeypatch.setattr(connections, "ask_for_socket", ask_for_socket)
    monkeypatch.setattr(socket_pool, "CallSocket", call_socket)
    of.take("a", "store")
    asyncio.run(started[0]())
    assert len(started) == 1
    assert of.count(["a"]) == 1
    of.close()
    assert of.count(["a"]) == 0
    there.close()


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opening]:
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    made = Opening(monkeypatch)
    yield made
    made.of.close()
    for there in made.theirs:
        there.close()


class Opening:
    """Sockets that are opened at once, and the other ends of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.theirs: list[socket.socket] = []
        link: Any = SimpleNamespace(node=Node(), pool=None)
        link.start = lambda work: asyncio.run(work())
        monkeypatch.setattr(upstream, "at_close", lambda *_: None)
        monkeypatch.setattr(connections, "ask_for_socket", self._ask)
        self.of = SocketPool(link)

    async def _ask(self, *_: Any) -> Any:
        here, there = socket.socketpair()
        self.theirs.append(there)
        return {"status": "OK", "value": None}, here

    def opened(self, worker: str) -> CallSocket:
        """Want a socket, which there is at the next call."""
        assert self.of.take(worker, "store") is None
        call_socket = self.of.take(worker, "store")
        assert call_socket is not None
        return call_socket


def test_a_socket_that_is_opened_is_in_the_log(opening, caplog):
    with caplog.at_level(logging.DEBUG, "daskps"):
        opening.of.give_back("there", opening.opened("there"))
    assert caplog.messages == ["a socket to there is open"]


def test_sockets_of_hosts_that_are_gone_end_when_the_next_is_opened(opening):
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
    """A caller with a short timeout, or Ctrl-C, ends its socket and may have another."""
    opening.of.end("a", opening.opened("a"), by_caller=by_caller)
    assert opening.of.take("a", "store") is None
    if call_socket := opening.of.take("a", "store"):
        opening.of.give_back("a", call_socket)
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
        call_socket, host, remote = (
            CallSocket(here, 30.0),
            Host(there),
            cast("Any", Away()),
        )
        template = read_of(3)
        template.patience = 0.001
        ended: list[CallSocket] = []
        pool: Any = SimpleNamespace(
            take=lambda *_: call_socket,
            end=lambda _, call_socket, **__: ended.append(call_socket),
        )
        remote.sockets = pool
        about: Any = {"frames": [template], "words": ()}
        route: Any = SimpleNamespace(**about, run=7, may_wait=True)
        host.send(pack_head(Head(ANSWER, number=1)))
        call = SocketCarrier(
            remote,
            route,
            SocketPayload(outs=[np.zeros(3)]),
            make=lambda: cast("Any", "the same"),
            deadline=Deadline(None, "a pull"),
        )
        with caplog.at_level(logging.DEBUG, "daskps"):
            assert call.run() == Reply([(0, 3)])
        assert "a pull goes on by message: ConnectionResetError" in caplog.text
        assert remote.asked == [("a", (0,), 7)]
        assert remote.sent == [("the same", (0,))]
        assert (ended, call_socket.is_open) == ([call_socket], False)

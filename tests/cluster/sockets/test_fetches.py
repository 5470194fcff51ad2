"""Fetching by a socket: what graph rounds and snapshots ask of other hosts."""

from __future__ import annotations

import functools
import json
import random
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from daskps.cluster.caller import socket_pool
from daskps.cluster.caller.call_socket import CallSocket, SocketRefusedError
from daskps.cluster.host.contributions import Contributions
from daskps.cluster.host.socket_calls import SocketCalls
from daskps.cluster.protocol.handlers import FETCHES, HOST, Handler
from daskps.cluster.sockets.channel import Channel
from daskps.cluster.sockets.connection import BYTES, Connection
from daskps.cluster.sockets.fetches import pack_fetch, pack_fetched, unpack_fetch
from daskps.cluster.sockets.frames import (
    ANSWER,
    FETCH,
    HEAD_NBYTES,
    MOST_TEXT,
    REFUSAL,
    Head,
    pack_head,
    pack_text,
    unpack_head,
)
from daskps.cluster.sockets.served import ServedChannel
from daskps.errors import ContributionLostError, ProtocolError
from tests.support import cleaned, local_cluster, served_by

#: Nobody gets to it.
NO_HOST: Any = SimpleNamespace()
NUMBERS = np.array([1.0, 2.0, 3.0])
SOCKET = {
    "daskps.carriers.process": False,
    "daskps.carriers.machine": False,
    "daskps.carriers.socket": True,
    "distributed.worker.profile.enabled": False,
}


def room(said: Any) -> list[Any]:
    """Return arrays as long as an answer says."""
    return [np.empty(n) for n in said]


Ends = tuple[CallSocket, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = socket.socketpair()
    with here, there:
        yield CallSocket(here, 30.0), Channel(there, 30.0)


def answer(value: Any, *arrays: Any, number: int = 1) -> bytes:
    buffers = pack_fetched(value, arrays, number)
    return b"".join(bytes(memoryview(b).cast("B")) for b in buffers)


def test_a_fetch_brings_a_text_and_arrays(ends):
    call_socket, host = ends
    call_socket.fetch("sums", {"place": (1, 0, 2), "weight": 0.1})
    head = host.receive_head()
    assert (head.kind, head.number) == (FETCH, 1)
    what, about = unpack_fetch(host.receive_bytes(head.nbytes))
    assert (what, about) == ("sums", {"place": [1, 0, 2], "weight": 0.1})
    host.send([answer([3, 0, 3], NUMBERS, NUMBERS[:0], 2 * NUMBERS)])
    said, arrays = call_socket.fetched(room)
    assert said == [3, 0, 3]
    assert [a.tolist() for a in arrays] == [[1, 2, 3], [], [2, 4, 6]]


WELL = answer([3], NUMBERS)


@pytest.mark.parametrize(
    "said",
    [
        answer([3], NUMBERS, number=7),
        WELL + b"more",
        answer([2], NUMBERS),
        answer([4], NUMBERS),
        pack_head(Head(ANSWER, 0, 1)),
        pack_head(Head(ANSWER, 24, 1, sequence=25)) + bytes(24),
        pack_head(Head(ANSWER, 2**60, 1, sequence=2**50)),
        pack_head(Head(ANSWER, 2**60, 1, sequence=3)) + b"[3]",
        pack_head(Head(ANSWER, 24, 1, sequence=24)) + bytes(24),
        pack_head(Head(FETCH, 3, 1, sequence=3)) + b"[3]",
    ],
    ids=[
        *("old", "more", "short", "long", "empty", "text", "much text", "huge"),
        *("garbage", "fetch"),
    ],
)
def test_what_answers_no_fetch_is_found(ends, said):
    call_socket, host = ends
    call_socket.fetch("sums", {})
    host.send([said])
    with pytest.raises(ProtocolError):
        call_socket.fetched(room)


def test_a_fetch_that_is_refused_leaves_the_socket_as_it_was(ends):
    call_socket, host = ends
    calls = SocketCalls(NO_HOST)
    for asked in ("nothing", "sums"):
        call_socket.fetch(asked, {})
        serve(host, calls)
        with pytest.raises(SocketRefusedError, match=asked):
            call_socket.fetched(room)
    call_socket.fetch("sums", {})
    host.send([answer([3], NUMBERS, number=3)])
    assert call_socket.fetched(room)[1][0].tolist() == [1, 2, 3]


def serve(host: Channel, calls: SocketCalls) -> None:
    """Serve one frame."""
    head = host.receive_head()
    body = calls.wanted(head)
    for buffer in body:
        host.receive_into(buffer)
    found = calls.begin(head, body, 1.0)
    assert isinstance(found, list)
    host.send(found)


@pytest.mark.parametrize(
    "text",
    [[], {}, ["sums"], ["sums", []], [1, {}], "sums", ["sums", {}, 1], ["x" * 99, {}]],
)
def test_what_asks_for_nothing_is_refused(ends, text):
    call_socket, host = ends
    call_socket.fetch("sums", {})  # its number
    host.receive_bytes(host.receive_head().nbytes)
    call_socket.send(pack_text(FETCH, text, 1))
    serve(host, SocketCalls(NO_HOST))
    with pytest.raises(SocketRefusedError):
        call_socket.fetched(room)


def test_a_fetch_of_more_text_than_a_socket_has_is_none():
    with pytest.raises(ProtocolError, match="more than a socket takes"):
        pack_text(FETCH, ["sums", {"ranks": "1" * MOST_TEXT}], 1)
    with pytest.raises(ProtocolError, match="no end of a socket"):
        unpack_head(pack_head(Head(FETCH, MOST_TEXT + 1)))


@pytest.mark.parametrize(
    "about",
    [
        {"shards": [0, 0]},
        {"nodes": [(0, 2**62)]},
        {"nodes": [(1, 1)]},
        {"nodes": [(2, 1)]},
        {"nodes": [(-1, 1)]},
        {"nodes": [(0, 2), (1, 3)]},
        {"nodes": [(2, 3), (0, 1)]},
    ],
)
def test_sums_that_nobody_can_form_are_not_begun(about):
    """They would take any time, or be sent as often as they are named."""
    sums: Any = FETCHES.by_name["sums"].function
    asked = {"place": (1, 0, 0), "shards": [0], "ranks": [], "nodes": [(0, 1)], **about}
    with pytest.raises(ProtocolError, match="sums over nodes"):
        sums(NO_HOST, **asked)


#: Numbers that no place or span has, beside some that may be.
ODD = (0, 1, 2, -1, 2**31, 2**62, 2**63, 2**70, 0.5, 1e308, None, True, "", "a" * 99)


def anything(chance: random.Random, depth: int = 0) -> Any:
    """Return a plain value, as texts have them."""
    kind = chance.randrange(4 if depth < 4 else 2)
    if kind < 2:
        return chance.choice(ODD)
    some = [anything(chance, depth + 1) for _ in range(chance.randrange(4))]
    return some if kind == 2 else {str(k): value for k, value in enumerate(some)}


def asked_for(chance: random.Random) -> Any:
    """Return what may look like a fetch."""
    nearly = [chance.choice(ODD[:7]) for _ in range(3)]
    pairs = [[chance.choice(ODD[:7]), chance.choice(ODD[:7])] for _ in nearly]
    about: dict[str, Any] = {
        "place": nearly,
        "shards": nearly[:2],
        "ranks": [],
        "nodes": pairs[: chance.randrange(3)],
    }
    what = chance.choice(["sums", "nothing"])
    if chance.random() < 0.5:
        about[chance.choice([*about, "other"])] = anything(chance)
    return [what, about] if chance.random() < 0.9 else anything(chance)


def test_whatever_is_asked_for_is_answered_or_refused():
    """Also with some bytes of the text replaced: one frame, and nothing is raised."""
    host: Any = SimpleNamespace(
        contributions=Contributions("here"),
        worker=SimpleNamespace(address="here"),
    )
    calls, chance, kinds = SocketCalls(host), random.Random(14), set[int]()
    for _ in range(1000):
        text = bytearray(json.dumps(asked_for(chance)).encode())
        if chance.random() < 0.2:
            at = chance.randrange(len(text))
            text[at : at + 2] = chance.randbytes(2)
        head = Head(FETCH, len(text), 5)
        [body] = calls.wanted(head)
        body[:] = text
        frame = calls.begin(head, [body], 1.0)
        assert isinstance(frame, list)
        said = unpack_head(bytes(frame[0])[:HEAD_NBYTES])
        assert said.number == 5
        assert said.nbytes < 2000
        kinds.add(said.kind)
    assert kinds == {ANSWER, REFUSAL}


@pytest.mark.parametrize("n", range(len(WELL)))
def test_an_answer_that_is_cut_anywhere_is_none(ends, n):
    call_socket, host = ends
    call_socket.fetch("sums", {})
    host.send([WELL[:n]])
    host.shut()
    with pytest.raises((OSError, ProtocolError)):
        call_socket.fetched(room)


def test_a_fetch_that_is_cut_anywhere_is_not_begun():
    data = b"".join(pack_fetch("sums", {"place": [1, 0, 0]}, 1))
    calls = mock.Mock(wraps=SocketCalls(NO_HOST))
    for n in range(len(data)):
        here, there = socket.socketpair()
        connection = Connection(ServedChannel(there, 0.01), calls)
        here.sendall(data[:n])
        buffer = memoryview(bytearray(65_536))
        assert connection.go_on(buffer, 0.0) == BYTES
        here.close()
        with pytest.raises(ConnectionResetError):
            connection.go_on(buffer, 1.0)
        connection.end()
    calls.begin.assert_not_called()


# -- graph rounds -------------------------------------------------------------------


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is opened at the first call, and soon again."""
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    monkeypatch.setattr(socket_pool, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def here() -> Iterator[Client]:
    with (
        dask.config.set(SOCKET),
        local_cluster(processes=False, protocol="tcp") as client,
    ):
        yield client


@pytest.fixture
def client(here: Client) -> Iterator[Client]:
    with dask.config.set(SOCKET), cleaned(here):
        yield here


class Counted:
    """Counts who asks for something, by socket and by message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        what = "sums"
        self.sockets, self.messages, self.lost = 0, 0, 0
        by_socket, by_message = FETCHES.by_name[what], HOST.by_name[what].function
        #: Whether a host has lost what it is asked for by socket.
        self.loses = False

        def call_socket(host: Any, **about: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            assert "IO" not in threading.current_thread().name
            self.sockets += 1
            if self.loses and self.sockets % 3 == 0:
                self.lost += 1
                raise ContributionLostError("gone")
            return by_socket.function(host, **about)

        async def message(host: Any, **about: Any) -> Any:
            self.messages += 1
            return await by_message(host, **about)

        monkeypatch.setitem(FETCHES.by_name, what, Handler(call_socket))
        monkeypatch.setitem(HOST.by_name, what, served_by(what, message))
        # What it takes is what the function says that it stands for.
        wrapped: Any = call_socket
        wrapped.__wrapped__ = by_socket.function
        wrapped.__module__ = by_socket.function.__module__


def half(params: Any, X: Any, y: Any) -> Any:
    w = params["w"]
    return float(w.sum()), {"w": np.sin(w + X[0, 0])}


def with_rows(params: Any, X: Any, y: Any) -> Any:
    loss, grads = half(params, X, y)
    ids = np.arange(X[0, 0], X[0, 0] + 4000).astype(int) % 5000 % 4500
    return loss, {**grads, "emb": daskps.RowGrad(ids, np.sin(ids * loss)[:, None])}


ROUNDS = 10


def train(client: Client, n: int = 40, gradient: Any = half, **options: Any) -> bytes:
    """Return the weights after some rounds in the graph."""
    spec: dict[str, Any] = {
        "w": np.linspace(-1, 1, n, dtype="f4"),
        "unused": np.zeros(3),
        "emb": daskps.TableSpec(5000, 1),
    }
    X = np.arange(4.0 * ROUNDS).reshape(-1, 1)
    adam = optim.Adam(0.05)
    with daskps.create(spec, optimizer=adam, client=client, shards=3) as s:
        options |= {"trainers": 4, "batch_size": 1, "execution": "graph"}
        daskps.train(s, gradient, X, **options)
        assert s.versions == (ROUNDS,) * 3
        return s.pull()["w"].tobytes() + s["emb"].pull(range(5000)).tobytes()


@functools.cache
def by_message(client: Client) -> bytes:
    """Return the same weights without sockets."""
    with dask.config.set({"daskps.carriers.socket": False}):
        return train(client)


def median(stacked: Any, weights: Any) -> Any:
    return np.median(stacked, axis=0)


@pytest.mark.parametrize(
    ("options", "n"),
    [
        ({}, 40),
        ({"codec": "bf16"}, 40),
        ({"reduce": median}, 40),
        ({}, 100_000),
        ({"gradient": with_rows}, 40),
    ],
    ids=["mean", "codec", "callable", "large", "rows"],
)
def test_sums_come_by_socket_with_the_bits_of_messages(client, monkeypatch, options, n):
    counted = Counted(monkeypatch)
    found = train(client, n, **options)
    assert counted.sockets + counted.messages == 3 * ROUNDS
    assert counted.sockets > ROUNDS
    counted.sockets = counted.messages = 0
    with dask.config.set({"daskps.carriers.socket": False}):
        assert train(client, n, **options) == found
    assert (counted.sockets, counted.messages) == (0, 3 * ROUNDS)


def test_what_a_host_has_lost_is_asked_for_by_message(client, monkeypatch):
    expected = by_message(client)
    counted = Counted(monkeypatch)
    counted.loses = True
    assert train(client) == expected
    assert counted.lost > 3
    assert counted.messages >= counted.lost


class Cuts:
    """Cuts each socket inside of a fetch or its answer, at another byte each time."""

    def __init__(self, *, by_host: bool) -> None:
        self.positions: list[int] = []
        self._by_host = by_host
        self.kind: type[Channel] = ServedChannel if by_host else Channel
        self.name = "send_some" if by_host else "send"
        self._send = getattr(self.kind, self.name)

    def send(self, channel: Channel, buffers: Any, **how: Any) -> Any:
        data = b"".join(bytes(memoryview(b).cast("B")) for b in buffers)
        head = unpack_head(data[:HEAD_NBYTES]) if len(data) >= HEAD_NBYTES else Head(0)
        is_answer = head.kind == ANSWER and head.sequence
        if not (is_answer if self._by_host else head.kind == FETCH):
            return self._send(channel, buffers, **how)
        self.positions.append(7 * len(self.positions) % len(data))
        self._send(channel, [data[: self.positions[-1]]], **how)
        channel.shut()
        return None


@pytest.fixture(params=[True, False], ids=["answer", "question"])
def cuts(request: pytest.FixtureRequest) -> Iterator[Cuts]:
    made = Cuts(by_host=request.param)

    def send(channel: Channel, buffers: Any, **how: Any) -> Any:
        return made.send(channel, buffers, **how)

    with mock.patch.object(made.kind, made.name, send):
        yield made


def test_a_socket_that_is_cut_inside_a_fetch(client, monkeypatch, cuts):
    """No round notices."""
    expected = by_message(client)
    counted = Counted(monkeypatch)
    assert train(client) == expected
    assert len(cuts.positions) > 3
    # Each that was cut was asked by message.
    assert counted.messages >= len(cuts.positions)

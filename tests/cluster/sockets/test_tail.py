"""Answers that are sent straight from the weights: their end comes only if all is whole."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.socket_answers import COPY_SECONDS
from daskps.cluster.protocol.messages import Call, Part
from daskps.cluster.sockets.frames import (
    HEAD_NBYTES,
    ROW_NBYTES,
    TAIL_NBYTES,
    Rest,
    Tail,
)
from daskps.cluster.sockets.served import ServedChannel, views_of
from daskps.layout.arrays import Layout
from daskps.shards.steps import ADD, READ, Item, Step
from tests.cluster.by_socket import Caller, calling, hosted_shards
from tests.cluster.hosted import bare_host
from tests.shards.making import held

N = 50_000
LAYOUT = Layout.build({"w": ((2 * N,), "float32")}, 2)
DATA = (np.arange(1_000_000) % 251).astype("u1")


@pytest.fixture
def ends() -> Iterator[tuple[ServedChannel, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield ServedChannel(here, 0.2), there


class Whole:
    """Says whether an answer is whole, and what had been received when it was asked."""

    def __init__(self, there: socket.socket, *, is_whole: bool = True) -> None:
        self._there, self._is_whole = there, is_whole
        self.found = b""
        #: Bytes that had come when it was asked.
        self.before: list[int] = []

    def __call__(self) -> bool:
        self.drain()
        self.before.append(len(self.found))
        return self._is_whole

    def drain(self) -> None:
        self._there.setblocking(False)
        try:
            while got := self._there.recv(2**20):
                self.found += got
        except BlockingIOError:
            pass


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_bytes_of_a_body_tell_where_the_others_go(ends, waits):
    """Before these places are asked for, all bytes before them are there."""
    channel, there = ends
    first, second, rest = bytearray(10), bytearray(70_000), np.zeros(len(DATA), "u1")
    found = list[bytes]()

    def place(n: int) -> list[Any]:
        found.append(bytes((first, second)[n]))
        if not n:
            return [second, b"", Rest(len(DATA) - 70_010, lambda: place(1))]
        return [rest[70_010:90_000], rest[90_000:]]

    views = views_of([first, Rest(len(DATA) - 10, lambda: place(0))])
    assert sum(map(len, views)) == len(DATA)
    sending = threading.Thread(target=there.sendall, args=(DATA.tobytes(),))
    sending.start()
    while not channel.try_fill(views, waits=waits):
        pass
    sending.join()
    assert found == [DATA[:10].tobytes(), DATA[10:70_010].tobytes()]
    assert (rest[70_010:] == DATA[70_010:]).all()


@pytest.mark.parametrize("n", [1, len(DATA) - 10])
@pytest.mark.parametrize("is_tls", [False, True])
def test_the_end_comes_after_all_else_is_sent(ends, n, is_tls):
    channel, there = ends
    if is_tls:
        # What is sent then is the same, but not gathered.
        channel._is_tls = True
        channel._socket.settimeout(0.0)
    whole = Whole(there)
    rest = channel.send_some([b"head", DATA[:n], Tail(DATA[n:], whole)], waits=False)
    while rest is not None:
        whole.drain()
        rest = None if channel.try_send(rest) else rest
    whole.drain()
    assert whole.found == b"head" + DATA.tobytes()
    assert whole.before == [4 + n]


@pytest.mark.parametrize("is_tls", [False, True])
def test_an_answer_that_is_not_whole_has_no_end(ends, is_tls):
    channel, there = ends
    channel._is_tls = is_tls
    whole = Whole(there, is_whole=False)
    views = views_of([b"head", DATA[:100], Tail(DATA[100:200], whole)])
    with pytest.raises(ConnectionAbortedError, match="updates have run into"):
        channel.try_send(views)
    whole.drain()
    assert whole.found == b"head" + DATA[:100].tobytes()


# -- what a host sends so ------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with bare_host(None, *hosted_shards(LAYOUT)) as made:
        yield made


@pytest.fixture
def caller(host) -> Iterator[Caller]:
    with calling(host) as made:
        yield made


READ_ALL = Call(
    "s", tuple(Part(i, Step(wait=READ), (("float32", 0, N),)) for i in (0, 1))
)


def add(host: ShardHost, sequence: int, shard: int = 1) -> None:
    """Have another caller add one to some of the weights."""
    items = (Item(0, 0, np.ones(100, "f4")),)
    step = Step(ADD, items, producer=1, sequence=sequence, owned=True)
    with calling(host) as other:
        other.call(Call("s", (Part(shard, step),)))


def sent(frame: Any) -> bytes:
    return b"".join(
        bytes(b.made() if isinstance(b, Tail) else memoryview(b).cast("B"))
        for b in frame
        if len(b)
    )


def test_large_answers_are_the_weights_themselves(host, caller):
    add(host, 1)
    copied = sent(caller.begin(READ_ALL))
    frame = caller.begin(READ_ALL)
    segments = [h.shard.segment for h in host.shards.values()]
    assert np.shares_memory(frame[1], segments[0].buffer)
    assert len(frame[-1]) == TAIL_NBYTES
    at = HEAD_NBYTES + 2 * ROW_NBYTES
    # But for the number of the frame it is the same.
    assert sent(frame)[HEAD_NBYTES:] == copied[HEAD_NBYTES:]
    assert copied[at:] == b"".join(held(one)[0].tobytes() for one in segments)


def test_one_update_meanwhile_changes_nothing_of_an_answer(host, caller):
    """It writes the other buffer."""
    caller.begin(READ_ALL)
    wanted = sent(caller.begin(READ_ALL))
    frame = caller.begin(READ_ALL)
    add(host, 1, 0)
    add(host, 2, 1)
    assert sent(frame)[HEAD_NBYTES:] == wanted[HEAD_NBYTES:]


@pytest.mark.parametrize("shard", [0, 1])
def test_an_answer_that_updates_run_into_does_not_end(host, caller, shard):
    caller.begin(READ_ALL)
    *_, tail = caller.begin(READ_ALL)
    add(host, 1, shard)
    add(host, 2, shard)
    with pytest.raises(ConnectionAbortedError):
        tail.made()


def test_after_an_answer_without_an_end_copies_are_sent_for_a_while(
    host, caller, monkeypatch
):
    """By all sockets: that one is closed."""
    caller.begin(READ_ALL)
    *_, tail = caller.begin(READ_ALL)
    add(host, 1)
    add(host, 2)
    with pytest.raises(ConnectionAbortedError):
        tail.made()
    with calling(host) as other:
        for _ in range(3):
            frame: Any = other.begin(READ_ALL)
            assert not isinstance(frame[-1], Tail)
        now = time.monotonic() + COPY_SECONDS
        monkeypatch.setattr(time, "monotonic", lambda: now)
        frame = other.begin(READ_ALL)
        assert isinstance(frame[-1], Tail)


def test_where_others_push_between_two_reads_a_copy_is_sent(host, caller):
    """They would do so during the next one."""
    kinds = []
    for number in range(1, 10):
        frame = caller.begin(READ_ALL)
        kinds.append(isinstance(frame[-1], Tail))
        assert len(sent(frame)) == HEAD_NBYTES + 2 * ROW_NBYTES + 8 * N
        for i in range({4: 2, 6: 3}.get(number, 1)):
            add(host, 10 * number + i)
    # First nobody knows; after 4 and 6 it was more than one.
    assert kinds == [False, True, True, True, False, True, False, True, True]

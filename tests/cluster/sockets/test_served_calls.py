"""Sockets with real shards, and the threads that serve them; no cluster."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from daskps import consistency
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.socket_calls import SocketCalls
from daskps.cluster.protocol.messages import Answer, Call, Part
from daskps.cluster.sockets.channel import Channel
from daskps.cluster.sockets.connection import Connection
from daskps.cluster.sockets.frames import (
    ANSWER,
    REFUSAL,
    ROW_NBYTES,
    TEMPLATE,
    pack_text,
    unpack_rows,
)
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.serving import SocketServer
from daskps.cluster.sockets.templates import pack_template
from daskps.shards.steps import ADD, GRADIENT, READ, Item, Step
from tests.cluster.by_socket import hosted_shards, pack_frame
from tests.cluster.hosted import bare_host
from tests.support import until

RUN, N_RANKS = 7, 3


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with bare_host(None, *hosted_shards()) as made:
        made.shards["s", 0].shard.begin_run(RUN, consistency.policy("bsp"), N_RANKS)
        yield made


def version(host: ShardHost, shard: int) -> int:
    segment = host.shards["s", shard].shard.segment
    return segment.record(segment.flip).version


class Caller:
    """One socket to a host, with a template that it knows."""

    def __init__(self, host: ShardHost, server: SocketServer, call: Call) -> None:
        here, there = socket.socketpair()
        self.channel = Channel(there, 30.0)
        self.connection = Connection(ServedChannel(here, 0.2), SocketCalls(host))
        server.add(self.connection)
        self._number = 1
        self.channel.send(pack_text(TEMPLATE, pack_template(call), 1, 0))
        assert self.channel.receive_head().kind == ANSWER

    def send(self, call: Call) -> None:
        self._number += 1
        self.channel.send(pack_frame(call, 0, self._number))

    def receive(self, call: Call) -> list[Answer]:
        head = self.channel.receive_head()
        assert head.number == self._number
        assert head.kind != REFUSAL
        data = self.channel.receive_bytes(head.nbytes)
        return unpack_rows(
            data[: ROW_NBYTES * len(call.parts)], [part.shard for part in call.parts]
        )


def contribution(rank: int, clock: int = 0) -> Call:
    """What a trainer adds to a round, and reads with it."""
    items = (Item(0, 0, np.full(30, rank + 1, "f4")),)
    step = Step(
        GRADIENT,
        items,
        run=RUN,
        rank=rank,
        clock=clock,
        tick=True,
        sequence=clock,
        owned=True,
        wait=READ,
    )
    return Call("s", (Part(0, step, (("float32", 0, 30),)),), wait_seconds=30.0)


@pytest.fixture
def callers(host) -> Iterator[list[Caller]]:
    server = SocketServer(lambda _: None)
    made = [Caller(host, server, contribution(rank)) for rank in range(N_RANKS)]
    yield made
    for caller in made:
        caller.channel.close()
    server.close(10)


def test_rounds_of_sockets_complete_each_other(host, callers):
    for clock in range(30):
        for rank, caller in enumerate(callers):
            caller.send(contribution(rank, clock))
        for rank, caller in enumerate(callers):
            [answer] = caller.receive(contribution(rank, clock))
            assert (answer.version, answer.parked) == (clock + 1, False)
    assert version(host, 0) == 30


def test_who_hangs_up_leaves_no_ticket_and_its_round_goes_on(host, callers):
    shard = host.shards["s", 0].shard
    callers[0].send(contribution(0))
    until(lambda: len(shard.waiting) == 1)
    callers[0].channel.close()
    until(lambda: len(shard.waiting) == 0)
    assert callers[1].connection.waiting is None


def test_a_server_that_ends_leaves_no_ticket(host, callers):
    shard = host.shards["s", 0].shard
    for rank in (0, 1):
        callers[rank].send(contribution(rank))
    until(lambda: len(shard.waiting) == 2)
    for caller in callers:
        caller.connection.channel.shut()
    until(lambda: len(shard.waiting) == 0)


def test_threads_push_by_sockets_of_their_own(host):
    """Each push counts once, whoever serves which."""
    server = SocketServer(lambda _: None)
    n, pushes = 8, 100

    def call(producer: int, sequence: int) -> Call:
        items = (Item(0, 0, np.ones(30, "f4")),)
        step = Step(ADD, items, producer=producer, sequence=sequence, owned=True)
        return Call("s", (Part(1, step),), wait_seconds=30.0)

    def push(producer: int) -> None:
        caller = Caller(host, server, call(producer, 1))
        for k in range(pushes):
            caller.send(call(producer, k + 1))
            caller.receive(call(producer, k + 1))
        caller.channel.close()

    threads = [threading.Thread(target=push, args=(k + 1,)) for k in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close(10)
    assert version(host, 1) == n * pushes

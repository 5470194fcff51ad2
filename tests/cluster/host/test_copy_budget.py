"""What copies and answers of one host may take, and who waits for whom."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.host.copy_budget import (
    LITTLE_NBYTES,
    MOST_NBYTES,
    SMALL_NBYTES,
    CopyBudget,
    kept,
)
from daskps.cluster.host.socket_calls import SocketCalls
from daskps.cluster.machine.leases import BufferPool
from daskps.cluster.protocol.messages import Call, Part
from daskps.cluster.sockets import connection, serving
from daskps.cluster.sockets.connection import Connection
from daskps.cluster.sockets.frames import (
    HEAD_NBYTES,
    REFUSAL,
    TEMPLATE,
    pack_text,
    unpack_head,
)
from daskps.cluster.sockets.served import ServedChannel
from daskps.cluster.sockets.serving import SocketServer
from daskps.cluster.sockets.templates import pack_template
from daskps.errors import DaskPSError
from daskps.layout.arrays import Layout
from daskps.shards.steps import READ, Step
from tests import support
from tests.cluster.by_socket import RefusedError, calling, hosted_shards, pack_frame
from tests.cluster.hosted import bare_host
from tests.seams import leave_no_room

MANY = LITTLE_NBYTES + 1


class Node:
    """A worker of 1,000 MB, which may use 800, and uses 500."""

    memory_limit: int | None = 10**9
    pause_share = 0.8

    def __init__(self) -> None:
        self.used, self.looks, self.woken = 5 * 10**8, 0, list[Any]()
        self.loop = SimpleNamespace(asyncio_loop=self)

    def measure(self) -> int:
        self.looks += 1
        return self.used

    def call_soon_threadsafe(self, function: Any) -> None:
        self.woken.append(function)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def budget(node: Any) -> CopyBudget:
    return CopyBudget(node, BufferPool(2**20))


def test_an_answer_counts_until_the_last_view_of_it_is_gone(budget):
    empty = budget.answer(MANY)
    first, second = empty(100_000, "f4"), empty(10, "i8")
    del empty
    view, frame = first[5:], memoryview(second)
    del first, second
    assert budget.nbytes == MANY
    del view
    assert budget.nbytes == MANY
    del frame
    assert budget.nbytes == 0
    ids = kept(np.arange(3), budget.answer(MANY))
    assert (budget.nbytes, ids.tolist()) == (MANY, [0, 1, 2])
    del ids
    assert budget.nbytes == 0


def test_one_answer_has_room_whatever_there_is(budget, node):
    node.used = 10**9
    first = budget.answer(10**10)
    assert first is not None
    assert budget.answer(SMALL_NBYTES) == budget.pool.empty
    assert budget.answer(SMALL_NBYTES + 1) is None
    with pytest.raises(
        DaskPSError, match=r"no room .* 10,000,000,000 bytes of answers"
    ):
        budget.answer_now(SMALL_NBYTES + 1)
    del first
    assert budget.answer(10**10) is not None


def test_a_little_has_room_without_a_look_at_the_memory(budget, node):
    node.used = 10**9
    few = [budget.answer(LITTLE_NBYTES // 4) for _ in range(4)]
    assert None not in few
    assert node.looks == 0
    assert budget.answer(LITTLE_NBYTES // 4) is None
    assert node.looks > 0


def test_what_was_promised_and_not_written_yet_counts(budget):
    """300 MB are free: two of 100, of which nobody knows whether they are in the 500."""
    first = [budget.answer(10**8) for _ in range(2)]
    assert [one is None for one in first] == [False, False]
    assert budget.answer(10**8 + 1) is None
    with budget.copying(10**8) as lack:
        assert not lack
        assert budget.nbytes == 3 * 10**8
        with budget.copying(1) as lack:
            assert lack == (
                "0 bytes are free below 80% of its memory limit of 1,000,000,000, where "
                "Dask pauses it"
            )
    assert budget.nbytes == 2 * 10**8


def test_memory_that_is_kept_for_later_is_let_go_of_first(budget, node, monkeypatch):
    budget.pool.give_back(np.empty(2**20, np.uint8))
    used = node.used
    monkeypatch.setattr(node, "measure", lambda: used + budget.pool.nbytes)
    with budget.copying(3 * 10**8) as lack:
        assert not lack
    assert budget.pool.nbytes == 0


@pytest.mark.parametrize("limit", [None, 0, 10**9, 10**10])
def test_there_is_a_bound_with_and_without_a_memory_limit(node, limit):
    node.memory_limit, node.used = limit, 0
    budget, most = CopyBudget(node, BufferPool(0)), MOST_NBYTES
    if limit == 10**10:
        most = limit // 8
    first = budget.answer(most - 100_000)
    assert first is not None
    assert budget.answer(100_001) is None
    assert budget.answer(100_000) is not None


def test_who_waits_longest_is_next_and_nobody_overtakes(budget, node):
    node.used = 8 * 10**8

    async def run() -> None:
        held = budget.answer(MANY)
        turns = [budget.wait(MANY) for _ in range(3)]
        # Neither by a wait nor without one.
        small = budget.wait(100_000)
        assert budget.answer(100_000) is None
        assert not any(turn.done() for turn in [*turns, small])
        # Who gives up is passed over, and keeps nobody.
        turns[1].cancel()
        for first in (0, 2):
            await asyncio.sleep(0)
            del held
            node.woken.pop()()
            held = turns[first].result()
            left = [i for i, turn in enumerate(turns) if not turn.done()]
            assert left == [2][first:]
            assert not small.done()
            turns[first] = turns[1]
        await asyncio.sleep(0)
        del held
        node.woken.pop()()
        assert small.result() is not None

    asyncio.run(run())


def test_who_gives_up_lets_those_behind_go_on_that_need_less(budget, node):
    async def run() -> None:
        held = budget.answer(2 * 10**8)
        turn, behind = budget.wait(3 * 10**8), budget.wait(10**7)
        assert not behind.done()
        turn.cancel()
        assert await behind is not None
        assert budget.nbytes == 2 * 10**8 + 10**7
        del held

    asyncio.run(run())


def test_room_that_nobody_waits_for_any_more_is_given_back(budget, node):
    async def run() -> None:
        held = budget.answer(10**10)
        turn = budget.wait(MANY)
        del held
        node.woken.pop()()
        assert budget.nbytes == MANY
        del turn
        await asyncio.sleep(0)
        assert budget.nbytes == 0

    asyncio.run(run())


# -- calls -----------------------------------------------------------------------------

#: Of two shards of 2 MB.
LAYOUT = Layout.build({"w": ((1_000_000,), "float32")}, 2)


async def until(condition: Callable[[], Any]) -> None:
    """Let others go on until a condition holds."""
    while True:
        await asyncio.sleep(0)
        if condition():
            return


def reads(seconds: float) -> Call:
    """A read of all that there is."""
    step = Step(generation=1, wait=READ)
    parts = [Part(i, step, (("float32", 0, 500_000),)) for i in range(2)]
    return Call("s", tuple(parts), seconds, token="t")


@pytest.mark.parametrize("how", ["room", "given up", "over", "cancelled"])
def test_a_read_by_message_waits_for_room(how):
    async def run() -> None:
        with bare_host(
            asyncio.get_running_loop(), *hosted_shards(LAYOUT, None)
        ) as host:
            host.worker.loop.asyncio_loop = asyncio.get_running_loop()
            held = [host.budget.answer(10**10)]
            call = reads(0.01 if how == "over" else 100)
            asked = asyncio.ensure_future(host.call(call))
            await until(lambda: host.budget._waiting)
            assert not asked.done()
            if how == "room":
                held.clear()
            elif how == "given up":
                host.give_up("t")
            elif how == "cancelled":
                asked.cancel()
                await asyncio.wait({asked})
                assert asked.cancelled()
            if how != "cancelled":
                answers = await asked
                assert [a.parked for a in answers] == 2 * [how != "room"]
                assert [len(a.arrays) for a in answers] == 2 * [how == "room"]
            assert host.waiting == {}
            if how == "room":
                assert host.budget.nbytes == 4_000_000
                del answers, asked
                # The loop and the thread that has read it let go of it soon.
                await until(lambda: not host.budget.nbytes)
            held.clear()
            assert host.budget.nbytes == 0
            # Nobody is left that has a turn before this.
            assert not (await host.call(reads(100)))[0].parked

    asyncio.run(run())


def test_a_read_by_socket_is_left_to_messages_where_there_is_no_room():
    with bare_host(None, *hosted_shards(LAYOUT, None)) as host, calling(host) as caller:
        held = host.budget.answer(10**10)
        with pytest.raises(RefusedError, match="no room for an answer: 10,000,000,000"):
            caller.call(reads(1))
        del held
        with calling(host) as other:
            frame = other.begin(reads(1))
        assert host.budget.nbytes == 4_000_000
        del frame
        assert host.budget.nbytes == 0


def test_sockets_whose_other_ends_read_nothing_have_little_memory_and_not_for_long(
    monkeypatch,
):
    """Of twelve four are answered; these end, and the others have been told."""
    call, peers, ended = reads(1), list[socket.socket](), list[Connection]()
    with bare_host(None, *hosted_shards(LAYOUT, None)) as host:
        server = SocketServer(ended.append)
        leave_no_room(host)
        sockets = []
        for _ in range(12):
            here, there = socket.socketpair()
            peers.append(there)
            sockets.append(Connection(ServedChannel(here, 0.01), SocketCalls(host)))
            server.add(sockets[-1])
            template = pack_text(TEMPLATE, pack_template(call), 1, 0)
            there.sendall(b"".join([*template, *pack_frame(call, 0, 2)]))
        support.until(
            lambda: [call_socket.n_frames for call_socket in sockets] == [2] * 12
        )
        assert host.budget.nbytes == 4 * 4_000_000
        monkeypatch.setattr(connection, "TAKE_SECONDS", 0.0)
        monkeypatch.setattr(serving, "SWEEP_SECONDS", 0.0)
        support.until(lambda: host.budget.nbytes == 0)
        assert len(ended) == 4
        for call_socket, peer in zip(sockets, peers, strict=True):
            if call_socket not in ended:
                said = peer.recv(2 * HEAD_NBYTES, socket.MSG_WAITALL)
                assert unpack_head(said[HEAD_NBYTES:]).kind == REFUSAL
            peer.close()
        server.close(10)

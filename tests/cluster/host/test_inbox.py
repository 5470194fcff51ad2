"""What arrives together is applied together."""

from __future__ import annotations

import asyncio
import threading
from unittest import mock

import numpy as np
import pytest

from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.protocol.messages import Call, Part
from daskps.consistency import BSP
from daskps.errors import ShardBusyError, ShardLostError, StoreClosedError
from daskps.layout.arrays import Layout
from daskps.shards import producers
from daskps.shards.memory.format import GENERATION, WANTED
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, GRADIENT, READ, Item, Ready, Step, Ticket
from tests.cluster.hosted import bare_host, shared_shard
from tests.seams import mutex_of
from tests.shards.making import Momentum, held

LAYOUT = Layout.build({"w": ((7,), "float64")}, 1)
GRADS = [np.linspace(k, 1, 7) for k in range(5)]


class Owner:
    """Counts the tickets that are done."""

    n = 0

    def one_done(self) -> None:
        self.n += 1


def tickets(owner):
    return [
        Ticket(
            Step(GRADIENT, (Item(0, 0, g.copy()),), producer=k + 1, owned=True),
            owner=owner,
        )
        for k, g in enumerate(GRADS)
    ]


def a_shard():
    segment = Segment(LAYOUT, 0, {0: (0.0,)})
    return HostedShard("s", LAYOUT, 0, Shard(segment, {0: Momentum()})), segment


def test_pushes_that_queue_up_are_one_publication():
    """Each is a step of its own, with its own version, in the order they came."""
    one_by_one, expected = a_shard()
    for ticket in tickets(Owner()):
        one_by_one.put(ticket)
        one_by_one.serve()
    assert expected.flip == len(GRADS)

    hosted, segment = a_shard()
    owner = Owner()
    queued = tickets(owner)
    with mutex_of(hosted):
        for ticket in queued:
            hosted.put(ticket)
            hosted.serve()  # somebody else is at it: nobody waits
        assert owner.n == 0
    hosted.serve()
    assert owner.n == len(GRADS)
    assert all(isinstance(t.outcome, Ready) for t in queued)
    assert [t.version for t in queued] == [1, 2, 3, 4, 5]
    assert (segment.flip, segment.current.version) == (1, 5)
    found = held(segment)[0]
    np.testing.assert_array_equal(found, held(expected)[0])
    assert found.any()


def test_what_came_before_a_control_call_is_applied_before_it():
    hosted, _ = a_shard()
    owner = Owner()
    first, second, *_ = queued = tickets(owner)
    hosted.put(first)
    seen = hosted.enqueue(lambda shard: shard.segment.current.version)
    hosted.put(second)
    hosted.serve()
    assert seen.result(0) == 1
    assert owner.n == 2
    assert [t.version for t in queued[:2]] == [1, 2]


class Busy:
    """A thread in the middle of a step of a shard that another process wants next."""

    def __init__(self, hosted):
        self.hosted, self._go = hosted, threading.Event()
        inside, submit = threading.Event(), hosted.shard.submit

        def slow(tickets):
            if tickets:
                inside.set()
                assert self._go.wait(30)
            return submit(tickets)

        hosted.shard.submit = slow
        step = Step(ADD, (Item(0, 0, np.ones(1000)),), producer=1)
        ticket = Ticket(step, owner=mock.Mock())
        self._thread = threading.Thread(target=hosted.offer, args=[ticket, 1.0])
        self._thread.start()
        assert inside.wait(30)

    def end(self):
        """Let it end: it passes the turn on and leaves the inbox to others."""
        self.hosted.shard.segment.words[WANTED] = 2**22 + 1
        self._go.set()
        self._thread.join(30)
        assert self.hosted._inbox


def test_function_queued_while_a_thread_passes_the_turn_on_is_run(
    tmp_path, monkeypatch
):
    """Else `hold`, `end_run` or a cut waits until the next call of the shard."""
    hosted = shared_shard(tmp_path)

    async def run():
        tried = asyncio.Event()

        async def in_thread(function):
            function()
            tried.set()

        with bare_host(asyncio.get_running_loop(), hosted) as host:
            monkeypatch.setattr(host, "in_thread", in_thread)
            busy = Busy(hosted)
            waiting = asyncio.ensure_future(
                host.under(hosted, lambda s: s.rounds_of(3))
            )
            await tried.wait()
            busy.end()
            return await asyncio.wait_for(waiting, 10)

    assert asyncio.run(run()) == -1


def test_call_of_a_shard_that_is_dropped_while_a_thread_is_at_it_ends(tmp_path):
    hosted = shared_shard(tmp_path)

    async def run():
        ended = asyncio.Event()
        waits = Ticket(Step(wait=READ, at_least=5), owner=mock.Mock(one_done=ended.set))
        hosted.put(waits)
        hosted.serve()
        busy = Busy(hosted)
        with bare_host(asyncio.get_running_loop()) as host:
            host.drop(hosted)
            busy.end()
            await asyncio.wait_for(ended.wait(), 10)
            looking = host._looking
            assert looking is not None
            await looking
            assert not host._leaving
        return waits.outcome

    with pytest.raises(StoreClosedError):
        raise asyncio.run(run())


def test_a_call_that_waits_hears_why_its_host_closes():
    """Also at a large shard: there is no thread any more that could read it."""
    hosted, _ = a_shard()
    error = ShardLostError("s", 0, "tcp://nowhere", "was closed")

    async def run():
        part = Part(0, Step(wait=READ, at_least=5), (("float64", 0, 7),))
        with bare_host(asyncio.get_running_loop(), hosted, inline=0) as host:
            waiting = asyncio.ensure_future(host.call(Call("s", (part,))))
            while not host.waiting:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.001)
            hosted.enqueue(lambda shard: shard.abandon(error))
            hosted.serve()
            host.shards.clear()
            host.close("was closed")
            return await asyncio.wait_for(waiting, 10)

    [answer] = asyncio.run(run())
    assert answer.error is error


def test_push_goes_by_message_where_room_is_not_made_in_time(tmp_path, monkeypatch):
    """By message it waits for the directory as long as its caller does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asked = threading.Event()

    async def make_room(*_):
        asked.set()
        await asyncio.Event().wait()

    hosted = shared_shard(tmp_path)
    monkeypatch.setattr(producers, "lacks_room", lambda *_: True)
    monkeypatch.setattr(ShardHost, "_make_room", make_room)
    try:
        with (
            bare_host(loop) as host,
            pytest.raises(ShardBusyError, match="which producers have ended"),
        ):
            host.make_room(hosted, 1, 0.01)
        assert asked.wait(30)
    finally:
        for task in asyncio.all_tasks(loop):
            loop.call_soon_threadsafe(task.cancel)
        loop.call_soon_threadsafe(loop.call_soon, loop.stop)
        thread.join(30)
        loop.close()


def test_a_step_without_a_ticket_ends_the_wait_of_those_that_have_one():
    """Two trainers: one waits for the round that the other one completes."""
    hosted, segment = a_shard()
    segment.words[GENERATION] = hosted.shard.generation
    hosted.shard.begin_run(1, BSP(), 2)
    owner = Owner()
    step = Step(GRADIENT, (Item(0, 0, GRADS[0]),), 1, 0, tick=True)
    assert hosted.try_step(step, 0) == 0
    waiting = Ticket(Step(run=1, rank=0, clock=1, wait=READ), owner=owner)
    hosted.offer(waiting, 0)
    assert (waiting.outcome, owner.n) == (None, 0)
    # Of the next round, and so too early.
    early = Step(GRADIENT, (Item(0, 0, GRADS[1]),), 1, 0, 1, tick=True, sequence=1)
    hosted.offer(Ticket(early, owner=owner), 0)
    other = step._replace(rank=1, items=(Item(0, 0, GRADS[2]),))
    assert hosted.try_step(other, 0) == 1
    assert isinstance(waiting.outcome, Ready)
    assert owner.n == 2
    assert not hosted.waits
    assert hosted.shard.round is not None
    assert hosted.shard.round.next_sequences == [2, 1]

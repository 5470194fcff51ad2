"""Reads that updates run into, also of somebody who died in the middle of one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest

from daskps.cluster.host.calls import copy_out
from daskps.cluster.protocol.messages import Call, Part
from daskps.consistency import ASP, BSP
from daskps.errors import ClockError, RunCancelledError
from daskps.shards.arrays.operations import PieceUpdate
from daskps.shards.memory.publication import Publication
from daskps.shards.reader import ShardReader
from daskps.shards.steps import READ, Step, Ticket
from tests.cluster.hosted import bare_host, shared_shard
from tests.seams import mutex_of

RANGES = (("float64", 0, 1000),)
RUN = 7


def nobody():
    return mock.Mock()


@pytest.fixture
def hosted(tmp_path):
    return shared_shard(tmp_path)


def asks(hosted, run):
    """A read that has its turn, but has copied nothing yet."""
    ticket = Ticket(Step(run=run, rank=0 if run else -1, wait=READ), owner=nobody())
    hosted.put(ticket)
    hosted.serve()
    assert ticket.outcome is not None
    return ticket


def killed(segment):
    """Another process publishes, begins once more, and dies half way."""
    whole = Publication(segment)
    whole.add([(0, PieceUpdate(np.zeros(1000)))])
    whole.commit()
    begun = Publication(segment)
    assert segment.writing == segment.flip + 1
    begun.record.weight_sides[0] = into = 1 - begun.old.weight_sides[0]
    segment.weights[into][0][:500] = 99.0


@pytest.mark.parametrize("run", [0, RUN])
def test_read_that_a_dying_writer_ran_into_is_whole(hosted, run):
    if run:
        hosted.shard.begin_run(run, ASP(), 2)
    ticket, out = asks(hosted, run), np.empty(1000)
    killed(hosted.shard.segment)
    ready = copy_out(hosted, ticket, RANGES, [out])
    assert ready.flip == hosted.shard.segment.flip
    assert set(out) == {0.0}


def test_exact_read_that_a_dying_writer_ran_into_is_refused(hosted):
    hosted.shard.begin_run(RUN, BSP(), 2)
    ticket = asks(hosted, RUN)
    killed(hosted.shard.segment)
    with pytest.raises(ClockError, match="gone"):
        copy_out(hosted, ticket, RANGES, [np.empty(1000)])


def test_exact_read_of_a_run_that_is_over_says_so(hosted):
    hosted.shard.begin_run(RUN, BSP(), 2)
    ticket = asks(hosted, RUN)
    hosted.shard.end_run(RUN, "it was cancelled")
    Publication(hosted.shard.segment).commit()
    with pytest.raises(RunCancelledError, match="it was cancelled"):
        copy_out(hosted, ticket, RANGES, [np.empty(1000)])


def test_trainers_read_needs_no_turn_for_the_latest_weights(hosted):
    """Two updates ran into its copy, and somebody is at the shard for long."""
    hosted.shard.begin_run(RUN, ASP(), 2)
    ticket, out = asks(hosted, RUN), np.ones(1000)
    for _ in range(2):
        Publication(hosted.shard.segment).commit()
    with ThreadPoolExecutor(1) as threads, mutex_of(hosted):
        ready = threads.submit(copy_out, hosted, ticket, RANGES, [out]).result(10)
    assert ready.flip == hosted.shard.segment.flip
    assert not out.any()


def test_read_does_not_wait_for_its_turn_on_the_event_loop(hosted, monkeypatch):
    """Updates run into each copy: the thread that waits at last is another one."""
    copy, threads = ShardReader.read_at, []

    def read(*given, **more):
        threads.append(threading.get_ident())
        return copy(*given, **more) if len(threads) > 4 else False

    monkeypatch.setattr(ShardReader, "read_at", read)

    async def run():
        with bare_host(asyncio.get_running_loop(), hosted) as host:
            return await host.call(Call("s", (Part(0, Step(wait=READ), RANGES),)))

    [answer] = asyncio.run(run())
    assert answer.arrays[0].shape == (1000,)
    loop = threading.get_ident()
    assert [ident == loop for ident in threads] == [True, True, False, False, False]

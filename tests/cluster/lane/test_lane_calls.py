"""What a host does with the frames of a lane, without a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from daskps import consistency
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.lane_calls import Parked
from daskps.cluster.wire.messages import Call, Part
from daskps.shards.steps import GRADIENT, READ, Item, Step
from tests.cluster.hosted import bare_host
from tests.cluster.laned import Caller, RefusedError, calling, hosted_shards

RUN, N_RANKS = 7, 2


@pytest.fixture
def host() -> Iterator[ShardHost]:
    with bare_host(None, *hosted_shards()) as made:
        yield made


@pytest.fixture
def caller(host) -> Iterator[Caller]:
    with calling(host) as made:
        yield made


def begin(host: ShardHost, sync: str = "bsp") -> None:
    """Begin a run of two trainers at all shards."""
    for hosted in host.shards.values():
        hosted.shard.begin_run(RUN, consistency.policy(sync), N_RANKS)


def step(rank: int, clock: int) -> Step:
    return Step(
        GRADIENT,
        run=RUN,
        rank=rank,
        clock=clock,
        tick=True,
        sequence=clock,
        owned=True,
        wait=READ,
    )


def pushpull(rank: int, clock: int, *shards: int) -> Call:
    """What a trainer pushes, and reads with it."""
    parts = []
    for shard in shards:
        data = np.full(30, rank + 1, "f4")
        items = (Item(0, 0, data), Item(1, 0, np.full(2, 0.5)))
        ranges = (("float32", 0, 30), ("float64", 0, 2))
        part = Part(shard, step(rank, clock)._replace(items=items), ranges)
        parts.append(part)
    return Call("s", tuple(parts), wait_seconds=30.0)


# -- calls that wait ---------------------------------------------------------------


def test_a_call_that_waits_holds_no_thread(host, caller):
    begin(host)
    told = []
    with calling(host) as other:
        parked = caller.begin(pushpull(0, 0, 0, 1))
        assert isinstance(parked, Parked)
        parked.then(lambda: told.append("done"))
        assert (parked.done, told) == (False, [])
        # Rank 1 completes the round of one shard, and then of the other.
        other.call(pushpull(1, 0, 0))
        assert (parked.done, told) == (False, [])
        [last] = other.call(pushpull(1, 0, 1))
        assert (parked.done, told) == (True, ["done"])
    rows = caller.answers(parked.finish(1.0), pushpull(0, 0, 0, 1))
    assert [(row.shard, row.version, row.parked) for row in rows] == [
        (0, 1, False),
        (1, 1, False),
    ]
    for ours, theirs in zip(rows[1].arrays, last.arrays, strict=True):
        assert ours.tobytes() == theirs.tobytes()
        assert ours.any()


def test_who_asks_late_is_told_at_once(host, caller):
    begin(host)
    parked = caller.begin(pushpull(0, 0, 0))
    assert isinstance(parked, Parked)
    with calling(host) as other:
        other.call(pushpull(1, 0, 0))
    told = []
    parked.then(lambda: told.append("done"))
    assert told == ["done"]


def test_a_call_whose_time_is_up_says_what_was_accepted(host, caller):
    begin(host)
    parked = caller.begin(pushpull(0, 0, 0, 1))
    assert isinstance(parked, Parked)
    assert parked.end <= time.monotonic() + 1.0
    rows = caller.answers(parked.finish(1.0), pushpull(0, 0, 0, 1))
    assert [(row.parked, row.applied) for row in rows] == [(True, True)] * 2
    assert not any(hosted.shard.waiting for hosted in host.shards.values())


def test_a_call_that_is_cancelled_leaves_no_ticket(host, caller):
    begin(host)
    parked = caller.begin(pushpull(0, 0, 0, 1, 2))
    assert isinstance(parked, Parked)
    assert all(len(hosted.shard.waiting) == 1 for hosted in host.shards.values())
    parked.cancel()
    assert not any(hosted.shard.waiting for hosted in host.shards.values())
    with calling(host) as other:
        other.call(pushpull(1, 0, 0, 1, 2))
    assert {h.shard.rounds_of(RUN) for h in host.shards.values()} == {1}


def test_a_fence_ends_a_call_that_waits(host, caller):
    begin(host)
    parked = caller.begin(pushpull(0, 0, 0))
    assert isinstance(parked, Parked)
    told = []
    parked.then(lambda: told.append("done"))
    hosted = host.get_shard("s", 0)
    hosted.run(lambda shard: shard.end_run(RUN, "the test ends it"))
    hosted.serve()
    assert told == ["done"]
    with pytest.raises(RefusedError, match="RunCancelledError"):
        caller.answers(parked.finish(1.0), pushpull(0, 0, 0))


def test_arrays_of_no_elements_are_received(host, caller):
    [part] = pushpull(0, 0, 0).parts
    items = (Item(0, 0, np.empty(0, "f4")), Item(1, 0, np.ones(2)))
    push = Step(GRADIENT, items, producer=3, sequence=1, owned=True)
    call = Call("s", (part._replace(step=push, ranges=()),))
    assert [row.version for row in caller.call(call)] == [1]

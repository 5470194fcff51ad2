"""A trainer's look without the lock: what it may read now, and whether that was whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daskps.consistency import ASP, SSP
from daskps.shards.glance import ASK, NOT_YET, Glance
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.gates import CLOSED, set_gate
from daskps.shards.memory.publication import Publication
from daskps.shards.shard import Shard
from tests.shards.making import RUN, bsp, make, send, step


def test_in_rounds_it_is_exactly_that_of_the_clock():
    shard = bsp(2)
    glance = Glance(shard.segment, RUN, 0)
    assert glance.flip(0) == shard.segment.flip
    assert glance.flip(1) == NOT_YET
    send(shard, step(0, 0), step(1, 0))
    assert glance.flip(1) == shard.segment.flip
    # The one before is there too, but for the shard to find.
    assert glance.flip(0) == ASK


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_it_waits_for_the_slowest_live_rank_and_no_longer(staleness):
    shard = make()
    shard.begin_run(RUN, SSP(staleness), 3)
    glance = Glance(shard.segment, RUN, 0)
    for clock in range(staleness + 1):
        assert glance.flip(clock) == shard.segment.flip
        assert glance.lag == clock
        send(shard, step(0, clock))
    assert glance.flip(staleness + 1) == NOT_YET
    shard.finish(RUN, 1)
    assert glance.flip(staleness + 1) == NOT_YET
    send(shard, step(2, 0))
    assert glance.flip(staleness + 1) == shard.segment.flip


def test_without_a_bound_it_waits_for_nobody():
    shard = make()
    shard.begin_run(RUN, ASP(), 2)
    glance = Glance(shard.segment, RUN, 0)
    assert glance.flip(1000) == shard.segment.flip
    assert glance.lag == 1000


def test_a_rank_that_has_finished_asks_the_shard():
    shard = bsp(2)
    one, other = (Glance(shard.segment, RUN, rank) for rank in (0, 1))
    shard.finish(RUN, 0)
    send(shard, step(1, 0))
    assert one.flip(1) == ASK
    assert other.flip(1) == shard.segment.flip


def end(shard: Shard) -> None:
    shard.end_run(RUN, "a test")


def close(shard: Shard) -> None:
    set_gate(shard.segment, CLOSED)


def adopt(shard: Shard) -> None:
    shard.segment.words[GENERATION] += 1


@pytest.mark.parametrize("change", [end, close, adopt])
def test_the_shard_says_whatever_else_there_is_to_say(change: Callable[[Shard], None]):
    shard = bsp(2)
    glance = Glance(shard.segment, RUN, 0)
    assert glance.flip(0) >= 0
    change(shard)
    assert glance.flip(0) == ASK


def test_a_copy_is_whole_until_a_second_publication_begins():
    shard = make()
    shard.begin_run(RUN, ASP(), 1)
    glance = Glance(shard.segment, RUN, 0)
    flip = glance.flip(0)
    assert glance.is_whole(flip)
    Publication(shard.segment).commit()
    assert glance.is_whole(flip)
    Publication(shard.segment)
    assert not glance.is_whole(flip)

"""A trainer's look without the lock: what it may read now, and whether that was whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskps.consistency import ASP, SSP
from daskps.shards.deputy import CLOSED, set_gate
from daskps.shards.memory.format import CLOCK, GENERATION
from daskps.shards.memory.publication import Publication
from daskps.shards.parked import find_outcome
from daskps.shards.reader import NOT_YET, REFER, ShardReader, Visibility
from daskps.shards.shard import Shard
from daskps.shards.steps import READ, Step, Ticket
from tests.shards.making import RUN, bsp, make, send, step

#: All elements of the first piece of `make`.
PARTS = [(("float64", 0, 5), 0, slice(0, 5))]


def test_in_rounds_it_is_exactly_that_of_the_clock():
    shard = bsp(2)
    reads = Visibility(shard.segment, RUN, 0)
    assert reads.find_flip(0) == shard.segment.flip
    assert reads.find_flip(1) == NOT_YET
    send(shard, step(0, 0), step(1, 0))
    assert reads.find_flip(1) == shard.segment.flip
    # The one before is there too, but for the shard to find.
    assert reads.find_flip(0) == REFER


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_it_waits_for_the_slowest_live_rank_and_no_longer(staleness):
    shard = make()
    shard.begin_run(RUN, SSP(staleness), 3)
    reads = Visibility(shard.segment, RUN, 0)
    for clock in range(staleness + 1):
        assert reads.find_flip(clock) == shard.segment.flip
        assert reads.lag == clock
        send(shard, step(0, clock))
    assert reads.find_flip(staleness + 1) == NOT_YET
    shard.finish_rank(RUN, 1)
    assert reads.find_flip(staleness + 1) == NOT_YET
    send(shard, step(2, 0))
    assert reads.find_flip(staleness + 1) == shard.segment.flip


@given(st.lists(st.integers(0, 20), min_size=2, max_size=70), st.integers(0, 10))
def test_ssp_never_reads_more_than_s_clocks_ahead(clocks, staleness):
    """Whatever else the record says, and however many trainers there are."""
    shard = make()
    shard.begin_run(RUN, SSP(staleness), len(clocks))
    record, slowest = shard.segment.current, min(clocks)
    record.ranks[: len(clocks), CLOCK] = clocks
    reads = Visibility(shard.segment, RUN, 0)
    # By chance alone few are at the border.
    for at in (clocks[0], slowest + staleness, slowest + staleness + 1):
        allowed = reads.find_flip(at) == shard.segment.flip
        assert allowed == (at - slowest <= staleness)
        ticket = Ticket(Step(run=RUN, rank=0, clock=at, wait=READ))
        assert (find_outcome(shard.segment, ticket) is not None) == allowed


def test_without_a_bound_it_waits_for_nobody():
    shard = make()
    shard.begin_run(RUN, ASP(), 2)
    reads = Visibility(shard.segment, RUN, 0)
    assert reads.find_flip(1000) == shard.segment.flip
    assert reads.lag == 1000


def test_a_rank_that_has_finished_asks_the_shard():
    shard = bsp(2)
    one, other = (Visibility(shard.segment, RUN, rank) for rank in (0, 1))
    shard.finish_rank(RUN, 0)
    send(shard, step(1, 0))
    assert one.find_flip(1) == REFER
    assert other.find_flip(1) == shard.segment.flip


def end(shard: Shard) -> None:
    shard.end_run(RUN, "a test")


def close(shard: Shard) -> None:
    set_gate(shard.segment, CLOSED)


def adopt(shard: Shard) -> None:
    shard.segment.words[GENERATION] += 1


@pytest.mark.parametrize("change", [end, close, adopt])
def test_the_shard_says_whatever_else_there_is_to_say(change: Callable[[Shard], None]):
    shard = bsp(2)
    reads = Visibility(shard.segment, RUN, 0)
    assert reads.find_flip(0) >= 0
    change(shard)
    assert reads.find_flip(0) == REFER


@pytest.mark.parametrize("change", [close, adopt])
def test_outside_runs_a_shard_that_is_gone_is_asked(change: Callable[[Shard], None]):
    shard = make()
    reads = Visibility(shard.segment, 0, -1)
    assert reads.find_flip(0) >= 0
    assert reads.find_flip(1) == REFER
    change(shard)
    assert reads.find_flip(0) == REFER


@pytest.fixture
def held() -> Shard:
    """A shard with a flip after the first."""
    shard = make()
    Publication(shard.segment).commit()
    return shard


CARRIERS = [
    lambda reader, flip, out: reader.read_at(flip, [out]),
    lambda reader, flip, out: reader.holds(flip),
]


@pytest.mark.parametrize("is_whole", CARRIERS, ids=["copied", "shown"])
def test_a_copy_of_a_flip_that_was_taken_back_is_not_whole(held, is_whole):
    """Its writer has died before all of it was there."""
    reader, out = ShardReader(held.segment, PARTS), np.empty(5)
    flip, version, [weights] = reader.show(0)
    assert (flip, version) == (1, held.segment.current.version)
    assert weights.tolist() == [0] * 5
    assert is_whole(reader, flip, out)
    held.segment.flip -= 1
    assert not is_whole(reader, flip, out)


@pytest.mark.parametrize("is_whole", CARRIERS, ids=["copied", "shown"])
def test_a_copy_is_whole_until_a_second_publication_begins(held, is_whole):
    held.begin_run(RUN, ASP(), 1)
    reader, out = ShardReader(held.segment, PARTS, RUN, 0), np.empty(5)
    flip = reader.find_flip(0)
    assert is_whole(reader, flip, out)
    Publication(held.segment).commit()
    assert is_whole(reader, flip, out)
    Publication(held.segment)
    assert not is_whole(reader, flip, out)

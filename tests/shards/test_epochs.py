"""The words of a record that count a store's epochs."""

from __future__ import annotations

import pytest

from daskps.consistency import ASP, BSP, SSP
from daskps.epochs import Epochs
from daskps.errors import ConsistencyError
from daskps.shards.installation import Counted
from daskps.shards.memory.segment import Segment
from daskps.shards.run_record import epochs_of
from daskps.shards.shard import Shard
from tests.shards.making import LAYOUT, RULED, RUN, make, send, step


def now(shard: Shard) -> Epochs:
    return epochs_of(shard.segment.current)


def begun(policy, n_ranks=1, epochs=None, **kwargs) -> Shard:
    shard = make(**kwargs)
    shard.begin_run(RUN, policy, n_ranks, epochs=epochs)
    return shard


def test_arithmetic():
    assert Epochs() == (0, 0, 0)
    for epochs, ended, within, following in (
        (Epochs(), 0, 0, 0),
        (Epochs(4), 4, 0, 4),
        (Epochs(2, 5, 0), 2, 0, 2),
        (Epochs(2, 5, 4), 2, 4, 3),
        (Epochs(2, 5, 5), 3, 0, 3),
        (Epochs(2, 5, 11), 4, 1, 5),
    ):
        assert (epochs.ended, epochs.within, epochs.following) == (
            ended,
            within,
            following,
        )
        assert epochs.place == (ended, within)


def test_rounds_count_and_another_process_finds_them():
    shard = begun(BSP(), 2, Epochs(3, 4, 2), durable=True)
    assert now(shard) == Epochs(3, 4, 2)
    for clock in range(3):
        for rank in (0, 1):
            send(shard, step(rank, clock))
    assert now(shard) == Epochs(3, 4, 5)
    slots = dict.fromkeys(RULED, (0.0,))
    other = Segment(LAYOUT, 0, slots, shard.segment.buffer, durable=True)
    assert epochs_of(other.current) == Epochs(3, 4, 5)
    shard.end_run(RUN, "a test", rounds=3)
    assert now(shard) == Epochs(3, 4, 5)
    assert epochs_of(other.current) == Epochs(3, 4, 5)
    # What comes after it counts from there; a repeated end counts nothing.
    shard.end_run(RUN, "a test", rounds=3)
    shard.begin_run(RUN + 1, BSP(), 1, epochs=Epochs(5, 4, 0))
    assert now(shard) == Epochs(5, 4, 0)


def test_a_round_that_is_withdrawn_does_not_count():
    for epochs, expected in ((Epochs(1, 2, 0), Epochs(1, 2, 1)), (None, Epochs(0))):
        shard = begun(BSP(), 1, epochs)
        for clock in (0, 1):
            send(shard, step(0, clock))
        shard.end_run(RUN, "a test", rounds=1, version=9)
        assert now(shard) == expected


@pytest.mark.parametrize("policy", [ASP(), SSP(9)])
def test_without_rounds_the_slowest_counts(policy):
    shard = begun(policy, 3, Epochs(1, 3, 0))
    for rank, clocks in ((0, 3), (1, 5)):
        for clock in range(clocks):
            send(shard, step(rank, clock))
    assert now(shard) == Epochs(1, 3, 0)
    shard.finish_rank(RUN, 2)  # it has no data
    assert now(shard) == Epochs(1, 3, 3)
    shard.finish_rank(RUN, 0)
    assert now(shard) == Epochs(1, 3, 5)
    shard.finish_rank(RUN, 1)
    shard.end_run(RUN, "a test")
    assert now(shard) == Epochs(1, 3, 5)
    assert now(shard).following == 3


def test_a_run_does_not_begin_before_what_there_was():
    shard = begun(BSP(), 1, Epochs(3, 4, 0))
    send(shard, step(0, 0))
    shard.end_run(RUN, "a test")
    before = shard.segment.current.words.tobytes()
    for epochs in (Epochs(2, 9, 8), Epochs(3, 4, 0)):
        with pytest.raises(ConsistencyError, match="has come to epoch 4"):
            shard.begin_run(RUN + 1, BSP(), 1, epochs=epochs)
        assert shard.segment.current.words.tobytes() == before
    shard.begin_run(RUN + 1, BSP(), 1, epochs=Epochs(3, 4, 1))
    shard.end_run(RUN + 1, "a test")
    # A run without epochs ends the one that was under way.
    shard.begin_run(RUN + 2, BSP(), 1)
    assert now(shard) == Epochs(4, 0, 0)
    shard.end_run(RUN + 2, "a test")
    shard.begin_run(RUN + 3, BSP(), 1, epochs=Epochs(0, 4, 0), reset=True)
    assert now(shard) == Epochs(0, 4, 0)


def test_a_state_is_installed_with_its_epochs():
    """Of a run in progress that is where its rounds have come to."""
    shard, other = begun(BSP(), 1, Epochs(3, 4, 2)), make()
    send(shard, step(0, 0))
    Counted.of(shard.segment, shard.segment.flip).put(other.segment)
    assert now(other) == Epochs(3, 4, 3)
    with pytest.raises(ConsistencyError, match="has come to epoch 4"):
        other.begin_run(RUN, BSP(), 1, epochs=Epochs(3, 4, 2))
    other.begin_run(RUN, BSP(), 1, epochs=Epochs(3, 4, 3))

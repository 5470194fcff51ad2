"""What a trainer does at shards that it reaches itself, without a message."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller.deliveries import PreparedStep
from daskps.cluster.caller.mapped import MappedShards
from daskps.cluster.caller.reads import TRIES, PreparedRead, PreparedReads
from daskps.cluster.caller.routes import Target
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.wire.messages import Call
from daskps.consistency import ASP
from daskps.layout.arrays import Layout
from daskps.shards.deputy import NotHereError
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard
from daskps.shards.steps import ADD, Item, Step, Tick, Ticket
from tests.cluster.slots import LAYOUT, shared_slot
from tests.shards.making import held

RUN = 7
ALL = {0: (("float64", 0, 1000),)}


class Session:
    """A trainer beside one shard, whose owner may be gone."""

    run, rank, clock, bsp = RUN, 0, 0, False

    def __init__(self, slot: HostedShard) -> None:
        self.is_live = True
        self.lag = 0
        self.moved(slot)
        ways = SimpleNamespace(serving=lambda _: self.serving)
        self.counters = SimpleNamespace(local_calls=0)
        self.shards = SimpleNamespace(ways=ways, counters=self.counters)
        positions = {(0, 0): 0}
        self.meta = SimpleNamespace(
            uid="s", where=self.where, layout=LAYOUT, positions=positions
        )

    def moved(self, slot: HostedShard) -> None:
        """The shard is that of a slot from here on."""
        self.serving = SimpleNamespace(
            slots={("s", 0): slot}, is_live=lambda: self.is_live
        )
        self.where = SimpleNamespace(owners=("w",), hosts={"w": [0]})


@pytest.fixture
def slot(tmp_path: Path) -> HostedShard:
    slot = shared_slot(tmp_path)
    slot.locks_reads = False
    slot.shard.begin_run(RUN, ASP(), 2)
    return slot


class Disturbed:
    """An array to read into; so many updates run into each copy."""

    def __init__(self, slot: HostedShard, updates: list[int]) -> None:
        self.slot, self.updates, self.found = slot, updates, set[float]()

    def __setitem__(self, where: slice, source: Any) -> None:
        self.found = set(source.tolist())
        shard = self.slot.shard
        for _ in range(self.updates.pop(0) if self.updates else 0):
            items = (Item(0, 0, np.ones(1000)),)
            number = shard.segment.current.version
            step = Step(ADD, items, producer=1, sequence=number)
            shard.submit([Ticket(step)])


@pytest.mark.parametrize(("updates", "read"), [([1], 0.0), ([2], 2.0), ([2, 2], 4.0)])
def test_a_read_that_updates_ran_into_is_repeated(
    slot: HostedShard, updates: list[int], read: float
) -> None:
    """One may be under way; the second writes where was read."""
    session: Any = Session(slot)
    out: Any = Disturbed(slot, updates)
    assert PreparedRead(session, ALL).read(0, [out])
    assert out.found == {read}


def test_a_read_that_updates_run_into_each_time_is_the_shards(
    slot: HostedShard,
) -> None:
    session: Any = Session(slot)
    out: Any = Disturbed(slot, [2] * TRIES)
    assert not PreparedRead(session, ALL).read(0, [out])


def test_a_read_of_pieces_in_both_buffers_takes_each_from_its_own() -> None:
    layout = Layout.build({"v": ((5,), "float64"), "w": ((7,), "float64")}, 1)
    shard = Shard(Segment(layout, 0, {}), {})
    shard.segment.is_together = False
    shard.begin_run(RUN, ASP(), 2)
    session: Any = Session(HostedShard("s", layout, 0, shard))
    read, out = PreparedRead(session, {0: (("float64", 2, 9),)}), np.empty(7)
    for sequence, position in enumerate((1, 0, 1)):
        items = (Item(position, 0, np.ones((5, 7)[position])),)
        step = Step(ADD, items, producer=1, sequence=sequence)
        shard.submit([Ticket(step)])
        assert read.read(0, [out])
        assert out.tolist() == [sequence > 0] * 3 + [1 + sequence // 2] * 4


def test_nothing_is_read_from_the_memory_of_a_worker_that_is_gone(
    slot: HostedShard,
) -> None:
    session: Any = Session(slot)
    assert PreparedRead(session, ALL).read(0, [np.empty(1000)])
    session.is_live = False
    assert not PreparedRead(session, ALL).read(0, [np.empty(1000)])


def test_a_read_is_made_ready_anew_when_a_shard_has_moved(
    slot: HostedShard, tmp_path: Path
) -> None:
    session: Any = Session(slot)
    glances, out = PreparedReads(session), np.empty(1000)
    target = Target(ALL, {0: [out]}, lambda: None)
    assert glances.fill(target)
    assert set(out) == {0.0}
    heir = shared_slot(tmp_path)
    heir.locks_reads = False
    heir.shard.begin_run(RUN, ASP(), 2)
    held(heir.shard.segment)[0][:] = 5.0
    session.moved(heir)
    session.meta.where = session.where
    assert glances.fill(target)
    assert set(out) == {5.0}


@pytest.mark.parametrize("is_live", [True, False])
def test_no_step_goes_to_the_memory_of_a_worker_that_is_gone(
    slot: HostedShard, is_live: bool
) -> None:
    """It would be acknowledged, and lost."""
    session: Any = Session(slot)
    session.is_live = is_live
    delivery = PreparedStep(session, (0,), "")
    version = delivery.send({0: np.ones(1000)}, Tick(RUN, 0, 0, 0, ADD, 1.0))
    assert (version is not None) is is_live
    assert slot.shard.segment.current.version == is_live


def test_no_call_goes_to_the_memory_of_a_worker_that_is_gone() -> None:
    mapped: Any = SimpleNamespace(is_live=lambda: False)
    with pytest.raises(NotHereError):
        MappedShards.begin_now(mapped, Call("s", ()), 1.0)

"""What a caller does at shards that it reaches itself, without a message."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.local import SplitRoute
from daskps.cluster.caller.local_shards import local_call
from daskps.cluster.caller.reads import PreparedRead, Reads
from daskps.cluster.caller.routes import push, read, route_of
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.targets import ReadSlice
from daskps.cluster.counters import Counters
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.protocol.deadline import Deadline
from daskps.consistency import ASP, BSP
from daskps.errors import ShardBusyError
from daskps.layout.arrays import Layout
from daskps.shards.deputy import READING, set_gate
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.rounds.words import N_IN
from daskps.shards.shard import Shard
from daskps.shards.steps import (
    ADD,
    GRADIENT,
    MODEL,
    NOTHING,
    READ,
    Item,
    Step,
    Ticket,
)
from tests.cluster.callers import ALL, Carriers, RemoteShards, call, target_in
from tests.cluster.hosted import shared_shard
from tests.seams import lock_of
from tests.shards.making import held

RUN = 7


@pytest.fixture
def hosted(tmp_path: Path) -> HostedShard:
    hosted = shared_shard(tmp_path)
    hosted.locks_reads = False
    hosted.shard.generation = 1
    hosted.shard.begin_run(RUN, ASP(), 2)
    return hosted


def local(carriers: Any, slices: Any = ALL) -> PreparedRead:
    """Return a read of the shard that these ways reach."""
    found = PreparedRead.of(carriers, slices)
    assert found is not None
    return found


class Disturbed:
    """An array to read into; so many updates run into each copy."""

    def __init__(self, hosted: HostedShard, updates: list[int]) -> None:
        self.hosted, self.updates, self.found = hosted, updates, set[float]()

    def __setitem__(self, where: slice, source: Any) -> None:
        self.found = set(source.tolist())
        shard = self.hosted.shard
        for _ in range(self.updates.pop(0) if self.updates else 0):
            items = (Item(0, 0, np.ones(1000)),)
            number = shard.segment.current.version
            step = Step(ADD, items, producer=1, sequence=number)
            shard.submit([Ticket(step)])


@pytest.mark.parametrize(("updates", "read"), [([1], 0.0), ([2], 2.0), ([2, 2], 4.0)])
def test_a_read_that_updates_ran_into_is_repeated(
    hosted: HostedShard, updates: list[int], read: float
) -> None:
    """One may be under way; the second writes where was read."""
    carriers: Any = Carriers(hosted, RUN)
    out: Any = Disturbed(hosted, updates)
    assert local(carriers).read([0], [out]) == 0
    assert out.found == {read}


def test_a_read_that_updates_run_into_each_time_is_the_shards(
    hosted: HostedShard,
) -> None:
    carriers: Any = Carriers(hosted, RUN)
    out: Any = Disturbed(hosted, [2] * 1000)
    assert local(carriers).read([0], [out]) is None


def test_a_read_of_pieces_in_both_buffers_takes_each_from_its_own() -> None:
    layout = Layout.build({"v": ((5,), "float64"), "w": ((7,), "float64")}, 1)
    shard = Shard(Segment(layout, 0, {}), {})
    shard.segment.is_together = False
    shard.begin_run(RUN, ASP(), 2)
    carriers: Any = Carriers(HostedShard("s", layout, 0, shard), RUN)
    slices = {0: (ReadSlice(("float64", 2, 9), 0, slice(0, 7)),)}
    read, out = local(carriers, slices), np.empty(7)
    for sequence, position in enumerate((1, 0, 1)):
        items = (Item(position, 0, np.ones((5, 7)[position])),)
        step = Step(ADD, items, producer=1, sequence=sequence)
        shard.submit([Ticket(step)])
        assert read.read([0], [out]) is not None
        assert out.tolist() == [sequence > 0] * 3 + [1 + sequence // 2] * 4


def test_nothing_is_read_from_the_memory_of_a_worker_that_is_gone(
    hosted: HostedShard,
) -> None:
    carriers: Any = Carriers(hosted, RUN)
    assert local(carriers).read([0], [np.empty(1000)]) == 0
    carriers.serving.lives = False
    assert local(carriers).read([0], [np.empty(1000)]) is None


def test_what_was_prepared_is_forgotten_when_a_shard_has_moved() -> None:
    meta: Any = SimpleNamespace(where=object())
    before, prepared = meta.where, Prepared[str, int](meta)
    prepared.keep("a key", 1, before)
    assert prepared.find("a key") == 1
    meta.where = object()
    assert prepared.find("a key") is None
    # Made before the move, kept after it.
    prepared.keep("a key", 2, before)
    assert prepared.find("a key") is None
    prepared.keep("a key", 3, meta.where)
    assert prepared.find("a key") == 3


def test_a_read_is_made_ready_anew_when_a_shard_has_moved(
    hosted: HostedShard, tmp_path: Path
) -> None:
    carriers: Any = Carriers(hosted, RUN)
    reads, out = (
        Reads(
            carriers.meta,
            carriers,
            cast("Any", SimpleNamespace(counters=Counters(), sockets=None)),
        ),
        np.empty(1000),
    )
    target = target_in(out)
    assert reads.fill(target, [0])
    assert set(out) == {0.0}
    heir = shared_shard(tmp_path)
    heir.locks_reads = False
    heir.shard.begin_run(RUN, ASP(), 2)
    held(heir.shard.segment)[0][:] = 5.0
    carriers.moved(heir)
    assert reads.fill(target, [0])
    assert set(out) == {5.0}


@pytest.mark.parametrize("is_live", [True, False])
def test_no_step_goes_to_the_memory_of_a_worker_that_is_gone(
    hosted: HostedShard, is_live: bool
) -> None:
    """It would be acknowledged, and lost."""
    carriers: Any = Carriers(hosted, RUN)
    carriers.serving.lives = is_live
    step = Step(kind=ADD, run=RUN, rank=0, tick=True)
    request = push(carriers.meta, {0: np.ones(1000)}, step, everywhere=True)
    reply, remote = call(carriers, request)
    assert hosted.shard.segment.current.version == is_live
    assert remote.sent == ([] if is_live else [(request, [0])])
    assert reply.versions == [(0, 1 if is_live else 99)]


def test_what_only_the_owner_can_do_goes_by_message_as_it_is(
    hosted: HostedShard,
) -> None:
    hosted.shard = Shard.as_deputy(hosted.shard.segment, {})
    set_gate(hosted.shard.segment, READING)
    carriers = Carriers(hosted)
    request = push(carriers.meta, {0: np.ones(1000)}, Step(kind=ADD, producer=1))
    reply, remote = call(carriers, request)
    assert (reply.versions, remote.sent) == ([(0, 99)], [(request, [0])])


def test_what_was_accepted_is_not_sent_again(hosted: HostedShard) -> None:
    """What waits for the other trainers is left to the owner, without the arrays."""
    carriers = Carriers(hosted, RUN)
    carriers.serving.patience = 0.01
    hosted.shard.begin_run(RUN + 1, BSP(), 2)
    carriers.run = RUN + 1
    step = Step(run=carriers.run, rank=0, tick=True, kind=GRADIENT)
    target = target_in(np.empty(1000))
    arrays = {0: np.ones(1000)}
    _, remote = call(
        carriers, push(carriers.meta, arrays, step, everywhere=True, target=target)
    )
    [(sent, shards)] = remote.sent
    assert shards == [0]
    assert not sent.arrays
    assert (sent.step.clock, sent.step.tick, sent.step.kind) == (1, False, NOTHING)


def test_a_shard_that_another_process_keeps_is_asked_by_message(
    hosted: HostedShard,
) -> None:
    """Who has its lock may be stopped: the owner hears of a fence meanwhile."""
    carriers, request = Carriers(hosted), None

    def busy(seconds: float) -> None:
        raise ShardBusyError("stopped")

    lock_of(hosted).acquire = busy  # as if it were taken
    request = push(carriers.meta, {0: np.ones(1000)}, Step(kind=ADD, producer=1))
    reply, remote = call(carriers, request)
    assert (reply.versions, remote.sent) == ([(0, 99)], [(request, [0])])
    assert not hosted.waits


@pytest.mark.parametrize("why", ["", "gone", "locked", "queued"])
def test_a_step_joins_a_round_only_where_nothing_is_in_its_way(
    hosted: HostedShard, why: str
) -> None:
    """Elsewhere nothing is changed: it becomes a ticket under the same number."""
    carriers: Any = Carriers(hosted, RUN + 1)
    hosted.shard.begin_run(RUN + 1, BSP(), 2)
    hosted.shard.segment.words[GENERATION] = hosted.shard.generation
    local = SplitRoute(route_of(carriers.meta, (0,), None), carriers)
    if why == "gone":
        carriers.serving.lives = False
    elif why == "queued":
        hosted.put(Ticket(Step(wait=READ)))

    def busy(seconds: float) -> None:
        raise ShardBusyError("stopped")

    if why == "locked":
        lock_of(hosted).acquire = busy  # as if it were taken
    step = Step(GRADIENT, run=RUN + 1, rank=0, tick=True)
    versions, rest = local.try_step(step, {0: np.ones(1000)})
    n_in = int(hosted.shard.round.find_table().words[N_IN])  # type: ignore[union-attr]  # in rounds
    if why:
        assert (versions, rest, n_in) == ([], local.parts, 0)
    else:
        assert (versions, rest, n_in) == ([(0, 0)], [], 1)


def test_a_call_goes_only_to_the_shards_that_have_not_taken_it(
    hosted: HostedShard,
) -> None:
    carriers: Any = Carriers(hosted)
    request = push(carriers.meta, {0: np.ones(1000)}, Step(kind=ADD, producer=1))
    local, remote = SplitRoute(request.route, carriers), cast("Any", RemoteShards())
    deadline = Deadline(None, "a push")
    call = local_call(remote, request, local, deadline, taken=[(0, 8)], parts=[])
    assert call.run().versions == [(0, 8)]
    assert (hosted.shard.segment.current.version, remote.sent) == (0, [])


def test_no_message_object_is_made_near(hosted: HostedShard) -> None:
    """What a message would say is not put together where none is sent."""
    carriers = Carriers(hosted)
    request = push(carriers.meta, {0: np.ones(1000)}, Step(kind=ADD, producer=1))
    made: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        names = frame.f_code.co_varnames
        if event == "call" and frame.f_code.co_name == "<lambda>" and "_cls" in names:
            made.append(frame.f_locals["_cls"].__name__)

    local, remote = (
        SplitRoute(request.route, cast("Any", carriers)),
        cast("Any", RemoteShards()),
    )
    one = local_call(remote, request, local, Deadline(None, "a push"))
    sys.setprofile(note)
    try:
        one.begin()
        one.result()
    finally:
        sys.setprofile(None)
    assert "Step" not in made  # changed, not made anew
    assert not {"Call", "Part", "Answer"} & set(made)


def test_a_client_of_a_run_reads_exactly_the_round_of_its_step(tmp_path: Path) -> None:
    """In the task graph some shards are a round ahead of one that is begun anew."""
    hosted = shared_shard(tmp_path)
    hosted.locks_reads = False
    hosted.shard.generation = 1
    hosted.shard.begin_run(RUN, BSP(), 1)
    step = Step(MODEL, run=RUN, rank=0, tick=True)
    for clock in range(2):
        items = (Item(0, 0, np.full(1000, clock + 1.0)),)
        said = step._replace(items=items, clock=clock, sequence=clock, generation=1)
        hosted.shard.submit([Ticket(said)])
    out, carriers = np.zeros(1000), Carriers(hosted, RUN)
    client: Any = SimpleNamespace(
        carriers=carriers,
        reads=Reads(
            carriers.meta,
            cast("Any", carriers),
            cast("Any", SimpleNamespace(counters=Counters(), sockets=None)),
        ),
        call=lambda request, deadline: call(carriers, request)[0],
        counters=Counters(),
    )
    found = {}
    for clock in (1, 2):
        target = target_in(out)
        request = read(carriers.meta, target, None, Step(run=RUN, rank=0, clock=clock))
        ShardClient.pull(client, request, Deadline(60, "a read"))
        found[clock] = set(out.tolist())
    assert found == {1: {1.0}, 2: {2.0}}

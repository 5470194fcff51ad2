"""What a host does with the frames of a socket, without a cluster."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps import consistency, optim
from daskps.cluster.host import host_template
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.hosted import HostedShard
from daskps.cluster.host.socket_calls import Parked
from daskps.cluster.protocol.messages import Call, Part
from daskps.errors import StoreClosedError
from daskps.kernels import past
from daskps.layout.arrays import Layout
from daskps.shards.memory import publication
from daskps.shards.memory.format import GENERATION
from daskps.shards.reader import TRIES, ShardReader
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    GRADIENT,
    NO_WAIT,
    READ,
    Item,
    Step,
    Ticket,
)
from tests.cluster.by_socket import RULE, Caller, RefusedError, calling, hosted_shards
from tests.cluster.hosted import bare_host, shared_shard
from tests.seams import mutex_of
from tests.shards.making import held

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


class Nobody:
    """Owns tickets that are done at once."""

    def one_done(self) -> None: ...


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
    assert parked.end <= time.monotonic() + host_template.MOST_WAIT_SECONDS
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
    hosted.enqueue(lambda shard: shard.end_run(RUN, "the test ends it"))
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


# -- what is done at once, without a ticket --------------------------------------------


def pull(*shards: int, **said: Any) -> Call:
    """What a handle reads, or a trainer."""
    ranges = (("float32", 0, 30), ("float64", 0, 2))
    parts = (Part(s, Step(wait=READ, owned=True, **said), ranges) for s in shards)
    return Call("s", tuple(parts), wait_seconds=30.0)


def push(shard: int, sequence: int, **said: Any) -> Call:
    """A push outside runs."""
    items = (Item(0, 0, np.ones(30, "f4")),)
    step = Step(GRADIENT, items, producer=3, sequence=sequence, owned=True)
    return Call("s", (Part(shard, step._replace(**said)),))


def no_tickets(monkeypatch: Any) -> None:
    def offer(*_: Any) -> None:
        raise AssertionError("a ticket")

    monkeypatch.setattr(HostedShard, "offer", offer)
    monkeypatch.setattr(HostedShard, "put", offer)


def test_weights_are_read_without_a_ticket(host, caller, monkeypatch):
    caller.call(push(1, 1))
    no_tickets(monkeypatch)
    rows = caller.call(pull(0, 1, 2))
    assert [row.version for row in rows] == [0, 1, 0]
    assert [row.arrays[0].any() for row in rows] == [False, True, False]


def test_a_step_that_joins_its_round_needs_no_ticket(host, caller, monkeypatch):
    begin(host)
    no_tickets(monkeypatch)
    quiet = [
        Part(p.shard, p.step._replace(wait=NO_WAIT))
        for p in pushpull(0, 0, 0, 1, 2).parts
    ]
    rows = caller.call(Call("s", tuple(quiet)))
    assert [(row.version, row.applied) for row in rows] == [(0, True)] * 3
    # It completes the round, and reads it.
    rows = caller.call(pushpull(1, 0, 0, 1, 2))
    assert [row.version for row in rows] == [1] * 3
    assert all(row.arrays[0].any() for row in rows)
    rows = caller.call(pull(0, 1, 2, run=RUN, rank=0, clock=1))
    assert [row.version for row in rows] == [1] * 3


@pytest.mark.parametrize("sync", ["", "asp", "ssp"])
def test_a_push_that_is_an_update_needs_no_ticket(host, caller, monkeypatch, sync):
    """But for the first one of its producer."""
    said: dict[str, Any] = {}
    if sync:
        begin(host, sync)
        said |= {"run": RUN, "rank": 1, "tick": True}
    else:
        said |= {"producer": 9}
        caller.call(push(1, 0, **said))
    no_tickets(monkeypatch)
    for number in range(1, 4):
        here = said | ({"clock": number - 1} if sync else {})
        [row] = caller.call(push(1, number, **here))
        assert (row.applied, row.version) == (True, number + (not sync))


def unchecked(sequence: int, value: float, *shards: int) -> Call:
    """A push outside runs that nobody has looked at."""
    parts = []
    for shard in shards:
        data = np.full(30, 1, "f4")
        data[-1] = value
        items = (Item(0, 0, data), Item(1, 0, np.full(2, 0.5)))
        said = Step(GRADIENT, items, producer=9, sequence=sequence, check=True)
        parts.append(Part(shard, said))
    return Call("s", tuple(parts))


@pytest.mark.parametrize("rule", [RULE, optim.SGD(0.1)])
def test_a_shard_looks_for_nan_where_nobody_has(monkeypatch, rule):
    """In the pass that applies it, where there are no slots; else before that."""
    monkeypatch.setattr(publication, "PAST_NBYTES", 0)
    shards = hosted_shards(rule=rule)
    segment = shards[1].shard.segment
    with bare_host(None, *shards) as host, calling(host) as caller:
        [good] = caller.call(unchecked(0, 1.0, 1))
        weights = [array.tolist() for array in held(segment)]
        for value in (np.nan, np.inf):
            for _ in range(2):
                with pytest.raises(RefusedError, match=r"Rejected.* has NaN or Inf"):
                    caller.call(unchecked(1, value, 1))
        assert segment.current.version == good.version
        assert [array.tolist() for array in held(segment)] == weights
        # Its number is free: what is pushed under it counts, once.
        for _ in range(2):
            [again] = caller.call(unchecked(1, 2.0, 1))
            assert again.version == good.version + 1


def test_only_one_shard_may_look(host, caller):
    """What the second one found, the first would have applied."""
    with pytest.raises(
        RefusedError, match="a template of a 'gradient' that is to be look"
    ):
        caller.call(unchecked(0, 1.0, 0, 1))
    call = unchecked(0, 1.0, 1)
    [part] = call.parts
    step = part.step._replace(kind=ADD)
    with pytest.raises(
        RefusedError, match="a template of a 'add' that is to be looked at"
    ):
        caller.call(call._replace(parts=(part._replace(step=step),)))


def test_a_shard_that_somebody_is_at_gets_a_ticket(host, caller):
    begin(host)
    hosted = host.get_shard("s", 1)
    with mutex_of(hosted):
        parked = caller.begin(pushpull(0, 0, 0, 1))
        assert isinstance(parked, Parked)
        assert hosted.waits
    hosted.serve()
    with calling(host) as other:
        other.call(pushpull(1, 0, 0, 1))
    assert parked.done
    rows = caller.answers(parked.finish(0), pushpull(0, 0, 0, 1))
    assert [row.version for row in rows] == [1, 1]


def test_reads_that_take_the_lock_are_asked_for(host, caller):
    for hosted in host.shards.values():
        hosted.locks_reads = True
    caller.call(push(0, 1))
    (row,) = caller.call(pull(0))
    assert row.arrays[0].any()


def test_a_read_that_an_update_runs_into_begins_again(host, caller, monkeypatch):
    """An update after each copy; the last one leaves the shard to its lock."""
    hosted = host.get_shard("s", 0)
    caller.call(push(0, 1))
    n, copy = 0, ShardReader.read_at

    def copied(reader: ShardReader, *args: Any, locked: bool = False) -> bool:
        nonlocal n
        n += 1
        found = copy(reader, *args, locked=locked)
        if n > limit or locked:
            return found
        for _ in range(2):
            hosted.shard.segment.writing += 1
            hosted.shard.segment.flip += 1
        return reader.holds(args[0])

    monkeypatch.setattr(ShardReader, "read_at", copied)
    for limit in (1, 2, 100):
        n = 0
        (row,) = caller.call(pull(0))
        # A small read has a buffer first; with a ticket it is tried once more, then
        # without a buffer twice, and in its turn.
        assert n == min(limit + 1, 3 * TRIES + 3)
        assert row.arrays[0].tobytes() == held(hosted.shard.segment)[0].tobytes()


def test_large_answers_are_in_memory_that_is_used_again(monkeypatch):
    layout = Layout.build({"w": ((100_000,), "float32")}, 1)
    monkeypatch.setattr(past, "LARGE_NBYTES", 2**18)
    with bare_host(None, *hosted_shards(layout)) as host, calling(host) as caller:
        data = np.arange(100_000, dtype="f4")
        assign = Step(ASSIGN, (Item(0, 0, data),), producer=1, sequence=1, owned=True)
        host.shards["s", 0].offer(Ticket(assign, owner=Nobody()), 0)
        read = Call("s", (Part(0, Step(wait=READ), (("float32", 0, 100_000),)),))
        for _ in range(2):
            (row,) = caller.call(read)
            assert (row.arrays[0] == data).all()
            del row
        assert host.pool.nbytes == 401_408


# -- where another process has the lock ------------------------------------------------


@pytest.fixture
def shared(tmp_path) -> Iterator[tuple[HostedShard, Caller, Any, list[Any]]]:
    """A shard in memory that others map; one of these has its lock.

    With what its host was asked to do on its event loop.
    """
    hosted = shared_shard(tmp_path)
    hosted.shard.segment.words[GENERATION] = hosted.shard.generation
    asked: list[Any] = []
    with bare_host(None, hosted) as host, calling(host) as caller:
        node: Any = host.worker
        node.loop = SimpleNamespace(add_callback=asked.append)
        assert hosted.block is not None
        other = hosted.block.lock()
        other.acquire(0)
        yield hosted, caller, other, asked
    hosted.close()


def add(sequence: int) -> Call:
    items = (Item(0, 0, np.ones(1000)),)
    step = Step(ADD, items, producer=3, sequence=sequence, owned=True, wait=READ)
    return Call("s", (Part(0, step, (("float64", 0, 3),)),), wait_seconds=30.0)


def test_who_may_not_wait_leaves_the_ticket_at_the_shard(shared):
    hosted, caller, other, looks = shared
    caller.seconds = 0
    parked = caller.begin(add(1))
    assert isinstance(parked, Parked)
    assert hosted.needs_look
    told = []
    parked.then(lambda: told.append("done"))
    # Nobody here hears when it is free: the host looks.
    assert len(looks) == 1
    other.release()
    hosted.look()
    assert told == ["done"]
    (row,) = caller.answers(parked.finish(0), add(1))
    assert (row.version, row.arrays[0].tolist()) == (1, [1, 1, 1])


def test_who_has_waited_for_the_lock_is_refused_and_leaves_nothing(shared):
    hosted, caller, other, _ = shared
    caller.seconds = 0.01
    with pytest.raises(RefusedError, match="ShardBusyError"):
        caller.call(add(1))
    assert not hosted.waits
    other.release()
    (row,) = caller.call(add(1))
    assert row.version == 1


def test_who_may_not_wait_reads_without_the_lock(shared):
    _, caller, _, _ = shared
    caller.seconds = 0
    read = Call("s", (Part(0, Step(wait=READ), (("float64", 0, 3),)),))
    (row,) = caller.call(read)
    assert row.version == 0


# -- shards that are not what they were ---------------------------------------------


def test_a_shard_that_has_gone_is_refused(host, caller):
    caller.call(pull(0))
    caller.call(push(0, 1))
    gone = host.shards.pop(("s", 0))
    for call in (pull(0), push(0, 2), pull(1, 0)):
        with pytest.raises(
            RefusedError, match=r"StaleGenerationError.*holds no shard 0"
        ):
            caller.call(call)
    assert gone.shard.segment.current.version == 1
    # What of its store is still here goes on.
    caller.call(pull(1))


def test_a_shard_that_came_back_is_asked_under_its_generation(host, caller):
    caller.call(pull(0))
    anew = hosted_shards()[0]
    anew.shard.generation = 2
    anew.shard.segment.words[GENERATION] = 2
    host.shards["s", 0] = anew
    for call in (pull(0), push(0, 1)):
        with pytest.raises(RefusedError, match=r"StaleGenerationError.*generation 1"):
            caller.call(call)
    assert anew.shard.segment.current.version == 0
    assert caller.call(push(0, 1, generation=2))[0].version == 1
    assert caller.call(pull(0, generation=2))[0].arrays[0].any()


def test_a_shard_of_the_same_name_is_read_and_not_the_one_before(host, caller):
    """As where a host lets go of a shard and takes it again."""
    caller.call(pull(0))
    before, anew = host.get_shard("s", 0), hosted_shards()[0]
    host.shards["s", 0] = anew
    caller.call(push(0, 1))
    (row,) = caller.call(pull(0))
    assert row.arrays[0].any()
    assert row.arrays[0].tobytes() == held(anew.shard.segment)[0].tobytes()
    assert before.shard.segment.current.version == 0


def test_a_released_shard_serves_nobody(host, caller):
    begin(host)
    hosted = host.get_shard("s", 0)
    trainer = pull(0, run=RUN, rank=0, clock=0)
    caller.call(pull(0))
    caller.call(trainer)
    before = hosted.shard.segment.buffer.tobytes()
    hosted.release(StoreClosedError("another process has it"))
    hosted.serve()
    for call in (pull(0), trainer, pushpull(0, 0, 0)):
        with pytest.raises(RefusedError, match="StoreClosedError: another process"):
            caller.call(call)
    assert hosted.shard.segment.buffer.tobytes() == before


def test_a_shard_that_is_freed_is_not_read(host, caller):
    """While its host still has it: its memory may be another's a moment later."""
    hosted = host.get_shard("s", 0)
    caller.call(pull(0))
    hosted.enqueue(lambda shard: shard.abandon(StoreClosedError("it was deleted")))
    hosted.serve()
    hosted.close()
    for call in (pull(0), push(0, 1)):
        with pytest.raises(RefusedError, match="StoreClosedError: it was deleted"):
            caller.call(call)


def test_the_memory_of_a_shard_that_is_gone_is_kept_by_no_template(host, caller):
    """A socket outlives many stores, and knows its last templates for as long."""
    host.shards["s", 0] = hosted_shards()[0]  # which no fixture keeps
    for call in (pull(0), push(0, 1), pull(0, 1), pull(1)):
        caller.call(call)
    gone = weakref.ref(host.shards.pop(("s", 0)))
    assert gone() is not None
    # Also by the template of a call that came meanwhile.
    with pytest.raises(RefusedError, match="StaleGenerationError"):
        caller.call(pull(0))
    caller.calls.let_go()
    gc.collect()
    assert gone() is None
    for call in (pull(0), push(0, 2), pull(0, 1)):
        with pytest.raises(RefusedError, match="StaleGenerationError"):
            caller.call(call)
    assert caller.call(push(1, 2))[0].version == 1
    caller.call(pull(1))


def test_a_run_that_is_over_is_refused(host, caller):
    begin(host)
    trainer = pull(0, run=RUN, rank=0, clock=0)
    caller.call(trainer)
    hosted = host.get_shard("s", 0)
    hosted.enqueue(lambda shard: shard.end_run(RUN, "the test ends it"))
    hosted.serve()
    for call in (trainer, pushpull(0, 0, 0)):
        with pytest.raises(RefusedError, match="RunCancelledError"):
            caller.call(call)


def test_a_step_of_negative_weight_is_refused(host, caller):
    """A round divides by the sum of its weights; messages are looked at the same way."""
    begin(host)
    (part,) = pushpull(0, 0, 0).parts
    wrong = part._replace(step=part.step._replace(weight=-1.0))
    with pytest.raises(RefusedError, match=r"ProtocolError: a call of weight -1\.0"):
        caller.call(Call("s", (wrong,)))
    assert not host.get_shard("s", 0).waits

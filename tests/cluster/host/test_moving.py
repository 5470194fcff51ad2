"""A host's part in the move of a shard: what it hands over, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.protocol.states import pack_state, unpack_state
from daskps.consistency import BSP
from daskps.errors import ConsistencyError, ProtocolError, StaleGenerationError
from daskps.shards import states
from daskps.shards.shard import Shard
from daskps.shards.states import Mark
from daskps.shards.steps import GRADIENT, Item, Step, Ticket
from tests import inprocess
from tests.inprocess import Cluster
from tests.support import until


@pytest.fixture
def two() -> Iterator[Cluster]:
    with inprocess.cluster(2) as made:
        yield made


class Owner:
    """The host that owns the only shard of a store, and messages to it."""

    def __init__(self, cluster: Cluster) -> None:
        self.store = daskps.create({"w": np.zeros(4)}, shards=1, optimizer=optim.SGD(1))
        self.link = cluster.link
        self.address = self.store.placement[0]
        hosts = {host.worker.address: host for host in cluster.hosts}
        self.host = hosts[self.address]
        self.hosted = self.host.shards[self.store.uid, 0]

    @property
    def shard(self) -> Shard:
        return self.hosted.shard

    def ask(self, method: str, **more: Any) -> Any:
        about = {"store": self.store.uid, "shard": 0, "move": "one", **more}
        return self.link.run(lambda: self.link.control(self.address, method, **about))

    def rounds(self, n: int, first: int = 0) -> None:
        for clock in range(first, first + n):
            step = Step(
                GRADIENT,
                [Item(0, 0, np.ones(4))],
                run=7,
                rank=0,
                clock=clock,
                tick=True,
                sequence=clock,
                generation=self.shard.generation,
            )
            self.hosted.put(Ticket(step, owner=Nobody()))
            self.hosted.serve()


class Nobody:
    def one_done(self) -> None: ...


def test_a_handed_over_shard_is_read_by_nobody(two):
    """Other processes look at the generation in the memory."""
    owner = Owner(two)
    mark = owner.ask("move_begin")["mark"]
    owner.store.add({"w": np.ones(4)})
    answer = owner.ask("move_last", since=mark, generation=2)
    assert answer["is_ready"]
    state = unpack_state(answer["state"])
    assert state.pieces[0].weights.tolist() == [1.0] * 4
    deputy = Shard.as_deputy(owner.shard.segment, {})
    assert deputy.generation == 2 > owner.shard.generation
    with pytest.raises(StaleGenerationError):
        owner.ask("move_begin")
    # Nobody owns it elsewhere: it goes on.
    row = owner.ask("move_back", generation=3)
    assert row["generation"] == owner.shard.generation == 3
    # The same again where the answer was lost: it has not left.
    assert owner.ask("move_back", generation=3) == row


def test_late_messages_of_a_move_that_was_given_up_change_nothing(two):
    owner = Owner(two)
    owner.ask("move_begin")
    owner.ask("move_back", generation=2)
    with pytest.raises(ConsistencyError, match="does not move here after all"):
        owner.ask("move_begin")
    mark = owner.ask("move_begin", move="two")["mark"]
    with pytest.raises(ConsistencyError, match="does not move away"):
        owner.ask("move_last", since=mark, generation=2)
    owner.ask("move_deposed", generation=2)
    owner.ask("move_back", generation=3)
    assert [going.move for going in owner.host.going.values()] == ["two"]
    owner.store.add({"w": np.ones(4)})
    state = unpack_state(owner.ask("move_state", since=mark, move="two"))
    assert state.pieces[0].weights.tolist() == [1.0] * 4


def test_a_copy_that_stays_is_not_on_its_way(two):
    """Even where its owner has waited for it before; another move goes on."""
    owner = Owner(two)
    owner.ask("copy_on", order=1)
    owner.ask("move_begin")
    owner.ask("copy_on", order=1)
    assert not owner.host.going
    owner.ask("move_begin", move="two")
    owner.ask("copy_on", move="", order=2)
    assert [going.move for going in owner.host.going.values()] == ["two"]


def test_of_messages_about_copies_that_overtake_each_other_the_last_one_counts(two):
    """Else it would answer before its copy has it, or wait for one struck off."""
    owner = Owner(two)
    owner.ask("copy_on", move="two", order=3)
    for late in ("", "one"):
        with pytest.raises(ConsistencyError, match="copies of shard 0 have changed"):
            owner.ask("copy_on", move=late, order=2)
    assert owner.hosted.backing is not None
    assert owner.hosted.backing.move == "two"
    owner.ask("copy_on", move="", order=4)
    assert owner.hosted.backing is None


def test_a_shard_that_others_may_have_is_not_taken_back(two):
    """It was let go of meanwhile: somebody of the machine adopts its memory."""
    owner = Owner(two)
    owner.ask("move_begin")
    owner.hosted.release(StaleGenerationError("let go"))
    owner.hosted.serve()
    del owner.host.shards[owner.store.uid, 0]
    assert owner.ask("move_back", generation=3) is None
    assert owner.hosted.is_released
    assert owner.shard.generation == 1


def test_a_host_that_leaves_takes_no_shard_back(two):
    """It has let go of its shards, and frees all that it still has."""
    owner = Owner(two)
    mark = owner.ask("move_begin")["mark"]
    owner.ask("move_last", since=mark, generation=2)
    owner.host.lets_go = True
    assert owner.ask("move_back", generation=3) is None
    owner.host.lets_go = False
    assert not owner.host.going
    assert owner.hosted.is_released


def test_a_shard_is_let_go_of_under_one_number(two):
    """The message may be late, when the shard has come back."""
    owner = Owner(two)
    owner.hosted.is_shared = True
    for generation, stays in ((2, True), (1, False)):
        rows = [(0, generation), (7, 1)]
        about = {"store": owner.store.uid, "shards": rows}
        ask = partial(owner.link.control, owner.address, "let_go", **about)
        owner.link.run(ask)
        assert ((owner.store.uid, 0) in owner.host.shards) == stays
        assert owner.hosted.is_released != stays


def test_a_shard_that_was_adopted_meanwhile_is_not_dropped(two, monkeypatch):
    """A move has brought it, its answer was lost, and the move is undone then."""
    owner = Owner(two)
    owner.hosted.came_by = "one"
    monkeypatch.setattr(owner.host, "members", lambda _: object())
    entry = two.directory.stores[owner.store.uid]
    about = {"about": entry.described, "rows": [(0, "gone", 8, 1, 2)]}
    about |= {"store": owner.store.uid, "rounds": None, "codecs": [], "copies": []}
    adopt = partial(owner.link.control, owner.address, "adopt", **about)
    [row] = owner.link.run(adopt)
    assert (row["shard"], row["generation"]) == (0, 1)
    owner.ask("move_drop")
    owner.store.add({"w": np.ones(4)})
    # One that nobody has adopted goes.
    owner.hosted.came_by = "two"
    owner.ask("move_drop", move="two")
    assert not owner.host.shards


def test_a_shard_that_was_taken_back_is_handed_over_to_nobody(two):
    """Also where that call has waited for a round since before."""
    owner = Owner(two)
    owner.shard.begin_run(7, BSP(), 1)
    mark = owner.ask("move_begin")["mark"]
    with ThreadPoolExecutor() as pool:
        last = pool.submit(owner.ask, "move_last", since=mark, generation=2)
        until(lambda: owner.shard.last_flip is not None)
        owner.ask("move_back", generation=3)
        owner.rounds(1)
        with pytest.raises(ConsistencyError, match="moves no more"):
            last.result()
    assert owner.host.get_shard(owner.store.uid, 0) is owner.hosted
    assert not owner.hosted.is_released


def test_no_round_is_held_for_a_move_that_is_taken_back(two, monkeypatch):
    """A call that waits for the last round looks once more as the rounds go on."""
    owner = Owner(two)
    owner.shard.begin_run(7, BSP(), 1)
    mark = owner.ask("move_begin")["mark"]
    under, looked = owner.host.under, asyncio.Event()

    async def under_and_looked(hosted: Any, function: Any) -> Any:
        try:
            return await under(hosted, function)
        finally:
            if function.__name__ == "attempt":
                looked.set()
            else:
                looked.clear()
                with suppress(TimeoutError):  # it may have ended before
                    await asyncio.wait_for(looked.wait(), 1.0)

    with ThreadPoolExecutor() as pool:
        last = pool.submit(owner.ask, "move_last", since=mark, generation=2)
        until(lambda: owner.shard.last_flip is not None)
        monkeypatch.setattr(owner.host, "under", under_and_looked)
        owner.ask("move_back", generation=3)
        with pytest.raises(ConsistencyError, match="moves no more"):
            last.result()
    owner.rounds(3)
    assert owner.shard.rounds_of(7) == 3


def test_rounds_are_held_once_the_next_state_can_be_the_last(two):
    """Else the shard would wait for one that may never come, as a run ends."""
    owner = Owner(two)
    owner.shard.begin_run(7, BSP(), 1)
    mark = owner.ask("move_begin")["mark"]
    owner.rounds(1)
    assert owner.ask("move_last", since=mark, generation=0)["is_ready"]
    owner.rounds(1, first=1)
    assert owner.shard.rounds_of(7) == 1
    assert owner.ask("move_last", since=mark, generation=2)["is_ready"]


def test_the_last_state_is_one_round(two):
    """The new owner has to be able to take it back."""
    owner = Owner(two)
    owner.shard.begin_run(7, BSP(), 1)
    mark = Mark(*owner.ask("move_begin")["mark"])
    owner.rounds(3)
    found = owner.ask("move_last", since=mark, generation=0)
    assert not found["is_ready"]
    state = unpack_state(found["state"])
    assert state.now.flip == mark.flip + 3
    # One more, and no other.
    owner.rounds(2, first=3)
    assert owner.shard.rounds_of(7) == 4
    assert owner.ask("move_last", since=state.now, generation=0)["is_ready"]
    last = owner.ask("move_last", since=state.now, generation=2)
    assert unpack_state(last["state"]).now.flip == state.now.flip + 1
    assert last["mailbox"] is not None
    owner.ask("move_back", generation=3)
    owner.rounds(1, first=4)
    assert owner.shard.rounds_of(7) == 5


def test_a_host_answers_for_all_it_should_have(two):
    owner = Owner(two)
    about = {"store": owner.store.uid}

    def versions(holds: list[int]) -> Any:
        ask = owner.link.control(owner.address, "versions", holds=holds, **about)
        return owner.link.run(lambda: ask)

    assert [list(pair) for pair in versions([0])] == [[0, 0]]
    with pytest.raises(StaleGenerationError, match="holds no shard 1"):
        versions([0, 1])
    # Of a shard that came here just now another host has told.
    with pytest.raises(StaleGenerationError, match="holds no shard of"):
        versions([])


def test_what_is_no_part_of_a_move_is_refused(two):
    owner = Owner(two)
    with pytest.raises(ConsistencyError, match="does not move away"):
        owner.ask("move_state", since=(0, 0))
    runs: Any = {"rounds": None, "codecs": []}
    with pytest.raises(ConsistencyError, match="has no copy of shard 0"):
        owner.ask("move_own", generation=2, runs=runs)
    mark = owner.ask("move_begin")["mark"]
    with pytest.raises(ProtocolError, match="no such part"):
        owner.ask("move_read", spans=[("weights", 3, 0, 4)])
    assert owner.ask("move_state", since=mark)["pieces"] == []
    owner.ask("move_drop")
    owner.ask("move_back", generation=9)
    assert owner.shard.generation == 1
    owner.store.add({"w": np.ones(4)})


@pytest.mark.parametrize("broken", [{}, {"since": (1,)}, {"words": [(0, 3)]}])
def test_a_malformed_state_is_refused(two, broken):
    owner = Owner(two)
    state = states.take(owner.shard.segment, Mark(-1, 0))
    assert state is not None
    packed: Any = {**pack_state(state), **broken} if broken else {}
    with pytest.raises(ProtocolError, match="a state that is none"):
        unpack_state(packed)

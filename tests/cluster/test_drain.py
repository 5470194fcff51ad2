"""Shards that leave a worker which goes on, under pushes, reads, saves and runs."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.cluster.caller import client as caller
from daskps.cluster.directory import drains, move
from daskps.cluster.protocol.deadline import Deadline
from daskps.shards import states
from daskps.shards.memory import areas
from tests import inprocess, seams
from tests.cluster import killing_owners
from tests.inprocess import Cluster
from tests.support import local_cluster, until

#: Within a machine others adopt the memory; where it is private a copy is made.
WAYS = {"adopted": True, "copied": False}


@pytest.fixture(scope="module", params=[*WAYS.values()], ids=[*WAYS])
def machine(request: pytest.FixtureRequest) -> Iterator[Any]:
    way = {"daskps.carriers.machine": request.param}
    with dask.config.set(way), local_cluster(n_workers=3, threads=1) as client:
        yield client


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three workers of one process, with memory of their own."""
    with inprocess.cluster(3) as made:
        yield made


@pytest.fixture
def four() -> Iterator[Cluster]:
    with inprocess.cluster(4) as cluster:
        yield cluster


def drain_first(store: Any) -> None:
    """Drain the owner of the first shard; nothing of the store stays there."""
    owner = store.placement[0]
    mine = [i for i, at in enumerate(store.placement) if at == owner]
    assert store.drain(owner) == mine
    assert owner not in store.placement


def test_acknowledged_pushes_count_once(machine):
    workers = list(machine.nthreads())
    with killing_owners.store_on(machine, workers[:2]) as store:
        found = killing_owners.disturb(store, [partial(drain_first, store)] * 8)
    assert found.wrong == []
    assert len(found.waits) == 8
    moves = [
        e for _, e in machine.get_events("daskps") if e["action"] == "shards-moved"
    ]
    assert [e["why"] for e in moves if e["uid"] == store.uid] == ["drained"] * 8


def specs() -> dict[str, Any]:
    return {
        "w": np.zeros(4_000),
        "h": np.zeros(300, np.float16),
        "b": 0.0,
        "t": TableSpec(300, 4),
        "any": TableSpec(None, 2, max_rows=64, admit_after=2, ttl=90),
    }


def pushed(store: Any, k: int) -> None:
    store.push(
        {
            "w": np.full(4_000, np.sin(k)),
            "h": np.full(300, np.cos(k), np.float16),
            "b": 0.5,
            "t": RowGrad([k % 300, 7 * k % 300], np.ones((2, 4))),
            "any": RowGrad([k * 3 % 101, -k // 3], np.full((2, 2), 0.3)),
        }
    )


def all_of(store: Any) -> dict[str, Any]:
    ids = np.sort(store["any"].ids())
    return {
        **store.pull(),
        "t": store["t"].pull(np.arange(300)),
        "ids": ids,
        "any": store["any"].pull(ids),
        "version": store.version,
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_everything_comes_along_to_the_last_bit(machine):
    """Weights, optimizer state, rows with theirs, counts of candidates, and the numbers
    of pushes."""
    with (
        daskps.create(specs(), optimizer=optim.Adam(0.01), client=machine) as store,
        daskps.create(specs(), optimizer=optim.Adam(0.01), client=machine) as other,
    ):
        for k in range(60):
            if k % 15 == 14:
                drain_first(store)
            pushed(store, k)
            pushed(other, k)
        same(all_of(store), all_of(other))
        assert store.versions == other.versions
        stats = [row["tables"] for row in store.stats()["shards"]]
        assert stats == [row["tables"] for row in other.stats()["shards"]]


def loop(trainer: Any, turns: list[Any]) -> float:
    rng = np.random.default_rng(trainer.rank)
    for k in range(200):
        params = trainer.pull()
        grads = {"w": params["w"] * 0.01 + rng.standard_normal(4_000), "b": 1.0 * k}
        trainer.push(grads, weight=1.0 + trainer.rank)
    return float(trainer.pull()["w"].sum())


def trained(client: Any, sync: str, disturb: Callable[[Any], None]) -> Any:
    params = {"w": np.zeros(4_000), "b": 0.0}
    with daskps.create(params, optimizer=optim.Adam(0.01), client=client) as store:
        results: list[Any] = []
        run = partial(daskps.run, store, loop, [0, 1], sync=sync)
        thread = threading.Thread(target=lambda: results.append(run()))
        thread.start()
        try:
            disturb(store)
        finally:
            thread.join()
        return store.pull(), store.version, results


def has_reached(store: Any, version: int) -> bool:
    return bool(store.version >= version)


def drained_on_the_way(store: Any, n: list[int]) -> None:
    for version in (20, 70, 120):
        until(partial(has_reached, store, version))
        before = store.version
        drain_first(store)
        n.append(before)


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_runs_go_on(machine, sync):
    """Under BSP to the bits of a run that nothing has disturbed."""
    starts = list[int]()
    weights, version, results = trained(
        machine, sync, partial(drained_on_the_way, n=starts)
    )
    assert len(results[0]) == 2
    steps = 200 * (1 if sync == "bsp" else 2)
    assert version == steps
    assert max(starts) < steps
    if sync == "bsp":
        plain, _, others = trained(machine, sync, lambda _: None)
        same(weights, plain)
        assert results == others


def slope(params: Any, x: Any, y: Any) -> Any:
    left = x @ params["w"] - y
    return float(left @ left), {"w": x.T @ left / len(x)}


def test_rounds_of_the_task_graph_go_on(machine):
    x = np.random.default_rng(0).standard_normal((512, 30))
    about: Any = {"epochs": 2, "batch_size": 32, "trainers": 2, "execution": "graph"}
    found = list[Any]()
    for n_drains in (0, 4):
        params = {"w": np.zeros(30)}
        with daskps.create(params, optimizer=optim.Adam(0.1), client=machine) as store:
            train = partial(daskps.train, store, slope, x, x.sum(1), **about)
            thread = threading.Thread(target=train)
            thread.start()
            until(partial(has_reached, store, 1))
            for _ in range(n_drains):
                drain_first(store)
            thread.join()
            found.append({**store.pull(), "version": store.version})
    same(*found)
    assert found[0]["version"] == 16


def test_saves_go_on_and_what_was_saved_is_whole(machine, tmp_path):
    with daskps.create(specs(), optimizer=optim.Adam(0.01), client=machine) as store:
        for k in range(6):
            pushed(store, k)
            saving = store.save(tmp_path / str(k), wait=False)
            drain_first(store)
            saving.result(60)
            with daskps.restore(tmp_path / str(k), client=machine) as again:
                same(all_of(again), all_of(store))


# -- bad input, and what fails on the way ----------------------------------------------


def test_what_is_no_worker_is_refused(three):
    with daskps.create({"w": np.zeros(6)}) as store:
        before = store.placement
        for worker, kind in (("tcp://1.2.3.4:5", ValueError), (3, TypeError)):
            with pytest.raises(kind, match="worker"):
                store.drain(worker)  # type: ignore[arg-type]
        assert store.placement == before


def test_a_question_is_about_shards_where_they_were_when_it_was_planned(three):
    """Another call hears that one has moved before this one is sent."""
    first, second, third = three.scheduler.workers
    params = {"w": np.zeros(6)}
    with daskps.create(params, shards=3, servers=[first, second]) as store:
        shards = seams.shards_of(store)
        meta, before = shards.meta, shards.meta.where

        def hear() -> None:
            meta.where = replace(before, owners=(first, third, second))

        def plan() -> dict[str, Any]:
            asyncio.get_running_loop().call_soon(hear)
            return {worker: {} for worker in (first, second)}

        asked = shards.control_each("versions", plan)
        loop = three.loop.asyncio_loop
        answers = asyncio.run_coroutine_threadsafe(asked, loop).result()
        assert meta.where is not before
        meta.where = before
        assert sorted(row for rows in answers for row in rows) == [
            (shard, 0) for shard in range(3)
        ]


def test_the_only_worker_keeps_its_shards():
    with inprocess.cluster(1), daskps.create({"w": np.zeros(6)}) as store:
        with pytest.raises(daskps.NotEnoughWorkersError, match=r"only .* 1 shard of"):
            store.drain(store.placement[0])
        assert store.version == 0


def test_a_worker_without_shards_is_drained_at_once(three):
    servers = list(three.scheduler.workers)
    with daskps.create({"w": np.zeros(6)}, servers=servers[:1]) as store:
        assert store.drain(servers[2]) == []
        assert store.placement == (servers[0],)


def test_no_room_is_said_before_anything_moves(three):
    with daskps.create({"w": np.zeros(60_000)}) as store:
        for about in three.scheduler.workers.values():
            about.memory_limit = 1_000_000
        before = store.placement
        with pytest.raises(
            daskps.LayoutError, match="no other worker can have shard 0"
        ):
            store.drain(before[0])
        assert store.placement == before
        assert three.directory.stores[store.uid].drained == set()
        store.add({"w": np.ones(60_000)})


def test_a_worker_of_another_protocol_is_refused_by_name(three):
    """It has joined since the store was made."""
    first, second, third = three.scheduler.workers
    answer(three, third, "hello", {"protocol": 99, "version": "9.9"})
    with daskps.create({"w": np.zeros(6)}, servers=[first, second], shards=2) as store:
        three.scheduler.workers[second].memory_limit = 1000
        with pytest.raises(daskps.ProtocolError, match=f"{third}.* 99 .*9.9"):
            store.drain(first)
        assert store.placement == (first, second)
        store.add({"w": np.ones(6)})


def test_shards_go_past_workers_of_another_protocol(four):
    """They have joined since, and have less than the one that can have a shard."""
    first, second, third, fourth = four.scheduler.workers
    for other in (second, third):
        answer(four, other, "hello", {"protocol": 99, "version": "9.9"})
    with (
        daskps.create({"w": np.zeros(60)}, servers=[fourth]),
        daskps.create({"w": np.zeros(6)}, shards=2, servers=[first]) as store,
    ):
        assert store.drain(first) == [0, 1]
        assert store.placement == (fourth, fourth)
        store.add({"w": np.ones(6)})
        fills = [Held(four, other, "move_fill") for other in (second, third)]
        four.scheduler.workers[first].memory_limit = 1000
        with pytest.raises(daskps.ProtocolError, match=f"{second}.* 99 .*9.9"):
            store.drain(fourth)
        assert store.placement == (fourth, fourth)
        assert not any(held.reached.is_set() for held in fills)


def test_shards_on_a_device_are_refused(three):
    with daskps.create({"w": np.zeros(6)}, shards=1) as store:
        (entry,) = three.directory.stores.values()
        entry.device = "fake"
        with pytest.raises(daskps.LayoutError, match="on device 'fake'"):
            store.drain(store.placement[0])
        entry.device = ""
        assert entry.drained == set()
        store.add({"w": np.ones(6)})


def test_shards_go_to_servers_first_and_last_to_what_was_drained(four):
    """Whatever others have: a trainer has nothing of any store."""
    first, second, third, fourth = four.scheduler.workers
    for worker in (first, second):
        four.scheduler.workers[worker].resources = {"PS": 1}
    with daskps.create({"w": np.zeros(600)}, shards=2) as store:
        assert store.placement == (first, second)
        store.drain(first)
        assert store.placement == (second, second)
        store.drain(second)
        assert {*store.placement} == {third, fourth}
        store.drain(third)
        assert store.placement == (fourth, fourth)


def drain_beside(store: Any) -> tuple[threading.Thread, list[Any]]:
    """Drain the first owner in a thread; return what came of it."""
    found: list[Any] = []

    def drain() -> None:
        try:
            found.append(store.drain(owner))
        except daskps.DaskPSError as error:
            found.append(error)

    owner = store.placement[0]
    thread = threading.Thread(target=drain)
    thread.start()
    return thread, found


def test_twice_at_once_is_refused(three):
    with daskps.create({"w": np.zeros(6)}) as store:
        owner = store.placement[0]
        held = Held(three, owner, "move_begin")
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        with pytest.raises(daskps.ShardBusyError, match="is being drained"):
            store.drain(owner)
        held.go_on()
        thread.join()
        assert found == [[0]]


def test_a_target_that_fails_is_followed_by_another(three):
    with daskps.create({"w": np.zeros(6)}) as store:
        _, target, other = store.placement
        held = Held(three, target, "move_fill")
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        store.add({"w": np.ones(6)})
        three.end(target)
        held.go_on(OSError("nobody is there"))
        thread.join()
        assert found == [[0]]
        assert store["w"].region(0, 2).pull().tolist() == [1.0, 1.0]
        assert three.directory.stores[store.uid].owners[0] == other


def test_a_target_lets_go_of_its_part_though_the_owner_answers_nobody(three):
    """That one may have died, and who is asked in vain may be asked for long."""
    with daskps.create({"w": np.zeros(6)}) as store:
        owner = store.placement[0]
        back, read = Held(three, owner, "move_back"), Held(three, owner, "move_read")
        thread, found = drain_beside(store)
        assert read.reached.wait(60)
        read.go_on(OSError("nobody is there"))
        assert back.reached.wait(60)
        until(lambda: not any(host.coming for host in three.hosts))
        assert found == []
        back.go_on()
        thread.join()


def test_no_owner_hears_of_copies_where_there_are_none(three):
    """It would look for them at each answer from then on."""
    with daskps.create({"w": np.zeros(6)}) as store:
        told = [Held(three, worker, "copy_on") for worker in store.placement]
        assert store.drain(store.placement[0]) == [0]
        assert [held.n for held in told] == [0] * 3


@pytest.mark.parametrize("method", ["move_fill", "move_own"])
def test_an_owner_goes_on_where_nobody_takes_over(three, method):
    """Calls wait meanwhile, and the shard is where it was, under another number."""
    with daskps.create({"w": np.zeros(6)}) as store:
        owner, *others = store.placement
        every = [Held(three, other, method) for other in others]
        for held in every:
            held.go_on(OSError("nobody is there"))
        thread, found = drain_beside(store)
        thread.join()
        (error,) = found
        assert isinstance(error, daskps.ConsistencyError)
        assert "after 3 tries" in str(error)
        store.add({"w": np.ones(6)})
        assert store.pull()["w"].tolist() == [1.0] * 6
        entry = three.directory.stores[store.uid]
        assert entry.owners[0] == owner
        assert not entry.away
        assert [len(host.coming) + len(host.going) for host in three.hosts] == [0] * 3


@pytest.mark.parametrize("copies", [1, 2])
def test_a_worker_that_does_not_answer_is_passed_over(monkeypatch, copies):
    """One that is stopped, or without power: the drain would wait until it is removed."""
    monkeypatch.setattr(move, "_WATCH_SECONDS", 0.05)
    with inprocess.cluster(4) as four:
        first, *others = four.scheduler.workers
        about: dict[str, Any] = {"servers": [first], "copies": copies}
        with daskps.create({"w": np.zeros(6)}, **about) as store:
            entry = four.directory.stores[store.uid]
            free = [
                w for w in others if w not in {c.worker for c in entry.copies.values()}
            ]
            every = [Held(four, free[0], name) for name in ("move_fill", "look")]
            assert store.drain(first) == [0]
            assert store.placement[0] not in (first, free[0])
            assert every[0].reached.is_set()
            for held in every:
                held.go_on()
            assert store.add({"w": np.ones(6)}) == 1


def test_which_memory_an_owner_has_stays_known_as_it_goes_on(three):
    """It said so as the store was made; its heartbeats may say nothing of it yet."""
    with daskps.create({"w": np.zeros(6)}) as store:
        memories = three.directory.stores[store.uid].memories
        before = dict(memories)
        for other in store.placement[1:]:
            Held(three, other, "move_own").go_on(OSError("nobody is there"))
        thread, found = drain_beside(store)
        thread.join()
        assert isinstance(found[0], daskps.ConsistencyError)
        assert memories == before
        assert all(before[worker] for worker in store.placement)


def test_an_owner_goes_on_where_the_answer_is_lost(three):
    """Another worker has the shard, and nobody hears of it: it is told to let go."""
    with daskps.create({"w": np.zeros(6)}) as store:
        owner, *others = store.placement
        for other in others:
            lost = OSError("the answer is lost")
            Held(three, other, "move_own").go_on(lost, does_it=True)
        store.add({"w": np.ones(6)})
        thread, found = drain_beside(store)
        thread.join()
        assert isinstance(found[0], daskps.ConsistencyError)
        store.add({"w": np.ones(6)})
        assert store.pull()["w"].tolist() == [2.0] * 6
        entry = three.directory.stores[store.uid]
        assert (entry.owners[0], entry.generations[0]) == (owner, 7)
        until(lambda: sum(len(host.shards) for host in three.hosts) == 3)


def test_an_owner_whose_shard_is_locked_goes_on_later(three):
    with daskps.create({"w": np.zeros(6)}) as store:
        owner, *others = store.placement
        for other in others:
            Held(three, other, "move_own").go_on(OSError("nobody is there"))
        back = Held(three, owner, "move_back")
        back.go_on(daskps.ShardBusyError("another process has it"))
        thread, found = drain_beside(store)
        assert back.reached.wait(60)
        back.error = None
        thread.join()
        assert isinstance(found[0], daskps.ConsistencyError)
        assert not three.directory.stores[store.uid].away
        store.add({"w": np.ones(6)})


def test_an_owner_that_dies_as_it_hands_over_is_told(three):
    with daskps.create({"w": np.zeros(6)}) as store:
        owner = store.placement[0]
        held = Held(three, owner, "move_last")
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        three.end(owner)
        held.go_on(OSError("nobody is there"))
        thread.join()
        assert isinstance(found[0], daskps.ShardLostError)
        with pytest.raises(daskps.ShardLostError):
            store.add({"w": np.ones(6)})


def numbers_at(host: Any, numbers: list[int]) -> None:
    numbers += [hosted.shard.generation for hosted in host.shards.values()]


@pytest.mark.parametrize("owner_lives", [True, False])
def test_the_next_owner_has_another_number_than_the_target(three, owner_lives):
    """It may serve the shard by then, and could not say so."""
    with daskps.create({"w": np.zeros(6)}, shards=1, servers="all") as store:
        (owner,) = store.placement
        entry, numbers = three.directory.stores[store.uid], list[int]()
        for other in {*three.scheduler.workers} - {owner}:
            host = next(h for h in three.hosts if h.worker.address == other)
            held = Held(three, other, "move_own")
            held.after = partial(numbers_at, host, numbers)
            held.go_on(OSError("the answer is lost"), does_it=True)
        back = Held(three, owner, "move_back")
        thread, _ = drain_beside(store)
        assert back.reached.wait(60)
        if not owner_lives:
            three.end(owner)
        back.go_on(None if owner_lives else OSError("nobody is there"))
        thread.join()
        # An adopter's is one more than the directory's.
        assert numbers
        assert max(numbers) < entry.generations[0] + (not owner_lives)


def test_a_store_that_is_deleted_on_its_way_leaves_nothing(three):
    store = daskps.create({"w": np.zeros(6)}, name="goes")
    held = Held(three, store.placement[0], "move_last")
    thread, found = drain_beside(store)
    assert held.reached.wait(60)
    store.delete()
    held.go_on()
    thread.join()
    assert isinstance(found[0], (daskps.StoreClosedError, daskps.StoreNotFoundError))
    for host in three.hosts:
        assert not host.shards
        assert not host.coming
        assert not host.going


def test_a_store_that_is_deleted_as_it_is_handed_over_leaves_nothing(three):
    """No worker is its owner by then, as far as the directory knows."""
    store = daskps.create({"w": np.zeros(6)}, name="goes")
    every = [Held(three, other, "move_own") for other in store.placement[1:]]
    thread, found = drain_beside(store)
    until(lambda: any(held.reached.is_set() for held in every))
    store.delete()
    for held in every:
        held.go_on(OSError("the answer is lost"), does_it=True)
    thread.join()
    assert isinstance(found[0], (daskps.StoreClosedError, daskps.StoreNotFoundError))
    until(lambda: not any(h.shards or h.coming or h.going for h in three.hosts))


def test_other_stores_of_an_owner_stay_where_it_is_gone_for_one(three):
    """A worker of the same address has come, which has nothing of the shard."""
    with daskps.create({"w": np.zeros(6)}) as store, daskps.create({"w": 0.0}) as other:
        owner = store.placement[0]
        held = Held(three, owner, "move_last")
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        (host,) = (h for h in three.hosts if h.worker.address == owner)
        host.shards.pop((store.uid, 0))
        host.going.clear()
        held.go_on(OSError("nobody is there"))
        thread.join()
        assert isinstance(found[0], daskps.DaskPSError)
        assert other.pull()["w"] == 0.0


def test_a_store_that_is_deleted_as_it_is_adopted_ends_the_drain(three):
    store = daskps.create({"w": np.zeros(6)})
    held = Held(three, store.placement[0], "let_go")
    with seams.drains_by_adoption(0):
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        store.close()
        held.go_on()
        thread.join()
    assert isinstance(found[0], daskps.StoreClosedError)


def test_a_shard_that_leaves_at_the_moment_is_waited_for(three):
    """It has not been away for long."""
    with daskps.create({"w": np.zeros(6)}) as store:
        entry = three.directory.stores[store.uid]

        async def leaves() -> None:
            entry.set_away([0], "moves")
            waits = asyncio.ensure_future(entry.wait_for_owners())
            await asyncio.sleep(0.01)
            entry.settle([0])
            entry.set_away([0], "moves again")
            asyncio.get_running_loop().call_later(0.01, entry.settle, [0])
            await waits

        asyncio.run_coroutine_threadsafe(leaves(), three.loop.asyncio_loop).result()


def test_a_store_that_is_deleted_as_it_has_come_leaves_nothing(three):
    """Nor are the shards of other stores on that worker taken for lost."""
    with daskps.create({"w": np.zeros(6)}) as other:
        store = daskps.create({"w": np.zeros(6)}, shards=1)
        owner = store.placement[0]
        every = [Held(three, at, "move_own") for at in other.placement if at != owner]
        thread, found = drain_beside(store)
        until(lambda: any(held.reached.is_set() for held in every))
        store.close()
        for held in every:
            held.go_on(OSError("the answer is lost"), does_it=True)
        thread.join()
        assert isinstance(found[0], daskps.StoreClosedError)
        other.add({"w": np.ones(6)})
        until(lambda: sum(len(host.shards) for host in three.hosts) == 3)


def test_shards_do_not_go_where_somebody_drains_too(three):
    with daskps.create({"w": np.zeros(6)}) as store:
        _, second, last = store.placement
        held = Held(three, second, "move_begin")
        found: list[Any] = []
        drain = threading.Thread(target=lambda: found.append(store.drain(second)))
        drain.start()
        assert held.reached.wait(60)
        drain_first(store)
        held.go_on()
        drain.join()
        assert found == [[1]]
        owners = three.directory.stores[store.uid].owners
        assert owners[0] == owners[2] == last != second != owners[1]


def test_a_shard_that_comes_back_late_was_not_drained(three):
    """Its owner was stopped, say, as it was to hand it over."""
    with daskps.create({"w": np.zeros(6)}) as store:
        owner, *others = store.placement
        for other in others:
            Held(three, other, "move_own").go_on(OSError("nobody is there"))
        late = Held(three, owner, "move_back")
        thread, found = drain_beside(store)
        assert late.reached.wait(60)
        # So long that all tries would be over.
        threading.Event().wait(1.0)
        assert found == []
        late.go_on()
        thread.join()
        assert isinstance(found[0], daskps.ConsistencyError)


def test_the_news_that_a_shard_is_back_may_be_lost(three):
    """Its owner is asked again, and keeps what it has of this store and others."""
    with daskps.create({"w": np.zeros(6)}) as store:
        owner, *others = store.placement
        for other in others:
            Held(three, other, "move_own").go_on(OSError("nobody is there"))
        once = Held(three, owner, "move_back", times=1)
        once.go_on(OSError("the answer is lost"), does_it=True)
        thread, found = drain_beside(store)
        thread.join()
        assert isinstance(found[0], daskps.ConsistencyError)
        store.add({"w": np.ones(6)})
        assert three.directory.stores[store.uid].owners[0] == owner


def test_a_shard_that_was_taken_back_is_not_let_go_of_later(three, monkeypatch):
    """Its owner had handed it over, and has yet to answer with the last state."""
    monkeypatch.setattr(drains, "_OWN_SECONDS", 1.0)
    with daskps.create({"w": np.zeros(6)}) as store:
        owner = store.placement[0]
        host = next(h for h in three.hosts if h.worker.address == owner)
        under, go_on, slow = host.under, asyncio.Event(), list[Any]()

        async def slowly(hosted: Any, work: Any) -> Any:
            found = await under(hosted, work)
            going = host.going.get((store.uid, 0))
            if going is not None and going.is_handed_over and not slow:
                slow.append(going)
                await go_on.wait()
            return found

        monkeypatch.setattr(host, "under", slowly)
        back = Held(three, owner, "move_back")
        back.after = go_on.set
        back.go_on(does_it=True)
        assert store.drain(owner) == [0]
        assert len(slow) == 1
        store.add({"w": np.ones(6)})
        assert store.pull()["w"].tolist() == [1.0] * 6


def test_a_target_that_dies_as_it_answers_is_followed_by_another(three):
    with daskps.create({"w": np.zeros(6)}, shards=1) as store:
        owner = store.placement[0]
        target = next(at for at in three.scheduler.workers if at != owner)
        control = three.doors[target].handlers["daskps_control"]

        async def dies(**message: Any) -> Any:
            found = await control(**message)
            if message["method"] == "move_own":
                del three.scheduler.workers[target]
                three.directory.worker_left(target, "died")
            return found

        three.doors[target].handlers["daskps_control"] = dies
        drain_first(store)
        store.add({"w": np.ones(6)})
        assert store.placement[0] not in (owner, target)


def test_what_was_given_up_is_told_to_shards_that_have_moved(three):
    """Else a save would wait for a push that never comes."""
    with daskps.create({"w": np.zeros(6)}, shards=1, servers="all") as store:
        store.add({"w": np.ones(6)})
        # No handle of this process hears of it.
        drain = three.directory.drains.on_drain(store.uid, store.placement[0])
        asyncio.run_coroutine_threadsafe(drain, three.loop.asyncio_loop).result()
        (producer,) = {of.id for of in three.link.producers.values()}
        seams.shards_of(store).acknowledge(producer, 7)
        (moved,) = (of.shard for host in three.hosts for of in host.shards.values())
        until(lambda: moved.in_flight.floor(producer) == 7, 20)


def test_what_was_given_up_is_told_however_long_a_shard_is_away(three, monkeypatch):
    deadlines = []

    def made(*about):
        deadlines.append(about)
        return Deadline(*about)

    monkeypatch.setattr(caller, "_CONTROL_SECONDS", 0.2)
    monkeypatch.setattr(caller, "Deadline", made)
    with daskps.create({"w": np.zeros(6)}, shards=1, servers="all") as store:
        store.add({"w": np.ones(6)})
        drain = three.directory.drains.on_drain(store.uid, store.placement[0])
        asyncio.run_coroutine_threadsafe(drain, three.loop.asyncio_loop).result()
        entry = three.directory.stores[store.uid]
        three.loop.add_callback(entry.set_away, [0], "its owner is stopped")
        (producer,) = {of.id for of in three.link.producers.values()}
        seams.shards_of(store).acknowledge(producer, 7)
        until(lambda: deadlines.count((0.2, "an acknowledgement")) == 3, 20)
        three.loop.add_callback(entry.settle, [0])
        (moved,) = (of.shard for host in three.hosts for of in host.shards.values())
        until(lambda: moved.in_flight.floor(producer) == 7, 20)


def test_a_run_that_begins_meanwhile_waits(three):
    """Else the shard would not know what the new owner needs of its rounds."""
    with daskps.create({"w": np.zeros(6)}, optimizer=optim.SGD(1.0)) as store:
        owner, *others = store.placement
        every = [Held(three, other, "move_own") for other in others]
        thread, found = drain_beside(store)
        until(lambda: any(held.reached.is_set() for held in every))
        results: list[Any] = []
        run = partial(daskps.run, store, five_steps, [0, 1])
        running = threading.Thread(target=lambda: results.append(run()))
        running.start()
        threading.Event().wait(0.3)
        for held in every:
            held.go_on()
        running.join()
        thread.join()
        assert found == [[0]]
        assert results == [[[-5.0] * 6] * 2]
        assert three.directory.stores[store.uid].owners[0] != owner


def five_steps(trainer: Any, part: int) -> Any:
    for _ in range(5):
        trainer.push({"w": np.ones(6)})
    return trainer.pull()["w"].tolist()


def test_more_rows_may_change_meanwhile_than_a_log_takes(three, monkeypatch):
    """The move would begin again, and never end under such pushes."""
    for limits in (areas, states):
        monkeypatch.setattr(limits, "MOST_PUSHED_ROWS", 4)
    with daskps.create({"t": TableSpec(40, 1)}, shards=1) as store:
        [owner] = store.placement
        begins, held = (
            Held(three, owner, "move_begin"),
            Held(three, owner, "move_state"),
        )
        begins.go_on()
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        for first in (0, 4, 8):
            store["t"].add(np.arange(first, first + 4), np.ones((4, 1)))
        held.go_on()
        thread.join()
        assert (found, begins.n) == ([[0]], 1)
        assert store["t"].pull(np.arange(40)).sum() == 12.0


def answer(cluster: Cluster, worker: str, method: str, value: Any) -> None:
    """Have a host answer messages of a name with something else."""
    handlers = cluster.doors[worker].handlers
    control = handlers["daskps_control"]

    async def handle(**message: Any) -> Any:
        if message["method"] == method:
            return {"status": "OK", "value": value}
        return await control(**message)

    handlers["daskps_control"] = handle


class Held:
    """Messages of a name to a host that wait, and fail, as a test says."""

    def __init__(
        self, cluster: Cluster, worker: str, method: str, times: float = math.inf
    ) -> None:
        self.reached, self._free = threading.Event(), asyncio.Event()
        self.n, self._left = 0, times
        self.error: Exception | None = None
        self.does_it = False
        self.after: Callable[[], object] = int
        self._loop, self._method = cluster.loop, method
        self._handlers = cluster.doors[worker].handlers
        self._control = self._handlers["daskps_control"]
        self._handlers["daskps_control"] = self._handle

    async def _handle(self, **message: Any) -> Any:
        if message["method"] == self._method and self._left > 0:
            self.n, self._left = self.n + 1, self._left - 1
            self.reached.set()
            await self._free.wait()
            found = await self._control(**message) if self.does_it else None
            self.after()
            if self.error is not None:
                raise self.error
            if found is not None:
                return found
        return await self._control(**message)

    def go_on(self, error: Exception | None = None, *, does_it: bool = False) -> None:
        """Let them go on; with an error they fail, before or after they are served."""
        self.error, self.does_it = error, does_it
        self._loop.add_callback(self._free.set)

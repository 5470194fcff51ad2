"""Workers that close, with shards that nobody of their machine can have."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.core import Status

import daskps
from daskps import optim
from daskps.cluster.directory import drains
from daskps.cluster.host import adoption
from tests import inprocess
from tests.cluster import killing_copies, killing_owners
from tests.cluster.test_drain import (
    Held,
    all_of,
    drain_beside,
    has_reached,
    pushed,
    same,
    specs,
)
from tests.support import PATIENCE, local_cluster, terminal_cluster, until


@pytest.fixture
def apart() -> Iterator[Any]:
    """Three workers as between machines: nobody can map what another one holds."""
    way = {"daskps.carriers.machine": False}
    with dask.config.set(way), local_cluster(n_workers=3, threads=2) as client:
        yield client


def moves_of(client: Any) -> list[tuple[str, Any]]:
    """Return what events say of shards without an owner, or with another one."""
    events = [event for _, event in client.get_events("daskps")]
    kinds = "shards-moved", "shards-lost", "shards-away"
    return [(e["action"], e.get("why")) for e in events if e["action"] in kinds]


def disturb_both(
    store: Any, copied: Any, act: Callable[[], None]
) -> tuple[list[str], list[str]]:
    """Push to two stores while this is done; return what is wrong with each."""
    is_over = threading.Event()

    def act_once() -> None:
        try:
            act()
        finally:
            is_over.set()

    def wait() -> None:
        is_over.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(killing_owners.disturb, copied, [wait])
        return killing_owners.disturb(store, [act_once]).wrong, beside.result().wrong


def retire_first(client: Any, store: Any) -> None:
    owner = store.placement[0]
    client.retire_workers([owner])
    assert owner not in client.nthreads()
    store.pull()
    assert owner not in store.placement


def test_a_retired_worker_sends_its_shards(apart):
    """Those that have a second copy need not be sent: it takes over."""
    workers = list(apart.nthreads())
    with (
        killing_owners.store_on(apart, workers[:2]) as store,
        killing_copies.store_on(apart) as copied,
    ):
        owner = store.placement[0]
        n = store.placement.count(owner)
        assert owner in copied.placement
        act = partial(retire_first, apart, store)
        assert disturb_both(store, copied, act) == ([], [])
        assert owner not in copied.placement
        until(partial(killing_copies.has_all, apart, copied))
    assert moves_of(apart) == [("shards-moved", "left")] * n


def is_gone(store: Any, worker: str) -> bool:
    store.pull()
    return worker not in store.placement


def has_so_many(client: Any, n: int) -> bool:
    return len(client.nthreads()) == n


def end_all_but_one(client: Any, workers: list[Any], copied: Any) -> None:
    """End the worker with a nanny, then one without."""
    for n, worker in ((2, workers[0]), (1, workers[1])):
        # Those that leave have both copies of no shard.
        until(partial(killing_copies.has_all, client, copied))
        worker.send_signal(signal.SIGTERM)
        until(partial(has_so_many, client, n))
        worker.wait(PATIENCE)


def test_workers_that_are_told_to_end_send_their_shards(tmp_path):
    env = {"DASK_DASKPS__CARRIERS__MACHINE": "False"}
    with (
        dask.config.set({"daskps.carriers.machine": False}),
        terminal_cluster(tmp_path / "scheduler.json", **env) as (client, workers),
    ):
        with (
            killing_owners.store_on(client, [*client.nthreads()]) as store,
            killing_copies.store_on(client) as copied,
        ):
            act = partial(end_all_but_one, client, workers, copied)
            assert disturb_both(store, copied, act) == ([], [])
            last = {*client.nthreads()}
            assert [{*store.placement}, {*copied.placement}] == [last, last]
        assert {*moves_of(client)} == {("shards-moved", "left")}


def test_everything_comes_along_to_the_last_bit(apart):
    rule = optim.Adam(0.01)
    with (
        daskps.create(specs(), optimizer=rule, client=apart) as store,
        daskps.create(specs(), optimizer=rule, client=apart) as other,
    ):
        for k in range(40):
            if k in (13, 27):
                retire_first(apart, store)
            pushed(store, k)
            pushed(other, k)
        same(all_of(store), all_of(other))
        assert store.versions == other.versions


def test_rounds_go_on_to_the_bits_of_an_undisturbed_run(apart):
    """Its trainers start again elsewhere, at their clock."""
    x = np.random.default_rng(0).standard_normal((600, 30))
    about: Any = {"epochs": 20, "batch_size": 32, "trainers": 2}
    found = list[Any]()
    for leaves in (False, True):
        params = {"w": np.zeros(30)}
        with daskps.create(params, optimizer=optim.Adam(0.1), client=apart) as store:
            train = partial(daskps.train, store, slope, x, x.sum(1), **about)
            thread = threading.Thread(target=train)
            thread.start()
            until(partial(has_reached, store, 20))
            if leaves:
                retire_first(apart, store)
            thread.join()
            found.append({**store.pull(), "version": store.version})
    same(*found)


def slope(params: Any, x: Any, y: Any) -> Any:
    left = x @ params["w"] - y
    return float(left @ left), {"w": x.T @ left / len(x)}


def are_on_all(client: Any, store: Any) -> bool:
    """Tell whether all workers have shards of a store, and nobody else has any."""
    store.pull()
    return {*store.placement} == {*client.nthreads()}


def test_an_adaptive_cluster_closes_a_worker_with_shards():
    options: Any = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    with (
        dask.config.set({"daskps.carriers.machine": False}),
        LocalCluster(n_workers=3, threads_per_worker=1, **options) as cluster,
        Client(cluster) as client,
    ):
        both = [
            daskps.create({"w": np.zeros(3)}, client=client, copies=n) for n in (1, 2)
        ]
        assert [len({*store.placement}) for store in both] == [3, 3]
        cluster.adapt(minimum=0, maximum=3, interval="50 ms", wait_count=1)
        n = 1
        while len(client.nthreads()) > 2:
            n += 1
            for store in both:
                store.add({"w": np.ones(3)})
        for store in both:
            store.add({"w": np.ones(3)})
            assert store.pull()["w"].tolist() == [float(n)] * 3
        # The scheduler has removed the third one, which may still send a shard.
        until(lambda: all(are_on_all(client, store) for store in both))


# -- what fails on the way -----------------------------------------------------


@pytest.fixture
def three() -> Iterator[Any]:
    with inprocess.cluster(3) as made:
        yield made


def close(cluster: Any, worker: str) -> Future[None]:
    """Have a worker close as Dask has it close."""
    cluster.scheduler.workers[worker].status = Status.closing
    host = next(host for host in cluster.hosts if host.worker.address == worker)
    return asyncio.run_coroutine_threadsafe(
        adoption.leave(host, "was closed"), cluster.loop.asyncio_loop
    )


def two_shards(cluster: Any) -> tuple[Any, str, list[str]]:
    """Make a store of two shards on a worker; return it, and the others."""
    [first, *others] = cluster.scheduler.workers
    params = {"w": np.zeros(6)}
    store = daskps.create(params, shards=2, servers=[first])
    return store, first, others


def test_a_worker_that_stays_is_asked_again(three):
    store, first, others = two_shards(three)
    for other in others:
        held = Held(three, other, "move_fill", times=1)
        held.go_on(OSError("nobody is there"))
    close(three, first).result(60)
    store.add({"w": np.ones(6)})
    assert first not in store.placement
    assert store.pull()["w"].tolist() == [1.0] * 6


def test_a_worker_sends_its_smallest_shards_first(three):
    """Whatever there is no time for is less then."""
    first, *_ = three.scheduler.workers
    stores = {
        n: daskps.create({"w": np.zeros(n)}, shards=1, servers=[first])
        for n in (20_000, 60_000, 100, 40_000)
    }
    close(three, first).result(60)
    events = [event for _, event in three.scheduler.events]
    moved = [e["uid"] for e in events if e["action"] == "shards-moved"]
    assert moved == [stores[n].uid for n in sorted(stores)]
    for n, store in stores.items():
        store.add({"w": np.ones(n)})
        assert first not in store.placement
        assert store.pull()["w"].sum() == n


def test_shards_go_past_a_worker_that_cannot_load_a_rule(three):
    store, first, (target, other) = two_shards(three)
    held = Held(three, target, "move_fill")
    held.go_on(ValueError("bad marshal data"))
    close(three, first).result(60)
    store.add({"w": np.ones(6)})
    assert {*store.placement} == {other}


def retire(cluster: Any, worker: str) -> Future[None]:
    """Have Dask remove a worker that it retires, and wait for it."""

    async def remove() -> None:
        del cluster.scheduler.workers[worker]
        await cluster.directory.worker_left(worker, "retired", is_retired=True)

    return asyncio.run_coroutine_threadsafe(remove(), cluster.loop.asyncio_loop)


@pytest.mark.parametrize("is_retired", [False, True])
def test_what_nobody_has_taken_over_is_sent_again(three, is_retired):
    """It has stopped at its owner by then, which has it back meanwhile."""
    store, first, others = two_shards(three)
    for other in others:
        held = Held(three, other, "move_own", times=1)
        held.go_on(OSError("the answer is lost"), does_it=True)
    if is_retired:
        retire(three, first).result(60)
    else:
        close(three, first).result(60)
    store.add({"w": np.ones(6)})
    assert first not in store.placement
    assert store.pull()["w"].tolist() == [1.0] * 6


@pytest.mark.parametrize("method", ["move_fill", "move_own"])
def test_a_worker_that_is_stopped_keeps_nobody_waiting(three, method, monkeypatch):
    monkeypatch.setattr(drains, "_CLOSE_SECONDS", 0.2)
    store, first, others = two_shards(three)
    silent = [Held(three, at, name) for at in others for name in (method, "move_drop")]
    close(three, first).result(20)
    with pytest.raises(daskps.ShardLostError):
        store.pull()
    for one in silent:
        one.go_on()


def test_shards_go_past_a_worker_that_is_stopped(three):
    store, first, (stopped, other) = two_shards(three)
    silent = [Held(three, stopped, of) for of in ("hello", "move_fill", "move_drop")]
    close(three, first).result(20)
    store.add({"w": np.ones(6)})
    assert {*store.placement} == {other}
    for one in silent:
        one.go_on()


def test_all_that_shards_will_be_sent_to_are_made_ready_at_once(three):
    """Also those whose turn is later; nobody waits for it."""
    store, first, others = two_shards(three)
    loading = [Held(three, other, "warm") for other in others]
    filled = [Held(three, other, "move_fill") for other in others]
    closing = close(three, first)
    until(lambda: all(one.reached.is_set() for one in loading))
    for one in filled:
        one.go_on(does_it=True)
    closing.result(60)
    store.pull()
    for one in loading:
        one.go_on()
    assert {*store.placement} == {*others}


def test_what_is_not_through_in_time_is_lost_by_name(three, monkeypatch):
    monkeypatch.setattr(drains, "_CLOSE_SECONDS", 0.2)
    store, first, others = two_shards(three)
    held = [Held(three, other, "move_own") for other in others]
    close(three, first).result(60)
    with pytest.raises(daskps.ShardLostError, match=f"{first} was closed"):
        store.pull()
    for one in held:
        one.go_on()


def test_a_drain_goes_on_where_its_worker_closes(three):
    store, first, others = two_shards(three)
    held = [Held(three, other, "move_fill") for other in others]
    thread, found = drain_beside(store)
    until(lambda: any(one.reached.is_set() for one in held))
    closing = close(three, first)
    for one in held:
        one.go_on(does_it=True)
    thread.join()
    closing.result(60)
    assert found == [[0, 1]]
    store.add({"w": np.ones(6)})
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert first not in store.placement


def test_nobody_is_asked_where_all_close(three):
    store, first, others = two_shards(three)
    for other in others:
        three.scheduler.workers[other].status = Status.closing
    close(three, first).result(60)
    with pytest.raises(daskps.ShardLostError):
        store.pull()


def test_a_shard_that_was_sent_may_be_lost_where_it_is(three):
    """While the one that has sent it sends others, which are not lost with it."""
    store, first, (target, other) = two_shards(three)
    held = Held(three, other, "move_fill")
    closing = close(three, first)
    until(held.reached.is_set)
    three.scheduler.workers[other].status = Status.closing
    three.end(target)
    held.go_on()
    closing.result(60)
    with pytest.raises(daskps.ShardLostError, match=f"0 .*{target} died"):
        store.pull(timeout=10)
    assert three.directory.stores[store.uid].lost.keys() == {0}


def test_what_a_drain_cannot_hand_over_is_sent_again(three):
    """Nobody owns the shard at the moment at which its worker closes."""
    store, first, others = two_shards(three)
    held = [Held(three, other, "move_own", times=1) for other in others]
    thread, found = drain_beside(store)
    until(lambda: any(one.reached.is_set() for one in held))
    closing = close(three, first)
    until(lambda: three.directory.stores[store.uid].sent_on)
    for one in held:
        one.go_on(OSError("the answer is lost"), does_it=True)
    thread.join()
    closing.result(60)
    assert found
    store.add({"w": np.ones(6)})
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert first not in store.placement

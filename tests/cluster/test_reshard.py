"""Stores that get other shards, under pushes and reads, and what fails on the way."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from asyncio import Event
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest
from click.testing import CliRunner

import daskps
from daskps import TableSpec, cli, optim
from daskps.checkpoint import listing
from daskps.cluster.directory.entry import Hosts
from daskps.shards.memory.format import GENERATION
from tests import inprocess, seams
from tests.cluster import killing_owners
from tests.cluster.test_drain import Held, all_of, pushed, same, specs
from tests.cluster.test_leaving import close
from tests.inprocess import Cluster
from tests.support import local_cluster, until


@pytest.fixture
def three() -> Iterator[Cluster]:
    """Three workers of one process, with memory of their own."""
    with inprocess.cluster(3) as made:
        yield made


@pytest.fixture(scope="module", params=[True, False], ids=["machine", "message"])
def real(request: pytest.FixtureRequest) -> Iterator[Any]:
    way = {"daskps.carriers.machine": request.param}
    with dask.config.set(way), local_cluster(n_workers=3, threads=2) as client:
        yield client


@pytest.fixture
def apart() -> Iterator[Cluster]:
    """The same, whose client reaches hosts by messages, which a test can hold."""
    way = {"daskps.carriers.process": False}
    with dask.config.set(way), inprocess.cluster(3) as made:
        yield made


def entry_of(cluster: Cluster, store: Any) -> Any:
    return cluster.directory.stores.current(store.uid)


# -- the state -------------------------------------------------------------------------


def saved(store: Any, folder: Any) -> tuple[Any, ...]:
    """Return what a checkpoint has of a store: each number in it, and digests of bits."""
    manifest = listing.find(store.save(folder).url, {}).manifest
    arrays = sorted(file for file in manifest.files if "/c/" in file.path)
    of = manifest.version, manifest.epochs, manifest.parameters, manifest.tables
    return (*of, *arrays)


@pytest.mark.parametrize(
    "rule", [optim.Adam(0.01), optim.SGD(0.1)], ids=["adam", "sgd"]
)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (3, 5)])
def test_the_state_is_that_of_an_undisturbed_store(
    three, tmp_path, before, after, rule
):
    """Weights, slots, rows, candidates, steps and clocks; and so it goes on."""
    make = partial(daskps.create, specs(), optimizer=rule, shards=before)
    with make() as store, make() as other:
        uid = store.uid
        for k in range(80):
            if k == 40:
                store.reshard(after)
                assert len(store.placement) == store.layout.n_shards == after
                assert saved(store, tmp_path / "a") == saved(other, tmp_path / "b")
            pushed(store, k)
            pushed(other, k)
        assert saved(store, tmp_path / "c") == saved(other, tmp_path / "d")
        assert store.uid == uid
        assert store.versions == (80,) * after
        with daskps.restore(tmp_path / "c", shards=2) as again:
            same(all_of(again), all_of(store))


def test_tables_of_many_rows_and_small_parameters(three):
    """Chunks of ids that end within shards, and packed ones of many parameters."""
    params = {f"p{i}": np.full(i % 7, float(i)) for i in range(200)}
    tables = {"any": TableSpec(None, 3), "t": TableSpec(5_000, 2, init=0.5)}
    with daskps.create({**params, **tables}, optimizer=optim.Adam(), shards=3) as store:
        ids = np.arange(70_000) * 7919 - 10**6
        for part in np.split(ids, 10):
            store["any"].push(part, np.ones((len(part), 3)))
        before = store.pull(), store["any"].pull(ids), np.sort(store["any"].ids())
        for n in (7, 2):
            store.reshard(n)
            after = store.pull(), store["any"].pull(ids), np.sort(store["any"].ids())
            for one, other in zip(before, after, strict=True):
                np.testing.assert_equal(one, other)


def test_learning_rates_and_epochs_come_along(three):
    X, y = np.ones((8, 1)), np.ones(8)
    params = {"w": np.zeros(6)}

    def gradient(params: Any, X: Any, y: Any) -> Any:
        return {"w": np.full(6, X.sum())}

    make = partial(daskps.create, params, optimizer=optim.SGD(0.1), shards=2)
    with make() as store, make() as other:
        for one in (store, other):
            one.scale_lr(0.5)
            daskps.train(one, gradient, X, y, epochs=1, batch_size=4, trainers=2)
        store.reshard(3)
        for one in (store, other):
            daskps.train(one, gradient, X, y, epochs=2, batch_size=4, trainers=2)
        assert store["w"].pull().tolist() == other["w"].pull().tolist()


# -- under pushes ----------------------------------------------------------------------


def test_acknowledged_pushes_count_once(real):
    """A near and a remote caller push and read meanwhile."""
    with killing_owners.store_on(real, list(real.nthreads())[:2]) as store:
        acts = [partial(store.reshard, n) for n in (1, 4, 2, 4, 1, 4)]
        found = killing_owners.disturb(store, acts)
    assert found.wrong == []
    assert len(found.waits) == 6
    told = [e for _, e in real.get_events("daskps") if e["action"] == "store-resharded"]
    assert [e["uid"] for e in told] == [store.uid] * 6


def test_pushes_wait_and_reads_do_not(apart):
    with daskps.create({"w": np.zeros(6)}, shards=2) as store:
        held = Held(apart, store.placement[0], "install")
        moving = threading.Thread(target=store.reshard, args=(3,))
        moving.start()
        assert held.reached.wait(60)
        pushing = threading.Thread(target=store.add, args=({"w": np.ones(6)},))
        pushing.start()
        assert store["w"].pull().tolist() == [0.0] * 6
        assert pushing.is_alive()
        held.go_on()
        moving.join()
        pushing.join()
        assert store["w"].pull().tolist() == [1.0] * 6
        assert store.versions == (1, 1, 1)


@pytest.mark.parametrize("on_loop", [False, True])
def test_a_push_whose_answer_is_lost_counts_once(apart, on_loop):
    """It comes again, to the shards that the store has by then."""
    rule = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(6)}, shards=2, optimizer=rule) as store:
        other = pickle.loads(pickle.dumps(store))
        ones = {"w": np.ones(6)}
        store.push(ones)
        served, lost = threading.Event(), asyncio.Event()
        handlers = apart.doors[store.placement[0]].handlers
        call = handlers["daskps_call"]

        async def lose(**message: Any) -> Any:
            await call(**message)
            served.set()
            await lost.wait()
            raise OSError("the answer is lost")

        handlers["daskps_call"] = lose
        begun = (lambda: store.push_async(ones).result()) if on_loop else None
        pushing = threading.Thread(target=begun or partial(store.push, ones))
        pushing.start()
        assert served.wait(60)
        handlers["daskps_call"] = call
        other.reshard(5)
        apart.loop.add_callback(lost.set)
        pushing.join()
        assert store["w"].pull().tolist() == [-2.0] * 6
        assert store.versions == (2,) * 5


@pytest.mark.parametrize("name", ["apply", "scale_lr"])
def test_what_owners_do_counts_once_though_its_answer_is_lost(apart, name):
    rule = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(6)}, optimizer=rule, shards=2) as store:
        owner = store.placement[1]
        handlers = apart.doors[owner].handlers
        control, done, free = handlers["daskps_control"], threading.Event(), Event()

        async def late(**message: Any) -> Any:
            found = await control(**message)
            if message["method"] == name:
                done.set()
                await free.wait()
            return found

        handlers["daskps_control"] = late
        act: Any = store.scale_lr if name == "scale_lr" else store.apply
        of: Any = 0.5 if name == "scale_lr" else lambda block, _: block + 1
        with futures.ThreadPoolExecutor(1) as pool:
            acting = pool.submit(act, of)
            assert done.wait(60)
            handlers["daskps_control"] = control
            until(lambda: store.versions == (1, 1))
            store.reshard(3)
            assert acting.result() == 1
        apart.loop.add_callback(free.set)
        store.push({"w": np.ones(6)})
        found = -0.5 if name == "scale_lr" else 0.0
        assert store.pull()["w"].tolist() == [found] * 6
        assert store.versions == (2, 2, 2)


def test_reads_wait_for_the_new_layout(apart):
    """From the moment on at which the first old shard has stopped."""
    with daskps.create({"w": np.zeros(6)}, shards=3) as store:
        held = Held(apart, store.placement[1], "relay_end")
        moving = threading.Thread(target=store.reshard, args=(4,))
        moving.start()
        assert held.reached.wait(60)
        hosts = {host.worker.address: host for host in apart.hosts}
        until(lambda: (store.uid, 0) not in hosts[store.placement[0]].shards)
        found: list[Any] = []
        # A handle that hears of nothing: its shard 0 has stopped.
        reading = threading.Thread(
            target=lambda: found.append(store["w"][0:2].tolist())
        )
        reading.start()
        segments = [
            of.hosted.shard.segment for of in hosts[store.placement[0]].going.values()
        ]
        assert [segment.header[GENERATION] for segment in segments] == [2]
        assert reading.is_alive()
        held.go_on()
        moving.join()
        reading.join()
        assert found == [[0.0, 0.0]]


def test_a_run_that_begins_waits_for_the_new_layout(apart):
    rule = optim.SGD(1.0)
    with daskps.create({"w": np.zeros(6)}, optimizer=rule, shards=2) as store:
        held = Held(apart, store.placement[0], "install")
        moving = threading.Thread(target=store.reshard, args=(3,))
        moving.start()
        assert held.reached.wait(60)
        began, over = EVENTS[:] = threading.Event(), threading.Event()
        over.set()
        other = pickle.loads(pickle.dumps(store))
        other.pull()
        asked = Held(apart, store.placement[0], "begin_run")
        asked.go_on()
        opened, handlers = threading.Event(), apart.hub.handlers
        serve = handlers["daskps_directory"]

        async def hear(method: str, **message: Any) -> Any:
            if method == "open_run":
                opened.set()
            return await serve(method, **message)

        handlers["daskps_directory"] = hear
        run = threading.Thread(target=_run, args=(other, "bsp"))
        run.start()
        assert opened.wait(60)
        assert not began.is_set()
        assert not asked.reached.is_set()
        held.go_on()
        moving.join()
        run.join()
        assert other.versions == (1, 1, 1)
        assert store["w"].pull().tolist() == [-1.0] * 6


# -- handles ---------------------------------------------------------------------------


def test_handles_of_before_go_on(real):
    """Each is one that has not heard of it yet."""
    params = {
        "w": np.arange(12.0),
        "t": TableSpec(30, 2, init=1.0),
        "any": TableSpec(None, 1),
    }
    store = daskps.create(params, optimizer=optim.SGD(1.0), name="kept", client=real)
    store["any"].push([3, 5], np.ones((2, 1)))
    ones = {"w": np.ones(12)}
    out = {"w": np.empty(12)}

    def changed(handle: Any) -> None:
        found = handle["any"].pull_changed(since)
        assert not found.complete or not len(found.ids)
        assert handle["any"].pull_changed(found.since).complete

    calls: list[Callable[[Any], Any]] = [
        lambda h: h.pull(),
        lambda h: h.pull("w", out=out),
        lambda h: h.pull_async().result(60),
        lambda h: h.push(ones),
        lambda h: h.push_async(ones).result(60),
        lambda h: h.pushpull(ones),
        lambda h: h.add({"w": np.ones(12)}),
        lambda h: h["w"].region(2, 9).pull(),
        lambda h: h["w"][3:5],
        lambda h: h["t"].pull([1, 29]),
        lambda h: h["t"].push([1, 29], np.ones((2, 2))),
        lambda h: h["any"].push([3, 7], np.ones((2, 1))),
        lambda h: h["any"].contains([3, 7]),
        changed,
        lambda h: h.snapshot()["w"].compute(),
        lambda h: h.view(max_age=0)["w"],
        lambda h: h["w"].norm(),
        lambda h: h.stats(),
        lambda h: h.versions,
        lambda h: h.bound().pull(),
        lambda h: real.submit(lambda s: s.push(ones), h, pure=False).result(60),
    ]
    since = store["any"].pull_changed().since
    handles = [pickle.loads(pickle.dumps(store)) for _ in calls]
    for handle in handles:
        handle.pull("w", out=out)
        handle.pull(), handle["t"].pull([1]), handle["any"].pull([3])
    store.reshard(5)
    n = store.version
    for call, handle in zip(calls, handles, strict=True):
        call(handle)
        assert handle == store
        assert handle.uid == store.uid
        assert len(handle.versions) == len(handle.placement) == 5
    assert pickle.loads(pickle.dumps(handles[0])).version == store.version == n + 7
    with daskps.open("kept", client=real) as opened:
        assert opened == store
        assert opened.uid == store.uid
        assert len(opened.versions) == len(opened.stats()["shards"]) == 5
    [info] = [one for one in daskps.list_stores(client=real) if one.name == "kept"]
    assert (info.uid, info.shards) == (store.uid, 5)
    address = real.scheduler.address
    address = ["--scheduler", real.scheduler.address]
    shown = CliRunner().invoke(cli.ps, ["show", "kept", *address])
    assert shown.exit_code == 0, shown.output
    assert sum("tcp://" in line for line in shown.output.splitlines()) == 5
    store.delete()
    assert "kept" not in [one.name for one in daskps.list_stores(client=real)]


def test_two_copies_are_made_before_a_push_is_answered():
    way = {"daskps.carriers.machine": False}
    with (
        dask.config.set(way),
        local_cluster(n_workers=3, threads=1) as client,
        daskps.create({"w": np.zeros(8)}, shards=2, copies=2, client=client) as store,
    ):
        store.add({"w": np.ones(8)})
        store.reshard(4)

        def n_copies(dask_scheduler: Any) -> int:
            stores = dask_scheduler.extensions["daskps-directory"].stores
            return sum(of.counts for of in stores.current(store.uid).copies.values())

        assert client.run_on_scheduler(n_copies) == 4
        store.add({"w": np.ones(8)})
        victim = store.placement[0]
        [pid] = client.run(os.getpid, workers=[victim]).values()
        os.kill(pid, signal.SIGKILL)
        assert store["w"].pull().tolist() == [2.0] * 8


def test_a_store_that_was_resharded_is_restored(tmp_path):
    way = {"daskps.carriers.machine": False}
    with dask.config.set(way), local_cluster(n_workers=3, threads=1) as client:
        about: dict[str, Any] = {"recover_from": tmp_path, "client": client}
        with daskps.create({"w": np.zeros(8)}, shards=2, **about) as store:
            handle = pickle.loads(pickle.dumps(store))
            store.add({"w": np.ones(8)})
            handle.pull()
            store.reshard(4)
            store.save(tmp_path)
            [pid] = client.run(os.getpid, workers=[store.placement[0]]).values()
            os.kill(pid, signal.SIGKILL)
            for one in (store, handle):
                with pytest.raises(daskps.StoreRestoredError, match="at version 1"):
                    until(partial(one.pull, timeout=60))
                assert one["w"].pull().tolist() == [1.0] * 8
            # The number of shards that it was asked to have last.
            assert len(store.placement) == 4


def test_what_is_placed_stays_there(three):
    """By objects of tables and arrays that a user has kept, too."""
    first = next(iter(three.scheduler.workers))
    params = {
        "w": np.arange(8.0),
        "t": TableSpec(40, 2, init=1.0),
        "any": TableSpec(None, 1),
    }
    where = dict.fromkeys(("t", "any"), first)
    with daskps.create(
        params, shards=4, placement=where, optimizer=optim.SGD(1.0)
    ) as store:
        table, rows, ids = store["t"], store["any"], np.arange(40)
        for n in (4, 1, 5, 3):
            if n != 4:
                store.reshard(n)
            before = table.pull(ids), rows.pull(ids)
            table.push(ids, np.ones((40, 2)))
            rows.push(ids, np.ones((40, 1)))
            assert (table.pull(ids) == before[0] - 1).all()
            assert (rows.pull(ids) == before[1] - 1).all()
            assert rows.contains(ids).all()
            assert rows.ids().tolist() == ids.tolist()
            layout = store.layout
            for one in layout.tables:
                at = one.shards or range(layout.n_shards)
                assert {store.placement[shard] for shard in at} == {first}


# -- bad input -------------------------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "none": ({"shards": 0}, daskps.LayoutError, "at least 1"),
    "too many": ({"shards": 16_385}, daskps.LayoutError, "at most 16,384"),
    "a bool": ({"shards": True}, TypeError, "shards"),
    "a str": ({"shards": "2"}, TypeError, "shards"),
    "a float": ({"shards": 2.0}, TypeError, "shards"),
    "no servers": ({"servers": "many"}, ValueError, "servers='many'"),
    "none of them": ({"servers": []}, TypeError, "servers"),
    "a number": ({"servers": 3}, TypeError, "servers"),
    "unknown": (
        {"servers": ["tcp://1.2.3.4:5"]},
        daskps.NotEnoughWorkersError,
        "1.2.3.4",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_changes_nothing(three, name):
    given, kind, text = BAD[name]
    with daskps.create({"w": np.zeros(6)}, shards=2) as store:
        before = store.placement
        with pytest.raises(kind, match=text):
            store.reshard(**given)
        store.add({"w": np.ones(6)})
        assert store.placement == before
        assert list(three.directory.stores) == [store.uid]


def test_no_room_is_said_before_anything_is_built(apart):
    with daskps.create({"w": np.zeros(60_000)}, shards=2) as store:
        held = Held(apart, store.placement[0], "create")
        for about in apart.scheduler.workers.values():
            about.memory_limit = 1_000_000
        before = store.placement
        with pytest.raises(daskps.LayoutError, match="memory"):
            store.reshard(4)
        assert not held.reached.is_set()
        assert store.placement == before
        store.add({"w": np.ones(60_000)})


def test_no_room_for_copies_advises_what_a_reshard_can_do(apart):
    with daskps.create({"w": np.zeros(60_000)}, shards=2, copies=2) as store:
        for about in apart.scheduler.workers.values():
            about.memory_limit = 4_300_000
        with pytest.raises(daskps.LayoutError, match="copies need") as error:
            store.reshard(3)
        assert "copies=" not in str(error.value)


def test_shards_on_a_device_are_refused(three):
    with daskps.create({"w": np.zeros(6)}, shards=2) as store:
        entry_of(three, store).device = "fake"
        with pytest.raises(daskps.LayoutError, match="on device 'fake'"):
            store.reshard(3)
        entry_of(three, store).device = ""
        store.add({"w": np.ones(6)})


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_runs_refuse(three, sync):
    began, over = EVENTS[:] = threading.Event(), threading.Event()
    with daskps.create({"w": np.zeros(6)}, optimizer=optim.SGD(1.0), shards=2) as store:
        run = threading.Thread(target=_run, args=(store, sync))
        run.start()
        assert began.wait(60)
        with pytest.raises(daskps.ConsistencyError, match=r"is training store .* wait"):
            store.reshard(3)
        over.set()
        run.join()
        assert len(store.placement) == 2
        store.reshard(3)
        assert store.pull()["w"].tolist() == [-1.0] * 6


#: Set by a loop that has begun, and for it to end: it goes to its workers by name.
EVENTS: list[threading.Event] = []


def _run(store: Any, sync: str) -> None:
    daskps.run(store, _loop, [None], sync=sync)


def _loop(trainer: Any, _: Any) -> None:
    began, over = EVENTS
    began.set()
    assert over.wait(60)
    trainer.push({"w": np.ones(6)})


# -- what fails on the way -------------------------------------------------------------


def check_as_before(cluster: Cluster, store: Any, before: Any) -> None:
    """Nothing of the new layout is there, and nobody waits for it."""
    store.add({"w": np.ones(6)})
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert store.placement == before
    entry = entry_of(cluster, store)
    assert list(cluster.directory.stores) == [store.uid] == [entry.uid]
    assert entry.away == {}
    assert not entry.cutting.locked()
    until(lambda: {uid for h in cluster.hosts for uid, _ in h.shards} == {store.uid})
    store.reshard(4)
    assert store.pull()["w"].tolist() == [1.0] * 6


@pytest.mark.parametrize("does_it", [False, True])
@pytest.mark.parametrize(
    "method", ["create", "install", "relay_end", "write_checkpoint"]
)
def test_a_host_that_fails_leaves_the_old_layout(apart, method, does_it):
    with daskps.create({"w": np.zeros(6)}, shards=3) as store:
        before = store.placement
        held = Held(apart, before[1], method, times=1)
        held.go_on(OSError("nobody is there"), does_it=does_it)
        with pytest.raises(daskps.DaskPSError, match=r"nobody is there|lost|again"):
            store.reshard(5)
        assert held.reached.is_set()
        check_as_before(apart, store, before)


def test_a_new_owner_that_dies_before_it_counts_leaves_the_old_layout(three):
    """All of its shards were filled, and an old shard has yet to stop."""
    first, second, third = three.scheduler.workers
    with daskps.create({"w": np.zeros(6)}, shards=2, servers=[first, second]) as store:
        before = store.placement
        held = Held(three, second, "relay_end", times=1)
        found: list[Any] = []

        def reshard() -> None:
            with pytest.raises(daskps.ConsistencyError, match="goes on as") as error:
                store.reshard(3, servers=[third])
            found.append(error.value)

        thread = threading.Thread(target=reshard)
        thread.start()
        assert held.reached.wait(60)
        three.end(third)
        held.go_on()
        thread.join()
        assert f"worker {third} died" in str(found[0])
        # No shard of the store is: neither an alarm nor the text says so.
        assert "lost" not in str(found[0])
        told = [event["action"] for _, event in three.scheduler.events]
        assert "shards-lost" not in told
        check_as_before(three, store, before)


def test_a_shard_that_stops_just_now_is_taken_back(apart):
    """A thread has stopped it, and its host has yet to go on; another host has failed."""
    stopped, free = threading.Event(), asyncio.Event()
    with daskps.create({"w": np.zeros(6)}, shards=3) as store:
        before = store.placement
        host = next(h for h in apart.hosts if h.worker.address == before[0])
        under = host.under

        async def slow(hosted: Any, function: Callable[..., Any]) -> Any:
            found = await under(hosted, function)
            if hosted.is_released:
                stopped.set()
                await free.wait()
            return found

        host.under = slow
        fails = Held(apart, before[1], "relay_end", times=1)
        back = Held(apart, before[0], "move_back", times=1)
        back.after = free.set
        back.go_on(does_it=True)

        def fail() -> None:
            assert stopped.wait(60)
            fails.go_on(OSError("nobody is there"))

        thread = threading.Thread(target=fail)
        thread.start()
        with pytest.raises(daskps.DaskPSError, match="nobody is there"):
            store.reshard(5)
        thread.join()
        assert back.n == 1
        check_as_before(apart, store, before)


@pytest.mark.parametrize("method", ["write_checkpoint", "install", "relay_end"])
def test_a_client_that_goes_leaves_the_old_layout(apart, method):
    with daskps.create({"w": np.zeros(6)}, shards=3, name="n") as store:
        before = store.placement
        held = Held(apart, before[1], method, times=1)
        found: list[Any] = []

        def reshard() -> None:
            try:
                store.reshard(5)
            except daskps.DaskPSError as error:
                found.append(error)

        thread = threading.Thread(target=reshard)
        thread.start()
        assert held.reached.wait(60)
        left = partial(apart.directory.client_left, apart.client.id)
        apart.loop.add_callback(left)
        until(lambda: not entry_of(apart, store).cutting.locked())
        held.go_on()
        thread.join()
        assert isinstance(found[0], daskps.DaskPSError)
        check_as_before(apart, store, before)


def test_a_late_one_gives_up_in_time(apart):
    with daskps.create({"w": np.zeros(6)}, shards=3) as store:
        before = store.placement
        held = Held(apart, before[1], "install", times=1)
        with pytest.raises(TimeoutError):
            store.reshard(5, timeout=0.2)
        held.go_on()
        check_as_before(apart, store, before)


def test_a_shard_that_went_on_is_not_left_behind(three):
    """Something has released a shard, and a push changed it, before all have stopped."""
    with daskps.create({"w": np.zeros(6)}, shards=3) as store:
        before = store.placement
        held = Held(three, before[1], "relay_end", times=1)
        found: list[Any] = []

        def reshard() -> None:
            with pytest.raises(daskps.ConsistencyError) as error:
                store.reshard(5)
            found.append(error.value)

        thread = threading.Thread(target=reshard)
        thread.start()
        assert held.reached.wait(60)
        host = next(h for h in three.hosts if h.worker.address == before[1])
        hosted = host.shards[store.uid, 1]

        async def go_on() -> None:
            await host.under(hosted, lambda shard: shard.release_cut("by a test"))

        asyncio.run_coroutine_threadsafe(go_on(), three.loop.asyncio_loop).result()
        pushing = threading.Thread(target=store.add, args=({"w": np.ones(6)},))
        pushing.start()
        until(lambda: hosted.shard.segment.flip == 1)
        held.go_on()
        thread.join()
        pushing.join()
        assert "went on" in str(found[0])
        assert store.pull()["w"].tolist() == [1.0] * 6
        assert store.placement == before


def test_a_store_that_is_deleted_as_its_shards_stop_leaves_nothing(three):
    """The directory names no owner just then."""
    store = daskps.create({"w": np.zeros(6)}, shards=3, name="n")
    held = Held(three, store.placement[1], "relay_end", times=1)

    def reshard() -> None:
        with pytest.raises(daskps.DaskPSError):
            store.reshard(5)

    thread = threading.Thread(target=reshard)
    thread.start()
    assert held.reached.wait(60)
    daskps.delete("n")
    held.go_on()
    thread.join()
    until(lambda: not any(host.shards or host.going for host in three.hosts))


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("is_retired", [True, False])
def test_a_worker_that_closes_as_its_shards_stop_sends_them(three, is_retired, fails):
    """Those that the store has then: no other worker has the numbers in them."""
    first, second, _ = three.scheduler.workers
    with daskps.create({"w": np.zeros(6)}, shards=2, servers=[first, second]) as store:
        store.add({"w": np.ones(6)})
        held, found = Held(three, second, "relay_end", times=1), list[Any]()

        def reshard() -> None:
            try:
                store.reshard(3)
            except daskps.ConsistencyError as error:
                found.append(error)

        thread = threading.Thread(target=reshard)
        thread.start()
        [host] = [h for h in three.hosts if h.worker.address == first]
        until(lambda: (store.uid, 0) in host.going)
        closing = (retire_here if is_retired else close)(three, first)
        until(lambda: host.is_leaving)
        held.go_on(OSError("nobody is there") if fails else None)
        thread.join()
        closing.result(60)
        # Dask has removed a new owner: it is refused before anybody knows of it.
        assert len(found) == (fails or is_retired)
        assert store.pull(timeout=20)["w"].tolist() == [1.0] * 6
        assert first not in store.placement
        assert len(store.placement) == (2 if found else 3)


def test_a_copy_that_takes_over_as_a_reshard_fails_is_the_owner(three):
    """The last worker of a machine has removed the memory of a shard that has stopped."""
    first, second, third = three.scheduler.workers
    with daskps.create(
        {"w": np.zeros(6)}, shards=2, servers=[first, second], copies=2
    ) as store:
        store.add({"w": np.ones(6)})
        entry, directory = three.directory.stores[store.uid], three.directory
        other = entry.copies[0].worker
        held = Held(three, second, "relay_end", times=1)
        owns = Held(three, other, "move_own", times=1)
        found = list[Any]()

        def reshard() -> None:
            with pytest.raises(daskps.ConsistencyError) as raised:
                store.reshard(3)
            found.append(raised.value)

        thread = threading.Thread(target=reshard)
        thread.start()
        assert held.reached.wait(60)
        entry.segments = [(0, "memory", 1, 1)]
        three.loop.add_callback(directory.moves.on_removed, third, ["memory"], "")
        assert owns.reached.wait(60)
        entry.segments = []
        held.go_on(OSError("nobody is there"))
        thread.join()
        owns.go_on()
        until(lambda: not entry.away)
        assert entry.owners[0] == other
        assert store.pull(timeout=20)["w"].tolist() == [1.0] * 6


def retire_here(cluster: Cluster, worker: str) -> Any:
    loop = cluster.loop.asyncio_loop
    return asyncio.run_coroutine_threadsafe(cluster.retire(worker), loop)


@pytest.mark.parametrize("method", ["write_checkpoint", "relay_end", "drop"])
def test_an_owner_that_is_killed(monkeypatch, method):
    """Once the directory has named the new layout that holds, before it the old one."""
    is_named = method == "drop"
    way = {"daskps.carriers.machine": True}
    with dask.config.set(way), local_cluster(n_workers=3, threads=1) as client:
        servers = list(client.nthreads())
        with killing_owners.store_on(client, servers[:2]) as store:
            uid, pids = store.uid, client.run(os.getpid)
            victim = store.placement[0]
            control, is_over = Hosts.control, threading.Event()

            async def kill(self: Any, worker: str, name: str, **about: Any) -> Any:
                if (
                    name == method
                    and about.get("store") == uid
                    and not is_over.is_set()
                ):
                    is_over.set()
                    os.kill(pids[victim], signal.SIGKILL)
                return await control(self, worker, name, **about)

            monkeypatch.setattr(Hosts, "control", kill)
            if method == "write_checkpoint":
                # A client asks for that one itself.
                link = seams.bound_link(store)
                ask = link.control

                async def asked(worker: str, name: str, **about: Any) -> Any:
                    if name == method:
                        is_over.set()
                        os.kill(pids[victim], signal.SIGKILL)
                    return await ask(worker, name, **about)

                monkeypatch.setattr(link, "control", asked)

            def act() -> None:
                if is_named:
                    store.reshard(2)
                else:
                    with pytest.raises(daskps.DaskPSError):
                        store.reshard(2)
                assert is_over.is_set()
                monkeypatch.undo()

            found = killing_owners.disturb(store, [act])
            assert found.wrong == []
            assert len(store.placement) == (2 if is_named else 4)

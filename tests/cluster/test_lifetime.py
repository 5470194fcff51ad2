"""How stores begin and end, and what is left of them: nothing."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Worker

import daskps
from daskps import ArraySpec, optim
from daskps.cluster.directory import store_registry
from daskps.cluster.directory.directory import Directory
from daskps.cluster.directory.entry import StoreEntry
from daskps.cluster.host.node import HOSTS
from daskps.cluster.keys import anchor_key, label_of
from daskps.cluster.machine.mapping import FILES
from daskps.cluster.plugins import DirectoryPlugin, HostPlugin
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.packing import unpack_reply
from tests.seams import bound_link, members_of
from tests.support import CARRIERS, gen_cluster, served_by, store, until

W = np.arange(8, dtype="f4")


def held(client):
    """Return the uid of every shard that any worker holds."""
    return sorted(itertools.chain(*client.run(hosted_shards).values()))


def hosted_shards(dask_worker):
    return [uid for uid, _ in HOSTS[dask_worker.address].shards]


def entries(client):
    """Return the uids the directory knows, ready or not, and what it has reserved."""

    def known(dask_scheduler):
        store_registry = dask_scheduler.extensions["daskps-directory"].stores.values()
        return sorted(e.uid for e in store_registry)

    return client.run_on_scheduler(known)


def anchors(client):
    def keys(dask_scheduler):
        return [k for k in dask_scheduler.tasks if k[0] == "daskps-anchor"]

    return sorted(client.run_on_scheduler(keys))


@pytest.fixture
def clean(client):
    """Fail when a test leaves a shard, an entry or an anchor."""
    before = held(client), entries(client), anchors(client)
    yield client
    # At once, and not when garbage is collected.
    assert until(lambda: (held(client), entries(client), anchors(client)) == before, 30)


# -- the ends --------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "delete", "with", "error in with"])
def test_session_store_is_freed(clean, end):
    """On all workers, with its anchors."""
    s = store(clean, shards=4)
    assert held(clean).count(s.uid) == 4
    if end == "with":
        with s:
            pass
    elif end == "error in with":
        with pytest.raises(ZeroDivisionError), s:
            raise ZeroDivisionError
    else:
        getattr(s, end)()
    until(lambda: s.uid not in held(clean), 10)
    assert s.uid not in entries(clean)
    until(lambda: not any(s.uid[:8] in str(key) for key in anchors(clean)))


def test_a_client_that_leaves_takes_its_session_stores_along():
    """And named ones that are not ready: nobody else would finish them."""
    scheduler: Any = SimpleNamespace(handlers={})
    book, freed = Directory(scheduler), []
    vars(book.stores)["free"] = lambda uid, why: freed.append(uid)
    for uid, client, session, ready in (
        ("session", "C", True, True),
        ("named", "C", False, True),
        ("half made", "C", False, False),
        ("of another", "D", True, True),
    ):
        more: Any = (client, session, {}, ("tcp://a",), {}, 1.0, b"", {})
        book.stores[uid] = StoreEntry(uid, uid, *more)
        book.stores[uid].ready = ready
    book.client_left("C")
    assert freed == ["session", "half made"]


def test_named_store_outlives_its_client(clean):
    """Another client opens it, with its values and optimizer."""
    address = clean.scheduler.address
    with Client(address, set_as_default=False) as first:
        s = daskps.create({"w": W}, name="n", optimizer=optim.SGD(1.0), client=first)
        session = daskps.create({"w": W}, client=first)
        s.push({"w": np.ones(8, "f4")})
    until(lambda: session.uid not in held(clean), 10)
    with Client(address, set_as_default=False) as second:
        again = daskps.open("n", client=second)
        assert again == s
        again.push({"w": np.ones(8, "f4")})
        np.testing.assert_array_equal(again["w"].pull(), W - 2)
    np.testing.assert_array_equal(daskps.open("n")["w"].pull(), W - 2)
    daskps.open("n").delete()


@pytest.mark.parametrize("bound", [True, False])
def test_closing_a_named_store_only_detaches(clean, bound):
    """Also through a handle that has just arrived somewhere."""
    s = daskps.create({"w": W}, name="n")
    handle = s if bound else pickle.loads(pickle.dumps(s))
    with handle:
        pass
    with pytest.raises(daskps.StoreClosedError):
        handle.pull()
    again = daskps.open("n")
    np.testing.assert_array_equal(again["w"].pull(), W)
    again.delete()


def close_here(handle):
    handle.close()


def test_task_that_closes_its_handle_of_a_named_store(clean):
    s = daskps.create({"w": W}, name="n")
    clean.submit(close_here, s).result()
    np.testing.assert_array_equal(s["w"].pull(), W)
    s.delete()


@pytest.mark.parametrize("end", ["close", "delete"])
def test_an_ended_store_keeps_no_memory(machine_cluster, end):
    """Neither its owners nor who has mapped it: the next store needs the room."""
    with machine_cluster.as_current():
        daskps.list_stores()  # gives the workers their hosts
        there, mapped = held(machine_cluster), FILES.nbytes()
        gc.disable()
        try:
            for _ in range(5):
                s = daskps.create({"w": W}, name="n" if end == "delete" else None)
                copy = pickle.loads(pickle.dumps(s))
                np.testing.assert_array_equal(copy["w"].pull(), s["w"].pull())
                assert FILES.nbytes() > mapped
                # Of another handle, when that goes.
                del copy
                getattr(s, end)()
                assert held(machine_cluster) == there
                until(lambda: FILES.nbytes() == mapped)
        finally:
            gc.enable()


def test_a_closed_handle_keeps_no_memory_of_a_store_that_goes_on(machine_cluster):
    """Nor does one whose client is gone: whoever deletes the store frees it all."""
    with machine_cluster.as_current():
        s, mapped = daskps.create({"w": W}, name="n"), FILES.nbytes()
        opened = daskps.open("n")
        np.testing.assert_array_equal(opened["w"].pull(), W)
        assert FILES.nbytes() > mapped
        opened.close()
        until(lambda: FILES.nbytes() == mapped)
        with Client(machine_cluster.scheduler.address, set_as_default=False) as other:
            left = daskps.create({"w": W}, client=other)
            np.testing.assert_array_equal(left["w"].pull(), W)
        left.close()
        until(lambda: FILES.nbytes() == mapped)
        s.delete()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_close_that_nobody_answers_keeps_no_anchor(c, s, a, monkeypatch):
    made = await daskps.aio.create({"w": W}, client=c)
    link = bound_link(made)
    assert anchor_key(label_of(made.name, made.uid), 0) in s.tasks
    never = asyncio.Event()
    monkeypatch.setattr(link, "directory", lambda *_, **__: never.wait())
    with pytest.raises(TimeoutError, match="the close of"):
        await made.close(timeout=0.01)
    monkeypatch.undo()
    while anchor_key(label_of(made.name, made.uid), 0) in s.tasks:
        await link.directory("list")
    await link.directory("close", uid=made.uid)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_close_waits_for_the_owners_but_not_for_silent_ones(c, s, a, monkeypatch):
    drop, go_on, asked = HOST.by_name["drop"], asyncio.Event(), asyncio.Event()

    async def late(host, store):
        asked.set()
        await go_on.wait()
        return await drop.function(host, store)

    monkeypatch.setitem(HOST.by_name, "drop", served_by("drop", late))
    first, second = [await daskps.aio.create({"w": W}, client=c) for _ in range(2)]
    monkeypatch.setattr(store_registry, "FREE_SECONDS", 60)
    closing = asyncio.ensure_future(first.close())
    await asked.wait()
    # A round trip, after which an answer would be there.
    await c.run_on_scheduler(lambda: None)
    assert not closing.done()
    monkeypatch.setattr(store_registry, "FREE_SECONDS", 0.01)
    await second.close()
    assert len(HOSTS[a.address].shards) == 2
    go_on.set()
    await closing
    assert first.uid not in {uid for uid, _ in HOSTS[a.address].shards}


def test_deleted_by_another_client(clean):
    """The first handle says so, and where to get another."""
    s = daskps.create({"w": W}, name="n", optimizer=optim.SGD(1.0))
    with Client(clean.scheduler.address, set_as_default=False) as other:
        daskps.open("n", client=other).delete()
    for call in (s.pull, lambda: s.push({"w": W}), s.stats, lambda: s["w"][:1]):
        with pytest.raises(
            (daskps.StoreClosedError, daskps.StoreNotFoundError), match="create it"
        ):
            call()
    with pytest.raises(daskps.StoreNotFoundError):
        daskps.open("n")


def test_waiting_pull_ends_when_the_store_is_deleted(clean):
    s = store(clean)
    waiting = s.pull_async(min_version=99, timeout=None)
    until(lambda: s.stats()["shards"][0]["parked"] == 1)
    pickle.loads(pickle.dumps(s)).delete()
    with pytest.raises(daskps.StoreClosedError):
        waiting.result(timeout=10)


def test_overwrite(clean):
    """The old one is gone whole; its name leads to the new one."""
    old = daskps.create({"w": W}, name="n", shards=3)
    new = daskps.create({"v": W + 1}, name="n", overwrite=True)
    assert daskps.open("n") == new != old
    assert [i.uid for i in daskps.list_stores() if i.name == "n"] == [new.uid]
    until(lambda: old.uid not in held(clean))
    with pytest.raises(daskps.StoreClosedError, match="overwrite=True"):
        old.pull()
    new.delete()
    fresh = daskps.create({"w": W}, name="n", overwrite=True)
    fresh.delete()


def test_list_stores(clean):
    s = daskps.create({"w": W, "b": 0.0}, name="n", shards=3)
    with daskps.create({"w": W}) as session:
        rows = {info.uid: info for info in daskps.list_stores()}
        info = rows[s.uid]
        assert (info.name, info.session) == ("n", False)
        assert (info.parameters, info.shards, info.workers) == (2, 3, 2)
        assert info.nbytes == s.nbytes == 40
        assert rows[session.uid].session
    s.delete()
    assert s.uid not in {info.uid for info in daskps.list_stores()}


def test_many_creates_in_a_row(clean):
    """Nothing piles up."""
    for i in range(20):
        with daskps.create({"w": W}) as s:
            s.add({"w": W})
            assert len(held(clean)) <= 2 * (i + 1)


# -- creates that fail -------------------------------------------------------------


def failing(shape, dtype, rng):
    raise ZeroDivisionError("on purpose")


def divide(block):
    return block // 0 if block.dtype == object else 1 // 0


def with_lock():
    lock = threading.Lock()
    return lambda shape, dtype, rng: (lock, np.zeros(shape))[1]


FAILING = {
    "initializer raises": lambda: ArraySpec(100, init=failing),
    "initializer with a lock": lambda: ArraySpec(100, init=with_lock()),
    "dask array raises": lambda: da.zeros(9, chunks=3).map_blocks(divide, dtype="f8"),
    "NaN in a dask array": lambda: da.full(9, np.nan, chunks=3),
}


@pytest.mark.parametrize("name", [None, "n"])
@pytest.mark.parametrize("how", FAILING)
def test_failing_create_leaves_nothing(clean, how, name):
    params = {"w": W, "bad": FAILING[how]()}
    before = daskps.list_stores()
    with pytest.raises((ZeroDivisionError, daskps.LayoutError)):
        daskps.create(params, name=name, shards=4)
    assert daskps.list_stores() == before
    # The name is free, and the cluster as good as before.
    with daskps.create({"w": W}, name=name) as s:
        np.testing.assert_array_equal(s["w"].pull(), W)
        s.delete()


@pytest.mark.parametrize("timeout", [0, 0.001, 0.003, 0.01, 0.03])
def test_create_that_times_out_leaves_nothing(clean, timeout):
    """Wherever in its course it is cut off."""
    for _ in range(3):
        try:
            s = daskps.create(
                {"w": W, "x": da.zeros(9, chunks=3)}, shards=4, timeout=timeout
            )
        except TimeoutError:
            continue
        s.close()


class Waits:
    """An initializer that does not return before a file is there."""

    def __init__(self, path):
        self.path = path

    def __call__(self, shape, dtype, rng):
        with open(f"{self.path}-{os.getpid()}", "w"):
            pass
        end = time.monotonic() + 20
        while not os.path.exists(self.path) and time.monotonic() < end:
            threading.Event().wait(0.001)
        return np.zeros(shape)


def test_create_that_times_out_in_an_initializer_leaves_nothing(clean, tmp_path):
    """Shards that are still being filled when the store is undone go as well."""
    path = tmp_path / "go on"
    before = held(clean)
    for timeout in (0.5, 2, 8):  # until it is the initializer that is cut off
        if not list(tmp_path.iterdir()):
            with pytest.raises(TimeoutError, match="undone"):
                daskps.create(
                    {"w": ArraySpec(10, init=Waits(str(path)))},
                    shards=1,
                    timeout=timeout,
                )
    assert list(tmp_path.iterdir())
    path.touch()
    clean.run(idle)
    assert held(clean) == before


async def idle(dask_worker):
    """Return when the host's own threads have done what they were at."""
    host = HOSTS[dask_worker.address]
    for _ in range(20):
        await host.in_thread(int)


# -- hosts -------------------------------------------------------------------------


def test_double_registration_keeps_the_shards(clean):
    """From a client, as a preload does it, and from a second client."""
    with store(clean) as s:
        s.add({"w": np.ones(10, "f4")})
        before = clean.run(host_id)
        clean.register_plugin(DirectoryPlugin())
        clean.register_plugin(HostPlugin())
        clean.run(add_plugin_again)
        with Client(clean.scheduler.address, set_as_default=False) as other:
            assert s.uid in {i.uid for i in daskps.list_stores(client=other)}
        assert clean.run(host_id) == before
        np.testing.assert_array_equal(s["w"].pull(), 1.0)
        assert s.versions == (1, 1)


def host_id(dask_worker):
    return id(HOSTS[dask_worker.address])


async def add_plugin_again(dask_worker):
    await dask_worker.plugin_add(HostPlugin(), name=HostPlugin.name)


@gen_cluster(client=True)
async def test_worker_without_a_shard_keeps_the_memory_of_others(c, s, a, b):
    """With its last member the directory goes, and what could be adopted there."""
    made = await daskps.aio.create({"w": W}, servers=[a.address], client=c)
    async with Worker(s.address) as late:
        for worker in (a, b, late):
            members = members_of(HOSTS[worker.address])
            assert members is not None
            assert members.is_open
    await made.close()


@gen_cluster(client=True)
async def test_worker_that_joins_later_has_a_host(c, s, a, b):
    """Before it runs a task, and new stores use it."""
    made = await daskps.aio.create({"w": W}, client=c)
    async with Worker(s.address) as late:
        found = await c.submit(add_and_pull, made, workers=[late.address])
        np.testing.assert_array_equal(found, W + 1)
        wide = await daskps.aio.create({"w": W}, client=c)
        assert set(wide.placement) == {a.address, b.address, late.address}
        await wide.close()
    await made.close()


def add_and_pull(handle):
    handle.add({"w": np.ones(8, "f4")})
    return handle["w"].pull()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 3)
async def test_downscaling_keeps_room_for_shards(c, s, a, b, d):
    """Dask closes workers as long as those that stay have room for their shards; once
    the store is gone any worker may go."""
    servers = [a.address, b.address]
    params = {"w": np.zeros(4), "more": np.zeros(40_000)}
    placement = {"w": a.address, "more": b.address}
    made = await daskps.aio.create(
        params, servers=servers, placement=placement, shards=2, client=c
    )
    assert set(s.workers_to_close(n=3)) == {a.address, d.address}
    s.workers[b.address].memory_limit = made.nbytes + 1
    assert s.workers_to_close(n=3) == [d.address]
    await made.close()
    assert set(s.workers_to_close(n=3)) == {a.address, b.address, d.address}


@gen_cluster(client=True)
async def test_worker_without_a_host_is_refused_by_name(c, s, a, b):
    await daskps.aio.list_stores(client=c)
    del b.handlers["daskps_control"]
    with pytest.raises(daskps.ProtocolError, match=f"{b.address}.*preload"):
        await daskps.aio.create({"w": W}, client=c)
    assert await daskps.aio.list_stores(client=c) == []
    await daskps.aio.create({"w": W}, servers=[a.address], name="old", client=c)
    await daskps.aio.delete("old", client=c)
    assert await daskps.aio.list_stores(client=c) == []
    assert not s.extensions["daskps-directory"].stores
    made = await daskps.aio.create({"w": W}, servers=[a.address], client=c)
    np.testing.assert_array_equal(await made["w"].pull(), W)
    await made.close()


@gen_cluster(client=True)
async def test_worker_of_another_protocol_is_refused_by_name(c, s, a, b):
    await daskps.aio.list_stores(client=c)
    host = HOSTS[b.address]

    async def newer(method, **kwargs):
        if method == "hello":
            return {"status": "OK", "value": {"protocol": 99, "version": "9.9"}}
        return await host.handle_control(method, **kwargs)

    b.handlers["daskps_control"] = newer
    with pytest.raises(daskps.ProtocolError, match=f"{b.address}.* 99 .*9.9"):
        await daskps.aio.create({"w": W}, client=c)
    assert not s.extensions["daskps-directory"].stores


@gen_cluster(client=True)
async def test_scheduler_of_another_protocol_is_refused(c, s, a, b):
    await daskps.aio.list_stores(client=c)
    reply = await c.scheduler.daskps_directory(
        method="hello", protocol=99, version="9.9"
    )
    with pytest.raises(daskps.ProtocolError, match=r"99 \(daskps 9.9\).*the same"):
        unpack_reply(reply, "the scheduler")


@gen_cluster(
    client=True,
    config={"distributed.worker.blocked-handlers": ["daskps_call"], **CARRIERS["rpc"]},
)
async def test_a_message_that_workers_have_blocked_is_named(c, s, a, b):
    made = await daskps.aio.create({"w": W}, client=c)
    with pytest.raises(ValueError, match="'daskps_call' handler has been explicitly"):
        await made.add({"w": W})
    await made.close()


def test_client_that_comes_after_another_closed(clean):
    """A handle made by a client that was closed finds the current one."""
    with Client(clean.scheduler.address, set_as_default=False) as first:
        s = daskps.create({"w": W}, name="n", client=first)
    with clean.as_current():
        np.testing.assert_array_equal(s["w"].pull(), W)
    s.delete()


@pytest.mark.parametrize("resource", ["PS", "BIG"])
@gen_cluster(
    client=True,
    nthreads=[
        ("127.0.0.1", 1, {"resources": {"PS": 1}}),
        ("127.0.0.1", 1, {"resources": {"BIG": 1}}),
        ("127.0.0.1", 1),
    ],
)
async def test_servers(c, s, a, b, d, resource):
    """By resource, all, or by address; "auto" takes those with PS where any has it."""

    async def owners(servers, **kwargs):
        async with await daskps.aio.create(
            {"w": W}, servers=servers, client=c, **kwargs
        ) as made:
            return list(made.placement)

    of = {"PS": a.address, "BIG": b.address}
    assert await owners(f"resource:{resource}") == [of[resource]]
    assert await owners("auto") == [a.address]
    assert set(await owners("all")) == {a.address, b.address, d.address}
    chosen = [d.address, b.address]
    assert await owners(chosen) == chosen
    assert await owners(chosen, shards=3) == [d.address, d.address, b.address]

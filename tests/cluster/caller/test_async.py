"""On event loops: an asynchronous client, and tasks that are coroutines."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import CancelledError, as_completed, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed import Client
from tornado.ioloop import IOLoop

import daskps
from daskps import ParameterStore, optim
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.link import CallFuture, Link
from daskps.cluster.protocol import deadline
from daskps.errors import StoreClosedError, StoreExistsError
from tests.support import PATIENCE, gen_cluster

W = np.arange(6, dtype="f8").reshape(2, 3)


async def made(client, **kwargs):
    kwargs.setdefault("optimizer", optim.SGD(1.0))
    return await daskps.aio.create({"w": W, "b": 0.0}, client=client, **kwargs)


@gen_cluster(client=True)
async def test_everything_that_asks_is_awaitable(c, s, a, b):
    store = await made(c)
    grads = {"w": np.ones_like(W)}
    calls = {
        "pull": lambda: store.pull(),
        "push": lambda: store.push(grads),
        "add": lambda: store.add(grads),
        "assign": lambda: store.assign(grads),
        "pushpull": lambda: store.pushpull(grads),
        "aggregate": lambda: store.aggregate([grads]),
        "version": lambda: store.version,
        "versions": lambda: store.versions,
        "stats": lambda: store.stats(),
        "index": lambda: store["w"][0, 1:],
        "pull one": lambda: store["w"].pull(),
        "push one": lambda: store["w"].push(W),
        "pull_async": lambda: store.pull_async(),
        "push_async": lambda: store.push_async(grads),
        "list": lambda: daskps.list_stores(client=c),
        "close": lambda: store.close(),
    }
    for name, call in calls.items():
        found = call()
        assert inspect.isawaitable(found), name
        assert not inspect.isawaitable(await found), name


@gen_cluster(client=True)
async def test_asarray_raises(c, s, a, b):
    async with await made(c) as store:
        with pytest.raises(TypeError, match=r"await store\['w'\]\.pull\(\)"):
            np.asarray(store["w"])
        np.testing.assert_array_equal(np.asarray(await store["w"].pull()), W)


@gen_cluster(client=True)
async def test_async_with_frees_the_store(c, s, a, b):
    async with await made(c) as store:
        assert len(await daskps.aio.list_stores(client=c)) == 1
    assert await daskps.aio.list_stores(client=c) == []
    with pytest.raises(daskps.StoreClosedError):
        await store.pull()
    await store.close()


@gen_cluster(client=True)
async def test_plain_with_is_refused(c, s, a, b):
    """It could not wait for the end of the store."""
    async with await made(c) as store:
        with pytest.raises(TypeError, match="async with"), store:
            pass


@gen_cluster(client=True)
async def test_unattached_handle_says_what_to_do(c, s, a, b):
    """Attributes cannot ask; any awaited method attaches the handle."""
    async with await made(c, name="open") as store:
        again = daskps.aio.AsyncParameterStore(store.uid, store.name)
        with c.as_current():
            for attribute in ("names", "layout", "placement", "nbytes", "optimizer"):
                with pytest.raises(RuntimeError, match="await"):
                    getattr(again, attribute)
            with pytest.raises(RuntimeError, match="await"):
                again["w"]
            await again.pull("b")
            assert again.names == ["w", "b"]
            np.testing.assert_array_equal(await again["w"][1], W[1])
            again = await daskps.aio.open("open", client=c)
            assert again == store
            assert again.names == ["w", "b"]
        await store.delete()


@gen_cluster(client=True)
async def test_many_at_once(c, s, a, b):
    """Gathered verbs of one handle: each push counts once."""
    async with await made(c) as store:
        pushes = [store.push({"w": np.ones_like(W)}) for _ in range(100)]
        versions = await asyncio.gather(*pushes)
        # The first shard holds elements of "w".
        assert sorted(v.pairs[0][1] for v in versions) == list(range(1, 101))
        np.testing.assert_array_equal(await store["w"].pull(), W - 100)
        found = await asyncio.gather(*(store["w"][0] for _ in range(20)))
        assert all((row == W[0] - 100).all() for row in found)


@gen_cluster(client=True)
async def test_cancelled_verbs_leave_the_store_usable(c, s, a, b):
    async with await made(c) as store:
        waiting = asyncio.ensure_future(store.pull(min_version=10, timeout=None))
        pushing = asyncio.ensure_future(store.push({"w": np.ones_like(W)}))
        await pushing
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await store.stats())["shards"][0]["parked"] == 0
        with pytest.raises(TimeoutError, match="a pull of store"):
            await asyncio.wait_for(store.pull(min_version=10, timeout=0.05), 10)
        np.testing.assert_array_equal(await store["w"].pull(), W - 1)


@gen_cluster(client=True)
async def test_attach_and_call_share_one_timeout(c, s, a, b, monkeypatch):
    async with await made(c) as store:
        clock, left = SimpleNamespace(now=100.0), []
        monotonic = SimpleNamespace(monotonic=lambda: clock.now)
        attach, call = ParameterStore._attach, ShardClient.call_async

        async def slow(store, link):
            clock.now += 4
            return await attach(store, link)

        async def noting(shards, request, end):
            left.append(end.remaining())
            return await call(shards, request, end)

        monkeypatch.setattr(deadline, "time", monotonic)
        monkeypatch.setattr(ParameterStore, "_attach", slow)
        monkeypatch.setattr(ShardClient, "call_async", noting)
        await store.pull_async(timeout=PATIENCE)
        await store.push_async({"w": W}, timeout=PATIENCE)
        assert left == 2 * [PATIENCE - 4]
        with pytest.raises(TimeoutError, match="after 3 s waiting for a pull of store"):
            await store.pull_async(timeout=3)


async def pushes_on_the_loop(store):
    """A coroutine task: it runs on the event loop of its worker."""
    version = await store.push_async({"w": np.ones_like(W)})
    found = await store.pull_async("w", min_version=version)
    return found["w"]


async def blocks_the_loop(store, what):
    verbs = {
        "pull": lambda: store.pull(),
        "push": lambda: store.push({"w": W}),
        "add": lambda: store.add({"w": W}),
        "version": lambda: store.version,
        "names": lambda: store.names,
        "index": lambda: store["w"],
        "bound": lambda: store.bound(),
        "create": lambda: daskps.create({"w": W}),
        "open": lambda: daskps.open("x"),
    }
    return verbs[what]()


async def asarray_on_the_loop(store):
    await store.pull_async()
    return np.asarray(store["w"])


BLOCKING = ["pull", "push", "add", "version", "names", "index", "bound", "create"]


@pytest.mark.parametrize("what", [*BLOCKING, "open"])
def test_blocking_verb_on_a_workers_loop_raises(client, what):
    """It says what to use there, and the worker goes on."""
    with daskps.create({"w": W}, optimizer=optim.SGD(1.0)) as store:
        future = client.submit(blocks_the_loop, store, what)
        with pytest.raises(RuntimeError, match="push_async"):
            future.result(timeout=PATIENCE)
        assert store.version == 0
        assert client.submit(sum, [1, 2]).result() == 3


def test_asarray_on_a_workers_loop_raises(client):
    with daskps.create({"w": W}) as store:
        future = client.submit(asarray_on_the_loop, store)
        with pytest.raises(TypeError, match="pull_async"):
            future.result(timeout=PATIENCE)


def test_async_verbs_on_a_workers_loop(way):
    with daskps.create({"w": W}, optimizer=optim.SGD(1.0), client=way) as store:
        found = way.submit(pushes_on_the_loop, store).result(timeout=PATIENCE)
        np.testing.assert_array_equal(found, W - 1)
        again = way.submit(pushes_on_the_loop, store).result(timeout=PATIENCE)
        np.testing.assert_array_equal(again, W - 2)


def test_asynchronous_client_beside_a_synchronous_one(cluster):
    """Two clients of one cluster, one store: each sees what the other did."""
    with cluster.as_current():
        store = daskps.create({"w": W}, name="both", overwrite=True)

    async def other():
        async with Client(cluster.scheduler.address, asynchronous=True) as c:
            same = await daskps.aio.open("both", client=c)
            await same.add({"w": np.ones_like(W)})
            return await same.version

    assert asyncio.run(other()) == store.version == 1
    np.testing.assert_array_equal(store["w"].pull(), W + 1)
    store.delete()


async def nothing():
    """A work that is over at once."""


@pytest.mark.parametrize("by", ["caller", "work", "both"])
def test_a_cancelled_future_is_done_for_all_who_wait(by):
    heard = list[Any]()
    loop = SimpleNamespace(add_callback=lambda call: None)
    future: CallFuture[None] = CallFuture(loop)
    future.add_done_callback(heard.append)

    async def cancelled():
        task = future.task = asyncio.ensure_future(nothing())
        task.add_done_callback(future.take)
        if by != "work":
            assert future.cancel()
            assert future.cancel()
        if by != "caller":
            task.cancel()
        await asyncio.wait({task})
        with pytest.raises(asyncio.CancelledError):
            await future

    asyncio.run(cancelled())
    assert wait([future], timeout=0).done == {future}
    assert list(as_completed([future], timeout=0)) == [future]
    assert heard == [future]
    assert future.cancelled()
    with pytest.raises(CancelledError):
        future.result()


def test_work_that_is_cancelled_before_it_begins_is_never_made():
    """As by Ctrl-C just then; a coroutine that is made and never run is a warning."""
    made = list[Any]()

    def work() -> Any:
        made.append(nothing())
        return made[-1]

    async def cancelled():
        link: Any = object.__new__(Link)
        link.loop = IOLoop.current()
        within = asyncio.ensure_future(link.within(work, None, "nothing"))
        within.cancel()
        started = link.start(work)
        started.cancel()
        await asyncio.wait({within})
        with pytest.raises(asyncio.CancelledError):
            await started
        assert within.cancelled()

    asyncio.run(cancelled())
    assert not made


def test_what_work_raises_at_once_is_heard():
    def work() -> Any:
        raise LookupError("there is none")

    async def started():
        link: Any = object.__new__(Link)
        link.loop = IOLoop.current()
        with pytest.raises(LookupError, match="there is none"):
            await link.start(work)

    asyncio.run(asyncio.wait_for(started(), 60))


@gen_cluster(client=True)
async def test_a_store_is_made_and_closed_by_async_with(c, s, a, b):
    async with daskps.aio.create({"w": W}, client=c) as store:
        np.testing.assert_array_equal((await store.pull())["w"], W)
    with pytest.raises(StoreClosedError, match="freed the store"):
        await store.pull()
    kept, other = await asyncio.gather(
        asyncio.create_task(daskps.aio.create({"w": W}, client=c, name="kept")),
        daskps.aio.create({"w": W}, client=c),
    )
    async with daskps.aio.open("kept", client=c) as opened, other:
        assert opened == kept
    await kept.pull()
    with pytest.raises(StoreExistsError):
        async with daskps.aio.create({"w": W}, client=c, name="kept"):
            raise AssertionError("begun")


@gen_cluster(client=True)
async def test_a_store_that_was_not_awaited_says_so(c, s, a, b):
    made: Any = daskps.create({"w": W}, client=c)
    with pytest.raises(TypeError, match=r"async with daskps\.create"), made:
        raise AssertionError("begun")
    for use in (lambda: made["w"], lambda: made.pull()):
        with pytest.raises((TypeError, AttributeError), match="store = await daskps"):
            use()
    assert not hasattr(made, "_repr_html_")
    await made


@gen_cluster(client=True)
async def test_saving_and_restoring_are_awaited(c, s, a, b, tmp_path):
    store = await made(c)
    await store.push({"w": np.ones_like(W)})
    info = await store.save(tmp_path)
    writing = await store.save(tmp_path, wait=False)
    assert isinstance(writing, CallFuture)
    second = await writing
    assert (info.sequence, second.sequence) == (1, 2)
    async with daskps.aio.restore(tmp_path, client=c, shards=1) as again:
        assert ((await again["w"].pull()) == W - 1).all()

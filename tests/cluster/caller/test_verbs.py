"""One contract of all verbs, from everywhere a handle can be, by each way.

A contract is a coroutine that never suspends unless its `get` does: called from a
thread `get` returns what a verb returned, on an event loop it awaits it.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster

import daskps
from daskps import config, optim
from daskps.version import Version
from tests.cluster.row_contracts import (
    ROW_CONTRACTS,
    counts_unbounded_rows,
    pushes_rows_with_arrays,
    refuses_rows,
    says_what_tables_are,
    tables,
    tells_changes,
)
from tests.cluster.view_contracts import VIEW_CONTRACTS, regions
from tests.support import CARRIERS

IN_PROCESS = {"daskps.carriers.process": True}
QUIET = {"dashboard_address": "127.0.0.1:0", "silence_logs": 50}
#: Exact in every dtype: the numbers below are small multiples of 1/4.
LR = 0.5


def start():
    return {
        "w": np.arange(15, dtype="f4").reshape(5, 3),
        "b": np.float64(2),
        "net": {"k": np.arange(7, dtype="f2"), "t": np.ones((2, 3, 4))},
        "n": np.arange(4),
        "flag": np.array([True, False, True]),
        "small": np.array([1, 255], "u1"),
        "e": np.zeros((0, 2), "f4"),
    }


def flat_start():
    made = start()
    net = made.pop("net")
    made |= {f"net/{name}": value for name, value in net.items()}
    return {name: np.asarray(value) for name, value in made.items()}


def same(found, expected):
    """Equal values, shapes and dtypes."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, strict=True)


def close_to(name):
    return np.full_like(flat_start()[name], 2)


# -- the contracts -------------------------------------------------------------


async def pulls(s, get):
    """A pull returns all, or what is named, in the dtypes and shapes given."""
    expected = flat_start()
    same(await get(s.pull()), expected)
    same(await get(s.pull("w")), {"w": expected["w"]})
    some = await get(s.pull(["net/k", "b", "net/k", "e"]))
    assert list(some) == ["net/k", "b", "e"]
    same(some, {n: expected[n] for n in ("net/k", "b", "e")})
    assert await get(s.pull([])) == {}
    first = await get(s.pull())
    first["w"][...] = -1
    same(await get(s.pull()), expected)


async def fills_out(s, get):
    """`out` is filled in place, contiguous or not, and returned."""
    expected = flat_start()
    out = {n: np.empty_like(v) for n, v in expected.items()}
    wide = np.full((5, 7), -1.0, "f4")
    out["w"] = wide[:, 1:7:2]
    found = await get(s.pull(out=out))
    assert all(found[n] is out[n] for n in out)
    same(out, expected)
    assert (wide[:, ::2] == -1).all()
    k = np.empty(7, "f2")
    found = await get(s.pull(["b", "net/k"], out={"net/k": k}))
    assert found["net/k"] is k
    same(found, {n: expected[n] for n in ("b", "net/k")})
    backward = np.empty((3, 5), "f4").T[::-1]
    assert await get(s["w"].pull(out=backward)) is backward
    np.testing.assert_array_equal(backward, expected["w"])


async def refuses_out(s, get):
    """`out` must fit exactly."""
    read_only = np.empty((5, 3), "f4")
    read_only.flags.writeable = False
    for wrong, error in [
        (np.empty((3, 5), "f4"), ValueError),
        (np.empty((5, 3), "f8"), ValueError),
        (read_only, ValueError),
        ([[0.0] * 3] * 5, TypeError),
    ]:
        with pytest.raises(error, match="out\\['w'\\]"):
            await get(s.pull(out={"w": wrong}))
    with pytest.raises(daskps.UnknownParameterError, match="'typo'"):
        await get(s.pull(out={"typo": np.empty(1)}))
    with pytest.raises(ValueError, match="names"):
        await get(s.pull("w", out={"b": np.empty(())}))


async def refuses_outputs_that_overlap(s, get):
    """By both names, also where a read of these names is known; nothing is written."""
    memory = np.zeros(60, "f4")
    both = {"w": memory[:15].reshape(5, 3), "net/k": memory[14:18].view("f2")[:7]}
    apart = {"w": memory[:15].reshape(5, 3), "net/k": memory[15:19].view("f2")[:7]}
    block = memory[20:50].reshape(5, 6)
    woven = {"w": block[:, :3], "n": block[:4, 4:].view("i8")[:, 0]}
    for _ in range(2):
        for verb in (s.pull, s.pull_async, partial(s.pushpull, {})):
            with pytest.raises(ValueError, match=r"'w'\] and out\['net/k'\] share"):
                await get(verb(out=both))
        assert not memory.any()
        same(await get(s.pull(out=apart)), {n: flat_start()[n] for n in apart})
        memory[:] = 0
    same(await get(s.pull(out=woven)), {n: flat_start()[n] for n in woven})


async def waits_for_a_version(s, get):
    """`min_version` is a Version, or a number that every shard must reach."""
    version = await get(s.add({"b": np.float64(1)}))
    assert isinstance(version, Version)
    assert version == 1
    assert len(version.pairs) == 1
    found = await get(s.pull(min_version=version))
    assert found["b"] == 3
    waiting = s.pull_async(min_version=2)
    for _ in range(2):
        version = await get(s.add({n: np.ones_like(v) for n, v in wide().items()}))
    assert (await get(waiting))["b"] >= 4
    found = await get(s.pull(["b", "w"], min_version=2))
    np.testing.assert_array_equal(found["w"], flat_start()["w"] + 2)
    assert await get(s.version) == 2
    assert max(await get(s.versions)) == version == 3
    what = (
        rf"after 0\.05 s waiting for a pull of store {s.name!r}: "
        rf"shards? [0-9, ]+ at worker \S+; pass a larger"
    )
    with pytest.raises(TimeoutError, match=what):
        await get(s.pull(min_version=99, timeout=0.05))


def wide():
    """Enough elements of each dtype to meet every shard."""
    return {n: v for n, v in flat_start().items() if n in ("w", "b", "net/k", "net/t")}


async def pushes(s, get):
    """A push is one SGD step; `weight` multiplies, `lr` overrides once."""
    expected = flat_start()
    grads = {"w": close_to("w"), "net": {"k": close_to("net/k")}, "b": 4}
    version = await get(s.push(grads))
    assert version == 1
    for name in ("w", "net/k"):
        expected[name] = expected[name] - expected[name].dtype.type(LR * 2)
    expected["b"] = expected["b"] - LR * 4
    same(await get(s.pull(min_version=version)), expected)
    await get(s.push({"w": close_to("w")}, weight=0.25))
    expected["w"] -= np.float32(LR * 0.25 * 2)
    await get(s.push({"w": close_to("w")}, lr=0.25, weight=2))
    expected["w"] -= np.float32(0.25 * 2 * 2)
    await get(s.push({"w": close_to("w")}))
    expected["w"] -= np.float32(LR * 2)
    await get(s["w"].push(close_to("w"), lr=1.0))
    expected["w"] -= 2
    same(await get(s.pull()), expected)
    assert await get(s.push({})) == 0


async def casts(s, get):
    """Gradients of another float dtype are cast, of the same kind."""
    expected = flat_start()["w"] - np.float32(LR * 3)
    await get(s.push({"w": np.full((5, 3), 3, "f8")}))
    np.testing.assert_array_equal(await get(s["w"].pull()), expected)
    await get(s.push({"w": np.full((5, 3), 3, "i4")}))
    await get(s.add({"n": [1, 2, 3, 4], "small": np.array([1, 1], "u8")}))
    found = await get(s.pull(["w", "n", "small"]))
    np.testing.assert_array_equal(found["small"], np.array([2, 0], "u1"), strict=True)
    np.testing.assert_array_equal(found["w"], expected - np.float32(LR * 3))
    np.testing.assert_array_equal(found["n"], [1, 3, 5, 7])


async def adds(s, get):
    """`add` is a plain +=, also of integers, and no optimizer sees it."""
    expected = flat_start()
    deltas = {n: close_to(n) for n in expected if n not in ("flag", "small")}
    assert await get(s.add(deltas)) == 1
    for name, delta in deltas.items():
        expected[name] = expected[name] + delta
    same(await get(s.pull()), expected)
    await get(s["n"].add([-1, -1, -1, -1]))
    np.testing.assert_array_equal(await get(s["n"].pull()), expected["n"] - 1)


async def assigns(s, get):
    """`assign` replaces; unknown names are ignored, missing refused, if said so."""
    expected = flat_start()
    values = {n: v[::-1].copy() if v.ndim else v + 1 for n, v in expected.items()}
    assert await get(s.assign(values, allow_missing=False)) == 1
    same(await get(s.pull()), values)
    await get(s.assign({"w": expected["w"], "x": np.ones(3)}, allow_extra=True))
    np.testing.assert_array_equal(await get(s["w"].pull()), expected["w"])
    with pytest.raises(daskps.UnknownParameterError, match="no parameter 'x'"):
        await get(s.assign({"w": values["w"], "x": np.ones(3)}))
    with pytest.raises(daskps.UnknownParameterError, match="allow_missing"):
        await get(s.assign({"w": values["w"]}, allow_missing=False))
    np.testing.assert_array_equal(await get(s["w"].pull()), expected["w"])
    await get(s["flag"].assign([False, False, True]))
    np.testing.assert_array_equal(await get(s["flag"].pull()), [False, False, True])


async def pushes_and_pulls(s, get):
    """One round trip: what comes back contains what went."""
    expected = flat_start()
    expected["w"] -= np.float32(LR * 2)
    same(await get(s.pushpull({"w": close_to("w")})), expected)
    out = {"w": np.empty((5, 3), "f4")}
    found = await get(s.pushpull({"w": close_to("w")}, weight=0.5, lr=1.0, out=out))
    assert found["w"] is out["w"]
    np.testing.assert_array_equal(out["w"], expected["w"] - 1)


async def futures(s, get):
    """`pull_async` and `push_async` return futures; a push copies what it is given."""
    grad = close_to("w")
    pushing = s.push_async({"w": grad}, weight=0.5, lr=1.0)
    grad[...] = 99
    assert isinstance(pushing, Future)
    version = await get(pushing)
    assert version == 1
    out = {"w": np.empty((5, 3), "f4")}
    found = await get(s.pull_async("w", out=out, min_version=version))
    assert found["w"] is out["w"]
    np.testing.assert_array_equal(out["w"], flat_start()["w"] - 1)
    with pytest.raises(daskps.UnknownParameterError):
        await get(s.push_async({"typo": 1.0}))


async def aggregates(s, get):
    """A reduction on the owners; the store stays as it is."""
    contributions = [{"w": np.full((5, 3), i, "f4"), "b": float(i)} for i in (1, 2, 6)]
    mean = await get(s.aggregate(contributions))
    same(mean, {"w": np.full((5, 3), 3, "f4"), "b": np.array(3.0)})
    total = await get(s.aggregate(contributions, reduce="sum"))
    np.testing.assert_array_equal(total["w"], 9)
    largest = await get(s.aggregate(contributions, reduce=lambda x, w: x.max(axis=0)))
    np.testing.assert_array_equal(largest["w"], 6)
    partial = [{"w": contributions[0]["w"]}, contributions[1]]
    found = await get(s.aggregate(partial))
    np.testing.assert_array_equal(found["b"], 2.0)
    same(await get(s.pull()), flat_start())
    assert await get(s.version) == 0
    with pytest.raises(ValueError, match="at least one"):
        await get(s.aggregate([]))
    with pytest.raises(ValueError, match="'median'"):
        await get(s.aggregate(contributions, reduce="median"))


INDICES = [
    np.s_[1:4, 2],
    np.s_[1:4],
    np.s_[3],
    np.s_[-1, -2],
    np.s_[::-1],
    np.s_[4:0:-2, ::-1],
    np.s_[::2, 1:],
    np.s_[...],
    np.s_[..., 0],
    np.s_[2, ...],
    np.s_[None, 1:2],
    np.s_[1:1],
    np.s_[10:20],
    np.s_[np.int64(2), 0],
    np.s_[()],
    np.s_[-100:100:3],
]


#: Arrays of ints, and masks.
NAMED = [
    [3, 1, 1],
    [-1, 0],
    np.array([[4, 0], [0, 4]], "u1"),
    np.array(2),
    np.array([True, False, True, True, False]),
    [False, True, False, False, True],
    np.arange(15).reshape(5, 3) % 4 == 1,
    ([4, 2], 1),
    ([4, 2, 4], np.s_[::-1]),
    ([0, 3], None, ...),
    [],
    np.zeros(5, bool),
]


async def slices(s, get):
    """Indexing gives NumPy's values, for every basic index."""
    w, t = flat_start()["w"], flat_start()["net/t"]
    for index in INDICES:
        found = await get(s["w"][index])
        np.testing.assert_array_equal(found, w[index], strict=True)
    np.testing.assert_array_equal(await get(s["net/t"][1, ..., ::-2]), t[1, ..., ::-2])
    np.testing.assert_array_equal(await get(s["e"][0:, 1]), np.zeros(0))
    assert await get(s["b"][()]) == 2
    assert await get(s["b"][...]) == 2
    for outside in (5, (0, 3), (0, 0, 0)):
        with pytest.raises(IndexError):
            await get(s["w"][outside])
    no_index: list[Any] = [1.5, "w", True, np.s_[:, [0, 1]], ([0, 1], [0, 1])]
    for wrong in (*no_index, np.array(True)):
        with pytest.raises(TypeError, match="int and slice"):
            await get(s["w"][wrong])
    for index in NAMED:
        found = await get(s["w"][index])
        np.testing.assert_array_equal(found, w[index], strict=True)
    some = [[1, 0], [0, -1]]
    np.testing.assert_array_equal(await get(s["net/t"][some, ::2]), t[some, ::2])
    np.testing.assert_array_equal(await get(s["e"][[]]), np.zeros((0, 2)))
    np.testing.assert_array_equal(
        await get(s["w"].region(3, 12)[[8, 0, 8]]), w.reshape(-1)[[11, 3, 11]]
    )
    beyond: list[Any] = [
        [5],
        [0, -6],
        np.ones(4, bool),
        np.zeros((5, 2), bool),
        np.zeros(2),
    ]
    for outside in beyond:
        with pytest.raises(IndexError):
            await get(s["w"][outside])


async def attributes(s, get):
    """NumPy's attributes, of the store and of its parameters."""
    expected = flat_start()
    await get(s.pull("w"))
    assert s.names == list(s)
    assert s.names[: len(expected)] == list(s.layout.by_name)
    assert set(s.layout.by_name) == set(expected)
    assert "w" in s
    assert "typo" not in s
    # Unbounded rows are not counted: the shards would have to be asked.
    bounded = [s[name] for name in s.layout.table_by_name if s[name].rows is not None]
    tables = sum(table.nbytes for table in bounded)
    assert s.nbytes == sum(v.nbytes for v in expected.values()) + tables
    assert len(s.placement) == s.layout.n_shards == len(await get(s.versions))
    assert s.optimizer.keys() >= {"w", "b", "net/k", "net/t", "e"}
    assert not s.optimizer.keys() & {"n", "flag", "small"}
    assert "SGD" in s.optimizer["w"]
    for name, value in expected.items():
        p = s[name]
        assert (p.shape, p.dtype, p.ndim) == (value.shape, value.dtype, value.ndim)
        assert (p.size, p.nbytes) == (value.size, value.nbytes)
        assert p.name == name
    assert len(s["w"]) == 5
    with pytest.raises(TypeError):
        len(s["b"])
    with pytest.raises(daskps.UnknownParameterError, match=r"'typo'.*'w'"):
        s["typo"]


async def counts(s, get):
    """`stats` has a row per shard, and what this handle has done."""
    await get(s.add({n: np.ones_like(v) for n, v in wide().items()}))
    found = await get(s.stats())
    rows = found["shards"]
    assert [row["shard"] for row in rows] == list(range(s.layout.n_shards))
    assert [row["worker"] for row in rows] == list(s.placement)
    assert all(row["generation"] == 1 and row["version"] == 1 for row in rows)
    assert all(row["pushes"] == 1 and row["duplicates"] == 0 for row in rows)
    assert all(row["parked"] == 0 and row["nbytes"] > 0 for row in rows)
    assert found["handle"]["retries"] == 0
    calls = [found["handle"][n] for n in ("messages", "local_calls", "socket_calls")]
    assert sum(calls) >= 1


async def closes(s, get):
    """A closed handle says so; closing twice is fine."""
    await get(s.close())
    await get(s.close())
    for verb in (s.pull, lambda: s.push({"w": close_to("w")}), s.stats, s.pull_async):
        with pytest.raises(daskps.StoreClosedError, match="was closed"):
            await get(verb())


async def deletes(s, get):
    """A deleted store is gone for every handle."""
    again = pickle.loads(pickle.dumps(s))
    await get(s.delete())
    with pytest.raises(daskps.StoreClosedError, match=r"deleted|closed"):
        await get(again.pull())
    with pytest.raises(daskps.StoreClosedError):
        await get(s.delete())


CONTRACTS = [
    pulls,
    fills_out,
    refuses_out,
    refuses_outputs_that_overlap,
    waits_for_a_version,
    pushes,
    casts,
    adds,
    assigns,
    pushes_and_pulls,
    futures,
    aggregates,
    slices,
    attributes,
    counts,
    closes,
    deletes,
    *ROW_CONTRACTS,
    *VIEW_CONTRACTS,
]


# -- where they run --------------------------------------------------------------


async def at_once(value):
    """Return what a blocking verb returned; wait for a future in this thread."""
    return value.result(timeout=30) if isinstance(value, Future) else value


async def awaited(value):
    """Await what a verb on an event loop returned."""
    assert inspect.isawaitable(value), f"not awaitable: {value!r}"
    return await value


def drive(contract, store):
    """Run a contract to its end in this thread; it must not suspend."""
    work = contract(store, at_once)
    try:
        work.send(None)
    except StopIteration:
        return used(store)
    raise AssertionError(f"{contract} waits on an event loop")


def by_socket_already(store):
    """Call until a socket answers, as they open beside the calls; return what was used."""
    until = time.monotonic() + 30
    while not used(store)[2]:
        store.pull()
        assert time.monotonic() < until, "no socket has opened"
    return used(store)


def used(store):
    """Return how often this handle called in the process, by message and by socket."""
    if (shards := store._shards) is None:
        return 0, 0, 0
    c = shards.counters
    return c.local_calls, c.messages, c.socket_calls


def in_task(contract, store):
    return drive(contract, store)


def in_thread(contract, store):
    found = []
    bound = store.bound()

    def work():
        try:
            found.append(drive(contract, bound))
        except BaseException as error:  # noqa: BLE001 - raised again below
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def new(client, **kwargs):
    params = {**start(), **tables()}
    return daskps.create(
        params, client=client, optimizer=optim.SGD(LR), shards=3, **kwargs
    )


@pytest.fixture(scope="module")
def threads_cluster():
    """Workers in this process: a client here has the way in the process."""
    with (
        dask.config.set(IN_PROCESS),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, **QUIET
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def calls_without(contract):
    """Whether a contract ends before it has called any shard."""
    return contract in (closes, deletes, refuses_out)


def check_way(contract, used, name):
    """Tell that a contract went the way it was meant to go."""
    local, messages, by_socket = used
    if calls_without(contract) or contract in (aggregates, attributes):
        return
    if contract in ROW_CONTRACTS:
        check_way_of_rows(contract, used, name)
        return
    if name == "socket" and contract is not futures:
        assert local == 0
        assert by_socket > 0
        return
    assert by_socket == 0
    if name == "machine" and contract is regions:
        # Steps that are not meant for all shards are their owners'.
        assert local > 0
        return
    if name == "machine" and contract in (futures, waits_for_a_version):
        # Awaited on the event loop, which must not wait for another process.
        assert messages > 0
    elif name in ("process", "machine"):
        assert local > 0
        assert messages == 0
    else:
        assert local == 0
        assert messages > 0


def check_way_of_rows(contract, used, name):
    """Tell it of rows."""
    local, messages, by_socket = used
    beside = (says_what_tables_are, refuses_rows, counts_unbounded_rows)
    if contract in (pushes_rows_with_arrays, *beside):
        return
    if name == "socket" and contract is tells_changes:  # which go by message
        return
    if name == "socket":
        assert local == 0
        assert by_socket > 0
        return
    assert local > 0 if name in ("process", "machine") else messages > 0
    assert messages == 0 or name != "process"


@pytest.mark.parametrize("name", ["process", "rpc", "socket"])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_from_client(contract, name, request):
    which = "threads_cluster" if name == "process" else f"{name}_cluster"
    client = request.getfixturevalue(which)
    carriers = {
        "daskps.carriers.process": True,
        "daskps.carriers.socket": name == "socket",
    }
    with dask.config.set(carriers), client.as_current(), new(client) as s:
        before = by_socket_already(s) if name == "socket" else (0, 0, 0)
        after = drive(contract, s)
        check_way(contract, [b - a for a, b in zip(before, after, strict=True)], name)


#: In a task by each way, and in a thread beside one by one way for each contract: about
#: as many for each.
FROM_TASKS = [
    *itertools.product(CARRIERS, [in_task], CONTRACTS),
    *zip(itertools.cycle(CARRIERS), itertools.repeat(in_thread), CONTRACTS),
]


@pytest.mark.parametrize(("way", "where", "contract"), FROM_TASKS, indirect=["way"])
def test_from_task(contract, where, way, request):
    """All shards on the worker of the task, or all by message."""
    name = request.node.callspec.params["way"]
    worker = next(iter(way.nthreads()))
    with new(way, servers=[worker]) as s:
        future = way.submit(where, contract, s, workers=[worker])
        check_way(contract, future.result(timeout=60), name)


@pytest.mark.parametrize("contract", [pulls, pushes, futures, slices, *ROW_CONTRACTS])
def test_from_task_with_local_and_remote_shards(contract, cluster):
    """Some shards in the process of the task, some on another worker."""
    with cluster.as_current(), new(cluster) as s:
        local, messages, _ = cluster.submit(in_task, contract, s).result(timeout=60)
        assert messages > 0
        assert local > 0 or contract is futures


@pytest.fixture(scope="module")
def loop_of_async():
    """An event loop of its own, with an asynchronous client and workers on it."""
    runner = asyncio.Runner()
    with runner:
        with dask.config.set(IN_PROCESS):
            cluster, client = runner.run(start_async())
        yield runner, client
        runner.run(stop_async(cluster, client))


async def start_async():
    cluster = await LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, asynchronous=True, **QUIET
    )
    return cluster, await Client(cluster, asynchronous=True)


async def stop_async(cluster, client):
    await client.close()
    await cluster.close()


async def on_loop(contract, client):
    with client.as_current():
        async with await new(client) as s:
            await contract(s, awaited)
            return used(s)


async def on_loop_of(contract, address):
    async with Client(address, asynchronous=True) as client:
        return await on_loop(contract, client)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_from_asynchronous_client_in_the_process(contract, loop_of_async):
    runner, client = loop_of_async
    with dask.config.set(IN_PROCESS):
        check_way(contract, runner.run(on_loop(contract, client)), "process")


@pytest.mark.parametrize("contract", CONTRACTS)
def test_from_asynchronous_client_by_message(contract, rpc_cluster):
    found = asyncio.run(on_loop_of(contract, rpc_cluster.scheduler.address))
    check_way(contract, found, "rpc")


# -- what only threads can do ------------------------------------------------------


def as_numpy(store):
    """Check `np.asarray` and the `__array__` protocol of a parameter."""
    w = flat_start()["w"]
    found = np.asarray(store["w"])
    np.testing.assert_array_equal(found, w, strict=True)
    found[...] = 0  # the caller's own
    np.testing.assert_array_equal(np.array(store["w"]), w, strict=True)
    as_double = np.asarray(store["w"], dtype="f8")
    np.testing.assert_array_equal(as_double, w.astype("f8"), strict=True)
    np.testing.assert_array_equal(np.asarray(store["b"]), np.array(2.0), strict=True)
    assert np.asarray(store["e"]).shape == (0, 2)
    np.testing.assert_array_equal(np.sum(store["w"], axis=0), w.sum(axis=0))
    with pytest.raises(ValueError, match="copy=False"):
        np.array(store["w"], copy=False)


def test_asarray_from_client(rpc_cluster):
    with new(rpc_cluster) as s:
        as_numpy(s)


@pytest.mark.parametrize("where", ["task", "thread"])
def test_asarray_from_task(way, where):
    with new(way) as s:
        run = as_numpy if where == "task" else asarray_in_thread
        way.submit(run, s).result(timeout=60)


def asarray_in_thread(store):
    errors = []
    bound = store.bound()

    def work():
        try:
            as_numpy(bound)
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors, errors


# -- many at once ------------------------------------------------------------------


def push_ones(store, n):
    for _ in range(n):
        store.push({"w": np.ones(11, "f4")})


def test_concurrent_pushes_are_all_counted(way):
    """Four threads of the client and three tasks, each push counts once."""
    n = 25
    params = {"w": np.zeros(11, "f4")}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=3, client=way) as s:
        tasks = [way.submit(push_ones, s, n, pure=False) for _ in range(3)]
        threads = [threading.Thread(target=push_ones, args=(s, n)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        way.gather(tasks)
        np.testing.assert_array_equal(s["w"].pull(), -7.0 * n)
        assert s.versions == (7 * n,) * 3


def test_verbs_read_the_configuration_they_need_and_no_more(client, monkeypatch):
    ones, here = {"w": np.ones(3)}, threading.get_ident()
    read, get = [], config._read

    def counted(key):
        if threading.get_ident() == here:
            read.append(key)
        return get(key)

    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as s:
        s.pushpull(ones)
        monkeypatch.setattr(config, "_read", counted)
        w: Any = s["w"]
        verbs: Any = (s.push, s.add, s.assign, s.pushpull, w.push, w.add)
        for verb in verbs:
            read.clear()
            verb(ones if verb.__self__ is s else ones["w"])
            assert sorted(read) == ["finite", "timeout"]
        read.clear()
        s.push(ones, weight=2.0)
        s.pull()
        assert sorted(read) == ["finite", "timeout", "timeout"]
        # What is set meanwhile counts.
        nan = {"w": np.full(3, np.nan)}
        for verb in (s.push, s.add, s.assign):
            with pytest.raises(daskps.PushRejectedError, match="finite"):
                verb(nan)
            with dask.config.set({"daskps.finite": "allow"}):
                verb(nan)


def many_async(store, n):
    futures = [store.push_async({"w": np.ones(11, "f4")}) for _ in range(n)]
    return max(future.result(timeout=60) for future in futures)


@pytest.mark.parametrize("where", ["client", "task"])
def test_hundred_outstanding_pushes(way, where):
    """All are applied, under one identity: a shard has room for 1,024 of them."""
    params = {"w": np.zeros(11, "f4")}
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=3, client=way) as s:
        if where == "client":
            last = many_async(s, 100)
        else:
            last = way.submit(many_async, s, 100).result(timeout=60)
        assert last == 100
        np.testing.assert_array_equal(s["w"].pull(), -100.0)
        found = way.run(producers_of, s.uid)
        assert list(itertools.chain(*found.values())) == [1, 1, 1]


def producers_of(uid, dask_worker):
    from daskps.cluster.host.node import HOSTS
    from daskps.shards.memory.format import N_PRODUCERS

    hosted_shards = HOSTS[dask_worker.address].shards.items()
    found = [hosted for (store, _), hosted in hosted_shards if store == uid]
    return [int(s.shard.segment.current.fixed[N_PRODUCERS]) for s in found]

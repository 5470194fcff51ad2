"""Snapshots of stores that others push to. Real processes where timing matters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from dask.base import compute, optimize
from distributed import Client, Event, wait
from distributed.utils import get_mp_context

import daskps
from daskps import optim
from daskps.cluster.caller import routes, snapshots
from daskps.cluster.caller.producer import Producer
from daskps.cluster.host import cuts, snapshot_copies
from daskps.cluster.host.node import HOSTS
from daskps.cluster.host.snapshot_copies import GROUP_NBYTES, CopyGroup, groups_of
from daskps.cluster.keys import copy_key
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.packing import unpack_reply
from daskps.layout.spans import WEIGHTS, Span
from daskps.shards.frozen import FrozenShard
from daskps.shards.memory.segment import Segment
from daskps.testing import PushOracle
from tests.seams import bound_link, mutex_of, shards_of
from tests.snapshot_oracle import check
from tests.support import PATIENCE, gen_cluster, local_cluster, store, until

RNG = np.random.default_rng(7)
PARAMS = {
    "w": RNG.normal(size=(100, 33)).astype("f4"),
    "scalar": np.float64(3.5),
    "half": RNG.normal(size=7).astype("f2"),
    "int": np.arange(12).reshape(3, 4),
    "bool": np.array([True, False, True]),
    "none": np.zeros((0, 3)),
    "thin": np.zeros((4, 0), "f4"),
    "wide": RNG.normal(size=(2, 9)),
    "deep/er": RNG.normal(size=(3, 2, 5)),
}


def keys(client):
    """What all workers hold for Dask beside anchors."""
    held = client.run(lambda dask_worker: [str(k) for k in dask_worker.data])
    return {k for of in held.values() for k in of if "daskps-anchor" not in k}


def left(client):
    """Bytes that hosts still hold for snapshots."""
    return sum(
        client.run(
            lambda dask_worker: (
                __import__("daskps.cluster.host.host")
                .cluster.host.node.HOSTS[dask_worker.address]
                .snapshots.nbytes
            )
        ).values()
    )


def same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_snapshot_equals_a_pull_of_a_quiet_store(way, shards):
    s = store(way, params=PARAMS, shards=shards)
    version = s.push({"w": np.ones((100, 33), "f4")})
    wanted = s.pull()
    snapshot = s.snapshot()
    assert list(snapshot) == list(PARAMS)
    assert snapshot.version.pairs == tuple(enumerate(s.versions))
    assert snapshot.version == version == 1
    alone = {name: s[name].to_dask_array() for name in PARAMS}
    found = compute(dict(snapshot), alone)
    for name, array in snapshot.items():
        for values in found:
            same(np.asarray(values[name]), np.asarray(wanted[name]))
        assert alone[name].shape == array.shape == np.shape(wanted[name])
    # What happens later changes nothing.
    s.push({"w": np.ones((100, 33), "f4")})
    same(snapshot["w"].compute(), wanted["w"])


def test_work_on_chunks_stays_on_the_owners(client):
    s = store(client, params={"w": np.zeros((999, 501))})
    for array in (s.snapshot()["w"], s["w"].to_dask_array()):
        assert array.chunks == ((500, 499), (501,))
        done = client.persist(array + 1)
        wait(done)
        for i, owner in enumerate(s.placement):
            assert client.who_has(done)[done.name, i, 0] == (owner,)
        # Half a row travelled, no shard.
        copies = [k for k in keys(client) if k.startswith("daskps-snapshot-")]
        held = client.who_has([k for k in copies if "array" not in k])
        assert all(len(on) == 1 for on in held.values())


def test_tokens_and_names_follow_from_the_versions(client):
    s = store(client)
    one, two = s.snapshot(), s.snapshot()
    assert one == two
    assert dask.base.tokenize(one) == dask.base.tokenize(two)
    assert one["w"].name == two["w"].name
    s.push({"b": 1.0})
    later = s.snapshot()
    assert later != one
    assert dask.base.tokenize(later) != dask.base.tokenize(one)
    # Of "w" nothing but the versions of its shards is new.
    assert later["w"].name != one["w"].name
    assert s["w"].to_dask_array().name == s["w"].to_dask_array().name
    assert "daskps.Snapshot" in repr(one)
    assert "2 parameters" in repr(one)
    with pytest.raises(daskps.UnknownParameterError, match="'v'"):
        one["v"]
    assert "v" not in one
    assert len(one) == 2


def test_memory_goes_with_the_last_reference(client):
    s = store(client, params={"w": np.zeros((1000, 10))})
    snapshot, array = s.snapshot(), s["w"].to_dask_array()
    total = snapshot["w"].sum()
    assert left(client) == 0
    del snapshot
    assert total.compute() == 0
    del total
    assert array.sum().compute() == 0
    del array
    until(lambda: not keys(client))


def test_snapshot_outlives_its_store(client):
    s = store(client, params={"w": np.ones(10)})
    snapshot = s.snapshot()
    s.close()
    assert snapshot["w"].sum().compute() == 10
    with pytest.raises(daskps.StoreClosedError):
        s.snapshot()


def test_two_clients_at_once(client):
    s = store(client, name="shared", params={"w": np.ones(10)})
    with Client(client.scheduler_info()["address"], set_as_default=False) as second:
        other = daskps.open("shared", client=second)
        found: list[daskps.Snapshot] = []

        def take(handle):
            found.extend(handle.snapshot() for _ in range(3))

        threads = [threading.Thread(target=take, args=[h]) for h in (s, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 6
        assert len({dask.base.tokenize(x) for x in found}) == 1
        assert found[0]["w"].sum().compute() == 10
        found.clear()
    until(lambda: not keys(client))


def test_snapshot_inside_a_task():
    """The task leaves its thread meanwhile: its worker has no other."""

    def task(s):
        snapshot = s.snapshot()
        return snapshot["w"].sum().compute(), float(s["w"].to_dask_array().sum())

    with local_cluster(n_workers=2, threads=1) as client:
        s = store(client, params={"w": np.ones(10)})
        assert client.submit(task, s).result(timeout=PATIENCE) == (10, 10)
        assert client.submit(sum, [1, 2]).result() == 3


@gen_cluster(client=True)
async def test_snapshot_of_an_asynchronous_client(c, s, a, b):
    made = await daskps.aio.create({"w": np.ones((4, 3)), "b": 1.0}, client=c)
    snapshot = await made.snapshot()
    found = await c.compute(snapshot["w"].sum())
    assert found == 12
    alone = await made["w"].to_dask_array()
    assert await c.compute(alone.sum()) == 12
    for worker in (a, b):
        nbytes = [x.nbytes for x in worker.data.values() if isinstance(x, CopyGroup)]
        assert sum(nbytes) >= 48
        assert worker.metrics["daskps"](worker)["snapshots"] == 0
    await made.close()


@gen_cluster(client=True)
async def test_a_snapshot_takes_one_task_per_host_however_many_shards(c, s, a, b):
    """And its arrays none: what rows at the border of two hosts lack comes when computed."""
    params = {"w": np.arange(303.0).reshape(101, 3), "b": np.arange(40)}
    made = await daskps.aio.create(params, client=c, shards=40)
    before = set(s.tasks)
    snapshot = await made.snapshot()
    assert len(set(s.tasks) - before) == 2
    array = snapshot["w"]
    assert len(set(s.tasks) - before) == 2
    assert array.numblocks == (40, 1)
    same(await c.compute(array), params["w"])
    same(await c.compute(await made["w"].to_dask_array()), params["w"])
    found = await c.submit(lambda x: x["b"].sum().compute(), snapshot)
    assert found == params["b"].sum()
    await made.close()


def test_copies_of_one_host_lack_nothing_of_each_other(client, monkeypatch):
    """Also where each has a task of its own; a row of half a store has a home too."""
    monkeypatch.setattr(snapshot_copies, "GROUP_NBYTES", 1)
    values = np.arange(3.0 * 1001).reshape(3, 1001)
    one = list(client.scheduler_info()["workers"])[:1]
    s = store(client, params={"w": values}, shards=7, servers=one)
    same(s.snapshot()["w"].compute(), values)


def test_no_task_needs_two_groups_of_copies(client):
    """Of another host's copies no more travels than a row lacks, also when optimized."""
    s = store(client, params={"w": np.arange(3.0 * 1001).reshape(3, 1001)}, shards=4)
    [array] = optimize(s.snapshot()["w"])
    groups = set()
    for task in array.__dask_graph__().values():
        # The keys of groups are texts, and those of parts of arrays are tuples.
        [group] = [key for key in task.dependencies if isinstance(key, str)]
        groups.add(group)
    assert len(groups) > 1


def test_rows_that_end_at_another_host_are_of_one_moment(client):
    """Threads push; a snapshot has all of a push in every row, or nothing of it."""
    s = store(client, params={"w": np.zeros((3, 1001))}, shards=4)
    over = threading.Event()

    def push():
        while not over.is_set():
            s.add({"w": np.ones((3, 1001))})

    threads = [threading.Thread(target=push) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        found = [s.snapshot()["w"].compute() for _ in range(8)]
    finally:
        over.set()
        for thread in threads:
            thread.join()
    moments = [values[0, 0] for values in found]
    for values, moment in zip(found, moments, strict=True):
        assert (values == moment).all()
    assert moments == sorted(moments)
    assert moments[0] < moments[-1]


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_a_host_gives_no_edges_that_it_has_not(c, s, a):
    made = await daskps.aio.create({"w": np.arange(6.0), "b": np.ones(2)}, client=c)
    host = HOSTS[a.address]
    span = Span(WEIGHTS, 0, 0, 6)
    memory, places = np.arange(6.0).view(np.uint8), {(WEIGHTS, 0): ("float64", 6, 0)}
    copy = FrozenShard(memory, places)
    host.snapshots.claim(made.uid, "cut").copies["key"] = copy

    async def ask(key, *span):
        said = await host.handle_control("edges", wanted=[(key, span)])
        return unpack_reply(said, "the host")

    [found] = await ask("key", WEIGHTS, 0, 2, 5)
    assert np.frombuffer(found).tolist() == [2, 3, 4]
    for wrong in [
        ("other", WEIGHTS, 0, 0, 1),
        ("key", WEIGHTS, 1, 0, 1),
        ("key", "slot0", 0, 0, 1),
        ("key", WEIGHTS, 0, -1, 1),
        ("key", WEIGHTS, 0, 3, 2),
        ("key", WEIGHTS, 0, 0, 7),
    ]:
        with pytest.raises(daskps.errors.ConsistencyError):
            await ask(*wrong)
    twice = {"wanted": 2 * [("key", span)]}
    with pytest.raises(daskps.ProtocolError, match="some of it twice"):
        unpack_reply(await host.handle_control("edges", **twice), "the host")
    host.snapshots.drop(made.uid)
    await made.close()


def test_copies_that_are_large_have_tasks_of_their_own():
    sizes = dict.fromkeys(range(6), GROUP_NBYTES // 2) | {6: GROUP_NBYTES + 1, 7: 0}
    assert groups_of(sizes, list("abababaa")) == [
        ("a", [0, 2]),
        ("b", [1, 3]),
        ("a", [4]),
        ("b", [5]),
        ("a", [6]),
        ("a", [7]),
    ]


@gen_cluster(client=True)
async def test_values_on_the_event_loop(c, s, a, b):
    """What a validation during a run uses."""
    made = await daskps.aio.create(PARAMS, client=c, shards=3)
    shards = shards_of(made)
    taken = await snapshots.take_snapshot(shards, None, Deadline(10, "a snapshot"))
    found = await snapshots.values(taken)
    for name, wanted in PARAMS.items():
        same(found[name], np.asarray(wanted))
    await made.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_copy_that_outlives_its_cut_is_made_again(c, s, a, monkeypatch):
    """What came after the cut may be in it, and no word of the shard need say so."""
    made = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    [hosted] = HOSTS[a.address].shards.values()
    shard: Any = hosted.shard
    copy = Segment.copy
    copied: list[int] = []

    def late(segment, flip, parts):
        if not copied:
            shard.release_cut("its lease is over")
        copied.append(flip)
        return copy(segment, flip, parts)

    monkeypatch.setattr(Segment, "copy", late)
    shards = shards_of(made)
    await snapshots.take_snapshot(shards, None, Deadline(10, "a snapshot"))
    assert len(copied) == 2
    await made.close()


# -- pushes on their way ---------------------------------------------------------


def half_pushed(s, client, value=1.0):
    """Push to the first shard's host only, as if the rest were still on its way.

    Returns the identity of the push, and what sends the rest.
    """
    shards = shards_of(s)
    source = Producer()
    shards.link.run(lambda: source.identify(shards.link))
    grads = {0: np.full(10, value, "f4")}
    request = routes.push(
        shards.meta, grads, routes.Step(kind=routes.ADD, producer=source.id)
    )

    def send(shard):
        shards.remote.send(request, [shard], Deadline(PATIENCE, "half a push")).result()

    send(0)
    return source.id, lambda: send(1)


def until_held(s):
    """Push until a cut holds a push on the second shard; return all of them."""
    pushes = []

    def held():
        pushes.append(s.push_async({"w": np.ones(10, "f4")}))
        return s.stats()["shards"][1]["parked"]

    until(held)
    return pushes


def test_snapshot_waits_for_a_push_on_its_way(client):
    s = store(client)
    _, send_rest = half_pushed(s, client)
    found = []
    thread = threading.Thread(target=lambda: found.append(s.snapshot()))
    thread.start()
    pushes = until_held(s)
    assert not found
    send_rest()
    thread.join(timeout=PATIENCE)
    for push in pushes:
        push.result(timeout=PATIENCE)
    (snapshot,) = found
    first, second = dict(snapshot.version.pairs).values()
    assert 1 <= first == second < 1 + len(pushes)
    # An add of one, and gradients of one at a rate of 0.1.
    wanted = np.full(10, 1 - 0.1 * (first - 1), "f4")
    np.testing.assert_allclose(snapshot["w"].compute(), wanted, rtol=1e-5)


def test_snapshot_that_waits_too_long_names_the_push(client):
    s = store(client)
    owner, send_rest = half_pushed(s, client)
    with pytest.raises(
        TimeoutError, match=f"push 0 of producer {owner} to reach shard"
    ):
        s.snapshot(timeout=0.5)
    # Nobody is held any more, and no memory either.
    assert s.add({"w": np.ones(10, "f4")}) == 2
    until(lambda: left(client) == 0)
    send_rest()
    assert s.snapshot().version.pairs == ((0, 2), (1, 2))


def test_cancelled_snapshot_releases_the_shards(client, monkeypatch):
    # Only the end of the cut lets its pushes go.
    monkeypatch.setattr("daskps.cluster.directory.cuts.HOLD_SECONDS", 2 * PATIENCE)
    s = store(client)
    _, send_rest = half_pushed(s, client)
    link = bound_link(s)
    work = link.start(
        lambda: snapshots.take_snapshot(
            shards_of(s), None, Deadline(PATIENCE, "a snapshot")
        )
    )
    pushes = until_held(s)
    work.cancel()
    with pytest.raises(CancelledError):
        work.result()
    for push in pushes:
        push.result(timeout=PATIENCE)
    until(lambda: left(client) == 0)
    send_rest()


def test_push_that_was_given_up_blocks_no_snapshot(client):
    """Its producer says so on its own: no later push of it says it."""
    s = store(client)
    owner, _ = half_pushed(s, client)
    shards_of(s).acknowledge(owner, 1)
    snapshot = s.snapshot(timeout=PATIENCE)
    assert snapshot.version.pairs == ((0, 1), (1, 0))


def test_producer_announces_what_it_gave_up():
    """Once nothing older is under way, and each thing once."""
    source, told = Producer(), []
    source.id, deadline = 7, Deadline(1, "a turn")

    def announce(owner, floor):
        told.append(floor)

    with source.turn(deadline, announce) as turn:
        assert (turn.number, turn.floor) == (0, 0)
    with pytest.raises(KeyError), source.turn(deadline, announce):
        raise KeyError
    assert told == [2]
    with source.turn(deadline, announce) as older:
        with pytest.raises(KeyError), source.turn(deadline, announce) as newer:
            raise KeyError
        assert (older.floor, newer.floor) == (2, 2)
        # The older one is under way: nothing below it is new.
        assert told == [2]
    assert told == [2, 4]
    with source.turn(deadline, announce) as turn:
        assert turn.floor == 4
    assert told == [2, 4]


def test_timed_out_push_blocks_no_snapshot(client):
    """A real one: the second host does not get it, and its caller gives up."""
    s = store(client)
    remote = shards_of(s).remote
    send, second = remote._send, s.placement[1]

    async def lose(worker, request, shards, seconds):
        if worker == second:
            await asyncio.wait_for(asyncio.Event().wait(), seconds)
        return await send(worker, request, shards, seconds)

    remote._send = lose
    with pytest.raises(TimeoutError):
        s.push({"w": np.ones(10, "f4")}, timeout=0.3)
    assert s.snapshot(timeout=PATIENCE).version.pairs == ((0, 1), (1, 0))
    remote._send = send
    s.push({"w": np.ones(10, "f4")})
    assert s.snapshot(timeout=PATIENCE).version.pairs == ((0, 2), (1, 1))


def test_producer_that_ended_is_excused(client):
    """Its client went in the middle of a push."""
    s = store(client, name="orphaned")
    with Client(client.scheduler_info()["address"], set_as_default=False) as second:
        half_pushed(daskps.open("orphaned", client=second), second)
    assert s.snapshot(timeout=PATIENCE).version.pairs == ((0, 1), (1, 0))


def test_hosts_release_a_cut_that_was_left_to_itself(client):
    """The directory never comes back: pushes wait as long as the lease."""
    s = store(client)
    link = bound_link(s)
    about = {"store": s.uid, "cut": "orphan", "index": None}
    for worker in s.placement:
        begin = {"attempt": 1, "lease_seconds": 0.3}
        link.run(lambda w=worker, b=begin: link.control(w, "begin_cut", **about, **b))
    assert s.push({"w": np.ones(10, "f4")}, timeout=PATIENCE) == 1


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)])
async def test_cut_given_up_while_it_begins_holds_nothing(c, s, a):
    """The beginning waits for the mutex of the first shard, the end overtakes it."""
    made = await daskps.aio.create({"w": np.ones(10)}, client=c, shards=2)
    host = HOSTS[a.address]
    first, second = (host.shards[made.uid, i] for i in (0, 1))
    about: Any = {"store": made.uid, "cut": "short"}
    await cuts.prepare_cut(host, index=None, **about)
    with mutex_of(first):
        begun = asyncio.ensure_future(
            cuts.begin_cut(host, attempt=1, index=None, lease_seconds=60, **about)
        )
        await asyncio.sleep(0)
        dropped = asyncio.ensure_future(cuts.drop_cut(host, **about))
        await asyncio.sleep(0)
    first.serve()
    await dropped
    with pytest.raises(daskps.ConsistencyError, match="given up"):
        await begun
    assert first.shard.cut is None
    assert second.shard.cut is None
    assert host.snapshots.nbytes == 0
    assert await made.add({"w": np.ones(10)}, timeout=PATIENCE) == 1
    with pytest.raises(daskps.ConsistencyError, match="is over"):
        await cuts.prepare_cut(host, index=None, **about)
    await made.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)])
async def test_a_late_word_of_an_attempt_leaves_the_next_one_alone(c, s, a):
    """On a busy machine the release of one attempt comes after the next has copied."""
    made = await daskps.aio.create({"w": np.ones(10)}, client=c)
    host = HOSTS[a.address]
    hosted = host.shards[made.uid, 0]
    about: Any = {"store": made.uid, "cut": "slow"}
    more: Any = {"index": None, "lease_seconds": 60}
    await cuts.prepare_cut(host, index=None, **about)
    for attempt in (1, 2):
        await cuts.begin_cut(host, attempt=attempt, **more, **about)
    with pytest.raises(daskps.ConsistencyError, match="begun again"):
        await cuts.begin_cut(host, attempt=1, **more, **about)
    await cuts.drop_cut(host, **about, attempt=1)
    assert hosted.shard.cut is not None
    order = {"missing": [], "run": 0, "rounds": 0}
    copied: Any = {"attempt": 2, "index": None, "order": order}
    assert await cuts.fill_cut(host, **about, **copied) == [(0, 0, 128)]
    key = copy_key(made.uid, None, 0, 0)
    await cuts.drop_cut(host, attempt=1, **about)
    assert host.snapshots.find(key) is not None
    await cuts.drop_cut(host, **about, attempt=2)
    assert host.snapshots.find(key) is None
    await made.close()


# -- runs ------------------------------------------------------------------------


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


@pytest.mark.parametrize(
    "sync", ["bsp", pytest.param("ssp", marks=pytest.mark.slow), "asp"]
)
def test_snapshots_during_a_run_are_whole(client, sync):
    """Every step adds one everywhere: all elements are equal at any cut."""
    s = store(client, params={"w": np.zeros(1000)}, optimizer=optim.SGD(1.0))
    found: list[tuple[daskps.Version, np.ndarray]] = []
    done = threading.Event()

    def look():
        while not done.is_set():
            snapshot = s.snapshot()
            # Not `.compute()`: in a thread of ours Dask's default client is another.
            values = client.compute(snapshot["w"]).result()
            found.append((snapshot.version, values))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        X = np.zeros((200, 1))
        daskps.train(s, ones, X, sync=sync, batch_size=1, epochs=3, trainers=2)
    finally:
        done.set()
        thread.join()
    steps = 300 if sync == "bsp" else 600
    assert s.pull("w")["w"][0] == -steps
    assert len({values[0] for _, values in found}) > 2
    for version, values in found:
        assert len(set(values.tolist())) == 1
        assert {-values[0]} == {v for _, v in version.pairs}


# -- faults ----------------------------------------------------------------------


def test_snapshot_of_a_deleted_store_ends(client):
    """Deleted while the cut waits for a push."""
    s = store(client, name="doomed")
    half_pushed(s, client)
    caught = []

    def take():
        try:
            s.snapshot(timeout=PATIENCE)
        except daskps.StoreClosedError as error:
            caught.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    pushes = until_held(s)
    daskps.open("doomed").delete()
    thread.join(timeout=PATIENCE)
    assert caught
    # Released or refused, in time.
    for push in pushes:
        with contextlib.suppress(daskps.StoreClosedError):
            push.result(timeout=PATIENCE)
    until(lambda: left(client) == 0)


def test_lost_worker_is_named(monkeypatch):
    # Who is slow to kill it would find its push let go, and applied, in between.
    monkeypatch.setattr("daskps.cluster.directory.cuts.HOLD_SECONDS", 2 * PATIENCE)
    with local_cluster(n_workers=2, threads=1) as client:
        with dask.config.set({"daskps.carriers.machine": False}):
            # In private memory: nobody can adopt it.
            s = store(client)
        snapshot = s.snapshot()
        victim = s.placement[1]
        pid = client.run(os.getpid, workers=[victim])[victim]
        half_pushed(s, client)
        caught = []

        def take():
            with pytest.raises(daskps.ShardLostError, match="shard 1") as error:
                s.snapshot(timeout=PATIENCE)
            caught.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        pushes = until_held(s)
        os.kill(pid, signal.SIGKILL)
        # It does not wait for its timeout: that would be another error.
        thread.join()
        assert caught
        # The cut may have let the held one through, where the first shard had it before
        # its own part of the cut began: then this one alone meets the loss.
        pushes.append(s.push_async({"w": np.ones(10, "f4")}))
        errors = [push.exception(timeout=PATIENCE) for push in pushes]
        assert daskps.ShardLostError in map(type, errors)
        # The copies went too, which is said and never made up for.
        with pytest.raises(daskps.SnapshotLostError, match="another one") as lost:
            snapshot["w"].compute()
        assert lost.value.shard == 1
        assert lost.value.worker == victim
        assert isinstance(lost.value, daskps.ShardLostError)


def test_snapshot_of_a_busy_owner_waits_for_it():
    """Dask has an idle worker steal the task that takes the copies."""
    with local_cluster(n_workers=2, threads=1) as client:
        s = store(client, shards=1)
        held = [
            client.submit(Event("go").wait, workers=[*s.placement], pure=False)
            for _ in range(3)
        ]
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(s.snapshot, timeout=PATIENCE)

            def is_stolen():
                told = client.get_events("stealing")
                return taken.done() or "confirm" in str(told)

            until(is_stolen)
            Event("go", client=client).set()
            snapshot = taken.result(timeout=PATIENCE)
        np.testing.assert_array_equal(snapshot["w"].compute(), s.pull()["w"])
        del held


def test_snapshot_ends_with_its_scheduler():
    with local_cluster(n_workers=1, threads=1) as client:
        s = store(client)
        s.snapshot()
        client.shutdown()
        with pytest.raises(OSError, match="scheduler"):
            s.snapshot(timeout=PATIENCE)


# -- the promise -----------------------------------------------------------------


def test_every_shard_contains_the_same_pushes_of_every_producer(client, monkeypatch):
    """Four processes push, some of it to two of three shards; bits tell who is in."""
    # As workers: who is spawned imports everything.
    ready = SimpleNamespace(get_context=lambda spawn: get_mp_context())
    monkeypatch.setattr("tests.snapshot_oracle.multiprocessing", ready)
    oracle = PushOracle(shards=3, producers=4, pushes=250)
    s = daskps.create(
        oracle.params(), name="oracle", optimizer=optim.SGD(1.0), shards=3
    )
    n, faults, _ = check(client, oracle, s)
    assert faults == []
    assert n >= 5
    values = s.pull()
    assert oracle.total(values) == 1000
    assert oracle.faults(values) == []
    s.delete()


def test_oracle_sees_a_push_that_is_missing():
    oracle = PushOracle(shards=3, producers=2, pushes=100)
    values = oracle.params()
    for push in range(100):
        for name, grad in oracle.grads(1, push).items():
            values[name] -= grad
    assert oracle.faults(values) == []
    assert oracle.contained(values)[1][0] == set(range(100)) - set(range(0, 100, 15))
    values["o2"] += oracle.grads(1, 77)["o2"]
    assert oracle.faults(values) == ["push 77 of 1 is on [0, 1] only"]


def test_importing_daskps_leaves_dask_array_alone():
    code = "import daskps, sys; print('dask.array' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"

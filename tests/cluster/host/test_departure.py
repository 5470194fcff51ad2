"""Workers that close in order: others of their machine have their shards then."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

import daskps
from daskps import config, optim
from daskps.cluster.directory.directory import Directory
from daskps.cluster.directory.entry import LeftBy, StoreEntry
from daskps.cluster.directory.move import Move
from daskps.cluster.host import adoption as leaving
from daskps.cluster.host.adoption import _Adopter
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine.folder import folder_of
from daskps.cluster.machine.membership import Membership
from daskps.cluster.machine.registry import Role
from daskps.errors import StaleGenerationError
from daskps.shards.deputy import OPEN, RELEASED, NotHereError, gate_of, set_gate
from daskps.shards.memory.format import GENERATION
from daskps.shards.shard import Shard
from daskps.shards.steps import READ, Step, Ticket
from tests.cluster.hosted import LAYOUT, shared_shard
from tests.seams import registry_of
from tests.support import PATIENCE, gen_cluster, local_cluster, terminal_cluster, until

N_PUSHES = 10_000


# -- one shard ---------------------------------------------------------------


def ask(shard, hosted):
    """Ask a shard for a plain read; return what becomes of it."""
    step = Step(generation=shard.generation, wait=READ)
    ticket = Ticket(step, owner=SimpleNamespace(one_done=lambda: None))
    hosted.offer(ticket, 1.0)
    return ticket.outcome


def test_a_released_shard_serves_nobody_until_it_is_adopted(tmp_path):
    hosted, error = shared_shard(tmp_path), StaleGenerationError("gone")
    segment = hosted.shard.segment
    hosted.shard.generation = segment.words[GENERATION] = 1
    deputy = Shard.as_deputy(segment, {})
    released = hosted.release(error)
    assert not released.done()
    hosted.serve()
    assert released.done()
    assert hosted.is_released
    assert gate_of(segment) == RELEASED
    assert ask(hosted.shard, hosted) is error
    # Not what the directory asks meanwhile, either: an adopter has it perhaps.
    asked = hosted.enqueue(lambda shard: shard.set_gate())
    hosted.serve()
    assert asked.exception() is error
    assert gate_of(segment) == RELEASED
    ticket = Ticket(Step(generation=1, wait=READ), owner=None)
    assert deputy.submit([ticket]) == [ticket]
    assert isinstance(ticket.outcome, NotHereError)
    deputy.take_over()
    assert gate_of(segment) == OPEN


def test_a_shard_that_has_another_owner_is_left_alone(tmp_path):
    """Its former one was taken for dead, and has been adopted."""
    hosted = shared_shard(tmp_path)
    hosted.shard.segment.words[GENERATION] = hosted.shard.generation + 1
    hosted.release(StaleGenerationError("gone"))
    hosted.serve()
    assert hosted.is_released
    assert gate_of(hosted.shard.segment) == OPEN
    set_gate(hosted.shard.segment, RELEASED)


def test_who_has_left_adopts_nothing(tmp_path):
    """Else of two that leave at once one could take what the other lets go of."""
    one, other = Membership.join(tmp_path, "a"), Membership.join(tmp_path, "a")
    name = one.new_name()
    os.close(os.open(f"{one.path}/{name}", os.O_CREAT, 0o600))
    registry = registry_of(one)
    assert one.leave() == []
    taken = other.rename(name)
    assert os.listdir(other.path).count(taken) == 1
    assert other.leave() == [taken]
    assert not registry.n[Role.MEMBER]
    assert not os.listdir(tmp_path)


def test_a_shard_that_could_not_be_taken_over_is_released(tmp_path, monkeypatch):
    """Its heir lives on: by the name of the memory nobody else could have it."""
    hosted, memory = shared_shard(tmp_path), Membership.join(tmp_path, "a")
    block, dead = hosted.block, f"{5 << 22 | 1:016x}-{7:016x}"
    assert block is not None
    path = memory.path
    os.rename(f"{path}/{block.name}", f"{path}/{dead}")
    host: Any = SimpleNamespace(shards={})
    about: dict[str, Any] = {"cluster": "a", "name": "s", "rules": pickle.dumps({})}
    about["layout"] = LAYOUT.to_wire()
    rows = [(0, dead, block.nbytes, block.nonce, 2)]

    def full(_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Shard, "take_over", full)
        adopter = _Adopter(memory, "tcp://a", about, None)
        assert adopter.take_all(host, "s", rows) == []
        assert adopter.found == [{"shard": 0, "sight": "found", "why": ANY}]
    assert gate_of(hosted.shard.segment) == RELEASED
    adopter = _Adopter(memory, "tcp://a", about, None)
    [taken] = adopter.take_all(host, "s", rows)
    assert gate_of(hosted.shard.segment) == OPEN
    taken.close()
    memory.leave()


def test_who_has_just_adopted_a_shard_lets_go_of_it():
    """Its answer is on its way yet: the directory knows the shard as nobody's."""
    scheduler: Any = SimpleNamespace(handlers={}, workers={}, status=None)
    made, idle = Directory(scheduler), ("tcp://dead", "tcp://other")
    more: Any = ("C", False, {}, idle, {}, 1.0, b"", {})
    for uid in ("away", "lost", "whole"):
        made.stores[uid] = StoreEntry(uid, uid, *more)
    made.stores["away"].set_away([0], "left")
    made.stores["lost"].lost[0] = ("tcp://dead", "died")
    said = asyncio.run(made.drains.on_leaving("tcp://heir"))
    assert said == {"waits": False, "stores": ["away", "lost"]}


@pytest.mark.parametrize(
    ("in_order", "is_lost", "waits"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
@pytest.mark.parametrize("itself", [False, True])
def test_memory_of_the_dead_is_awaited_until_it_is_lost(
    in_order, is_lost, waits, itself
):
    """Else the last worker to close would take it along, as one that hardly came."""

    async def asked() -> bool:
        left_by = LeftBy("tcp://127.0.0.1:1", "left", in_order=in_order)
        scheduler: Any = SimpleNamespace(handlers={})
        made = Directory(scheduler)
        more: Any = ("C", False, {}, (left_by.worker,), {}, 1.0, b"", {})
        entry = made.stores["s"] = StoreEntry("s", "s", *more)
        made.moves._open.append(Move(made.moves, entry, [0], left_by))
        if is_lost:
            entry.lost[0] = left_by[:2]
        who = left_by.worker if itself else "tcp://127.0.0.1:2"
        return made.moves.awaits_shards(who)

    assert asyncio.run(asked()) == (waits and not itself)


def test_a_host_ends_whatever_becomes_of_its_question():
    ended: list[bool] = []

    async def directory(*_: Any, **__: Any) -> None:
        raise RuntimeError("the pool of connections is closed")

    def close(reason: str, *, keeps: bool) -> list[str]:
        ended.append(keeps)
        return []

    worker = SimpleNamespace(directory=directory, address="tcp://a:1")
    host: Any = SimpleNamespace(
        shards={}, going={}, coming={}, worker=worker, close=close
    )
    with pytest.raises(RuntimeError, match="is closed"):
        asyncio.run(leaving.leave(host, "closes"))
    assert ended == [False]


# -- hosts in one process ----------------------------------------------------


async def actions(c):
    return [event["action"] for _, event in await c.get_events("daskps")]


@gen_cluster(client=True)
async def test_shards_of_a_worker_that_closes_go_to_another(c, s, a, b):
    """With what waits for them, which is sent again."""
    made = await daskps.aio.create({"w": np.zeros(4)}, client=c, optimizer=optim.Adam())
    version = await made.push({"w": np.ones(4)})
    waiting = made.pull_async(min_version=version + 1)
    await a.close()
    await made.push({"w": np.ones(4)})
    assert await actions(c) == ["store-created", "shards-adopted"]
    assert set(made.placement) == {b.address}
    np.testing.assert_array_equal((await waiting)["w"], (await made.pull())["w"])
    assert {row["generation"] for row in (await made.stats())["shards"]} == {1, 2}
    await made.close()


@gen_cluster(client=True, nthreads=[("", 1)] * 3)
async def test_an_heir_that_leaves_at_once_loses_nothing(c, s, a, b, d, monkeypatch):
    """It has the shards, and closes before the directory has noted that."""
    more: Any = {"optimizer": optim.Adam(), "servers": [a.address]}
    made = await daskps.aio.create({"w": np.zeros(6)}, client=c, **more)
    await made.push({"w": np.ones(6)})
    wanted = (await made.pull())["w"]
    heirs, adopt = dict[str, Any](), Move.ask_to_adopt
    taken_over, may_hear = asyncio.Event(), asyncio.Event()

    async def late(move, by, shards):
        found = await adopt(move, by, shards)
        if any("name" in answer for answer in found) and not heirs:
            heirs[by] = found
            taken_over.set()
            await may_hear.wait()
        return found

    monkeypatch.setattr(Move, "ask_to_adopt", late)
    await a.close()
    await asyncio.wait_for(taken_over.wait(), PATIENCE)
    [heir] = [w for w in (b, d) if w.address in heirs]
    await heir.close()
    may_hear.set()
    np.testing.assert_array_equal((await made.pull())["w"], wanted)
    await made.close()


@gen_cluster(client=True)
async def test_the_last_of_a_machine_frees_all(c, s, a, b, caplog):
    """No file, and a typed error at once: nobody could come who has the memory."""
    made = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    path = folder_of(config.load().shared_memory, s.id)
    assert len(os.listdir(path)) == 3
    await asyncio.gather(a.close(), b.close())
    # Later it would be lost for want of a sign of life.
    with pytest.raises(daskps.ShardLostError, match="all others of its machine"):
        await made.pull()
    assert os.path.basename(path) not in os.listdir(config.load().shared_memory)
    assert (await actions(c)).count("shards-adopted") == 0
    # Nothing red where a cluster is closed.
    red = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [r for r in red if r.name.startswith("daskps")]
    await made.close()


@gen_cluster(client=True)
async def test_the_last_one_frees_what_it_was_about_to_adopt(c, s, a, b, monkeypatch):
    """It has renamed the memory already, which the directory has not heard."""
    made = await daskps.aio.create({"w": np.zeros(4)}, client=c, servers=[a.address])
    renamed, goes_on, take_over = asyncio.Event(), threading.Event(), Shard.take_over
    loop = asyncio.get_running_loop()

    def slowly(shard):
        loop.call_soon_threadsafe(renamed.set)
        goes_on.wait(PATIENCE)
        take_over(shard)

    monkeypatch.setattr(Shard, "take_over", slowly)
    await a.close()
    await asyncio.wait_for(renamed.wait(), PATIENCE)
    await b.close()
    with pytest.raises(daskps.ShardLostError, match="all others of its machine"):
        await made.pull()
    goes_on.set()
    await made.close()


@gen_cluster(client=True)
async def test_nothing_is_handed_over_of_a_store_that_was_freed(c, s, a, b):
    """As in `client.restart`, whose message to free it a worker may never get."""
    made = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    path = folder_of(config.load().shared_memory, s.id)
    book = s.extensions["daskps-directory"]

    async def silent(*args, **kwargs):
        return None

    book.hosts.control = silent
    book.restarted()
    await a.close()
    assert len(os.listdir(path)) == 2
    with pytest.raises(daskps.StoreClosedError):
        await made.pull()
    [hosted] = HOSTS[b.address].shards.values()
    assert gate_of(hosted.shard.segment) == OPEN


@gen_cluster(client=True)
async def test_a_directory_that_is_silent_is_not_waited_for(c, s, a, b, monkeypatch):
    """It hears by itself that the worker is gone; what others may have stays."""
    monkeypatch.setattr(leaving, "TELL_SECONDS", 0.01)
    made = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    forever = asyncio.Event()

    async def hang(**kwargs):
        await forever.wait()

    told, s.handlers["daskps_directory"] = s.handlers["daskps_directory"], hang
    await a.close()
    s.handlers["daskps_directory"] = told
    forever.set()
    await made.pull()
    assert await actions(c) == ["store-created", "shards-adopted"]
    await made.close()


@gen_cluster(client=True)
async def test_nothing_is_made_on_a_worker_that_closes(c, s, a, b):
    """Dask ends its plugins before its connections, so it is asked meanwhile."""
    made = await daskps.aio.create({"w": np.zeros(4)}, servers=[b.address], client=c)
    HOSTS[a.address].is_leaving = True
    with pytest.raises(daskps.ShardLostError, match="closes") as caught:
        await daskps.aio.create({"w": np.zeros(4)}, servers=[a.address], client=c)
    assert caught.value.worker == a.address
    assert len(await daskps.aio.list_stores(client=c)) == 1
    await made.close()


@gen_cluster(client=True)
async def test_a_host_that_has_closed_refuses_work_by_type(c, s, a, b):
    made = await daskps.aio.create({"w": np.zeros(4)}, servers=[b.address], client=c)
    host = HOSTS[a.address]
    await a.close()
    await made.close()
    with pytest.raises(StaleGenerationError, match="closes and has no shard"):
        await host.in_thread(int)


@gen_cluster(client=True)
async def test_work_that_a_closing_host_leaves_is_refused_by_type(c, s, a, b):
    """Not with a cancellation, which nobody has asked for and Dask takes for its own."""
    made = await daskps.aio.create({"w": np.zeros(4)}, servers=[b.address], client=c)
    host, free = HOSTS[a.address], threading.Event()
    n = config.load().threads
    busy = [asyncio.ensure_future(host.in_thread(free.wait)) for _ in range(n)]
    queued, given_up = (asyncio.ensure_future(host.in_thread(int)) for _ in "xy")
    await asyncio.sleep(0)
    given_up.cancel()
    closing = asyncio.ensure_future(a.close())
    with pytest.raises(StaleGenerationError, match="closes and has no shard"):
        await queued
    with pytest.raises(asyncio.CancelledError):
        await given_up
    free.set()
    assert await asyncio.gather(*busy) == [True] * n
    await closing
    await made.close()


@gen_cluster(client=True)
async def test_a_locked_shard_is_left_as_by_a_worker_that_died(c, s, a, b, monkeypatch):
    monkeypatch.setattr(leaving, "LOCK_SECONDS", 0.01)
    made = await daskps.aio.create({"w": np.zeros(4)}, servers=[a.address], client=c)
    [hosted] = HOSTS[a.address].shards.values()
    block: Any = hosted.block
    lock = block.lock()
    assert lock.try_acquire()
    closing = asyncio.ensure_future(a.close())
    await closing
    lock.release()
    assert hosted.is_shared
    hosted.serve()
    await made.pull()
    assert set(made.placement) == {b.address}
    await made.close()


# -- real processes ----------------------------------------------------------


def add_one_by_one(handle, start, step, found):
    for i in range(start, N_PUSHES, step):
        if found.stop.is_set():
            return
        delta = np.zeros(N_PUSHES)
        delta[i] = 1
        handle.add({"w": delta})
        found.acknowledged.append(i)


@contextmanager
def pushes(store):
    """Push from two threads; at the end each acknowledged push counts once."""
    found = SimpleNamespace(stop=threading.Event(), acknowledged=[])
    threads = [
        threading.Thread(target=add_one_by_one, args=(store, k, 2, found))
        for k in range(2)
    ]
    for thread in threads:
        thread.start()

    def more():
        n = len(found.acknowledged) + 20
        until(lambda: len(found.acknowledged) >= n)

    more()
    yield more
    more()
    found.stop.set()
    for thread in threads:
        thread.join()
    counts = store.pull()["w"]
    np.testing.assert_array_equal(counts[found.acknowledged], 1)
    assert counts.sum() == len(found.acknowledged)


@pytest.fixture(scope="module")
def machine():
    with local_cluster(n_workers=4, threads=1) as client:
        yield client


def scale(client, n):
    client.cluster.scale(n)
    until(lambda: len(client.cluster.scheduler.workers) == n)


def test_scaled_down_and_retired_under_pushes(machine):
    """From four workers to one; nothing that was acknowledged is lost.

    Also of a store with second copies, as long as there are workers for these.
    """
    with machine.as_current():
        s = daskps.create({"w": np.zeros(N_PUSHES)}, shards=8)
        copied = daskps.create({"w": np.zeros(N_PUSHES)}, copies=2)
        with pushes(s) as more, pushes(copied):
            # Dask's call ends before the worker does: until that lets go it serves.
            machine.retire_workers([s.placement[0]])
            until(lambda: has(s, 3))
            more()
            machine.cluster.scale(1)
            until(lambda: has(s, 1) and has(copied, 1))
        assert min(r["generation"] for r in s.stats()["shards"]) >= 1
        assert "shards-lost" not in {
            e["action"] for _, e in machine.get_events("daskps")
        }
        s.close()
        copied.close()


def ones_slowly(params, X, y):
    # Nothing is waited for: the end must find the trainer at work.
    threading.Event().wait(0.002)
    return {name: np.ones_like(value) for name, value in params.items()}


def retire(client, victim):
    client.retire_workers([victim])


def terminate(client, victim):
    [pid] = client.run(os.getpid, workers=[victim]).values()
    os.kill(pid, signal.SIGTERM)


def scale_down(client, victim):
    client.cluster.scale(2)


@pytest.mark.parametrize(
    ("end", "sync", "execution"),
    [
        (retire, "bsp", "resident"),
        (terminate, "bsp", "graph"),
        (terminate, "ssp", "resident"),
        (scale_down, "asp", "resident"),
    ],
)
def test_a_run_goes_on_where_a_worker_ends_in_order(end, sync, execution):
    """One that trains and holds a shard; constant gradients count the steps."""
    # A round of the graph takes ten times as long.
    rows, trainers = 150 if execution == "resident" else 75, 3
    with local_cluster(n_workers=3, threads=1) as client:
        s = daskps.create({"w": np.zeros(6)}, optimizer=optim.SGD(1.0))
        victim, ended = s.placement[1], list[int]()

        class End:
            def on_round(self, run):
                if run.clock > 20 and not ended:
                    ended.append(run.clock)
                    end(client, victim)

        result = daskps.train(
            s,
            ones_slowly,
            np.zeros((rows, 1)),
            batch_size=1,
            epochs=2,
            trainers=trainers,
            sync=sync,
            execution=execution,
            callbacks=[End()],
        )
        assert ended
        steps = 2 * rows // trainers * (1 if sync == "bsp" else trainers)
        np.testing.assert_array_equal(result.weights["w"], -float(steps))
        assert [row["version"] for row in s.stats()["shards"]] == [steps] * 3
        assert max(row["generation"] for row in s.stats()["shards"]) >= 1


def test_scale_to_zero_frees_all(machine):
    with machine.as_current():
        scale(machine, 2)
        path = folder_of(config.load().shared_memory, machine.cluster.scheduler.id)
        s = daskps.create({"w": np.zeros(4)})
        scale(machine, 0)
        # A worker that cannot say within a second what it frees is not waited for.
        with pytest.raises(daskps.ShardLostError, match="was closed"):
            s.pull()
        until(lambda: not os.path.exists(path))
        s.close()


def test_a_heartbeat_that_the_scheduler_does_not_know(machine):
    """Its worker closes; until then it serves its shards."""
    with machine.as_current():
        scale(machine, 2)
        s = daskps.create({"w": np.zeros(N_PUSHES)}, shards=2)
        victim = s.placement[0]

        async def remove(dask_scheduler):
            await dask_scheduler.remove_worker(
                victim, stimulus_id="a test", close=False
            )

        with pushes(s) as more:
            machine.run_on_scheduler(remove)
            until(lambda: victim not in s.placement)
            more()
        s.close()


def has(store, n):
    """Whether so many workers hold its shards."""
    return len(set(store.placement)) == n


@pytest.fixture
def terminals(tmp_path):
    with terminal_cluster(tmp_path / "scheduler.json") as made:
        yield made


def test_sigterm_under_pushes(terminals):
    """With a nanny and without; the last one ends by Ctrl-C and leaves no file."""
    client, workers = terminals
    with client.as_current():
        s = daskps.create({"w": np.zeros(N_PUSHES)}, shards=3)
        path = folder_of(config.load().shared_memory, client.run_on_scheduler(_id))
        with pushes(s) as more:
            for n, worker in ((2, workers[0]), (1, workers[1])):
                worker.send_signal(signal.SIGTERM)
                until(partial(has, s, n))
                more()
        assert os.path.isdir(path)
        waiting = s.pull_async(min_version=10**9)
        workers[2].send_signal(signal.SIGINT)
        with pytest.raises(daskps.ShardLostError, match="all others of its machine"):
            waiting.result(PATIENCE)
        until(lambda: not os.path.exists(path))


def _id(dask_scheduler):
    return dask_scheduler.id

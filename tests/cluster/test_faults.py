"""Workers, clients and calls that end in the middle. Real processes, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from typing import Any

import dask
import numpy as np
import pytest
from distributed import get_worker

import daskps
from daskps import optim
from daskps.cluster.protocol.deadline import Deadline
from daskps.testing import kill_owner
from tests.cluster import killing_trainers
from tests.seams import shards_of
from tests.support import CARRIERS, PATIENCE, gen_cluster, local_cluster, store, until

SGD = optim.SGD(0.1)


def pid_of(client, address):
    return client.run(os.getpid, workers=[address])[address]


def other(client, address):
    return next(w for w in client.nthreads() if w != address)


@pytest.fixture
def fresh():
    """A cluster of its own, for tests that kill."""
    with local_cluster(threads=1) as client:
        yield client


@pytest.fixture
def apart():
    """The same as between machines: what a worker held goes with it."""
    with (
        dask.config.set({"daskps.carriers.machine": False}),
        local_cluster(threads=1) as client,
    ):
        yield client


def test_killed_owner_gives_shard_lost_error(apart):
    """Every later call names shard, worker and reason, and the client stays usable."""
    s = store(apart)
    victim = s.placement[0]
    kill_owner(apart, s)
    for call in (s.pull, lambda: s.push({"w": np.ones(10, "f4")})):
        with pytest.raises(daskps.ShardLostError, match="shard 0") as caught:
            call()
        assert caught.value.worker == victim
        assert "died" in caught.value.reason
    assert apart.submit(sum, [1, 2]).result() == 3
    # The other shard still answers; nothing was made anew behind our back.
    again = store(apart)
    assert again.version == 0


def test_call_in_flight_ends_when_its_owner_dies(apart):
    """A pull that waits on a shard ends when the worker is killed, not later."""
    s = store(apart, servers=[next(iter(apart.nthreads()))])
    victim = s.placement[0]
    waiting = s.pull_async(min_version=10**6, timeout=60)
    until(lambda: s.stats()["shards"][0]["parked"] == 1)
    os.kill(pid_of(apart, victim), signal.SIGKILL)
    # Later it would be a TimeoutError.
    with pytest.raises(daskps.ShardLostError):
        waiting.result()


def test_retired_owner_gives_shard_lost_error(apart):
    """Where no other worker has room for its shards; else it sends them."""
    s = store(apart)
    waiting = s.pull_async(min_version=10**6)
    until(lambda: s.stats()["shards"][0]["parked"] == 1)

    def fill(dask_scheduler):
        for ws in dask_scheduler.workers.values():
            ws.memory_limit = 1

    apart.run_on_scheduler(fill)
    apart.retire_workers([s.placement[0]])
    with pytest.raises(daskps.ShardLostError):
        waiting.result(timeout=30)
    with pytest.raises(daskps.ShardLostError, match="removed"):
        s.pull()


def test_train_ends_with_shard_lost_error(apart):
    s = store(apart)
    victim = s.placement[1]
    pid = pid_of(apart, victim)

    class Kill:
        def on_epoch(self, run):
            if len(run.history) == 1:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(daskps.ShardLostError):
        daskps.train(
            s, ones, np.zeros((64, 1)), epochs=10**6, batch_size=8, callbacks=[Kill()]
        )
    assert apart.submit(sum, [1, 2]).result() == 3


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


def slow_ones(params, X, y):
    # Nothing is waited for: the kill must find the trainer at work.
    threading.Event().wait(0.002)
    return ones(params, X, y)


@pytest.mark.parametrize(
    "sync", ["bsp", *(pytest.param(s, marks=pytest.mark.slow) for s in ("ssp", "asp"))]
)
def test_trainer_that_dies_goes_on_at_its_clock(sync):
    """SGD on constant gradients counts steps: none is lost, none is doubled."""
    with local_cluster(n_workers=3, threads=1) as client:
        a, _, c = client.nthreads()
        s = killing_trainers.store_on([a], client)
        pid = pid_of(client, c)
        killed: list[int] = []

        class Kill:
            def on_round(self, run):
                if run.clock > 20 and not killed:
                    killed.append(run.clock)
                    os.kill(pid, signal.SIGKILL)

        n, epochs = 40, 3
        how = {"trainers": 3, "sync": sync, "callbacks": [Kill()]}
        result = killing_trainers.train(s, n, epochs, **how)
        assert killed
        # Of rows, too, whose ids are drawn: the next trainer draws the same.
        assert killing_trainers.is_exact(s, 3, n, epochs)
        assert result.version == n * epochs * (1 if sync == "bsp" else 3)
        assert result.stats.lost_trainers >= 1


def test_trainer_lost_with_raise(fresh):
    a = next(iter(fresh.nthreads()))
    b = other(fresh, a)
    s = daskps.create({"w": np.zeros(4)}, optimizer=SGD, servers=[a])
    pids = [pid_of(fresh, b)]

    class Kill:
        def on_round(self, run):
            # Once: there may be another round before anybody hears of it.
            if run.clock > 5 and pids:
                os.kill(pids.pop(), signal.SIGKILL)

    with pytest.raises(daskps.RunCancelledError, match="on_trainer_lost"):
        daskps.train(
            s,
            slow_ones,
            np.zeros((10**5, 1)),
            batch_size=1,
            on_trainer_lost="raise",
            callbacks=[Kill()],
        )
    assert s.version >= 5


def endless(trainer, part):
    while True:
        trainer.pushpull({"w": np.ones(4)})


def test_run_is_not_resumable_by_default(fresh):
    a = next(iter(fresh.nthreads()))
    s = daskps.create({"w": np.zeros(4)}, optimizer=SGD, servers=[a])
    pid = pid_of(fresh, other(fresh, a))

    def kill():
        until(lambda: s.version > 5)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(daskps.RunCancelledError, match="resumable"):
        daskps.run(s, endless, [0, 1])
    killer.join()


def count_to(trainer, part):
    for _ in range(trainer.clock, part):
        trainer.pushpull({"w": np.ones(4)})
    return trainer.clock


def test_resumable_run_begins_at_its_clock():
    with local_cluster(n_workers=3, threads=1) as client:
        a, b, _ = client.nthreads()
        s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0), servers=[a])
        pid = pid_of(client, b)

        def kill():
            until(lambda: s.version > 100)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        clocks = daskps.run(s, count_to, [1500, 1500, 1500], resumable=True)
        killer.join()
        assert clocks == [1500, 1500, 1500]
        np.testing.assert_array_equal(s["w"].pull(), -1500.0)
        # The error of the trainer that was lost keeps no future of the run.
        s.close()
        until(lambda: not client.run_on_scheduler(keys_of_tasks))


def keys_of_tasks(dask_scheduler):
    return list(dask_scheduler.tasks)


def reduce_to(trainer, part):
    """All-reduce what nobody can bring a second time, three times between two ticks.

    Between two barriers nobody can deliver the next step.
    """
    steps, store = part
    found, last = {}, None
    for clock in range(trainer.clock, steps):
        trainer.barrier()
        assert store["w"].pull().tolist() == [-clock] * 4
        trainer.barrier()
        large = trainer.allreduce(np.random.default_rng().random(100_000))
        small = trainer.allreduce(np.random.default_rng().random())
        found[clock] = large.sum(), float(small), int(trainer.allreduce(1))
        last = trainer.push({"w": np.ones(4)})
    return found, int(last or 0)


def test_what_all_call_comes_to_the_same_for_a_trainer_that_starts_again():
    """Its worker dies, with what its shard's host had of all-reduces."""
    with local_cluster(n_workers=3, threads=2) as client:
        s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0))
        pid = pid_of(client, s.placement[0])

        def kill():
            until(lambda: s.version > 5)
            os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        parts = [(60, s)] * 3
        found = daskps.run(s, reduce_to, parts, resumable=True, timeout=120)
        killer.join()
        for clock in range(60):
            assert len({of[clock] for of, _ in found if clock in of}) == 1
        assert found[0][0][59][2] == 3
        np.testing.assert_array_equal(s["w"].pull(), -60.0)


def reduce_and_die(trainer, part):
    """Let trainer 0 pass an all-reduce, and kill all that have heard its result."""
    store, dead = part
    for clock in range(trainer.clock, 3):
        pids = trainer.allreduce(np.eye(2)[trainer.rank] * os.getpid())
        if trainer.rank == 1 and clock == 1 and not dead.exists():
            until(lambda: store["w"].pull()[0] == -3)
            dead.touch()
            os.kill(int(pids[0]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.push({"w": np.ones(4)})


def test_an_all_reduce_that_died_with_all_who_had_it_is_no_hang(tmp_path):
    """Trainer 0 has ended its step and brings nothing to it again."""
    with local_cluster(n_workers=3, threads=2):
        s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0))
        parts = [(s, tmp_path / "dead")] * 2
        says = r"allreduce 1 of run \d+ went with the workers that had its result"
        with pytest.raises(daskps.ConsistencyError, match=says):
            daskps.run(s, reduce_and_die, parts, sync="asp", resumable=True, timeout=60)
        np.testing.assert_array_equal(s["w"].pull(), -3.0)


CLIENT = """
import sys, numpy as np, daskps
from distributed import Client
client = Client(sys.argv[1])
store = daskps.create({"w": np.zeros(1000)}, copies=2)
daskps.create({"w": np.zeros(1000)}, name="kept", overwrite=True, copies=2)
print(store.uid, flush=True)
sys.stdin.read()
"""


def held(client):
    """Return the store of each worker's shards, and of its second copies."""

    def shards(dask_worker):
        from daskps.cluster.host.node import HOSTS

        host = HOSTS[dask_worker.address]
        return [*{uid for uid, _ in host.shards}, *{uid for uid, _ in host.coming}]

    return [uid for uids in client.run(shards).values() for uid in uids]


def test_store_of_a_client_that_vanished_is_freed(client):
    """With its second copies. The client's named store stays, and has both."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, client.scheduler.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        uid = process.stdout.readline().strip()
        assert held(client).count(uid) == 4
        process.kill()
        until(lambda: uid not in held(client))
        assert "kept" in [info.name for info in daskps.list_stores()]
        kept = daskps.open("kept")
        kept.add({"w": np.ones(1000)})
        np.testing.assert_array_equal(kept["w"].pull(), 1.0)
        assert held(client).count(kept.uid) == 4
    finally:
        process.kill()
        process.communicate()


def test_closed_store_is_freed_on_all_workers(client):
    s = store(client)
    assert held(client).count(s.uid) == 2
    s.close()
    until(lambda: s.uid not in held(client), 10)


RUN = """
import sys, numpy as np, daskps
from distributed import Client
def loop(trainer, part):
    while True:
        trainer.pushpull({"w": np.ones(4)})
client = Client(sys.argv[1])
store = daskps.open("victim")
print("on", flush=True)
daskps.run(store, loop, [0, 1])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.usefixtures("interruptible")
def test_run_of_a_client_that_left_is_fenced(client, how):
    """Its trainers stop, and the store takes the next run."""
    s = daskps.create({"w": np.zeros(4)}, optimizer=SGD, name="victim", overwrite=True)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, client.scheduler.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: s.version > 10)
        process.send_signal(how)
        process.communicate(timeout=PATIENCE)
        until(lambda: not client.processing() or not any(client.processing().values()))
        assert daskps.run(s, count_to, [5, 5]) == [5, 5]
    finally:
        process.kill()
        process.communicate()
        s.delete()


def test_tiny_timeout_applies_a_push_once_or_not_at_all(client):
    """After each timeout the next call works, and the counts add up."""
    s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0))
    late: list[str] = []
    for _ in range(30):
        try:
            s.push({"w": np.ones(4)}, timeout=0.001)
        except TimeoutError as error:
            late.append(str(error))
    assert all("a push" in text for text in late)
    value = -s.pull()["w"]
    # Every element of a shard has seen the same pushes.
    for part in (value[:2], value[2:]):
        assert len(set(part)) == 1
        assert 30 - len(late) <= part[0] <= 30
    before = s.pull()["w"]
    s.push({"w": np.ones(4)})
    np.testing.assert_array_equal(s.pull()["w"], before - 1)


def test_cancelled_push_async_is_once_or_not_at_all(client):
    s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0))
    futures = [s.push_async({"w": np.ones(4)}) for _ in range(20)]
    for future in futures[::2]:
        if future.task is not None:
            client.loop.add_callback(future.task.cancel)
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.result(timeout=30)
    value = -s.pull()["w"]
    for part in (value[:2], value[2:]):
        assert 10 <= part[0] <= 20
        assert len(set(part)) == 1


def test_repeated_message_is_applied_once(client):
    """The same producer and sequence again: acknowledged, not applied."""
    from daskps.cluster.caller import routes
    from daskps.shards.steps import ADD, Step

    s = daskps.create({"w": np.zeros(4)})
    shards = shards_of(s)
    step = Step(kind=ADD, producer=10**9, sequence=3)
    request = routes.push(shards.meta, {0: np.ones(4)}, step)
    for _ in range(3):
        assert shards.call(request, Deadline(10, "a repeated add")).version == 1
    np.testing.assert_array_equal(s["w"].pull(), 1.0)
    assert s.stats()["shards"][0]["duplicates"] == 2


def push_twice(handle, path):
    """Die after the first of two pushes, the first time this task runs."""
    handle.push({"w": np.ones(4)})
    if not os.path.exists(path):
        with open(path, "w") as file:
            file.write(str(get_worker().address))
        os.kill(os.getpid(), signal.SIGKILL)
    handle.push({"w": np.ones(4)})


def test_pushes_of_a_task_that_runs_again_count_once(tmp_path):
    with local_cluster(n_workers=2, threads=1) as client:
        a = next(iter(client.nthreads()))
        b = other(client, a)
        s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0), servers=[a])
        future = client.submit(
            push_twice, s, str(tmp_path / "ran"), workers=[b], allow_other_workers=True
        )
        future.result(timeout=60)
        np.testing.assert_array_equal(s["w"].pull(), -2.0)


@gen_cluster(client=True, config=CARRIERS["rpc"])
async def test_a_push_whose_answer_is_cut_off_counts_once(c, s, a, b):
    """It was applied, and its worker lives: what is sent again changes nothing."""
    made = await daskps.aio.create({"w": np.zeros(4)}, servers=[a.address], client=c)
    serve, cut = a.handlers["daskps_call"], list[Any]()

    async def serve_and_cut(comm, **message):
        async def cut_off(answer):
            cut.append(answer)
            comm.abort()

        if not cut:
            comm.write = cut_off
        return await serve(comm, **message)

    a.handlers["daskps_call"] = serve_and_cut
    assert await made.add({"w": np.ones(4)}) == 1
    assert cut
    np.testing.assert_array_equal(await made["w"].pull(), 1.0)
    [row] = (await made.stats())["shards"]
    assert (row["duplicates"], row["version"]) == (1, 1)
    await made.close()


class Body:
    """A task that pushes twice and waits in between, as often as Dask runs it."""

    def __init__(self):
        self.begun, self.go_on, self.n_begun = (
            threading.Semaphore(0),
            threading.Event(),
            0,
        )

    def __call__(self, handle):
        handle.push({"w": np.ones(4)})
        self.n_begun += 1
        self.begun.release()
        self.go_on.wait(PATIENCE)
        handle.push({"w": np.ones(4)})

    def has_begun(self):
        return asyncio.to_thread(self.begun.acquire, timeout=PATIENCE)


#: By name: a task that is pickled must find the same one.
BODIES: dict[str, Body] = {}


def push_around(handle, name):
    BODIES[name](handle)


async def pushes_of(c, worker, name, copies=1, **how):
    """A store, and a task that has pushed to it once."""
    about = {"servers": [worker], "copies": copies, "client": c}
    made = await daskps.aio.create(
        {"w": np.zeros(4)}, optimizer=optim.SGD(1.0), **about
    )
    BODIES[name] = body = Body()
    future = c.submit(push_around, made, name, **how)
    assert await body.has_begun()
    return made, body, future


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_task_that_runs_twice_at_once_counts_once(c, s, a, b):
    """Its worker retires, with the copy: Dask runs it elsewhere beside the first."""
    elsewhere = {"workers": [b.address], "allow_other_workers": True, "copies": 2}
    made, body, future = await pushes_of(c, a.address, "retired", **elsewhere)
    retiring = asyncio.ensure_future(c.retire_workers([b.address]))
    assert await body.has_begun()
    body.go_on.set()
    await future
    await retiring
    assert body.n_begun == 2
    np.testing.assert_array_equal(await made["w"].pull(), -2.0)
    await made.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_task_that_is_submitted_after_one_was_cancelled_is_another(c, s, a, b):
    """Dask does not stop the thread of the first one: it goes on to push."""
    made, body, future = await pushes_of(c, a.address, "again", workers=[b.address])
    await future.cancel()
    again = c.submit(push_around, made, "again", workers=[a.address])
    assert await body.has_begun()
    body.go_on.set()
    await again
    found = await made.pull(min_version=4)
    np.testing.assert_array_equal(found["w"], -4.0)
    await made.close()


def push_in_turn(handle, n):
    """After each push wait for the other task's."""
    for i in range(n):
        handle.push({"w": np.ones(handle["w"].size)})
        handle.pull(min_version=2 * i + 2)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_a_worker_of_one_thread_serves_shards_beside_a_task(c, s, a, b):
    """Both have a shard, the copy of the other one, and a task that waits for all.

    Shards of this size are not updated on the event loop.
    """
    n, on = 30, (a.address, b.address)
    params, about = {"w": np.zeros(200_000)}, {"copies": 2, "client": c}
    made = await daskps.aio.create(params, optimizer=optim.SGD(1.0), **about)
    assert {*made.placement} == {*on}
    tasks = [c.submit(push_in_turn, made, n, workers=[at], key=at) for at in on]
    await c.gather(tasks)
    found = await made.pull()
    np.testing.assert_array_equal(found["w"], -2.0 * n)
    rows = (await made.stats())["shards"]
    assert {(row["worker"], row["copy"], row["behind"]) for row in rows} == {
        (*on, 0),
        (*reversed(on), 0),
    }
    await made.close()


def push_and_fail(handle, path):
    """Fail between two pushes, the first two times this task runs."""
    handle.push({"w": np.ones(4)})
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        if len(file.read()) < 3:
            raise OSError("fails for now")
    handle.push({"w": np.ones(4)})


def test_pushes_of_a_task_that_is_tried_again_count_once(client, tmp_path):
    s = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0), copies=2)
    client.submit(push_and_fail, s, str(tmp_path / "n"), retries=2).result()
    np.testing.assert_array_equal(s["w"].pull(), -2.0)
    assert {row["duplicates"] for row in s.stats()["shards"]} == {2}


def test_restart_of_the_cluster(fresh):
    """Stores end with it, of whatever copies: none is made anew behind our back."""
    handles = [store(fresh), store(fresh, copies=2)]
    for s in handles:
        s.push({"w": np.ones(10, "f4")})
    fresh.restart()
    for s in handles:
        with pytest.raises((daskps.StoreClosedError, daskps.StoreNotFoundError)):
            s.pull()
    assert daskps.list_stores() == []
    assert held(fresh) == []
    assert store(fresh, copies=2).version == 0

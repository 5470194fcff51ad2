"""What is not lost, not left behind and not held when something ends in the middle."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import dask
import numpy as np
import pytest
from distributed import Client, get_worker

import daskps
from daskps import optim
from daskps.cluster import upstream
from daskps.cluster.caller import link
from daskps.cluster.host.node import HOSTS
from daskps.cluster.protocol.handlers import HOST
from daskps.shards.memory.format import N_PRODUCERS, RUN
from tests.seams import bound_link, left_behind
from tests.support import gen_cluster, local_cluster, served_by, store, until


def pid_of(client, address):
    return client.run(os.getpid, workers=[address])[address]


@pytest.fixture
def fresh():
    """A cluster of its own, for tests that stop and kill."""
    with local_cluster(threads=1) as client:
        yield client


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


def step(trainer, part):
    for _ in range(part):
        trainer.pushpull({"w": np.ones(10, "f4")})
    return trainer.clock


# -- runs --------------------------------------------------------------------


def push_at_the_end_without_a_tick(trainer, part):
    trainer.push({"w": np.full(10, part, "f4")})
    trainer.push({"w": np.full(10, 10 * part, "f4")}, tick=False)
    trainer.push({"w": np.full(10, 100 * part, "f4")}, tick=False)
    return trainer.clock


@pytest.mark.parametrize("parts", [[1.0, 3.0], [2.0]], ids=["two", "one"])
def test_push_without_a_tick_at_the_end_counts(way, parts):
    """The trainer's end ticks what is open: here a second round."""
    with store(way, optimizer=optim.SGD(1.0)) as s:
        assert daskps.run(s, push_at_the_end_without_a_tick, parts) == [1] * len(parts)
        np.testing.assert_array_equal(s["w"].pull(), np.float32(-2 - 220))
        assert s.versions == (2, 2)


def endless(trainer, part):
    """Step until something is raised, note what, and pass it on."""
    try:
        while True:
            trainer.pushpull({"w": np.ones(10, "f4")})
    except BaseException as error:
        with open(part, "w") as file:
            file.write(f"{get_worker().address} {type(error).__name__}")
        raise


def noted(path):
    """What `endless` has noted so far."""
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read()


def in_a_run(dask_worker):
    """Whether a shard here takes part in a run."""
    hosted_shards = HOSTS[dask_worker.address].shards.values()
    return any(hosted.shard.segment.current.fixed[RUN] for hosted in hosted_shards)


@pytest.mark.parametrize(
    ("verb", "n_hosts"),
    [
        ("run", 1),
        pytest.param("train", 2, marks=pytest.mark.slow),
        pytest.param("run", 2, marks=pytest.mark.slow),
        pytest.param("train", 1, marks=pytest.mark.slow),
    ],
)
def test_stopped_worker_ends_the_run(fresh, tmp_path, verb, n_hosts):
    """SIGSTOP: silent, not dead. The other trainer is told, the caller comes back.

    With one host all trainers wait for an answer of the silent worker.
    """
    there, silent = fresh.nthreads()
    s = store(fresh, servers=[there, silent][-n_hosts:])
    pid = pid_of(fresh, silent)
    notes = [str(tmp_path / "0"), str(tmp_path / "1")]

    class Stop:
        def on_round(self, run):
            os.kill(pid, signal.SIGSTOP)

    def train():
        daskps.train(
            s, ones, np.zeros((64, 1)), epochs=10**7, callbacks=[Stop()], timeout=4
        )

    def run():
        reached = s.pull_async(min_version=20, timeout=None)
        reached.add_done_callback(lambda _: os.kill(pid, signal.SIGSTOP))
        # A slow machine is not that far after 4 s: another run goes on from there.
        for seconds in (4, 60):
            try:
                daskps.run(s, endless, notes, timeout=seconds)
            except TimeoutError:
                if reached.done():
                    raise

    with pytest.raises(TimeoutError, match="a run on store"):
        run() if verb == "run" else train()
    if verb == "run":
        # On a busy machine the other one may have been stopped after the run.
        told = f"{there} RunCancelledError"
        until(lambda: told in map(noted, notes))
    os.kill(pid, signal.SIGCONT)
    # What the silent worker held was never declared lost: it is there again, and
    # nobody trains any more.
    until(lambda: not any(fresh.processing().values()))
    # It may end the round it was in before it hears that the run is over.
    until(lambda: not any(fresh.run(in_a_run).values()))
    before = s.versions
    assert max(before) == min(before)
    assert daskps.run(s, step, [5, 5]) == [5, 5]
    assert s.versions == tuple(version + 5 for version in before)


@pytest.mark.parametrize("verb", ["run", "train"])
def test_very_short_timeouts_leave_no_run_behind(client, verb):
    """Wherever the timeout strikes, the next run begins at once."""
    with store(client) as s:
        rows = np.zeros((8, 1))
        for seconds in np.geomspace(1e-5, 0.05, 20):
            try:
                if verb == "run":
                    daskps.run(s, step, [10**6, 10**6], timeout=float(seconds))
                else:
                    daskps.train(s, ones, rows, epochs=10**6, timeout=float(seconds))
            except TimeoutError:
                pass
            else:
                pytest.fail("a million steps in no time")
        before = s.version
        daskps.train(s, ones, rows, batch_size=4)
        assert s.version == before + 1


@gen_cluster(client=True)
async def test_a_silent_host_keeps_no_caller_beyond_its_timeout(
    c, s, a, b, monkeypatch, caplog
):
    """A run that opens late is closed as late, by nobody who waits for it."""
    caplog.set_level(logging.INFO, "daskps")
    go_on, begin = asyncio.Event(), HOST.by_name["begin_run"]

    async def silent(host, **kwargs):
        await go_on.wait()
        return await begin.function(host, **kwargs)

    monkeypatch.setitem(HOST.by_name, "begin_run", served_by("begin_run", silent))
    monkeypatch.setattr(link, "GRACE_SECONDS", 0.01)
    params, sgd = {"w": np.zeros(10, "f4")}, optim.SGD(1.0)
    async with await daskps.aio.create(params, client=c, optimizer=sgd) as made:
        with pytest.raises(TimeoutError, match="a run on store"):
            await daskps.aio.run(made, step, [1], timeout=0.05)
        [left] = left_behind(bound_link(made))
        with pytest.raises(daskps.ConsistencyError, match="is training store"):
            await daskps.aio.run(made, step, [1])
        go_on.set()
        await left
        assert not left_behind(bound_link(made))
        assert await daskps.aio.run(made, step, [2]) == [2]

        async def fails(host, **kwargs):
            await go_on.wait()
            raise ValueError("not now")

        go_on.clear()
        failing = served_by("begin_run", fails)
        monkeypatch.setitem(HOST.by_name, "begin_run", failing)
        with pytest.raises(TimeoutError, match="a run on store"):
            await daskps.aio.run(made, step, [1], timeout=0.05)
        [left] = left_behind(bound_link(made))
        go_on.set()
        await asyncio.wait({left})
        assert "ended with ValueError('not now')" in caplog.text


def wave(params, X, y):
    """Gradients in which every step and every row shows."""
    w = params["w"]
    return {"w": np.cos(w * (1 + X.mean())) + y.mean()}


@pytest.mark.parametrize(
    ("sync_every", "n_epochs"),
    [
        ("batch", 2),
        pytest.param("batch", 5, marks=pytest.mark.slow),
        pytest.param("epoch", 5, marks=pytest.mark.slow),
    ],
)
def test_trainer_killed_at_a_gate_changes_no_bit(sync_every, n_epochs):
    """Its worker dies while all trainers wait for the verdict on an epoch.

    With two epochs that verdict is to stop: the trainer may not go on alone.
    """
    rng = np.random.default_rng(5)
    X, y = rng.normal(size=(60, 2)), rng.normal(size=60)
    with local_cluster(n_workers=3, threads=1) as client:
        a, _, c = client.nthreads()
        pid = pid_of(client, c)
        found: list[object] = []
        gates: list[np.ndarray] = []
        for victim in (None, pid):
            gates.clear()

            def validate(params, victim=victim):
                gates.append(params["w"].copy())
                if len(gates) == 2 and victim:
                    os.kill(victim, signal.SIGKILL)
                    until(lambda: c not in client.nthreads(), 60)
                return {"first": float(params["w"][0])}

            s = daskps.create(
                {"w": np.linspace(0, 1, 7)}, optimizer=optim.Adam(0.05), servers=[a]
            )
            result = daskps.train(
                s,
                wave,
                X,
                y,
                epochs=5,
                batch_size=7,
                trainers=3,
                sync_every=sync_every,
                validate=validate,
                stop=lambda history: len(history) == n_epochs,
            )
            assert len(gates) == n_epochs
            metrics = [epoch.metrics for epoch in result.history]
            found.append((result.weights["w"].tobytes(), metrics))
            assert result.stats.lost_trainers == bool(victim)
            s.close()
    assert found[0] == found[1]


def raise_timeout(trainer, part):
    if trainer.rank == 1:
        raise TimeoutError(f"my own {part}")
    step(trainer, 10**9)


def test_timeout_error_of_the_users_passes_as_it_is(client):
    """It is not taken for one of ours, with or without a timeout of the run."""
    with store(client) as s:
        for timeout in (None, 60):
            with pytest.raises(TimeoutError) as caught:
                daskps.run(s, raise_timeout, ["a", "b"], timeout=timeout)
            assert type(caught.value) is TimeoutError
            assert caught.value.args == ("my own b",)
            assert any("trainer 1 of 2" in note for note in caught.value.__notes__)
        assert daskps.run(s, step, [1, 1]) == [1, 1]


# -- handles -----------------------------------------------------------------


def pull_in_a_fork(handle):
    """Use the store in a child of this worker; return what happened there."""
    handle.pull()  # bound to this worker
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            handle.pull(timeout=5)
            said = "pulled"
        except BaseException as error:  # noqa: BLE001 - the parent asserts
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        said = file.read()
    os.waitpid(child, 0)
    handle.push({"w": np.ones(10, "f4")})
    return said


def test_store_in_a_fork_of_a_task_is_refused(client):
    with store(client, optimizer=optim.SGD(1.0)) as s:
        said = client.submit(pull_in_a_fork, s).result(timeout=60)
        assert said.startswith("RuntimeError: a store cannot be used in a forked")
        # The parent's connections are as they were.
        np.testing.assert_array_equal(s["w"].pull(), np.float32(-1))
        assert client.submit(pull_in_a_fork, s).result(timeout=60) == said


def producers(uid, dask_worker):
    hosted_shards = HOSTS[dask_worker.address].shards
    found = [v.shard.segment.current for (u, _), v in hosted_shards.items() if u == uid]
    return [int(record.fixed[N_PRODUCERS]) for record in found]


def test_handles_of_one_process_are_one_producer(client):
    """Or many short-lived handles would fill the table of every shard."""
    with store(client, name="shared", optimizer=optim.SGD(1.0)) as s:
        for _ in range(5):
            daskps.open("shared").push({"w": np.ones(10, "f4")})
            daskps.ParameterStore(s.uid, s.name).push({"w": np.ones(10, "f4")})
        s.push({"w": np.ones(10, "f4")})
        np.testing.assert_array_equal(s["w"].pull(), np.float32(-11))
        assert list(client.run(producers, s.uid).values()) == [[1], [1]]
        s.delete()


def test_close_after_the_client_is_closed(cluster):
    """The session store went with it; a named one is only detached from."""
    with Client(cluster.scheduler.address, set_as_default=False) as other:
        session, named = store(other), store(other, name="stays")
        with store(other) as inside:
            other.close()
        session.close()
        named.close()
        session.close()
        inside.close()
    with cluster.as_current():
        kept = daskps.open("stays")
        assert kept.version == 0
        kept.delete()
        until(lambda: daskps.list_stores() == [])


@gen_cluster(client=True)
async def test_close_after_an_asynchronous_client_is_closed(c, s, a, b):
    async with Client(s.address, asynchronous=True) as other:
        async with await daskps.aio.create({"w": 1.0}, client=other) as session:
            named = await daskps.aio.create({"w": 1.0}, client=other, name="stays")
            await other.close()
        await session.close()
        await named.close()
    await (await daskps.aio.open("stays", client=c)).delete()


@pytest.mark.parametrize("min_version", [1, 7])
def test_cancelled_pull_async_leaves_nothing_parked(way, min_version):
    with store(way) as s:

        def parked():
            return [row["parked"] for row in s.stats()["shards"]]

        waiting = [
            s.pull_async(min_version=min_version, timeout=None) for _ in range(3)
        ]
        until(lambda: parked() == [3, 3])
        assert waiting[0].cancel()
        until(lambda: parked() == [2, 2])
        assert waiting[1].cancel()
        assert waiting[2].cancel()
        until(lambda: parked() == [0, 0])
        assert all(future.cancelled() for future in waiting)


# -- creation ----------------------------------------------------------------


@gen_cluster(client=True)
async def test_cancelled_wait_for_a_result_cancels_no_other(c, s, a, b):
    """A client fetches results in batches, and a batch has one future."""
    asked, answer = asyncio.Event(), asyncio.Event()
    fetch = c._gather_remote

    async def held(*args, **kwargs):
        asked.set()
        await answer.wait()
        return await fetch(*args, **kwargs)

    c._gather_remote = held
    futures = c.map(abs, [-1, -2])
    first, second = (asyncio.ensure_future(upstream.result(f)) for f in futures)
    await asked.wait()
    await asyncio.sleep(0)  # the second has joined the batch
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    answer.set()
    assert await second == 2


@gen_cluster(client=True, timeout=110)
async def test_cancelled_create_reserves_nothing(c, s, a, b):
    """Wherever it is cancelled: the store that fills the share can be made again."""
    one = 100_000  # float64 in two shards of two buffers each: 1.6 MB
    limit = min(w.memory_limit for w in s.workers.values())
    with dask.config.set({"daskps.memory-share": 1.2e6 / limit}):

        def create():
            return daskps.create({"w": np.zeros(one)}, client=c, name="full")

        full = await create()
        with pytest.raises(daskps.LayoutError, match="memory"):
            await daskps.aio.create({"w": np.zeros(one)}, client=c)
        await full.delete()
        steps, cancelled, made = 0, 0, False
        while not made:
            creating = asyncio.ensure_future(create())
            for _ in range(steps):
                await asyncio.sleep(0)
            creating.cancel()
            try:
                again = await creating
                made = True
            except asyncio.CancelledError:
                cancelled += 1
                assert await daskps.aio.list_stores(client=c) == []
                again = await create()
            np.testing.assert_array_equal(await again["w"].pull(), 0.0)
            await again.delete()
            # Densely at first, where one message follows the other.
            steps += 1 + steps // 8
        assert cancelled > 10
        # Nor does a host keep memory of it.
        hosted_shards = [HOSTS[w.address].shards for w in (a, b)]
        await asyncio.to_thread(until, lambda: hosted_shards == [{}, {}])

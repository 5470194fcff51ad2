"""Graph execution: what its tasks leave behind, and what they survive."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
from distributed import Client, Event, SchedulerPlugin, get_worker

import daskps
from daskps import optim
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.routes import whole
from daskps.cluster.host import contributions
from daskps.cluster.host.contributions import Contributions, RoundId, contribution
from daskps.cluster.host.node import HOSTS
from daskps.cluster.protocol.handlers import DIRECTORY, HOST
from daskps.cluster.runs.graph.epochs import WINDOW, EpochLog, Schedule
from daskps.cluster.runs.graph.tasks import GraphWork, TaskContext, Weights
from daskps.cluster.upstream import dumps
from daskps.errors import (
    ConsistencyError,
    ContributionLostError,
    RunCancelledError,
)
from daskps.layout.arrays import Layout
from tests import inprocess
from tests.seams import members_of
from tests.support import local_cluster, popen, served_by, until

RNG = np.random.default_rng(5)
X = RNG.normal(size=(96, 6)).astype("f4")
Y = (X @ np.arange(6, dtype="f4") + RNG.normal(size=96)).astype("f4")


def regression(params, X, y):
    residual = X @ params["w"] - y
    return float((residual**2).mean()), {"w": X.T @ residual / len(X)}


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


def a_store(**kwargs):
    start = {"w": np.linspace(-1, 1, 6, dtype="f4")}
    return daskps.create(start, optimizer=optim.Adam(0.05), **kwargs)


def held(client):
    """Return how many contributions each worker holds."""

    def count(dask_worker):
        return dask_worker.metrics["daskps"](dask_worker)["contributions"]

    return list(client.run(count).values())


# -- what it costs -----------------------------------------------------------


class Count(SchedulerPlugin):
    """Counts finished tasks by kind and store, and all tasks at once."""

    name = "daskps-test-count"

    def start(self, scheduler):
        self.scheduler, self.done, self.most = scheduler, {}, 0

    def transition(self, key, start, finish, *args, **kwargs):
        if start == "processing" and finish == "memory" and type(key) is tuple:
            self.done[key[:2]] = self.done.get(key[:2], 0) + 1
        self.most = max(self.most, len(self.scheduler.tasks))


@pytest.fixture
def count(client):
    client.register_plugin(Count())

    def counted():
        return client.run_on_scheduler(
            lambda dask_scheduler: (
                dict(dask_scheduler.plugins[Count.name].done),
                dask_scheduler.plugins[Count.name].most,
            )
        )

    yield counted
    client.unregister_scheduler_plugin(Count.name)


@pytest.mark.parametrize(("shards", "reductions"), [(2, 2), (5, 5), (17, 1 + 8)])
def test_a_round_is_one_task_per_part_and_shard(client, count, shards, reductions):
    """Of the nine shards of the third case that one worker has, one is for all."""
    before = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
    rounds = 2 * WINDOW
    with a_store(shards=shards, name="tall tale") as store:
        result = daskps.train(
            store, ones, np.zeros((8, 1)), epochs=rounds, trainers=8, execution="graph"
        )
        label = f"tall tale-{store.uid[:8]}"
        store.delete()
    assert result.version == rounds
    done, most = count()
    assert done == {
        ("daskps-anchor", label): shards,
        ("daskps-gradient", label): 8 * rounds,
        ("daskps-reduce", label): reductions * rounds,
    }
    # Anchors, the parts and the work beside the window.
    assert most <= before + WINDOW * (8 + reductions) + shards + 8 + 1
    until(lambda: held(client) == [0, 0])


def test_more_parts_than_threads_go_to_the_graph_by_themselves(client):
    """17 parts on 4 threads, one more than four to one."""
    found = []
    for trainers, execution in ((16, "resident"), (17, "graph")):
        with a_store() as store:
            result = daskps.train(store, regression, X, Y, trainers=trainers)
        assert result.execution == execution
        found.append(result.version)
    assert found == [1, 1]


def test_hundreds_of_parts_on_four_threads(client):
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as store:
        result = daskps.train(
            store, ones, np.zeros((600, 1)), trainers=600, epochs=2, batch_size=1
        )
    assert result.execution == "graph"
    np.testing.assert_array_equal(result.weights["w"], -2.0)


@pytest.mark.parametrize("way", ["inside", "process"], indirect=True)
def test_executions_have_the_same_bits_and_losses(way):
    found = set()
    for execution in ("resident", "graph"):
        for shards in (1, 3):
            with a_store(shards=shards) as store:
                result = daskps.train(
                    store,
                    regression,
                    X,
                    Y,
                    trainers=7,
                    batch_size=5,
                    epochs=3,
                    execution=execution,
                )
            losses = tuple(entry.loss for entry in result.history)
            found.add((result.weights["w"].tobytes(), losses, result.version))
    assert len(found) == 1


# -- contributions -----------------------------------------------------------


class Hold:
    """Gradients that wait for an event on one rank."""

    def __init__(self, name, row):
        self.name, self.row = name, row

    def __call__(self, params, X, y):
        if X[0, 0] == self.row:
            Event(self.name).wait()
        return ones(params, X, y)


async def copy_receipts(dask_scheduler):
    """Have the other worker copy each receipt; return where they were."""
    origins = receipts(dask_scheduler)
    for key, [origin] in origins.items():
        other = next(w for w in dask_scheduler.workers if w != origin)
        dask_scheduler.request_acquire_replicas(other, [key], stimulus_id="test")
    return origins


async def drop_origins(dask_scheduler, origins):
    for key, [origin] in origins.items():
        dask_scheduler.request_remove_replicas(origin, [key], stimulus_id="test")


def receipts(dask_scheduler):
    return {
        key: [ws.address for ws in ts.who_has]
        for key, ts in dask_scheduler.tasks.items()
        if key[0] == "daskps-gradient" and ts.state == "memory"
    }


def test_contributions_survive_the_memory_manager(client):
    """It may drop a receipt where it was made, once there is a copy elsewhere."""
    late = Event("daskps-test-late", client=client)
    rows = np.arange(12.0)[:, None]
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0)) as store:
        results: list[Any] = []
        thread = threading.Thread(
            target=lambda: results.append(
                daskps.train(
                    store, Hold(late.name, 11.0), rows, trainers=12, execution="graph"
                )
            )
        )
        thread.start()
        until(lambda: sum(held(client)) == 11)

        def places():
            return list(client.run_on_scheduler(receipts).values())

        until(lambda: len(places()) == 11)
        origins = client.run_on_scheduler(copy_receipts)
        until(lambda: {len(of) for of in places()} == {2})
        client.run_on_scheduler(drop_origins, origins=origins)
        until(lambda: {len(of) for of in places()} == {1})
        assert client.run_on_scheduler(receipts) != origins
        assert sum(held(client)) == 11
        late.set()
        thread.join()
        assert results[0].stats.retried_rounds == 0
        np.testing.assert_array_equal(results[0].weights["w"], -1.0)
        until(lambda: held(client) == [0, 0])
    late.clear()


def apply_twice(dask_worker):
    """Send every step that ends a round twice, as a task that runs again does."""

    def call(self, request, *args):
        if request.step.tick:
            original(self, request, *args)
        return original(self, request, *args)

    original = ShardClient.call
    patch = mock.patch.object(ShardClient, "call", call)
    patch.start()
    dask_worker.daskps_test = None, [patch]


@pytest.mark.parametrize(
    ("way", "epochs"),
    [("inside", 2), ("queue", 2), ("process", 1)],
    indirect=["way"],
)
def test_a_round_that_is_reduced_twice_counts_once(way, epochs):
    options, found = {**OPTIONS, "epochs": epochs}, []
    for twice in (False, True):
        if twice:
            way.run(apply_twice)
        try:
            with a_store(shards=2) as store:
                result = daskps.train(
                    store, regression, X, Y, execution="graph", **options
                )
        finally:
            if twice:
                way.run(undo)
        assert result.stats.duplicates == twice * 2 * 8 * epochs
        found.append((result.version, result.weights["w"].tobytes()))
    assert found[0] == found[1]


def test_a_round_is_not_applied_before_its_receipts_are_with_the_directory():
    """Nobody else would know of a complete round what its losses were."""
    refuse = mock.Mock(side_effect=daskps.LayoutError("no room for the test"))
    note = replace(DIRECTORY.by_name["note"], function=refuse)
    with inprocess.cluster(1), a_store() as store:
        with (
            mock.patch.dict(DIRECTORY.by_name, note=note),
            pytest.raises(daskps.LayoutError, match="no room for the test"),
        ):
            daskps.train(store, regression, X, Y, execution="graph")
        assert store.version == 0


def lose_for_shard_1(dask_worker):
    def sums(self, place, shards, *args):
        if 1 in shards:
            raise ContributionLostError("lost for the test")
        return original(self, place, shards, *args)

    original = Contributions.sums
    mock.patch.object(Contributions, "sums", sums).start()


def test_a_round_that_is_lost_each_time_is_an_error():
    with local_cluster(n_workers=2, threads=1) as client, a_store() as store:
        client.run(lose_for_shard_1)
        with pytest.raises(daskps.RoundLostError, match="lost for the test") as caught:
            daskps.train(store, regression, X, Y, execution="graph")
        assert caught.value.shard == 1
        assert caught.value.worker == store.placement[1]
        # Shard 0 had its part, and has taken it back.
        assert store.versions == (2, 2)
        start = np.linspace(-1, 1, 6, dtype="f4")
        np.testing.assert_array_equal(store["w"].pull(), start)


def count_sums(dask_worker):
    """Count the messages that ask for sums."""
    counted, sums = list[Any](), HOST.by_name["sums"].function

    @functools.wraps(sums)
    async def count(*args, **kwargs):
        counted.append(kwargs)
        return await sums(*args, **kwargs)

    patch = mock.patch.dict(HOST.by_name, sums=served_by("sums", count))
    patch.start()
    dask_worker.daskps_test = counted, [patch]


def look(dask_worker):
    """Return how many messages asked for sums, and the shared memory of a worker."""
    members = members_of(HOSTS[dask_worker.address])
    return len(dask_worker.daskps_test[0]), sorted(members.names())


def undo(dask_worker):
    for patch in reversed(dask_worker.daskps_test[1]):
        patch.stop()


@pytest.mark.parametrize("codec", [None, "bf16"])
def test_each_reduction_asks_each_other_worker_once_a_round(machine_cluster, codec):
    """And the bits are those of a resident run; no memory of the machine is left."""
    client = machine_cluster
    options = {**OPTIONS, "epochs": 1, "codec": codec, "reset_optimizer": True}
    with a_store(client=client, shards=3) as store:
        client.run(count_sums)
        try:
            before = client.run(look)
            graph = daskps.train(store, regression, X, Y, execution="graph", **options)
            until(lambda: held(client) == [0, 0])
            after = client.run(look)
        finally:
            client.run(undo)
        for worker, (n, names) in before.items():
            n += graph.stats.clock * sum(w != worker for w in store.placement)
            assert after[worker] == (n, names)
        store.assign({"w": np.linspace(-1, 1, 6, dtype="f4")})
        alone = daskps.train(store, regression, X, Y, execution="resident", **options)
    assert graph.weights["w"].tobytes() == alone.weights["w"].tobytes()


LAYOUT = Layout.build({"w": ((6,), "float32")}, 2)


def left(value, weight=1.0):
    arrays = {0: np.full(6, value, "f4")}
    return contribution(LAYOUT, arrays, weight, weight)


def sums(store, place, ranks=(0,), nodes=((0, 1),)):
    found = store.sums(place, [0, 1], ranks, nodes)
    return [
        [
            (
                {position: one.data for position, one in node.items()},
                {position: one.weight for position, one in node.items()},
            )
            for node in row
        ]
        for row in found
    ]


def test_a_later_round_frees_what_came_before():
    store = Contributions("a")
    store.leave(RoundId(1, 0, 3), 0, left(1))
    store.leave(RoundId(1, 0, 3), 1, left(2, 3.0))
    assert (store.n, store.nbytes) == (2, 48)
    [[(arrays, weights)], _] = sums(store, RoundId(1, 0, 3), (0, 1), ((0, 2),))
    assert arrays[0].tolist() == [7.0] * 3
    assert weights == {0: 4.0}
    # Asked again, it says the same: nothing was added into what it keeps.
    [_, [(arrays, _)]] = sums(store, RoundId(1, 0, 3), (0, 1), ((0, 2),))
    assert arrays[0].tolist() == [7.0] * 3
    store.leave(RoundId(1, 0, 4), 0, left(1))
    assert store.n == 1
    with pytest.raises(ContributionLostError, match="round=3"):
        sums(store, RoundId(1, 0, 3))


def test_a_contribution_that_is_not_there_is_never_left_out_of_a_sum():
    store = Contributions("a")
    store.leave(RoundId(1, 0, 0), 0, left(1))
    with pytest.raises(ContributionLostError, match=r"\[1\]"):
        sums(store, RoundId(1, 0, 0), (0, 1), ((0, 2),))


def test_a_task_of_an_attempt_that_was_given_up_changes_nothing():
    store = Contributions("a")
    store.leave(RoundId(1, 1, 3), 0, left(1))
    with pytest.raises(ContributionLostError, match="too late"):
        store.leave(RoundId(1, 0, 3), 0, left(5))
    with pytest.raises(ContributionLostError, match="too late"):
        store.leave(RoundId(1, 1, 2), 0, left(5))
    [[(arrays, _)], _] = sums(store, RoundId(1, 1, 3))
    assert arrays[0][0] == 1


def test_a_round_that_begins_frees_what_came_before():
    store = Contributions("a")
    store.leave(RoundId(1, 0, 3), 0, left(1))
    store.begin(RoundId(1, 0, 3))
    assert store.n == 1
    store.begin(RoundId(1, 0, 4))
    assert store.n == 0
    # Before the user's function is called, not when it has been.
    with pytest.raises(ContributionLostError, match="too late"):
        store.begin(RoundId(1, 0, 3))


class Counted(int):
    """A run's number that counts how often it is compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == other


def test_a_task_does_not_look_through_all_runs_that_ended(monkeypatch):
    monkeypatch.setattr(contributions, "REMEMBERED", 1000)
    store = Contributions("a")
    for run in range(1500):
        store.end(Counted(run))
    Counted.compared = 0
    store.begin(RoundId(Counted(5000), 0, 0))
    store.shared(Counted(5000), "x", dict)
    assert Counted.compared <= 5
    # The oldest are forgotten: the newest refuse what still comes.
    store.begin(RoundId(499, 0, 0))
    for run in (500, 1499):
        with pytest.raises(RunCancelledError):
            store.begin(RoundId(run, 0, 0))


def test_contributions_are_freed_with_their_tasks_and_their_run():
    store = Contributions("a")
    store.leave(RoundId(1, 1, 3), 0, left(1))
    store.leave(RoundId(2, 0, 0), 0, left(1))
    # Tasks of an older attempt are forgotten: not these.
    store.free(1, 0, 99)
    assert store.n == 2
    store.free(1, 1, 3)
    assert store.n == 1
    store.end(2)
    assert store.n == 0
    with pytest.raises(RunCancelledError):
        store.leave(RoundId(2, 0, 1), 0, left(1))
    with pytest.raises(RunCancelledError):
        store.shared(2, "x", dict)


# -- the schedule ------------------------------------------------------------


def test_windows_end_at_the_border_of_an_epoch_where_somebody_decides():
    free = Schedule(3, 10, [10], gated=False)
    gated = Schedule(3, 10, [10], gated=True)
    assert [free.window(at) for at in (0, 16)] == [range(16), range(16, 30)]
    assert [gated.window(at) for at in (0, 10, 27)] == [
        range(10),
        range(10, 20),
        range(27, 30),
    ]


def test_ranks_without_a_batch_left_have_no_task():
    schedule = Schedule(2, 3, [3, 1, 0], gated=False)
    assert [schedule.ranks(t) for t in range(6)] == [[0, 1], [0], [0]] * 2
    assert EpochLog(schedule).round == 0


# -- faults ------------------------------------------------------------------


class Three:
    """Three workers, one of which dies now and then."""

    def __init__(self):
        self.stack = ExitStack()
        self.client: Any = None

    def __call__(self):
        """Return a client of three live workers; a nanny may fail to restart one."""
        try:
            until(lambda: self.client and self.n_workers() == 3, 20)
        except AssertionError:
            self.stack.close()
            self.client = self.stack.enter_context(local_cluster(3))
        return self.client

    def n_workers(self):
        return self.client.run_on_scheduler(
            lambda dask_scheduler: len(dask_scheduler.workers)
        )


@pytest.fixture(scope="module")
def three():
    found = Three()
    with found.stack:
        found.client = found.stack.enter_context(local_cluster(3))
        yield found


OPTIONS: Any = {"trainers": 6, "batch_size": 2, "epochs": 50 // 8 + 1, "seed": 3}


def with_rows(**kwargs):
    """A store with a table beside the weights."""
    params = {
        "w": np.linspace(-1, 1, 6, dtype="f4"),
        "emb": daskps.TableSpec(9, 2, init=daskps.init.normal()),
    }
    return daskps.create(params, optimizer=optim.Adam(0.05), **kwargs)


def ids_of(X, rng):
    """Return rows for a batch, some of them more than once."""
    return np.append(np.abs(X[:, :3] * 7).astype(int).reshape(-1) % 9, rng.integers(9))


def regression_with_rows(params, X, y):
    loss, grads = regression(params, X, y)
    return loss, {**grads, "emb": np.sin(params["emb"] + grads["w"].sum())}


def train_rows(store, **how):
    """Train a store; return the result, and what store, table and history have."""
    result = daskps.train(
        store,
        regression_with_rows,
        X,
        Y,
        rows={"emb": ids_of},
        execution="graph",
        **OPTIONS,
        **how,
    )
    assert store.stats()["tables"]["emb"]["steps"] == result.version == 56
    found = store.pull(rows={"emb": range(9)})
    losses = tuple(entry.loss for entry in result.history)
    return result, (found["w"].tobytes(), found["emb"].tobytes(), losses)


@pytest.fixture(scope="module")
def undisturbed(three):
    with with_rows(client=three()) as store:
        result, bits = train_rows(store)
    assert result.stats.retried_rounds == 0
    return bits


#: How many workers are killed in one run; Dask gives a task up that is lost four times.
KILLS = 3
#: Twenty-one moments in every run of the tests; half of them at an owner of shards.
RUNS = [
    pytest.param(
        seed,
        with_shards,
        marks=[pytest.mark.slow] if seed % 2 != with_shards else [],
        id=f"{seed}-shards" if with_shards else f"{seed}",
    )
    for with_shards in (False, True)
    for seed in range(7)
]


class Kills:
    """Kills workers at random moments of a run, each once the one before has come back.

    An owner of shards, or one that is none: the others adopt what it had.
    """

    def __init__(self, client, store, rng, *, owners):
        self.client, self.store, self.owners, self.rng = client, store, owners, rng
        self.rounds = sorted(rng.sample(range(1, 48), KILLS))
        self.generations = dict.fromkeys(range(store.layout.n_shards), 1)
        self.timers: list[threading.Timer] = []
        self.victim = ""

    def on_round(self, run):
        if self.rounds and run.clock >= self.rounds[0]:
            del self.rounds[0]
            self.wait()
            self.kill()

    def kill(self):
        """Kill one in a moment."""
        holders = {row["shard"]: row["worker"] for row in self.rows()}
        owners = set(holders.values())
        chosen = owners if self.owners else set(self.client.nthreads()) - owners
        victim = self.victim = self.rng.choice(sorted(chosen))
        for shard, holder in holders.items():
            self.generations[shard] += holder == victim
        pid = self.client.run(os.getpid, workers=[victim])[victim]
        moment = self.rng.uniform(0.0, 0.2)
        self.timers.append(threading.Timer(moment, os.kill, (pid, signal.SIGKILL)))
        self.timers[-1].start()

    def wait(self):
        """Wait until whoever was killed is there again, and its shards are elsewhere."""
        for timer in self.timers:
            timer.join()
        found = [*self.generations.values()]
        until(lambda: [row["generation"] for row in self.rows()] == found)
        # The scheduler may not have heard of its end yet; the next one has another
        # port.
        until(lambda: len({*self.client.nthreads()} - {self.victim}) == 3)

    def rows(self):
        return self.store.stats()["shards"]


@pytest.mark.parametrize(("seed", "with_shards"), RUNS)
def test_kill_of_a_worker_with_contributions(three, undisturbed, seed, with_shards):
    """At random moments: the result has the bits of the undisturbed run, rows too.

    Of the workers with shards half are the only ones.
    """
    client, rng = three(), random.Random(seed)
    servers = sorted(client.nthreads())[: 1 + with_shards * (seed % 4 // 2)]
    with with_rows(client=client, servers=servers) as store:
        kills = Kills(client, store, rng, owners=with_shards)
        _, bits = train_rows(store, callbacks=[kills], timeout=100)
        kills.wait()
        assert len(kills.timers) == KILLS
    assert bits == undisturbed
    until(lambda: set(held(client)) == {0})


class Strike:
    """Does something in the middle of a run, once."""

    def __init__(self, action, after=1):
        self.action, self.after, self.done = action, after, False

    def on_epoch(self, run):
        if len(run.history) == self.after and not self.done:
            self.done = True
            self.action()


def test_worker_that_retires_in_a_window(undisturbed):
    with local_cluster(n_workers=3, threads=1) as client:
        server, leaver, _ = sorted(client.nthreads())
        strike = Strike(lambda: client.retire_workers([leaver]))
        with with_rows(client=client, servers=[server]) as store:
            _, bits = train_rows(store, callbacks=[strike], timeout=60)
        assert strike.done
        assert leaver not in client.nthreads()
    assert bits == undisturbed


def test_killed_owner_ends_the_run_with_shard_lost_error():
    with (
        dask.config.set({"daskps.carriers.machine": False}),
        local_cluster(n_workers=2, threads=1) as client,
        a_store() as store,
    ):
        pid = client.run(os.getpid)[store.placement[1]]
        strike = Strike(lambda: os.kill(pid, signal.SIGKILL))
        with pytest.raises(daskps.ShardLostError):
            daskps.train(
                store,
                regression,
                X,
                Y,
                epochs=10**6,
                execution="graph",
                callbacks=[strike],
            )
        assert client.submit(sum, [1, 2]).result() == 3


def test_trainer_lost_with_raise():
    with local_cluster(n_workers=2, threads=1) as client:
        server, other = sorted(client.nthreads())
        pid = client.run(os.getpid)[other]
        strike = Strike(lambda: os.kill(pid, signal.SIGKILL))
        with a_store(servers=[server]) as store:
            with pytest.raises(daskps.RunCancelledError, match="on_trainer_lost"):
                daskps.train(
                    store,
                    regression,
                    X,
                    Y,
                    epochs=10**6,
                    execution="graph",
                    callbacks=[strike],
                    on_trainer_lost="raise",
                )
            until(lambda: store.push({"w": np.zeros(6, "f4")}) > 0)


def test_restart_of_the_cluster_in_a_run():
    with local_cluster(n_workers=2, threads=1) as client:
        store = a_store()
        strike = Strike(client.restart)
        with pytest.raises(daskps.DaskPSError, match="restart"):
            daskps.train(
                store,
                regression,
                X,
                Y,
                epochs=10**6,
                execution="graph",
                callbacks=[strike],
            )
        with a_store() as again:
            assert daskps.train(again, regression, X, Y, execution="graph").version


def test_scheduler_that_dies_ends_the_run(tmp_path):
    """With an error; its worker, which has no nanny, ends as well."""
    file, here = str(tmp_path / "scheduler.json"), ["--host", "127.0.0.1"]
    here += ["--dashboard-address", "127.0.0.1:0", "--scheduler-file", file]
    env = {**os.environ, "PYTHONPATH": str(Path(daskps.__file__).parents[1])}
    with (
        popen(["dask", "scheduler", "--port", "0", *here], env=env) as scheduler,
        popen(["dask", "worker", "--no-nanny", "--nthreads", "2", *here], env=env),
        Client(scheduler_file=file, set_as_default=False) as client,
        client.as_current(),
    ):
        client.wait_for_workers(1, timeout=30)
        strike = Strike(scheduler.kill)
        with pytest.raises((OSError, RuntimeError, CancelledError)):
            daskps.train(
                a_store(),
                regression,
                X,
                Y,
                epochs=10**6,
                execution="graph",
                callbacks=[strike],
            )


def test_gradient_that_takes_for_ever_ends_with_the_timeout():
    """It waits for what comes only after the run has ended: else nothing would."""
    with local_cluster(n_workers=1, threads=4) as client, a_store() as store:
        late = Event("daskps-test-for-ever", client=client)
        with pytest.raises(TimeoutError, match="a run on store"):
            daskps.train(
                store,
                Hold(late.name, 0.0),
                np.zeros((8, 1)),
                trainers=2,
                execution="graph",
                timeout=0.5,
            )
        # Two threads are still at it; what they bring is refused.
        assert daskps.train(store, regression, X, Y, execution="graph").version == 2
        late.set()
        until(lambda: held(client) == [0])


def wrong_on_one_part(params, X, y):
    return {"w": np.ones(6 if X[0, 0] != 3 else 5, "f4")}


def test_wrong_shape_in_one_part_only_changes_nothing(client):
    rows = np.repeat(np.arange(8.0), 2)[:, None]
    with a_store() as store:
        with pytest.raises(daskps.PushRejectedError, match="shape") as caught:
            daskps.train(store, wrong_on_one_part, rows, trainers=8, execution="graph")
        assert any("trainer 3 of 8" in note for note in caught.value.__notes__)
        assert store.versions == (0, 0)
        until(lambda: held(client) == [0, 0])


class KillOnce:
    """A gradient that kills its worker if that is a certain one, until a file says it."""

    def __init__(self, path, worker):
        self.path, self.worker = path, worker

    def __call__(self, params, X, y):
        if get_worker().address == self.worker and not os.path.exists(self.path):
            with open(self.path, "w") as file:
                file.write(str(X[0, 0]))
            os.kill(os.getpid(), signal.SIGKILL)
        return ones(params, X, y)


def test_gradient_that_kills_its_worker(tmp_path):
    """The round is made good."""
    rows = np.arange(4.0)[:, None]
    with local_cluster(n_workers=2, threads=1) as client:
        server, other = sorted(client.nthreads())
        client.run_on_scheduler(
            lambda dask_scheduler: setattr(dask_scheduler, "allowed_failures", 1)
        )
        with daskps.create(
            {"w": np.zeros(3)}, optimizer=optim.SGD(1.0), servers=[server]
        ) as store:
            options: Any = {"execution": "graph", "trainers": 4, "epochs": 3}
            once = KillOnce(str(tmp_path / "once"), other)
            result = daskps.train(store, once, rows, timeout=60, **options)
            np.testing.assert_array_equal(result.weights["w"], -3.0)
            assert float((tmp_path / "once").read_text()) in rows


def test_a_task_calls_for_its_run():
    """A client of no run would read whatever is in force, which may be a round ahead."""
    with inprocess.cluster(1) as made:
        store = daskps.create({"w": np.zeros(2)})
        work, found = GraphWork(store.uid, 7, 3, dumps("mean"), b""), Future[Any]()
        made.start(made.hosts[0].worker.address, TaskContext, [work], found)
        carriers = found.result(30).shards.carriers
    assert (carriers.run, carriers.rank) == (7, 0)


def test_a_round_is_read_once_for_all_threads():
    meta: Any = SimpleNamespace(layout=LAYOUT)
    weights, target = Weights(meta), whole(meta)
    log: list[int] = []

    def of(number: int, anew: int = 0) -> float:
        def read(target):
            log.append(number)
            target.flats[0][:] = number

        weights.copy_to(target, RoundId(1, anew, number), read)
        return float(target.flats[0][0])

    assert [of(3), of(3), of(4), of(3, anew=1), of(4)] == [3, 3, 4, 3, 4]
    assert log == [3, 4, 3, 4]


def test_a_read_that_failed_is_made_again():
    meta: Any = SimpleNamespace(layout=LAYOUT)
    weights, target = Weights(meta), whole(meta)

    def fails(target):
        target.flats[0][:] = 9
        raise ConsistencyError

    weights.copy_to(target, RoundId(1, 0, 3), lambda target: None)
    with pytest.raises(ConsistencyError):
        weights.copy_to(target, RoundId(1, 0, 4), fails)
    weights.copy_to(target, RoundId(1, 0, 3), lambda t: t.flats[0].fill(3))
    assert set(target.flats[0]) == {3}

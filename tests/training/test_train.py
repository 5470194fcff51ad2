"""`train` on real worker processes, against the same training in plain NumPy."""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import time
import uuid
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, Event

import daskps
from daskps import optim
from daskps.training.data.rows import SCHEMES, batches
from tests.inprocess import Cluster
from tests.support import local_cluster, mostly_inside, until

START = {"w": np.linspace(-1, 1, 5), "b": np.array(0.25)}
RNG = np.random.default_rng(7)
X = RNG.normal(size=(23, 5))
Y = X @ np.arange(5.0) - 2 + RNG.normal(size=23)
SYNCS = ("bsp", "ssp", "asp")


# -- gradients ---------------------------------------------------------------


def regression(params, X, y):
    residual = X @ params["w"] + params["b"] - y
    grads = {"w": 2 * X.T @ residual / len(X), "b": np.array(2 * residual.mean())}
    return float((residual**2).mean()), grads


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


def rows_as_loss(params, X, y):
    return float(X.mean()), {"w": np.zeros_like(params["w"])}


# -- the same in one process -------------------------------------------------


class NumpySGD:
    def __call__(self, params, grads):
        return {n: params[n] - 0.05 * grads[n] for n in params}


class NumpyAdam:
    def __init__(self):
        self.step, self.m, self.v = 0, {}, {}

    def __call__(self, params, grads):
        self.step += 1
        found = {}
        for n, g in grads.items():
            self.m[n] = 0.9 * self.m.get(n, 0.0) + 0.1 * g
            self.v[n] = 0.999 * self.v.get(n, 0.0) + 0.001 * g * g
            m = self.m[n] / (1 - 0.9**self.step)
            v = self.v[n] / (1 - 0.999**self.step)
            found[n] = params[n] - 0.05 * m / (np.sqrt(v) + 1e-8)
        return found


def groups_of(n, rank, epoch, *, every, batch_size, shuffle, **_):
    rows = list(batches(n, batch_size, seed=3, epoch=epoch, rank=rank, shuffle=shuffle))
    size = every or max(len(rows), 1)
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def deliver(rule, params, part, group):
    """Return rows, summed gradients and local copy of one trainer's group."""
    local, rows = dict(params), 0
    sums: dict[str, Any] = {}
    for batch in group:
        _, grads = regression(local, part[0][batch], part[1][batch])
        rows += len(part[0][batch])
        sums = {n: sums.get(n, 0.0) + g for n, g in grads.items()}
        local = rule(local, grads)
    return rows, sums, local


def numpy_training(
    make_rule: Any = NumpySGD, rule: Any = None, start: Any = START, **given: Any
):
    """Return the weights after each epoch, as BSP with a weighted mean makes them."""
    options: Any = {"every": 1, "scheme": "contiguous", "shuffle": True} | given
    params, rule, history = dict(start), rule or make_rule(), []
    parts = daskps.partition(
        X, Y, options["trainers"], scheme=options["scheme"], seed=3
    )
    for epoch in range(options["epochs"]):
        groups = [
            groups_of(len(part[0]), rank, epoch, **options)
            for rank, part in enumerate(parts)
        ]
        for number in range(max(map(len, groups))):
            found = [
                deliver(make_rule(), params, part, of[number])
                for part, of in zip(parts, groups, strict=True)
                if number < len(of)
            ]
            total = sum(rows for rows, _, _ in found)
            kind = 2 if options.get("average") == "models" else 1
            mean = {n: sum(f[0] * f[kind][n] for f in found) / total for n in params}
            params = mean if kind == 2 else rule(params, mean)
        history.append(params)
    return history


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12)


def bits(weights):
    return b"".join(weights[name].tobytes() for name in sorted(weights))


def sgd_store(params=START, lr=0.05, **kwargs):
    return daskps.create(params, optimizer=optim.SGD(lr), **kwargs)


# -- BSP ---------------------------------------------------------------------


@mostly_inside(
    "options",
    [
        {},
        {"shuffle": False},
        *({"scheme": scheme} for scheme in SCHEMES[1:]),
        {"sync_every": 2},
        {"sync_every": "epoch"},
        {"sync_every": 2, "average": "models"},
        {"sync_every": "epoch", "average": "models", "scheme": "reshuffle"},
    ],
    train=True,
)
def test_bsp_equals_numpy_in_one_process(train, way, options):
    """23 rows over 3 trainers in batches of 3: parts and last batches are unequal."""
    common = {"trainers": 3, "batch_size": 3, "epochs": 3, **options}
    with sgd_store(shards=3) as store:
        result = train(store, regression, X, Y, seed=3, **common)
    every = {"batch": 1, "epoch": 0}.get(common.pop("sync_every", "batch"), 2)
    expected = numpy_training(every=every, **common)[-1]
    assert_close(result.weights, expected)
    assert result.execution == train.execution


def of_a_list(params, X, y):
    w, b = daskps.unflatten(params)
    loss, grads = regression({"w": w, "b": b}, X, y)
    return loss, (grads["w"], grads["b"])


def test_parameters_in_a_list_are_trained_as_named_ones_are(train, way):
    """The function returns (loss, (w, b)); the bits are those of {"w": ..., "b": ...}."""
    found = []
    for start, gradient in [
        (START, regression),
        ([*START.values()], of_a_list),
    ]:
        with sgd_store(start, shards=3) as store:
            result = train(store, gradient, X, Y, seed=3, trainers=2, epochs=2)
            assert store.version == result.version
            store.add([np.ones(5), 0.5] if start is not START else dict(START))
        found.append([*result.weights.values()])
    assert [w.tobytes() for w in found[0]] == [w.tobytes() for w in found[1]]


@mostly_inside("trainers", [1, 2, 5], real=[5], train=True)
def test_bsp_with_adam_equals_numpy(train, way, trainers):
    with daskps.create(START, optimizer=optim.Adam(0.05)) as store:
        result = train(
            store, regression, X, Y, trainers=trainers, batch_size=4, epochs=2, seed=3
        )
    expected = numpy_training(NumpyAdam, trainers=trainers, batch_size=4, epochs=2)
    assert_close(result.weights, expected[-1])


def test_bsp_has_the_same_bits_on_any_shards_and_workers(cluster, rpc_cluster):
    """1, 2, 3 and 5 shards; 1, 2 and 3 workers; by call and by message; repeated."""
    start = {n: a.astype("f4") for n, a in START.items()}
    found = set()
    runs = 0
    with local_cluster(
        n_workers=3, threads=1, processes=False, protocol="tcp"
    ) as third:
        one = [next(iter(cluster.nthreads()))]
        cases: list[Any] = [(cluster, {"shards": n}) for n in (1, 2, 3, 5, 5)]
        cases += [
            (cluster, {"shards": 3, "servers": one}),
            (rpc_cluster, {"shards": 3}),
        ]
        cases += [(third, {}), (third, {"shards": 5})]
        for client, where in cases:
            with daskps.create(
                start, optimizer=optim.Adam(0.05), client=client, **where
            ) as store:
                result = daskps.train(
                    store, regression, X, Y, trainers=5, batch_size=2, epochs=3, seed=3
                )
                found.add(bits(result.weights))
                runs += 1
    assert runs == 9
    assert len(found) == 1
    assert found != {bits(start)}


#: Rows, trainers, batch size, rounds and batches.
UNEQUAL = [(7, 3, 2, 2, 4), (2, 4, 1, 1, 2), (5, 1, 2, 3, 3)]


@mostly_inside(
    "sync,rows,trainers,batch_size,rounds,n_batches,every",
    [(s, *u, e) for u in UNEQUAL for s in SYNCS for e in (1, "epoch")],
    real=[(s, *UNEQUAL[0], 1) for s in SYNCS],
    train=True,
)
def test_unequal_and_empty_parts_end(
    train, way, sync, rows, trainers, batch_size, rounds, n_batches, every
):
    """A weight that counts steps shows that every batch came, and came once."""
    if every == "epoch":
        rounds, n_batches = min(rounds, 1), min(rows, trainers)
    with sgd_store({"w": np.zeros(3)}, lr=1.0) as store:
        result = train(
            store,
            ones,
            np.zeros((rows, 2)),
            trainers=trainers,
            batch_size=batch_size,
            epochs=3,
            sync=sync,
            sync_every=every,
        )
    assert result.version == 3 * (rounds if sync == "bsp" else n_batches)
    if every == 1:
        np.testing.assert_array_equal(result.weights["w"], -float(result.version))
    assert [entry.epoch for entry in result.history] == [0, 1, 2]


def rank_digits(stacked, weights):
    assert stacked.ndim == 2
    assert weights.dtype == np.float64
    assert len(stacked) == len(weights) == 3
    return (stacked * np.array([1.0, 10, 100])[:, None] * weights[:, None]).sum(axis=0)


@mostly_inside(
    "reduce,expected",
    [
        # Contributions 1, 3 and 4.5 with 2, 2 and 1 rows.
        ("mean", (1 * 2 + 3 * 2 + 4.5) / 5),
        ("sum", 1 + 3 + 4.5),
        (rank_digits, 1 * 2 + 3 * 2 * 10 + 4.5 * 1 * 100),
    ],
    real=[(rank_digits, 1 * 2 + 3 * 2 * 10 + 4.5 * 1 * 100)],
    train=True,
)
def test_reduce(train, way, reduce, expected):
    data = np.array([1.0, 1, 3, 3, 4.5])
    with sgd_store({"w": np.zeros(5)}, lr=1.0) as store:
        result = train(store, means, data, trainers=3, reduce=reduce)
    np.testing.assert_allclose(result.weights["w"], -expected, rtol=1e-14)


def means(params, X, y):
    return {"w": np.full_like(params["w"], X.mean())}


def too_short(stacked, weights):
    return stacked[0, :-1]


def broken(stacked, weights):
    raise ZeroDivisionError("reduce broke")


def named_by_some(params, X, y):
    """Both ranks name a, and only the one with fewer rows b."""
    if X[0, 0]:
        return {"a": np.array(8.0)}
    return {"a": np.array(4.0), "b": np.array(4.0)}


@pytest.mark.parametrize("way", ["inside", "queue"], indirect=True)
def test_a_mean_divides_by_the_rows_of_those_that_named_the_array(train, way):
    rows = np.repeat([[0.0], [1.0]], [2, 6], axis=0)
    params = {"a": 0.0, "b": 0.0}
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        found = train(store, named_by_some, rows, weights=[1, 3], trainers=2)
        # a: (2 * 4 + 6 * 8) / 8; b: 2 * 4 / 2, and not / 8.
        assert (found.weights["a"], found.weights["b"]) == (-7.0, -4.0)


@mostly_inside(
    "reduce,error,match",
    [(too_short, ValueError, "shape"), (broken, ZeroDivisionError, "reduce broke")],
    train=True,
)
def test_reduce_that_fails_ends_the_run(train, way, reduce, error, match):
    with sgd_store() as store:
        with pytest.raises(error, match=match):
            train(store, regression, X, Y, trainers=2, reduce=reduce)
        assert store.version == 0
        assert train(store, regression, X, Y, trainers=2).version == 1


# -- what comes back ---------------------------------------------------------


@mostly_inside("sync", SYNCS, train=True)
def test_history(train, way, sync):
    data = np.arange(10.0)
    with sgd_store() as store:
        result = train(
            store,
            rows_as_loss,
            data,
            trainers=3,
            batch_size=2,
            epochs=4,
            sync=sync,
            validate=lambda params: {"first": params["w"][0], "one": np.int64(1)},
        )
        assert result.version == store.version
        # 3 trainers of 2 batches, 4 epochs: each step counts once on every shard.
        assert set(store.versions) == {8 if sync == "bsp" else 24}
    assert len(result.history) == 4
    for number, entry in enumerate(result.history):
        assert entry.epoch == number
        # Weighted by rows: the mean over all of them, whatever their batches.
        assert entry.loss == pytest.approx(data.mean(), rel=1e-12)
        assert entry.metrics == {"first": -1.0, "one": 1.0}
        assert all(type(value) is float for value in entry.metrics.values())
        assert 0 < entry.seconds < 60
        assert 0 <= entry.staleness <= {"bsp": 0, "ssp": 3, "asp": 100}[sync]
    assert result.stats.clock == 8
    assert result.stats.lost_trainers == 0
    # A prepared step that one local shard has taken and another one hands back goes to
    # both again: the first one tells it from a new one.
    assert result.stats.duplicates == 0 or isinstance(way, Cluster)


def test_history_without_a_loss(train, client):
    with sgd_store() as store:
        result = train(store, ones, X, epochs=2)
    assert [entry.loss for entry in result.history] == [None, None]
    assert [entry.metrics for entry in result.history] == [{}, {}]


@mostly_inside(train=True)
def test_validate_sees_the_weights_of_its_epoch(train, way):
    seen: list[dict[str, Any]] = []
    options: Any = {"trainers": 3, "batch_size": 3, "epochs": 3}

    def validate(params):
        seen.append(params)
        assert threading.current_thread() is threading.main_thread()
        return {}

    with sgd_store() as store:
        train(store, regression, X, Y, seed=3, validate=validate, **options)
    for found, expected in zip(seen, numpy_training(**options), strict=True):
        assert_close(found, expected)


@mostly_inside("sync", SYNCS, train=True)
def test_stop_ends_at_the_border_of_an_epoch(train, way, sync):
    """7 rows over 3 trainers in pairs: 2 rounds or 4 pushes an epoch, 3 epochs."""
    lengths = []

    def stop(history):
        lengths.append(len(history))
        return len(history) == 3

    with sgd_store({"w": np.zeros(3)}, lr=1.0) as store:
        result = train(
            store,
            ones,
            np.zeros(7),
            trainers=3,
            batch_size=2,
            epochs=100,
            sync=sync,
            stop=stop,
        )
        assert lengths == [1, 2, 3]
        assert result.version == (6 if sync == "bsp" else 12)
        np.testing.assert_array_equal(result.weights["w"], -float(result.version))
        assert len(result.history) == 3
        assert train(store, ones, np.zeros(7)).version > result.version


def test_an_epoch_ends_where_one_rank_has_many_more_batches(train, way):
    """8 batches and 1, 3 clocks apart: who waits for the verdict is not waited for."""
    with sgd_store({"w": np.zeros(3)}, lr=1.0) as store:
        result = train(
            store,
            ones,
            np.zeros(67),
            trainers=2,
            weights=[60, 7],
            batch_size=8,
            epochs=3,
            sync="ssp",
            stop=lambda history: len(history) == 2,
            timeout=60,
        )
        assert [epoch.epoch for epoch in result.history] == [0, 1]
        assert result.weights["w"].tolist() == [-18.0] * 3


class Recorder:
    """Notes every event."""

    def __init__(self):
        self.events = []
        self.clocks = []

    def note(self, event, run):
        assert isinstance(run.store, daskps.ParameterStore)
        assert threading.current_thread() is threading.main_thread()
        self.events.append((event, len(run.history)))
        self.clocks.append(run.clock)

    def on_start(self, run):
        self.note("start", run)

    def on_round(self, run):
        self.note("round", run)

    def on_epoch(self, run):
        self.note("epoch", run)

    def on_stop(self, run):
        self.note("stop", run)


def slow(params, X, y):
    """Take 5 ms, so that a run outlives the pause between two on_round."""
    threading.Event().wait(0.005)
    return ones(params, X, y)


@mostly_inside("sync", SYNCS, train=True)
def test_callbacks_come_in_order(train, way, sync):
    first, second = Recorder(), Recorder()
    began = time.monotonic()
    with sgd_store() as store:
        train(
            store,
            slow,
            np.zeros(40),
            batch_size=1,
            epochs=2,
            sync=sync,
            callbacks=[first, second],
        )
    seconds = time.monotonic() - began
    assert first.events == second.events
    assert first.events[0] == ("start", 0)
    assert first.events[-1] == ("stop", 2)
    assert [e for e in first.events if e[0] == "epoch"] == [("epoch", 1), ("epoch", 2)]
    n_rounds = sum(event == "round" for event, _ in first.events)
    # Ten a second, and one more after each of the others, which are told at once.
    assert 1 <= n_rounds <= 10 * seconds + 1 + len(first.events) - n_rounds
    assert first.clocks == sorted(first.clocks)
    assert first.clocks[-1] == 40


def test_progress_bar_and_log_with_a_run(train, client, caplog):
    file, logger = io.StringIO(), logging.getLogger("of a run")
    with sgd_store() as store, caplog.at_level(logging.INFO, logger.name):
        train(
            store,
            regression,
            X,
            Y,
            epochs=2,
            batch_size=4,
            validate=lambda params: {"accuracy": 0.5},
            callbacks=[daskps.ProgressBar(file), daskps.Log(logger)],
        )
    last = file.getvalue().rstrip("\n").split("\r")[-1]
    assert last.startswith("epoch 2/2: 100%|")
    assert " 6/6 [" in last
    assert "loss " in last
    assert "accuracy 0.5" in last
    start, *epochs, end = [record.getMessage() for record in caplog.records]
    assert start.endswith("starts")
    assert [text.split(":")[0] for text in epochs] == ["epoch 0", "epoch 1"]
    assert end.endswith("ends at clock 6 after 2 epochs")


@mostly_inside(train=True)
def test_callback_that_raises_ends_the_run(train, way):
    class Bad:
        def on_epoch(self, run):
            raise ZeroDivisionError("in a callback")

    with sgd_store() as store:
        hooks: list[Any] = [
            {"callbacks": [Bad()]},
            {"validate": lambda params: 1 / 0},
            {"stop": lambda history: 1 / 0},
        ]
        for broken in hooks:
            with pytest.raises(ZeroDivisionError):
                train(store, regression, X, Y, epochs=10**6, **broken)
        assert train(store, regression, X, Y).history[0].loss > 0


# -- data --------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dask_arrays_give_the_bits_of_numpy(client, scheme):
    found = []
    # Of the 23 rows three trainers get 8, 8 and 7.
    lazy = da.from_array(X, chunks=(8, 2)), da.from_array(Y, chunks=7)
    other = da.from_array(Y, chunks=8)
    for data in ((X, Y), lazy, (lazy[0], Y), (X, other)):
        with sgd_store() as store:
            result = daskps.train(
                store,
                regression,
                *data,
                trainers=3,
                batch_size=3,
                epochs=2,
                scheme=scheme,
                seed=3,
            )
            found.append(bits(result.weights))
    assert found == found[:1] * 4


def type_of_batch(params, X, y):
    assert type(X) is np.ndarray
    assert type(y) is np.ndarray
    return len(X), {"w": np.zeros(5)}


def test_dask_arrays_arrive_as_arrays(client):
    X_lazy = da.random.default_rng(0).random((40, 3), chunks=(9, 3))
    with sgd_store() as store:
        result = daskps.train(
            store, type_of_batch, X_lazy, X_lazy.sum(axis=1), trainers=4, batch_size=3
        )
    # Chunks of 9, 9, 9, 9 and 4 rows: three trainers get one, in three batches of
    # 3 rows, and the last one 13 rows, in batches of 3, 3, 3, 3 and 1.
    assert result.history[0].loss == pytest.approx((3 * 3 * 9 + 4 * 9 + 1) / 40)


def fails(n=1):
    return 1 / (n - n)


def test_dask_array_that_cannot_be_computed(client):
    bad = da.from_array(X, chunks=5).map_blocks(lambda block: 1 / fails(), dtype="f8")
    with sgd_store() as store:
        with pytest.raises(ZeroDivisionError):
            daskps.train(store, regression, bad, Y)
        assert daskps.train(store, regression, X, Y).version > 0


@mostly_inside("weights", [[1, 3], [0, 1]], train=True)
def test_weights_set_the_parts(train, way, weights):
    with sgd_store({"w": np.zeros(1)}, lr=1.0) as store:
        result = train(
            store, ones, np.zeros(8), trainers=2, weights=weights, batch_size=1
        )
    assert result.version == max(8 * w // sum(weights) for w in weights)


@pytest.mark.parametrize("execution", ["auto", "resident"])
def test_execution(client, execution):
    with sgd_store() as store:
        result = daskps.train(store, regression, X, Y, execution=execution)
    assert result.execution == "resident"


# -- optimizer state ---------------------------------------------------------


@mostly_inside(train=True)
def test_optimizer_state_survives_runs_and_is_reset(train, way):
    """B18: two runs of one epoch are one run of two; a reset one begins anew."""
    options: Any = {"trainers": 2, "batch_size": 4, "shuffle": False}
    with daskps.create(START, optimizer=optim.Adam(0.05)) as store:
        train(store, regression, X, Y, **options)
        again = train(store, regression, X, Y, **options)
        first, second = numpy_training(NumpyAdam, epochs=2, **options)
        assert_close(again.weights, second)
        store.assign(first)
        fresh = train(store, regression, X, Y, reset_optimizer=True, **options)
    [expected] = numpy_training(NumpyAdam, start=first, epochs=1, **options)
    assert_close(fresh.weights, expected)
    assert np.abs(expected["w"] - second["w"]).max() > 1e-4


# -- others at the store -----------------------------------------------------


class Once:
    """Does something to the store in the middle of a run, once."""

    def __init__(self, action):
        self.action, self.seen = action, []

    def on_epoch(self, run):
        if len(run.history) == 2:
            self.seen.append(self.action(run.store))


def refusals(store):
    found = []
    grads = {"w": np.ones(5)}
    calls = (
        store.push,
        store.add,
        store.assign,
        store.pushpull,
        lambda given: store.push_async(given).result(),
    )
    for call in calls:
        with pytest.raises(daskps.ConsistencyError, match="bsp") as caught:
            call(grads)
        found.append(type(caught.value))
    assert set(store.pull()) == {"w", "b"}
    return found


@mostly_inside(train=True)
def test_outside_push_during_a_bsp_run_changes_nothing(train, way):
    options: Any = {"trainers": 2, "batch_size": 4, "epochs": 4, "seed": 3}
    once = Once(refusals)
    with sgd_store() as store:
        result = train(store, regression, X, Y, callbacks=[once], **options)
        assert once.seen == [[daskps.ConsistencyError] * 5]
        assert store.push({"w": np.ones(5)}) == result.version + 1
    with sgd_store() as other:
        alone = train(other, regression, X, Y, **options)
    assert bits(alone.weights) == bits(result.weights)
    assert alone.version == result.version


@mostly_inside("sync", ["ssp", "asp"])
def test_outside_push_during_an_asynchronous_run_is_applied(way, sync):
    once = Once(lambda store: store.add({"w": np.full(5, 1000.0)}))
    with sgd_store(lr=1.0) as store:
        result = daskps.train(
            store,
            ones,
            X,
            trainers=2,
            batch_size=12,
            epochs=4,
            sync=sync,
            callbacks=[once],
        )
    np.testing.assert_allclose(result.weights["w"], START["w"] + 1000 - 8)
    assert result.version == 9


@mostly_inside(train=True)
def test_two_runs_at_once(train, way):
    def second(store):
        for call in (
            lambda: train(store, regression, X, Y),
            lambda: daskps.run(store, print, [1]),
        ):
            with pytest.raises(daskps.ConsistencyError, match="one run at a time"):
                call()
        return True

    once = Once(second)
    with sgd_store() as store:
        result = train(store, regression, X, Y, trainers=2, epochs=4, callbacks=[once])
        assert result.version == 4
    assert once.seen == [True]


@mostly_inside(train=True)
def test_two_stores_train_at_once(train, way):
    with sgd_store() as one, sgd_store() as two:
        once = Once(lambda store: train(two, regression, X, Y, seed=3))
        result = train(one, regression, X, Y, epochs=4, seed=3, callbacks=[once])
    assert once.seen[0].version < result.version


# -- runs that are cut short -------------------------------------------------

ENDLESS: Any = {"epochs": 10**6, "batch_size": 4, "trainers": 2}


def assert_usable(store):
    """A run works, and nothing of the one before is in its way."""
    before = store.versions
    assert len(set(before)) == 1, "a round was applied on some shards only"
    result = daskps.train(store, regression, X, Y, trainers=3)
    assert result.version == before[0] + 1


@mostly_inside("sync", SYNCS, train=True)
def test_timeout_ends_the_run(train, way, sync):
    with sgd_store() as store:
        with pytest.raises(TimeoutError, match="a run on store"):
            train(store, regression, X, Y, sync=sync, timeout=0.2, **ENDLESS)
        if sync == "bsp":
            assert_usable(store)


class Interrupt:
    def __init__(self, event):
        setattr(self, event, self.strike)

    def strike(self, run):
        raise KeyboardInterrupt


@pytest.mark.parametrize("event", ["on_start", "on_round", "on_epoch"])
def test_keyboard_interrupt_ends_the_run(train, way, event):
    with sgd_store() as store:
        with pytest.raises(KeyboardInterrupt):
            train(store, regression, X, Y, callbacks=[Interrupt(event)], **ENDLESS)
        assert_usable(store)
        until(lambda: not any(way.processing().values()))


def on_async_client(client, work):
    """Run a coroutine function of an asynchronous client of the same cluster."""

    async def main():
        async with Client(client.scheduler.address, asynchronous=True) as own:
            return await work(own)

    return asyncio.run(main())


def test_cancelled_awaitable_ends_the_run(train, way):
    async def work(client):
        store = await daskps.aio.create(START, optimizer=optim.SGD(0.05), client=client)
        started = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Started:
            def on_epoch(self, run):
                loop.call_soon_threadsafe(started.set)

        task = asyncio.ensure_future(
            train(store, regression, X, Y, callbacks=[Started()], **ENDLESS)
        )
        await asyncio.wait_for(started.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        versions = await store.versions
        assert len(set(versions)) == 1
        result = await train(store, regression, X, Y, trainers=3)
        assert result.version == versions[0] + 1
        await store.close()

    on_async_client(way, work)


def test_asynchronous_client_trains_and_stops(train, way):
    seen = []

    def validate(params):
        assert threading.current_thread() is not threading.main_thread()
        seen.append(params["w"].copy())
        return {"n": len(seen)}

    async def work(client):
        async with await daskps.aio.create(
            START, optimizer=optim.SGD(0.05), client=client
        ) as store:
            result = await train(
                store,
                regression,
                X,
                Y,
                trainers=3,
                batch_size=3,
                epochs=100,
                seed=3,
                validate=validate,
                stop=lambda history: history[-1].metrics["n"] == 2,
            )
            assert await store.version == result.version
            return result

    result = on_async_client(way, work)
    first, second = numpy_training(trainers=3, batch_size=3, epochs=2)
    assert_close({"w": seen[0]}, {"w": first["w"]})
    assert_close(result.weights, second)
    assert result.version == 6


# -- gradients that are wrong ------------------------------------------------


def wrong_key(params, X, y):
    return {"w": np.zeros(5), "v": np.zeros(5)}


def wrong_shape(params, X, y):
    return {"w": np.zeros(1)}


def not_a_number(params, X, y):
    return {"w": np.full(5, np.nan)}


def complex_numbers(params, X, y):
    return {"w": np.zeros(5, complex)}


def no_mapping(params, X, y):
    return [np.zeros(5)]


def nothing(params, X, y):
    return None


def three_things(params, X, y):
    return 1.0, {"w": np.zeros(5)}, {"accuracy": 1.0}


def text_for_loss(params, X, y):
    return "low", {"w": np.zeros(5)}


class UnpicklableError(Exception):
    def __reduce__(self):
        raise TypeError("not this one")


def raises_unpicklable(params, X, y):
    raise UnpicklableError("the text")


#: Functions that return no gradient, the error of each and what it says.
WRONG: Any = [
    (wrong_key, daskps.UnknownParameterError, "v"),
    (wrong_shape, daskps.PushRejectedError, "shape"),
    (not_a_number, daskps.PushRejectedError, "NaN"),
    (complex_numbers, daskps.PushRejectedError, "complex128"),
    (no_mapping, daskps.PushRejectedError, "no_mapping returned list"),
    (nothing, daskps.PushRejectedError, "nothing returned NoneType"),
    (three_things, daskps.PushRejectedError, "three_things"),
    (text_for_loss, daskps.PushRejectedError, "text_for_loss"),
]


@mostly_inside(
    "gradient,error,match,sync",
    [(*wrong, sync) for wrong in WRONG for sync in ("bsp", "asp")],
    real=[(*WRONG[1], "bsp")],
    train=True,
)
def test_wrong_gradient_is_a_typed_error_with_its_rank(
    train, way, gradient, error, match, sync
):
    data = np.zeros((2, 5))
    with sgd_store() as store:
        with pytest.raises(error, match=match) as caught:
            # Rank 0 has no rows: only rank 1 can be at fault.
            train(
                store, gradient, data, trainers=2, weights=[0, 1], sync=sync, epochs=9
            )
        assert any("trainer 1 of 2" in note for note in caught.value.__notes__)
        assert store.versions == (0, 0)
        assert_usable(store)


def test_error_that_cannot_be_pickled_still_says_what(train, client):
    with sgd_store() as store:
        with pytest.raises(Exception, match="the text"):
            train(store, raises_unpicklable, X, Y)
        assert_usable(store)


def test_gradient_that_cannot_be_pickled(train, client):
    lock = threading.Lock()

    def gradient(params, X, y):
        with lock:
            return ones(params, X, y)

    with sgd_store() as store:
        with pytest.raises(TypeError, match="pickle"):
            train(store, gradient, X, Y)
        with pytest.raises(TypeError, match="pickle"):
            daskps.run(store, lambda trainer, part: lock, [1])
        with pytest.raises(TypeError, match="pickle"):
            train(store, regression, X, Y, reduce=lambda s, w: lock)
        assert_usable(store)


def no_gradients(params, X, y):
    return {}


@mostly_inside(train=True)
def test_gradient_without_keys_changes_nothing(train, way):
    """A round with weight raises the version all the same."""
    with sgd_store() as store:
        result = train(store, no_gradients, X, trainers=2, batch_size=4)
    assert_close(result.weights, START)
    assert result.version == 3


def spoils_params(params, X, y):
    grads = ones(params, X, y)
    for value in params.values():
        value[...] = np.nan
    return grads


@mostly_inside(train=True)
def test_gradient_may_write_to_its_params(train, way):
    """They are read anew for the next batch."""
    with sgd_store(lr=1.0) as store:
        result = train(store, spoils_params, X, trainers=2, batch_size=4)
    assert_close(result.weights, {n: a - 3 for n, a in START.items()})


def params_as_gradient(params, X, y):
    return {n: params[n] for n in params}


@mostly_inside(train=True)
def test_gradient_may_be_its_params(train, way):
    with sgd_store(lr=0.5) as store:
        result = train(store, params_as_gradient, X, trainers=2, batch_size=4)
    assert_close(result.weights, {n: a / 8 for n, a in START.items()})


# -- arguments ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"trainers": 0}, ValueError, "trainers"),
        ({"trainers": -1}, ValueError, "trainers"),
        ({"trainers": 1.5}, TypeError, "trainers"),
        ({"trainers": 10**6}, daskps.LayoutError, "1,024"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"shuffle": "no"}, TypeError, "shuffle is True or False"),
        ({"reset_optimizer": 0}, TypeError, "reset_optimizer is True or False"),
        ({"epochs": 0}, ValueError, "epochs"),
        ({"epochs": "3"}, TypeError, "epochs"),
        ({"seed": -1}, ValueError, "seed"),
        ({"sync": "foo"}, ValueError, "bsp.*ssp.*asp"),
        ({"sync": 3}, TypeError, "bsp"),
        ({"reduce": "median"}, ValueError, "mean.*sum"),
        ({"reduce": 3}, TypeError, "mean.*sum"),
        ({"reduce": rank_digits, "sync": "asp"}, ValueError, "bsp"),
        ({"average": "models", "sync": "asp"}, ValueError, "bsp"),
        ({"average": "models", "sync": "ssp"}, ValueError, "bsp"),
        ({"average": "models", "reduce": "sum"}, ValueError, "mean"),
        ({"average": "weights"}, ValueError, "gradients.*models"),
        ({"sync_every": 0}, ValueError, "sync_every"),
        ({"sync_every": "round"}, ValueError, "batch.*epoch"),
        ({"sync_every": 1.5}, TypeError, "sync_every"),
        ({"scheme": "foo"}, ValueError, "contiguous.*reshuffle"),
        ({"weights": [1, 1, 1], "trainers": 2}, ValueError, "weights"),
        ({"execution": "threads"}, ValueError, "auto.*resident.*graph"),
        ({"execution": "graph", "sync": "asp"}, ValueError, "graph.*bsp.*'asp'"),
        ({"execution": "graph", "sync": "ssp"}, ValueError, "graph.*bsp.*'ssp'"),
        ({"execution": "resident", "trainers": 1025}, daskps.LayoutError, "1,024"),
        ({"sync": "asp", "trainers": 1025}, daskps.LayoutError, "1,024"),
        ({"on_trainer_lost": "ignore"}, ValueError, "restart.*raise"),
        ({"callbacks": [print]}, TypeError, "on_epoch"),
        ({"timeout": -1}, ValueError, "timeout|seconds"),
        ({"timeout": "soon"}, ValueError, "timeout|seconds"),
        ({"codec": "bf61"}, ValueError, "bf16"),
        ({"checkpoint": "here"}, TypeError, "Checkpoints"),
        ({"frequency": 1}, TypeError, "frequency"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0],
)
@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_bad_arguments(way, options, error, match):
    with sgd_store() as store:
        with pytest.raises(error, match=match):
            daskps.train(store, regression, X, Y, **options)
        assert store.version == 0


def test_bad_staleness():
    with pytest.raises(ValueError, match="staleness"):
        daskps.SSP(-1)
    with pytest.raises(TypeError, match="staleness"):
        daskps.SSP(1.5)  # type: ignore[arg-type]  # refused


def test_bad_data_and_function(client):
    with sgd_store() as store:
        with pytest.raises(ValueError, match="rows"):
            daskps.train(store, regression, X, Y[:-1])
        with pytest.raises(TypeError, match="rows"):
            daskps.train(store, regression, 3)
        with pytest.raises(TypeError, match="gradient"):
            daskps.train(store, "regression", X, Y)  # type: ignore[arg-type]  # refused
        with pytest.raises(TypeError, match="ParameterStore"):
            daskps.train("store", regression, X, Y)  # type: ignore[arg-type]  # refused
        assert store.version == 0


def test_train_without_an_optimizer(train, client):
    with daskps.create(START) as store:
        with pytest.raises(daskps.NoOptimizerError, match="optimizer"):
            train(store, regression, X, Y)
        assert store.version == 0


# -- validation ---------------------------------------------------------------


def test_training_goes_on_while_an_epoch_is_validated(train, client):
    """The validation of epoch 0 waits for a gradient of epoch 1 to be computed."""
    name = f"daskps-test-{uuid.uuid4().hex}"
    seen: list[Any] = []

    def validate(params):
        if not seen:
            Event(name, client=client).wait(timeout=30)
            assert Event(name, client=client).is_set()
        seen.append(params["w"].copy())
        return {}

    with sgd_store() as store:
        train(store, Tell(name, client), X, Y, epochs=2, seed=3, validate=validate)
    options: Any = {"trainers": 2, "batch_size": 64, "epochs": 2}
    for found, expected in zip(seen, numpy_training(**options), strict=True):
        assert_close({"w": found}, {"w": expected["w"]})


class Tell:
    """A gradient that sets an event once it sees other weights than the first."""

    def __init__(self, name, client):
        self.name = name

    def __call__(self, params, X, y):
        if not np.array_equal(params["w"], START["w"]):
            Event(self.name).set()
        return regression(params, X, y)

"""`train(rows=)`: the rows of each batch are among the parameters of its step."""

from __future__ import annotations

import math
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.combination import Combination
from daskps.layout.arrays import Layout
from daskps.store import intake
from daskps.training.data.rows import batches, partition
from daskps.training.resident import BatchRows, Marks
from daskps.training.row_ids import checked_functions
from daskps.training.steps import FitPlan, Stepper

#: In this process: what is sent, and how, tests of trainers' verbs say.
inside = pytest.mark.parametrize("way", ["inside"], indirect=True)

N_USERS, N_ITEMS, DIM, LR, SIZE, EPOCHS = 12, 9, 3, 0.4, 8, 3


def ratings():
    """Return (user, item) pairs, and the products of hidden factors for them."""
    rng = np.random.default_rng(5)
    X = np.stack([rng.integers(0, N_USERS, 67), rng.integers(0, N_ITEMS, 67)], 1)
    of_users, of_items = (
        rng.normal(size=(N_USERS, DIM)),
        rng.normal(size=(N_ITEMS, DIM)),
    )
    return X, (of_users[X[:, 0]] * of_items[X[:, 1]]).sum(1)


def first_factors():
    rng = np.random.default_rng(6)
    return {
        "users": rng.normal(size=(N_USERS, DIM)),
        "items": rng.normal(size=(N_ITEMS, DIM)),
    }


def users(X):
    return X[:, 0]


def items(X):
    return X[:, 1:]  # ids in two dimensions


ROWS = {"users": users, "items": items}


def gradient(params, X, y):
    u, v = params["users"], params["items"][:, 0]
    error = (u * v).sum(1) + params["bias"] - y
    share = error[:, None] / len(y)
    grads = {
        "bias": error.mean(keepdims=True),
        "users": share * v,
        "items": RowGrad(X[:, 1], share * u),
    }
    return (error**2).mean() / 2, grads


def factorised(X, y, n_trainers):
    """Return the factors that rounds of so many trainers lead to, in plain NumPy."""
    params = {"bias": np.zeros(1), **first_factors()}
    parts = partition(X, y, n_trainers)
    for epoch in range(EPOCHS):
        each = [
            [*batches(len(px), SIZE, seed=3, epoch=epoch, rank=rank)]
            for rank, (px, _) in enumerate(parts)
        ]
        for number in range(max(map(len, each))):
            sums = {name: np.zeros_like(value) for name, value in params.items()}
            total = 0
            for (px, py), of in zip(parts, each, strict=True):
                if number >= len(of):
                    continue
                bx, by = px[of[number]], py[of[number]]
                seen = {n: params[n][f(bx)] for n, f in ROWS.items()}
                _, grads = gradient(seen | {"bias": params["bias"]}, bx, by)
                total += len(by)
                sums["bias"] += len(by) * grads["bias"]
                np.add.at(sums["users"], bx[:, 0], len(by) * grads["users"])
                np.add.at(sums["items"], bx[:, 1], len(by) * grads["items"].values)
            for name in params:
                params[name] -= LR * sums[name] / total
    return params


def factors(shards):
    params: dict[str, Any] = {"bias": np.zeros(1)}
    for name, value in first_factors().items():
        n, dim = value.shape
        params[name] = TableSpec(n, dim, "float64", init=value)
    return daskps.create(params, optimizer=optim.SGD(LR), shards=shards)


def train(store, gradient=gradient, rows=ROWS, **how):
    X, y = ratings()
    given = {"epochs": EPOCHS, "trainers": 2, "batch_size": SIZE, "seed": 3, **how}
    return daskps.train(store, gradient, X, y, rows=rows, callbacks=(), **given)


@inside
def test_rounds_with_rows_are_those_of_numpy(way):
    """In both executions, with the same bits."""
    # 34 and 33 rows: the last batches of both are short.
    X, y = ratings()
    expected = factorised(X, y, 2)
    found = []
    for execution in ("resident", "graph"):
        with factors(3) as store:
            result = train(store, execution=execution)
            assert result.execution == execution
            assert result.history[-1].loss < result.history[0].loss
            rows = {"users": range(N_USERS), "items": range(N_ITEMS)}
            found.append(store.pull(rows=rows))
    for name, value in expected.items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-9)
        np.testing.assert_array_equal(found[0][name], found[1][name])


@inside
@pytest.mark.parametrize("sync", ["bsp", "graph", "ssp", "asp"])
def test_a_run_learns_rows(way, sync):
    seen = []

    def validate(params):
        seen.append([*params])
        return {"n": 1.0}

    how: Any = {"validate": validate, "epochs": 12}
    if sync == "graph":
        sync, how["execution"] = "bsp", "graph"
    if sync == "bsp":
        how["weights"] = [60, 7]  # the second rank sits most rounds out
    with factors(2) as store:
        result = train(store, sync=sync, stop=lambda history: len(history) == 10, **how)
        assert len(result.history) == 10
        assert result.history[-1].loss < result.history[0].loss / 2
        assert [*result.weights] == ["bias"]
        assert seen == [["bias"]] * 10


CALLS: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}


def drawn(name, X, rng):
    """Note what is drawn for each batch; ids of any shape go."""
    CALLS[name].append((len(X), int(rng.integers(1 << 40))))
    return [CALLS[name][-1][1] % N_USERS]


def ones(params, X, y):
    return {name: np.ones_like(params[name]) for name in CALLS}


def some(X, rng):
    return rng.integers(0, 1000, (len(X), 2))


def plan_of(**how):
    return FitPlan(
        gradient=gradient,
        chosen=Combination("train"),
        epochs=2,
        batch_size=3,
        shuffle=False,
        seed=0,
        **how,
    )


@inside
def test_a_function_is_called_once_for_each_batch(way):
    found = []
    params = {name: TableSpec(N_USERS, 1, "float64") for name in CALLS}
    rows = {name: partial(drawn, name) for name in CALLS}
    X = np.zeros((19, 1))
    for seed in (0, 0, 1):
        for of in CALLS.values():
            of.clear()
        with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
            how: Any = {"trainers": 1, "batch_size": 8, "epochs": 2, "seed": seed}
            daskps.train(store, ones, X, rows=rows, sync="asp", callbacks=(), **how)
            counts = store["a"].pull(range(N_USERS))[:, 0]
        assert [n for n, _ in CALLS["a"]] == [8, 8, 3] * 2
        assert len({number for _, number in CALLS["a"]}) == 6
        assert CALLS["a"] == CALLS["b"]
        ids = [number % N_USERS for _, number in CALLS["a"]]
        assert counts.tolist() == [-ids.count(i) for i in range(N_USERS)]
        found.append(CALLS["a"][:])
    assert found[0] == found[1] != found[2]


LAYOUT = Layout.build({}, 1, tables={"emb": (1000, 1, "float64")})
AT = {
    "uid": "s",
    "name": "s",
    "session": True,
    "owners": ["tcp://w"],
    "generations": [1],
    "segments": [],
    "rules": b"",
    "optimizers": [],
    "lineage": "s",
    "origin": "s",
    "recovers": False,
    "cluster": "",
}


class Alone:
    """A trainer's place in a run, whose store is not there: what it asks for is noted."""

    rank = 1

    def __init__(self, clock):
        self.clock, self.meta = clock, StoreMap({**AT, "layout": LAYOUT.to_wire()})
        self.reads: Any = SimpleNamespace(lag=0)
        #: Ids that were read, and how far ahead; with the step None.
        self.read: list[tuple[list[int], int | None]] = []

    def read_all(self, targets, timeout, ahead=0):
        for target in targets:
            self._note(target, ahead, self.clock)

    def deliver(self, given, timeout, *, target):
        self.clock += 1
        if target is not None:
            self._note(target, None, self.clock)

    def _note(self, target, ahead, value):
        """Read the clock as the value of every row."""
        ids = [one.asked.ids for of in target.rows.values() for one in of]
        self.read.append((np.concatenate([[], *ids]).tolist(), ahead))
        for flat in target.flats:
            flat[...] = value


def begun(exchange, deadline):
    return SimpleNamespace(result=partial(exchange, None))


def alone(clock=0, **how):
    session: Any = Alone(clock)
    stepper = Stepper(plan_of(**how), session.meta)
    beside: Any = SimpleNamespace(session=session, submit=begun)
    return session, stepper, BatchRows(stepper.plan, beside, stepper, 4)


def test_a_trainer_that_is_started_again_gets_the_same_ids():
    def ids_at(clock, steps, ahead):
        how: Any = {"rows": checked_functions({"emb": some}), "rows_ahead": ahead}
        _, stepper, rows = alone(clock, **how)
        for _ in range(steps):
            rows.make_ready(np.zeros(3))
            if rows.may_begin():
                rows.begin(np.zeros(3))
            rows.deliver(TrainerStep({}), np.zeros(3))
        rows.make_ready(np.zeros(3))
        return stepper.ids["emb"].tolist()

    last = ids_at(5, 0, 0)
    assert last == ids_at(3, 2, 0) == ids_at(0, 5, 0) == ids_at(2, 3, math.inf)
    assert last != ids_at(4, 0, 0)


def pushed(meta, *ids):
    given = {"emb": RowGrad(ids, np.ones((len(ids), 1)))}
    rows = intake.row_gradients(meta.layout, {0: ""}, given, weight=1.0, finite=True)
    return TrainerStep({}, 1.0, rows)


def test_what_a_step_changes_of_rows_that_were_read_before_is_read_again():
    rows_of = checked_functions({"emb": lambda X: X})
    session, stepper, rows = alone(rows=rows_of, rows_ahead=math.inf)
    X = np.array([[5, 900], [7, 5]])
    rows.make_ready(X)
    for given in [pushed(session.meta, 5, 8, 5), pushed(session.meta, 8)]:
        rows.begin(X)
        rows.deliver(given, X)
    first, second = [5, 900, 7, 5], [5, 5]
    assert session.read == [(first, 0), (first, 1), (second, None), (first, 1)]
    # In place, after the first of these steps; after the other one nothing was to be read.
    assert stepper.params["emb"][..., 0].tolist() == [[1, 1], [1, 1]]
    rows.begin(X)
    rows.deliver(pushed(session.meta, 900), X)
    assert stepper.params["emb"][..., 0].tolist() == [[2, 3], [2, 2]]
    rows.deliver(pushed(session.meta, 1), None)
    rows.make_ready(X)
    assert session.read[-1] == (first, 0)


@pytest.mark.parametrize("staleness", [0, 1, 2, math.inf])
def test_rows_are_read_ahead_where_that_would_not_wait(staleness):
    rows_of = checked_functions({"emb": lambda X: X})
    session, _, rows = alone(rows=rows_of, rows_ahead=staleness)
    session.reads.lag = 7  # of the reads of others
    ids = np.arange(3)
    for lag in range(3):
        session.read_all = lambda *_: setattr(session.reads, "lag", session.clock)
        session.clock = lag
        rows.make_ready(ids)
        rows._came = False
        # At the next clock the slowest is behind by one more.
        assert rows.may_begin() == (lag + 1 <= staleness)
        assert session.reads.lag == 7


def test_marks_find_all_that_are_among_others():
    rng, marks = np.random.default_rng(0), Marks()
    for low, high in [(0, 5000), (-(2**62), 2**62)]:
        ids, others = rng.integers(low, high, 3000), rng.integers(low, high, 900)
        others[:100] = ids[:100]
        found = marks.find(ids, [others[:500], others[500:]])
        assert {*np.flatnonzero(np.isin(ids, others))} <= {*found}
        assert (np.diff(found) > 0).all()
        assert len(found) < 1.02 * np.isin(ids, others).sum() + 10
        assert not len(marks.find(ids, []))
        assert not marks._marks.any()
    same = np.arange(100) << 40  # alike in all but their upper bits
    assert len(marks.find(same, [same[:10]])) < 20


#: How many batches were looked at, by rank.
LOOKED: dict[int, int] = {}


def looked_at(store, is_exact, params, X, y):
    """Compare what a batch has with a pull by nobody; push to its rows."""
    rank, ids = int(X[0, 0]) % 2, X[:, 0]
    LOOKED[rank] = LOOKED.get(rank, 0) + 1
    now = store.pull((), rows={"own": ids, "all": X[:, 1]})
    for name in ("own", "all") if is_exact else ("own",):
        np.testing.assert_array_equal(params[name], now[name], strict=True)
    grads: dict[str, Any] = {"all": np.full_like(params["all"], 0.5)}
    # Beside those of the batch.
    grads["own"] = RowGrad([*ids, 2 + rank], np.ones((len(ids) + 1, DIM)))
    return grads


@inside
@pytest.mark.parametrize("sync", ["bsp", daskps.SSP(1), "asp"])
def test_each_batch_has_the_rows_of_an_undisturbed_pull(way, sync):
    # Each trainer has ids of its own in "own", and most come in the next batch again.
    rng = np.random.default_rng(2)
    own = 2 * rng.integers(0, 5, 80) + np.repeat([0, 1], 40)
    X = np.stack([own, rng.integers(0, 9, 80)], 1)
    params = {name: TableSpec(10, DIM, "float64", init=1.0) for name in ("own", "all")}
    rows = {"own": users, "all": lambda X: X[:, 1]}
    LOOKED.clear()
    with daskps.create(params, optimizer=optim.SGD(0.5), shards=3) as store:
        how: Any = {"trainers": 2, "batch_size": 4, "epochs": 2, "callbacks": ()}
        look = partial(looked_at, store, sync == "bsp")
        daskps.train(store, look, X, rows=rows, sync=sync, **how)
        steps = store.stats()["tables"]["own"]["steps"]
    assert LOOKED == {0: 20, 1: 20}
    assert steps == (20 if sync == "bsp" else 40)


def counts_itself(staleness, params, X, y):
    """Count one's own row up; be no further ahead of the other than is allowed."""
    rank = int(X[0])
    mine, others = -params["emb"][rank, 0], -params["emb"][1 - rank, 0]
    assert mine == LOOKED.get(rank, 0)
    LOOKED[rank] = int(mine) + 1
    assert others >= mine - staleness
    return {"emb": RowGrad([rank], np.ones((1, 1)))}


@inside
@pytest.mark.parametrize("staleness", [1, 2])
def test_rows_that_are_read_ahead_are_no_staler_than_the_run_allows(way, staleness):
    params = {"emb": TableSpec(2, 1, "float64")}
    LOOKED.clear()
    with daskps.create(params, optimizer=optim.SGD(1.0), shards=2) as store:
        how: Any = {"trainers": 2, "batch_size": 1, "callbacks": ()}
        how |= {"sync": daskps.SSP(staleness), "rows": {"emb": lambda X: [0, 1]}}
        X = np.repeat([0.0, 1.0], 30)
        result = daskps.train(store, partial(counts_itself, staleness), X, **how)
        assert store["emb"].pull([0, 1]).tolist() == [[-30], [-30]]
    assert result.history[0].staleness <= staleness


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "an array": ({"bias": users}, {}, ValueError, "rows= names 'bias', which is an"),
    "no name": ({"nope": users}, {}, daskps.UnknownParameterError, "nope"),
    "no mapping": ([users], {}, TypeError, "rows is a mapping of the names of tables"),
    "no function": ({"users": 3}, {}, TypeError, r"rows\['users'\] is a function of"),
    "more arguments": (
        {"users": gradient},
        {},
        TypeError,
        r"rows\['users'\] is called as f\(X_batch\) or f\(X_batch, rng\)",
    ),
    "floats": ({"users": lambda X: X * 0.5}, {}, ValueError, "table 'users' takes ids"),
    "outside": (
        {"users": lambda X: X + 99},
        {},
        ValueError,
        "table 'users' has rows 0",
    ),
    "raises": ({"users": lambda X: X["u"]}, {}, IndexError, "only integers"),
    "exits": ({"users": lambda X: sys.exit(3)}, {}, RuntimeError, r"rows\['users'\]"),
    "another shape": (
        ROWS | {"users": lambda X: X[:3, 0]},
        {"gradient": lambda p, X, y: {"users": np.ones((2, DIM))}},
        daskps.PushRejectedError,
        r"gradient of table 'users' has shape \(2, 3\) for ids of shape \(3,\)",
    ),
    "no ids for it": (
        {"users": users},
        {"gradient": lambda p, X, y: {"items": np.ones((2, DIM))}},
        daskps.PushRejectedError,
        "an array was given for 'items', which is a table",
    ),
}


@inside
def test_what_does_not_fit_is_refused(way):
    with factors(2) as store:
        for rows, how, error, said in REFUSED.values():
            with pytest.raises(error, match=said) as caught:
                train(store, rows=rows, **how)
            notes = "".join(getattr(caught.value, "__notes__", ()))
            if error is IndexError or "table 'users' has rows" in said:
                assert "rows['users'] of train, which is lambda" in notes
        assert store.version == 0

"""`train(rows=)`: the rows of each batch are among the parameters of its step."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import RowGrad, TableSpec, optim
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.layout.arrays import Layout
from daskps.training.batch_rows import BatchRows
from daskps.training.data.rows import batches, partition
from daskps.training.row_ids import checked_functions
from daskps.training.steps import FitPlan, Stepper
from tests.support import INSIDE

#: In this process: what is sent, and how, tests of trainers' verbs say.
inside = pytest.mark.parametrize("way", INSIDE, indirect=True)

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
@pytest.mark.parametrize("shards", [1, 3])
def test_rounds_with_rows_are_those_of_numpy(way, shards):
    # 34 and 33 rows: the last batches of both are short.
    X, y = ratings()
    expected = factorised(X, y, 2)
    found = []
    for _ in range(2):
        with factors(shards) as store:
            result = train(store)
            assert result.execution == "resident"
            assert result.history[-1].loss < result.history[0].loss
            rows = {"users": range(N_USERS), "items": range(N_ITEMS)}
            found.append(store.pull(rows=rows))
    for name, value in expected.items():
        np.testing.assert_allclose(found[0][name], value, rtol=1e-5, atol=1e-9)
        np.testing.assert_array_equal(found[0][name], found[1][name])


@inside
@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_a_run_learns_rows(way, sync):
    seen = []

    def validate(params):
        seen.append([*params])
        return {"n": 1.0}

    how = {"validate": validate, "epochs": 12}
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
        epochs=2,
        batch_size=3,
        sync_every=1,
        average_models=False,
        shuffle=False,
        seed=0,
        bsp=True,
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
    "cluster": "",
}


class Resumed:
    """A trainer's place in a run, whose store is not there."""

    rank = 1

    def __init__(self, clock):
        self.clock, self.meta = clock, StoreMap({**AT, "layout": LAYOUT.to_wire()})

    def read_all(self, targets, timeout):
        pass

    def deliver(self, given, timeout, *, target):
        self.clock += 1


def test_a_trainer_that_is_started_again_gets_the_same_ids():
    def ids_at(clock, steps):
        session: Any = Resumed(clock)
        plan = plan_of(rows=checked_functions({"emb": some}))
        stepper = Stepper(plan, session.meta)
        rows = BatchRows(plan, session, stepper, 4)
        for _ in range(steps):
            rows.make_ready(np.zeros(3))
            rows.deliver(TrainerStep({}), np.zeros(3))
        rows.make_ready(np.zeros(3))
        return stepper.ids["emb"].tolist()

    assert ids_at(5, 0) == ids_at(3, 2) == ids_at(0, 5) != ids_at(4, 0)


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
ALONE: dict[str, dict[str, Any]] = {
    "execution='graph'": {"execution": "graph"},
    "codec=": {"codec": "bf16"},
    "sync_every=": {"sync_every": 2},
    "average='models'": {"average": "models"},
    "a reduce function": {"reduce": lambda stacked, weights: stacked[0]},
}
for what, how in ALONE.items():
    said = f"rows of table 'users' do not go with {re.escape(what)}"
    REFUSED[what] = ({"users": users}, how, daskps.PushRejectedError, said)


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

"""`ASP(max_staleness, damping)` in runs, by every way: what trainers have read counts."""

from __future__ import annotations

import numpy as np
import pytest

import daskps
from daskps import optim
from tests.seams import session_of
from tests.support import mostly_inside

N = 3


def made(**tables):
    params = {"w": np.zeros((4, N)), **tables}
    return daskps.create(params, optimizer=optim.SGD(1.0), shards=2)


def grads(trainer):
    """Of each trainer its own column, and its own row."""
    one = np.zeros((4, N))
    one[:, trainer.rank] = -1.0
    return {"w": one}


def in_turns(trainer, part):
    """All read the same version in some way; then one after the other pushes."""
    how, rows = part
    given, asked = grads(trainer), None
    if rows:
        given["emb"] = daskps.RowGrad([1], -np.ones((1, N)))
        asked = {"emb": [0, 1]}
    out = {"w": np.empty((4, N))}
    if how == "out":
        for _ in range(2):  # the second is one that is known
            trainer.pull("w", out=out)
        assert not rows
    else:
        trainer.pull(rows=asked)
    for rank in range(trainer.size):
        trainer.allreduce({"turn": np.zeros(1)})
        if trainer.rank != rank:
            continue
        if how == "pushpull":
            trainer.pushpull(given, rows=asked)
        else:
            trainer.push(given)
    trainer.allreduce({"turn": np.zeros(1)})
    # Who has pulled with its push has read one, two or three updates by then.
    for rank in range(trainer.size):
        trainer.allreduce({"turn": np.zeros(1)})
        if trainer.rank == rank:
            trainer.push(grads(trainer))
    return trainer.clock


@mostly_inside("how", ["pull", "out", "pushpull"])
def test_delays_are_since_the_last_pull(way, how):
    """Delays 0, 1, 2 of the first pushes; then 3, 4, 5, or 2 each after a pull."""
    with made() as store:
        parts = [(how, False)] * N
        sync = daskps.ASP(damping=1.0)
        assert daskps.run(store, in_turns, parts, sync=sync) == [2] * N
        seconds = (2, 2, 2) if how == "pushpull" else (3, 4, 5)
        wanted = [
            1 / (1 + a) + 1 / (1 + b) for a, b in zip(range(N), seconds, strict=True)
        ]
        np.testing.assert_allclose(store["w"].pull(), [wanted] * 4, rtol=1e-15)
        for row in store.stats()["shards"]:
            counted = (
                {0: 1, 1: 1, 2: 4} if how == "pushpull" else {0: 1, 1: 1, 2: 2, 4: 2}
            )
            assert dict(row["delays"]) == counted
            assert (row["dropped"], row["pushes"]) == (0, 6)


def again(trainer, part):
    """Read what is known once more after an update, and push one after the other."""
    out = {"w": np.empty((4, N))}
    for _ in range(2):
        trainer.pull("w", out=out)
    trainer.allreduce({"turn": np.zeros(1)})
    if trainer.rank == 0:
        trainer.push(grads(trainer))
    trainer.allreduce({"turn": np.zeros(1)})
    trainer.pull("w", out=out)
    for rank in range(trainer.size):
        trainer.allreduce({"turn": np.zeros(1)})
        if trainer.rank == rank:
            trainer.push(grads(trainer))
    return session_of(trainer).shards.counters.socket_calls


@mostly_inside()
def test_a_read_that_is_known_counts(way, request):
    """Delay 0 of the first push; 0, 1, 2 of those after the read."""
    with made() as store:
        found = daskps.run(store, again, [None] * N, sync=daskps.ASP(damping=1.0))
        np.testing.assert_array_equal(store["w"].pull(), [[2, 1 / 2, 1 / 3]] * 4)
    if request.node.callspec.params["way"] == "socket":
        # One shard of each trainer is far: three pulls and a push, not by message.
        assert min(found) >= 4


@mostly_inside("rows", [False, True], real=[False, True])
def test_above_the_bound_nothing_is_applied(way, rows):
    """Of a bound of 1 those with delays 0 and 1 are; versions count only these."""
    with made(emb=daskps.TableSpec(2, N)) if rows else made() as store:
        sync = daskps.ASP(max_staleness=1)
        assert daskps.run(store, in_turns, [("pull", rows)] * N, sync=sync) == [2] * N
        np.testing.assert_array_equal(store["w"].pull(), [[1, 1, 0]] * 4)
        if rows:
            np.testing.assert_array_equal(store["emb"].pull([0, 1]), [[0] * N, [2] * N])
        for row in store.stats()["shards"]:
            assert (row["version"], row["pushes"], row["dropped"]) == (2, 2, 4)


def noisy(params, X, y):
    return float(len(X)), {"w": params["w"] - X.mean(axis=0)}


@mostly_inside("codec", [None, "bf16"])
def test_one_trainer_of_train_has_no_delay(way, codec):
    """It reads after each push: the numbers are those of plain ASP, and nothing is lost."""
    X = np.arange(120.0).reshape(10, 4, 3)
    found = []
    for sync in ("asp", daskps.ASP(max_staleness=0, damping=0.5)):
        with made() as store:
            options = {"trainers": 1, "batch_size": 2, "sync": sync, "codec": codec}
            result = daskps.train(store, noisy, X, X, epochs=2, **options)
            found.append(result.weights["w"])
            delays = [dict(row["delays"]) for row in store.stats()["shards"]]
            assert delays == [{} if sync == "asp" else {0: 10}] * 2
    plain, damped = found
    np.testing.assert_array_equal(plain, damped)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"max_staleness": -1}, ValueError, "from 0 to"),
        ({"max_staleness": 2**32}, ValueError, "from 0 to"),
        ({"max_staleness": 1.0}, TypeError, r"number of updates \(int\) or None"),
        ({"max_staleness": True}, TypeError, "found True"),
        ({"damping": -0.1}, ValueError, "at least 0"),
        ({"damping": float("nan")}, ValueError, "finite"),
        ({"damping": float("inf")}, ValueError, "finite"),
        ({"damping": None}, TypeError, "damping is a number"),
        ({"damping": "1"}, TypeError, "damping is a number"),
    ],
)
def test_what_is_no_bound_is_refused(given, error, says):
    with pytest.raises(error, match=says):
        daskps.ASP(**given)


def test_no_round_has_a_delay():
    """The task graph is synchronous: it refuses this as it does any ASP."""
    with pytest.raises(ValueError, match="execution='graph' needs sync='bsp'"):
        daskps.train(
            None,  # type: ignore[arg-type]  # refused before it is looked at
            noisy,
            np.ones((2, 2)),
            execution="graph",
            sync=daskps.ASP(max_staleness=1),
        )

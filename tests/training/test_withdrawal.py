"""All shards hold the same round after a run, however it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.caller import routes
from daskps.cluster.protocol.deadline import Deadline
from tests.seams import session_of
from tests.support import store, until

#: Elements of "w", and how many of them are on the second of two shards: how user code
#: tells the shards apart. "b" is on the first one alone.
N, SECOND = 9, 4
#: Rounds before the one that fails.
GOOD = 2


def good(params: Any, X: Any, y: Any) -> Any:
    """Ones, and from the round on that is to fail larger numbers."""
    done = -round(float(params["c"]))
    size = 1.0 if done < GOOD else 2.0
    return {"w": np.full(N, size, "f4"), "b": np.float64(size), "c": np.float64(1)}


def fails_late(stacked: Any, weights: Any) -> Any:
    if stacked.shape[1] == SECOND and stacked.max() > 1:
        raise ZeroDivisionError("fails on one shard")
    return stacked.mean(axis=0)


class Late(optim.Adam):
    """Fails at one step of one parameter, which is on one shard."""

    def prepare(self, step: int, lr: float, **hyper: Any) -> Any:
        if step > GOOD:
            raise ZeroDivisionError("fails on one shard")
        return super().prepare(step, lr, **hyper)


def made(client: Any, late: bool = False) -> Any:
    params = {"w": np.zeros(N, "f4"), "b": np.float64(0), "c": np.float64(0)}
    rule = Late(0.1) if late else optim.Adam(0.1)
    rules = {"b": rule, "c": optim.SGD(1.0), "w": optim.Adam(0.1)}
    return store(client, params=params, optimizer=rules)


def train(made: Any, rows: int, **how: Any) -> None:
    X = np.zeros((rows, 1))
    daskps.train(made, good, X, batch_size=2, trainers=2, shuffle=False, **how)


def same_version(failed: Any) -> int:
    """The version of all shards: where one had the round, it is a new one."""
    assert failed.versions in {(v, v) for v in (GOOD, GOOD + 2)}
    return int(failed.version)


def holds_same_round(failed: Any, never: Any) -> None:
    """Versions are equal, weights and slots those of a run without the round."""
    version = same_version(failed)
    for _ in range(2):
        a, b = failed.pull(), never.pull()
        for name, value in b.items():
            np.testing.assert_array_equal(a[name], value)
        # By Adam's slots and the numbers of steps.
        for one in (failed, never):
            one.push({"w": np.arange(N, dtype="f4"), "b": np.float64(3)})
    assert failed.versions == (version + 2, version + 2)


@pytest.mark.parametrize("execution", ["resident", "graph"])
@pytest.mark.parametrize("what", ["reduce", "rule"])
def test_round_that_fails_on_one_shard(client, what, execution):
    rule, reduce = what == "rule", fails_late if what == "reduce" else "mean"
    with made(client, late=rule) as failed, made(client) as never:
        with pytest.raises(ZeroDivisionError, match="fails on one shard"):
            train(failed, 40, reduce=reduce, execution=execution)
        train(never, 4 * GOOD)
        if rule:  # which fails for ever
            same_version(failed)
            never = never.pull()
            for name, value in failed.pull().items():
                np.testing.assert_array_equal(value, never[name])
        else:
            holds_same_round(failed, never)


def overflows_late(params: Any, X: Any, y: Any) -> Any:
    """As `good`, and then finite numbers whose sum is not, on the second shard alone."""
    grads = good(params, X, y)
    if grads["b"] > 1:
        grads["w"][-1] = 3e38
    return grads


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_sum_that_overflows_on_one_shard(client, execution):
    how: Any = {"batch_size": 2, "trainers": 2, "execution": execution}
    X = np.zeros((40, 1))
    with made(client) as failed, made(client) as never:
        with pytest.raises(
            daskps.PushRejectedError, match=r"the sum of what .* 'w' is"
        ):
            daskps.train(failed, overflows_late, X, shuffle=False, **how)
        train(never, 4 * GOOD)
        holds_same_round(failed, never)


def loses_its_way(trainer: Any, part: Any) -> None:
    """Rank 1 delivers a step to one host and no other, and is gone."""
    to, marker = part
    while True:
        given = good(trainer.pull(), None, None)
        session = session_of(trainer)
        if trainer.rank and trainer.clock == GOOD:
            arrays = {i: np.atleast_1d(a) for i, a in enumerate(given.values())}
            number = session._next_number("gradient", True)
            step = session._step(number, "gradient", tick=True)
            request = routes.push(session.meta, arrays, step, everywhere=True)
            until(marker.exists)
            half = session.shards.remote.send(
                request, [to], Deadline(30, "half a step")
            )
            half.result()
            raise ZeroDivisionError("lost on the way")
        trainer.push(given)
        if trainer.clock > GOOD:
            marker.touch()


def test_step_that_reaches_one_shard(client, tmp_path):
    """That one has the round, which the other cannot complete."""
    part = 0, tmp_path / "delivered"
    with made(client) as failed, made(client) as never:
        with pytest.raises(ZeroDivisionError, match="lost on the way"):
            daskps.run(failed, loses_its_way, [part, part])
        assert failed.versions == (GOOD + 2, GOOD + 2)
        train(never, 4 * GOOD)
        holds_same_round(failed, never)


def swallows(trainer: Any, part: Any) -> int:
    """Catch what a push raises, and go on as if nothing had been."""
    caught = 0
    for _ in range(2 * GOOD):
        try:
            trainer.push(good({"c": -np.float64(trainer.clock)}, None, None))
        except ZeroDivisionError:
            caught += 1
    return caught


def test_error_that_a_trainer_swallows(client):
    """It may not end in peace: no shard may go on without it."""
    with made(client) as failed:
        with pytest.raises(ZeroDivisionError, match="fails on one shard"):
            daskps.run(failed, swallows, [0, 1], reduce=fails_late)
        same_version(failed)

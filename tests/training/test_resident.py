"""Double buffering of `train`: what overlaps, and what each gradient has seen."""

from __future__ import annotations

import threading

import dask
import numpy as np

import daskps
from daskps import optim
from tests.support import mostly_inside
from tests.training.test_staleness import clock_store

X = np.random.default_rng(0).normal(size=(64, 8))


def helped(params, rows, y):
    """Return as loss whether this trainer has a second thread."""
    names = {t.name for t in threading.enumerate()}
    mine = any(name.startswith("daskps-trainer-") for name in names)
    return float(mine), {"w": rows.mean(axis=0) - params["w"]}


def test_rounds_have_the_same_bits(client):
    """A round reads exactly the one before, so nothing is read ahead of it."""
    found = []
    for ahead in ("none", "parameters"):
        with (
            dask.config.set({"daskps.double-buffer": ahead}),
            daskps.create({"w": np.zeros(8)}, optimizer=optim.SGD(0.5)) as store,
        ):
            result = daskps.train(store, helped, X, trainers=2, batch_size=4, epochs=2)
        found.append((result.weights["w"].tobytes(), result.history[1].loss))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1] == 0


def seen(params, rows, y):
    """Return as loss how many steps are seen."""
    return -float(params["w"][0]), {"w": np.ones_like(params["w"])}


@mostly_inside("sync", ["asp", *map(daskps.SSP, (1, 0))], real=[daskps.SSP(1)])
def test_read_ahead_is_one_step_late(way, sync):
    """One trainer, six steps to an epoch; SSP(0) leaves no room to be late."""
    with (
        dask.config.set({"daskps.double-buffer": "parameters"}),
        daskps.create({"w": np.zeros(8)}, optimizer=optim.SGD(1.0)) as store,
    ):
        result = daskps.train(
            store, seen, np.zeros((6, 1)), trainers=1, batch_size=1, epochs=2, sync=sync
        )
    late = sync != daskps.SSP(0)
    steps = np.maximum(np.arange(12) - late, 0).reshape(2, 6)
    assert [entry.loss for entry in result.history] == steps.mean(axis=1).tolist()
    assert [entry.staleness for entry in result.history] == [int(late)] * 2
    np.testing.assert_array_equal(result.weights["w"], -12.0)


BUFFER = np.zeros(2**18)


def own_buffer(params, rows, y):
    """Write the step's number to the array of the step before, and return it."""
    BUFFER[:] = rows[0, 0]
    return {"w": BUFFER}


def test_read_ahead_sends_what_the_function_returned(client):
    rows = 10.0 ** np.arange(8)[:, None]
    with (
        dask.config.set({"daskps.double-buffer": "parameters"}),
        daskps.create({"w": np.zeros(2**18)}, optimizer=optim.SGD(1.0)) as store,
    ):
        daskps.train(store, own_buffer, rows, trainers=1, batch_size=1, sync="asp")
        np.testing.assert_array_equal(store["w"].pull(), -11111111.0)


def marked(params, rows, y):
    """Mark a step of the row's rank; raise where what was seen is too old for it."""
    rank, step, staleness, work = (int(n) for n in rows[0])
    for _ in range(work):
        np.sin(params["clocks"]).sum()
    for clocks in params["clocks"]:
        live = [c for c in clocks if c < STEPS]
        assert step - min(live, default=step) <= staleness, (step, clocks)
    grad = np.zeros_like(params["clocks"])
    grad[:, rank] = -1.0
    return {"clocks": grad}


STEPS = 40


@mostly_inside("staleness", [1, 3])
def test_read_ahead_keeps_the_bound(way, staleness):
    """Rank 0 is slow, so that the others reach it."""
    rows = np.zeros((3, STEPS, 4))
    rows[:, :, 0] = np.arange(3)[:, None]
    rows[:, :, 1] = np.arange(STEPS)
    rows[:, :, 2] = staleness
    rows[0, :, 3] = 300
    with (
        dask.config.set({"daskps.double-buffer": "parameters"}),
        clock_store() as store,
    ):
        result = daskps.train(
            store,
            marked,
            rows.reshape(-1, 4),
            trainers=3,
            batch_size=1,
            sync=daskps.SSP(staleness),
            shuffle=False,
        )
        np.testing.assert_array_equal(store["clocks"].pull(), STEPS)
    assert 1 <= result.history[0].staleness <= staleness

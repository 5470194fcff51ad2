"""Narrow weights with a wider master, as a user has them: on all ways, in both executions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import ArraySpec, LayoutError, TableSpec, optim
from tests.support import INSIDE, mostly_inside

X = np.zeros((40, 1))
HOW: dict[str, Any] = {"batch_size": 2, "trainers": 2, "callbacks": ()}
SPEC = ArraySpec((3, 5), "float16", 1.0, master="float32")
untyped: Any = daskps


def ones(params, X, y):
    assert params["w"].dtype == np.float16
    return {"w": np.ones_like(params["w"])}


def narrow(**more):
    rule = optim.SGD(1e-4)
    return daskps.create({"w": SPEC, "v": np.ones(4)}, optimizer=rule, shards=2, **more)


@mostly_inside()
def test_twenty_small_pushes(way):
    """0.998 as float16 has it; then 0.002 is added, which ends at 1 within its digits."""
    with narrow() as store:
        for _ in range(20):
            store.push({"w": np.ones((3, 5)), "v": np.ones(4)})
        found = store.pull()["w"]
        assert found.dtype == np.float16
        assert found.tolist() == np.full((3, 5), 0.99805, "f2").tolist()
        np.testing.assert_allclose(store["v"].pull(), 0.998, rtol=1e-12)
        # Five of them are less than half the spacing, and count all the same.
        for _ in range(5):
            store["w"].add(np.full((3, 5), -1e-4))
        assert store["w"].pull().tolist() == np.full((3, 5), 0.9975, "f2").tolist()
        store.assign({"w": np.full((3, 5), 2.0, "f2")})
        store.push({"w": np.ones((3, 5)), "v": np.zeros(4)})
        assert store["w"].pull().tolist() == [[2.0] * 5] * 3
        # A step of 1.6384, for three of the elements.
        part = store["w"].region(4, 7)
        part.push(np.full(3, 2.0**14))
        assert store["w"].pull().ravel()[3:8].tolist() == [
            2,
            *[float(np.float16(2 - 1e-4 * 2**14))] * 3,
            2,
        ]
        assert store.optimizer["w"] == "SGD(lr=0.0001) with a master"


@mostly_inside("how", [{}, {"sync_every": 2, "batch_size": 1}], train=True)
def test_rounds(train, way, how):
    """Ten rounds of each of two epochs; optimizer state begins anew, the master does not."""
    with narrow() as store:
        for _ in range(2):
            train(store, ones, X, **{**HOW, **how}, reset_optimizer=True)
        # Two gradients of a group are one of twice the size.
        w = np.float32(1)
        for _ in range(20):
            w -= np.float32(1e-4) * np.float32(2 if how else 1)
        assert store["w"].pull().ravel().tolist() == [float(np.float16(w))] * 15
        # Nine of these bring it to another number of float16, alone they would not.
        w -= np.float32(9e-4)
        for _ in range(9):
            store.push({"w": np.ones((3, 5))})
        assert store["w"].pull()[0, 0] == np.float16(w)


@pytest.mark.parametrize("way", INSIDE, indirect=True)
@pytest.mark.parametrize("sync", ["asp", "ssp"])
def test_without_rounds(way, sync):
    with narrow() as store:
        daskps.train(store, ones, X[:20], sync=sync, **HOW)
        assert store.version == 10
        daskps.train(store, ones, X[:20], sync=sync, **HOW)
        assert store["w"].pull().tolist() == np.full((3, 5), 0.99805, "f2").tolist()


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_verbs_of_trainers(way):
    """The sum and the mean of two ranks reach the master with all their digits."""

    def loop(trainer, part):
        for _ in range(10):
            trainer.add({"w": np.full((3, 5), -5e-5, "f2")})
        added = trainer.pull()["w"][0, 0].item()
        trainer.assign({"w": np.full((3, 5), 1 + trainer.rank * 2.0**-10, "f2")})
        return added, trainer.pull()["w"][0, 0].item()

    with narrow() as store:
        found = daskps.run(store, loop, [0, 0])
        # The mean is between two float16 numbers, and the even one is 1.
        assert found == [(float(np.float16(0.999)), 1.0)] * 2
        # 0.00049 + 0.0002 is beyond the middle to the next one, 0.0002 is not.
        store["w"].add(np.full((3, 5), 2e-4))
        assert store["w"].pull()[0, 0] == 1 + 2.0**-10


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_double_precision_for_float32(way):
    spec = ArraySpec(7, "float32", 1.0, master="float64")
    with daskps.create({"w": spec}, optimizer=optim.SGD(1e-9)) as store:
        for _ in range(100):
            store.push({"w": np.ones(7, "f4")})
        assert store["w"].pull().tolist() == [float(np.float32(1 - 1e-7))] * 7


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_what_has_no_master_is_refused(way):
    for dtype, master in (
        ("float16", "float64"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("int64", "float64"),
        ("float16", "no dtype"),
        ("float16", True),
    ):
        with pytest.raises(LayoutError, match="float32 for float16 or float64"):
            ArraySpec(3, dtype, master=master)
    with pytest.raises(TypeError, match="master"):
        untyped.TableSpec(3, 2, "float16", master="float32")
    with pytest.raises(LayoutError, match=r"'w' has a master.*no optimizer"):
        daskps.create({"w": SPEC})
    mine = optim.Function(lambda n, w, g, s: w)
    with pytest.raises(LayoutError, match="no use for a master"):
        daskps.create({"w": SPEC}, optimizer=mine, shards=1)
    some = {"emb": TableSpec(4, 2, "float16"), "w": SPEC}
    with daskps.create(some, optimizer=optim.SGD(1e-4)) as store:
        with pytest.raises(ValueError, match="average='models' does not take 'w'"):
            daskps.train(store, ones, X, average="models", **HOW)
        assert store.version == 0
    assert daskps.list_stores() == []

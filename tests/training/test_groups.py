"""The recipes of docs/groups.md, with numbers: groups, warm-up, syncs of some elements."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from tests.inprocess import cluster
from tests.test_readme import DOCS, blocks

pytestmark = pytest.mark.leaky  # who waits in the main thread has another for it

RECIPES: dict[str, Any] = {}
for block in blocks(DOCS / "groups.md", "python")[:2]:
    exec(block, RECIPES)


@pytest.fixture
def inside():
    with cluster() as made:
        yield made


def ones(params, X, y):
    return {name: np.ones_like(w) for name, w in params.items()}


def toward(params, X, y):
    return {"w": params["w"] - X.mean()}


def store_of(rule: Any = None, **params):
    return daskps.create(params or {"w": np.zeros(4)}, optimizer=rule or optim.SGD(0.1))


def side_by_side(*calls):
    """Call functions in threads that reach the cluster as this one does."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(contextvars.copy_context().run, call) for call in calls]
        return [future.result() for future in futures]


def group(whole, size, steps, sync_freq, *, sync="bsp", gradient=ones):
    """Return a call that runs a group on a store of its own; it returns its weights."""

    def call():
        part = (np.zeros(1), np.zeros(1)), gradient, whole, steps, sync_freq
        with store_of() as own:
            daskps.run(own, RECIPES["in_groups"], [part] * size, sync=sync)
            return own.pull()["w"]

    return call


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("sync", "per_step"), [("bsp", 1), ("asp", 3)])
@pytest.mark.parametrize("sync_freq", [1, 4, 100])
def test_all_steps_of_all_groups_arrive_once(sync, per_step, sync_freq):
    """Downpour and Hogwild: groups of 3 and 3 trainers, 10 steps of -0.1 each.

    In rounds three gradients are one step of their mean, without they are three.
    """
    with store_of() as whole:
        made = [group(whole, 3, 10, sync_freq, sync=sync) for _ in range(2)]
        side_by_side(*made)
        expected = -0.1 * 2 * 10 * per_step
        np.testing.assert_allclose(whole["w"].pull(), expected, rtol=1e-12)


@pytest.mark.usefixtures("inside")
def test_a_group_begins_with_what_the_warm_up_has_left():
    with store_of() as whole:
        np.testing.assert_allclose(group(whole, 2, 7, 2)(), -0.7, rtol=1e-12)
        np.testing.assert_allclose(whole["w"].pull(), -0.7, rtol=1e-12)
        # And one that does nothing more has its values.
        np.testing.assert_allclose(group(whole, 1, 0, 1)(), -0.7, rtol=1e-12)
        np.testing.assert_allclose(group(whole, 2, 3, 1)(), -1.0, rtol=1e-12)
        np.testing.assert_allclose(whole["w"].pull(), -1.0, rtol=1e-12)


@pytest.mark.usefixtures("inside")
def test_groups_see_each_other():
    """Of two that are drawn to the same place from one side each, both come to it."""
    with store_of() as whole:
        side_by_side(*[group(whole, 2, 60, 3, gradient=toward) for _ in range(2)])
        assert np.abs(whole["w"].pull()).max() == 0


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_within_a_group_of_one_it_is_what_sgd_does(sync):
    with store_of() as whole:
        w = group(
            whole, 1, 8, 3, sync=sync, gradient=lambda p, X, y: {"w": p["w"] + 1}
        )()
        expected = 0.9**8 - 1
        np.testing.assert_allclose(w, expected, rtol=1e-12)
        np.testing.assert_allclose(whole["w"].pull(), expected, rtol=1e-12)


@pytest.mark.usefixtures("inside")
def test_partitions_are_averaged_in_turn():
    """Rank r moves by r + 1 each step; of 5 elements 2, 2 and 1 are averaged."""

    def gradient(params, X, y):
        return {"w": np.full(5, X)}

    given = [(np.zeros(5), (r + 1.0, None), gradient, 4, 1.0) for r in range(3)]
    with store_of() as store:
        found = daskps.run(store, RECIPES["partly_averaged"], given)
    ws = np.zeros((3, 5))
    for step in range(4):
        ws -= np.arange(1.0, 4)[:, None]
        turn = [[0, 1], [2, 3], [4]][step % 3]
        ws[:, turn] = ws[:, turn].mean(axis=0)
    np.testing.assert_allclose(found, ws, rtol=1e-12)
    assert len({w[4] for w in found}) == 3
    assert len({w[0] for w in found}) == 1


@pytest.mark.usefixtures("inside")
def test_a_share_of_the_elements_is_synced_and_none_is_lost():
    """Two loops add 1 to all 1,000 elements, 20 times; a share of 1 at last has all."""
    sync_some = RECIPES["sync_some"]
    with daskps.create({"w": np.zeros(1000)}) as store:
        copies = [(np.zeros(1000), np.zeros(1000)) for _ in range(2)]
        for step in range(20):
            for seed, (w, last) in enumerate(copies):
                w += 1
                sync_some(store, w, last, share=0.3, seed=seed, step=step)
        seen = store.pull()["w"]
        assert 30 < seen.mean() < 39.5
        assert len(set(seen.tolist())) > 5
        for w, last in copies:
            sync_some(store, w, last, share=1.1, seed=0, step=99)
        assert (store.pull()["w"] == 40).all()

"""Regions: which step of which rule a push to one is, on any number of shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from tests.inprocess import cluster

N = 21


@pytest.fixture(scope="module")
def here() -> Any:
    with cluster(3) as made:
        yield made


def adam(w: Any, m: Any, v: Any, t: int, g: Any) -> None:
    """One step of Adam in float64, on views."""
    m += (1 - 0.9) * (g - m)
    v += (1 - 0.999) * (g * g - v)
    w -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


@pytest.mark.parametrize("shards", [1, 2, 5, 40])
def test_a_push_to_a_region_is_a_step_of_the_parameter(here, shards):
    """Of Adam's t-th step each element that is named sees t, whoever has it."""
    rng = np.random.default_rng(3)
    w, m, v = rng.normal(size=N), np.zeros(N), np.zeros(N)
    params = {"w": w.reshape(3, 7).copy(), "other": np.zeros(4)}
    with daskps.create(params, optimizer=optim.Adam(0.1), shards=shards) as store:
        for t, (a, b) in enumerate([(0, N), (2, 9), (8, 8), (5, N), (0, 1), (0, N)], 1):
            g = rng.normal(size=b - a)
            adam(w[a:b], m[a:b], v[a:b], t, g)
            store["w"].region(a, b).push(g)
        np.testing.assert_allclose(store["w"].pull().reshape(-1), w, rtol=1e-12)
        # All pieces count alike: the next whole step is the same on any of them.
        adam(w, m, v, 7, np.ones(N))
        store.push({"w": np.ones((3, 7))})
        np.testing.assert_allclose(store["w"].pull().reshape(-1), w, rtol=1e-12)
        assert store["other"].pull().tolist() == [0] * 4


def test_the_bits_do_not_depend_on_the_number_of_shards(here):
    """And nothing but what was named is written: w without a gradient decays not."""
    found = []
    for shards in (1, 4, 7):
        rule = optim.AdamW(0.1, weight_decay=0.5)
        start = np.arange(N, dtype="f4")
        with daskps.create({"w": start}, optimizer=rule, shards=shards) as store:
            for k in range(4):
                store["w"].region(k, 12 + k).push(np.full(12, 0.5 + k, "f4"))
            found.append(store["w"].pull())
            assert found[-1][15:].tolist() == start[15:].tolist()
            assert found[-1].tobytes() == found[0].tobytes()


def test_b10_a_view_at_offset_ten_of_twenty(here):
    """Four workers push their number + 1; the mean of it is in the view alone."""
    with daskps.create({"w": np.zeros(20)}, shards=4) as store:
        view = store["w"].region(10, 20)
        mean = store.aggregate([{"w": np.full(20, k + 1.0)} for k in range(4)])["w"]
        view.add(mean[:10])
        assert view.pull().tolist() == [2.5] * 10
        assert store["w"].pull().tolist() == [0] * 10 + [2.5] * 10


def test_a_region_shows_what_it_is(here):
    with daskps.create({"w": np.zeros((4, 5))}, name="shown") as store:
        view = store["w"].region(10, 20)
        assert repr(view) == (
            "<daskps.ParameterArray 'w: elements 10 to 20': (10,) float64 of store "
            "'shown'>"
        )
        assert "(10,)" in view._repr_html_()
        np.testing.assert_array_equal(np.asarray(view), np.zeros(10))
        store.delete()


def test_a_large_region_of_one_of_several_shards_of_a_host(way):
    """The others are told of the step with nothing."""
    n = 400_000
    rule = optim.Adagrad(0.5)
    with daskps.create({"w": np.zeros(n)}, optimizer=rule, shards=6) as store:
        view = store["w"].region(100_000, 160_000)
        for _ in range(2):
            view.push(np.ones(60_000))
        found = store["w"].pull()
        assert not found[:100_000].any()
        assert not found[160_000:].any()
        np.testing.assert_allclose(found[100_000:160_000], -0.5 - 0.5 / np.sqrt(2))
        assert {row["pushes"] for row in store.stats()["shards"]} == {2}


def test_thousands_of_scattered_rows_by_any_way(way):
    """In parts, and no others: a shard is asked for no more than was named."""
    w = np.arange(30_000, dtype="f4").reshape(10_000, 3)
    with daskps.create({"before": np.zeros(11, "f4"), "w": w}, shards=3) as store:
        rows = np.random.default_rng(2).permutation(10_000)[:6_000]
        np.testing.assert_array_equal(store["w"][rows], w[rows])
        mask = w[:, 0] % 2 == 0
        np.testing.assert_array_equal(store["w"][mask], w[mask])


def minus(name, weights, gradient, step):
    return weights - gradient


def test_a_function_of_whole_arrays_takes_no_part_of_one(here):
    rule = optim.Function(minus)
    with daskps.create({"w": np.zeros(6)}, optimizer=rule, shards=1) as store:
        for a, b in ((1, 3), (0, 5), (2, 2)):
            with pytest.raises(daskps.PushRejectedError, match="takes all of 'w'"):
                store["w"].region(a, b).push(np.ones(b - a))
        assert store.version == 0
        store["w"].region(0, 6).push(np.ones(6))
        store["w"].region(0, 3).add(np.ones(3))
        assert store["w"].pull().tolist() == [0] * 3 + [-1] * 3

"""Multiverso's tables by their own words: scenarios V of reference, with their numbers."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.compat import multiverso
from tests.inprocess import cluster

#: Also given what its types refuse.
mv: Any = multiverso


@pytest.fixture
def inside():
    with cluster() as made:
        yield made


def add_twice(size, steps):
    mv.init()
    table, seen = mv.ArrayTableHandler(size), []
    delta = np.arange(1, size + 1)
    for _ in range(steps):
        table.add(delta)
        table.add(delta, sync=True)
        mv.barrier()
        seen.append(table.get())
        mv.barrier()
    mv.shutdown()
    return seen


def check_v1(client, size, workers, steps):
    found = mv.launch(partial(add_twice, size, steps), workers, client=client)
    base = np.arange(1, size + 1, dtype="f4")
    for of in found:
        for i, seen in enumerate(of):
            expected = base * (i + 1) * 2 * workers
            np.testing.assert_array_equal(seen, expected, strict=True)


def test_v1_add_twice_and_barrier_on_two_processes(client):
    """After iteration i: (j + 1) (i + 1) 2 workers."""
    check_v1(client, 10_000, 2, 3)


@pytest.mark.usefixtures("inside")
def test_v1_of_three_workers_of_one_process():
    check_v1(None, 1_000, 3, 2)


def rows_of(num_row, ids):
    mv.init()
    first = np.arange(num_row * 10.0).reshape(num_row, 10)
    table = mv.MatrixTableHandler(num_row, 10, init_value=first)
    assert repr(table) == (
        f"<daskps.compat.multiverso.MatrixTableHandler: a matrix of {num_row} x 10>"
    )
    table.add(np.full((num_row, 10), mv.worker_id() + 1))
    mv.barrier()
    return table.get(ids), table.get()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("ids", [[0, 1, 5, 10], [10, 0], [3, 3], []])
def test_v3_rows_in_order(ids):
    """Of 11 rows only these; each worker has added its number to all of them."""
    rows = np.arange(110, dtype="f4").reshape(11, 10) + 3
    for some, whole in mv.launch(partial(rows_of, 11, ids), 2):
        np.testing.assert_array_equal(some, rows[np.array(ids, int)], strict=True)
        np.testing.assert_array_equal(whole, rows, strict=True)


def add_rows():
    mv.init()
    table = mv.MatrixTableHandler(3, 2)
    table.add([[1, 2], [3, 4], [5, 6]], row_ids=[2, 0, 2], sync=True)
    mv.barrier()
    return table.get().tolist()


@pytest.mark.usefixtures("inside")
def test_rows_named_twice_are_summed():
    """Theirs accumulate too, up to as many ids as there are rows."""
    assert mv.launch(add_rows, 2) == [[[6, 8], [0, 0], [12, 16]]] * 2


def replicate(steps):
    mv.init()
    table = mv.ArrayTableHandler(200 * 200)
    replica, seen = table.get(), []
    mv.barrier()
    delta = np.arange(1, replica.size + 1, dtype="f4")
    for _ in range(steps):
        last = replica.copy()
        replica += delta
        replica += delta
        table.add(replica - last, sync=True)
        mv.barrier()
        replica = table.get()
        seen.append(replica.copy())
        mv.barrier()
    return seen


@pytest.mark.usefixtures("inside")
def test_v6_delta_sync_of_a_replica():
    base = np.arange(1, 40_001, dtype="f4")
    for of in mv.launch(partial(replicate, 2), 2):
        for i, found in enumerate(of):
            np.testing.assert_array_equal(found, base * (i + 1) * 2 * 2)


def integers(dtype):
    mv.init()
    table = mv.ArrayTableHandler(10, dtype=dtype)
    table.add(np.arange(10), sync=True)
    first = table.get()
    table.add(np.arange(10))
    return first, table.get()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_v7_integers(dtype):
    """The delta, then twice the delta: one's own adds are in what one gets."""
    [(first, second)] = mv.launch(partial(integers, dtype), 1)
    delta = np.arange(10, dtype=dtype)
    np.testing.assert_array_equal(first, delta, strict=True)
    np.testing.assert_array_equal(second, 2 * delta, strict=True)


def add_at_random(steps):
    mv.init()
    table, rng = mv.ArrayTableHandler(101), np.random.default_rng(mv.worker_id())
    seen = []
    # One ends before the others, who do not wait for it.
    for _ in range(steps - mv.is_master()):
        table.add(rng.normal(size=101))
        seen.append(table.get().tobytes())
    mv.shutdown()
    return seen


@pytest.mark.usefixtures("inside")
def test_v8_gets_of_all_workers_are_identical():
    first, *others = mv.launch(partial(add_at_random, 20), 4, sync=True)
    assert len(set(first)) == len(first) == 19
    for other in others:
        assert other[:19] == first
        assert len(other) == 20


def test_v8_on_two_processes(client):
    first, second = mv.launch(partial(add_at_random, 5), 2, sync=True, client=client)
    assert second[:4] == first


def by_key():
    mv.init()
    table = mv.KVTableHandler("int64")
    seen = [table.get(17)]
    for delta in (3, -4):
        table.add(17, delta)
        seen.append(table.get(17))
    return [*map(int, [*seen, table.get(-99)])], table.get([17, -1, 17]).tolist()


@pytest.mark.usefixtures("inside")
def test_v9_numbers_by_key():
    assert mv.launch(by_key, 1) == [([0, 3, -1, 0], [-1, 0, -1])]


def aggregated():
    mv.init()
    data = np.ones((2, 3))
    assert mv.aggregate(data) is data
    return data.tolist(), int(mv.aggregate(np.array([mv.worker_id()]))[0])


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_v10_sum_of_ones(n):
    assert mv.launch(aggregated, n) == [([[n] * 3] * 2, n * (n - 1) // 2)] * n


def store_of(table):
    return table._store


def where():
    from distributed import get_worker

    mv.init()
    table = mv.ArrayTableHandler(10)
    there = set(store_of(table).placement)
    return mv.worker_id(), mv.num_workers(), get_worker().address, there


def test_v11_roles(client):
    """A pure server runs no `main`, and so has no worker's number; both is the default."""
    one, two = sorted(client.scheduler_info()["workers"])
    found = mv.launch(where, 2, workers=[one], servers=[two], client=client)
    assert found == [(0, 2, one, {two}), (1, 2, one, {two})]
    found = mv.launch(where, 2, client=client)
    assert sorted(of[2] for of in found) == [one, two]
    assert {*found[0][3]} == {one, two}


def of_size(size):
    mv.init()
    table = mv.ArrayTableHandler(size)
    table.add(np.ones(size), sync=True)
    mv.barrier()
    return table.get().tolist()


@pytest.mark.parametrize("size", [1, 3])
def test_v12_fewer_numbers_than_servers(size):
    with cluster(4):
        assert mv.launch(partial(of_size, size), 2) == [[2.0] * size] * 2


def with_updater(*deltas):
    mv.init()
    table = mv.ArrayTableHandler(1, init_value=[0.0], dtype="float64")
    rows, seen = mv.MatrixTableHandler(2, 1), []
    for delta in deltas:
        table.add([delta])
        rows.add([[delta]], row_ids=[1])
        seen.append(table.get()[0])
    np.testing.assert_allclose(rows.get()[:, 0], [0, seen[-1]], rtol=1e-5)
    return seen


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("updater", "deltas", "expected"),
    [
        ("default", [1, 2], [1, 3]),
        ("sgd", [1, 2], [-1, -3]),
        ("momentum", [1, 2], [-1, -3]),
        (mv.Momentum(0.5), [1, 1], [-0.5, -1.25]),
        # V15: delta / lr is 1, twice.
        ("adagrad", [0.01, 0.01], [-0.1, -0.17071]),
        (mv.AdaGrad(0.1, 0.5), [0.5, 0.5], [-0.1, -0.17071]),
        (optim.SGD(0.5), [1, 2], [-0.5, -1.5]),
    ],
)
def test_v15_updaters(updater, deltas, expected):
    [seen] = mv.launch(partial(with_updater, *deltas), 1, updater=updater)
    np.testing.assert_allclose(seen, expected, rtol=0, atol=5e-6)


def begin_with_ones_own():
    mv.init()
    mine = mv.worker_id() + 5.0
    array = mv.ArrayTableHandler(3, init_value=[mine] * 3)
    matrix = mv.MatrixTableHandler(2, 1, init_value=[[mine], [mine]])
    return array.get().tolist(), matrix.get().ravel().tolist()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("updater", ["default", "sgd"])
def test_v19_the_masters_value_counts(updater):
    found = mv.launch(begin_with_ones_own, 3, updater=updater)
    assert found == [([5, 5, 5], [5, 5])] * 3


HELD = threading.Event()


def add_behind():
    """Add while the only thread that adds is held up: nothing waits but what says so."""
    mv.init()
    table = mv.ArrayTableHandler(1)
    store = store_of(table)
    real = store["array"].add

    class Held:
        def __getitem__(self, name):
            return self

        def add(self, delta, timeout):
            assert HELD.wait(60)
            return real(delta, timeout=timeout)

    table._store = Held()
    data = np.ones(1, "f4")
    table.add(data)
    data[:] = 100  # it was copied
    before = store["array"].pull()[0]
    HELD.set()
    mv.barrier()
    return before, store["array"].pull()[0]


@pytest.mark.usefixtures("inside")
def test_add_returns_at_once_and_barrier_waits():
    HELD.clear()
    assert mv.launch(add_behind, 1) == [(0, 1)]


def add_nan(then):
    mv.init()
    table = mv.ArrayTableHandler(1)
    table.add([np.nan])
    then(table)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    "then",
    [
        lambda table: None,
        lambda table: table.get(),
        lambda table: mv.barrier(),
        lambda table: mv.shutdown(),
        lambda table: table.add([1.0], sync=True),
    ],
)
def test_what_goes_wrong_behind_is_raised(then):
    with pytest.raises(daskps.PushRejectedError):
        mv.launch(partial(add_nan, then), 1)


def after_shutdown():
    mv.init()
    mv.shutdown()
    mv.shutdown()


def other_tables():
    mv.init()
    mv.ArrayTableHandler(3 + mv.worker_id())


def called(call):
    mv.init()
    call()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("main", "error", "said"),
    [
        (lambda: mv.barrier(), RuntimeError, r"call multiverso\.init\(\) before"),
        (lambda: mv.ArrayTableHandler(3), RuntimeError, r"call multiverso\.init\(\)"),
        (lambda: [mv.init(), mv.init()], RuntimeError, "called once"),
        (after_shutdown, RuntimeError, r"has called multiverso\.shutdown"),
        (other_tables, ValueError, "an array of 3, float32"),
    ],
)
def test_order_of_calls(main, error, said):
    with pytest.raises(error, match=said):
        mv.launch(main, 2)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: mv.ArrayTableHandler(0), ValueError, "size must be at least 1"),
        (lambda: mv.ArrayTableHandler(2.5), TypeError, "size is an int"),
        (lambda: mv.ArrayTableHandler(2, [1]), ValueError, "init_value has 1 numbers"),
        (lambda: mv.ArrayTableHandler(2, dtype="f2"), ValueError, "dtype is one of"),
        (lambda: mv.ArrayTableHandler(2, dtype=3), ValueError, "dtype is one of"),
        (lambda: mv.MatrixTableHandler(2, 0), ValueError, "num_col must be at least 1"),
        (
            lambda: mv.ArrayTableHandler(2).add([1, 2, 3]),
            ValueError,
            "data has 3 numbers, not 2",
        ),
        (
            lambda: mv.ArrayTableHandler(2).add(["a", "b"]),
            TypeError,
            "data is an array of numbers",
        ),
        (
            lambda: mv.ArrayTableHandler(2, dtype="int32").add([0.5, 1]),
            TypeError,
            "data is an array of numbers for int32",
        ),
        (
            lambda: mv.ArrayTableHandler(1, dtype="int32").add([2**31]),
            ValueError,
            "too large for int32",
        ),
        (
            lambda: mv.ArrayTableHandler(1).add([1], sync="no"),
            TypeError,
            "sync is True or False",
        ),
        (
            lambda: mv.MatrixTableHandler(2, 2).add([[1, 2]], row_ids=[0, 1]),
            ValueError,
            "data has 2 numbers, not 2 x 2",
        ),
        (
            lambda: mv.MatrixTableHandler(2, 2).get([-1]),
            ValueError,
            "row_ids are from 0 to 1, found -1 to -1",
        ),
        (lambda: mv.MatrixTableHandler(2, 2).get([0.5]), TypeError, "row_ids are ints"),
        (lambda: mv.KVTableHandler().get("a"), TypeError, "keys are ints"),
        (lambda: mv.aggregate([1.0]), TypeError, "data is an array, found list"),
    ],
)
def test_wrong_calls(call, error, said):
    with pytest.raises(error, match=said):
        mv.launch(partial(called, call), 1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"n_workers": 0}, ValueError, "n_workers must be at least 1"),
        ({"main": 3}, TypeError, r"main is a function main\(\)"),
        ({"updater": "adam"}, ValueError, "'default', 'sgd', 'momentum', 'adagrad'"),
        ({"updater": "dcasgd"}, ValueError, r"optim\.DCASGD does the same for pushes"),
        ({"updater": "dcasgda"}, ValueError, "does not say whose it is"),
        ({"updater": 3}, TypeError, "updater is one of"),
        ({"sync": "yes"}, TypeError, "sync is True or False"),
    ],
)
def test_wrong_launches(options, error, said):
    with pytest.raises(error, match=said):
        mv.launch(**{"main": mv.init, "n_workers": 1} | options)


def make_huge():
    mv.init()
    mv.ArrayTableHandler(10**15)


@pytest.mark.usefixtures("inside")
def test_a_table_that_is_too_large():
    with pytest.raises(daskps.LayoutError):
        mv.launch(make_huge, 3)


def add_huge():
    mv.init()
    mv.ArrayTableHandler(1).add([1e300], sync=True)


@pytest.mark.usefixtures("inside")
def test_what_is_too_large_for_float32_is_refused_without_a_warning():
    with pytest.raises(daskps.PushRejectedError, match="has NaN or Inf"):
        mv.launch(add_huge, 1)


@pytest.mark.usefixtures("inside")
def test_integers_take_the_default_updater_only():
    with pytest.raises(ValueError, match='takes updater="default" only'):
        mv.launch(partial(integers, "int32"), 1, updater="sgd")


def make_or_wait():
    mv.init()
    if mv.worker_id() == 0:
        mv.ArrayTableHandler(3)
    else:
        mv.barrier()


@pytest.mark.usefixtures("inside")
def test_a_table_of_one_worker_against_a_barrier_of_another():
    """Each would wait for the other one for ever."""
    with pytest.raises(ValueError, match="barrier"):
        mv.launch(make_or_wait, 2, timeout=60)
    assert not daskps.list_stores()

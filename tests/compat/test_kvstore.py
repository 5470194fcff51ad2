"""MXNet's kvstore by its own words: scenarios M of reference, with their numbers."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.compat import mxnet
from daskps.compat.mxnet import launch
from daskps.errors import NoOptimizerError
from tests.inprocess import cluster

pytestmark = pytest.mark.leaky  # functions run in a thread of Dask's that stays
#: Also given what its types refuse.
create: Any = mxnet.kvstore.create


@pytest.fixture
def inside():
    with cluster() as made:
        yield made


def pulled(kv, key, shape=(4, 4), dtype="f4"):
    out = np.full(shape, np.nan if dtype[0] == "f" else 77, dtype)
    kv.pull(key, out)
    return out


def local(updater=None, **options):
    kv = create("local", **options)
    if updater is not None:
        kv.set_updater(updater)
    kv.init(3, np.zeros((4, 4), "f4"))
    kv.init([5, 7, 9], [np.zeros((4, 4), "f4")] * 3)
    return kv


@pytest.mark.usefixtures("inside")
def test_m1_m3_a_push_replaces_by_the_sum_of_devices():
    """4 arrays of ones: 4; doubled for a list of keys: 8; a key not pushed: 0."""
    kv = local()
    kv.push(3, [np.ones((4, 4), "f4")] * 4)
    assert (pulled(kv, 3) == 4).all()
    kv.push(3, np.ones((4, 4)))
    assert (pulled(kv, 3) == 1).all()
    kv.push([5, 7], [[np.full((4, 4), 2.0, "f4")] * 4] * 2)
    outs: list[Any] = [
        np.empty((4, 4), "f4"),
        [np.empty((4, 4), "f4"), np.empty((4, 4), "f8")],
    ]
    kv.pull([5, 7], outs)
    assert (outs[0] == 8).all()
    assert all((out == 8).all() for out in outs[1])
    assert (pulled(kv, 9) == 0).all()


def accumulate(key, received, stored):
    assert key in (3, 5, 7, 9)
    stored += received


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("late", [False, True])
def test_m4_an_updater_accumulates(late):
    """4 pushes of 4 devices: 16, also where the updater comes after the keys."""
    kv = local(None if late else accumulate)
    if late:
        kv.set_updater(accumulate)
    for _ in range(4):
        kv.push(3, [np.ones((4, 4), "f4")] * 4)
    assert (pulled(kv, 3) == 16).all()


@pytest.mark.usefixtures("inside")
def test_m5_an_updater_that_returns():
    """Stored += 2 received, from 4: 6. Keys are what they were begun as."""

    def updater(key, received, stored):
        assert key == "w"
        return stored + 2 * received

    kv = create("device")
    kv.init("w", np.full(2, 4.0))
    kv.set_updater(updater)
    out = np.empty(2)
    kv.pushpull("w", np.ones(2), out)
    assert (out == 6).all()


def push_rank(kind, shape, dtype, steps):
    kv = create(kind)
    # Only the value of worker 0 counts.
    kv.init(["a", "b"], [np.full(shape, 1 + kv.rank, dtype)] * 2)
    kv.set_optimizer(optim.Function(twice))
    seen = []
    for _ in range(steps):
        kv.push(["a", "b"], [np.full(shape, kv.rank + 1, dtype)] * 2)
        first, second = (pulled(kv, key, shape, dtype) for key in "ab")
        assert (first == second).all()
        seen.append(first)
    kv.barrier()
    assert repr(kv) == (
        f"<daskps.compat.mxnet.kvstore.KVStore {kind!r}: 2 keys, worker {kv.rank} of "
        f"{kv.num_workers}>"
    )
    return kv.rank, kv.num_workers, kv.type, seen


def twice(name, weights, gradient, step):
    return weights + 2 * gradient


def check_m7(client, n, shape, dtype):
    found = launch(partial(push_rank, "dist_sync", shape, dtype, 3), n, client=client)
    for worker, (rank, size, kind, seen) in enumerate(found):
        assert (rank, size, kind) == (worker, n, "dist_sync")
        for i, value in enumerate(seen):
            expected = (n + 1) * n * (i + 1) + 1
            np.testing.assert_array_equal(value, np.full(shape, expected, dtype))
            assert value.dtype == dtype


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_m7_rounds_of_three_workers(dtype):
    """After i pushes (n + 1) n i + 1: 13, 25, 37."""
    check_m7(None, 3, (2, 3), dtype)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_m7_large_arrays_on_two_processes(client, dtype):
    """7, 13, 19."""
    check_m7(client, 2, (1200, 1200), dtype)


def train_sync(kind):
    kv = create(kind)
    kv.init(0, np.ones(3))
    kv.set_optimizer(optim.SGD(1.0))
    kv.push(0, np.full(3, kv.rank + 1.0))
    kv.barrier()
    return pulled(kv, 0, (3,), "f8").tolist()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("n", [1, 3])
def test_m11_one_step_of_all_workers(kind, n):
    """Worker r has gradient r + 1: 1 - (n + 1) n / 2."""
    assert launch(partial(train_sync, kind), n) == [[1 - (n + 1) * n / 2] * 3] * n


def momentum_steps(kind):
    kv = create(kind)
    kv.set_optimizer(optim.SGD(0.1, momentum=0.9))
    kv.init("w", np.ones(1))
    for _ in range(2):
        kv.push("w", np.ones(1))
    kv.barrier()
    return round(float(pulled(kv, "w", (1,), "f8")[0]), 6)


@pytest.mark.usefixtures("inside")
def test_sync_updates_once_and_async_on_each_arrival():
    """Gradient 2 twice: 1 - 0.2 - 0.38; gradient 1 four times: the sum of 4 velocities."""
    assert launch(partial(momentum_steps, "dist_sync"), 2) == [0.42] * 2
    velocity, w = 0.0, 1.0
    for _ in range(4):
        velocity = 0.9 * velocity + 1
        w -= 0.1 * velocity
    assert launch(partial(momentum_steps, "dist_async"), 2) == [round(w, 6)] * 2


def compressed(grads, threshold):
    kv = create("dist_sync")
    kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
    kv.init("w", np.ones(grads.shape[2:], "f4"))
    kv.set_updater(lambda key, received, stored: stored + received)
    seen = [pulled(kv, "w", grads.shape[2:])]
    for grad in grads[kv.rank]:
        kv.push("w", grad)
        seen.append(pulled(kv, "w", grads.shape[2:]))
    return seen


def simulated(grads, threshold):
    w, left = np.ones(grads.shape[2:], "f4"), np.zeros_like(grads[:, 0])
    seen = [w]
    for step in range(grads.shape[1]):
        left += grads[:, step]
        sent = threshold * ((left >= threshold) * 1.0 - (left <= -threshold))
        left -= sent.astype("f4")
        w = w + sent.astype("f4").sum(axis=0)
        seen.append(w)
    return seen


@pytest.mark.usefixtures("inside")
def test_m9_m10_two_bits(rng):
    """Zeros change nothing, what was begun with is pulled as it is; else as simulated."""
    zeros = np.zeros((2, 2, 5), "f4")
    for seen in launch(partial(compressed, zeros, 0.5), 2):
        assert [s.tolist() for s in seen] == [[1.0] * 5] * 3
    grads = rng.normal(size=(3, 6, 7, 3)).astype("f4")
    expected = simulated(grads, 0.5)
    assert np.ptp(expected[-1]) > 0.5
    for seen in launch(partial(compressed, grads, 0.5), 3):
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-6)


def bytes_sent(n):
    kv = create("dist_sync")
    kv.init("w", np.zeros(n, "f4"))
    sent, ones = kv._sent, np.ones(n, "f4")
    whole = sent("=w", ones).nbytes
    kv.set_gradient_compression({"type": "2bit"})
    return whole, sent("=w", ones).nbytes


@pytest.mark.usefixtures("inside")
def test_two_bits_are_two_bits():
    """A row of words for each of 2 workers: 2 x 1,002 / 4 bytes, and not 4,008."""
    assert launch(partial(bytes_sent, 1_002), 2) == [(4_008, 2 * 251)] * 2


def begin_hundred():
    kv = create("dist_sync")
    keys = list(range(100))
    kv.init(keys, [np.full(i % 3 + 1, i) for i in keys])
    outs = [np.empty(i % 3 + 1) for i in keys]
    kv.pull(keys, outs)
    return [out.tolist() for out in outs]


@pytest.mark.usefixtures("inside")
def test_m13_a_hundred_keys_at_once():
    assert launch(begin_hundred, 2) == [[[i] * (i % 3 + 1) for i in range(100)]] * 2


@pytest.mark.usefixtures("inside")
def test_rows_that_are_not_asked_for_are_zero():
    """Ids in any order, more than once, or none."""
    kv = create("local")
    first = np.arange(12.0).reshape(6, 2)
    kv.init(["a", "b"], [first, -first])
    outs: list[Any] = [
        np.full((6, 2), np.nan),
        [np.full((6, 2), np.nan) for _ in range(2)],
    ]
    kv.row_sparse_pull(["a", "b"], outs, row_ids=[[4, 1, 4], []])
    expected = np.zeros((6, 2))
    expected[[1, 4]] = first[[1, 4]]
    assert outs[0].tolist() == expected.tolist()
    assert not np.any(outs[1])
    kv.row_sparse_pull("b", outs[0], -1, np.array([[5]]))
    assert outs[0].tolist() == [[0, 0]] * 5 + [[-10, -11]]


def small_steps(kind):
    kv = create(kind)
    kv.init("w", np.ones(2, "f2"))
    kv.set_optimizer(optim.SGD(1e-4))
    for _ in range(20):
        kv.push("w", np.ones(2, "f2"))
    kv.barrier()
    return pulled(kv, "w", (2,), "f2").tolist()


@pytest.mark.usefixtures("inside")
def test_float16_is_updated_in_float32():
    """20 steps of 0.0001 from 1.0, which has no neighbour above 0.9995: 0.998."""
    expected = [[float(np.float16(0.998))] * 2]
    for kind in ("local", "dist_sync", "dist_async"):
        assert launch(partial(small_steps, kind), 1) == expected


def wide_sums(kind, codec):
    kv = create(kind)
    kv.init(["a", "b"], [np.zeros(3, "f2")] * 2)
    kv.set_optimizer(optim.SGD(0.01))
    if codec:
        kv.set_gradient_compression({"type": "2bit", "threshold": 30_000.0})
    kv.push("a", [np.full(3, 30_000, "f2")] * 3)
    # In float16 2,048 + 1 is 2,048.
    kv.push("b", [np.full(3, v, "f2") for v in (2_048, 1, 1)])
    kv.barrier()
    return [pulled(kv, name, (3,), "f2")[0].item() for name in ("a", "b")]


@pytest.mark.usefixtures("inside")
def test_sums_are_as_wide_as_they_need_to_be():
    for kind, n, a in [
        ("local", 1, -900),
        ("dist_async", 1, -900),
        ("dist_sync", 2, -1800),
    ]:
        found = launch(partial(wide_sums, kind, codec=False), n)
        assert found == [[a, n * -20.5]] * n
    # Of 90,000 two bits send 30,000, and of 2,050 nothing.
    assert launch(partial(wide_sums, "dist_sync", codec=True), 2) == [[-600, 0]] * 2


@pytest.mark.usefixtures("inside")
def test_what_a_key_cannot_hold_is_refused_by_its_key():
    kv = create("local")
    kv.init(["a", "n", "c"], [np.zeros(3, "f2"), np.zeros(3, "i1"), np.zeros(3, "f4")])
    for key, value, said in [
        ("a", np.full(3, 30_000, "f2"), "the value of 'a' has NaN or Inf"),
        (
            "n",
            np.full(3, 100, "i1"),
            "the value of 'n' has values that int8 cannot hold",
        ),
        (
            "c",
            np.full(3, 3e38, "f4"),
            "sum of what 3 devices give for key 'c' is not fin",
        ),
        ("c", np.full(3, np.nan, "f4"), "the value of 'c' has NaN or Inf"),
    ]:
        with pytest.raises(daskps.PushRejectedError, match=said):
            kv.push(key, [value] * 3)
        assert not pulled(kv, key, (3,), value.dtype.str[1:]).any()
    kv.push("n", [np.full(3, 100, "i1"), np.full(3, -90, "i1"), np.full(3, 90, "i1")])
    assert pulled(kv, "n", (3,), "i1").tolist() == [100] * 3
    with pytest.raises(daskps.LayoutError, match="initial value of parameter 'd'"):
        kv.init("d", np.full(3, np.nan))


@pytest.mark.usefixtures("inside")
def test_integers_are_not_compressed():
    def main():
        kv = create("dist_sync")
        kv.set_gradient_compression({"type": "2bit"})
        kv.init("n", np.zeros(3, "i4"))
        kv.push("n", np.full(3, kv.rank + 5, "i4"))
        return pulled(kv, "n", (3,), "i4").tolist()

    assert launch(main, 2) == [[11] * 3] * 2


def broadcast_once():
    kv = create("dist_sync")
    out = np.empty(2)
    kv.broadcast("w", np.full(2, kv.rank + 5.0), out)
    return out.tolist()


@pytest.mark.usefixtures("inside")
def test_broadcast_is_of_worker_0():
    assert launch(broadcast_once, 3) == [[5, 5]] * 3


def keep_states(folder):
    kv = create("dist_sync")
    kv.set_optimizer(optim.SGD(0.1, momentum=0.9))
    kv.init("w", np.ones(1))
    kv.push("w", np.ones(1) / kv.num_workers)
    kv.save_optimizer_states(folder)
    kv.push("w", np.ones(1) / kv.num_workers)
    straight = pulled(kv, "w", (1,), "f8")[0]
    other = create("dist_sync")
    other.set_optimizer(optim.SGD(0.1, momentum=0.9))
    other.init("w", np.full(1, 0.9))
    other.load_optimizer_states(folder)
    loaded = pulled(other, "w", (1,), "f8")[0]
    other.push("w", np.ones(1) / kv.num_workers)
    return straight, loaded, pulled(other, "w", (1,), "f8")[0]


def test_states_of_optimizers_are_saved_and_loaded(client, tmp_path):
    """Theirs fail where a kvstore is distributed. 0.9, then with its velocity 0.71."""
    for found in launch(partial(keep_states, str(tmp_path)), 2, client=client):
        np.testing.assert_allclose(found, [0.71, 0.9, 0.71], rtol=0, atol=1e-12)


PUSHED = threading.Event()


def push_at_once():
    kv = create("dist_sync")
    kv.init("w", np.zeros(1))
    value = np.ones(1)
    if kv.rank:
        assert PUSHED.wait(60)
    # Worker 1 has not pushed yet: this would wait for ever.
    kv.push("w", value)
    value[:] = 100  # it was copied
    PUSHED.set()
    return pulled(kv, "w", (1,), "f8").tolist()


@pytest.mark.usefixtures("inside")
def test_a_push_returns_at_once():
    PUSHED.clear()
    assert launch(push_at_once, 2) == [[2.0]] * 2


def leave_early():
    kv = create("dist_sync")
    kv.init("w", np.zeros(1))
    seen = []
    for _ in range(3 if kv.rank else 1):
        kv.push("w", np.ones(1))
        seen.append(pulled(kv, "w", (1,), "f8")[0])
    return seen


@pytest.mark.usefixtures("inside")
def test_unequal_numbers_of_pushes_do_not_hang():
    """Worker 0 ends after its first push; theirs waits for it for ever."""
    assert launch(leave_early, 3) == [[3], [3, 2, 2], [3, 2, 2]]


def fail_at_one():
    kv = create("dist_sync")
    kv.init("w", np.zeros(1))
    kv.set_updater(refuse)
    kv.push("w", np.ones(1))
    try:
        kv.barrier()
    except ArithmeticError as error:
        return str(error)
    return ""


def refuse(key, received, stored):
    raise ArithmeticError("not this")


@pytest.mark.usefixtures("inside")
def test_all_workers_hear_of_an_updater_that_fails():
    first, second = launch(fail_at_one, 2)
    assert "not this" in first
    assert first == second


def other_keys():
    kv = create("dist_sync")
    kv.init(["a", "b"], [np.zeros(1)] * 2)
    kv.push("ab"[kv.rank], np.ones(1))
    kv.barrier()


@pytest.mark.usefixtures("inside")
def test_workers_push_the_same_keys():
    with pytest.raises(ValueError, match=r"a push of key .*, and not .*a push of key"):
        launch(other_keys, 2)


#: Longer than an array of a key.
LONG = np.zeros((5, 4))


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        # M12
        (lambda kv: kv.init(1.5, np.ones(2)), TypeError, "a key is an int or a string"),
        (
            lambda kv: kv.init(True, np.ones(2)),
            TypeError,
            "a key is an int or a string",
        ),
        (lambda kv: kv.init(3, np.ones(2)), ValueError, "key 3 is begun already"),
        (lambda kv: kv.init("a", np.ones(2)), ValueError, "keys of int, found str"),
        (lambda kv: kv.init([1, "a"], [1, 2]), ValueError, "all ints or all strings"),
        (lambda kv: kv.init([1, 1], [1, 2]), ValueError, "key 1 is begun already"),
        (lambda kv: kv.init([1, 2], [1]), ValueError, "2 keys go with as many values"),
        (lambda kv: kv.init([], []), ValueError, "no key in an empty list"),
        (lambda kv: kv.init(1, "a"), TypeError, "which is no number"),
        (lambda kv: kv.push(4, np.ones(2)), ValueError, "there is no key 4"),
        (lambda kv: kv.push("3", np.ones(2)), ValueError, "there is no key '3'"),
        (
            lambda kv: kv.push(3, np.ones(2)),
            ValueError,
            r"has shape \(4, 4\), not \(2,\)",
        ),
        (lambda kv: kv.push(3, []), ValueError, "without a value"),
        (
            lambda kv: kv.push(3, np.ones((4, 4), "i8").astype("c16")),
            TypeError,
            "which is no number",
        ),
        (lambda kv: kv.pull(3, np.ones(2)), ValueError, r"has shape \(4, 4\)"),
        (lambda kv: kv.pull(3, 0.0), TypeError, "out is an array"),
        (
            lambda kv: kv.pull([5, 3], [LONG[:4], [np.ones((4, 4)), LONG.T[:, :4]]]),
            ValueError,
            r"out\[5\] and out\[3\] share memory",
        ),
        (
            lambda kv: kv.pull(3, [LONG[:4], LONG[1:]]),
            ValueError,
            r"out\[3\] and out\[3\] share memory",
        ),
        (
            lambda kv: kv.pushpull([3, 5], [LONG[:4]] * 2),
            ValueError,
            r"out\[3\] and out\[5\] share memory",
        ),
        (
            lambda kv: kv.broadcast([1, 2], [LONG[:4]] * 2, [LONG[:4], LONG[1:]]),
            ValueError,
            r"out\[1\] and out\[2\] share memory",
        ),
        (
            lambda kv: kv.row_sparse_pull(3, np.ones((4, 4)), 0, [4]),
            IndexError,
            "has rows 0 to 3, found 4 to 4",
        ),
        (
            lambda kv: kv.row_sparse_pull(3, np.ones((4, 4)), 0, [0.5]),
            TypeError,
            "row_ids are ints",
        ),
        (
            lambda kv: kv.row_sparse_pull(3, np.ones((4, 4))),
            TypeError,
            "row_ids are ints",
        ),
        (
            lambda kv: kv.row_sparse_pull(3, np.ones((4, 4)), [1]),
            TypeError,
            "priority is an int",
        ),
        (
            lambda kv: kv.push(3, np.zeros((4, 4)), 0.5),
            TypeError,
            "priority is an int",
        ),
        (
            lambda kv: kv.pushpull(3, np.zeros((4, 4)), None, "1"),
            TypeError,
            "priority is an int",
        ),
        (lambda kv: kv.pull(3, LONG[:4], "1"), TypeError, "priority is an int"),
        (
            lambda kv: kv.broadcast(1, LONG[:4], np.ones((4, 4)), "1"),
            TypeError,
            "priority is an int",
        ),
        (
            lambda kv: kv.pull(3, LONG[:4], ignore_sparse="no"),
            TypeError,
            "ignore_sparse is True or False",
        ),
        (lambda kv: kv.is_capable("speed"), ValueError, "a capability is 'optimizer'"),
        (lambda kv: kv.set_optimizer("sgd"), TypeError, "optimizer is a rule"),
        (lambda kv: kv.set_updater(3), TypeError, "updater is a function"),
        (
            lambda kv: kv.set_gradient_compression({"type": "2bit"}),
            ValueError,
            "of type dist_sync, not local",
        ),
        (
            lambda kv: kv.set_gradient_compression({"type": "1bit"}),
            ValueError,
            "compression_params are",
        ),
        (
            lambda kv: kv.set_gradient_compression({"type": "2bit", "threshold": 0}),
            ValueError,
            "threshold is above 0",
        ),
        (lambda kv: kv.save_optimizer_states("x"), NoOptimizerError, "no state"),
        (lambda kv: kv.load_optimizer_states("x"), NoOptimizerError, "no state"),
    ],
)
def test_wrong_calls(call, error, said):
    kv = local()
    kv.push(3, np.ones((4, 4)))
    with pytest.raises(error, match=said):
        call(kv)
    assert (pulled(kv, 3) == 1).all()


def push_without_an_optimizer():
    kv = create("dist_async")
    kv.init(3, np.ones(2))
    kv.push(3, np.ones(2))


@pytest.mark.usefixtures("inside")
def test_async_refuses_a_push_without_an_updater():
    with pytest.raises(NoOptimizerError, match="needs set_optimizer or set_updater"):
        launch(push_without_an_optimizer, 1)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("nccl",), ValueError, "one of local, device, dist_sync, dist_d"),
        ((3,), TypeError, "one of local, device, dist_sync, dist_d"),
        (("dist_sync",), RuntimeError, r"mxnet\.launch runs"),
    ],
)
def test_wrong_types(given, error, said):
    with pytest.raises(error, match=said):
        create(*given)


def test_wrong_launches():
    wrong: Any = launch
    with pytest.raises(ValueError, match="n_workers must be at least 1"):
        wrong(begin_hundred, 0)
    with pytest.raises(TypeError, match=r"main is a function main\(\)"):
        wrong(3, 1)


@pytest.mark.usefixtures("inside")
def test_priorities_and_sparse_outputs_change_nothing():
    """An updater that does not commute: (0 + 1) * 2 + 3 in the order of calls."""
    kv = create("local")
    kv.set_updater(lambda key, received, stored: stored * 2 + received)
    first, out = np.zeros(2), np.empty(2)
    kv.broadcast("w", first, out, 7)
    kv.push("w", np.ones(2), -1)
    kv.pushpull("w", np.full(2, 3.0), out, priority=1)
    assert out.tolist() == [5, 5]
    for ignored in (True, False):
        out[:] = np.nan
        kv.pull("w", out, 2, ignored)
        assert out.tolist() == [5, 5]


def test_kvstores_are_capable_of_an_optimizer():
    for spelled in ("optimizer", "Optimizer"):
        assert mxnet.kvstore.KVStore.is_capable(spelled) is True


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    "kind", ["dist_device_sync", "dist_sync_device", "dist_async_device"]
)
def test_device_types_are_those_without_device(kind):
    """Gradient 1 of 2 workers twice, as one sum of 2 or one by one; 2 bits need a sum."""
    asked = kind.replace("_device", "")
    found = launch(partial(momentum_steps, kind), 2)
    assert found == launch(partial(momentum_steps, asked), 2)

    def main():
        kv = create(kind)
        if "async" in kind:
            kv.init("w", np.ones(2))
            with pytest.raises(NoOptimizerError, match=f"of type {kind} needs"):
                kv.push("w", np.ones(2))
        else:
            kv.set_gradient_compression({"type": "2bit"})
        return kv.type

    assert launch(main, 1) == [kind]


@pytest.mark.usefixtures("inside")
def test_a_new_optimizer_leaves_no_store_behind():
    before = len(daskps.list_stores())
    kv = local()
    made = len(daskps.list_stores()) - before
    kv.set_optimizer(optim.SGD(0.1))
    kv.set_optimizer(optim.SGD(0.2))
    assert (made, len(daskps.list_stores()) - before) == (2, 2)

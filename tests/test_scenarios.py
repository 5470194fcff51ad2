"""What the five ancestors of daskps do, scenario by scenario, with their numbers.

B is BigDL's AllReduceParameter, S Apache SINGA, M MXNet's executor group and kvstore, D
SystemML's paramserv, V Multiverso.

Where our contract decides otherwise:

- B20, second half: a layer covered by two optimizers is no error. Patterns are tried
  in mapping order and the first match holds; only a name without a match and a pattern
  that matches nothing are refused.
- M1 to M3: without an updater their push replaces the stored value by the sum. Ours
  raises NoOptimizerError; the sum is `aggregate` and the replacement `assign`.
- D14: our mode by default is BSP, theirs ASP, so the missing mode is no error.
- D18: their SBP (backup workers) is not built.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask.array as da
import numpy as np
import pytest

import daskps
from daskps import codecs, init, optim
from tests.seams import session_of, waiters_of
from tests.support import CARRIERS, mostly_inside, until


class Accumulate(optim.Rule):
    """Stored plus the received, as updaters of a kvstore do; `times` the received."""

    def __init__(self, times=1.0):
        super().__init__(1.0)
        self.times = float(times)

    def prepare(self, step, lr):
        return (self.times,)

    @staticmethod
    def update(w, g, times):
        return w + times * g


def push_rank(trainer, steps):
    """Push rank + 1 everywhere, return what was seen before and after each step."""
    seen = [trainer.pull()]
    for _ in range(steps):
        grads = {n: np.full_like(a, trainer.rank + 1) for n, a in seen[0].items()}
        trainer.push(grads)
        seen.append(trainer.pull())
    return seen


def row_is_gradient(params, X, y):
    return {"w": np.full_like(params["w"], X.mean())}


def weight_is_gradient(params, X, y):
    return {"w": params["w"].copy()}


def regression(params, X, y):
    residual = X @ params["w"] + params["b"] - y
    grads = {"w": 2 * X.T @ residual / len(X), "b": np.array(2 * residual.mean())}
    return float((residual**2).mean()), grads


def logistic(params, X, y):
    p = 1 / (1 + np.exp(-(X @ params["w"] + params["b"])))
    return {"w": X.T @ (p - y) / len(X), "b": np.array((p - y).mean())}


# -- BigDL -------------------------------------------------------------------


@mostly_inside("size", [10, 2])
def test_b8_b9_mean_of_four_workers(way, size):
    """Gradients 1 to 4: their mean is 2.5, also with fewer elements than shards."""
    with daskps.create(
        {"w": np.zeros(size)}, optimizer=optim.SGD(1.0), shards=4
    ) as store:
        given = [{"w": np.full(size, r + 1.0)} for r in range(4)]
        np.testing.assert_array_equal(store.aggregate(given)["w"], np.full(size, 2.5))
        assert store.version == 0
        daskps.run(store, push_rank, [1] * 4)
        np.testing.assert_array_equal(store["w"].pull(), np.full(size, -2.5))
        assert store.versions == (1,) * 4


def numpy_sgd(momentum):
    state: dict[str, Any] = {}

    def step(w, name, g):
        state[name] = momentum * state.get(name, 0.0) + g
        return w - 0.5 * state[name]

    return step


def numpy_adagrad():
    state: dict[str, Any] = {}

    def step(w, name, g):
        state[name] = state.get(name, 0.0) + g * g
        return w - 0.5 * g / (np.sqrt(state[name]) + 1e-10)

    return step


@mostly_inside("rule", ["sgd", "momentum", "adagrad"], train=True)
def test_b12_equals_the_reference_in_one_process(train, way, rule):
    """Their inputs 0,1,0,1 -> 0 and 1,0,1,0 -> 1; 1e-6 is asked, 1e-12 holds."""
    X = np.tile([[0.0, 1, 0, 1], [1, 0, 1, 0]], (16, 1))
    y = np.tile([0.0, 1.0], 16)
    rules = {
        "sgd": (optim.SGD(0.5), numpy_sgd(0.0)),
        "momentum": (optim.SGD(0.5, momentum=0.9), numpy_sgd(0.9)),
        "adagrad": (optim.Adagrad(0.5), numpy_adagrad()),
    }
    ours, reference = rules[rule]
    start = {"w": np.linspace(-0.5, 0.5, 4), "b": np.array(0.1)}
    with daskps.create(start, optimizer=ours, shards=3) as store:
        # Four trainers of 2 rows are one batch of 8, in their order of ranks.
        result = train(
            store, logistic, X, y, trainers=4, batch_size=2, epochs=3, shuffle=False
        )
    expected = dict(start)
    parts = daskps.partition(X, y, 4)
    for _ in range(3):
        for a in range(0, 8, 2):
            batch = [np.concatenate([p[i][a : a + 2] for p in parts]) for i in (0, 1)]
            grads = logistic(expected, *batch)
            expected = {n: reference(expected[n], n, grads[n]) for n in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(result.weights[name], value, rtol=0, atol=1e-12)
    assert logistic(expected, X, y)["b"] != 0


@mostly_inside("rule", ["sgd", "adam"], train=True)
def test_b13_clipped_to_nothing(train, way, rule):
    """Clipped to [0, 0]: weights stay as they are, however often they are updated."""
    inner = {"sgd": optim.SGD(0.5, momentum=0.9), "adam": optim.Adam(0.5)}[rule]
    X, y = np.ones((8, 4)), np.zeros(8)
    start = {"w": np.linspace(-0.5, 0.5, 4), "b": np.array(0.1)}
    clipped = optim.chain(optim.clip_by_value(0, 0), inner)
    with daskps.create(start, optimizer=clipped) as store:
        result = train(store, logistic, X, y, trainers=2, batch_size=2)
        assert store.version == 2
    for name in start:
        np.testing.assert_array_equal(result.weights[name], start[name])


@mostly_inside(train=True)
def test_b16_other_data_between_runs(train, way):
    """Epochs and steps go on where they were; batches of the new data begin anew."""
    seen = []

    def told(params, X, y):
        seen.append(tuple(int(v) for v in X))
        return {"w": np.ones(1)}

    rate = optim.SGD(optim.schedules.step(1.0, every=4, factor=0.5))
    options: Any = {"trainers": 1, "batch_size": 2, "shuffle": False}
    with daskps.create({"w": np.zeros(1)}, optimizer=rate) as store:
        y = np.zeros(8)
        first = train(store, told, np.arange(8.0), y, **options)
        second = train(store, told, 10 + np.arange(6.0), y[:6], **options)
        assert [e.epoch for e in first.history] == [0]
        assert [e.epoch for e in second.history] == [1]
        assert store.version == 7
        # Four steps at 1, and from the fifth on at one half.
        np.testing.assert_array_equal(store["w"].pull(), [-4 - 3 * 0.5])
    if way == "inside":
        assert seen == [(0, 1), (2, 3), (4, 5), (6, 7), (10, 11), (12, 13), (14, 15)]


def test_b20_uncovered_parameter_is_an_error(client):
    params = {"emb/a": np.zeros(3), "out": np.zeros(2)}
    with pytest.raises(daskps.LayoutError, match="out"):
        daskps.create(params, optimizer={"emb*": optim.SGD(0.1)})
    with pytest.raises(daskps.LayoutError, match="none"):
        daskps.create(params, optimizer={"none*": optim.SGD(1.0), "*": optim.SGD(0.1)})
    both = {"emb*": optim.SGD(1.0), "*": optim.SGD(0.1)}
    with daskps.create(params, optimizer=both) as store:
        assert store.optimizer == {"emb/a": "SGD(lr=1.0)", "out": "SGD(lr=0.1)"}


def three_steps(trainer, part):
    """Three pushes and three pulls."""
    for _ in range(3):
        trainer.pushpull({"w": np.ones(5)})
    counters = session_of(trainer).shards.counters
    return counters.messages, counters.local_calls


def test_b21_one_worker_and_one_trainer_need_no_network(client):
    worker = next(iter(client.nthreads()))
    with daskps.create(
        {"w": np.zeros(5)}, optimizer=optim.SGD(1.0), servers=[worker]
    ) as store:
        assert daskps.run(store, three_steps, [None]) == [(0, 6)]
        np.testing.assert_array_equal(store["w"].pull(), np.full(5, -3.0))


# -- SINGA -------------------------------------------------------------------


def test_s1_constants(client):
    spec: Any = daskps.ArraySpec
    params = {
        "a": spec((20, 10), "f4", 0.5),
        "b": spec((7,), "f8", init.constant(1.5)),
    }
    with daskps.create(params) as store:
        np.testing.assert_array_equal(store["a"].pull(), np.full((20, 10), 0.5, "f4"))
        np.testing.assert_array_equal(store["b"].pull(), np.full(7, 1.5))


def test_s2_uniform_and_gaussian_over_5000(client):
    spec: Any = daskps.ArraySpec
    params = {
        "u": spec((5000,), "f4", init.uniform(-1, 1)),
        "n": spec((5000,), "f4", init.normal(0, 1)),
    }
    with daskps.create(params, seed=3) as store, daskps.create(params, shards=5) as far:
        pulled = store.pull()
        other = far.pull()
    uniform, gaussian = pulled["u"], pulled["n"]
    assert -1 <= uniform.min() < -0.9
    assert 0.9 < uniform.max() <= 1
    assert abs(uniform.mean()) < 0.1
    assert abs(gaussian.mean()) < 0.1
    assert abs(gaussian.std() - 1) < 0.1
    assert (other["u"] != uniform).any(), "the seed has no effect"


@pytest.mark.parametrize("where", ["client", "task"])
def test_s4_pull_before_the_store_has_its_value(way, where):
    """Of a store nobody has made yet: it waits, then returns the value."""

    def early(client=None):
        return daskps.open("early", wait="60s", client=client)["w"].pull()

    def awaited(dask_scheduler):
        directory = dask_scheduler.extensions["daskps-directory"]
        return len(waiters_of(directory))

    daskps.list_stores()  # there is a directory
    with ThreadPoolExecutor(1) as pool:
        # A thread of its own does not know which client is the current one.
        here = where == "client"
        started = pool.submit(early, way) if here else way.submit(early)
        until(lambda: way.run_on_scheduler(awaited))
        assert not started.done()
        store = daskps.create({"w": np.arange(5.0)}, name="early", shards=3)
        np.testing.assert_array_equal(started.result(30), np.arange(5.0))
    assert not way.run_on_scheduler(awaited)
    # And of a value that is still to come.
    coming = store.pull_async(min_version=1)
    until(lambda: all(row["parked"] for row in store.stats()["shards"]))
    store.assign({"w": np.full(5, 7.0)})
    np.testing.assert_array_equal(coming.result(30)["w"], 7.0)
    store.delete()


def test_s5_three_workers_one_step(way):
    """Gradients 1, 2, 3, lr 0.1 from 0: -0.2, and one version."""
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(0.1)) as store:
        seen = daskps.run(store, push_rank, [1] * 3)
        for _, after in seen:
            np.testing.assert_allclose(after["w"], -0.2, rtol=1e-15)
        assert store.versions == (1, 1)


def test_s6_m12_duplicate_name_is_an_error(client):
    with daskps.create({"w": np.full(3, 7.0)}, name="twice") as store:
        with pytest.raises(ValueError, match="twice") as caught:
            daskps.create({"w": np.zeros(3)}, name="twice")
        assert isinstance(caught.value, daskps.StoreExistsError)
        np.testing.assert_array_equal(store["w"].pull(), np.full(3, 7.0))
        assert store.version == 0
        store.delete()
    with pytest.raises(ValueError, match="a/b"):
        daskps.create({"a/b": np.zeros(3), "a": {"b": np.ones(3)}})


#: S11, and S13 twice: what a weight of 1 becomes step by step.
OPTIMIZERS: Any = [
    (optim.SGD(0.1, momentum=0.9), [0.9, 0.71, 0.439]),
    (optim.Adagrad(0.1), [0.9, 0.82929]),
    (optim.RMSprop(0.1, alpha=0.9), [0.683772, 0.454357]),
]


@mostly_inside(
    "rule,expected,dtype", [(*o, dtype) for o in OPTIMIZERS for dtype in ("f4", "f8")]
)
def test_s11_s13_optimizers_through_a_store(way, rule, expected, dtype):
    """From weight 1, with gradient 1."""
    with daskps.create({"w": np.ones(5, dtype)}, optimizer=rule) as store:
        for step, value in enumerate(expected, 1):
            reached = store.push({"w": np.ones(5, dtype)})
            assert reached == step
            found = store.pull(min_version=reached)["w"]
            assert found.dtype == dtype
            np.testing.assert_allclose(found, value, rtol=0, atol=1e-6)


#: The all-reduce family: plain, half, sparse by value and sparse by the largest.
FAMILY: Any = {
    "plain": None,
    "half": codecs.Float16(),
    "half of a float32": codecs.BFloat16(),
    "by value": codecs.TopK(threshold=0.05),
    "largest": codecs.TopK(ratio=1.0),
}


def push_all_ones(trainer, names):
    trainer.push({name: np.ones((5, 4), "f4") for name in names})


@mostly_inside(
    "kind,names", [(kind, names) for kind in FAMILY for names in ("w", "wb")]
)
def test_s10_the_all_reduce_family(way, kind, names):
    """From 10 with gradients of 1 and lr 0.1: 9.9, one array or several in a message."""
    start = {name: np.full((5, 4), 10.0, "f4") for name in names}
    with daskps.create(start, optimizer=optim.SGD(0.1)) as store:
        daskps.run(store, push_all_ones, [names] * 3, codec=FAMILY[kind])
        for array in store.pull().values():
            np.testing.assert_array_almost_equal(array, 9.9, 5)
        assert {*store.versions} == {1}


# -- MXNet -------------------------------------------------------------------


def test_m1_m2_m3_aggregate_then_assign(client):
    """Four arrays of ones make 4, twice as large ones 8, another key stays 0."""
    params = {n: np.zeros((4, 4), "f4") for n in ("3", "5", "7", "9")}
    with daskps.create(params) as store:
        ones = {"3": np.ones((4, 4), "f4")}
        with pytest.raises(daskps.NoOptimizerError):
            store.push(ones)
        store.assign(store.aggregate([ones] * 4, reduce="sum"))
        np.testing.assert_array_equal(store["3"].pull(), 4)  # M1
        twos = {n: np.full((4, 4), 2, "f4") for n in ("5", "7")}
        store.assign(store.aggregate([twos] * 4, reduce="sum"))
        for name in twos:
            np.testing.assert_array_equal(store[name].pull(), 8)  # M2
        np.testing.assert_array_equal(store["9"].pull(), 0)  # M3


def push_ones(trainer, steps):
    for _ in range(steps):
        trainer.push({"w": np.ones((4, 4))})


def test_m4_accumulate_four_pushes_of_four(way):
    with daskps.create({"w": np.zeros((4, 4))}, optimizer=Accumulate()) as store:
        daskps.run(store, push_ones, [4] * 4, reduce="sum")
        np.testing.assert_array_equal(store["w"].pull(), 16)
        assert store.version == 4


def test_m5_update_adds_twice_the_gradient(client):
    with daskps.create({"w": np.full((4, 4), 4.0)}, optimizer=Accumulate(2)) as store:
        store.push({"w": np.ones((4, 4))})
        np.testing.assert_array_equal(store["w"].pull(), 6)


@mostly_inside(
    "shape,dtype",
    [(shape, dtype) for shape in ((2, 3), (1200, 1200)) for dtype in ("f2", "f4")],
    real=[((1200, 1200), "f2")],
)
def test_m7_after_i_pushes_of_three_workers(way, shape, dtype):
    """1 + i * 2 * (1 + 2 + 3): 13, 25, 37, exact also in half precision."""
    params = {"w": np.ones(shape, dtype)}
    with daskps.create(params, optimizer=Accumulate(2)) as store:
        seen = daskps.run(store, exact_m7, [shape] * 3, reduce="sum")
        assert seen == [[(13.0, 13.0), (25.0, 25.0), (37.0, 37.0)]] * 3
        found = store["w"].pull()
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.full(shape, 37, dtype))


def exact_m7(trainer, shape):
    seen = []
    for _ in range(3):
        out = trainer.pushpull({"w": np.full(shape, trainer.rank + 1, "f4")})["w"]
        seen.append((float(out.min()), float(out.max())))
    return seen


@pytest.mark.parametrize("n", [2, 3])
def test_m11_sum_of_all_workers(train, client, n):
    """Worker r has gradient r + 1, weight 1, lr 1: 1 - (n + 1) n / 2."""
    with daskps.create({"w": np.ones(3)}, optimizer=optim.SGD(1.0)) as store:
        result = train(
            store, row_is_gradient, np.arange(1.0, n + 1), trainers=n, reduce="sum"
        )
    np.testing.assert_array_equal(result.weights["w"], 1 - (n + 1) * n / 2)


@pytest.mark.parametrize("key", [3, None, b"w", ("a", "b")], ids=repr)
def test_m12_bad_key_type(client, key):
    with pytest.raises(TypeError, match="name"):
        daskps.create({key: np.zeros(3)})
    with (
        daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as store,
        pytest.raises(TypeError, match="name"),
    ):
        store.push({key: np.zeros(3)})


def test_m12_empty_key(client):
    with pytest.raises((ValueError, TypeError), match="name"):
        daskps.create({"": np.zeros(3)})


def test_m13_a_hundred_keys_at_once(client):
    params = {f"key {i}": np.full((i % 7, 3), i, "f4") for i in range(100)}
    with daskps.create(params, optimizer=optim.SGD(1.0)) as store:
        assert store.names == list(params)
        pulled = store.pull()
        for name, value in params.items():
            np.testing.assert_array_equal(pulled[name], value)
        store.push(params)
        for value in store.pull().values():
            np.testing.assert_array_equal(value, 0)


# -- SystemML ----------------------------------------------------------------

D_X = np.arange(2_000_000).reshape(2000, 1000)
D_Y = np.arange(2000)


def d_rows(scheme, **kwargs):
    """Return the row numbers of each part, after a look at rows and labels."""
    parts = daskps.partition(D_X, D_Y, 2, scheme=scheme, **kwargs)
    for X, y in parts:
        np.testing.assert_array_equal(X, D_X[y])
    return [y for _, y in parts]


def test_d1_contiguous():
    first, second = d_rows("contiguous")
    np.testing.assert_array_equal(first, np.arange(1000))
    np.testing.assert_array_equal(second, np.arange(1000, 2000))


def test_d2_round_robin():
    even, odd = d_rows("round_robin")
    np.testing.assert_array_equal(even, np.arange(0, 2000, 2))
    np.testing.assert_array_equal(odd, np.arange(1, 2000, 2))


def test_d3_random_is_a_recorded_permutation():
    first, second = d_rows("random", seed=5)
    assert first[:5].tolist() == [737, 1133, 356, 1531, 1626]
    assert len(first) == len(second) == 1000
    assert sorted([*first, *second]) == list(range(2000))


def test_d4_reshuffle_gives_all_rows_to_everyone():
    first, second = d_rows("reshuffle", seed=5)
    assert sorted(first) == sorted(second) == list(range(2000))
    assert (first != second).any()
    for part, again in zip([first, second], d_rows("reshuffle", seed=5), strict=True):
        np.testing.assert_array_equal(part, again)


def place_of_row(params, X, y):
    """Mark each row of the part with one more than its place in it."""
    grads = np.zeros(2000)
    grads[X.astype(int)] = 1 + np.arange(len(X))
    return {"w": grads}


def digits_of_ranks(stacked, weights):
    """Keep what each of two ranks says of a row: one number, in base 10,000."""
    return stacked[0] + 10_000 * stacked[1]


SCHEMES = "contiguous", "round_robin", "random", "reshuffle"


def d6_cases():
    """Give each two of execution and way, scheme, and kind of data."""
    places = [*itertools.product(["resident"], CARRIERS), ("graph", "process")]
    for i, place in enumerate(places):
        for j, scheme in enumerate(SCHEMES):
            yield *place, scheme, ("NumPy", "dask array")[(i + j) % 2]


@pytest.mark.parametrize(
    ("train", "way", "scheme", "data"), list(d6_cases()), indirect=["train", "way"]
)
def test_d6_distributed_partitions_are_the_local_ones(train, way, data, scheme):
    """The rows each of two trainers sees, and their order, are those of `partition`."""
    expected = np.zeros(2000)
    for rank, part in enumerate(d_rows(scheme, seed=5)):
        expected[part] += 10_000.0**rank * (1 + np.arange(len(part)))
    X = np.arange(2000.0)
    with daskps.create({"w": np.zeros(2000)}, optimizer=optim.SGD(1.0)) as store:
        result = train(
            store,
            place_of_row,
            X if data == "NumPy" else da.from_array(X, chunks=250),
            trainers=2,
            scheme=scheme,
            seed=5,
            reduce=digits_of_ranks,
            batch_size=2000,
            shuffle=False,
        )
    assert result.version == 1
    np.testing.assert_array_equal(-result.weights["w"], expected)


@mostly_inside(
    "options,expected",
    [
        ({"reduce": "sum"}, -0.6),
        ({"reduce": "mean"}, -0.2),
        ({"average": "models"}, -0.2),
    ],
    train=True,
)
def test_d7_d8_gradients_one_two_three(train, way, options, expected):
    """From 0 with lr 0.1."""
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(0.1)) as store:
        result = train(
            store, row_is_gradient, np.array([1.0, 2.0, 3.0]), trainers=3, **options
        )
    np.testing.assert_allclose(result.weights["w"], expected, rtol=1e-15)
    assert result.version == 1


@mostly_inside(
    "options,expected",
    [
        ({"reduce": "sum"}, 0.458),
        ({"average": "models"}, 0.729),
        ({"reduce": "mean"}, 0.729),
    ],
    train=True,
)
def test_d11_two_identical_workers(train, way, options, expected):
    """w 1, gradient w, lr 0.1, three batches between two synchronisations."""
    with daskps.create({"w": np.ones(3)}, optimizer=optim.SGD(0.1)) as store:
        result = train(
            store,
            weight_is_gradient,
            np.zeros(6),
            trainers=2,
            batch_size=1,
            sync_every=3,
            **options,
        )
    np.testing.assert_allclose(result.weights["w"], expected, rtol=1e-12)
    assert result.version == 1


def test_d14_arguments(client):
    create: Any = daskps.create
    train: Any = daskps.train
    with pytest.raises(TypeError, match="params"):
        create()
    with pytest.raises(TypeError, match=r"mapping|dict"):
        create(np.zeros(3))
    with daskps.create({"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as store:
        with pytest.raises(TypeError, match="gradient"):
            train(store)
        with pytest.raises(TypeError, match="ParameterStore"):
            train({"w": np.zeros(3)}, row_is_gradient, np.zeros(3))
        for option, choices in {
            "sync": "bsp.*ssp.*asp",
            "scheme": "contiguous.*round_robin.*random.*reshuffle",
            "reduce": "mean.*sum",
            "average": "gradients.*models",
            "execution": "auto.*resident.*graph",
            "sync_every": "batch.*epoch",
            "on_trainer_lost": "restart.*raise",
        }.items():
            with pytest.raises(ValueError, match=choices):
                train(store, row_is_gradient, np.zeros(3), **{option: "foo"})
        with pytest.raises(TypeError, match="frequency"):
            train(store, row_is_gradient, np.zeros(3), frequency="batch")
        assert store.version == 0


def test_d16_ten_trainers_on_two_workers(train, way):
    """More trainers than there are threads."""
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0)) as store:
        result = train(
            store, row_is_gradient, np.arange(30.0), trainers=10, batch_size=1, epochs=2
        )
    np.testing.assert_allclose(result.weights["w"], -2 * 3 * 14.5, rtol=1e-12)
    assert result.version == 6


#: What runs on a cluster as well. The others cut otherwise, or take another order.
D18_ON_A_CLUSTER = ("batch", "reshuffle")


def d18_cases():
    for average in ("gradients", "models"):
        for sync in ("bsp", "ssp", "asp") if average == "gradients" else ("bsp",):
            for every in ("batch", "epoch", 3):
                for scheme in SCHEMES:
                    options = {
                        "sync": sync,
                        "sync_every": every,
                        "scheme": scheme,
                        "average": average,
                    }
                    yield "inside", options
                    if (every, scheme) == D18_ON_A_CLUSTER:
                        yield "process", options


@pytest.mark.parametrize(
    ("way", "options"), list(d18_cases()), ids=str, indirect=["way"]
)
def test_d18_full_runs(way, options):
    """The loss falls below a hundredth; BSP gives the same bits in both executions."""
    rng = np.random.default_rng(18)
    X = rng.normal(size=(36, 3))
    y = X @ np.array([1.0, -2.0, 0.5]) + 3.0
    start = {"w": np.zeros(3), "b": np.zeros(())}
    before, _ = regression(start, X, y)
    found = []
    bsp = options["sync"] == "bsp"
    # Outside rounds the trainers' sums of an epoch's gradients may all start from
    # one stale model: their steps add up, so each must be small.
    lr, epochs = (0.1, 8) if bsp else (0.02, 40)
    for execution in ("resident", "graph") if bsp else ("resident",):
        with daskps.create(start, optimizer=optim.SGD(lr)) as store:
            result = daskps.train(
                store,
                regression,
                X,
                y,
                trainers=2,
                batch_size=6,
                epochs=epochs,
                seed=4,
                execution=execution,
                **options,
            )
        after, _ = regression(result.weights, X, y)
        assert after < before / 100
        assert [entry.epoch for entry in result.history] == list(range(epochs))
        losses: list[Any] = [entry.loss for entry in result.history]
        assert losses[-1] < losses[0] / 10
        found.append(b"".join(result.weights[n].tobytes() for n in start))
    assert found[0] == found[-1]


def raise_at_minus_one(params, X, y):
    if X.min() < 0:
        raise ZeroDivisionError("in the middle")
    return {"w": np.ones(8)}


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp"])
def test_d19_error_in_the_middle_reaches_the_caller(train, way, sync):
    """With its rank; nothing hangs, the store keeps its last complete version."""
    X = np.zeros(120)
    X[60] = -1  # the 21st batch of rank 1
    with daskps.create({"w": np.zeros(8)}, optimizer=optim.SGD(1.0)) as store:
        with pytest.raises(ZeroDivisionError, match="in the middle") as caught:
            train(
                store,
                raise_at_minus_one,
                X,
                trainers=3,
                batch_size=1,
                shuffle=False,
                sync=sync,
            )
        assert any("trainer 1 of 3" in note for note in caught.value.__notes__)
        assert "raise_at_minus_one" in str(caught.traceback[-1])
        versions = store.versions
        if sync == "bsp":
            assert versions == (20, 20)
        weights = store["w"].pull()
        np.testing.assert_array_equal(weights[:4], -float(versions[0]))
        np.testing.assert_array_equal(weights[4:], -float(versions[1]))
        result = train(store, raise_at_minus_one, np.zeros(4), trainers=2)
        assert result.version > min(versions)
        assert way.submit(sum, [1, 2]).result(timeout=10) == 3


# -- Multiverso --------------------------------------------------------------


def add_and_meet(trainer, part):
    store, steps = part
    delta, seen = np.arange(1, len(store["w"]) + 1, dtype="f4"), []
    for _ in range(steps):
        store.add({"w": delta})
        store.add({"w": delta})
        trainer.barrier()
        seen.append(store.pull()["w"])
        # Nobody adds before all have read.
        trainer.barrier()
    return seen


def test_v1_add_twice_and_barrier(way):
    """After iteration i: (j + 1) (i + 1) 2 workers."""
    n, workers, steps = 10_000, 3, 3
    with daskps.create({"w": np.zeros(n, "f4")}) as store:
        seen = daskps.run(store, add_and_meet, [(store, steps)] * workers, sync="asp")
    base = np.arange(1, n + 1, dtype="f4")
    for of in seen:
        for i, found in enumerate(of):
            np.testing.assert_array_equal(found, base * (i + 1) * 2 * workers)


@mostly_inside()
def test_v3_rows_zero_one_five_ten(way):
    """Of 11 rows only these, in order; each worker has added its number to all of them."""
    with daskps.create({"m": daskps.TableSpec(11, 10)}, shards=3) as store:
        rows = np.arange(110.0, dtype="f4").reshape(11, 10)
        store["m"].assign(np.arange(11), rows)
        for worker in (1, 2):
            store["m"].add(range(11), np.full((11, 10), worker, "f4"))
        found = store["m"].pull([0, 1, 5, 10])
        np.testing.assert_array_equal(found, rows[[0, 1, 5, 10]] + 3, strict=True)


@mostly_inside("ids", [([4, 4],), ([9, 2, 9, 9, 0],), ([],)])
def test_rows_named_more_than_once(way, ids):
    """They left all but one copy zero, or refused them; here as NumPy (7.1, 9)."""
    ids = np.array(ids, "i8")
    deltas = np.arange(1.0, 3 * len(ids) + 1).reshape(-1, 3)
    rows = np.arange(30.0).reshape(10, 3)
    table = daskps.TableSpec(10, 3, "f8", init=rows)
    with daskps.create({"m": table}, optimizer=optim.SGD(0.5), shards=3) as store:
        np.testing.assert_array_equal(store["m"].pull(ids), rows[ids])
        store["m"].add(ids, deltas)
        np.add.at(rows, ids, deltas)
        np.testing.assert_array_equal(store["m"].pull(range(10)), rows)
        store["m"].push(ids, deltas)
        np.add.at(rows, ids, -0.5 * deltas)
        np.testing.assert_array_equal(store["m"].pull(range(10)), rows)
        found = np.full((len(ids), 3), np.nan)
        assert store["m"].pull(ids, out=found) is found
        np.testing.assert_array_equal(found, rows[ids])


def push_rank_to_rows(trainer, shared):
    """Push -(rank + 1) to rows that all have and to one's own; see what became of them."""
    ids, seen = np.array([*shared, 20 + trainer.rank]), []
    for _ in range(3):
        grad = np.full((len(ids), 2), -(trainer.rank + 1.0))
        trainer.push({"m": daskps.RowGrad(ids, grad)})
        seen.append(trainer.pull((), rows={"m": ids})["m"][:, 0].tolist())
    return seen


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_m7_v8_rows_after_i_pushes_of_three_workers(way):
    """Rows that all three name go 13, 25, 37, bit-identical for all; others by 2 (r + 1)."""
    table = daskps.TableSpec(23, 2, "float64", init=1.0)
    rule, shared = optim.SGD(2.0), [17, 0, 9]
    with daskps.create({"m": table}, optimizer=rule, shards=3) as store:
        found = daskps.run(store, push_rank_to_rows, [shared] * 3, reduce="sum")
        for rank, seen in enumerate(found):
            own = [1 + 2 * (rank + 1) * (i + 1) for i in range(3)]
            expected = [13, 25, 37]
            assert seen == [[a, a, a, b] for a, b in zip(expected, own, strict=True)]
        assert (store["m"].pull([1, 8, 16]) == 1).all()


def two_at_once(trainer, part):
    first = trainer.pull_async((), rows={"m": [3, 1]})
    trainer.push_async({"m": daskps.RowGrad([1], np.ones((1, 2)))})
    second = trainer.pull_async((), rows={"m": [1, 2]})
    return first.result()["m"][:, 0].tolist(), second.result()["m"][:, 0].tolist()


@pytest.mark.parametrize("way", ["inside"], indirect=True)
def test_second_read_of_rows_leaves_the_first_alone(way):
    """Both under way at once, each with arrays of its own (7.1, 10)."""
    table = daskps.TableSpec(5, 2, "float64", init=[[i, i] for i in range(5)])
    with daskps.create({"m": table}, optimizer=optim.SGD(2.0), shards=2) as store:
        [found] = daskps.run(store, two_at_once, [0], sync="asp")
        assert found == ([3, 1], [-1, 2])


def replicate(trainer, part):
    """Two local steps on a replica, then its change goes to the store."""
    store, steps = part
    replica = store["w"].pull()
    delta = np.arange(1, replica.size + 1, dtype="f4").reshape(replica.shape)
    seen = []
    for _ in range(steps):
        last = replica.copy()
        replica += delta
        replica += delta
        store["w"].add(replica - last)
        trainer.barrier()
        store["w"].pull(out=replica)
        seen.append(replica.copy())
        trainer.barrier()
    return seen


def test_v6_delta_sync_of_a_replica(way):
    workers, steps = 2, 2
    with daskps.create({"w": np.zeros((200, 200), "f4")}) as store:
        seen = daskps.run(store, replicate, [(store, steps)] * workers, sync="asp")
    base = np.arange(1, 40_001, dtype="f4").reshape(200, 200)
    for of in seen:
        for i, found in enumerate(of):
            np.testing.assert_array_equal(found, base * (i + 1) * 2 * workers)


@mostly_inside("dtype", ["i4", "i8", "u2"])
def test_v7_two_adds_on_integers(way, dtype):
    delta = np.arange(1, 11, dtype=dtype)
    with daskps.create({"w": np.zeros(10, dtype)}) as store:
        assert store.add({"w": delta}) == 1
        np.testing.assert_array_equal(store["w"].pull(), delta)
        assert store.add({"w": delta}) == 2
        found = store["w"].pull()
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, 2 * delta)


def noisy_pulls(trainer, steps):
    rng = np.random.default_rng(trainer.rank)
    seen = []
    for _ in range(steps):
        seen.append(trainer.pull()["w"].tobytes())
        trainer.push({"w": rng.normal(size=101)}, weight=rng.uniform(0.5, 2))
    return seen


def test_v8_pulls_of_all_trainers_are_identical(way):
    """The i-th pull of every trainer has the same bits, and each is another one."""
    with daskps.create({"w": np.zeros(101)}, optimizer=optim.Adam(0.1)) as store:
        first, *others = daskps.run(store, noisy_pulls, [30] * 5)
    assert len(set(first)) == 30
    for other in others:
        assert other == first


@mostly_inside()
def test_v9_keys_and_numbers(way):
    """0, then 3 added, then -4, and a key that nobody has named: 0, 3, -1, 0."""
    with daskps.create({"kv": daskps.TableSpec(100, 1, "int64")}) as store:
        kv, seen = store["kv"], []
        for delta in (0, 3, -4):
            kv.add([17], [[delta]])
            seen.append(kv.pull(17).item())
        assert [*seen, kv.pull(99).item()] == [0, 3, -1, 0]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_v10_sum_of_ones(client, n):
    with daskps.create({"w": np.zeros(7)}) as store:
        found = store.aggregate([{"w": np.ones(7)}] * n, reduce="sum")
    np.testing.assert_array_equal(found["w"], np.full(7, n))


@mostly_inside("size", [1, 3], train=True)
def test_v12_fewer_elements_than_shards(train, way, size):
    with daskps.create(
        {"w": np.zeros(size)}, optimizer=optim.SGD(1.0), shards=4
    ) as store:
        store.push({"w": np.ones(size)})
        store.add({"w": np.full(size, 3.0)})
        np.testing.assert_array_equal(store.pull()["w"], np.full(size, 2.0))
        result = train(
            store, row_is_gradient, np.array([1.0, 3.0]), trainers=2, batch_size=1
        )
        np.testing.assert_array_equal(result.weights["w"], np.zeros(size))

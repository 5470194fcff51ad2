"""SINGA's worker groups by their own words: scenarios S, with their numbers."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.compat import singa
from daskps.compat.singa.net import cut
from tests.inprocess import cluster


@pytest.fixture
def inside():
    with cluster() as made:
        yield made


class Data(singa.Layer):
    """Rows of a table, one batch after the other."""

    def forward(self, step):
        rng = np.random.default_rng(step)
        return rng.normal(size=self.shape)


class Label(singa.Layer):
    def forward(self, rows):
        return rows[:, :1] - 2 * rows[:, 1:2] + 0.25


class Feature(singa.Layer):
    def forward(self, rows):
        return rows[:, :2]


class Linear(singa.Layer):
    def forward(self, params, x):
        return x @ params["W"] + params["b"], x

    def backward(self, params, saved, gradient):
        own = {"W": saved.T @ gradient, "b": gradient.sum(axis=0)}
        return own, [gradient @ params["W"].T]


class Square(singa.Layer):
    """Half the mean squared error; the weight of its first input is shared."""

    def forward(self, params, found, wanted):
        return np.mean((found - wanted) ** 2) / 2, found - wanted

    def backward(self, params, saved, gradient):
        return {}, [gradient * saved / len(saved), None]


def net(batch=10, dtype=float):
    params = {"W": np.zeros((2, 1), dtype), "b": np.zeros(1, dtype)}
    return [
        Data("data", "data", shape=(batch, 3)),
        Feature("feature", "parser", ("data",), (batch, 2)),
        Label("label", "parser", ("data",), (batch, 1)),
        Linear("fc", "linear", ("feature",), (batch, 1), params),
        Square("loss", "loss", ("fc", "label"), (batch,)),
    ]


def train(steps, group):
    group.put_own()
    losses = [group.performance(group.train_one_batch(step)) for step in range(steps)]
    return losses, {n: a.tolist() for n, a in group.collect_all().items()}


def in_numpy(steps, batch=10, lr=0.1, start=0):
    """One process: plain gradient descent on whole batches."""
    w, b, losses = np.zeros((2, 1)), np.zeros(1), []
    for step in range(start, start + steps):
        rows = np.random.default_rng(step).normal(size=(batch, 3))
        x, y = rows[:, :2], rows[:, :1] - 2 * rows[:, 1:2] + 0.25
        error = x @ w + b - y
        losses.append(np.mean(error**2) / 2)
        w, b = w - lr * x.T @ error / batch, b - lr * error.mean(axis=0)
    return losses, w, b


# -- nets and their parts --------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "n", "sizes"),
    [(50, 3, [16, 16, 18]), (50, 1, [50]), (3, 3, [1, 1, 1]), (11, 4, [2, 2, 2, 5])],
)
def test_a_batch_is_cut_with_the_rest_to_the_last(batch, n, sizes):
    parts = cut(batch, n)
    assert [part.stop - part.start for part in parts] == sizes
    assert [i for part in parts for i in range(batch)[part]] == list(range(batch))


def test_partition_clones_all_but_what_makes_the_batch_and_shares_parameters():
    layers = net()
    found = singa.partition(layers, 3)
    assert [layer.name for layer in found] == [
        *("data", "feature", "feature-slice", "label", "label-slice"),
        *("fc@0", "fc@1", "fc@2", "loss@0", "loss@1", "loss@2"),
    ]
    by_name = {layer.name: layer for layer in found}
    assert by_name["data"] is layers[0]
    assert [by_name[f"fc@{k}"].shape for k in range(3)] == [(3, 1), (3, 1), (4, 1)]
    assert by_name["fc@2"].params["W"] is layers[3].params["W"]
    assert by_name["loss@1"].sources == ("fc@1", "label-slice")


def test_pictures_before_and_after():
    before = json.loads(singa.to_json(net()))
    assert [node["id"] for node in before["nodes"]] == [layer.name for layer in net()]
    assert {"source": "fc", "target": "loss"} in before["edges"]
    after = json.loads(singa.to_json(singa.partition(net(), 3)))
    assert [node.get("partition") for node in after["nodes"]].count(None) == 5
    known = {node["id"] for node in after["nodes"]}
    for edge in after["edges"]:
        assert {edge["source"], edge["target"]} <= known
    fc = next(node for node in after["nodes"] if node["id"] == "fc@2")
    assert fc == {
        "id": "fc@2",
        "type": "linear",
        "shape": [4, 1],
        "params": ["W", "b"],
        "partition": 2,
    }


# -- one group -------------------------------------------------------------------


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("n", [1, 3])
def test_a_group_does_what_one_process_does(n):
    """A batch of 10 over 3 workers, of 3, 3 and 4 rows: the mean goes by rows."""
    group = singa.WorkerGroup(net(), n, batch=10)
    found = singa.launch(partial(train, 5), group, updater=optim.SGD(0.1))
    losses, w, b = in_numpy(5)
    for seen, params in found:
        np.testing.assert_allclose(seen, losses, rtol=1e-12)
        np.testing.assert_allclose(params["W"], w, rtol=1e-12)
        np.testing.assert_allclose(params["b"], b, rtol=1e-12)
    assert len({str(params) for _, params in found}) == 1


def one(n, batch=None, value=0.0):
    fc = singa.Layer("fc", "linear", params={"w": np.full(1, value)})
    return singa.WorkerGroup([fc], n, batch=batch or n)


def push_rank(group):
    group.put_own()
    group.update("w", [group.worker_id + 1.0])
    before = group.version("w")
    return group.collect("w").item(), before, group.version("w")


@pytest.mark.usefixtures("inside")
def test_s5_the_mean_of_three_is_one_update():
    """Gradients 1, 2, 3, lr 0.1, w 0."""
    found = singa.launch(push_rank, one(3), updater=optim.SGD(0.1))
    assert found == [(pytest.approx(-0.2), 0, 1)] * 3


@pytest.mark.usefixtures("inside")
def test_s4_a_get_before_the_put_waits_for_it():
    def main(group):
        if group.owned:
            group.put("w", np.full(1, 7.0))
        group.get("w", 0)
        return group.collect("w").tolist(), group.collect("w", 0).tolist()

    found = singa.launch(main, one(3), updater=optim.SGD(0.1))
    assert found == [([7.0], [7.0])] * 3


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("collected", [False, True])
def test_s6_a_second_put_is_refused_and_changes_nothing(collected):
    def main(group):
        group.put_own()
        if collected:
            group.collect("w")
        said = ""
        if group.owned:
            try:
                group.put("w", [9.0])
            except ValueError as error:
                said = str(error)
        return group.collect("w").item(), said

    found = singa.launch(main, one(2, value=0.5), updater=optim.SGD(0.1))
    assert [w for w, _ in found] == [0.5, 0.5]
    assert "was put already" in found[0][1]


@pytest.mark.usefixtures("inside")
def test_parameters_have_their_owners_and_versions_of_their_own():
    layers = [
        singa.Layer("a", "linear", params={n: np.zeros(1) for n in "pqrs"}),
        singa.Layer("b", "linear", params={"q": np.zeros(1)}),  # shared
    ]

    def main(group):
        group.put_own()
        group.update("p", [1.0])
        group.collect("p", 1)
        group.update("p", [1.0])
        group.update("q", [2.0])
        group.get("p", 2)
        return (
            group.owned,
            group.collect("p", 2).tolist(),
            group.collect("q", 1).tolist(),
            [group.version(n) for n in "pqrs"],
        )

    group = singa.WorkerGroup(layers, 3, batch=3)
    found = singa.launch(main, group, updater=optim.SGD(1.0))
    assert [owned for owned, *_ in found] == [["p", "s"], ["q"], ["r"]]
    for _, p, q, versions in found:
        assert (p, q, versions) == ([-2.0], [-2.0], [2, 1, 0, 0])


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shared_parameters_get_the_sum_of_their_layers(dtype):
    class Twice(singa.Layer):
        def forward(self, params, x):
            return x * params["w"], x

        def backward(self, params, saved, gradient):
            own = (gradient * saved).sum(keepdims=True)
            return {"w": own}, [gradient * params["w"]]

    class Mean(singa.Layer):
        def forward(self, params, x):
            return x.mean(), len(x)

        def backward(self, params, saved, gradient):
            return {}, [np.full(saved, gradient / saved)]

    class Ones(singa.Layer):
        def forward(self, step):
            return np.ones(5)

    w = {"w": np.full(1, 3.0, dtype)}
    layers = [
        Ones("x", "data", shape=(5,)),
        Twice("one", "scale", ("x",), (5,), w),
        Twice("two", "scale", ("one",), (5,), w),
        Mean("loss", "loss", ("two",), (5,)),
    ]

    def main(group):
        group.put_own()
        loss = group.train_one_batch(0)
        found = group.collect("w")
        return loss, found.tolist(), str(found.dtype)

    group = singa.WorkerGroup(layers, 2, batch=5)
    # w * w, whose gradient is 2 w
    found = singa.launch(main, group, updater=optim.SGD(0.5))
    assert found == [(9.0, [0.0], dtype)] * 2


@pytest.mark.usefixtures("inside")
def test_a_second_update_waits_for_the_first_to_be_collected():
    def main(group):
        group.put_own()
        for _ in range(2):
            group.update("w", [1.0])
            group.collect("w", 0)

    with pytest.raises(ValueError, match="has an update that was not collected"):
        singa.launch(main, one(2), updater=optim.SGD(1.0))


# -- several groups ----------------------------------------------------------------


def constant(n, steps, group):
    """Update by 1 each time; say what the group has after each."""
    group.put_own()
    seen = []
    for _ in range(steps):
        group.update("w", [1.0])
        seen.append(group.collect("w").item())
    return seen


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(("freq", "warmup"), [(1, 0), (2, 3)])
def test_groups_add_to_a_store_of_all(freq, warmup):
    """Downpour: at the end each group has its own steps, and some of the other's."""
    layer = singa.Layer("fc", "linear", params={"w": np.zeros(1)})
    groups = [
        singa.WorkerGroup([layer], n, batch=n, sync_freq=freq, warmup_steps=warmup)
        for n in (2, 1)
    ]
    steps = 6
    found = singa.launch(partial(constant, 1, steps), groups, updater=optim.SGD(0.1))
    assert [len(group) for group in found] == [2, 1]
    assert found[0][0] == found[0][1]  # synchronous inside
    first, second = found[0][0], found[1][0]
    for k in range(warmup):
        assert first[k] == pytest.approx(-0.1 * (k + 1))
    # The second group begins where the first one's warm-up has ended.
    assert second[0] <= -0.1 * (warmup + 1) + 1e-12
    for seen, least in ((first, 0), (second, warmup)):
        drops = -np.diff([-0.1 * least, *seen])
        assert (drops >= 0.1 - 1e-12).all()
    both = -0.1 * (2 * steps)
    assert min(first[-1], second[-1]) >= both - 1e-12


@pytest.mark.usefixtures("inside")
def test_a_warm_up_that_is_not_reached_ends_with_its_group():
    """Two updates of three: the other group begins where these have ended."""
    layer = singa.Layer("fc", "linear", params={"w": np.zeros(1)})
    groups = [singa.WorkerGroup([layer], 1, batch=1, warmup_steps=3) for _ in range(2)]
    launch = partial(singa.launch, updater=optim.SGD(0.5), timeout=60)
    [[first], [second]] = launch(partial(constant, 1, 2), groups)
    assert (first, second) == ([-0.5, -1.0], [-1.5, -2.0])

    def put_nothing(group):
        return None

    with pytest.raises(ValueError, match=r"worker 0 owns \['w'\] and has not put them"):
        launch(put_nothing, groups)
    assert not daskps.list_stores()


@pytest.mark.usefixtures("inside")
def test_where_one_group_fails_all_end():
    layer = singa.Layer("fc", "linear", params={"w": np.zeros(1)})
    groups = [
        singa.WorkerGroup([layer], n, batch=n, warmup_steps=10_000) for n in (1, 2)
    ]

    def main(group):
        if group.n_workers == 1:
            raise OSError("a fault")
        group.put_own()
        return group.collect("w")  # waits for a warm-up that never ends

    with pytest.raises(OSError, match="a fault"):
        singa.launch(main, groups, updater=optim.SGD(0.1))
    assert not daskps.list_stores()


# -- what is refused ----------------------------------------------------------------


def refused(do, group=None, **how):
    def main(group):
        group.put_own()
        try:
            do(group)
        except ValueError as error:
            return str(error)

    how.setdefault("updater", optim.SGD(0.1))
    return singa.launch(main, group or one(2), **how)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("do", "match"),
    [
        (lambda g: g.collect("w", 1), "sent 0; it would wait for ever"),
        (lambda g: g.get("w", 5), "comes after 5 updates"),
        (lambda g: g.collect("v"), "no parameter 'v'"),
        (lambda g: g.update("w", np.ones(2)), r"has shape \(1,\), found \(2,\)"),
        (lambda g: g.collect("w", -1), "min_version must be at least 0"),
    ],
)
def test_calls_that_cannot_be(do, match):
    for said in refused(do):
        assert re.search(match, said)


@pytest.mark.usefixtures("inside")
def test_puts_that_are_missing_or_another_s():
    def other(group):
        if group.worker_id == 1:
            group.put("w", [1.0])

    with pytest.raises(ValueError, match="is put by worker 0, which owns it"):
        singa.launch(other, one(2), updater=optim.SGD(0.1))
    with pytest.raises(ValueError, match=r"worker 0 owns \['w'\] and has not put"):
        singa.launch(lambda g: g.collect("w"), one(2), updater=optim.SGD(0.1))


def launch_unbounded(main: Any, groups: Any) -> Any:
    return singa.launch(main, groups, updater=None)


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "no_net": (lambda: singa.WorkerGroup([], 1, batch=1), TypeError, "list of layers"),
    "no_layer": (
        lambda: singa.WorkerGroup([3], 1, batch=1),
        TypeError,
        "has no 'name'",
    ),
    "twice": (lambda: singa.partition([*net(), net()[0]], 2), ValueError, "twice"),
    "source": (lambda: singa.partition(net()[1:], 2), ValueError, "not come before"),
    "rows": (lambda: singa.WorkerGroup(net(), 11, batch=10), ValueError, "11 workers"),
    "shape": (lambda: singa.WorkerGroup(net(), 2, batch=9), ValueError, "first number"),
    "n": (lambda: singa.WorkerGroup(net(), 0, batch=10), ValueError, "n_workers must"),
    "freq": (
        lambda: singa.WorkerGroup(net(), 1, batch=10, sync_freq=0),
        ValueError,
        "sync_freq must",
    ),
    "no_params": (lambda: singa.partition(net()[:3], 2), ValueError, "no layer"),
    "ints": (
        lambda: singa.partition(
            [singa.Layer("a", "b", params={"w": np.ones(1, int)})], 1
        ),
        TypeError,
        "it is of floats",
    ),
    "alone": (
        lambda: singa.launch(
            print, singa.WorkerGroup(net(), 1, batch=10, sync_freq=2), updater=None
        ),
        ValueError,
        "a group that is alone",
    ),
    "others": (
        lambda: singa.launch(
            print, [one(1), singa.WorkerGroup(net(), 1, batch=10)], updater=1
        ),
        ValueError,
        "other parameters",
    ),
    "main": (lambda: launch_unbounded(3, one(1)), TypeError, "main is a"),
    "groups": (
        lambda: launch_unbounded(print, [3]),
        TypeError,
        "groups is a",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_that_cannot_be(case):
    call, error, match = CASES[case]
    with pytest.raises(error, match=match):
        call()


def test_members_are_for_workers_alone():
    with pytest.raises(RuntimeError, match="this is no trainer"):
        one(1).put_own()

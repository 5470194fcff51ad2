"""MXNet's executor group by its own words: scenarios M of reference, with their numbers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

from daskps.compat import mxnet
from daskps.compat.mxnet import DataBatch
from daskps.compat.mxnet.binding import cut_rows
from daskps.errors import NotEnoughWorkersError
from tests.support import local_cluster, until

#: Also given what its types refuse.
Group: Any = mxnet.DataParallelExecutorGroup


class Weighted:
    """a + 2 b + 3 c, times a parameter; counts its training passes in `aux`."""

    def forward(self, params, aux, batch, is_train):
        if is_train and "passes" in aux:
            aux["passes"] += len(batch["a"])
        out = batch["a"] + 2 * batch["b"] + 3 * batch["c"]
        return [params["w"] * out], out

    def backward(self, params, saved, out_grads):
        [grad] = out_grads
        one = params["w"] * grad
        inputs = {"a": one, "b": 2 * one, "c": 3 * one}
        return {"w": np.array((saved * grad).sum())}, inputs


class Squares:
    """Loss (x w - y)^2 of each row, its mean over rows, and what all rows share."""

    output_axes = (0, -1)

    def forward(self, params, aux, batch, is_train):
        error = batch["x"] @ params["w"] - batch.get("y", 0.0)
        return [error**2, params["w"] * batch["scale"]], (batch["x"], error)

    def backward(self, params, saved, out_grads):
        x, error = saved
        return {"w": 2 * x.T @ error}, {"x": 2 * np.outer(error, params["w"])}


@pytest.fixture
def two(client):
    return sorted(client.nthreads())


def weighted(contexts, rows=4, **options):
    shapes = [(name, (rows, 3)) for name in "abc"]
    given = {"symbol": Weighted(), "data_shapes": shapes, "param_names": ["w"]}
    return Group(contexts=contexts, **given | options)


def ones(rows=4, value=1.0):
    return DataBatch([np.full((rows, 3), value)] * 3)


def test_m15_gradients_of_inputs(two):
    """Of a + 2 b + 3 c: 1, 2, 3; whole and by executor, from two workers."""
    group = weighted(two, rows=5, inputs_need_grad=True)
    assert repr(group).endswith("Group: 5 rows over 2 executors (3, 2)>")
    group.set_params({"w": np.array(1.0)})
    group.forward(ones(5))
    [merged] = group.get_outputs_merged()
    assert merged.tolist() == [[6.0] * 3] * 5
    assert [part.shape for part in group.get_outputs()[0]] == [(3, 3), (2, 3)]
    group.backward([np.ones((5, 3))])
    for i, grad in enumerate(group.get_input_grads_merged()):
        assert grad.tolist() == [[i + 1.0] * 3] * 5
    assert [g.shape for g in group.get_input_grads()[2]] == [(3, 3), (2, 3)]
    assert [g.item() for g in group.grad_arrays[0]] == [54, 36]
    assert group.get_batch_size() == 5
    assert group.get_output_shapes() == [("output0", (5, 3))]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [("add", 4), ("write", 2), ({"w": "add"}, 4), (["write"], 2)],
)
def test_m17_gradients_are_added_or_replaced(two, request_, expected):
    """Two passes of batch 2: 4 or 2."""
    group = weighted(two[:1], rows=2, grad_req=request_)
    group.set_params({"w": np.array(1.0)})
    batch = DataBatch([np.full((2, 3), 1 / 3), np.zeros((2, 3)), np.zeros((2, 3))])
    for _ in range(2):
        group.forward(batch)
        group.backward([np.ones((2, 3))])
    assert group.grad_arrays[0][0] == pytest.approx(expected)


def test_no_gradient_for_fixed_parameters(two):
    for options in ({"fixed_param_names": ["w"]}, {"grad_req": "null"}):
        group = weighted(two, **options)
        group.set_params({"w": np.array(1.0)})
        group.forward(ones())
        group.backward([np.ones((4, 3))])
        assert group.grad_arrays == [[None, None]]


def test_m18_missing_and_extra_names(two):
    group = weighted(two[:1])
    group.set_params({"w": np.array(1.0)})
    with pytest.raises(ValueError, match="'v' is no parameter"):
        group.set_params({"w": np.array(2.0), "v": np.array(2.0)})
    with pytest.raises(ValueError, match="parameter 'w' is not given"):
        group.set_params({})
    out = np.zeros((), "f4")
    group.get_params({"w": out})
    assert out == 1
    group.set_params({"w": np.array(2.0), "v": np.array(2.0)}, allow_extra=True)
    group.set_params({}, allow_missing=True)
    group.get_params({"w": out})
    assert out == 2


def test_params_are_the_mean_of_replicas(two):
    """Each counts its own rows: 3 and 2 in training, 2.5 each, cast to int32 as NumPy."""
    group = weighted(two, rows=5)
    group.set_params({"w": np.array(1.0)}, {"passes": np.array(0.0)})
    group.forward(ones(5))
    group.forward(ones(5), is_train=False)
    found = {"w": np.zeros(()), "passes": np.zeros(())}
    group.get_params({"w": found["w"]}, {"passes": found["passes"]})
    assert [found["w"].item(), found["passes"].item()] == [1, 2.5]
    with pytest.raises(ValueError, match=r"'w'\] and out\['passes'\] share memory"):
        group.get_params({"w": found["w"]}, {"passes": found["w"]})
    group.set_params({"w": np.array(1.0)}, {"passes": np.array(8.0)})
    whole = np.zeros((), "i4")
    group.forward(ones(5))
    group.get_params({}, {"passes": whole})
    assert whole == 10


def test_m20_two_buckets_write_one_weight(two):
    """The second sees what the first has changed, and adds to its gradient."""
    first = weighted(two, grad_req="add")
    second = weighted(two, rows=6, grad_req="add", shared_group=first)
    first.set_params({"w": np.array(2.0)})
    second.forward(ones(6))
    assert second.get_outputs_merged()[0].max() == 12
    first.forward(ones())
    first.backward([np.ones((4, 3))])
    second.backward([np.ones((6, 3))])
    assert sum(g.item() for g in first.grad_arrays[0]) == 6 * 3 * (4 + 6)
    second.set_params({"w": np.array(5.0)})
    first.forward(ones())
    assert first.get_outputs_merged()[0].max() == 30


def test_reshape_keeps_parameters(two):
    group = weighted(two)
    group.set_params({"w": np.array(3.0)})
    group.forward(ones())
    group.reshape([(name, (4, 3)) for name in "abc"])
    assert group.get_outputs_merged()[0].shape == (4, 3)  # nothing has changed
    group.reshape([(name, (7, 3)) for name in "abc"])
    with pytest.raises(RuntimeError, match="no forward since the group was bound"):
        group.get_outputs()
    with pytest.raises(ValueError, match=r"shape \(4, 3\), and \(7, 3\) is bound"):
        group.forward(ones())
    with pytest.raises(ValueError, match="leaves an executor without a row"):
        group.reshape([(name, (1, 3)) for name in "abc"])
    group.forward(ones(7))
    assert group.get_outputs_merged()[0].tolist() == [[18.0] * 3] * 7


def squares(contexts, **options):
    return Group(
        symbol=Squares(),
        contexts=contexts,
        data_shapes=[("x", (6, 2)), ("scale", (2,), "C")],
        label_shapes=[("y", (6,))],
        param_names=["w"],
        **options,
    )


class DataDesc(NamedTuple("DataDesc", [("name", str), ("shape", tuple[int, ...])])):
    """A description as MXNet makes it: a pair with two attributes."""

    dtype, layout = np.float32, "TN"


class Kinds:
    """What it gets: sums over the first axis, of the same dtype."""

    output_axes = (0, 0)

    def forward(self, params, aux, batch, is_train):
        return [batch["x"].sum(axis=0), batch["y"]], None


def test_descriptions_of_data_have_types_and_layouts(two):
    """Rows along axis 1 of "TN", half of the 4 for each; 3 times 1.5, and 2 of 2.7."""
    group = Group(
        symbol=Kinds(),
        contexts=two,
        data_shapes=[DataDesc("x", (3, 4))],
        label_shapes=[("y", (4,), "int32", "N")],
        param_names=[],
    )
    group.set_params({})
    assert group.get_output_shapes() == [("output0", (4,)), ("output1", (4,))]
    group.forward(DataBatch([np.full((3, 4), 1.5)], [np.full(4, 2.7)]))
    sums, labels = group.get_outputs_merged()
    assert (sums.tolist(), sums.dtype) == ([4.5] * 4, "f4")
    assert (labels.tolist(), labels.dtype) == ([2] * 4, "i4")
    group.reshape([("x", (3, 4), np.float32, "TN")], [("y", (4,), "i4", None)])
    assert len(group.get_outputs()) == 2  # nothing has changed
    group.reshape([("x", (3, 6), "f8", "TN")], [("y", (6,), None, "N")])
    group.forward(DataBatch([np.full((3, 6), 1)], [np.full(6, 2.5)]))
    assert [out.dtype for out in group.get_outputs_merged()] == ["f8", "f8"]


class Sums:
    """A metric: sum and number of what it was given."""

    def __init__(self):
        self.seen = []

    def update(self, labels, outputs):
        [y] = labels
        self.seen.append((y.tolist(), outputs[0].shape))


def test_inputs_that_are_not_split_and_labels(two, rng):
    """A layout without rows: everybody has all of it, and its output is that of one."""
    x, y, w = rng.normal(size=(6, 2)), rng.normal(size=6), np.array([1.0, -2.0])
    group = squares(two, workload=[2, 1], inputs_need_grad=True)
    group.set_params({"w": w})
    assert group.get_output_shapes() == [("output0", (6,)), ("output1", (2,))]
    group.forward(DataBatch([x, np.array([3.0, 4.0])], [y]))
    loss, same = group.get_outputs_merged()
    np.testing.assert_allclose(loss, (x @ w - y) ** 2, rtol=1e-12)
    assert same.tolist() == [3, -8]
    metric = Sums()
    group.update_metric(metric, [np.arange(6)])
    assert metric.seen == [([0, 1, 2, 3], (4,)), ([4, 5], (2,))]
    group.backward()
    total = sum(group.grad_arrays[0])
    np.testing.assert_allclose(total, 2 * x.T @ (x @ w - y), rtol=1e-12)
    with pytest.raises(ValueError, match="no gradient of input 'scale'"):
        group.get_input_grads()
    group.forward(DataBatch([x, np.ones(2)]), is_train=False)  # a prediction
    np.testing.assert_allclose(group.get_outputs_merged()[0], (x @ w) ** 2, rtol=1e-12)


def test_m19_every_tensor_once_for_each_look(two):
    """Of each executor, every second batch, and those alone whose names match."""
    group = weighted(two)
    group.set_params({"w": np.array(2.0)}, {"passes": np.array(0.0)})
    seen = mxnet.TensorMonitor(2, sort=True)
    chosen = mxnet.TensorMonitor(1, stat=np.max, pattern="w|out")
    group.install_monitor(seen)
    group.install_monitor(chosen)
    found, others = [], []
    for _ in range(3):
        seen.tic()
        chosen.tic()
        group.forward(ones())
        found.append(seen.toc())
        others.append(chosen.toc())
    assert [(s, n) for s, n, _ in found[0]] == [
        (0, name) for name in ("output0", "passes", "w") for _ in two
    ]
    assert found[1] == []
    # 12 in each of 2 x 3 places: its norm by the root of 6; 3 passes of 2 rows.
    assert [value for *_, value in found[2]] == pytest.approx([12, 12, 6, 6, 2, 2])
    assert [(s, n, float(v)) for s, n, v in others[1]] == [
        (1, "w", 2),
        (1, "output0", 12),
    ] * 2


@pytest.mark.parametrize(
    ("n", "workload", "expected"),
    [
        (7, [1, 1], [4, 3]),
        (5, [1, 1], [3, 2]),
        (10, [1, 1, 1], [4, 3, 3]),
        (20, [1, 3], [5, 15]),
        (23, [10, 10, 3], [10, 10, 3]),
        (100, [5, 1.5, 5], [44, 13, 43]),
        (16, [1] * 10, [2] * 6 + [1] * 4),
    ],
)
def test_rows_of_executors(n, workload, expected):
    """Left-over rows go to the largest remainders; 16 over 10 is refused by theirs."""
    assert [part.stop - part.start for part in cut_rows(n, workload)] == expected


@pytest.mark.parametrize(("n", "workload"), [(2, [1, 1, 1]), (1, [1, 1]), (3, [1, 0])])
def test_no_executor_without_a_row(n, workload):
    with pytest.raises(ValueError, match="without a row"):
        cut_rows(n, workload)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"contexts": []}, ValueError, "addresses of workers"),
        ({"contexts": ["tcp://nowhere:1"]}, ValueError, "addresses of workers"),
        ({"workload": [1]}, ValueError, "workload has 1 numbers for 2 contexts"),
        ({"grad_req": "sum"}, ValueError, "one of write, add, null, found 'sum'"),
        ({"grad_req": {"v": "add"}}, ValueError, "there is no parameter 'v'"),
        ({"grad_req": ["add"] * 2}, TypeError, "one for each of 1 parameters"),
        ({"fixed_param_names": ["v"]}, ValueError, "there is no parameter 'v'"),
        ({"data_shapes": [("a", (4, 3)), ("b", (5, 3))]}, ValueError, "one batch size"),
        ({"data_shapes": []}, ValueError, "one batch size, found none"),
        ({"data_shapes": ["a"]}, TypeError, r"are \(name, shape\)"),
        (
            {"data_shapes": [("a", (4, 3), "float32")]},
            TypeError,
            "the layout in data_shapes of 'a' is capitals such as 'NC', found 'float32'",
        ),
        ({"data_shapes": [("a", (0, 3))]}, ValueError, "must be at least 1"),
        ({"data_shapes": [("a", (4,), "CN")]}, ValueError, "has no axis 1"),
        ({"shared_group": 3}, TypeError, "shared_group is another group"),
        ({"for_training": "yes"}, TypeError, "for_training is True or False"),
        ({"inputs_need_grad": 1}, TypeError, "inputs_need_grad is True or False"),
        ({"unknown": 1}, TypeError, "unexpected keyword"),
    ],
)
def test_wrong_groups(two, options, error, said):
    with pytest.raises(error, match=said):
        weighted(**{"contexts": two} | options)


class Broken(Weighted):
    def backward(self, params, saved, out_grads):
        return {"w": np.zeros(2)}, {}


def test_calls_out_of_order(two):
    group = weighted(two)
    with pytest.raises(RuntimeError, match="'w' has no value; call set_params"):
        group.forward(ones())
    group.set_params({"w": np.array(1.0)})
    for call in (group.get_outputs, group.backward):
        with pytest.raises(RuntimeError, match="no forward since the group was bound"):
            call()
    group.forward(ones())
    with pytest.raises(RuntimeError, match="inputs_need_grad=False"):
        group.get_input_grads()
    with pytest.raises(ValueError, match="out_grads have shapes"):
        group.backward([np.ones((3, 3))])
    with pytest.raises(ValueError, match=r"'w' has shape \(\), found \(2,\)"):
        group.set_params({"w": np.zeros(2)})
    with pytest.raises(ValueError, match=r"'w' has shape \(\), and its array \(2,\)"):
        group.get_params({"w": np.zeros(2)})
    with pytest.raises(ValueError, match="has 1 data, and 3 are bound"):
        group.forward(DataBatch([np.ones((4, 3))]))
    asking = weighted(two, inputs_need_grad=True)
    asking.set_params({"w": np.array(1.0)})
    asking.forward(ones())
    with pytest.raises(RuntimeError, match="no gradients before a backward"):
        asking.get_input_grads()
    predicting = weighted(two, for_training=False)
    with pytest.raises(RuntimeError, match="bound with for_training=False"):
        predicting.backward()
    broken = weighted(two, symbol=Broken())
    broken.set_params({"w": np.array(1.0)})
    broken.forward(ones())
    broken.backward([np.ones((4, 3))])
    with pytest.raises(ValueError, match=r"gives \(2,\) for 'w', which has shape \(\)"):
        _ = broken.grad_arrays


def test_a_network_cannot_write_to_parameters(two):
    class Writes(Weighted):
        def forward(self, params, aux, batch, is_train):
            params["w"][...] = 7
            return [batch["a"]], None

    group = weighted(two, symbol=Writes())
    group.set_params({"w": np.array(1.0)})
    group.forward(ones())
    with pytest.raises(ValueError, match="read-only"):
        group.get_outputs()
    assert value_of(group) == 1


def value_of(group):
    out = np.zeros(())
    group.get_params({"w": out})
    return out.item()


class Fails(Weighted):
    """Refuses what is below 0, forward for a and backward for b."""

    def forward(self, params, aux, batch, is_train):
        if batch["a"].min() < 0:
            raise ArithmeticError("forward")
        return super().forward(params, aux, batch, is_train)

    def backward(self, params, saved, out_grads):
        if out_grads[0].min() < 0:
            raise ArithmeticError("backward")
        return super().backward(params, saved, out_grads)


def test_what_fails_is_heard_of_and_leaves_the_group_in_order(two):
    """On one executor only, as its rows are the last ones."""
    group = weighted(two, symbol=Fails(), grad_req="add")
    group.set_params({"w": np.array(1.0)}, {"passes": np.array(0.0)})
    bad = np.ones((4, 3))
    bad[3] = -1
    group.forward(DataBatch([bad] * 3))
    with pytest.raises(ArithmeticError, match="forward"):
        group.get_outputs()
    assert value_of(group) == 1
    group.set_params({"w": np.array(2.0)})
    group.forward(ones())
    group.backward([bad])
    with pytest.raises(ArithmeticError, match="backward"):
        _ = group.grad_arrays
    for _ in range(2):
        group.forward(ones())
        group.backward([np.ones((4, 3))])
    # The other executor has added three times, as far as the first pass went.
    assert [g.item() for g in group.grad_arrays[0]] == [3 * 36, 2 * 36]


def test_groups_that_share_are_on_the_same_contexts(two):
    first = weighted(two)
    with pytest.raises(ValueError, match="groups that share are on the same contexts"):
        weighted(two[:1], shared_group=first)


def test_a_worker_that_is_gone_is_named(two, monkeypatch):
    """Its executor's parameters went with it; nothing waits for it."""
    group = weighted(two)
    group.set_params({"w": np.array(1.0)})
    monkeypatch.setattr(group.states, "contexts", [two[0], "tcp://127.0.0.1:1"])
    with pytest.raises(
        NotEnoughWorkersError, match=r"worker tcp://127\.0\.0\.1:1 of an exec"
    ):
        group.forward(ones())


def test_a_worker_that_dies_is_named_where_its_results_are_waited_for():
    with local_cluster(threads=1) as client:
        there = list(client.nthreads())
        group = weighted(there, client=client)
        group.set_params({"w": np.array(1.0)})
        group.forward(ones())
        group.get_outputs()
        pid = client.run(os.getpid, workers=there[1:])[there[1]]
        os.kill(pid, signal.SIGKILL)
        until(lambda: there[1] not in client.nthreads())
        with pytest.raises(
            NotEnoughWorkersError, match=f"worker {there[1]} of an exec"
        ):
            group.get_outputs()
        with pytest.raises(
            NotEnoughWorkersError, match=f"worker {there[1]} of an exec"
        ):
            group.forward(ones())


class Exiting(Weighted):
    def forward(self, params, aux, batch, is_train):
        sys.exit(3)


def test_a_network_that_exits_ends_its_call_and_no_worker(two, client):
    group = weighted(two, symbol=Exiting())
    group.set_params({"w": np.array(1.0)})
    group.forward(ones())
    with pytest.raises(
        RuntimeError, match=r"the network's forward called sys\.exit\(3\)"
    ):
        group.get_outputs()
    assert set(two) <= set(client.nthreads())


class Keeping(Weighted):
    """Keeps for its backward what travels to no other process."""

    def forward(self, params, aux, batch, is_train):
        outputs, out = super().forward(params, aux, batch, is_train)
        return outputs, (threading.Lock(), out)

    def backward(self, params, saved, out_grads):
        return super().backward(params, saved[1], out_grads)


def test_what_a_network_keeps_stays_on_its_worker(two):
    group = weighted(two, symbol=Keeping())
    group.set_params({"w": np.array(1.0)})
    group.forward(ones())
    group.backward([np.ones((4, 3))])
    assert [g.item() for g in group.grad_arrays[0]] == [36, 36]

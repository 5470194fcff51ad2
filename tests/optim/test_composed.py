"""Rules made of others: clipped gradients, multiples of learning rate and decay."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.errors import LayoutError
from daskps.optim import chain, clip_by_value, scaled
from tests.kernels.compiling import kept, llvm
from tests.optim.test_row_rules import DIM, Mixed, N, Table, batches
from tests.optim.test_rules import compiled, error, job

untyped: Any = optim
#: Every update function is called in a way of its own: without slots, with, of rows.
INNER = [
    optim.SGD(0.1),
    optim.SGD(0.1, momentum=0.9, weight_decay=0.1),
    optim.Adam(0.05),
]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("rule", INNER, ids=repr)
def test_a_clipped_gradient_is_a_gradient_clipped_by_numpy(rule, dtype):
    """To the bit: in place, into other memory, past the caches."""
    w, gradients = job(steps=5)
    w, gradients = w.astype(dtype), [g.astype(dtype) for g in gradients]
    clipped = [np.clip(g, -0.5, 0.25).astype(dtype) for g in gradients]
    mine = chain(clip_by_value(-0.5, 0.25), rule)
    expected = compiled(rule, w, clipped)
    np.testing.assert_array_equal(compiled(mine, w, gradients), expected)
    bound = optim.bind(mine, dtype, cache_dir=kept())
    inner = optim.bind(rule, dtype, cache_dir=kept())
    n, wide = 1000, bound.kernel.compute_dtype
    w, g = np.ones(n, dtype), np.linspace(-2, 2, n).astype(dtype)
    for past in (False, True):
        found = []
        for of, gradient in ((bound, g), (inner, np.clip(g, -0.5, 0.25))):
            slots = tuple(np.zeros(n, wide) for _ in rule.slots)
            outs, out = tuple(np.zeros(n, wide) for _ in rule.slots), np.empty(n, dtype)
            of.publish(w, out, gradient, slots, of.scalars(1), outs, past=past)
            found.append((out, *outs))
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_clipping_equals_torch():
    torch = pytest.importorskip("torch")
    w, gradients = job()
    parameter = torch.nn.Parameter(torch.tensor(w, dtype=torch.float32))
    theirs = torch.optim.Adam([parameter], lr=0.01, weight_decay=0.1)
    for g in gradients:
        parameter.grad = torch.tensor(g, dtype=torch.float32)
        torch.nn.utils.clip_grad_value_([parameter], 0.5)
        theirs.step()
    rule = chain(clip_by_value(-0.5, 0.5), optim.Adam(0.01, weight_decay=0.1))
    ours = compiled(rule, w.astype("f4"), gradients)
    assert error(ours, parameter.detach().numpy()) <= 1e-6


def test_parts_are_gone_through_in_their_order():
    """2 becomes 1 and then 3, or 3 and then 1; also where chains are in chains."""
    low, high = clip_by_value(-1, 1), clip_by_value(3, 4)
    sgd = optim.SGD(1.0)
    orders = [
        (chain(low, high, sgd), -3.0),
        (chain(high, low, sgd), -1.0),
        (chain(low, chain(high, sgd)), -3.0),
        (chain(high, scaled(chain(low, sgd), 0.5)), -0.5),
        (scaled(chain(low, high, sgd), 2.0), -6.0),
        (chain(sgd), -2.0),
    ]
    for rule, expected in orders:
        got = compiled(rule, np.zeros(1), [np.full(1, 2.0)])
        assert got.tolist() == [expected], rule


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize(
    "rule",
    [optim.Adam(0.05), optim.Adagrad(0.1, rowwise=True), Mixed(0.5)],
    ids=["adam", "rowwise", "mixed"],
)
def test_rows_are_clipped_too(rule, dtype):
    """After repeats were added up, before the mean over the row is taken."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((N, DIM)).astype(dtype)
    ours, theirs = Table(chain(clip_by_value(-0.25, 0.5), rule), w), Table(rule, w)
    for ids, g in batches(rng):
        ours.push(ids, g)
        rows = np.unique(ids)
        total = np.zeros((N, DIM), "f4")
        np.add.at(total, ids, g)
        theirs.push(rows, np.clip(total[rows], -0.25, 0.5))
    for a, b in zip(
        (ours.rows.w, *ours.rows.slots),
        (theirs.rows.w, *theirs.rows.slots),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3 if dtype == "f2" else 1e-6)


def test_clipped_loops_are_vectorised():
    bound = optim.bind(chain(clip_by_value(-1, 1), optim.SGD(0.1)), "f4")
    bound.kernel.warm()
    code = llvm(bound.kernel.module, "inplace")
    assert "x float>" in code
    assert "double" not in code


def test_multiples_of_learning_rate_and_decay():
    rule = optim.SGD(optim.schedules.step(0.1, 10), weight_decay=0.5)
    assert scaled(rule, 2.0, 3.0).scalars(1) == pytest.approx((0.2, 1.5))
    assert scaled(rule, 2.0).scalars(11) == pytest.approx((0.02, 0.5))
    # What a push gives for once is multiplied too; without decay there is none.
    assert scaled(rule, 2.0, 0.0).scalars(1, lr=0.5) == (1.0,)
    assert scaled(scaled(rule, 2.0), 2.0, 0.0).scalars(1) == (0.4,)
    clipped = scaled(chain(clip_by_value(-1, 1), rule), 2.0, 3.0)
    assert clipped.scalars(1) == pytest.approx((0.2, 1.5, -1, 1))
    w, gradients = job()
    ours = compiled(scaled(optim.Adam(0.1, weight_decay=0.1), 0.5, 2.0), w, gradients)
    theirs = compiled(optim.Adam(0.05, weight_decay=0.2), w, gradients)
    np.testing.assert_array_equal(ours, theirs)


def test_multiples_go_by_pattern():
    rule = optim.AdamW(0.1)
    optimizer = {"*/bias": scaled(rule, decay_mult=0.0), "*": rule}
    found = optim.resolve(optimizer, ["a/bias", "a/w"])
    assert found["a/bias"].scalars(1)[-1] == 1.0
    assert found["a/w"].scalars(1)[-1] == pytest.approx(1 - 0.1 * 0.01)
    with pytest.raises(LayoutError, match="matches no parameter"):
        optim.resolve({**optimizer, "c": rule}, ["a/bias"])


@pytest.mark.parametrize(
    "rule",
    [
        chain(clip_by_value(-1, 1), optim.SGD(0.1)),
        scaled(optim.SGD(0.1, weight_decay=0.5), 2.0, 0.5),
        chain(clip_by_value(0, 0), scaled(optim.Adam(), 0.5)),
    ],
    ids=repr,
)
def test_they_are_values(rule):
    copy = pickle.loads(pickle.dumps(rule))
    assert copy == rule != optim.SGD(0.1)
    assert hash(copy) == hash(rule)
    assert eval(repr(rule), vars(optim)) == rule
    assert chain(clip_by_value(-1, 2), optim.SGD(0.1)) != rule


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: clip_by_value(1, 0), ValueError, "lo must be at most hi, got lo=1.0"),
        (lambda: clip_by_value(-np.inf, 0), ValueError, "lo must lie in"),
        (lambda: clip_by_value(0, np.nan), ValueError, "hi must lie in"),
        (lambda: untyped.clip_by_value("0", 1), TypeError, "lo must be a number"),
        (lambda: chain(), TypeError, "ends with a rule, got None"),
        (lambda: chain(clip_by_value(0, 1)), TypeError, "ends with a rule"),
        (lambda: untyped.chain(optim.SGD), TypeError, "ends with a rule"),
        (
            lambda: chain(optim.SGD(0.1), optim.SGD(0.1)),
            TypeError,
            "only the last may be a rule",
        ),
        (lambda: untyped.chain(np.clip, optim.SGD(0.1)), TypeError, "clip_by_value"),
        (lambda: untyped.scaled(optim.SGD), TypeError, "scaled takes a rule"),
        (lambda: scaled(optim.SGD(0.1), -1), ValueError, "lr_mult must lie"),
        (lambda: scaled(optim.Ftrl(), 1, 2), ValueError, "takes no weight_decay"),
        (
            lambda: scaled(chain(optim.Ftrl()), decay_mult=0),
            ValueError,
            "Ftrl.* takes no weight_decay",
        ),
    ],
)
def test_what_cannot_be_composed_is_refused(make, kind, match):
    with pytest.raises(kind, match=match):
        make()

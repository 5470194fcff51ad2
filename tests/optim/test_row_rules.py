"""Rules on named rows: against torch, and against float64 arithmetic."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.kernels import row_repeats
from daskps.kernels.row_log import TableRows, UndoLog
from tests.kernels.compiling import kept

N, DIM, STEPS = 30, 5, 12


def batches(rng: Any, named: int = 8) -> list[tuple[Any, Any]]:
    """Return ids, some of which repeat, and a gradient for each."""
    return [
        (rng.integers(0, N, named), rng.standard_normal((named, DIM)).astype("f4"))
        for _ in range(STEPS)
    ]


class Table:
    """Rows, slots and a step count, as a shard has them."""

    def __init__(self, rule: Any, w: Any) -> None:
        self.bound = optim.bind(rule, w.dtype, cache_dir=kept())
        start = [rule.slot_init.get(name, 0.0) for name in rule.slots]
        wide = self.bound.kernel.compute_dtype
        widths = [1 if name in rule.row_slots else DIM for name in rule.slots]
        slots = tuple(
            np.full((len(w), k), v, wide) for v, k in zip(start, widths, strict=True)
        )
        self.rows, self.step = TableRows(w.copy(), slots), 0
        log = [np.zeros_like(a) for a in (w, *slots)]
        numbers, word = np.zeros(len(w), np.int64), np.zeros(1, np.int64)
        self.log = UndoLog(numbers, log[0], tuple(log[1:]), word, 0)

    def push(self, ids: Any, g: Any) -> None:
        self.step += 1
        found = row_repeats.repeats(ids)
        scalars = self.bound.scalars(self.step)
        total = found.sum(g.astype(self.bound.kernel.compute_dtype))
        args = self.rows, found.ids, None, total, scalars, self.log
        assert self.bound.rows(*args, check=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("rule", "name", "arguments"),
    [
        (optim.SGD(0.1), "SGD", {"lr": 0.1}),
        (optim.Adam(0.05), "SparseAdam", {"lr": 0.05}),
        (
            optim.Adam(0.05, beta1=0.8, beta2=0.95),
            "SparseAdam",
            {"lr": 0.05, "betas": (0.8, 0.95)},
        ),
        (optim.Adagrad(0.1, lr_decay=0.1), "Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ],
    ids=repr,
)
def test_rows_equal_a_sparse_rule_of_torch(
    rule: Any, name: str, arguments: Any
) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    w = rng.standard_normal((N, DIM)).astype("f4")
    table, weights = Table(rule, w), torch.nn.Parameter(torch.tensor(w))
    theirs = getattr(torch.optim, name)([weights], **arguments)
    # One batch with no rows here: the step counts, as it does there.
    for ids, g in [
        *batches(rng),
        (np.zeros(0, int), np.zeros((0, DIM), "f4")),
        *batches(rng),
    ]:
        table.push(ids, g)
        index = torch.tensor(ids)[None]
        weights.grad = torch.sparse_coo_tensor(index, torch.tensor(g), w.shape)
        theirs.step()
        np.testing.assert_allclose(
            table.rows.w, weights.detach().numpy(), rtol=1e-5, atol=1e-6
        )


RULES = [
    optim.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    optim.Adagrad(0.1, initial_accumulator_value=0.1, weight_decay=0.01),
    optim.Adam(0.05, weight_decay=0.01),
    optim.AdamW(0.05),
    optim.RMSprop(0.01, centered=True, momentum=0.5),
    optim.Adadelta(),
    optim.Adamax(0.05, weight_decay=0.01),
    optim.Adam(0.05, bias_correction=False, eps_root=1e-4),
    optim.Ftrl(0.5, l1=0.5, l2=0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rows_equal_float64_arithmetic_on_the_named_rows_alone(rule: Any) -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((N, DIM)).astype("f4")
    table, exact = Table(rule, w), w.astype("f8")
    slots = [np.full((N, DIM), rule.slot_init.get(name, 0.0)) for name in rule.slots]
    for step, (ids, g) in enumerate(batches(rng), 1):
        before = [a.copy() for a in (exact, *slots)]
        table.push(ids, g)
        rows = list(dict.fromkeys(ids.tolist()))
        total = np.zeros((N, DIM))
        np.add.at(total, ids, g.astype("f8"))
        made = rule.update(
            exact[rows], total[rows], *(s[rows] for s in slots), *rule.scalars(step)
        )
        made = made if isinstance(made, tuple) else (made,)
        for a, new in zip((exact, *slots), made, strict=True):
            a[rows] = new
        others = np.setdiff1d(np.arange(N), rows)
        for a, old in zip((exact, *slots), before, strict=True):
            assert (a[others] == old[others]).all()
    for ours, a in zip((table.rows.w, *table.rows.slots), (exact, *slots), strict=True):
        np.testing.assert_allclose(ours, a, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("dtype", "near"), [("f2", 1e-2), ("f4", 2e-6), ("f8", 1e-14)])
@pytest.mark.parametrize("more", [{}, {"weight_decay": 0.1, "lr_decay": 0.5}])
def test_rowwise_adagrad_is_that_of_fbgemm(dtype: str, near: float, more: Any) -> None:
    """The mean of the squares of a row, whose repeats are one gradient, in float64."""
    rng = np.random.default_rng(3)
    rule = optim.Adagrad(
        0.1, initial_accumulator_value=0.25, eps=1e-3, rowwise=True, **more
    )
    w = rng.standard_normal((N, DIM)).astype(dtype)
    table, exact, sums = Table(rule, w), w.astype("f8"), np.full(N, 0.25)
    for step, (ids, g) in enumerate(batches(rng)):
        table.push(ids, g)
        lr = 0.1 / (1 + step * more.get("lr_decay", 0))
        for row in set(ids.tolist()):
            total = g[ids == row].astype("f8").sum(0)
            total += more.get("weight_decay", 0) * exact[row]
            sums[row] += np.mean(total**2)
            exact[row] -= lr * total / (np.sqrt(sums[row]) + 1e-3)
        # Of float16 each step begins with what was rounded.
        exact = table.rows.w.astype("f8") if dtype == "f2" else exact
    np.testing.assert_allclose(table.rows.w, exact, rtol=near, atol=near)
    np.testing.assert_allclose(table.rows.slots[0][:, 0], sums, rtol=max(near, 1e-6))


class Mixed(optim.Rule):
    """A slot per weight and one per row, in this order."""

    slots: tuple[str, ...] = ("m", "largest")
    row_slots: tuple[str, ...] = ("largest",)

    def prepare(self, step: int, lr: float) -> tuple[float, ...]:
        return (lr,)

    @staticmethod
    def row_mean(w: Any, g: Any, lr: Any) -> Any:
        return abs(g)

    @staticmethod
    def update(w: Any, g: Any, mean: Any, m: Any, largest: Any, lr: Any) -> Any:
        m = m + g
        return w - lr * m, m, max(mean, largest)


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_rule_of_ones_own_has_slots_of_both_widths(dtype: str) -> None:
    table = Table(Mixed(0.5), np.zeros((N, DIM), dtype))
    g = np.arange(2 * DIM, dtype="f4").reshape(2, DIM)
    for _ in range(2):
        table.push(np.array([7, 3]), g)
    m, largest = table.rows.slots
    assert (m[[7, 3]] == 2 * g).all()
    assert (table.rows.w[[7, 3]] == -1.5 * g).all()
    assert largest[[7, 3], 0].tolist() == [2.0, 7.0]
    assert not table.rows.w[:3].any()
    assert not largest[:3].any()


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_a_rule_of_rows_takes_no_arrays_and_no_slots_of_another_width(
    dtype: str,
) -> None:
    table = Table(optim.Adagrad(0.1, rowwise=True), np.zeros((N, DIM), dtype))
    w, g, c = np.zeros(3, dtype), np.zeros(3, "f4"), table.bound.scalars(1)
    with pytest.raises(ValueError, match="it updates tables, and no arrays"):
        table.bound.inplace(w, g, (g,), c)
    table.rows = table.rows._replace(slots=(np.zeros((N, DIM), "f4"),))
    table.log = table.log._replace(slots=(np.zeros((N, DIM), "f4"),))
    with pytest.raises(ValueError, match=r"expected a slot of \(30, 1\)"):
        table.push(np.array([1]), np.zeros((1, DIM), "f4"))


def test_row_slots_without_a_mean_are_refused() -> None:
    class NoMean(Mixed):
        row_mean: Any = None

    with pytest.raises(TypeError, match="row_slots, but no row_mean"):
        optim.bind(NoMean(0.1), "f4")


def test_rowwise_is_part_of_the_value_of_a_rule() -> None:
    rule = optim.Adagrad(0.1, rowwise=True)
    assert repr(rule) == "Adagrad(lr=0.1, rowwise=True)"
    assert pickle.loads(pickle.dumps(rule)) == rule != optim.Adagrad(0.1)
    with pytest.raises(TypeError, match="rowwise must be True or False"):
        optim.Adagrad(rowwise=1)  # type: ignore[arg-type]  # refused

"""Rules on named rows: against torch, and against float64 arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.kernels import row_ids
from daskps.kernels.interface import TableRows, UndoLog

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
        self.bound = optim.bind(rule, w.dtype)
        start = [rule.slot_init.get(name, 0.0) for name in rule.slots]
        slots = tuple(np.full_like(w, value) for value in start)
        self.rows, self.step = TableRows(w.copy(), slots), 0
        log = [np.zeros_like(w) for _ in (w, *slots)]
        numbers, word = np.zeros(len(w), np.int64), np.zeros(1, np.int64)
        self.log = UndoLog(numbers, log[0], tuple(log[1:]), word, 0)

    def push(self, ids: Any, g: Any) -> None:
        self.step += 1
        found = row_ids.repeats(ids)
        scalars = self.bound.scalars(self.step)
        args = self.rows, found.ids, None, found.sum(g), scalars, self.log
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

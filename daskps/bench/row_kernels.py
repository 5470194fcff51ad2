"""How fast the compiled loops over rows of a table are, against NumPy.

A tenth of the rows of a table is updated, each once, and others in every call, so that
few of them are still in a cache. NumPy has two ways: `add.at`, which would also sum rows
that repeat, and indexing, which would not.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from daskps import optim
from daskps.kernels.interface import TableRows, UndoLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from daskps.typing import Array

    Action: TypeAlias = Callable[[], object]
    #: Our name and action, the peer's name and action.
    Line: TypeAlias = tuple[str, Action, str, Action]

#: Weights of a row.
DIM = 64
_LR, _EPS = np.float32(1e-3), np.float32(1e-10)
#: Sets of rows that are used in turn.
_SETS = 8


def lines(rows: int, cache_dir: str | None) -> list[Line]:
    """Return what is compared, on a table of so many rows."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((rows, DIM), np.float32)
    total = np.ones_like(w)
    named = max(1, rows // 10)
    g = rng.standard_normal((named, DIM), np.float32)
    sets = [rng.choice(rows, named, replace=False) for _ in range(_SETS)]
    sgd = optim.bind(optim.SGD(float(_LR)), np.float32, cache_dir=cache_dir)
    adagrad = optim.bind(
        optim.Adagrad(float(_LR), eps=float(_EPS)), np.float32, cache_dir=cache_dir
    )
    few, more = sgd.scalars(1), adagrad.scalars(1)

    def each(update: Callable[[Array], object]) -> Action:
        turns = itertools.cycle(sets)
        return lambda: update(next(turns))

    def subtract(ids: Array) -> None:
        w[ids] -= _LR * g

    def accumulate(ids: Array) -> None:
        new = total[ids] + g * g
        total[ids] = new
        w[ids] -= _LR * g / (np.sqrt(new) + _EPS)

    log = UndoLog(
        np.zeros(named, np.int64),
        np.zeros_like(g),
        (np.zeros_like(g),),
        np.zeros(1, np.int64),
        0,
    )
    plain = log._replace(slots=())
    ours = each(lambda ids: sgd.rows(TableRows(w), ids, None, g, few, plain))
    return [
        ("SGD rows", ours, "np.add.at", each(lambda ids: np.add.at(w, ids, -_LR * g))),
        ("SGD rows", ours, "NumPy, indexed", each(subtract)),
        (
            "Adagrad rows",
            each(
                lambda ids: adagrad.rows(
                    TableRows(w, (total,)), ids, None, g, more, log
                )
            ),
            "NumPy, indexed",
            each(accumulate),
        ),
    ]

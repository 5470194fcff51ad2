"""Values for some rows of a table, as a mapping of gradients has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daskps.layout.trees import Leaf


@dataclass(frozen=True, eq=False, slots=True)
class RowGrad(Leaf):
    """Gradients, deltas or values for some rows of a table.

    Parameters
    ----------
    ids : array_like of int
        Which rows, in any order and shape; a row may be named more than once.
    values : array_like, shape ids.shape + (dim,)
        One row for each id. Those of the same id are summed before the one update of
        that row; in an `assign` the last one holds.

    Examples
    --------
    >>> params = {"w": np.zeros(2), "emb": daskps.TableSpec(10, 2, "float64")}
    >>> store = daskps.create(params, optimizer=daskps.optim.SGD(1.0))
    >>> rows = daskps.RowGrad([7, 3], np.ones((2, 2)))
    >>> _ = store.push({"w": np.ones(2), "emb": rows})
    >>> store["emb"].pull([3, 4])
    array([[-1., -1.],
           [ 0.,  0.]])
    """

    ids: Any
    values: Any

"""What a task of graph execution runs of `train`: one rank's step of one round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from daskps.store.row_targets import pulled
from daskps.training.data.row_blocks import rows_of
from daskps.training.data.rows import n_rows
from daskps.training.row_ids import ids_of_batch
from daskps.training.steps import Stepper

if TYPE_CHECKING:
    from functools import partial

    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.training.steps import FitPlan
    from daskps.typing import Array

#: Returns what the tasks of a run share on a worker, made by the function if need be.
Shared = Callable[[Any, Callable[[], Any]], Any]


class RowsBefore(Protocol):
    """What reads rows of tables as they are before a round."""

    def read_rows(self, targets: Sequence[Target]) -> None:
        """Read what is too much for one call, one after the other."""

    def empty(self, n: int, dtype: Any) -> Array:
        """Return memory like ``np.empty(n, dtype)``, of which much is used again."""


class GraphStepper(Stepper):
    """Steps of many ranks, one at a time."""

    def __init__(self, plan: FitPlan, meta: StoreMap) -> None:
        super().__init__(plan, meta)
        self._arrays = self.params

    def __call__(
        self,
        part: tuple[Any, Any],
        rank: int,
        number: int,
        shared: Shared,
        *,
        reader: RowsBefore,
        own: partial[GraphStepper],
    ) -> Computed:
        """Compute what a rank delivers to a round, from `params` as they are.

        `own` is the rank's copy of what makes these: its plan has the functions to call.
        """
        [self.plan] = own.args
        X, y = rows_of(part)
        n = n_rows(X)
        epoch, within = self.plan.place(number, self.plan.rounds)
        self.epoch = self.plan.first + epoch
        # Shuffled once per epoch and worker, not once per round.
        kept: dict[int, list[list[Any]]] = shared(("batches", rank), dict)
        groups = kept.get(epoch)
        if groups is None:
            groups = self.plan.groups(n, epoch, rank)
            kept.clear()
            kept[epoch] = groups
        first = None
        if self.plan.rows:
            first = self.take(X, y, groups[within][0])
            key = self.plan.key(number, self.plan.rounds, rank)
            self._read(first[0], key, reader)
        return self.step(X, y, groups[within], first)

    def _read(self, X: Any, key: tuple[int, int, int, int], reader: RowsBefore) -> None:
        """Put the rows that a batch is about into `params`."""
        self.ids = ids_of_batch(self.meta, self.plan.rows, X, key)
        out = {}
        for name, ids in self.ids.items():
            table = self.meta.layout.table_by_name[name]
            shape = (*ids.shape, table.dim)
            # Each time another: a gradient may be what was read.
            out[name] = reader.empty(math.prod(shape), table.dtype).reshape(shape)
        targets = pulled(self.meta, (), self.ids, out)
        reader.read_rows(targets)
        self.params = {**self._arrays, **targets[-1].finish()}

"""What a task of graph execution runs of `train`: one rank's step of one round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from daskps.training.data.row_blocks import rows_of
from daskps.training.data.rows import n_rows
from daskps.training.steps import Stepper

if TYPE_CHECKING:
    from daskps.cluster.caller.routes import Computed

#: Returns what the tasks of a run share on a worker, made by the function if need be.
Shared = Callable[[Any, Callable[[], Any]], Any]


class GraphStepper(Stepper):
    """Steps of many ranks, one at a time."""

    def __call__(
        self, part: tuple[Any, Any], rank: int, number: int, shared: Shared
    ) -> Computed:
        """Compute what a rank delivers to a round, from `params` as they are."""
        X, y = rows_of(part)
        n = n_rows(X)
        epoch, within = divmod(number, self.plan.rounds)
        # Shuffled once per epoch and worker, not once per round.
        kept: dict[int, list[list[Any]]] = shared(("batches", rank), dict)
        groups = kept.get(epoch)
        if groups is None:
            groups = self.plan.groups(n, epoch, rank)
            kept.clear()
            kept[epoch] = groups
        return self.step(X, y, groups[within])

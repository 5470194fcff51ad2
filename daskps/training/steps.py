"""Steps of `train` between two synchronisations, for a trainer or a task of a round."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from dask.utils import funcname

from daskps import config
from daskps.backend import device_of
from daskps.cluster.caller.routes import (
    GRADIENT,
    MODEL,
    Computed,
    load_rules,
    whole,
)
from daskps.errors import PushRejectedError
from daskps.layout.trees import Tree, flatten, is_tree
from daskps.optim.local import LocalModel
from daskps.store import intake
from daskps.store.targets import pulled
from daskps.training.data.row_blocks import rows_of
from daskps.training.data.rows import batches, n_rows, take_rows
from daskps.training.functions import advice, note_arguments
from daskps.training.row_ids import as_rows, ids_of_batch, row_batches
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.host.contributions import RoundId
    from daskps.cluster.runs.graph.tasks import TaskContext
    from daskps.combination import Combination
    from daskps.reduction import Empty
    from daskps.training.monitoring import Monitor
    from daskps.training.row_ids import IdFunction
    from daskps.typing import Array


_GRADIENT = user_code("the gradient")
#: Rows of the features and of the labels.
Batch: TypeAlias = tuple[Any, Any]


@dataclass(frozen=True)
class FitPlan:
    """Everything the trainers of one `train` need but their data; travels once."""

    gradient: Callable[..., Any]
    #: The options of the run: some of them take no rows.
    chosen: Combination
    #: Epochs of the store, from `first` to the end.
    epochs: int
    batch_size: int
    shuffle: bool
    seed: int
    #: Whether a rank without a batch left ticks until the epoch is over: under BSP, and
    #: where ranks that wait for each other's clocks wait for a verdict on each epoch.
    sits_out: bool = False
    #: Ticks of one epoch there: that of the rank with the most.
    rounds: int = 0
    #: The epoch of the store that clocks are counted from, and the clock of each
    #: trainer that it begins at, which its session counts from 0.
    first: int = 0
    start: int = 0
    #: How many epochs since the first one the run was to have that has come so far:
    #: trainers with few rows had ended them.
    passed: int = 0
    #: After how many ticks of a session the run ends at the latest; None where with its
    #: last epoch.
    most: int | None = None
    #: Whether a step is delivered, and the next but one read, during the next one.
    read_ahead: bool = False
    #: Functions that return the ids of a batch, by the names of tables.
    rows: Mapping[str, IdFunction] = field(default_factory=dict)
    #: Where a trainer is ahead of the slowest by fewer clocks than this, it reads the
    #: rows of the next batch while it computes.
    rows_ahead: float = 0
    #: Statistics that monitors ask of trainers.
    watches: tuple[Monitor, ...] = ()

    @property
    def bsp(self) -> bool:
        """Whether steps are rounds."""
        return self.chosen.has_rounds

    @property
    def sync_every(self) -> int:
        """Batches per synchronisation; 0 for the whole epoch."""
        return self.chosen.sync_every

    @property
    def average_models(self) -> bool:
        """Whether a round is the mean of the trainers' copies."""
        return self.chosen.average == "models"

    def n_groups(self, n: int) -> int:
        """Return the synchronisations per epoch of a rank with `n` rows."""
        n_batches = -(-n // self.batch_size)
        return -(-n_batches // (self.sync_every or max(n_batches, 1)))

    def place(self, clock: int, per_epoch: int) -> tuple[int, int]:
        """Return the epoch since the first one of a session's clock, and the clock in it.

        `per_epoch` are the ticks of the trainer in an epoch, its own or everybody's.
        """
        start = min(self.start, self.passed * per_epoch)
        return divmod(start + clock, max(per_epoch, 1))

    def end(self, per_epoch: int) -> tuple[int, int]:
        """Return the epoch since the first one that the run ends in, and the clock in it."""
        last = self.epochs, 0
        return (
            last if self.most is None else min(last, self.place(self.most, per_epoch))
        )

    @property
    def ended(self) -> int:
        """How many epochs since the first one had ended before it began."""
        return self.place(0, self.rounds)[0]

    def key(self, clock: int, per_epoch: int, rank: int) -> tuple[int, int, int, int]:
        """Return what a batch depends on: seed, epoch, rank and clock of the store."""
        epoch, within = self.place(clock, per_epoch)
        epoch += self.first
        return self.seed, epoch, rank, epoch * per_epoch + within

    def groups(self, n: int, epoch: int, rank: int) -> list[list[Any]]:
        """Return the batches of each synchronisation of a rank's epoch since the first."""
        rows = list(
            batches(
                n,
                self.batch_size,
                seed=self.seed,
                epoch=self.first + epoch,
                rank=rank,
                shuffle=self.shuffle,
            )
        )
        size = self.sync_every or max(len(rows), 1)
        return [rows[i : i + size] for i in range(0, len(rows), size)]


class Stepper:
    """Buffers of one trainer at a time, and the user's function called on them.

    Parameters
    ----------
    plan : FitPlan
        The plan of the run.
    meta : StoreMap
        The store.
    """

    def __init__(self, plan: FitPlan, meta: StoreMap) -> None:
        self.plan, self.meta = plan, meta
        settings = config.load()
        self._finite = settings.check_finite
        # One buffer for the whole run: fresh memory costs more than the copy into it.
        self.target: Target = whole(meta)
        self.params: dict[str, Array] = self.target.finish()
        #: The rows of tables that `params` has, by their names.
        self.ids: Mapping[str, Array] = {}
        #: The epoch of the store that is under way.
        self.epoch = plan.first
        self._other: Target | None = None
        self._local: LocalModel | None = None
        if plan.sync_every != 1 or plan.average_models:
            rules = load_rules(meta)
            self._local = LocalModel(meta.layout, rules, str(settings.cache))

    def swap(self) -> None:
        """Go on with a second buffer, while the first one is read into."""
        other = self._other or whole(self.meta)
        self.target, self._other = other, self.target
        self.params = self.target.finish()

    def take(self, X: Any, y: Any, batch: Any) -> Batch:
        """Return the rows of a batch."""
        return take_rows(X, batch), None if y is None else take_rows(y, batch)

    def step(
        self, X: Any, y: Any, group: Sequence[Any], first: Batch | None = None
    ) -> Computed:
        """Compute what the batches of a group amount to, from `params` as they are.

        Parameters
        ----------
        X, y : array_like
            The trainer's rows.
        group : sequence
            The row numbers of each batch.
        first : tuple, optional
            The rows of the first batch, where they were taken before.

        Returns
        -------
        Computed
            Arrays to deliver, and the number of rows they come from.
        """
        taken = first or self.take(X, y, group[0])
        if self._local is None:
            return self._gradient(taken)
        batches = (self.take(X, y, batch) for batch in group[1:])
        return self._local_steps(self._local, itertools.chain([taken], batches), group)

    def _local_steps(
        self, local: LocalModel, batches: Iterable[Batch], group: Sequence[Any]
    ) -> Computed:
        """Update the own copy batch by batch, then say what it amounts to."""
        local.reset(self.params)
        sums: dict[int, Array] = {}
        total, loss_sum = 0, None
        for number, batch in enumerate(batches):
            found = self._gradient(batch)
            grads, loss = found.arrays, found.loss_sum
            total += found.rows
            if loss is not None:
                loss_sum = (loss_sum or 0.0) + loss
            for index, grad in grads.items():
                if index in sums:
                    sums[index] += grad
                else:
                    sums[index] = grad.copy()
            if self.plan.average_models or number < len(group) - 1:
                local.update(self.params, grads, self.epoch)
        if not self.plan.average_models:
            return Computed(sums, GRADIENT, total, loss_sum)
        named = {self.meta.layout.parameters[i].name for i in sums}
        models = intake.gradients(
            self.meta.layout,
            self.meta.optimizers,
            {n: self.params[n] for n in named},
            finite=self._finite,
            model=True,
        )
        models = {i: a.copy() for i, a in models.items()}
        return Computed(models, MODEL, total, loss_sum)

    def _gradient(self, batch: Batch) -> Computed:
        X, y = batch
        params, device = self.params, device_of(X)
        if device is not None:
            params = {name: device.moved(a) for name, a in params.items()}
        try:
            with _GRADIENT:
                result = self.plan.gradient(params, X, y)
        except Exception as error:
            note_arguments(error, self.params, y)
            raise
        loss, grads = self._split(result)
        n = n_rows(X)
        arrays, of_tables = self._checked(grads, batch)
        loss_sum = None if loss is None else loss * n
        return Computed(arrays, GRADIENT, n, loss_sum, of_tables)

    def _split(self, result: Any) -> tuple[float | None, Tree]:
        """Return loss and gradients of what the user's function returned."""
        loss, grads = None, result
        if isinstance(result, tuple) and len(result) == 2 and not _is_part(result[0]):
            loss, grads = result
        if not is_tree(grads) or not self._is_known(grads):
            raise self._wrong(type(grads).__name__)
        if loss is None:
            return None, grads
        try:
            return float(loss), grads
        except (TypeError, ValueError):
            raise self._wrong(f"the loss {loss!r:.60}") from None

    def _is_known(self, grads: Tree) -> bool:
        """Whether the places of a list are names of parameters; those of a dict may be."""
        if isinstance(grads, Mapping):
            return True
        layout = self.meta.layout
        known = layout.by_name.keys() | layout.table_by_name.keys()
        return known >= flatten(grads).keys()

    def _wrong(self, found: str) -> PushRejectedError:
        return PushRejectedError(
            f"gradient {funcname(self.plan.gradient)} returned {found}; return a "
            f"mapping of parameter names to arrays (or a list or tuple of arrays, where "
            f"the store was made of one), or (loss, mapping) with a loss that is one "
            f"number"
        )

    def _checked(
        self, grads: Any, batch: Batch
    ) -> tuple[dict[int, Array], list[RowBatch]]:
        """Return gradients of a batch, of arrays and of rows, ready to send."""
        layout, rules = self.meta.layout, self.meta.optimizers
        dense, named = intake.parted(layout, as_rows(grads, self.ids))
        arrays = intake.gradients(layout, rules, dense, finite=False)
        if self._finite:
            intake.look(layout, arrays, partial(advice, *batch))
        rows = row_batches(self.meta, named, self.plan.chosen, finite=self._finite)
        # Reads after the push write to `params`: a gradient that is one of them, or
        # a view, would change on its way.
        return (
            {i: a.copy() if self._is_ours(a) else a for i, a in arrays.items()},
            [one.copied() if self._is_ours(one.data) else one for one in rows],
        )

    def _is_ours(self, array: Array) -> bool:
        return any(np.may_share_memory(array, p) for p in self.params.values())


def _is_part(value: Any) -> bool:
    """Whether it is the first of two gradients, and no loss."""
    return getattr(value, "ndim", 0) > 0 or is_tree(value)


class GraphStepper(Stepper):
    """Steps of many ranks, one at a time."""

    def __init__(self, plan: FitPlan, meta: StoreMap) -> None:
        super().__init__(plan, meta)
        self._arrays = self.params

    def __call__(
        self, context: TaskContext, part: tuple[Any, Any], place: RoundId, rank: int
    ) -> Computed:
        """Compute what a rank delivers to a round, from `params` as they are.

        The plan of the rank's own copy has the functions to call.
        """
        [self.plan] = context.own(rank).args
        X, y = rows_of(part)
        n, number = n_rows(X), place.round
        epoch, within = self.plan.place(number, self.plan.rounds)
        self.epoch = self.plan.first + epoch
        # Shuffled once per epoch and worker, not once per round.
        kept: dict[int, list[list[Any]]] = context.shared(("batches", rank), dict)
        groups = kept.get(epoch)
        if groups is None:
            groups = self.plan.groups(n, epoch, rank)
            kept.clear()
            kept[epoch] = groups
        first = None
        if self.plan.rows:
            first = self.take(X, y, groups[within][0])
            key = self.plan.key(number, self.plan.rounds, rank)
            self._read(first[0], key, partial(context.read_rows, place), context.empty)
        return self.step(X, y, groups[within], first)

    def _read(
        self,
        X: Any,
        key: tuple[int, int, int, int],
        read: Callable[[Sequence[Target]], None],
        empty: Empty,
    ) -> None:
        """Put the rows that a batch is about into `params`."""
        self.ids = ids_of_batch(self.meta, self.plan.rows, X, key)
        out = {}
        for name, ids in self.ids.items():
            table = self.meta.layout.table_by_name[name]
            shape = (*ids.shape, table.dim)
            # Each time another: a gradient may be what was read.
            out[name] = empty(math.prod(shape), table.dtype).reshape(shape)
        targets = pulled(self.meta, (), self.ids, out)
        read(targets)
        self.params = {**self._arrays, **targets[-1].finish()}

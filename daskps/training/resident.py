"""The long-running loop of one trainer in `train`, and the rows of its batches."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.caller.trainer_step import TrainerStep
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.runs.graph.epochs import FIRST_ROWS, first_batches
from daskps.store.targets import pulled, with_rows
from daskps.training.data.row_blocks import rows_of
from daskps.training.data.rows import n_rows
from daskps.training.monitoring import Watcher
from daskps.training.overlap.background import Background
from daskps.training.row_ids import ids_of_batch
from daskps.training.stats import Meter
from daskps.training.steps import Stepper

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.session import Session
    from daskps.cluster.caller.targets import Target
    from daskps.training.overlap.background import Operation
    from daskps.training.steps import Batch, FitPlan
    from daskps.typing import Array


class BatchRows:
    """Puts the rows of each batch into the parameters of its step.

    Under BSP its ids travel with the step before and its rows come with the answer.
    Otherwise they are read in the background while the step before is computed, and
    those that this step has changed are read again after it.

    Parameters
    ----------
    plan : FitPlan
        The plan of the run.
    background : Background
        Reads beside the trainer's loop, at its place in the run.
    stepper : Stepper
        Computes the steps.
    per_epoch : int
        Its ticks in an epoch.
    """

    def __init__(
        self, plan: FitPlan, background: Background, stepper: Stepper, per_epoch: int
    ) -> None:
        self._plan, self._background, self._stepper = plan, background, stepper
        self._session, self._per_epoch = background.session, per_epoch
        self._arrays = stepper.params
        #: Whether the rows of the next batch came with the step before.
        self._came = False
        #: The ids of the next batch, where its rows are being read.
        self._next: dict[str, Array] = {}
        self._reading: Operation | None = None
        #: Clocks by which the slowest trainer was behind at the last reads, and at most
        #: at those before them.
        self._lag = self._worst = 0
        self._marks = Marks()

    def make_ready(self, X: Any) -> None:
        """Read the rows of the batch that comes now, where they are not here."""
        if self._came:
            return
        ids = self._ids(X, self._session.clock)
        targets = pulled(self._session.meta, (), ids, None)
        self._begin_reads()
        self._session.read_all(targets, None)
        self._end_reads()
        self._enter(ids, targets[-1].finish())

    def may_begin(self) -> bool:
        """Return whether the rows of the next batch may be read now, before this one's step.

        They will be used at the next clock, and are read as at that one. Only where
        that would not wait for others: a step that waits is not delivered.
        """
        return self._lag < self._plan.rows_ahead

    def begin(self, following: Any) -> None:
        """Begin to read the rows of the next batch."""
        session, clock = self._session, self._session.clock
        self._next = self._ids(following, clock + 1)
        targets = pulled(session.meta, (), self._next, None)

        def read(seconds: float | None) -> Any:
            session.read_all(targets, seconds, ahead=1)
            return targets[-1].finish()

        self._begin_reads()
        where = f"a read ahead of trainer {session.rank} at clock {clock}"
        self._reading = self._background.submit(read, Deadline(None, where))

    def deliver(self, given: TrainerStep, following: Any) -> None:
        """Deliver a step, and read what the next one needs; None where none follows."""
        session, dense = self._session, self._stepper.target
        reading, self._reading = self._reading, None
        self._came = following is not None
        if following is None:
            session.deliver(given, None, target=dense)
            return
        if reading is None:
            self._begin_reads()
            ids = self._ids(following, session.clock + 1)
            found = self._deliver(given, with_rows(session.meta, dense, ids, {}))
        else:
            # Before the step: one of the two threads at a time.
            ids, found = self._next, reading.result()
            self._read_again(given, ids, found)
        self._end_reads()
        self._enter(ids, found)

    def _read_again(
        self, given: TrainerStep, ids: dict[str, Array], found: dict[str, Array]
    ) -> None:
        """Deliver a step, and put what it has changed of rows that were read in place."""
        touched = {
            name: again
            for name, of in ids.items()
            if len(again := self._marks.find(of.reshape(-1), _pushed(given.rows, name)))
        }
        some = {name: ids[name].reshape(-1)[again] for name, again in touched.items()}
        targets = with_rows(self._session.meta, self._stepper.target, some, {})
        fresh = self._deliver(given, targets)
        for name, again in touched.items():
            rows = found[name]
            rows.reshape(-1, rows.shape[-1])[again] = fresh[name]

    def _deliver(
        self, given: TrainerStep, targets: Sequence[Target]
    ) -> dict[str, Array]:
        """Deliver a step and read after it; return what was read."""
        first, *rest = targets
        reads = any(map(first.reads, first.shards))
        self._session.deliver(given, None, target=first if reads else None)
        self._session.read_all(rest, None)  # of more rows than one call reads
        found: dict[str, Array] = targets[-1].finish()
        return found

    def _begin_reads(self) -> None:
        """Have the lag of the reads to come be seen alone."""
        reads = self._session.reads
        self._worst, reads.lag = reads.lag, 0

    def _end_reads(self) -> None:
        reads = self._session.reads
        self._lag = reads.lag
        reads.lag = max(self._worst, reads.lag)

    def _ids(self, X: Any, clock: int) -> dict[str, Array]:
        key = self._plan.key(clock, self._per_epoch, self._session.rank)
        return ids_of_batch(self._session.meta, self._plan.rows, X, key)

    def _enter(self, ids: dict[str, Array], found: dict[str, Array]) -> None:
        # In fresh memory each time: a gradient may be what was read before.
        self._stepper.ids = ids
        self._stepper.params = {**self._arrays, **found}


def _pushed(rows: Iterable[RowBatch], name: str) -> Sequence[Array]:
    """Return the ids of a table that a step brings."""
    return [one.split.ids for one in rows if one.split.table.name == name]


class Marks:
    """Finds ids among others without sorting either, at times a few too many."""

    _BITS = 20
    #: Neighbours, and ids that differ in their upper bits alone, get marks far apart.
    _FACTOR = np.uint64(0x9E3779B97F4A7C15)

    def __init__(self) -> None:
        self._marks = np.zeros(1 << self._BITS, bool)

    def find(self, ids: Array, among: Sequence[Array]) -> Array:
        """Return which of `ids` are among others: their numbers, and maybe more.

        Parameters
        ----------
        ids : ndarray of int64, shape (n,)
            Of any numbers.
        among : sequence of ndarray of int64
            The others.

        Returns
        -------
        ndarray of int64
            Positions in `ids`, ascending.
        """
        if not any(len(of) for of in among):
            return np.empty(0, np.int64)
        marked = [self._of(of) for of in among]
        for of in marked:
            self._marks[of] = True
        found = np.flatnonzero(self._marks[self._of(ids)])
        for of in marked:
            self._marks[of] = False
        return found

    def _of(self, ids: Array) -> Array:
        hashed: Array = ids.view(np.uint64) * self._FACTOR
        return hashed >> np.uint64(64 - self._BITS)


def train_part(plan: FitPlan, session: Session, part: tuple[Any, Any]) -> None:
    """Train to the end of the last epoch, or until told to stop: a trainer's task."""
    with Background(session) as background:
        _Loop(plan, session, background, rows_of(part)).run()


class _Loop:
    """One trainer's state between two steps."""

    def __init__(
        self, plan: FitPlan, session: Session, background: Background, rows: Batch
    ) -> None:
        self.plan, self.session = plan, session
        self.X, self.y = rows
        self.n = n_rows(self.X)
        self.stepper = Stepper(plan, session.meta)
        self.background = background
        self.per_epoch = plan.rounds if plan.sits_out else plan.n_groups(self.n)
        self.rows: BatchRows | None = None
        if plan.rows:
            self.rows = BatchRows(plan, background, self.stepper, self.per_epoch)
        #: The rows of the next batch, where they have been taken.
        self._taken: Batch | None = None
        #: The delivery that the next step is computed beside.
        self._under_way: Operation | None = None
        #: Memory that the next step is copied to, and memory that may be under way.
        self._copies: tuple[dict[int, Array], dict[int, Array]] = ({}, {})
        #: Losses and rows of the first batches.
        self._first = (0.0, 0)
        ahead = int(plan.read_ahead)
        self.meter = Meter(session, self.stepper.target.flats, ahead)
        self.watcher: Watcher | None = None
        #: Number of the store's step that is under way.
        self._number = 0
        if plan.watches:
            mean, models = plan.chosen.reduce == "mean", plan.chosen.average == "models"
            self.watcher = Watcher(plan.watches, session, mean=mean, models=models)

    def run(self) -> None:
        plan, per_epoch = self.plan, self.per_epoch
        if self.n == 0 and not plan.bsp:
            # No data: it takes no part, and each epoch is over for it at once.
            self.session.finish()
            self._skip(plan.epochs)
            return
        # Of the epochs that are under way others may have more rounds.
        if self._skip(plan.place(0, per_epoch)[0]):
            return
        clock = self.session.clock
        first, skip = plan.place(clock, per_epoch)
        if clock and not skip and self._report(first - 1, time.monotonic()):
            # Started again at an epoch's border: its report, or the verdict on it,
            # may have gone with its worker.
            return
        self._read_first()
        if plan.read_ahead:
            self.stepper.swap()
            self._read_first()
        last, within = plan.end(per_epoch)
        for epoch in range(first, last + (within > 0)):
            began = time.monotonic()
            self._epoch(epoch, range(skip, within if epoch == last else per_epoch))
            skip = 0
            if self._report(epoch, began):
                break

    def _read_first(self) -> None:
        """Read what a step needs before which there was none."""
        self.session.read(self.stepper.target, None)
        self.meter.read()

    def _skip(self, stop: int) -> bool:
        """Report epochs before `stop` in which it has nothing to do; return as a report."""
        epochs = range(self.plan.ended, min(stop, self.plan.epochs))
        return any(self._report(epoch, time.monotonic()) for epoch in epochs)

    def _epoch(self, epoch: int, clocks: range) -> None:
        self.stepper.epoch = self.plan.first + epoch
        groups = self.plan.groups(self.n, epoch, self.session.rank)[: clocks.stop]
        for number in clocks:
            self._number = self.stepper.epoch * self.per_epoch + number
            if number < len(groups):
                self._step(groups[number], groups[number + 1 : number + 2])
            else:
                # No batch is left, so it sits out what others still have to do.
                if self.watcher is not None:
                    self.watcher.gradients(self._number, None, 0.0)
                nothing, began = TrainerStep({}, weight=0.0), time.monotonic()
                self.session.deliver(nothing, None, target=self.stepper.target)
                self.meter.exchanged(time.monotonic() - began)
        self._settle()

    def _step(self, group: Sequence[Any], following: Sequence[Sequence[Any]]) -> None:
        first, self._taken = self._taken, None
        if self.rows is not None:
            first = first or self.stepper.take(self.X, self.y, group[0])
            self.rows.make_ready(first[0])
            if following and self.rows.may_begin():
                self._taken = self.stepper.take(self.X, self.y, following[0][0])
                self.rows.begin(self._taken[0])
        if self.watcher is not None:
            self.watcher.weights(self._number, self.stepper.params)
        began = time.monotonic()
        found = self.stepper.step(self.X, self.y, group, first)
        if self.watcher is not None:
            self.watcher.gradients(self._number, found, float(found.rows))
        computed = time.monotonic()
        self.meter.computed(found, computed - began)
        self._deliver(found, following)
        rows = [self.stepper.params[name] for name in self.stepper.ids]
        self.meter.exchanged(time.monotonic() - computed, rows)

    def _deliver(self, found: Computed, following: Sequence[Sequence[Any]]) -> None:
        """Deliver what was computed, and read what the next step needs."""
        session = self.session
        if found.loss_sum is not None:
            session.loss_sum = (session.loss_sum or 0.0) + found.loss_sum
        session.rows += found.rows
        if self._first[1] < FIRST_ROWS:
            self._first = first_batches(self._first, found.loss_sum, found.rows)
        weight = float(found.rows) if self.plan.bsp else 1.0
        given = TrainerStep(found.arrays, weight, found.of_tables, of=found.kind)
        if self.rows is not None:
            if following and self._taken is None:
                self._taken = self.stepper.take(self.X, self.y, following[0][0])
            self.rows.deliver(given, self._taken and self._taken[0])
        elif self.plan.read_ahead:
            rows = [one.copied() for one in found.of_tables]
            given = given._replace(arrays=self._copied(found.arrays), rows=rows)
            self._settle()
            deliver = partial(self.session.deliver, given, target=self.stepper.target)
            deadline = Deadline(None, f"a push of trainer {self.session.rank}")
            # Delivered, and the next parameters read, beside the next computation.
            self._under_way = self.background.submit(deliver, deadline, tick=True)
            self.stepper.swap()
        else:
            session.deliver(given, None, target=self.stepper.target)

    def _copied(self, arrays: Mapping[int, Array]) -> dict[int, Array]:
        """Return copies: the user's function may write to its arrays at the next step."""
        copies, others = self._copies
        self._copies = others, copies
        for index, array in arrays.items():
            if index not in copies:
                copies[index] = np.empty_like(array)
            np.copyto(copies[index], array)
        return {index: copies[index] for index in arrays}

    def _settle(self) -> None:
        """Wait for the delivery under way, or raise what went wrong with it."""
        operation, self._under_way = self._under_way, None
        if operation is not None:
            operation.result()

    def _report(self, epoch: int, began: float) -> bool:
        """Tell of an epoch since the first one; return whether to stop."""
        session = self.session
        report = {
            "rank": session.rank,
            "rows": session.rows,
            "loss": session.loss_sum,
            "seconds": time.monotonic() - began,
            "lag": self.meter.lag,
            "clock": session.clock,
            "first": self._first,
            "records": [] if self.watcher is None else self.watcher.take(),
            **self.meter.report(),
        }
        session.loss_sum, session.rows = None, 0
        return session.report(epoch - self.plan.ended, report)

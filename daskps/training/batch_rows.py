"""Rows of the batches of a resident trainer: read while it computes, or with a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.wire.deadline import Deadline
from daskps.store.row_targets import pulled, with_rows
from daskps.training.row_ids import ids_of_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.caller.row_routes import RowsGiven
    from daskps.cluster.caller.targets import Target
    from daskps.cluster.caller.trainer_step import TrainerStep
    from daskps.training.overlap.background import Background
    from daskps.training.overlap.operation import Operation
    from daskps.training.steps import FitPlan, Stepper
    from daskps.typing import Array


class BatchRows:
    """Puts the rows of each batch into the parameters of its step.

    Under BSP its ids travel with the step before and its rows come with the answer.
    Otherwise they are read in the background while the step before is computed, and
    those that this step has changed are read again after it.

    Parameters
    ----------
    plan : FitPlan
        What to do.
    background : Background
        Reads beside the trainer's loop, at its place in the run.
    stepper : Stepper
        What computes the steps.
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


def _pushed(rows: Iterable[RowsGiven], name: str) -> Sequence[Array]:
    """Return the ids of a table that a step brings."""
    return [one.cut.ids for one in rows if one.cut.table.name == name]


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

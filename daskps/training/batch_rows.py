"""Rows of the batches of a resident trainer: read with the step before, or alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.store.row_targets import pulled, with_rows
from daskps.training.row_ids import ids_of_batch

if TYPE_CHECKING:
    from daskps.cluster.caller.session import Session
    from daskps.cluster.caller.trainer_step import TrainerStep
    from daskps.training.steps import FitPlan, Stepper
    from daskps.typing import Array


class BatchRows:
    """Puts the rows of each batch into the parameters of its step.

    Parameters
    ----------
    plan : FitPlan
        What to do.
    session : Session
        The trainer's place in the run.
    stepper : Stepper
        What computes the steps.
    per_epoch : int
        Its ticks in an epoch.
    """

    def __init__(
        self, plan: FitPlan, session: Session, stepper: Stepper, per_epoch: int
    ) -> None:
        self._plan, self._session, self._stepper = plan, session, stepper
        self._per_epoch = per_epoch
        self._arrays = stepper.params
        #: Whether the rows of the next batch came with the step before.
        self._came = False

    def make_ready(self, X: Any) -> None:
        """Read the rows of the batch that comes now, where they are not here."""
        if self._came:
            return
        ids = self._ids(X, self._session.clock)
        targets = pulled(self._session.meta, (), ids, None)
        self._session.read_all(targets, None)
        self._enter(ids, targets[-1].finish())

    def deliver(self, given: TrainerStep, following: Any) -> None:
        """Deliver a step, and read what the next one needs; None where none follows.

        Its ids travel with this step. Under BSP the answer comes after the round, so
        that these are exactly its rows; otherwise after this step, never older than it.
        """
        session, dense = self._session, self._stepper.target
        self._came = following is not None
        if following is None:
            session.deliver(given, None, target=dense)
            return
        ids = self._ids(following, session.clock + 1)
        targets = with_rows(session.meta, dense, ids, {})
        session.deliver(given, None, target=targets[0])
        session.read_all(targets[1:], None)  # of more rows than one call reads
        self._enter(ids, targets[-1].finish())

    def _ids(self, X: Any, clock: int) -> dict[str, Array]:
        epoch, rank = clock // self._per_epoch, self._session.rank
        place = (self._plan.seed, epoch, rank, clock)
        return ids_of_batch(self._session.meta, self._plan.rows, X, place)

    def _enter(self, ids: dict[str, Array], found: dict[str, Array]) -> None:
        # In fresh memory each time: a gradient may be what was read before.
        self._stepper.ids = ids
        self._stepper.params = {**self._arrays, **found}

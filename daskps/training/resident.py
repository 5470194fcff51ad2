"""The long-running loop of one trainer in `train`: no Dask task per round."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.training.blocks import rows_of
from daskps.training.data import n_rows
from daskps.training.steps import FitPlan, Stepper

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.session import Session

#: Seconds between two progress messages of a trainer.
PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class FitLoop:
    """The body of a trainer's task."""

    plan: FitPlan

    def __call__(self, session: Session, part: tuple[Any, Any]) -> None:
        """Train to the end of the last epoch, or until told to stop."""
        _Loop(self.plan, session, *rows_of(part)).run()


class _Loop:
    """One trainer's state between two steps."""

    def __init__(self, plan: FitPlan, session: Session, X: Any, y: Any) -> None:
        self.plan, self.session, self.X, self.y = plan, session, X, y
        self.n = n_rows(X)
        self.stepper = Stepper(plan, session.meta)
        self.target = self.stepper.target
        self.loss_sum: float | None = None
        self.rows = 0
        self._told = time.monotonic()

    def run(self) -> None:
        plan = self.plan
        per_epoch = plan.rounds if plan.bsp else plan.n_groups(self.n)
        if per_epoch == 0 and not plan.bsp:
            # No data: it takes no part, and each epoch is over for it at once.
            self.session.finish()
            for epoch in range(plan.epochs):
                if self._report(epoch, time.monotonic()):
                    break
            return
        first, skip = divmod(self.session.clock, max(per_epoch, 1))
        if first and not skip and self._report(first - 1, time.monotonic()):
            # Started again at an epoch's border: its report, or the verdict on it,
            # may have gone with its worker.
            return
        self.session.read(self.target, None)
        for epoch in range(first, plan.epochs):
            began = time.monotonic()
            self._epoch(epoch, skip, per_epoch)
            skip = 0
            if self._report(epoch, began):
                break

    def _epoch(self, epoch: int, skip: int, per_epoch: int) -> None:
        groups = self.plan.groups(self.n, epoch, self.session.rank)
        for number in range(skip, per_epoch):
            if number < len(groups):
                self._step(groups[number])
            else:
                # Under BSP only: no batch is left, so it sits the round out.
                self.session.deliver({}, None, weight=0.0, target=self.target)
            self._progress()

    def _step(self, group: Sequence[Any]) -> None:
        found = self.stepper.step(self.X, self.y, group)
        if found.loss_sum is not None:
            self.loss_sum = (self.loss_sum or 0.0) + found.loss_sum
        self.rows += found.rows
        self.session.deliver(
            found.arrays,
            None,
            kind=found.kind,
            weight=float(found.rows) if self.plan.bsp else 1.0,
            target=self.target,
        )

    def _progress(self) -> None:
        now = time.monotonic()
        if self.plan.progress and now - self._told > PROGRESS_SECONDS:
            self._told = now
            self.session.progress()

    def _report(self, epoch: int, began: float) -> bool:
        report = {
            "rank": self.session.rank,
            "rows": self.rows,
            "loss": self.loss_sum,
            "seconds": time.monotonic() - began,
            "lag": self.session.lag,
            "clock": self.session.clock,
        }
        self.loss_sum, self.rows, self.session.lag = None, 0, 0
        return self.session.report(epoch, report)

"""The long-running loop of one trainer in `train`: no Dask task per round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import funcname

from daskps import config, intake
from daskps.cluster.plans import MODEL, Target, load_rules, whole
from daskps.errors import PushRejectedError
from daskps.training.data import batches, n_rows
from daskps.training.local import LocalModel

if TYPE_CHECKING:
    from daskps.cluster.session import Session

Array = np.ndarray[Any, np.dtype[Any]]
#: Seconds between two progress messages of rank 0.
PROGRESS_SECONDS = 0.1


@dataclass(frozen=True)
class FitLoop:
    """Everything a trainer of `train` needs but its data; travels once."""

    gradient: Callable[..., Any]
    epochs: int
    batch_size: int
    #: Batches per synchronisation; 0 for the whole epoch.
    sync_every: int
    average_models: bool
    shuffle: bool
    seed: int
    bsp: bool
    #: Rounds of one epoch under BSP: that of the rank with the most.
    rounds: int
    progress: bool

    def __call__(self, session: Session, part: tuple[Any, Any]) -> None:
        """Train to the end of the last epoch, or until told to stop."""
        _Loop(self, session, *part).run()


class _Loop:
    """One trainer's state between two steps."""

    def __init__(self, plan: FitLoop, session: Session, X: Any, y: Any) -> None:
        self.plan, self.session, self.X, self.y = plan, session, X, y
        self.n = n_rows(X)
        settings = config.load()
        self.finite = settings.check_finite
        # One buffer for the whole run: fresh memory costs more than the copy into it.
        self.target: Target = whole(session.meta)
        self.params: dict[str, Array] = self.target.finish()
        self.local: LocalModel | None = None
        if plan.sync_every != 1 or plan.average_models:
            rules = load_rules(session.meta)
            layout = session.meta.layout
            self.local = LocalModel(layout, rules, str(settings.cache))
        self.loss_sum = 0.0
        self.rows = 0
        self.has_loss = False
        self._told = time.monotonic()

    def run(self) -> None:
        per_epoch = self.plan.rounds if self.plan.bsp else self._n_groups()
        if per_epoch == 0 and not self.plan.bsp:
            # No data: it takes no part, and each epoch is over for it at once.
            self.session.finish()
            for epoch in range(self.plan.epochs):
                if self._report(epoch, time.monotonic()):
                    break
            return
        first, skip = divmod(self.session.clock, max(per_epoch, 1))
        if first and not skip and self._report(first - 1, time.monotonic()):
            # Started again at an epoch's border: its report, or the verdict on it,
            # may have gone with its worker.
            return
        self.session.read(self.target, None)
        for epoch in range(first, self.plan.epochs):
            began = time.monotonic()
            self._epoch(epoch, skip, per_epoch)
            skip = 0
            if self._report(epoch, began):
                break

    def _n_groups(self) -> int:
        n_batches = -(-self.n // self.plan.batch_size)
        return -(-n_batches // (self.plan.sync_every or max(n_batches, 1)))

    def _groups(self, epoch: int) -> Iterator[list[Any]]:
        plan = self.plan
        rows = list(
            batches(
                self.n,
                plan.batch_size,
                seed=plan.seed,
                epoch=epoch,
                rank=self.session.rank,
                shuffle=plan.shuffle,
            )
        )
        size = plan.sync_every or max(len(rows), 1)
        return (rows[i : i + size] for i in range(0, len(rows), size))

    def _epoch(self, epoch: int, skip: int, per_epoch: int) -> None:
        groups = self._groups(epoch)
        for number in range(per_epoch):
            group = next(groups, None)
            if number < skip:
                continue
            if group is None:
                # Under BSP only: no batch is left, so it sits the round out.
                self.session.deliver({}, None, weight=0.0, target=self.target)
            elif self.local is None:
                self._step(group[0])
            else:
                self._local_steps(self.local, group)
            self._progress()

    def _step(self, batch: Any) -> None:
        grads, rows = self._gradient(batch)
        weight = float(rows) if self.plan.bsp else 1.0
        self.session.deliver(grads, None, weight=weight, target=self.target)

    def _local_steps(self, local: LocalModel, group: list[Any]) -> None:
        """Update the own copy batch by batch, then deliver what it amounts to."""
        local.reset()
        sums: dict[int, Array] = {}
        total = 0
        for number, batch in enumerate(group):
            grads, rows = self._gradient(batch)
            total += rows
            for index, grad in grads.items():
                if index in sums:
                    sums[index] += grad
                else:
                    sums[index] = grad.copy()
            if self.plan.average_models or number < len(group) - 1:
                local.update(self.params, grads)
        weight = float(total) if self.plan.bsp else 1.0
        if not self.plan.average_models:
            self.session.deliver(sums, None, weight=weight, target=self.target)
            return
        named = {self.session.meta.layout.parameters[i].name for i in sums}
        models = self._checked({n: self.params[n] for n in named}, model=True)
        self.session.deliver(
            {i: a.copy() for i, a in models.items()},
            None,
            kind=MODEL,
            weight=weight,
            target=self.target,
        )

    def _gradient(self, batch: Any) -> tuple[dict[int, Array], int]:
        X = _take(self.X, batch)
        y = None if self.y is None else _take(self.y, batch)
        loss, grads = self._split(self.plan.gradient(self.params, X, y))
        rows = n_rows(X)
        if loss is not None:
            self.loss_sum += loss * rows
            self.has_loss = True
        self.rows += rows
        return self._checked(grads, model=False), rows

    def _split(self, result: Any) -> tuple[float | None, Mapping[str, Any]]:
        """Return loss and gradients of what the user's function returned."""
        loss, grads = None, result
        if isinstance(result, tuple) and len(result) == 2:
            loss, grads = result
        if not isinstance(grads, Mapping):
            raise self._wrong(type(grads).__name__)
        if loss is None:
            return None, grads
        try:
            return float(loss), grads
        except (TypeError, ValueError):
            raise self._wrong(f"the loss {loss!r:.60}") from None

    def _wrong(self, found: str) -> PushRejectedError:
        return PushRejectedError(
            f"gradient {funcname(self.plan.gradient)} returned {found}; return a "
            f"mapping of parameter names to arrays, or (loss, mapping) with a loss "
            f"that is one number"
        )

    def _checked(self, grads: Any, *, model: bool) -> dict[int, Array]:
        meta = self.session.meta
        arrays = intake.gradients(
            meta.layout, meta.optimizers, grads, finite=self.finite, model=model
        )
        return {
            # What is read after the push lands in `params`: a gradient that is one
            # of them, or a view, would change on its way.
            i: a.copy() if self._is_ours(a) else a
            for i, a in arrays.items()
        }

    def _is_ours(self, array: Array) -> bool:
        return any(np.may_share_memory(array, p) for p in self.params.values())

    def _progress(self) -> None:
        now = time.monotonic()
        if self.plan.progress and now - self._told > PROGRESS_SECONDS:
            self._told = now
            self.session.progress()

    def _report(self, epoch: int, began: float) -> bool:
        report = {
            "rank": self.session.rank,
            "rows": self.rows,
            "loss": self.loss_sum if self.has_loss else None,
            "seconds": time.monotonic() - began,
            "lag": self.session.lag,
            "clock": self.session.clock,
        }
        self.loss_sum, self.rows, self.session.lag = 0.0, 0, 0
        return self.session.report(epoch, report)


def _take(X: Any, batch: Any) -> Any:
    return X.iloc[batch] if hasattr(X, "iloc") else X[batch]

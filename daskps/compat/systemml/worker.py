"""The worker of `paramserv`, and the function by which its server changes the model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.compat.systemml.structure import Structure
    from daskps.training.trainer import Trainer
    from daskps.typing import Array

logger = logging.getLogger("daskps.compat.systemml")
#: The one parameter of the store: the model's numbers, and maybe nothing after them.
MODEL = "model"


@dataclass(frozen=True)
class Aggregate:
    """The server's function, on vectors.

    Parameters
    ----------
    agg : callable
        ``agg(model, hyperparams, gradients) -> model``.
    hyperparams : object
        Handed through.
    model, gradients : Structure
        The matrices that the vectors hold.
    """

    agg: Callable[..., Any]
    hyperparams: Any
    model: Structure
    gradients: Structure

    def __call__(self, name: str, weights: Array, gradient: Array, step: int) -> Array:
        """Return the new model, as an update rule does."""
        gradients = self.gradients.unflat(gradient)
        made = self.apply(self.model.unflat(weights), gradients)
        found = np.zeros_like(weights)
        found[: self.model.size] = self.model.flat(made)
        return found

    def apply(self, model: Any, gradients: Any) -> Any:
        """Return what the function makes of a model."""
        return self.agg(model, self.hyperparams, gradients)


@dataclass(frozen=True)
class Plan:
    """The functions and settings of all workers."""

    upd: Callable[..., Any]
    aggregate: Aggregate
    size: int
    epochs: int
    batch_size: int
    #: Batches between two exchanges; 0 for those of an epoch.
    every: int
    bsp: bool
    average: bool
    #: Whether what a worker sends counts by its rows.
    weighting: bool
    #: Rows of the largest part, and of an average one.
    most_rows: int
    mean_rows: float
    val: Callable[..., Any] | None
    val_data: tuple[Any, Any] | None

    def groups(self, n: int) -> list[list[slice]]:
        """Return the batches of each exchange of an epoch of `n` rows."""
        size = self.batch_size
        batches = [slice(i, min(i + size, n)) for i in range(0, n, size)]
        every = self.every or max(len(batches), 1)
        return [batches[i : i + every] for i in range(0, len(batches), every)]

    # -- a worker ----------------------------------------------------------------

    def work(self, trainer: Trainer, part: tuple[Any, Any]) -> None:
        """Go through all epochs; begins where one that was lost has come to."""
        features, labels = part
        groups = self.groups(len(features))
        # In rounds all have as many, and those without a batch sit out.
        per_epoch = len(self.groups(self.most_rows)) if self.bsp else len(groups)
        model = trainer.pull()[MODEL]
        for clock in range(trainer.clock, self.epochs * per_epoch):
            epoch, at = divmod(clock, per_epoch)
            sent = None
            if at < len(groups):
                sent = self._computed(model, features, labels, groups[at])
            model = self._exchanged(trainer, sent, len(features))
            if at + 1 == per_epoch and trainer.rank == 0:
                self._validate(model, epoch)

    def _computed(
        self, flat: Array, features: Any, labels: Any, group: list[slice]
    ) -> Array:
        """Return what the batches of a group amount to: gradients, or a model."""
        server = self.aggregate
        model = server.model.unflat(flat)
        total = np.zeros(server.gradients.size)
        for number, rows in enumerate(group):
            gradients = self.upd(
                model, server.hyperparams, features[rows], labels[rows]
            )
            total += server.gradients.flat(gradients)
            if self.average or number + 1 < len(group):
                made = server.apply(model, gradients)
                model = server.model.unflat(server.model.flat(made))
        return server.model.flat(model) if self.average else total

    def _exchanged(self, trainer: Trainer, sent: Array | None, n: int) -> Array:
        """Send what was computed; return the model after that."""
        if sent is None:
            trainer.tick()
            return trainer.pull()[MODEL]
        vector = np.zeros(self.size)
        vector[: len(sent)] = sent
        share = n / self.mean_rows if self.weighting else 1.0
        if self.average:
            trainer.assign({MODEL: vector}, weight=share)
            return trainer.pull()[MODEL]
        return trainer.pushpull({MODEL: vector * share})[MODEL]

    def _validate(self, flat: Array, epoch: int) -> None:
        """Log how good the model is after an epoch, as their server does."""
        if self.val is None or self.val_data is None:
            return
        server = self.aggregate
        loss, accuracy = self.val(
            server.model.unflat(flat), server.hyperparams, *self.val_data
        )
        logger.info("epoch %d: val_loss %g, val_accuracy %g", epoch + 1, loss, accuracy)

"""Options of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import daskps
from daskps.optim import SGD, Adagrad, Adam, AdamW, RMSprop, Rule

RULES: dict[str, Rule] = {
    "sgd": SGD(0.5),
    "adagrad": Adagrad(0.1),
    "rmsprop": RMSprop(0.005),
    "adam": Adam(0.01),
    "adamw": AdamW(0.01),
}
POLICIES = ("bsp", "ssp", "asp")


class DemoError(Exception):
    """The demo cannot run as asked; the text is one line for the user."""


@dataclass(frozen=True)
class Options:
    """The options of ``daskps demo``, as they are for the digits where none is given."""

    scheduler: str | None = None
    sync: str = "bsp"
    staleness: int | None = None
    trainers: int | None = None
    epochs: int = 20
    batch_size: int = 32
    optimizer: str = "sgd"
    seed: int = 0
    task: str = "digits"

    @property
    def policy(self) -> Any:
        """The argument ``sync=`` of `daskps.train`."""
        if self.staleness is None:
            return self.sync
        return daskps.SSP(self.staleness)


#: The defaults of each task.
TASKS = {
    "digits": Options(),
    "words": Options(
        task="words", sync="asp", epochs=5, batch_size=512, optimizer="adagrad"
    ),
}

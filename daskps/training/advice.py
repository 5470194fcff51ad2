"""Advice that a run logs when it looks like a mistake."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from daskps.cluster.protocol.deadline import Deadline
from daskps.errors import DaskPSError
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.shard_map import StoreMap

logger = logging.getLogger(__name__)
#: How long the end of a run waits for advice about it.
ADVICE_SECONDS = 5.0
#: How much worse than its best a loss is that is said.
MUCH_WORSE = 1000.0
#: Losses below this share of the first one are as good as none: they are of the size
#: of rounding errors, which may well grow a thousandfold.
NOTHING = 1e-6
#: Names that are said, before the rest is counted.
_MOST_NAMES = 5


class Losses:
    """Looks at the losses of a run for one that is far worse than its best."""

    def __init__(self) -> None:
        self._first = 0.0
        self._best = math.inf
        self._said = False

    def look(
        self, epoch: int, loss: float | None, first: float | None = None
    ) -> str | None:
        """Return what is to be said of an epoch's loss, once in a run.

        Parameters
        ----------
        epoch : int
            Number of the epoch.
        loss : float or None
            Its mean loss, if it has one.
        first : float, optional
            The loss that the run began with, before it had changed much.

        Returns
        -------
        str or None
            The text; None where all is well, or all was said.
        """
        if loss is None:
            return None
        self._note(first)
        best = max(self._best, NOTHING * self._first)
        self._note(loss)
        if self._said or not MUCH_WORSE * best < loss < math.inf:
            return None
        self._said = True
        return (
            f"the loss of epoch {epoch} is {loss:.3g}, and was {best:.3g} before: the "
            f"run diverges. Are the gradients means over the batch, and not sums? "
            f"If they are, try a smaller learning rate"
        )

    def _note(self, loss: float | None) -> None:
        # Of losses below zero a multiple says nothing.
        if loss is not None and 0 < loss < math.inf:
            self._first = self._first or loss
            self._best = min(self._best, loss)


def first_loss(reports: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean loss over the first rows of all ranks; None where nobody knows.

    Parameters
    ----------
    reports : sequence of mapping
        Reports of the ranks about the first epoch, each with `first`: the sum of
        losses and the number of rows of its first batches.

    Returns
    -------
    float or None
        The mean over these rows.
    """
    rows = sum(report["first"][1] for report in reports)
    return sum(report["first"][0] for report in reports) / rows if rows else None


async def find_unnamed(
    attached: Callable[[], Awaitable[ShardClient]], run: int, *, everything: bool
) -> str:
    """Return what is said of what a run that has ended well has not changed, or "".

    Parameters
    ----------
    attached : callable
        Returns the store, which may have gone since.
    run : int
        The run.
    everything : bool
        Whether it is also said where nothing was changed.

    Returns
    -------
    str
        With the names of parameters and tables that have an update rule; "" where
        nobody can be asked.
    """
    deadline = Deadline(ADVICE_SECONDS, "what a run has changed")
    try:
        shards = await attached()
        rows = await shards.control("changed", deadline, run=run)
    except (DaskPSError, OSError) as error:
        # The run has ended well, whatever became of its store since.
        logger.info("could not ask what run %d has changed: %r", run, error)
        return ""
    meta = shards.meta
    names = unnamed(meta, [found for of in rows for found in of])
    if names and (everything or len(names) < len(meta.optimizers)):
        return unnamed_text(meta.name, names)
    return ""


def unnamed(meta: StoreMap, changed: Sequence[Sequence[int] | None]) -> list[str]:
    """Return the parameters and tables with an update rule that a run has not changed.

    Parameters
    ----------
    meta : StoreMap
        The store.
    changed : sequence
        For each shard what it has changed in the run, by index; None where it does not
        know.

    Returns
    -------
    list of str
        Their names; none where one shard does not know.
    """
    known = [found for found in changed if found is not None]
    if len(known) < len(changed):
        return []
    layout = meta.layout
    named = {index for found in known for index in found}
    named |= {p.index for p in layout.parameters if not p.size}
    return [
        name
        for index, name in enumerate(layout.names)
        if index in meta.optimizers and index not in named
    ]


def unnamed_text(name: str, parameters: Sequence[str]) -> str:
    """Return what is said of parameters that no gradient of a run has named."""
    shown = ", ".join(map(repr, parameters[:_MOST_NAMES]))
    if (more := len(parameters) - _MOST_NAMES) > 0:
        shown += f" and {counted(more, 'other')}"
    return (
        f"no gradient of the run on store {name!r} has named {shown}, which stayed as "
        f"before; return gradients under these names too, unless they are not to be "
        f"trained"
    )

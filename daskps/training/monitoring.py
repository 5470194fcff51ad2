"""Statistics of weights and gradients, step by step: what to watch, and who does it."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.layout.arrays import compute_dtype
from daskps.store.arguments import whole
from daskps.training.allreduce import brought_by
from daskps.training.functions import check_function
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.session import Session
    from daskps.layout.parameters import Parameter
    from daskps.typing import Array

#: The suffix that makes the name of a gradient of the name of a parameter.
OF_GRADIENT = ":gradient"
#: Number of the monitor, step, name and value.
Noted = tuple[int, int, str, float]


def rms(array: Array) -> float:
    """Return the norm over the square root of the number of elements, as MXNet does."""
    if not array.size:
        return 0.0
    values = np.asarray(array, np.float64)
    return float(np.linalg.norm(values.reshape(-1)) / math.sqrt(values.size))


class Monitor:
    """Watch weights and reduced gradients of a run of `train`, as MXNet's monitor does.

    It is one of the `callbacks`. Trainer 0 works the statistics out, so that no array
    comes here; on the steps that are watched the trainers reduce their gradients once
    more, which no other step costs anything. Resident trainers only, and `reduce`
    "mean" or "sum".

    Parameters
    ----------
    interval : int
        Watch every so many steps of the store.
    stat : callable, optional
        ``stat(array) -> float`` of a parameter or its gradient. By default the norm
        over the square root of the number of elements.
    pattern : str
        Names of parameters to watch, with "*" and "?".

    Attributes
    ----------
    records : list of (int, str, float)
        Step, name and value, in this order, of all epochs that have ended: of each
        parameter the weights that a step began with, and as "name:gradient" what the
        gradients came to that it ended with, before a codec. Under SSP and ASP both are
        those of trainer 0, at its clocks. Rows of tables are not watched, nor the mean
        of models. Of an epoch in which trainer 0 lost its worker, steps before that are
        not there.

    Raises
    ------
    ValueError, TypeError
        For an interval below 1, and for a `stat` or `pattern` that is none.

    Examples
    --------
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> store = daskps.create({"w": np.ones(4)}, optimizer=daskps.optim.SGD(1.0))
    >>> monitor = daskps.Monitor(interval=2)
    >>> run = daskps.train(
    ...     store, gradient, np.eye(4), trainers=2, batch_size=1, epochs=2,
    ...     shuffle=False, callbacks=[monitor],
    ... )
    >>> [(step, name, round(value, 3)) for step, name, value in monitor.records]
    [(0, 'w', 1.0), (0, 'w:gradient', 0.354), (2, 'w', 0.5), (2, 'w:gradient', 0.354)]
    """

    def __init__(
        self,
        interval: int = 1,
        stat: Callable[[Array], float] | None = None,
        pattern: str = "*",
    ) -> None:
        self.interval = whole(interval, "interval", least=1)
        if stat is not None:
            check_function("stat", stat, "stat(array)")
        if not isinstance(pattern, str):
            raise TypeError(
                f"pattern is a text such as 'layer*', found {pattern!r:.80}"
            )
        self.stat, self.pattern = stat, pattern
        self.records: list[tuple[int, str, float]] = []

    def __repr__(self) -> str:
        return (
            f"daskps.Monitor(interval={self.interval}, pattern={self.pattern!r}): "
            f"{len(self.records)} records"
        )


def watches_of(monitors: Iterable[Monitor]) -> tuple[Monitor, ...]:
    """Return what trainers need of monitors: all but their records."""
    return tuple(Monitor(one.interval, one.stat, one.pattern) for one in monitors)


def _value(watch: Monitor, array: Array) -> float:
    """Return the statistic of an array, or refuse what is no number."""
    if watch.stat is None:
        return rms(array)
    with user_code("stat of Monitor"):
        found = watch.stat(array)
    try:
        return float(found)
    except (TypeError, ValueError):
        raise TypeError(
            f"stat of Monitor returned {found!r:.80}; return one number"
        ) from None


class Watcher:
    """Watches the steps of one trainer.

    Parameters
    ----------
    watches : sequence of Monitor
        The statistics that are asked for, without records.
    session : Session
        The trainer's place in the run.
    mean : bool
        Whether gradients are averaged, and not summed up.
    models : bool
        Whether trainers deliver models, and no gradients.
    """

    def __init__(
        self,
        watches: Sequence[Monitor],
        session: Session,
        *,
        mean: bool,
        models: bool,
    ) -> None:
        self._watches, self._session = watches, session
        self._mean, self._models = mean, models
        self._parameters = session.meta.layout.parameters
        self._is_first = session.rank == 0
        #: Values since the last call of `take`.
        self._found: list[Noted] = []

    def take(self) -> list[Noted]:
        """Return the values since the last call."""
        found, self._found = self._found, []
        return found

    def _due(self, step: int) -> list[tuple[int, Monitor]]:
        return [(i, w) for i, w in enumerate(self._watches) if step % w.interval == 0]

    def _named(self, watch: Monitor) -> Iterator[Parameter]:
        return (p for p in self._parameters if fnmatchcase(p.name, watch.pattern))

    def weights(self, step: int, params: Mapping[str, Array]) -> None:
        """Look at the weights that a step begins with."""
        if not self._is_first:
            return
        for number, watch in self._due(step):
            for p in self._named(watch):
                self._note((number, watch), step, p.name, params[p.name])

    def gradients(self, step: int, computed: Computed | None, weight: float) -> None:
        """Look at what the gradients of a step come to; None where there are none here.

        Under BSP all trainers call it at each step, before they deliver.
        """
        due = self._due(step)
        # Also who has none joins in what the others reduce, or they would wait for it.
        if not due or self._models:
            return
        arrays = {} if computed is None else dict(computed.arrays)
        if self._session.bsp:
            named = {p.index: p for _, watch in due for p in self._named(watch)}
            arrays = self._reduced(named, arrays, weight) if named else {}
        if self._is_first:
            for number, watch in due:
                for p in self._named(watch):
                    if p.index in arrays:
                        array = arrays[p.index].reshape(p.shape)
                        self._note((number, watch), step, p.name + OF_GRADIENT, array)

    def _reduced(
        self, named: Mapping[int, Parameter], arrays: Mapping[int, Array], weight: float
    ) -> dict[int, Array]:
        """Return what the gradients of all trainers come to, by parameter index."""
        given: dict[str, Any] = {}
        weights = np.zeros(len(named))
        for at, (index, p) in enumerate(named.items()):
            if weight and index in arrays:
                array, weights[at] = arrays[index], weight
                scale = array.dtype.type(weight if self._mean else 1.0)
                given[str(index)] = array * scale
            else:
                given[str(index)] = np.zeros(p.size, compute_dtype(p.dtype))
        brought, flats = brought_by({"weights": weights, **given}, "sum")
        totals, *sums = self._session.allreduce(brought, flats, None)
        found = {}
        for index, total, array in zip(named, totals, sums, strict=True):
            if total:  # else nobody has named it
                found[index] = array / array.dtype.type(total) if self._mean else array
        return found

    def _note(
        self, by: tuple[int, Monitor], step: int, name: str, array: Array
    ) -> None:
        number, watch = by
        self._found.append((number, step, name, _value(watch, array)))

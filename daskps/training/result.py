"""Status and result of a run, and their text and tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.layout.arrays import counted
from daskps.store.repr import html_tables
from daskps.training.explain import explain
from daskps.training.stats import TrainStats, lines_of
from daskps.training.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.epochs import Epochs
    from daskps.typing import Array

#: Weights that a repr names, before it counts the rest.
_MOST_WEIGHTS = 4


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of a run.

    `epoch` is its number, from 0, over all runs of the store; `loss` the mean over the
    epoch's rows of what `gradient` returned, None where it returned none; `seconds` that
    of the slowest trainer; `staleness` the largest number of clocks a live trainer was
    behind one that pulled. Of an epoch that a run has gone on with `since` is the round
    it has begun with: loss and seconds are of the rows from there on. `step` is the number
    of rounds that the store has had at its end since its epoch 0, or where the run was
    told to stop within it.
    """

    epoch: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float
    staleness: int
    since: int = 0
    step: int = 0


@dataclass
class RunStatus:
    """The status of a run, which callbacks are called with.

    `first` is the epoch of the store with which the run begins, `epochs` how many the
    store will have had at its end; `rounds` is how many rounds there will be, 0 where
    nobody knows; `clock` that of the trainer that is furthest, `slowest` that of the one
    furthest behind; `loss` the mean over the epoch so far, None where it is not known.
    """

    store: Any
    epochs: int
    first: int = 0
    rounds: int = 0
    clock: int = 0
    slowest: int = 0
    loss: float | None = None
    history: list[Epoch] = field(default_factory=list)

    @property
    def following(self) -> int:
        """The epoch after those that have ended."""
        return self.history[-1].epoch + 1 if self.history else self.first

    def history_at(self, end: Epochs) -> list[Epoch]:
        """Return the epochs that had ended there.

        One that ended while the run did, and of whose loss nobody has heard, has none.
        """
        found = [entry for entry in self.history if entry.epoch < end.ended]
        for epoch in range(self.following, end.ended):
            step = (epoch + 1) * end.per_epoch
            found.append(Epoch(epoch, None, {}, 0.0, 0, 0, step))
        return found

    def advance(self, clock: int, slowest: int) -> bool:
        """Note how far the trainers are; return whether that is news."""
        news = clock > self.clock or slowest > self.slowest
        self.clock = max(self.clock, clock)
        self.slowest = max(self.slowest, slowest)
        return news


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """The result of a run; in a notebook it shows its history as a table.

    Parameters
    ----------
    weights : dict of str to ndarray
        The store's parameters at the end.
    history : list of Epoch
        One entry per epoch: loss, metrics, seconds, staleness.
    version : int
        Smallest version of the shards at the end.
    execution : str
        How it was executed.
    stats : TrainStats
        Bytes sent and received, seconds of compute, delivery and waiting of each
        trainer, how old gradients were, and what was lost or sent again.

    Examples
    --------
    >>> def gradient(params, X, y):
    ...     error = X @ params["w"] - y
    ...     return np.mean(error**2) / 2, {"w": X.T @ error / len(y)}
    >>> X = np.eye(4)
    >>> store = daskps.create({"w": np.zeros(4)}, optimizer=daskps.optim.SGD(1.0))
    >>> result = daskps.train(store, gradient, X, np.ones(4), epochs=2)
    >>> result
    <daskps.TrainResult: 2 epochs, 2 rounds, version 2, resident, ... s
      loss 0.5 -> 0.2812 (best 0.2812 in epoch 1)
      weights: w (4,) float64
      sent 128 B, received 192 B; ... s compute, ... s delivery, ... s waiting>
    >>> result.version, [round(epoch.loss, 3) for epoch in result.history]
    (2, [0.5, 0.281])
    >>> result.stats.lost_trainers
    0
    """

    weights: dict[str, Array]
    history: list[Epoch]
    version: int
    execution: str
    stats: TrainStats

    def explain(self) -> str:
        """Say in words where the time of the trainers went, and what would help.

        It says whether computing, calls or bytes bound the run, and names a trainer
        that is much slower than the others, with what it is slow at, and a shard that
        has much more than the others.

        Returns
        -------
        str
            Some lines, which a notebook shows as they are.

        Examples
        --------
        >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
        >>> store = daskps.create({"w": np.zeros(4)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.train(store, gradient, np.eye(4), trainers=2).explain()
        2 trainers, 1 round: ...% of their time computing, ...% delivering, ...% waiting.
        ...
        """
        return explain(self.stats)

    def timeline(self) -> Timeline:
        """Return compute, delivery and waiting of each trainer over the epochs.

        Returns
        -------
        Timeline
            Shown as a picture in a notebook; `save` writes it as a trace.

        Examples
        --------
        >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
        >>> store = daskps.create({"w": np.zeros(4)}, optimizer=daskps.optim.SGD(1.0))
        >>> daskps.train(store, gradient, np.eye(4), trainers=2).timeline()
        <daskps.Timeline: 2 trainers, 1 epoch, ... s>
        """
        return Timeline(self.stats.epochs)

    def to_frame(self) -> Any:
        """Return the history as a DataFrame of pandas.

        Returns
        -------
        pandas.DataFrame
            One row per epoch: loss, each metric, seconds, staleness.

        Raises
        ------
        ImportError
            Where pandas is not installed.

        Examples
        --------
        >>> def gradient(params, X, y):
        ...     return np.mean((params["w"] - y) ** 2), {"w": params["w"] - y.mean()}
        >>> store = daskps.create({"w": 0.0}, optimizer=daskps.optim.SGD(0.5))
        >>> rows = np.ones(8)
        >>> result = daskps.train(store, gradient, rows, rows, epochs=3, trainers=1)
        >>> result.to_frame()[["loss", "staleness"]]
                 loss  staleness
        epoch
        0      1.0000          0
        1      0.2500          0
        2      0.0625          0
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                "TrainResult.to_frame needs pandas: pip install pandas; `history` has "
                "the same as a list"
            ) from error
        rows = [dict(zip(self._heads, row, strict=True)) for row in self._rows()]
        return pd.DataFrame(rows, columns=self._heads).set_index("epoch")

    def plot(self, ax: Any = None) -> Any:
        """Draw loss and metrics over the epochs, with matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to; by default the axes of a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            With the loss; where there are metrics, they have an axis at its right.

        Raises
        ------
        ImportError
            Where matplotlib is not installed.

        Examples
        --------
        >>> def gradient(params, X, y):
        ...     return np.mean((params["w"] - y) ** 2), {"w": params["w"] - y.mean()}
        >>> store = daskps.create({"w": 0.0}, optimizer=daskps.optim.SGD(0.5))
        >>> rows = np.ones(8)
        >>> result = daskps.train(store, gradient, rows, rows, epochs=3, trainers=1)
        >>> result.plot().lines[0].get_ydata()
        array([1.    , 0.25  , 0.0625])
        """
        if ax is None:
            try:
                from matplotlib import pyplot as plt
            except ImportError as error:
                raise ImportError(
                    "TrainResult.plot needs matplotlib: pip install matplotlib; "
                    "`history` has the numbers"
                ) from error
            _, ax = plt.subplots()
        numbers = [entry.epoch for entry in self.history]
        ax.set(xlabel="epoch", ylabel="loss")
        ax.xaxis.get_major_locator().set_params(integer=True)
        losses = [np.nan if e.loss is None else e.loss for e in self.history]
        ax.plot(numbers, losses, label="loss")
        if self._metrics:
            right = ax.twinx()
            for name in self._metrics:
                values = [entry.metrics.get(name, np.nan) for entry in self.history]
                right.plot(numbers, values, "--", label=name)
            # Else the colours of both axes begin with the same one.
            for line, number in zip(right.lines, range(1, 10), strict=False):
                line.set_color(f"C{number}")
            # It would look for room beside the metrics alone, and hide the loss.
            right.legend(handles=[*ax.lines, *right.lines], loc="center right")
        return ax

    @property
    def _metrics(self) -> list[str]:
        """Names of the metrics, in the order in which they were met."""
        return list(dict.fromkeys(n for entry in self.history for n in entry.metrics))

    @property
    def _heads(self) -> list[str]:
        return ["epoch", "loss", *self._metrics, "seconds", "staleness"]

    def _rows(self) -> Iterator[list[Any]]:
        for e in self.history:
            metrics = [e.metrics.get(name) for name in self._metrics]
            yield [e.epoch, e.loss, *metrics, e.seconds, e.staleness]

    def __repr__(self) -> str:
        return "<" + "\n  ".join([self._line(), *self._details()]) + ">"

    def _repr_html_(self) -> str:
        rows = [[_text(value) for value in row] for row in self._rows()]
        table = self._heads, rows
        return html_tables(self._line(), table, notes=self._details())

    def _line(self) -> str:
        """Return what it is, in one line."""
        seconds = sum(entry.seconds for entry in self.history)
        n, rounds = len(self.history), self.stats.clock
        return (
            f"daskps.TrainResult: {counted(n, 'epoch')}, {counted(rounds, 'round')}, "
            f"version {self.version}, {self.execution}, {seconds:.2f} s"
        )

    def _details(self) -> Iterator[str]:
        """Give the lines below it: what became of the loss, the weights, trouble."""
        if curves := [*self._curves()]:
            yield ", ".join(curves)
        named = [f"{n} {w.shape} {w.dtype}" for n, w in self.weights.items()]
        if more := named[_MOST_WEIGHTS:]:
            named[_MOST_WEIGHTS:] = [f"{len(more)} more"]
        yield f"weights: {', '.join(named) or 'none'}"
        for entry in self.history:
            if entry.since:
                yield f"epoch {entry.epoch}: from round {entry.since} on"
        yield from lines_of(self.stats)

    def _curves(self) -> Iterator[str]:
        """Give first, last and best loss, and the first and last of each metric."""
        found = [(e.loss, e.epoch) for e in self.history if e.loss is not None]
        if found:
            (first, _), (last, _) = found[0], found[-1]
            # Any number is better than NaN.
            best, epoch = min(found, key=lambda row: (math.isnan(row[0]), *row))
            yield f"loss {first:.4g} -> {last:.4g} (best {best:.4g} in epoch {epoch})"
        for name in self._metrics:
            values = [e.metrics[name] for e in self.history if name in e.metrics]
            yield f"{name} {values[0]:.4g} -> {values[-1]:.4g}"


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""A run of `train` over time: compute, delivery and waiting of each trainer by epoch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.layout.arrays import counted

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

#: The parts of an epoch, and their colours in the picture.
_PARTS = {"compute": "#4c78a8", "delivery": "#f58518", "waiting": "#dddddd"}
#: Trainers that the picture shows at most, bars of each, and its size in pixels.
_MOST_RANKS, _MOST_BARS, _WIDTH, _HEIGHT = 32, 64, 640, 14
_MICROSECONDS = 1e6


class EpochTimes(NamedTuple):
    """Seconds that a trainer has spent on an epoch, and when it began with that."""

    rank: int
    epoch: int
    begin: float
    compute: float
    delivery: float
    waiting: float

    def parts(self) -> Iterator[tuple[str, float, float]]:
        """Give name, begin and length of each part, one after the other."""
        begin = self.begin
        for name, seconds in zip(_PARTS, self[3:], strict=True):
            yield name, begin, seconds
            begin += seconds


@dataclass(frozen=True, slots=True)
class Timeline:
    """Compute, delivery and waiting of each trainer over the epochs of a run.

    A notebook shows it as a picture; :meth:`save` writes a trace for Perfetto or
    ``chrome://tracing``. Nobody notes when each batch was computed: of an epoch the
    three parts are shown one after the other. Where there are many epochs, some that
    follow each other are shown as one, with the number of the first.

    Parameters
    ----------
    epochs : tuple of EpochTimes
        Rank, epoch, begin, and seconds of compute, delivery and waiting.

    Examples
    --------
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> store = daskps.create({"w": np.zeros(4)}, optimizer=daskps.optim.SGD(1.0))
    >>> daskps.train(store, gradient, np.eye(4), trainers=2, epochs=3).timeline()
    <daskps.Timeline: 2 trainers, 3 epochs, ... s>
    """

    epochs: tuple[EpochTimes, ...] = ()

    @property
    def seconds(self) -> float:
        """Length of the whole."""
        ends = [sum(one[2:]) for one in self.epochs]
        return max(ends, default=0.0)

    def to_chrome(self) -> dict[str, Any]:
        """Return the trace as the format of Chrome's trace events has it.

        Returns
        -------
        dict
            Plain values of JSON: a row for each trainer, times in microseconds.

        Examples
        --------
        >>> daskps.Timeline().to_chrome()["traceEvents"]
        []
        """
        events = [
            {
                "name": name,
                "cat": "daskps",
                "ph": "X",
                "ts": begin * _MICROSECONDS,
                "dur": seconds * _MICROSECONDS,
                "pid": 0,
                "tid": one.rank,
                "args": {"epoch": one.epoch},
            }
            for one in self.epochs
            for name, begin, seconds in one.parts()
        ]
        ranks = sorted({one.rank for one in self.epochs})
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"trainer {rank}"},
            }
            for rank in ranks
        ]
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file.

        Parameters
        ----------
        path : str or path
            Where to, such as ``"run.json"``; a file that is there is replaced.

        Examples
        --------
        >>> import json, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "run.json"
        >>> daskps.Timeline().save(file)
        >>> json.loads(file.read_text())["traceEvents"]
        []
        """
        Path(path).write_text(json.dumps(self.to_chrome()), "utf-8")

    def __repr__(self) -> str:
        return f"<daskps.{self._line()}>"

    def _line(self) -> str:
        ranks = {one.rank for one in self.epochs}
        epochs = {one.epoch for one in self.epochs}
        n_epochs = max(epochs) - min(epochs) + 1 if epochs else 0
        n = f"{counted(len(ranks), 'trainer')}, {counted(n_epochs, 'epoch')}"
        return f"Timeline: {n}, {self.seconds:.2f} s"

    def _repr_html_(self) -> str:
        all_of = _by_rank(self.epochs)
        shown = all_of[:_MOST_RANKS]
        scale = _WIDTH / (self.seconds or 1.0)
        bars = [
            f'<text x="0" y="{_HEIGHT * (i + 1) - 3}" font-size="10">{rank}</text>'
            + "".join(_bars(joined(of, _MOST_BARS), scale, _HEIGHT * i))
            for i, (rank, of) in enumerate(shown)
        ]
        notes = [escape(self._line())]
        notes += [f'<b style="color:{_PARTS[name]}">■</b> {name}' for name in _PARTS]
        if more := len(all_of) - len(shown):
            notes.append(f"and {more:,} trainers that are not shown")
        size = f'width="{_WIDTH + 30}" height="{_HEIGHT * len(shown)}"'
        return f"<div>{' '.join(notes)}</div><svg {size}>{''.join(bars)}</svg>"


def joined(epochs: Iterable[EpochTimes], most: int) -> list[EpochTimes]:
    """Return of each trainer its last epoch, and so many times of those before."""
    found = []
    for _, (*of, last) in _by_rank(epochs):
        size = -(-len(of) // most) or 1
        for at in range(0, len(of), size):
            sums = map(sum, zip(*(one[3:] for one in of[at : at + size]), strict=True))
            found.append(EpochTimes(*of[at][:3], *sums))
        found.append(last)
    return found


def _by_rank(epochs: Iterable[EpochTimes]) -> list[tuple[int, list[EpochTimes]]]:
    by_rank = attrgetter("rank")
    return [(rank, [*of]) for rank, of in groupby(sorted(epochs, key=by_rank), by_rank)]


def _bars(epochs: list[EpochTimes], scale: float, y: int) -> Iterator[str]:
    """Give the bars of one trainer."""
    for one in epochs:
        for name, begin, seconds in one.parts():
            x, width = 30 + begin * scale, seconds * scale
            yield (
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" '
                f'height="{_HEIGHT - 2}" fill="{_PARTS[name]}"><title>epoch '
                f"{one.epoch}: {name} {seconds:.3g} s</title></rect>"
            )

"""What a user may watch of a run: callbacks, a progress bar and a log."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["EVENTS", "Log", "ProgressBar", "check", "notify"]

#: The methods a callback may have, each called with the run.
EVENTS = ("on_start", "on_round", "on_epoch", "on_failover", "on_stop")
_WIDTH = 40


class Entry(Protocol):
    """What the history of a run says of one epoch."""

    @property
    def epoch(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def seconds(self) -> float: ...
    @property
    def staleness(self) -> int: ...


class Run(Protocol):
    """What a callback sees of a run."""

    @property
    def store(self) -> Any: ...
    @property
    def clock(self) -> int: ...
    @property
    def history(self) -> Sequence[Entry]: ...
    @property
    def epochs(self) -> int: ...


def check(callbacks: Iterable[object]) -> tuple[object, ...]:
    """Refuse objects that no event of a run would ever reach.

    Parameters
    ----------
    callbacks : iterable of object
        Each has one or more of the methods `on_start`, `on_round`, `on_epoch`,
        `on_failover`, `on_stop`.

    Returns
    -------
    tuple of object
        The same, in order.

    Raises
    ------
    TypeError
        If one has none of these methods, or is a class rather than an instance.
    """
    try:
        checked = tuple(callbacks)
    except TypeError:
        raise TypeError(
            f"callbacks must be a sequence of objects, not {callbacks!r}; "
            f"write callbacks=[...]"
        ) from None
    for callback in checked:
        if isinstance(callback, type):
            raise TypeError(f"{callback!r} is a class; give {callback.__name__}()")
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            raise TypeError(
                f"{callback!r} is no callback; it needs a method of {', '.join(EVENTS)}"
            )
    return checked


def notify(callbacks: Iterable[object], event: str, run: Run) -> None:
    """Call the method `event` of all callbacks that have it, in order.

    Parameters
    ----------
    callbacks : iterable of object
        What `check` has let through.
    event : str
        One of `EVENTS`.
    run : Run
        What the methods are called with.
    """
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            with user_code(f"{event} of {type(callback).__name__}"):
                method(run)


class ProgressBar:
    """Show the progress of a run as one line of text.

    Parameters
    ----------
    file : text stream, optional
        Where the line is written. By default standard output, and nothing at all
        where that is not a terminal.

    Examples
    --------
    >>> import io
    >>> from types import SimpleNamespace
    >>> file = io.StringIO()
    >>> run = SimpleNamespace(store=None, clock=7, history=[], epochs=2)
    >>> ProgressBar(file).on_stop(run)
    >>> print(file.getvalue().strip())
    [                                        ] | 0/2 epochs | round 7
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._given = file
        self._length = 0

    def on_start(self, run: Run) -> None:
        """Draw the empty bar."""
        self._length = 0
        self._draw(run)

    def on_round(self, run: Run) -> None:
        """Draw the bar with the latest round."""
        self._draw(run)

    def on_epoch(self, run: Run) -> None:
        """Draw the bar with the epoch that has ended."""
        self._draw(run)

    def on_stop(self, run: Run) -> None:
        """Draw the bar for the last time and end its line."""
        self._draw(run, end="\n")

    def _draw(self, run: Run, end: str = "") -> None:
        file = sys.stdout if self._given is None else self._given
        if self._given is None and not file.isatty():
            return
        line = describe(run)
        # Blanks wipe what a longer line has left behind.
        file.write(f"\r{line:<{self._length}}{end}")
        file.flush()
        self._length = len(line)


class Log:
    """Log the start, every epoch, fail-overs and the end of a run.

    Parameters
    ----------
    logger : logging.Logger, optional
        Where to; by default the logger "daskps".
    level : int
        Level of the messages. Fail-overs are warnings.

    Examples
    --------
    >>> import sys
    >>> from types import SimpleNamespace
    >>> logger = logging.Logger("example")
    >>> logger.addHandler(logging.StreamHandler(sys.stdout))
    >>> Log(logger).on_start(SimpleNamespace(store="model"))
    run on 'model' starts
    """

    def __init__(
        self, logger: logging.Logger | None = None, level: int = logging.INFO
    ) -> None:
        self._logger = logging.getLogger("daskps") if logger is None else logger
        self._level = level

    def on_start(self, run: Run) -> None:
        """Log the start."""
        self._logger.log(self._level, "run on %r starts", run.store)

    def on_epoch(self, run: Run) -> None:
        """Log the epoch that has ended."""
        entry = run.history[-1]
        self._logger.log(
            self._level,
            "epoch %d: %s, %.2f s, staleness %s",
            entry.epoch,
            _values(entry),
            entry.seconds,
            entry.staleness,
        )

    def on_failover(self, run: Run) -> None:
        """Log that something was lost and replaced."""
        self._logger.warning("run on %r: failover at clock %d", run.store, run.clock)

    def on_stop(self, run: Run) -> None:
        """Log the end."""
        self._logger.log(
            self._level,
            "run on %r ends at clock %d after %d epochs",
            run.store,
            run.clock,
            len(run.history),
        )


def describe(run: Run) -> str:
    """Return one line about the state of a run."""
    done = len(run.history)
    bar = "#" * (_WIDTH * done // max(run.epochs, 1))
    line = f"[{bar:<{_WIDTH}}] | {done}/{run.epochs} epochs | round {run.clock}"
    if run.history:
        seconds = sum(entry.seconds for entry in run.history)
        line += f" | {_values(run.history[-1])} | {seconds:.1f} s"
    return line


def _values(entry: Entry) -> str:
    """Return loss and metrics of an epoch as text."""
    loss = [] if entry.loss is None else [("loss", entry.loss)]
    pairs = [*loss, *(entry.metrics or {}).items()]
    return ", ".join(f"{name} {value:.4g}" for name, value in pairs) or "no loss"

"""What a user may watch of a run: callbacks, a progress bar and a log."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from daskps.cluster.upstream import current_task
from daskps.training import bars
from daskps.training.monitoring import Monitor
from daskps.training.plateau import ReduceOnPlateau as ReduceOnPlateau
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from daskps.training.bars import State, Text, Tqdm
    from daskps.training.result import Epoch, RunStatus

__all__ = [
    "EVENTS",
    "Log",
    "ProgressBar",
    "ReduceOnPlateau",
    "check",
    "chosen",
    "end",
    "notify",
    "step_aside",
]

#: The methods a callback may have, each called with the run.
EVENTS = ("on_data", "on_start", "on_round", "on_epoch", "on_failover", "on_stop")
logger = logging.getLogger(__name__)


def chosen(callbacks: str | Iterable[object]) -> tuple[object, ...]:
    """Return what "auto" stands for here, or the callbacks given, checked.

    Parameters
    ----------
    callbacks : "auto" or iterable of object
        "auto" is a progress bar where a person looks, and nothing in tasks, under
        pytest, or where standard error is neither a terminal nor a notebook's.

    Returns
    -------
    tuple of object
        The callbacks, in order.

    Raises
    ------
    ValueError
        For another text.
    TypeError
        As `check` does.
    """
    if not isinstance(callbacks, str):
        return check(callbacks)
    if callbacks != "auto":
        raise ValueError(
            f"callbacks={callbacks!r} is not known; choose 'auto', a sequence of "
            f"objects, or () for silence"
        )
    # A worker's standard error may be the terminal it was started in.
    if current_task() or bars.in_tests() or not bars.is_watched(sys.stderr):
        return ()
    return (ProgressBar(),)


def check(callbacks: Iterable[object]) -> tuple[object, ...]:
    """Refuse objects that no event of a run would ever reach.

    Parameters
    ----------
    callbacks : iterable of object
        Each has one or more of the methods `on_data`, `on_start`, `on_round`,
        `on_epoch`, `on_failover`, `on_stop`.

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
        if isinstance(callback, Monitor):
            continue  # trainers do what it asks for
        if not any(callable(getattr(callback, event, None)) for event in EVENTS):
            raise TypeError(
                f"{callback!r} is no callback; it needs a method of {', '.join(EVENTS)}"
            )
    return checked


def monitors(callbacks: Iterable[object]) -> tuple[Monitor, ...]:
    """Return the monitors among callbacks, in order.

    Parameters
    ----------
    callbacks : iterable of object
        What `check` has let through.

    Returns
    -------
    tuple of Monitor
        The monitors.
    """
    return tuple(one for one in callbacks if isinstance(one, Monitor))


def notify(callbacks: Iterable[object], event: str, run: RunStatus) -> None:
    """Call the method `event` of all callbacks that have it, in order.

    Parameters
    ----------
    callbacks : iterable of object
        What `check` has let through.
    event : str
        One of `EVENTS`.
    run : RunStatus
        What the methods are called with.
    """
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            with user_code(f"{event} of {type(callback).__name__}"):
                method(run)


def end(callbacks: Iterable[object]) -> None:
    """End the lines of progress bars, also of a run that has failed.

    Parameters
    ----------
    callbacks : iterable of object
        What `check` has let through.
    """
    for callback in callbacks:
        if isinstance(callback, ProgressBar):
            callback.close()


def step_aside(callbacks: Iterable[object]) -> None:
    """Have progress bars leave their line, so that a message can be printed.

    Parameters
    ----------
    callbacks : iterable of object
        What `check` has let through.
    """
    for callback in callbacks:
        if isinstance(callback, ProgressBar):
            callback.clear()


class ProgressBar:
    """Show the progress of a run: round, epoch, loss, rounds per second, time left.

    ``callbacks="auto"`` of :func:`train` and :func:`run` is one of these where a
    person looks. The rounds are those that the slowest trainer has ended, the loss is
    the mean over the epoch so far.

    Parameters
    ----------
    file : text stream, optional
        Where a line of text is written again and again. By default the bar is on
        standard error, drawn by tqdm where that is installed, and nothing is shown
        where that is neither a terminal nor a notebook's.

    Examples
    --------
    >>> import io
    >>> from types import SimpleNamespace
    >>> file = io.StringIO()
    >>> run = SimpleNamespace(
    ...     slowest=5, rounds=20, loss=0.25, history=[], first=0, epochs=2
    ... )
    >>> ProgressBar(file).on_round(run)
    >>> print(file.getvalue().strip())
    [#####               ]  25% | round 5/20 | epoch 1/2 | loss 0.25
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._given = file
        self._bar: Text | Tqdm | None = None
        self._broken = self._waits = False

    def on_data(self, run: RunStatus) -> None:
        """Say what comes before the first round."""
        self.close()
        self._broken, self._waits = False, True
        if (bar := self._made()) is not None:
            self._guarded(bar.say, "computing the data")

    def on_start(self, run: RunStatus) -> None:
        """Draw the empty bar."""
        if not self._waits:
            self.close()
            self._broken = False
        self._draw(describe(run))

    def on_round(self, run: RunStatus) -> None:
        """Draw the bar with the latest round."""
        self._draw(describe(run))

    def on_epoch(self, run: RunStatus) -> None:
        """Draw the bar with the epoch that has ended."""
        self._draw(describe(run))

    def on_stop(self, run: RunStatus) -> None:
        """Draw the bar for the last time and end its line."""
        state = describe(run)
        # A run that was told to stop is over too.
        self._draw(replace(state, rounds=state.done) if state.rounds else state)
        self.close()

    def clear(self) -> None:
        """Wipe the bar, until it is drawn again.

        Examples
        --------
        >>> ProgressBar().clear()
        """
        if self._bar is not None and not self._broken:
            self._guarded(self._bar.clear)

    def close(self) -> None:
        """End the line of the bar, if it has one; of a run that has failed, too.

        Examples
        --------
        >>> ProgressBar().close()
        """
        bar, self._bar, self._waits = self._bar, None, False
        if bar is not None and not self._broken:
            self._guarded(bar.close)

    def _draw(self, state: State) -> None:
        if (bar := self._made()) is not None:
            self._guarded(bar.draw, state)

    def _made(self) -> Text | Tqdm | None:
        """Return the bar, made by now; None where nobody would see it."""
        if self._broken:
            return None
        if self._bar is None:
            if self._given is not None:
                self._bar = bars.Text(self._given)
            elif bars.is_watched(sys.stderr):
                self._bar = bars.make_bar()
        return self._bar

    def _guarded(self, method: Callable[..., None], *args: Any) -> None:
        """Draw; where that fails, a terminal that went for one, draw no more."""
        try:
            method(*args)
        except Exception:
            # A run must not end for its bar.
            self._broken = True
            logger.info("the progress bar cannot be drawn", exc_info=True)


class Log:
    """Log lazy data, the start, every epoch, fail-overs and the end of a run.

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

    def on_data(self, run: RunStatus) -> None:
        """Log that lazy data is computed first."""
        self._logger.log(self._level, "run on %r computes its data", run.store)

    def on_start(self, run: RunStatus) -> None:
        """Log the start."""
        self._logger.log(self._level, "run on %r starts", run.store)

    def on_epoch(self, run: RunStatus) -> None:
        """Log the epoch that has ended."""
        entry = run.history[-1]
        self._logger.log(
            self._level,
            "epoch %d: %s, %.2f s, staleness %s",
            entry.epoch,
            _text(_values(entry)) or "no loss",
            entry.seconds,
            entry.staleness,
        )

    def on_failover(self, run: RunStatus) -> None:
        """Log that something was lost and replaced."""
        self._logger.warning("run on %r: failover at clock %d", run.store, run.clock)

    def on_stop(self, run: RunStatus) -> None:
        """Log the end."""
        self._logger.log(
            self._level,
            "run on %r ends at clock %d after %d epochs",
            run.store,
            run.clock,
            len(run.history),
        )


def describe(run: RunStatus) -> State:
    """Return what a bar shows of a run."""
    done = run.history[-1].epoch + 1 if run.history else run.first
    values: dict[str, float] = {}
    if run.history:
        values = _values(run.history[-1])
    if run.loss is not None:
        values["loss"] = run.loss
    return bars.State(
        done=run.slowest,
        rounds=run.rounds,
        epoch=min(done + 1, run.epochs),
        epochs=run.epochs,
        values=_text(values),
    )


def _values(entry: Epoch) -> dict[str, float]:
    """Return loss and metrics of an epoch."""
    loss = {} if entry.loss is None else {"loss": entry.loss}
    return {**loss, **entry.metrics}


def _text(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())

"""Callbacks of a run, among them a progress bar and a log."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from daskps.cluster.upstream import current_task
from daskps.training.monitoring import Monitor
from daskps.training.plateau import ReduceOnPlateau as ReduceOnPlateau
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from daskps.training.result import Epoch, RunStatus

__all__ = [
    "EVENTS",
    "Log",
    "ProgressBar",
    "ReduceOnPlateau",
    "check",
    "chosen",
    "notify",
]

#: The methods a callback may have, each called with the run.
EVENTS = ("on_data", "on_start", "on_round", "on_epoch", "on_failover", "on_stop")
logger = logging.getLogger(__name__)
_Kind = TypeVar("_Kind")


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
    if current_task() or _in_tests() or not is_watched(sys.stderr):
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


def of_kind(callbacks: Iterable[object], kind: type[_Kind]) -> tuple[_Kind, ...]:
    """Return the callbacks of one kind.

    Parameters
    ----------
    callbacks : iterable of object
        Callbacks that `check` has let through.
    kind : type
        Such as Monitor.

    Returns
    -------
    tuple
        Those, in order.
    """
    return tuple(one for one in callbacks if isinstance(one, kind))


def notify(callbacks: Iterable[object], event: str, run: RunStatus) -> None:
    """Call the method `event` of all callbacks that have it, in order.

    Parameters
    ----------
    callbacks : iterable of object
        Callbacks that `check` has let through.
    event : str
        One of `EVENTS`.
    run : RunStatus
        The argument of the methods.
    """
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            with user_code(f"{event} of {type(callback).__name__}"):
                method(run)


class ProgressBar:
    """Show the progress of a run: round, epoch, loss, rounds per second, time left.

    ``callbacks="auto"`` of :func:`train` and :func:`run` is one of these where a
    person looks. tqdm draws it (``pip install tqdm``); without tqdm nothing is shown.
    The rounds are those that the slowest trainer has ended, the loss is the mean over
    the epoch so far.

    Parameters
    ----------
    file : text stream, optional
        Where the bar is drawn. By default it is on standard error, and nothing is
        shown where that is neither a terminal nor a notebook's.

    Examples
    --------
    >>> import io
    >>> from types import SimpleNamespace
    >>> file = io.StringIO()
    >>> run = SimpleNamespace(
    ...     slowest=5, rounds=20, loss=0.25, history=[], first=0, epochs=2
    ... )
    >>> ProgressBar(file).on_round(run)
    >>> "5/20" in file.getvalue()
    True
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        #: The bar of tqdm's, and the one that stands in its place before.
        self._bar: Any = None
        self._note: Any = None
        self._broken = False

    def on_data(self, run: RunStatus) -> None:
        """Say what comes before the first round."""
        self.close()
        self._guarded(self._say)

    def on_start(self, run: RunStatus) -> None:
        """Draw the empty bar."""
        self.close()
        self._guarded(self._draw, run)

    def on_round(self, run: RunStatus) -> None:
        """Draw the bar with the latest round."""
        self._guarded(self._draw, run)

    def on_epoch(self, run: RunStatus) -> None:
        """Draw the bar with the epoch that has ended."""
        self._guarded(self._draw, run)

    def on_stop(self, run: RunStatus) -> None:
        """Draw the bar for the last time and end its line."""
        # A run that was told to stop is over too.
        self._guarded(self._draw, run, run.slowest if run.rounds else 0)
        self.close()

    def clear(self) -> None:
        """Wipe the bar, until it is drawn again.

        Examples
        --------
        >>> ProgressBar().clear()
        """
        for shown in (self._note, self._bar):
            if shown is not None:
                self._guarded(shown.clear)

    def close(self) -> None:
        """End the line of the bar, if it has one; of a run that has failed, too.

        Examples
        --------
        >>> ProgressBar().close()
        """
        for shown in (self._note, self._bar):
            if shown is not None:
                self._guarded(shown.close)
        self._note = self._bar = None
        self._broken = False

    def _say(self) -> None:
        how = {"desc": "computing the data", "bar_format": "{desc}", "leave": False}
        self._note = self._made(**how)

    def _draw(self, run: RunStatus, rounds: int | None = None) -> None:
        """Show rounds, rate and time left, with epoch and loss beside them."""
        if self._note is not None:
            self._note.close()
            self._note = None
        total = (run.rounds if rounds is None else rounds) or None
        done = run.history[-1].epoch + 1 if run.history else run.first
        title = (
            f"epoch {min(done + 1, run.epochs)}/{run.epochs}" if run.epochs else None
        )
        if self._bar is None:
            # Of rates of the last seconds: news of rounds come in bursts.
            often = {"smoothing": 0.05, "mininterval": 0.0, "miniters": 1}
            how = {"desc": title, "total": total, "unit": " rounds", **often}
            self._bar = self._made(**how)
        if (bar := self._bar) is None:
            return
        bar.total = total
        bar.set_description(title, refresh=False)
        bar.set_postfix_str(_values(run.history[-1:], run.loss), refresh=False)
        if run.slowest and not bar.n:
            # The time before the first round is that of the start, and of no round.
            bar.n = bar.last_print_n = run.slowest
            bar.last_print_t = time.time()
        elif run.slowest > bar.n:
            bar.update(run.slowest - bar.n)
            return
        bar.refresh()

    def _made(self, **how: Any) -> Any:
        """Return a bar of tqdm's; None without it, and where nobody would see it."""
        file = self._file or sys.stderr
        if self._file is None and not is_watched(file):
            return None
        try:
            with warnings.catch_warnings():
                # A notebook without ipywidgets gets tqdm's text, and need not be told.
                warnings.simplefilter("ignore")
                from tqdm.auto import tqdm
        except ImportError:
            return None
        # It would believe a terminal of no columns, and find no room.
        room = {"ncols": 80, "nrows": 24} if _columns(file) == 0 else {}

        class Quiet(tqdm):  # type: ignore[misc] # tqdm has no types
            # Its monitor is a thread that looks after bars that are drawn seldom.
            monitor_interval = 0

        return Quiet(**how, **(room or {"dynamic_ncols": True}), file=self._file)

    def _guarded(self, method: Callable[..., None], *args: Any) -> None:
        """Draw; where that fails, a terminal that went for one, draw no more."""
        if self._broken:
            return
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
            _values([entry]) or "no loss",
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


def is_watched(file: TextIO | None) -> bool:
    """Return whether a person sees what is written: a terminal or a notebook."""
    try:
        return _in_notebook() or (file is not None and file.isatty())
    except ValueError:  # it is closed
        return False


def _in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def _in_tests() -> bool:
    """Return whether pytest runs this process, or started it."""
    return not {"PYTEST_VERSION", "PYTEST_CURRENT_TEST"}.isdisjoint(os.environ)


def _columns(file: TextIO) -> int | None:
    """Return what a terminal says of its width, which may be 0; None for others."""
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return None


def _values(ended: Iterable[Epoch], loss: float | None = None) -> str:
    """Return loss and metrics of an epoch; the loss is that of the next, if it has one."""
    values: dict[str, float] = {}
    for entry in ended:
        values = {} if entry.loss is None else {"loss": entry.loss}
        values |= entry.metrics
    if loss is not None:
        values["loss"] = loss
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())

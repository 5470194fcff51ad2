"""The bar of a run: by tqdm where that is installed, else a line of text."""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

_WIDTH = 20
#: Where a terminal does not say how large it is.
_COLUMNS, _ROWS = 80, 24


@dataclass(frozen=True, slots=True)
class State:
    """What a bar shows of a run."""

    #: Rounds that every trainer has ended, and how many there will be; 0 for unknown.
    done: int
    rounds: int
    #: The epoch under way, counted from 1, and how many there will be; 0 for none.
    epoch: int
    epochs: int
    #: Loss and metrics, as text.
    values: str = ""


def is_watched(file: TextIO | None) -> bool:
    """Return whether a person sees what is written: a terminal or a notebook."""
    try:
        return in_notebook() or (file is not None and file.isatty())
    except ValueError:  # it is closed
        return False


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def in_tests() -> bool:
    """Return whether pytest runs this process, or started it."""
    return not {"PYTEST_VERSION", "PYTEST_CURRENT_TEST"}.isdisjoint(os.environ)


def make_bar() -> Text | Tqdm:
    """Return a bar on standard error."""
    tqdm = _tqdm()
    return Text(sys.stderr) if tqdm is None else Tqdm(tqdm)


def _tqdm() -> Any:
    try:
        with warnings.catch_warnings():
            # A notebook without ipywidgets gets tqdm's text, and need not be told.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


class Text:
    """A line of text that is written again and again.

    Parameters
    ----------
    file : text stream
        Where to.
    now : callable
        The clock, in seconds.
    """

    def __init__(self, file: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._file, self._now = file, now
        self._began = now()
        #: When the first round was seen, and which it was: what comes before it is
        #: the start, and says nothing of the rounds to come.
        self._first: tuple[float, int] | None = None
        self._length = 0
        self._said = False

    def draw(self, state: State) -> None:
        """Write the line over the one before."""
        if self._said:  # what was waited for is no part of the rounds
            self._began, self._said = self._now(), False
        if self._first is None and state.done:
            self._first = self._now(), state.done
        line = " | ".join(filter(None, self._parts(state)))
        # A line that wraps could not be written over.
        room = _columns(self._file) - 1 if self._file.isatty() else sys.maxsize
        line = (_bar(state, room - len(line)) + line)[:room]
        # Blanks wipe what a longer line has left behind.
        self._file.write(f"\r{line:<{self._length}}")
        self._file.flush()
        self._length = len(line)

    def say(self, text: str) -> None:
        """Write this in place of the line, until it is drawn."""
        self._file.write(f"\r{text:<{self._length}}")
        self._file.flush()
        self._length, self._said = len(text), True

    def clear(self) -> None:
        """Leave an empty line."""
        self._file.write(f"\r{'':<{self._length}}\r")
        self._file.flush()
        self._length = 0

    def close(self) -> None:
        """End the line."""
        self._file.write("\n")
        self._file.flush()

    def _parts(self, state: State) -> list[str]:
        done, rounds = state.done, state.rounds
        parts = (
            [f"{done / rounds:4.0%}", f"round {done}/{rounds}"]
            if rounds
            else [f"round {done}"]
        )
        if state.epochs:
            parts.append(f"epoch {state.epoch}/{state.epochs}")
        rate = self._rate(done)
        parts += [state.values, f"{rate:.3g} rounds/s" if rate else ""]
        if done and done >= rounds:
            parts.append(_clock(self._now() - self._began))
        elif rate and rounds:
            parts.append(f"{_clock((rounds - done) / rate)} left")
        return parts

    def _rate(self, done: int) -> float:
        """Return the rounds per second since the first one; 0 while unknown."""
        if self._first is None:
            return 0.0
        since, first = self._first
        seconds = self._now() - since
        return (done - first) / seconds if seconds > 0 else 0.0


class Tqdm:
    """A bar of tqdm's.

    Parameters
    ----------
    tqdm : type
        The class of tqdm's that fits this terminal or notebook.
    """

    def __init__(self, tqdm: Any) -> None:
        class Quiet(tqdm):  # type: ignore[misc] # tqdm has no types
            # Its monitor is a thread that looks after bars that are drawn seldom.
            monitor_interval = 0

        self._make: Any = Quiet
        self._bar: Any = None
        self._note: Any = None

    def draw(self, state: State) -> None:
        """Show rounds, rate and time left, with epoch and loss beside them."""
        self._wipe_note()
        title = f"epoch {state.epoch}/{state.epochs}" if state.epochs else None
        if self._bar is None:
            self._bar = self._make(
                desc=title,
                total=state.rounds or None,
                unit=" rounds",
                **_sizes(sys.stderr),
                # Of rates of the last seconds: news of rounds come in bursts.
                smoothing=0.05,
                mininterval=0.0,
                miniters=1,
            )
        bar = self._bar
        bar.total = state.rounds or None
        bar.set_description(title, refresh=False)
        bar.set_postfix_str(state.values, refresh=False)
        if state.done and not bar.n:
            # What comes before the first round is the start, and no round's time.
            bar.n = bar.last_print_n = state.done
            bar.last_print_t = time.time()
        elif state.done > bar.n:
            bar.update(state.done - bar.n)
            return
        bar.refresh()

    def say(self, text: str) -> None:
        """Write this where the bar will be."""
        how = _sizes(sys.stderr)
        self._note = self._make(desc=text, bar_format="{desc}", leave=False, **how)

    def _wipe_note(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None

    def clear(self) -> None:
        """Leave an empty line."""
        for shown in (self._note, self._bar):
            if shown is not None:
                shown.clear()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._wipe_note()
        if self._bar is not None:
            self._bar.close()


def _bar(state: State, room: int) -> str:
    """Return the bar itself, no longer than there is room beside the text."""
    width = min(_WIDTH, room - 3)
    if width < 1 or not state.rounds:
        return ""
    done = "#" * (width * state.done // state.rounds)
    return f"[{done:<{width}}] "


def _sizes(file: TextIO) -> dict[str, Any]:
    """Return what tqdm is told of the size of a terminal."""
    if _says_columns(file) == 0:
        # It would believe that, and find no room.
        return {"ncols": _COLUMNS, "nrows": _ROWS}
    return {"dynamic_ncols": True}


def _columns(file: TextIO) -> int:
    """Return how many characters a line of a terminal has."""
    return int(os.environ.get("COLUMNS", 0)) or _says_columns(file) or _COLUMNS


def _says_columns(file: TextIO) -> int | None:
    """Return what a terminal says of its width, which may be 0; None for others."""
    try:
        return os.get_terminal_size(file.fileno()).columns
    except (AttributeError, OSError, ValueError):
        return None


def _clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

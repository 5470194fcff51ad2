"""Looks at the speed of the cores, all at once.

What shares a real core with a virtual one slows it down for milliseconds to seconds: an
interpreter then runs at 0.5 to 0.7 of its speed, and what happens in two processes at
once suffers most. A look therefore times a fixed piece of interpreter work, in a process
on each core at the same time.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from daskps.bench import looker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import IO

#: From this share of the best speed on, cores count as being at full speed: well above
#: the 0.7 of a slow phase, and not so near 1 that what always varies is taken for one.
FULL = 0.85
#: From asking to the look: the first process asked, were it to begin at once, might take
#: the core of the one that has yet to ask the others.
_LEAD_SECONDS = 0.5e-3


def full(looks: Sequence[float], best: float) -> tuple[int, ...]:
    """Return which looks found the cores at full speed.

    Parameters
    ----------
    looks : sequence of float
        Seconds of each.
    best : float
        Seconds of the best one known; of these, where they have a better one.

    Returns
    -------
    tuple of int
        Indices, in order.
    """
    least = min((best, *looks))
    return tuple(i for i, took in enumerate(looks) if least / took >= FULL)


class Looks:
    """The looks of one report.

    Parameters
    ----------
    look : callable
        Takes one; returns seconds.
    """

    def __init__(self, look: Callable[[], float]) -> None:
        self._look = look
        #: Of every look so far.
        self.seconds: list[float] = []

    def __call__(self) -> float:
        """Take a look; return what the work took on the slowest core, in seconds."""
        self.seconds.append(self._look())
        return self.seconds[-1]

    @property
    def best(self) -> float:
        """Seconds of the best look so far."""
        return min(self.seconds, default=math.inf)

    @property
    def share(self) -> float:
        """Share of the looks that found the cores at full speed."""
        return len(full(self.seconds, self.best)) / max(1, len(self.seconds))


@contextmanager
def watched() -> Iterator[Looks]:
    """Start a process on each core, which sleeps between looks.

    Yields
    ------
    Looks
        Until the end, and the processes with them.
    """
    with ExitStack() as stack:
        helpers = [stack.enter_context(_helper(core)) for core in _cores()]
        yield Looks(partial(_look, helpers))


def _cores() -> list[int]:
    """Return the cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return list(range(os.cpu_count() or 1))


def _helper(core: int) -> subprocess.Popen[bytes]:
    # Not the site, nor what the environment adds. In a group of its own: Ctrl-C is for
    # this process, and the helper hears of its end through the pipe.
    command = [sys.executable, "-S", "-I", looker.__file__, str(core)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, bufsize=0, process_group=0
    )


def _look(helpers: Sequence[subprocess.Popen[bytes]]) -> float:
    begin = f"{time.perf_counter() + _LEAD_SECONDS!r}\n".encode()
    for helper in helpers:
        _open(helper.stdin).write(begin)
    answers = [_open(helper.stdout).readline() for helper in helpers]
    if not all(answers):
        raise RuntimeError("a process that looks at the cores has ended")
    return max(map(float, answers))


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise RuntimeError("a process that looks at the cores has no pipes")
    return pipe

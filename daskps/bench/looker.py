"""A process that looks at the speed of one core: the same work whenever it is asked.

Run by its path, with the core's number; imports nothing of ours, so that it is small and
starts at once. Between looks it waits for a line that says when to begin, by the clock
that all processes share. It ends when nobody holds the other end of its pipes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

#: How often a look times the work, and the turns of that: 1 to 2 ms on a fast core.
REPETITIONS, TURNS = 8, 2000


def work() -> int:
    """Do what interpreters do: calls, names, small tuples, a dictionary that grows."""
    seen: dict[str, tuple[int, str]] = {}
    lines = []
    for i in range(TURNS):
        number, upper = seen[_named(i, seen)]
        # Beside the f-string below: it runs another part of the interpreter, and how
        # much of that is fetched is what a look is about.
        lines.append("%s %d" % (upper, number))  # noqa: UP031
    return sum(map(len, lines))


def _named(i: int, seen: dict[str, tuple[int, str]]) -> str:
    name = f"{i:x}-{i % 7}"
    seen[name] = (i, name.upper())
    return name


def timed() -> float:
    """Return the seconds that the work takes, on average.

    Not their median: what else runs on the core for a moment counts, as it does in a
    sample.
    """
    # Once for nothing: what was measured before has left the caches to itself.
    work()
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        work()
    return (time.perf_counter() - began) / REPETITIONS


def main(core: int) -> None:
    """Answer each line with the seconds of the work, until there are no more.

    Parameters
    ----------
    core : int
        Where to run, if the system lets a process choose.
    """
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, {core})
    # Whoever asked may be gone before the answer.
    with contextlib.suppress(BrokenPipeError):
        while line := os.read(0, 100):
            time.sleep(max(0.0, float(line) - time.perf_counter()))
            os.write(1, f"{timed()!r}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))

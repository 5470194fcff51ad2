"""Numbers of the processes that share memory, which may have one process id.

Containers count their processes each for itself: two with one ``/dev/shm`` may both be
process 1, and neither can look the other one up. So words in shared memory, and locks
that say who lives, have a number that a process draws for itself. Its last bits are the
process id, as its own namespace knows it, for messages.
"""

from __future__ import annotations

import os
import secrets

#: Bits of a number, the last ones first: the process id, a count, and random ones.
_PID_BITS, _COUNT_BITS, _RANDOM_BITS = 22, 16, 24
_COUNT = ((1 << _COUNT_BITS) - 1) << _PID_BITS


class _ThisProcess:
    """The process that this code runs in; in a forked child it is another one.

    Attributes
    ----------
    number : int
        Its number. An attribute: locks compare it each time they are taken.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Draw a number."""
        drawn = secrets.randbits(_RANDOM_BITS + _COUNT_BITS)
        self.number, self._n = drawn << _PID_BITS | os.getpid(), 0

    def next_number(self) -> int:
        """Return a number of this process that differs from those before in its count."""
        self._n += 1
        return self.number ^ (self._n << _PID_BITS & _COUNT)


THIS = _ThisProcess()
os.register_at_fork(after_in_child=THIS.begin)


def pid_of(number: int) -> int:
    """Return the process id in a number, as its own namespace knows it."""
    return number & ((1 << _PID_BITS) - 1)


def are_one(number: int, other: int) -> bool:
    """Whether two numbers are of one process."""
    return not (number ^ other) & ~_COUNT

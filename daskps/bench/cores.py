"""What a core is worth while another one is busy.

Cores of a virtual machine may be the two threads of one real core, and change from run
to run: what two processes do at the same time then takes up to twice as long.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds of each sample, and how many there are of both kinds.
SECONDS, SAMPLES = 0.05, 5
#: Busy after one byte, idle after the next, and over with whoever writes them, however
#: that one ends.
_OTHER = """
import os
print(flush=True)
while os.read(0, 1):
    os.set_blocking(0, False)
    while True:
        for _ in range(1000):
            pass
        try:
            os.read(0, 1)
            break
        except BlockingIOError:
            pass
    os.set_blocking(0, True)
"""


def beside_another() -> float:
    """Return the speed of this process beside a busy one, 1.0 for that without it.

    Takes half a second. Near 1 the cores are cores; 0.5 to 0.7 says that they share one,
    or that something else is busy.
    """
    with _another() as (_, switch):
        return statistics.median(_ratio(switch) for _ in range(SAMPLES))


@contextmanager
def _another() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Run another process; give what makes it busy, and idle again."""
    command, pipe = [sys.executable, "-S", "-c", _OTHER], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as other:
        if other.stdin is None or other.stdout is None:
            raise RuntimeError("the other process has no pipes")
        try:
            other.stdout.readline()  # it runs
            yield other, other.stdin
        finally:
            other.kill()


def _ratio(switch: IO[bytes]) -> float:
    alone = _turns()
    switch.write(b".")
    beside = _turns()
    switch.write(b".")
    return beside / alone


def _turns() -> int:
    end, turns = time.perf_counter() + SECONDS, 0
    while time.perf_counter() < end:
        for _ in range(1000):
            pass
        turns += 1
    return turns

"""What a core is worth while another one is busy.

Cores of a virtual machine may be the two threads of one real core, and change from run
to run: what two processes do at the same time then takes up to twice as long.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time

#: Seconds of each sample, and how many there are of both kinds.
SECONDS, SAMPLES = 0.05, 5


def beside_another() -> float:
    """Return the speed of this process beside a busy one, 1.0 for that without it.

    Takes half a second. Near 1 the cores are cores; 0.5 to 0.7 says that they share one,
    or that something else is busy.
    """
    command = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        try:
            if other.stdout is not None:
                other.stdout.readline()  # it runs
            ratios = [_ratio(other) for _ in range(SAMPLES)]
        finally:
            other.kill()
    return statistics.median(ratios)


def _ratio(other: subprocess.Popen[bytes]) -> float:
    other.send_signal(signal.SIGSTOP)
    alone = _turns()
    other.send_signal(signal.SIGCONT)
    return _turns() / alone


def _turns() -> int:
    end, turns = time.perf_counter() + SECONDS, 0
    while time.perf_counter() < end:
        for _ in range(1000):
            pass
        turns += 1
    return turns

"""What a simulated process stands on: time, chance and ids that a seed decides.

Run as a file, so that all of it is laid before anything of Dask is imported: it takes
clocks by name. As a module it only holds what was laid.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import runpy
import secrets
import signal
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_ASK, _NO_RANDOM_ADDRESSES = 0xFFFFFFFF, 0x0040000
#: Where virtual time begins: long ago, but no time that code may take for none.
EPOCH = 1_000_000.0
#: What reading a clock takes, or code that polls one would never end.
TICK = 1e-7


class Clock:
    """Virtual time; only timers, sleeping and reading it make it go on."""

    def __init__(self) -> None:
        self.now = EPOCH

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return self.now - EPOCH

    def read(self) -> float:
        """Return the time, as time.time and time.monotonic do."""
        self.now += TICK
        return self.now

    def read_ns(self) -> int:
        """Return the time in nanoseconds."""
        return int(self.read() * 1e9)

    def sleep(self, seconds: float) -> None:
        """Let time pass without doing anything."""
        self.now += max(0.0, seconds)


CLOCK = Clock()
#: Decides everything that a seed is to decide.
CHANCE = random.Random(0)
#: The processor time of this process; no virtual one.
processor_time = time.process_time


def _uuid(*args: object, **kwargs: object) -> uuid.UUID:
    return uuid.UUID(int=CHANCE.getrandbits(128), version=4)


def _token(nbytes: int | None = None) -> bytes:
    return CHANCE.randbytes(nbytes or 32)


@contextmanager
def aside() -> Iterator[None]:
    """Do something that takes no time and no chance, however much it asks for."""
    now, chance = CLOCK.now, CHANCE.getstate()
    try:
        yield
    finally:
        CLOCK.now = now
        CHANCE.setstate(chance)


def put(owner: object, **new: object) -> None:
    """Put something in the place of attributes of a module or class."""
    for name, value in new.items():
        setattr(owner, name, value)


def lay() -> None:
    """Replace the clocks, chance and ids of this process."""
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        put(time, **{name: CLOCK.read, f"{name}_ns": CLOCK.read_ns})
    put(time, sleep=CLOCK.sleep)
    put(uuid, uuid1=_uuid, uuid4=_uuid)
    put(
        secrets,
        randbits=CHANCE.getrandbits,
        token_bytes=_token,
        token_hex=lambda nbytes=None: _token(nbytes).hex(),
    )
    # What ends when it is collected must end at the same moment each time.
    gc.disable()


def timeless(*args: Any, **kwargs: Any) -> logging.LogRecord:
    """Return a log record: to show what is logged must not make time go on."""
    now = CLOCK.now
    record = logging.LogRecord(*args, **kwargs)
    CLOCK.now = now
    return record


def settle_addresses() -> None:
    """Begin anew with memory at the same addresses each time, where that is allowed.

    Sets of objects are in the order of their addresses: elsewhere a seed may take
    another course in another process.
    """
    libc = ctypes.CDLL(None)
    before = libc.personality(_ASK)
    if before & _NO_RANDOM_ADDRESSES or before < 0:
        return
    libc.personality(before | _NO_RANDOM_ADDRESSES)
    if libc.personality(_ASK) & _NO_RANDOM_ADDRESSES:
        os.execv(sys.executable, [sys.executable, *sys.argv])


def sow(seed: int) -> None:
    """Begin a simulation: all chance follows from its seed."""
    CHANCE.seed(seed)
    random.seed(seed)
    CLOCK.now = EPOCH


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settle_addresses()
    lay()
    # The folder of this file: its modules would hide others of the same names.
    sys.path.pop(0)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    # Under its own name, for all who import it: there is one clock.
    sys.modules["tests.simulator.ground"] = sys.modules["__main__"]
    runpy.run_module("tests.simulator.nursery", run_name="__main__", alter_sys=False)

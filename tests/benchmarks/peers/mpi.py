"""MPI through mpi4py: a parameter server of two-sided messages that busy-polls.

A trainer sends a request or its gradient to every server, a server answers with its
slice or, once the gradient is applied, with nothing. A round is a push, a barrier of
the trainers and a pull. The messages go through shared memory.

Open MPI's launcher itself waits for daemons of other machines on all interfaces while
it runs: it refuses to start with loopback alone.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks.jobs import cuts, started
from tests.benchmarks.peers import Peer, PeerError, gang, lacking
from tests.benchmarks.peers.limit import sgd

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.benchmarks.jobs import Measure, StepJob

_PULL, _PUSH, _STOP = 1, 2, 3
#: Shared memory between processes, nothing on the network but loopback.
_QUIET = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "PMIX_MCA_ptl_tcp_if_include": "lo",
}
#: As between machines.
_TCP = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}


def missing() -> str | None:
    """Return why MPI cannot be used here."""
    return lacking("mpi4py") or _launcher()[1]


@functools.cache
def _launcher() -> tuple[str, str | None]:
    """Return Open MPI's mpirun, or why there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        return "", "mpirun is not installed"
    said = subprocess.run([found, "--version"], capture_output=True, check=False)
    is_open = b"Open MPI" in said.stdout
    return found, None if is_open else f"{found} is not Open MPI's"


def launched(
    module: str, trainers: int, servers: int = 0, *, tcp: bool = False
) -> AbstractContextManager[Measure]:
    """Start a gang with mpirun; its messages go through shared memory, or by TCP."""
    command, reason = _launcher()
    if reason:
        raise PeerError(reason)
    n = str(trainers + servers)
    launcher = [command, "-n", n, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    environment = _QUIET | (_TCP if tcp else {})
    return gang.launched(
        module, trainers, servers, launcher=launcher, environment=environment
    )


TCP = Peer(
    "MPI parameter server, TCP",
    lambda n, m, _: launched("mpi", n, m, tcp=True),
    missing,
)
PEER = Peer("MPI parameter server", lambda n, m, _: launched("mpi", n, m), missing)


class _Trainer(gang.SlicedTrainer):
    """Sends to all servers at once."""

    def __init__(self, world: Any, among: Any, job: StepJob) -> None:
        super().__init__(job, among.Barrier)
        self._world = world
        self._servers = range(job.trainers, job.trainers + job.servers)
        self._nothing = np.empty(0, np.float32)

    def pull(self) -> None:
        self._ask(_PULL, [self._nothing for _ in self.cuts], self.weights)

    def push(self) -> None:
        self._ask(_PUSH, [self.gradient[cut] for cut in self.cuts], None)

    def stop(self) -> None:
        for server in self._servers:
            self._world.Send(self._nothing, server, _STOP)

    def _ask(self, tag: int, parts: list[Any], out: Any) -> None:
        answers = [
            self._world.Irecv(self._nothing if out is None else out[cut], server, tag)
            for cut, server in zip(self.cuts, self._servers, strict=True)
        ]
        for part, server in zip(parts, self._servers, strict=True):
            self._world.Send(part, server, tag)
        for answer in answers:
            answer.Wait()


def _serve(world: Any, place: gang.Place, job: StepJob, index: int) -> None:
    """Answer until every trainer has stopped."""
    from mpi4py import MPI

    cut = cuts(job.elements, place.servers)[index]
    weights, gradient = (started(cut.stop - cut.start) for _ in range(2))
    apply, status, left = sgd(), MPI.Status(), place.trainers
    nothing = np.empty(0, np.float32)
    while left:
        world.Recv(gradient, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        source, tag = status.Get_source(), status.Get_tag()
        if tag == _PULL:
            world.Send(weights, source, tag)
        elif tag == _PUSH:
            apply(weights, gradient)
            world.Send(nothing, source, tag)
        else:
            left -= 1


@contextmanager
def joined(place: gang.Place) -> Iterator[Measure]:
    """Do the jobs of one rank: the first are the trainers."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    is_trainer = rank < place.trainers
    among = world.Split(0 if is_trainer else 1, rank)

    def run(job: StepJob, steps: int) -> float:
        if not is_trainer:
            _serve(world, place, job, rank - place.trainers)
            return 0.0
        side = _Trainer(world, among, job)
        try:
            return gang.measured(job, side, rank, steps, barrier=side.barrier)
        finally:
            side.stop()

    yield run

"""Rows of a table by other systems: a trainer reads random rows, and updates them (SGD).

The limit acts on one shared mapping itself, without a lock, and asks for each row before
its turn. Servers of MPI and of Ray run the same loops on the rows of their shard; ids and
rows travel as plain arrays.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import config
from daskps.bench.jobs import timed
from daskps.bench.peers import Peer, gang, lacking, mpi, ray
from daskps.kernels import plain
from daskps.kernels.system import fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daskps.typing import Array

#: Weights of a row, and the learning rate.
DIM, RATE = 64, np.float32(1e-3)
#: Sets of ids that a trainer uses in turn, so that few of their rows are in a cache.
SETS = 31
#: Of Zipf's law, for ids that repeat.
ZIPF = 1.1
_PULL, _PUSH, _ROWS, _STOP = 1, 2, 3, 4


def limit_pull(w: Any, ids: Any, out: Any) -> None:
    """Copy rows out, each asked for before its turn."""
    for k in range(ids.size):
        row = np.uint64(ids[k])
        fetch(w, ids[min(k + 8, ids.size - 1)])
        for i in range(w.shape[1]):
            out[k, i] = w[row, i]


def limit_push(w: Any, ids: Any, g: Any, lr: Any) -> None:
    """Apply SGD to rows in place."""
    for k in range(ids.size):
        row = np.uint64(ids[k])
        fetch(w, ids[min(k + 8, ids.size - 1)])
        for i in range(w.shape[1]):
            w[row, i] -= lr * g[k, i]


def limit_adagrad(  # noqa: PLR0917 - compiled functions take arguments by position
    w: Any, total: Any, ids: Any, g: Any, lr: Any, eps: Any
) -> None:
    """Apply Adagrad to rows in place."""
    for k in range(ids.size):
        later, row = ids[min(k + 8, ids.size - 1)], np.uint64(ids[k])
        fetch(w, later)
        fetch(total, later)
        for i in range(w.shape[1]):
            total[row, i] += g[k, i] * g[k, i]
            w[row, i] -= lr * g[k, i] / (np.sqrt(total[row, i]) + eps)


_TABLE, _NUMBER = "write(types.float32).copy(ndim=2)", "types.float32"
LIMITS: dict[Callable[..., Any], str] = {
    limit_pull: f"{_TABLE}, IDS, {_TABLE}",
    limit_push: f"{_TABLE}, IDS, {_TABLE}, {_NUMBER}",
    limit_adagrad: f"{_TABLE}, {_TABLE}, IDS, {_TABLE}, {_NUMBER}, {_NUMBER}",
}


@dataclass(frozen=True)
class TableJob:
    """Pulls and pushes of some rows of a table, cut into ranges for its servers."""

    rows: int
    named: int
    trainers: int
    servers: int
    #: "uniform", without repeats; "zipf"; "as zipf", as many rows as that has different.
    ids: str = "uniform"
    #: Whether what counts is the CPU time of the trainers' threads.
    cpu: bool = False

    @property
    def clock(self) -> Callable[[], float]:
        """What tells the seconds."""
        return time.thread_time if self.cpu else time.perf_counter

    @property
    def title(self) -> str:
        """The job in words."""
        law = "" if self.ids == "uniform" else f", {self.ids}"
        law += ", CPU" if self.cpu else ""
        return f"{self.named:,} of {self.rows:,} rows{law}, {self.trainers} + {self.servers}"

    @property
    def edges(self) -> list[int]:
        """First row of each server, and the number of all."""
        parts = np.array_split(np.empty(self.rows), self.servers)
        return [0, *itertools.accumulate(map(len, parts))]

    def turns(self, rank: int) -> Iterator[Array]:
        """Return ids for one step after the other."""
        rng = np.random.default_rng(rank)
        made = list["Array"]()
        for _ in range(SETS):
            n = self.named
            if self.ids != "uniform":
                repeated = rng.zipf(ZIPF, n) % self.rows
                if self.ids == "zipf":
                    made.append(repeated)
                    continue
                n = len(np.unique(repeated))
            made.append(rng.choice(self.rows, n, replace=False))
        return itertools.cycle(made)


def loops() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what pulls rows, and what pushes to them."""
    module = plain(LIMITS, cache_dir=str(config.load().cache), alone=True)
    return module.function("limit_pull"), module.function("limit_push")


class TableTrainer(ABC):
    """One trainer: its rows and gradients; what moves them is the subclass's."""

    def __init__(self, job: TableJob, rank: int) -> None:
        self.job, self._turns = job, job.turns(rank)
        self.out = np.zeros((job.named, DIM), np.float32)
        self.grads = np.full((job.named, DIM), 1e-3, np.float32)

    def step(self) -> None:
        """Pull rows and push to them."""
        ids = next(self._turns)
        self.move(ids, self.out[: len(ids)], self.grads[: len(ids)])

    @abstractmethod
    def move(self, ids: Array, out: Array, grads: Array) -> None:
        """Read the rows of these ids, then update them."""


class _Limit(TableTrainer):
    def __init__(self, job: TableJob, rank: int, table: Array) -> None:
        super().__init__(job, rank)
        self._table = table
        self._pull, self._push = loops()

    def move(self, ids: Array, out: Array, grads: Array) -> None:
        self._pull(self._table, ids, out)
        self._push(self._table, ids, grads, RATE)


@contextmanager
def limited(place: gang.Place) -> Iterator[Callable[[TableJob, int], float]]:
    """Do the jobs of one trainer of the limit."""
    clocks = gang.Clocks(place)

    @lru_cache(maxsize=1)
    def trainer(job: TableJob) -> _Limit:
        table = gang.mapped(place.folder / f"{job.rows}", (job.rows, DIM), np.float32)
        if place.rank == 0:
            table[:] = 1
        return _Limit(job, place.rank, table)

    def run(job: TableJob, steps: int) -> float:
        act = trainer(job).step
        clocks.barrier()
        return timed(act, steps, job.clock)

    yield run


class Served:
    """The rows of one server."""

    def __init__(self, job: TableJob, index: int) -> None:
        self._first, end = job.edges[index : index + 2]
        self._table = np.ones((end - self._first, DIM), np.float32)
        self._pull_rows, self._push_rows = loops()

    def pull(self, ids: Array) -> Array:
        """Return rows."""
        out = np.empty((len(ids), DIM), np.float32)
        self._pull_rows(self._table, ids - self._first, out)
        return out

    def push(self, ids: Array, grads: Array) -> None:
        """Update rows."""
        # What came from elsewhere may be read-only.
        self._push_rows(
            self._table, ids - self._first, np.require(grads, None, "W"), RATE
        )


def parts(job: TableJob, ids: Array) -> list[Any]:
    """Return which of the ids each server has."""
    if job.servers == 1:
        return [slice(None)]
    owner = np.searchsorted(job.edges, ids, "right") - 1
    return [np.flatnonzero(owner == i) for i in range(job.servers)]


class _ByMPI(TableTrainer):
    def __init__(self, job: TableJob, rank: int, world: Any) -> None:
        super().__init__(job, rank)
        self._world = world

    def move(self, ids: Array, out: Array, grads: Array) -> None:
        world, mine = self._world, parts(self.job, ids)
        first = self.job.trainers
        for i, part in enumerate(mine):
            world.Send(ids[part], first + i, _PULL)
        for i, part in enumerate(mine):
            rows = out if isinstance(part, slice) else np.empty((len(part), DIM), "f4")
            world.Recv(rows, first + i, _ROWS)
            if rows is not out:
                out[part] = rows
        for i, part in enumerate(mine):
            world.Send(ids[part], first + i, _PUSH)
            world.Send(grads[part], first + i, _ROWS)
        for i, _ in enumerate(mine):
            world.Recv(np.empty(0, np.int64), first + i, _PUSH)


@contextmanager
def by_mpi(place: gang.Place) -> Iterator[Callable[[TableJob, int], float]]:
    """Do the jobs of one rank: the first are the trainers."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    is_trainer = rank < place.trainers
    among = world.Split(0 if is_trainer else 1, rank)

    def serve(job: TableJob) -> None:
        served, status = Served(job, rank - place.trainers), MPI.Status()
        ids, grads = np.empty(job.named, np.int64), np.empty((job.named, DIM), "f4")
        left = place.trainers
        while left:
            world.Recv(ids, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            n, source, tag = (
                status.Get_count(MPI.INT64_T),
                status.Get_source(),
                status.Get_tag(),
            )
            if tag == _PULL:
                world.Send(served.pull(ids[:n]), source, _ROWS)
            elif tag == _PUSH:
                asked = ids[:n].copy()
                world.Recv(grads, source, _ROWS)
                served.push(asked, grads[:n])
                world.Send(np.empty(0, np.int64), source, _PUSH)
            else:
                left -= 1

    def run(job: TableJob, steps: int) -> float:
        if not is_trainer:
            serve(job)
            return 0.0
        trainer = _ByMPI(job, rank, world)
        among.Barrier()
        try:
            return timed(trainer.step, steps)
        finally:
            for i in range(place.servers):
                world.Send(np.empty(0, np.int64), place.trainers + i, _STOP)

    yield run


class _ByRay(TableTrainer):
    def __init__(self, job: TableJob, rank: int, servers: list[Any]) -> None:
        super().__init__(job, rank)
        self._servers = servers

    def move(self, ids: Array, out: Array, grads: Array) -> None:
        import ray

        mine = [*zip(parts(self.job, ids), self._servers, strict=True)]
        found = ray.get([server.pull.remote(ids[part]) for part, server in mine])
        for (part, _), rows in zip(mine, found, strict=True):
            out[part] = rows
        ray.get([server.push.remote(ids[part], grads[part]) for part, server in mine])

    def measure(self, steps: int) -> float:
        return timed(self.step, steps)


class RayTables:
    """The actors of one job."""

    def __init__(self, job: TableJob) -> None:
        import ray

        remote: Any = ray.remote(num_cpus=0)
        servers = [remote(Served).remote(job, i) for i in range(job.servers)]
        trainer = remote(_ByRay)
        self._trainers = [trainer.remote(job, i, servers) for i in range(job.trainers)]

    def measure(self, steps: int) -> float:
        """Run so many steps in all trainers; return the seconds of one."""
        import ray

        return float(max(ray.get([t.measure.remote(steps) for t in self._trainers])))


#: By name, in the order of reports.
PEERS = {
    "limit": Peer(
        "limit: shared memory", lambda n, *_: gang.launched("tables:limited", n)
    ),
    "mpi": Peer(
        "MPI parameter server",
        lambda n, m, _: mpi.launched("tables:by_mpi", n, m),
        mpi.missing,
    ),
    "ray": Peer(
        "Ray actors",
        lambda n, m, client: ray.opened(n, m, client, RayTables),
        lambda: lacking("ray"),
    ),
}

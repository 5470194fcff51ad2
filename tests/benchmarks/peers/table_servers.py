"""Rows of a table on servers of other systems, each with a range of them.

Servers of MPI and of Ray run the loops of the limit on their rows; ids and rows travel as
plain arrays. Redis has no update of a row: a trainer reads values, updates them itself and
writes them back, so what two trainers do to one row at the same time is lost but for one.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.benchmarks.jobs import timed
from tests.benchmarks.peers import Peer, gang, lacking, mpi, ray, redis
from tests.benchmarks.peers.tables import (
    DIM,
    LIMIT,
    RATE,
    TableJob,
    TableTrainer,
    loops,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daskps.typing import Array

_PULL, _PUSH, _ROWS, _STOP = 1, 2, 3, 4
#: The hash of rows on a server of Redis, and how many are written to it at a time at first.
_HASH, _PART = "rows", 10_000


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


class _ByRedis(TableTrainer):
    """Rows are the fields of a hash on each server: two commands a step and server."""

    def __init__(self, job: TableJob, rank: int, servers: list[Any]) -> None:
        super().__init__(job, rank)
        self._servers = servers
        if rank == 0:
            self._begin()

    def _begin(self) -> None:
        row = np.ones(DIM, np.float32).tobytes()
        for server, (first, end) in zip(
            self._servers, itertools.pairwise(self.job.edges), strict=True
        ):
            server.delete(_HASH)
            for low in range(first, end, _PART):
                ids = range(low, min(low + _PART, end))
                server.hset(_HASH, mapping=dict.fromkeys(ids, row))

    def move(self, ids: Array, out: Array, grads: Array) -> None:
        mine = [*zip(parts(self.job, ids), self._servers, strict=True)]
        for part, server in mine:
            found = server.hmget(_HASH, ids[part].tolist())
            out[part] = np.frombuffer(b"".join(found), np.float32).reshape(-1, DIM)
        for part, server in mine:
            rows = out[part] - RATE * grads[part]
            values = rows.view(f"V{rows.itemsize * DIM}").ravel().tolist()
            fields = dict(zip(ids[part].tolist(), values, strict=True))
            server.hset(_HASH, mapping=fields)


@contextmanager
def by_redis(place: gang.Place) -> Iterator[Callable[[TableJob, int], float]]:
    """Do the jobs of one trainer."""
    clocks = gang.Clocks(place)
    with redis.connected() as servers:
        trainer = lru_cache(maxsize=1)(lambda job: _ByRedis(job, place.rank, servers))

        def run(job: TableJob, steps: int) -> float:
            act = trainer(job).step
            clocks.barrier()
            return timed(act, steps)

        yield run


#: By name, in the order of reports.
PEERS = {
    "limit": LIMIT,
    "mpi": Peer(
        "MPI parameter server",
        lambda n, m, _: mpi.launched("table_servers:by_mpi", n, m),
        mpi.missing,
    ),
    "redis": replace(
        redis.PEER, opened=partial(redis.opened, module="table_servers:by_redis")
    ),
    "ray": Peer(
        "Ray actors",
        lambda n, m, client: ray.opened(n, m, client, RayTables),
        lambda: lacking("ray"),
    ),
}

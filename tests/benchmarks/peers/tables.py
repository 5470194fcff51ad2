"""Rows of a table by other systems: a trainer reads random rows, and updates them (SGD).

The limit acts on one shared mapping itself, without a lock, and asks for each row before
its turn. Those with servers are in `table_servers`.
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
from daskps.kernels import plain
from daskps.kernels.system import fetch
from tests.benchmarks.jobs import timed
from tests.benchmarks.peers import Peer, gang

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daskps.typing import Array

#: Weights of a row, and the learning rate.
DIM, RATE = 64, np.float32(1e-3)
#: Sets of ids that a trainer uses in turn, so that few of their rows are in a cache.
SETS = 31
#: Of Zipf's law, for ids that repeat.
ZIPF = 1.1


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


def limit_adagrad(w: Any, total: Any, ids: Any, g: Any, lr: Any, eps: Any) -> None:
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


LIMIT = Peer("limit: shared memory", lambda n, *_: gang.launched("tables:limited", n))

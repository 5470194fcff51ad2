"""Dask Actors: a server actor per shard, called by tasks that train.

A push is a call, a pull another. In a round the server adds up the gradients of all
trainers before it applies them; a pull that comes too early is made again.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import secede

from tests.benchmarks.clusters import places
from tests.benchmarks.jobs import StepJob, cuts, started, step, timed
from tests.benchmarks.peers import Peer
from tests.benchmarks.peers.limit import ServedSlice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

    from daskps.typing import Array
    from tests.benchmarks.jobs import Measure


class Server(ServedSlice):
    """A slice of the model that adds up the gradients of a round."""

    def __init__(self, elements: int, trainers: int) -> None:
        super().__init__(elements, trainers)
        self._sum = started(elements)
        self._trainers, self._here, self._rounds = trainers, 0, 0

    def deliver(self, gradient: Array) -> int:
        """Take a gradient of a round; return the round's number."""
        this = self._rounds + 1
        if self._here:
            self._sum += gradient
        else:
            np.copyto(self._sum, gradient)
        self._here += 1
        if self._here == self._trainers:
            self.apply_mean(self.weights, self._sum)
            self._here, self._rounds = 0, this
        return this

    def after(self, round_: int) -> Array | None:
        """Return the weights after a round; None where it is not complete."""
        return self.weights if self._rounds >= round_ else None


class _Side:
    def __init__(self, servers: list[Any], job: StepJob) -> None:
        self._servers, self._cuts = servers, cuts(job.elements, job.servers)
        self.weights, self.gradient = started(job.elements), started(job.elements)

    def pull(self) -> None:
        sent = [server.pull() for server in self._servers]
        for cut, future in zip(self._cuts, sent, strict=True):
            np.copyto(self.weights[cut], future.result())

    def push(self) -> None:
        parts = zip(self._cuts, self._servers, strict=True)
        for future in [server.push(self.gradient[cut]) for cut, server in parts]:
            future.result()

    def round(self) -> None:
        parts = zip(self._cuts, self._servers, strict=True)
        sent = [server.deliver(self.gradient[cut]) for cut, server in parts]
        rounds = [future.result() for future in sent]
        asked = [s.after(r) for s, r in zip(self._servers, rounds, strict=True)]
        every = zip(self._cuts, self._servers, rounds, asked, strict=True)
        for cut, server, round_, future in every:
            while (found := future.result()) is None:
                future = server.after(round_)
            np.copyto(self.weights[cut], found)


def _train(servers: list[Any], job: StepJob, rank: int, steps: int) -> float:
    secede()
    return timed(step(job, _Side(servers, job), rank), steps)


@contextmanager
def opened(trainers: int, servers: int, client: Client) -> Iterator[Measure]:
    """Use the workers that daskps uses."""
    train_at, serve_at = places(client, trainers, servers)

    @lru_cache(maxsize=1)
    def serve(job: StepJob) -> list[Any]:
        futures = [
            client.submit(
                Server, cut.stop - cut.start, trainers, actor=True, workers=[worker]
            )
            for cut, worker in zip(cuts(job.elements, servers), serve_at, strict=True)
        ]
        return [future.result() for future in futures]

    def measure(job: StepJob, steps: int) -> float:
        held = serve(job)
        futures = [
            client.submit(_train, held, job, rank, steps, workers=[worker], pure=False)
            for rank, worker in enumerate(train_at)
        ]
        return float(max(client.gather(futures)))

    yield measure
    serve.cache_clear()


PEER = Peer("Dask Actors", opened)

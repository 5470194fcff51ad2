"""Ray with plain actors: a server actor per shard, a trainer actor each.

Rounds and training are the synchronous parameter server of Ray's documentation: the
driver hands the weights to the trainers and their gradients to one server, and waits
every tenth step.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from tests.benchmarks import ENVIRON
from tests.benchmarks.jobs import Gradient, cuts, started, step, timed, timed_loop
from tests.benchmarks.peers import Peer, PeerError, lacking
from tests.benchmarks.peers.limit import ServedSlice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.typing import Array
    from tests.benchmarks.jobs import Measure, StepJob

#: Steps after which the documentation's loop waits.
_LOOKS = 10
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Else Ray takes a loopback address for a mistake and listens on all interfaces.
    # It is read when Ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class _Server(ServedSlice):
    """A slice of the model that makes rounds."""

    def round(self, *gradients: Array) -> Array:
        for gradient in gradients:
            self.apply_mean(self.weights, gradient)
        return self.weights


class _Trainer:
    """Measures itself, or computes gradients for the driver's loop."""

    def __init__(self, job: StepJob, rank: int, servers: list[Any]) -> None:
        self._job, self._rank, self._servers = job, rank, servers
        self._cuts = cuts(job.elements, job.servers)
        self.weights, self.gradient = started(job.elements), started(job.elements)
        self._learn = Gradient(rank, job.elements) if job.kind == "train" else None

    def measure(self, steps: int) -> float:
        return timed(step(self._job, self, self._rank), steps)

    def learn(self, weights: Array) -> Array:
        if self._learn is not None:
            self._learn(weights, self.gradient)
        return self.gradient

    def pull(self) -> None:
        import ray

        found = ray.get([server.pull.remote() for server in self._servers])
        for cut, part in zip(self._cuts, found, strict=True):
            np.copyto(self.weights[cut], part)

    def push(self) -> None:
        import ray

        parts = zip(self._cuts, self._servers, strict=True)
        ray.get([server.push.remote(self.gradient[cut]) for cut, server in parts])

    def round(self) -> None:
        # `covers` leaves these jobs to `_Actors`, as Ray's documentation has it.
        raise PeerError("rounds are made by the driver, not by a trainer")


class _Actors:
    """The actors of one job."""

    def __init__(self, job: StepJob) -> None:
        import ray

        rounds = job.kind in ("round", "train")
        parts = cuts(job.elements, 1 if rounds else job.servers)
        remote: Any = ray.remote(num_cpus=0)
        server, trainer = remote(_Server), remote(_Trainer)
        self._job = job
        self.servers = [
            server.remote(cut.stop - cut.start, job.trainers) for cut in parts
        ]
        self.trainers = [
            trainer.remote(job, rank, self.servers) for rank in range(job.trainers)
        ]

    def measure(self, steps: int) -> float:
        import ray

        if self._job.kind in ("round", "train"):
            return timed_loop(self.rounds, steps)
        return float(max(ray.get([t.measure.remote(steps) for t in self.trainers])))

    def rounds(self, steps: int) -> None:
        """Make so many rounds, as the documentation does."""
        import ray

        weights = self.servers[0].pull.remote()
        for i in range(steps):
            gradients = [trainer.learn.remote(weights) for trainer in self.trainers]
            weights = self.servers[0].round.remote(*gradients)
            if i % _LOOKS == 0:
                ray.get(weights)
        ray.get(weights)


@contextmanager
def opened(
    trainers: int, servers: int, client: Any, make: Any = _Actors
) -> Iterator[Measure]:
    """Start Ray on loopback, without a dashboard."""
    # Sockets have short names: not below a long TMPDIR.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    with mock.patch.dict(os.environ, _QUIET | ENVIRON), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray

        try:
            ray.init(
                num_cpus=trainers + servers,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
                object_store_memory=1 << 30,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            # Actors without a handle end.
            actors = lru_cache(maxsize=1)(make)
            yield lambda job, steps: actors(job).measure(steps)
            actors.cache_clear()
        except ray.exceptions.RayError as error:
            raise PeerError(str(error)) from error
        finally:
            ray.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


PEER = Peer("Ray actors", opened, partial(lacking, "ray"))

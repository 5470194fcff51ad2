"""Steps of trainers, beside the limit and gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import daskps
from daskps import optim
from tests.benchmarks import clusters, peers
from tests.benchmarks.command import benchmark, duration, number
from tests.benchmarks.jobs import LEARNING_RATE, WEIGHTS, StepJob, Trainers
from tests.benchmarks.samples import Job, lasting

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

    from distributed import Client

SMALL_NBYTES = 256
SECONDS = duration("--seconds", 0.3, "of a sample")


def _beside(options: Namespace, jobs: list[StepJob]) -> Iterator[Job]:
    """Yield jobs beside each peer that covers them; a store is made for each."""
    wanted = [job for job in jobs if options.job in job.title]
    if not wanted:
        return
    with clusters.local(max(job.trainers + job.servers for job in wanted)) as client:
        for job in wanted:
            for peer in (peers.LIMIT, peers.GLOO):
                if peers.covers(peer, job):
                    yield from _pair(client, job, peer, options.seconds)


def _pair(client: Client, job: StepJob, peer: str, length: float) -> Iterator[Job]:
    _, servers = clusters.places(client, job.trainers, job.servers)
    with (
        daskps.create(
            clusters.vector(job.elements),
            client=client,
            optimizer=optim.SGD(LEARNING_RATE),
            shards=job.servers,
            servers=servers,
        ) as store,
        peers.opened(client, peer, job) as measure,
    ):
        ours = lasting(length, Trainers(store, job).measure)
        sides = {"ours": ours, peer: lasting(length, measure)}
        yield Job(job.title, sides, is_rate=job.kind == "train")


@benchmark(
    "pullpush",
    "small gets, and 16 MiB pull + push + apply, beside the limit",
    number("--mib", 16, "of the model"),
    SECONDS,
)
def pullpush(options: Namespace) -> Iterator[Job]:
    """Yield gets and updates."""
    large = options.mib * 2**20
    yield from _beside(
        options,
        [
            StepJob("get", SMALL_NBYTES, 1, 1),
            StepJob("get", SMALL_NBYTES, 2, 1),
            StepJob("pullpush", large, 1, 1),
            StepJob("pullpush", large, 2, 2),
        ],
    )


@benchmark(
    "rounds",
    "BSP rounds of 16 MiB and of 1 KiB, beside the limit and gloo",
    number("--mib", 16, "of the large model"),
    SECONDS,
)
def rounds(options: Namespace) -> Iterator[Job]:
    """Yield rounds of two trainers."""
    sizes = options.mib * 2**20, 1024
    yield from _beside(options, [StepJob("round", n, 2, 2) for n in sizes])


@benchmark(
    "train",
    "logistic regression, steps a second",
    number("--weights", WEIGHTS),
    SECONDS,
)
def train(options: Namespace) -> Iterator[Job]:
    """Yield BSP training: pull, gradient of a batch that stays the same, push."""
    jobs = [StepJob("train", 4 * options.weights, n, n) for n in (1, 2)]
    yield from _beside(options, jobs)

"""Memory of large models: read and trained by everybody, and nobody is paused.

Four workers, each with a quarter of the model and a trainer, all on one machine.

A model of 0.8 of a worker's limit is read by every trainer through shared memory, and
updated, parameter by parameter, under ASP. Dask must not charge a worker for what
another one holds. Then BSP rounds of a model of 0.4, all of it read as views and all
of it pushed: what the owner keeps must stay below two buffers of weights and the
slices that contributions may take. (Of 0.8 these would be all of the limit: a BSP run
is refused there.) Nobody may be paused or killed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import get_worker

import daskps
from daskps import optim
from daskps.cluster.host.node import HOSTS
from tests.benchmarks import clusters
from tests.benchmarks.command import benchmark, number
from tests.benchmarks.report import Verdict

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from distributed import Client

WORKERS = 4
#: Of records, tables of the mailboxes and pages that are not full, per shard.
ROUNDING = 2**20
#: How often the processes are looked at.
LOOK_SECONDS = 0.01
MIB = 2**20
#: Parameters: as many, so that one of them is small.
NAMES = tuple(f"w{i:02}" for i in range(16))
HEADS = ("model", "limit", "blocks", "bound", "own", "shared")
_STATUS = re.compile(r"^Rss(?:Anon|Shmem):\s+(\d+) kB$", re.MULTILINE)


def _loop(rounds: int, bsp: bool, trainer: daskps.Trainer, part: Any) -> int:
    """Train; return the bytes of the blocks of the trainer's worker."""
    ones = np.ones(part, np.float32)
    for _ in range(rounds):
        if bsp:
            views = trainer.pull(copy=False)
            # One array for all: what is measured is not the user's gradient.
            trainer.push(dict.fromkeys(views, ones))
            del views
        else:
            out = np.empty_like(ones)
            for name in NAMES:
                trainer.pull(name, out={name: out})
                trainer.push({name: ones})
    shards = list(HOSTS[get_worker().address].shards.values())
    boxes = [hosted.mailbox[1].nbytes for hosted in shards if hosted.mailbox]
    return sum(hosted.nbytes for hosted in shards) + sum(boxes)


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[dict[int, list[int]]]:
    """Look at processes of this machine every few milliseconds.

    Gives the most bytes that each used: pages of its own, and shared ones it touched.
    """
    found, over = {pid: [0, 0] for pid in pids}, threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SECONDS):
            for pid, most in found.items():
                with contextlib.suppress(OSError):  # the process has ended
                    text = Path(f"/proc/{pid}/status").read_text()
                    now = [1024 * int(kib) for kib in _STATUS.findall(text)] or [0, 0]
                    found[pid] = [max(pair) for pair in zip(most, now, strict=True)]

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True)
class Found:
    """The memory that one phase took, in bytes; most of the workers."""

    sync: str
    model: int
    #: What a worker may use.
    limit: int
    #: What an owner had of segments and mailboxes, and what it may have.
    blocks: int
    bound: int
    #: Pages of a worker's own, and shared ones that it touched.
    own: int
    shared: int
    #: Workers that were paused, killed or started again, with what happened.
    trouble: list[str]

    @property
    def is_kept(self) -> bool:
        """Whether the bound was kept and nobody was paused or killed."""
        return self.blocks <= self.bound and not self.trouble


def _trouble(dask_scheduler: Any, workers: Sequence[str]) -> list[str]:
    """Return what the scheduler noted: a worker that changed its state, or ended."""
    bad = ("worker-status-change", "remove-worker", "worker-close")
    return [
        f"{worker}: {event['action']} {event.get('status', '')}"
        for worker in workers
        for _, event in dask_scheduler.get_events(worker)
        # As every worker does when it starts.
        if event.get("action") in bad and event.get("prev-status") != "init"
    ]


def phase(client: Client, limit: int, share: float, *, sync: str, rounds: int) -> Found:
    """Train a model of a share of the bytes that a worker may use."""
    elements = int(share * limit / len(NAMES) / 4)
    params = {name: daskps.ArraySpec((elements,), "float32") for name in NAMES}
    pids = dict(client.run(os.getpid))
    loop, parts = partial(_loop, rounds, sync == "bsp"), [elements] * len(pids)
    with (
        watched(list(pids.values())) as peaks,
        daskps.create(params, optimizer=optim.SGD(1.0)) as store,
    ):
        blocks = daskps.run(store, loop, parts, sync=sync, callbacks=())
        if set(store.stats()["handle"]["carriers"].values()) != {"machine"}:
            raise SystemExit(
                "the way on the machine is closed: what would be measured?"
            )
    trouble: list[str] = client.run_on_scheduler(_trouble, workers=list(pids))
    trouble += [f"{w}: restarted" for w in pids if w not in client.run(os.getpid)]
    slices = -(-len(parts) // 2) + 1 if sync == "bsp" else 0
    weights = 4 * elements * len(NAMES) // len(pids)
    return Found(
        sync=sync,
        model=4 * elements * len(NAMES),
        limit=limit,
        blocks=max(blocks),
        bound=(2 + slices) * weights + ROUNDING,
        own=max(own for own, _ in peaks.values()),
        shared=max(shared for _, shared in peaks.values()),
        trouble=trouble,
    )


@benchmark(
    "memory",
    "workers with a model as large as their memory",
    number("--limit-mib", 1024, "of a worker"),
    number("--rounds", 5),
)
def memory(options: Namespace) -> Iterator[str | Verdict]:
    """Yield what models took, and whether nobody was paused or killed."""
    limit = options.limit_mib * MIB
    for sync, share in (("asp", 0.8), ("bsp", 0.4)):
        # A cluster for each: a store's memory goes a moment after it was closed.
        with clusters.local(WORKERS, memory_limit=limit) as client:
            found = phase(client, limit, share, sync=sync, rounds=options.rounds)
        took = {name: getattr(found, name) for name in HEADS}
        sizes = ", ".join(f"{name} {n / MIB:.1f}" for name, n in took.items())
        yield f"{sync}, MiB: {sizes}"
        trouble = "; ".join(found.trouble) or "nobody was paused"
        yield Verdict(f"  blocks are within their bound, {trouble}", found.is_kept)

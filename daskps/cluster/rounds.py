"""Driving a run's windows from the client, and beginning lost rounds anew."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.cluster.anchors import anchor_key
from daskps.cluster.client import ShardClient
from daskps.cluster.contributions import Place
from daskps.cluster.meta import Meta
from daskps.cluster.windows import Graph, Schedule
from daskps.errors import (
    ClockError,
    ContributionLostError,
    NotEnoughWorkersError,
    RoundLostError,
    RunCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Future

    from daskps.cluster.blocks import Part
    from daskps.cluster.graph import Receipt, Work
    from daskps.cluster.link import Link

#: How often a round is begun anew before that is an error.
MOST_TRIES = 5
#: Seconds between two reports of progress.
PROGRESS_SECONDS = 0.1
#: How long the reductions of a round that every shard has may take to say so.
LAST_WORDS_SECONDS = 5.0
#: What a round is begun anew for: a contribution or a part of the data went with a
#: worker, or a task ran again when its round was long complete.
RETRIED = (ContributionLostError, ClockError, CancelledError)
Listener = Callable[[dict[str, Any]], Awaitable[bool]]


class Ledger:
    """Losses and rows of the epoch in progress, by rank, added in order of the rounds.

    Parameters
    ----------
    schedule : Schedule
        The run's rounds.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        #: The round whose receipts are wanted next.
        self.round = 0
        self.moved = 0
        self._began = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        n = len(self._schedule.groups)
        self._rows, self._losses = [0] * n, [0.0] * n
        self._has_loss = [False] * n

    def add(self, receipts: Sequence[Receipt]) -> dict[str, Any] | None:
        """Enter the next round; return the epoch it has ended, if it has."""
        for receipt in receipts:
            self._rows[receipt.rank] += receipt.rows
            self.moved += receipt.moved
            if receipt.loss_sum is not None:
                self._losses[receipt.rank] += receipt.loss_sum
                self._has_loss[receipt.rank] = True
        self.round += 1
        epoch, within = divmod(self.round, self._schedule.per_epoch)
        return None if within else self.end(epoch - 1)

    def end(self, epoch: int) -> dict[str, Any]:
        """Return what the ranks report of an epoch that has ended."""
        now = time.monotonic()
        event = {
            "epoch": epoch,
            "reports": [
                {
                    "rank": rank,
                    "rows": rows,
                    "loss": loss if has_loss else None,
                    "seconds": now - self._began,
                    "lag": 0,
                    "clock": self.round,
                }
                for rank, (rows, loss, has_loss) in enumerate(
                    zip(self._rows, self._losses, self._has_loss, strict=True)
                )
            ],
        }
        self._began = now
        self._clear()
        return event


class GraphRun:
    """The rounds of one run.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    work : Work
        What all its tasks have in common.
    parts : list of Part
        The data of each rank.
    schedule : Schedule
        Which ranks deliver when.
    listen : callable
        Awaited with every event; says of an epoch whether to stop.
    """

    def __init__(  # noqa: PLR0917 - what a run is made of
        self,
        link: Link,
        work: Work,
        parts: Sequence[Part],
        schedule: Schedule,
        listen: Listener,
    ) -> None:
        self.link, self.client, self.listen = link, link.client, listen
        self.work, self.schedule = work, schedule
        self.homes = Homes(link, parts, work.run)
        self._ledger = Ledger(self.schedule)
        self._attempt = 0
        self._told = 0.0
        self._stopped = False
        self._futures: list[list[Future[Any]]] = []

    async def results(self) -> list[Any]:
        """Run all rounds; return nothing per rank."""
        self.meta = Meta(await self.link.directory("find", uid=self.work.uid))
        self._shards = ShardClient(self.link, self.meta)
        key = f"daskps-work-{self.work.run}"
        self._shared = self.client.submit(_same, self.work, key=key, pure=False)
        self._anchors = [
            upstream.future_of(self.client, anchor_key(self.meta.uid, shard))
            for shard in range(self.meta.layout.n_shards)
        ]
        await self.homes.settle()
        if not self.schedule.per_epoch:
            # No rows at all: each epoch is over at once.
            for epoch in range(self.schedule.epochs):
                if await self.listen(self._ledger.end(epoch)):
                    break
            return []
        tries, at = 0, 0
        while at < self.schedule.n_rounds and not self._stopped:
            try:
                await self._window(at)
                at, tries = self._ledger.round, 0
            except RETRIED as error:
                now = await self._begin_anew(error)
                tries = tries + 1 if now == at else 1
                at = now
                if tries > MOST_TRIES:
                    raise self._lost(error) from error
        await self.listen({"moved": self._ledger.moved})
        return []

    async def _window(self, start: int) -> None:
        """Submit a window and enter its rounds as they come."""
        graph = Graph(
            self._shared,
            self.meta.name,
            self.meta.hosts,
            self._anchors,
            self.homes.payloads,
            self.homes.workers,
        )
        window = self.schedule.window(start)
        for number in window:
            place = Place(self.work.run, self._attempt, number)
            graph.add(place, self.schedule.ranks(number))
        self._futures = graph.submit(self.client)
        for number, futures in zip(window, self._futures, strict=True):
            for future in futures:
                await upstream.computed(future)
            await self._progress(number + 1)
        found = await upstream.results(self.client, [row[0] for row in self._futures])
        await self._enter(start, found)
        # Before the next window goes out: the scheduler is to hold one at a time.
        self._release()
        await asyncio.sleep(0)

    async def _progress(self, clock: int) -> None:
        now = time.monotonic()
        if now - self._told >= PROGRESS_SECONDS:
            self._told = now
            await self.listen({"clock": clock})

    async def _enter(self, start: int, rounds: Sequence[Sequence[Receipt]]) -> None:
        for number, receipts in enumerate(rounds, start):
            if number == self._ledger.round and (event := self._ledger.add(receipts)):
                await self.listen({"clock": event["reports"][0]["clock"]})
                self._stopped = await self.listen(event) or self._stopped

    # -- when something was lost ---------------------------------------------

    async def _begin_anew(self, error: BaseException) -> int:
        """Find out where the shards are; return the round to go on with."""
        rows = await self._shards.control("rounds", run=self.work.run)
        now = min(n for row in rows for n in row)
        if now < 0:
            raise RunCancelledError(f"run {self.work.run} is over") from error
        await self._catch_up(now)
        # The shards keep one round before the last, which may be run again.
        if self._ledger.round < now - 1:
            raise self._lost(error) from error
        self._release()
        self._attempt += 1
        await self.listen({"retried": self._ledger.round, "why": str(error)})
        await self.homes.settle()
        return self._ledger.round

    async def _catch_up(self, now: int) -> None:
        """Enter the rounds that all shards have, as far as their reductions say so."""
        start = self._ledger.round
        for number in range(start, now):
            try:
                found = await asyncio.wait_for(
                    upstream.result(self._futures[number - start][0]),
                    LAST_WORDS_SECONDS,
                )
            except (TimeoutError, *RETRIED):
                return
            await self._enter(number, [found])

    def _lost(self, error: BaseException) -> RoundLostError:
        shard = 0
        return RoundLostError(
            self.meta.name, shard, self.meta.owners[shard], f"{error}"
        )

    def cancel(self) -> None:
        """Tell Dask that nobody wants the run any more."""
        self._release()
        self.homes.clear()

    def _release(self) -> None:
        for row in self._futures:
            for future in row:
                upstream.release(future)
        self._futures = []


class Homes:
    """Where the data of each rank is; brought back where it was lost.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    parts : list of Part
        Data of each rank. Whoever made it may empty it once the run is over.
    run : int
        The run.
    """

    def __init__(self, link: Link, parts: Sequence[Part], run: int) -> None:
        self._link, self._parts, self._run = link, parts, run
        #: What tasks are given of each rank's data.
        self.payloads: list[Any] = [None] * len(parts)
        #: Worker that holds it, "" where that is anywhere.
        self.workers: list[str] = [part.worker or "" for part in parts]
        self._sent: dict[int, list[Future[Any]]] = {}

    async def settle(self) -> None:
        """Send what is on the client to a worker, contiguous ranks together."""
        info = await self._link.node.scheduler.identity()
        workers = list(info["workers"])
        if not workers:
            raise NotEnoughWorkersError("the cluster has no worker to train on")
        missing: dict[str, list[int]] = {}
        for rank, part in enumerate(self._parts):
            self._check(rank, part)
            if any(not upstream.is_future(block) for block in part.blocks):
                if not self._is_there(rank, workers):
                    home = workers[rank * len(workers) // len(self._parts)]
                    missing.setdefault(home, []).append(rank)
            else:
                self.payloads[rank] = part.payload(())
                if self.workers[rank] not in workers:
                    # Dask computes it again, wherever it likes.
                    self.workers[rank] = ""
        for home, ranks in missing.items():
            await self._send(home, ranks)
        await self._link.directory("trains_on", run=self._run, workers=self.workers)

    def _check(self, rank: int, part: Part) -> None:
        if part.is_lost:
            raise RunCancelledError(
                f"rank {rank} lost its data with a worker, and Dask cannot compute "
                f"what was scattered again; give delayed parts or futures of tasks"
            )

    def _is_there(self, rank: int, workers: Sequence[str]) -> bool:
        sent = self._sent.get(rank)
        return (
            sent is not None
            and self.workers[rank] in workers
            and all(future.status == "finished" for future in sent)
        )

    async def _send(self, home: str, ranks: Sequence[int]) -> None:
        """Send the arrays of some ranks in one message."""
        here = {rank: self._parts[rank].values for rank in ranks}
        flat = [value for rank in ranks for value in here[rank]]
        sent = iter(await upstream.scatter(self._link.client, flat, home))
        for rank in ranks:
            self._sent[rank] = [next(sent) for _ in here[rank]]
            self.payloads[rank] = self._parts[rank].payload(self._sent[rank])
            self.workers[rank] = home

    def clear(self) -> None:
        """Let go of the data."""
        self._sent.clear()
        self.payloads = []


def _same(value: Any) -> Any:
    return value

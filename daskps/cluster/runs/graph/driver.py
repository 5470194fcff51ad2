"""Driving a run's rounds from the client, a window of task graphs at a time.

Inside a window the rounds are chained; the first tasks of a window depend on no round
before it, and go out when the window before is done. One long chain would keep every
ancestor alive on the scheduler, four tasks a round for ever. Lost rounds are begun anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from daskps.cluster import upstream
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.host.contributions import Receipt, RoundId
from daskps.cluster.keys import (
    anchor_key,
    gradient_key,
    label_of,
    reduction_key,
    work_key,
)
from daskps.cluster.runs.graph.epochs import EpochLog, Schedule
from daskps.cluster.runs.graph.tasks import Duty, compute_gradient, reduce_round
from daskps.errors import (
    ClockError,
    ContributionLostError,
    RoundLostError,
    RunCancelledError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distributed import Client, Future

    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.graph.tasks import GraphWork
    from daskps.cluster.runs.parts import DataHomes

logger = logging.getLogger(__name__)
#: How often a round is begun anew before that is an error.
_MOST_TRIES = 5
#: Seconds between two reports of progress.
_PROGRESS_SECONDS = 0.1
#: Errors for which a round is begun anew: a contribution or a part of the data went
#: with a worker, or a task ran again when its round was long complete.
_RETRIED = (ContributionLostError, ClockError, CancelledError)
#: So many shards of one worker have a reduction each; more of them have one together.
_MOST_REDUCTIONS = 8
_EpochListener = Callable[[dict[str, Any]], Awaitable[bool]]


class GraphDriver:
    """The rounds of one run.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    work : GraphWork
        The facts that all its tasks have in common.
    homes : DataHomes
        The data of each rank, and where it is.
    schedule : Schedule
        The ranks that deliver in each round.
    listen : callable
        Awaited with every event; says of an epoch whether to stop.
    """

    def __init__(
        self,
        link: Link,
        work: GraphWork,
        *,
        homes: DataHomes,
        schedule: Schedule,
        listen: _EpochListener,
    ) -> None:
        self.link, self.client, self.listen = link, link.client, listen
        self.work, self.schedule = work, schedule
        self.homes = homes
        self._ledger = EpochLog(self.schedule)
        self._attempt = 0
        #: How often in a row the round in progress was begun anew.
        self._tries = 0
        self._told = 0.0
        self._stopped = False
        self._futures: list[list[Future[Any]]] = []
        self._anchors: list[Future[Any]] = []
        #: The future of `work`.
        self._shared: list[Future[GraphWork]] = []

    async def results(self) -> list[Any]:
        """Run all rounds; return nothing per rank."""
        self.meta = StoreMap(await self.link.directory("find", uid=self.work.uid))
        joined = RunMembership(self.work.run, 1)
        self._shards = ShardClient(self.link, self.meta, joined)
        key = work_key(self.work.run)
        self._shared += [self.client.submit(_same, self.work, key=key, pure=False)]
        self._label = label_of(self.meta.name, self.meta.uid)
        self._anchors += [
            upstream.future_of(self.client, anchor_key(self._label, shard))
            for shard in range(self.meta.layout.n_shards)
        ]
        await self.homes.settle()
        if not self.schedule.per_epoch:
            # No rows at all: each epoch is over at once.
            for epoch in range(self.schedule.epochs):
                if await self.listen(self._ledger.end(epoch)):
                    break
            return []
        while self._ledger.round < self.schedule.n_rounds and not self._stopped:
            try:
                await self._window(self._ledger.round)
                self._tries = 0
            except _RETRIED as error:
                await self._begin_anew(error)
        await self.listen({"moved": self._ledger.moved})
        return []

    async def _window(self, start: int) -> None:
        """Submit a window and enter its rounds as they come."""
        window = self.schedule.window(start)
        self._futures = self._graph(window).submit(self.client)
        for number, futures in zip(window, self._futures, strict=True):
            await upstream.computed(*futures)
            await self._progress(number + 1)
        await self._enter(window.stop)
        # Before the next window goes out: the scheduler is to hold one at a time.
        self._release()
        await asyncio.sleep(0)

    def _graph(self, window: range) -> _WindowGraph:
        graph = _WindowGraph(
            self._shared[0],
            self._label,
            hosts=self.meta.hosts,
            anchors=self._anchors,
            parts=self.homes.payloads,
            homes=self.homes.workers,
            only=self.homes.only,
        )
        for number in window:
            place = RoundId(self.work.run, self._attempt, number)
            graph.add(place, self.schedule.ranks(number))
        return graph

    async def _progress(self, clock: int) -> None:
        now = time.monotonic()
        if now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            await self._tell(clock)

    async def _tell(self, clock: int) -> None:
        loss = self._ledger.loss
        await self.listen({"clock": clock, "slowest": clock, "loss": loss})

    async def _enter(self, stop: int) -> None:
        """Enter the rounds before `stop`, which are complete on all shards.

        Their receipts are with the directory: the results of their tasks go with any
        worker.
        """
        since = self._ledger.round
        about = {"run": self.work.run, "since": since}
        found = await self.link.directory("receipts", **about)
        for number in range(since, stop):
            receipts = found[number]
            if event := self._ledger.add([Receipt(*row) for row in receipts]):
                await self._tell(self._ledger.round)
                self._stopped = await self.listen(event) or self._stopped

    # -- when something was lost ---------------------------------------------

    async def _begin_anew(self, error: BaseException) -> None:
        """Find out where the shards are, and go on from there."""
        rows = await self._shards.control("rounds", run=self.work.run)
        held = zip(self.meta.hosts.values(), rows, strict=True)
        # Of the shards that are furthest behind one is named.
        now, shard = min(
            place for of, row in held for place in zip(row, of, strict=True)
        )
        if now < 0:
            raise RunCancelledError(f"run {self.work.run} is over") from error
        before = self._ledger.round
        await self._enter(now)
        self._release()
        self._tries = self._tries + 1 if self._ledger.round == before else 0
        if self._tries > _MOST_TRIES:
            owner = self.meta.owners[shard]
            lost = RoundLostError(self.meta.name, shard, owner, str(error))
            raise lost from error
        self._attempt += 1
        logger.warning(
            "daskps: round %d of a run on store %r is begun anew: %s",
            now,
            self.meta.name,
            error,
        )
        await self.listen({"retried": now})
        await self.homes.settle()

    def cancel(self) -> None:
        """Tell Dask that nobody wants the run any more."""
        self._release()
        # In place: frames of an error's traceback may hold the lists.
        self._anchors.clear()
        self._shared.clear()
        self.homes.clear()

    def _release(self) -> None:
        for row in self._futures:
            for future in row:
                upstream.release(future)
        self._futures = []


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class _WindowGraph:
    """The graph of one window.

    Parameters
    ----------
    work : Future
        Of the run's `GraphWork`.
    label : str
        The name of the store in keys.
    hosts : mapping of str to list of int
        Shards of each host.
    anchors : sequence of Future
        Anchor of each shard.
    parts : sequence
        Data of each rank: a future, or something made of futures.
    homes : sequence of str
        Worker of each rank's data, "" for any.
    only : sequence of str
        The workers that ranks may be on; all, where it names none.
    """

    work: Future[GraphWork]
    label: str
    hosts: Mapping[str, Sequence[int]]
    anchors: Sequence[Future[Any]]
    parts: Sequence[Any]
    homes: Sequence[str]
    only: Sequence[str] = ()
    layers: dict[str, MaterializedLayer] = field(default_factory=dict)
    #: Keys of each round's reductions.
    tokens: list[list[Any]] = field(default_factory=list)

    def add(self, place: RoundId, ranks: Sequence[int]) -> None:
        """Chain a round to those before it; another may follow, now or later."""
        after = self.tokens[-1] if self.tokens else []
        by_home: dict[str, dict[Any, Any]] = {}
        keys = []
        for rank in ranks:
            home = self.homes[rank]
            key = gradient_key(self.label, _numbers(place), rank)
            args = (self.work, Duty(place, rank, home), self.parts[rank], after)
            by_home.setdefault(home, {})[key] = (compute_gradient, *args)
            keys.append(key)
        for home, tasks in by_home.items():
            self._layer(f"gradient-{place.round}-{home}", tasks, home, only=self.only)
        tokens: list[Any] = []
        for host, shards in self.hosts.items():
            each = [[i] for i in shards]
            reductions = {}
            for together in each if len(each) <= _MOST_REDUCTIONS else [shards]:
                key = reduction_key(self.label, _numbers(place), together[0])
                anchors = [self.anchors[i] for i in together]
                reductions[key] = (reduce_round, self.work, place, anchors, keys)
            self._layer(f"reduce-{place.round}-{host}", reductions, host, priority=1)
            tokens += reductions
        self.tokens.append(tokens)

    def _layer(
        self,
        name: str,
        tasks: Any,
        worker: str,
        only: Sequence[str] = (),
        **annotations: Any,
    ) -> None:
        if only:
            annotations |= {"workers": [*only], "allow_other_workers": False}
        elif worker:
            # Loose: a task for one worker only waits for ever once that has left.
            annotations |= {"workers": [worker], "allow_other_workers": True}
        self.layers[name] = MaterializedLayer(tasks, annotations=annotations)

    def submit(self, client: Client) -> list[list[Future[Any]]]:
        """Submit the window; return the futures of its reductions, round by round.

        One for each round, for its progress, and of the last round all.
        """
        graph = HighLevelGraph(self.layers, {name: set() for name in self.layers})
        wanted = [tokens[:1] for tokens in self.tokens[:-1]] + [self.tokens[-1]]
        found: list[list[Future[Any]]] = upstream.submit_graph(client, graph, wanted)
        return found


def _numbers(place: RoundId) -> tuple[int, int, int]:
    return place.run, place.attempt, place.round

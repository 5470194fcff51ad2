"""Shards that move to workers which join, where the setting ``daskps.rebalance`` says so.

A worker that has stayed for a while takes shards from those with most bytes, one after
the other, as long as that brings it much nearer to the other one. Each is copied, as by
a drain; see :mod:`daskps.cluster.directory.drains`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.directory.move import time_now
from daskps.cluster.directory.placement import eligible, held_bytes
from daskps.errors import DaskPSError, LayoutError
from daskps.layout.placement import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from distributed.scheduler import WorkerState

    from daskps.cluster.directory.entry import StoreEntry
    from daskps.cluster.directory.move import ShardMoves

logger = logging.getLogger(__name__)
#: How long a worker has to stay first, and a shard where it has come to.
_STAY_SECONDS, _REST_SECONDS = 30.0, 60.0
#: Of an equal share of all bytes, how much a worker takes at most; and how many moves
#: to it fail before it gets no more.
_MOST_SHARE, _MOST_FAILURES = 1.5, 3


class Rebalance:
    """The workers that joined, and the shards that have moved to them.

    Parameters
    ----------
    moves : ShardMoves
        Knows the workers and the stores.
    send : callable
        Moves a shard of a store from a worker to another one, as `Drains.send`.
    """

    def __init__(self, moves: ShardMoves, send: Callable[..., Any]) -> None:
        self._scheduler, self._stores = moves.scheduler, moves.stores
        self._hosts, self._send = moves.hosts, send
        #: When which shard was moved last, by store and number.
        self._lately: dict[tuple[str, int], float] = {}
        #: One shard moves at a time; workers that came together take turns.
        self._turn = asyncio.Lock()

    def worker_came(self, worker: str) -> None:
        """Have a worker take its share once it has stayed for a while."""
        if config.load().rebalance:
            self._hosts.spawn(self._fill(self._scheduler.workers[worker]))

    async def _fill(self, joined: WorkerState) -> None:
        await asyncio.sleep(_STAY_SECONDS)
        target, tries = joined.address, _MOST_FAILURES
        # One that has left, and come again, has a plan of its own.
        while tries and self._scheduler.workers.get(target) is joined:
            async with self._turn:
                if found := self._choose(joined):
                    tries -= not await self._move(*found, target)
            if not (found or self._lately):
                return
            # By then those that have moved a moment ago may move again.
            await asyncio.sleep(0 if found else _REST_SECONDS)

    def _choose(self, joined: WorkerState) -> tuple[str, int] | None:
        """Return the store and shard that a worker takes next, if any.

        Of a worker with most bytes, and there of a store with most.
        """
        entries, rested = self._stores.values(), time_now() - _REST_SECONDS
        self._lately = {of: at for of, at in self._lately.items() if at > rested}
        held = sum((Counter(entry.nbytes) for entry in entries), Counter[str]())
        found = [each for of in entries for each in self._movable(of, joined, held)]
        return max(found)[-2:] if found else None

    def _movable(
        self, entry: StoreEntry, joined: WorkerState, held: Counter[str]
    ) -> Iterator[tuple[int, int, int, str, int]]:
        """Yield the shards of a store that a worker may take, with what ranks them."""
        target, of, uid = joined.address, entry.asked_servers, entry.uid
        servers = {*eligible(self._scheduler, of)} - entry.drained
        is_bound = entry.device or entry.asked_placement or not isinstance(of, str)
        if not entry.ready or is_bound or target not in servers:
            return
        taken, limits = held_bytes(self._stores.values()), {target: joined.memory_limit}
        most = _MOST_SHARE * held.total() / len(servers)
        stay = entry.without_owner | {shard for shard, _ in entry.sent_on}
        mine = Counter(entry.nbytes)
        for shard, source in enumerate(entry.owners):
            need, has, may = entry.sizes[shard], held[source], shard not in stay
            # A smaller gap than before, by a good deal: else they merely swap places.
            is_better = 1.5 * need <= has - held[target] and held[target] + need <= most
            if may and is_better and (uid, shard) not in self._lately:
                with suppress(LayoutError):
                    check_memory({target: need}, taken, limits, entry.memory_share)
                    yield has, mine[source] - mine[target], need, uid, shard

    async def _move(self, uid: str, shard: int, target: str) -> bool:
        """Move a shard to a worker; return whether it is there."""
        entry = self._stores[uid]
        about = {"shards": [shard], "worker": entry.owners[shard], "why": "balanced"}
        try:
            await self._send(entry, shard, entry.owners[shard], target)
        except (OSError, DaskPSError) as error:
            logger.info("daskps: a shard stays where it was: %r", error)
        self._lately[uid, shard] = time_now()
        if is_there := entry.owners[shard] == target:
            self._hosts.tell("shards-moved", entry, **about)
        return is_there

"""Asks the hosts of a store how far it is in its epochs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daskps.cluster.directory.runs import OPEN_SECONDS, not_begun
from daskps.cluster.wire.handlers import DIRECTORY
from daskps.epochs import Epochs
from daskps.errors import StaleGenerationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.runs import Runs

#: Between two tries, while a host of the store dies.
PAUSE_SECONDS = 0.1


class EpochCounts:
    """Asks the shards of a store, whose records count its epochs."""

    def __init__(
        self, hosts: Hosts, runs: Runs, entry: Callable[[str], StoreEntry]
    ) -> None:
        self._hosts, self._runs, self._entry = hosts, runs, entry

    @DIRECTORY.handles("epochs")
    async def on_epochs(self, uid: str) -> tuple[Epochs, str]:
        """Return where a store is in its epochs, once no run is on its way to an end.

        And what its client has said of the run that ended last.

        Raises
        ------
        ConsistencyError
            While one goes on.
        """
        left, clock = OPEN_SECONDS, asyncio.get_running_loop().time
        while True:
            entry, began = await self._runs.free_entry(uid), clock()
            try:
                async with asyncio.timeout(max(left, 0)):
                    return await self._furthest(entry), entry.trained_by
            except (OSError, StaleGenerationError) as error:
                # A host dies: its shards find an owner, or are lost.
                left -= clock() - began + PAUSE_SECONDS
                if left <= 0:
                    raise not_begun(entry, error) from error
                await asyncio.sleep(PAUSE_SECONDS)

    @DIRECTORY.handles("trained_by")
    def on_trained_by(
        self, uid: str, described: str | None = None, lineage: str = ""
    ) -> str:
        """Return what run has trained a store last, or does; or note it of a new one.

        And the lineage of the checkpoint that it was loaded from.
        """
        entry = self._entry(uid)
        if described is not None:
            entry.trained_by = described
        entry.lineage = lineage or entry.lineage
        return entry.trained_by

    async def _furthest(self, entry: StoreEntry) -> Epochs:
        """Return where the shard is that has come furthest.

        After rounds all are at the same place. Without, a run that was fenced may have
        left one of them a step ahead.
        """
        asked = [
            self._hosts.control(worker, "epochs", store=entry.uid)
            for worker in entry.hosts
        ]
        rows = [Epochs(*row) for of in await asyncio.gather(*asked) for row in of]
        return max(rows, key=lambda epochs: epochs.place)

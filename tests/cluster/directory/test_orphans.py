"""Memory of dead workers that nobody adopts, and who removes it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from daskps.cluster.directory import machines as orphans
from daskps.cluster.directory.machines import Orphans

HERE, OTHER, FAR = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.2:1"


class Hosts:
    """Workers that find two blocks of the dead; the first one does not answer once."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.work: list[Any] = []

    async def control(self, worker: str, method: str, **more: Any) -> Any:
        self.told.append((worker, method, more.get("names"), more.get("keep")))
        if len(self.told) == 1:
            raise OSError("it is just going")
        return ["a", "b"]

    def spawn(self, work: Any) -> None:
        self.work.append(asyncio.ensure_future(work))


def test_what_no_store_names_is_removed_once_that_is_known(monkeypatch: Any) -> None:
    """Not while a store is made, nor by a worker of another machine."""
    monkeypatch.setattr(orphans, "PAUSE_SECONDS", 0.0)
    known: list[tuple[set[str], list[Any]] | None] = [None, ({"a", "c"}, [(0, "c")])]
    cluster: Any = SimpleNamespace(id="x", workers=[FAR])
    hosts: Any = Hosts()

    async def look() -> None:
        found = Orphans(cluster, hosts, lambda: known.pop(0))
        found.worker_left(HERE)
        await asyncio.gather(*hosts.work)
        # Nobody is there yet.
        assert hosts.told == []
        cluster.workers.append(OTHER)
        found.worker_came(FAR)
        found.worker_came(OTHER)
        await asyncio.gather(*hosts.work)
        found.worker_came(OTHER)
        await asyncio.gather(*hosts.work)

    asyncio.run(look())
    asks = [(OTHER, "orphans", None, None)] * 3
    assert hosts.told == [*asks, (OTHER, "sweep", ["b"], [(0, "c")])]

"""Cuts as the directory leads them, over hosts that only answer."""

from __future__ import annotations

import asyncio
from typing import Any

from daskps.cluster.directory.cuts import Cuts
from daskps.cluster.directory.entry import StoreEntry
from daskps.cluster.protocol.reports import pack_report
from daskps.layout.arrays import Layout
from daskps.shards.cuts.cut import ShardReport
from tests import virtual


class Answering:
    """Two hosts of one shard each; the second one leaves after a cut has begun."""

    def __init__(self, entry: StoreEntry) -> None:
        self.entry, self.n_attempts = entry, 0

    async def everywhere(
        self, entry: StoreEntry, method: str, **kwargs: Any
    ) -> list[Any]:
        if method == "begin_cut":
            self.n_attempts += 1
            reports = [[pack_report(ShardReport(i))] for i in range(2)]
            if self.n_attempts == 1:
                # As its worker leaves: its shard is nobody's for a moment.
                entry.set_away([1], "left")
            return reports
        if method == "fill_cut":
            copied = [[(i, 7)] for i in range(2) if i not in entry.away]
            entry.settle([1])
            return copied
        return []

    def spawn(self, work: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work)


def made() -> StoreEntry:
    return StoreEntry(
        uid="u",
        name="s",
        client="c",
        session=False,
        layout=Layout.build({"w": ((2,), "float64")}, 2).to_wire(),
        owners=("a", "b"),
        nbytes={"a": 8, "b": 8},
        memory_share=0.5,
        rules=b"",
        optimizers={},
        ready=True,
    )


def test_a_shard_that_leaves_after_the_cut_began_is_not_left_out() -> None:
    entry = made()

    async def cut() -> dict[str, Any]:
        hosts: Any = Answering(entry)
        cuts = Cuts(hosts, lambda uid: entry, lambda producers: [])
        return await cuts.on_cut("u", ("client", "c"), 60.0, cut="one", index=None)

    assert virtual.run(cut())["versions"] == [(0, 7), (1, 7)]


class Drained(Answering):
    """Hosts whose second one has given its shard away when a cut was made."""

    def __init__(self, entry: StoreEntry) -> None:
        super().__init__(entry)
        self.dropped = list[str]()

    async def everywhere(
        self, entry: StoreEntry, method: str, **kwargs: Any
    ) -> list[Any]:
        self.n_attempts = 1
        return await super().everywhere(entry, method, **kwargs)

    def has_worker(self, worker: str) -> bool:
        return True

    async def control(self, worker: str, method: str, **kwargs: Any) -> None:
        assert method == "drop_cut"
        self.dropped.append(worker)


def test_hosts_that_have_given_their_shards_away_free_the_copies() -> None:
    entry = made()

    async def cut() -> list[str]:
        hosts: Any = Drained(entry)
        cuts = Cuts(hosts, lambda uid: entry, lambda producers: [])
        await cuts.on_cut("u", ("client", "c"), 60.0, cut="one", index=None)
        entry.owners = ("a", "a")
        cuts.on_drop_cut("one")
        await asyncio.sleep(1.0)
        return list(hosts.dropped)

    assert virtual.run(cut()) == ["a", "b"]

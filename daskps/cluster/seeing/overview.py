"""All stores of a scheduler as rows of plain values, for the page and for Prometheus.

They come from the directory, from heartbeats and from the log of events: nobody is asked.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from itertools import islice
from operator import add
from typing import TYPE_CHECKING, Any

from daskps.cluster.seeing.numbers import UID_LENGTH
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from distributed import Scheduler

    from daskps.cluster.directory.directory import Directory
    from daskps.cluster.directory.entry import StoreEntry
    from daskps.cluster.directory.run import RunState

#: Under which a scheduler has its directory.
EXTENSION = "daskps-directory"
#: Keys of every event.
_HEAD = "action", "store", "uid"
#: Rows of a section, and of events, at most.
MOST_ROWS, MOST_EVENTS = 100, 50
#: The columns of each section; a name of two words is "of_two".
COLUMNS = {
    "stores": "store kind shards workers bytes away lost copies checkpoint "
    "checkpoint_bytes failed_saves",
    "workers": "worker shards bytes pushes/s parked copies_behind sockets "
    "calls_by_socket calls_by_message fallbacks_to_messages",
    "shards": "store shard worker state bytes version pushes/s parked copy copy_behind",
    "runs": "run store sync trainers clock clocks/s loss staleness waits",
    "trainers": "run store rank worker clock behind",
    "tables": "store table dim dtype rows admitted evicted",
    "events": "time event store more",
}
#: The keys of a report that are columns of workers.
_OF_WORKERS = (
    *("shards", "nbytes", "rate", "parked", "behind"),
    *("sockets", "socket_calls", "calls"),
)


class Overview:
    """The stores of one scheduler, as they are now.

    Parameters
    ----------
    scheduler : Scheduler
        It may have no directory yet.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        directory: Directory | None = scheduler.extensions.get(EXTENSION)
        entries = directory.stores.values() if directory else ()
        self.entries: Sequence[StoreEntry] = [entry for entry in entries if entry.ready]
        self.told = directory.hosts.told if directory else {}
        self._runs = [*directory.runs.open.values()] if directory else []
        #: By worker the last report of its host. Anybody's metrics may bear that name,
        #: and hosts of another version are refused here.
        self.reports: Mapping[str, dict[str, Any]] = {
            ws.address: of
            for ws in scheduler.workers.values()
            if isinstance(of := ws.metrics.get("daskps"), dict)
            and of.get("version") == VERSION
        }

    def rows(self, section: str) -> list[dict[str, Any]]:
        """Return the rows of a section, each with the names of its columns."""
        names = [name.replace("_", " ") for name in COLUMNS[section].split()]
        found: Iterable[Sequence[Any]] = getattr(self, section)()
        some = islice(found, MOST_ROWS)
        return [dict(zip(names, row, strict=True)) for row in some]

    def stores(self) -> Iterator[Sequence[Any]]:
        """Give a row per store."""
        now = time.time()
        for e in self.entries:
            n = len(e.owners), len(set(e.owners)), sum(e.nbytes.values())
            made = sum(copy.counts for copy in e.copies.values())
            saved = _ago(now - e.saved[0]) if e.saved[0] else "none"
            shards = *n, len(e.away), len(e.lost), made
            kind = "session" if e.session else "named"
            yield e.name, kind, *shards, saved, e.saved[1] or None, e.failed_saves

    def workers(self) -> list[Sequence[Any]]:
        """Return a row per worker with a host, the busiest first."""
        rows = []
        for worker, of in self.reports.items():
            reasons = (f"{why}: {n}" for why, n in of["fallbacks"].items())
            rows.append((worker, *map(of.__getitem__, _OF_WORKERS), "; ".join(reasons)))
        return sorted(rows, key=lambda row: -row[3])

    def shards(self) -> list[Sequence[Any]]:
        """Return a row per shard: those without an owner, the busiest, and others."""
        known = {}
        for of in self.reports.values():
            for store, index, *state in of["busiest"]:
                known[of["stores"][store], index] = state
        found: list[Any] = []
        for entry in self.entries:
            uid = entry.uid[:UID_LENGTH]
            for index in range(len(entry.owners)):
                state = known.get((uid, index), (0.0, None, None, None))
                is_here = index not in entry.lost and index not in entry.away
                found.append((is_here, -state[0], len(found), entry, index, state))
        chosen = heapq.nsmallest(MOST_ROWS, found)
        return [_shard(entry, index, *state) for *_, entry, index, state in chosen]

    def tables(self) -> Iterator[Sequence[Any]]:
        """Give a row per table; an unbounded one has the rows that were told."""
        sums = defaultdict[Any, list[int]](lambda: [0, 0, 0])
        for of in self.reports.values():
            for uid, ordinal, *counts in of["tables"]:
                sums[uid, ordinal] = [*map(add, sums[uid, ordinal], counts)]
        for e in self.entries:
            unbounded = {name for name, *_ in e.layout.get("unbounded", ())}
            for i, (name, rows, dim, dtype) in enumerate(e.layout.get("tables", ())):
                there, *moved = sums[e.uid[:UID_LENGTH], i]
                n_rows = there if name in unbounded else rows
                yield e.name, name, dim, dtype, n_rows, *moved

    def runs(self) -> Iterator[Sequence[Any]]:
        """Give a row per run that goes on."""
        for run, clock, rate, waiting, slowest in self._going():
            sync = f"ssp({run.staleness})" if run.sync == "ssp" else run.sync
            loss = run.last_loss if run.loss is None else run.loss
            behind = max(clock - slowest[0][1], 0) if slowest else 0
            head = run.id, run.entry.name, sync, f"{len(run.live)} of {run.size}"
            yield *head, clock, rate, loss, behind, _waits(run, waiting, slowest)

    def trainers(self) -> Iterator[Sequence[Any]]:
        """Give a row per trainer, of each run those that are furthest behind."""
        for run, clock, _, _, slowest in self._going():
            for rank, at in slowest:
                head = run.id, run.entry.name, rank, run.ranks.get(rank, "")
                yield *head, at, max(clock - at, 0)

    def _going(self) -> Iterator[tuple[RunState, int, float, int, Sequence[Any]]]:
        """Give runs, with the clocks of the host that has seen most of each."""
        reported = dict[int, Any]()
        for of in self.reports.values():
            for number, *clocks in of["runs"]:
                reported[number] = max(reported.get(number, clocks), clocks)
        for run in self._runs:
            yield run, *reported.get(run.id, (run.clock, 0.0, 0, ()))

    def events(self) -> Iterator[Sequence[Any]]:
        """Give the latest events, the last one first."""
        for at, of in reversed(self._scheduler.get_events("daskps")[-MOST_EVENTS:]):
            # Anybody may log events under any topic.
            if not (isinstance(of, dict) and {*_HEAD} <= of.keys()):
                continue
            more = [f"{k} {v}" for k, v in of.items() if k not in _HEAD]
            clock = time.strftime("%H:%M:%S", time.localtime(at))
            yield clock, of["action"], of["store"], ", ".join(more)


def _shard(
    entry: StoreEntry, index: int, rate: float, version: Any, *more: Any
) -> Sequence[Any]:
    """Return the row of a shard: parked calls are told, and how far its copy is behind."""
    copy, state, (parked, behind) = entry.copies.get(index), "here", more
    if index in entry.away:
        state = f"away: {entry.away[index]}"
    elif index in entry.lost:
        state = f"LOST: {entry.lost[index][1]}"
    head = entry.name, index, entry.owners[index], state, entry.sizes.get(index)
    of_copy = (copy.worker, behind) if copy else ("", None)
    return *head, version, rate, parked, *of_copy


def _waits(run: RunState, waiting: int, slowest: Sequence[Sequence[int]]) -> str:
    """Return in words whom the trainers of a run wait for."""
    if run.fenced:
        return f"it ends: that waits for {run.waits_for}"
    if not waiting:
        return ""
    rank = slowest[0][0]
    return f"{waiting} for trainer {rank} on {run.ranks.get(rank, 'no worker')}"


def _ago(seconds: float) -> str:
    """Return a time in words.

    Examples
    --------
    >>> _ago(65), _ago(7300)
    ('1 min ago', '2.0 h ago')
    """
    minutes = seconds / 60
    return f"{minutes:.0f} min ago" if minutes < 100 else f"{minutes / 60:.1f} h ago"

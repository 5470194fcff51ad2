"""Numbers for Prometheus, on the /metrics that schedulers and workers of Dask serve.

A process has one collector for all its schedulers, and one for its workers: Prometheus
takes each name once, and Dask's own tests start several servers in a process.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.cluster.seeing.overview import Overview

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from distributed import Scheduler

    from daskps.cluster.seeing.numbers import HostReport

    #: Name, type and description of a metric; its labels and values.
    Family = tuple[str, str, str, list[Any]]

logger = logging.getLogger(__name__)
#: How many stores have metrics of their own.
MOST_STORES = 20
#: Events that are counted from 0 on, so that the first one is a rise.
_ALARMS = "save-failed", "shards-away", "shards-lost", "copies-together", "run-fenced"
#: Names of metrics of workers, their types, keys in a report, and descriptions.
_OF_WORKERS = [
    ("pushes", "counter", "pushes", "Pushes that shards here have applied"),
    ("served_by_message", "counter", "calls", "Messages that were served here"),
    ("served_by_socket", "counter", "socket_calls", "Calls by socket that were"),
    ("shards", "gauge", "shards", "Shards here"),
    ("bytes", "gauge", "nbytes", "Bytes of shards, copies, and what runs keep here"),
    ("answer_bytes", "gauge", "answers", "Bytes of answers under way"),
    ("sockets", "gauge", "sockets", "Sockets that are open to this worker"),
    ("parked_calls", "gauge", "parked", "Calls that wait in shards here"),
    ("copies_behind", "gauge", "behind", "Updates that second copies have yet to get"),
]
_ROWS = "rows", "rows_admitted", "rows_evicted"


def of_workers(reports: Iterable[HostReport]) -> Iterator[Family]:
    """Give the metrics of the workers of this process, as of their last heartbeats."""
    latest = [report.latest for report in reports if report.latest]
    for name, kind, key, about in _OF_WORKERS:
        yield name, kind, about, [({}, sum(of[key] for of in latest))]
    for at, name in enumerate(_ROWS, 2):
        n = sum(table[at] for of in latest for table in of["tables"])
        yield name, "gauge", "Of the six largest unbounded tables, here", [({}, n)]
    callers, reasons = Counter[str](), Counter[str](none=0)
    for of in latest:
        callers.update(of["callers"])
        reasons.update(of["fallbacks"])
    about = "Counts of all handles and trainers here"
    yield "callers", "counter", about, _by("count", callers)
    about = "Calls that went on by message in place of a socket"
    yield "fallbacks", "counter", about, _by("reason", reasons)


def of_schedulers(schedulers: Iterable[Scheduler]) -> Iterator[Family]:
    """Give the metrics of the schedulers of this process."""
    views = [Overview(scheduler) for scheduler in schedulers]
    entries = [entry for view in views for entry in view.entries]
    runs = [row for view in views for row in view.rows("runs")]
    yield "stores", "gauge", "Stores", [({}, len(entries))]
    away, lost = (sum(len(getattr(e, of)) for e in entries) for of in ("away", "lost"))
    n = sum(len(e.owners) for e in entries)
    states = {"here": n - away - lost, "away": away, "lost": lost}
    yield "shards", "gauge", "Shards of all stores", _by("state", states)
    made = sum(copy.counts for e in entries for copy in e.copies.values())
    wanted = sum(len(e.owners) for e in entries if e.n_copies > 1)
    copies = {"made": made, "missing": wanted - made}
    yield "copies", "gauge", "Second copies of shards", _by("state", copies)
    yield "runs", "gauge", "Runs that go on", [({}, len(runs))]
    behind = max((row["staleness"] for row in runs), default=0)
    about = "Clocks by which the slowest trainer of any run is behind"
    yield "staleness", "gauge", about, [({}, behind)]
    saved = [e for e in entries if e.saved[0] and not e.session][:MOST_STORES]
    times, sizes = ({e.name: e.saved[i] for e in saved} for i in (0, 1))
    about = "When the last checkpoint of a store was written"
    yield "checkpoint_timestamp_seconds", "gauge", about, _by("store", times)
    yield "checkpoint_bytes", "gauge", "Bytes of that checkpoint", _by("store", sizes)
    told = Counter[str](dict.fromkeys(_ALARMS, 0))
    for view in views:
        told.update(view.told)
    yield "events", "counter", "Events of the topic daskps", _by("event", told)


def _by(label: str, values: Mapping[str, Any]) -> list[Any]:
    return [({label: of}, value) for of, value in values.items()]


class Collector:
    """Metrics of all servers of one kind in this process.

    Parameters
    ----------
    subsystem : str
        Begins the names of its metrics.
    families : callable
        Gives them, of the servers that there are.
    """

    def __init__(
        self, subsystem: str, families: Callable[[Any], Iterator[Family]]
    ) -> None:
        self._subsystem, self._families = subsystem, families
        self._servers = weakref.WeakSet[Any]()
        self._is_registered = self._has_failed = False

    def add(self, server: Any) -> None:
        """Have a server in the metrics from now on, where Prometheus' client is."""
        self._servers.add(server)
        if self._is_registered:
            return
        self._is_registered = True
        try:
            from prometheus_client import REGISTRY

            REGISTRY.register(self)
        except Exception as error:  # noqa: BLE001 - stores do without
            logger.info("no metrics of daskps at /metrics: %r", error)

    def discard(self, server: Any) -> None:
        """Have a server in them no more."""
        self._servers.discard(server)

    def describe(self) -> list[Any]:
        """Return nothing: names are looked for when there is something to show."""
        return []

    def collect(self) -> list[Any]:
        """Return all metrics, for one scrape; none where one of them fails.

        Dask's own are on the same page, which an error here would cost.
        """
        try:
            return [*self._metrics()]
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("no metrics of daskps at /metrics; this is said once")
            return []

    def _metrics(self) -> Iterator[Any]:
        from prometheus_client import Metric

        name_of = upstream.metric_names(self._subsystem)
        for name, kind, about, samples in self._families([*self._servers]):
            metric = Metric(name_of(name), about, kind)
            suffix = "_total" if kind == "counter" else ""
            for labels, value in samples:
                # Here it fails, if it is no number, and not as the page is written.
                metric.add_sample(metric.name + suffix, labels, float(value))
            yield metric


WORKERS = Collector("daskps_worker", of_workers)
SCHEDULERS = Collector("daskps", of_schedulers)

"""Traffic of a run of `train`, and where the time of its trainers has gone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from dask.utils import format_bytes

from daskps.cluster.caller.targets import sizes_of
from daskps.training.timeline import EpochTimes, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from daskps.cluster.caller.routes import Computed
    from daskps.cluster.caller.session import Session
    from daskps.typing import Array


@dataclass(frozen=True, slots=True)
class RankStats:
    """Traffic of one trainer, and where its time has gone.

    Parameters
    ----------
    rank : int
        The trainer's rank.
    sent_nbytes, sent_encoded_nbytes : int
        Bytes of what it has delivered, by whichever way: as numbers, and as `codec` has
        them.
    received_nbytes, received_encoded_nbytes : int
        Bytes of what it has pulled: as numbers, and as `pull_codec` has them.
    compute_seconds : float
        Spent in your functions and around them, between two exchanges.
    delivery_seconds, waiting_seconds : float
        Spent in exchanges with the shards. Each counts as delivery for as long as the
        trainer's quickest one has taken, and what any took beyond that as waiting: for
        other trainers, for locks, for the network. In the task graph delivery is the
        time to read the weights, and waiting the rest of an epoch.
    retries : int
        Messages that were sent again.
    messages, socket_calls, local_calls : int
        Calls to shards by message, by socket, and in memory of this machine. The task
        graph makes none.

    Examples
    --------
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> store = daskps.create({"w": np.zeros(4)}, optimizer=daskps.optim.SGD(1.0))
    >>> [one] = daskps.train(store, gradient, np.eye(4), trainers=1).stats.ranks
    >>> one.rank, one.sent_nbytes, one.received_nbytes, one.retries
    (0, 32, 64, 0)
    """

    rank: int
    sent_nbytes: int = 0
    sent_encoded_nbytes: int = 0
    received_nbytes: int = 0
    received_encoded_nbytes: int = 0
    compute_seconds: float = 0.0
    delivery_seconds: float = 0.0
    waiting_seconds: float = 0.0
    retries: int = 0
    messages: int = 0
    socket_calls: int = 0
    local_calls: int = 0


class ShardShare(NamedTuple):
    """The share of one shard in a store."""

    shard: int
    worker: str
    nbytes: int


#: Of so many times of trainers and epochs the older ones are added up.
MOST_TIMES = 2**15
#: Names of the fields that add up from report to report: all but the rank.
_SUMMED = [one.name for one in fields(RankStats)][1:]


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Traffic of a run of `train`, and where the time of its trainers has gone.

    Of the epochs that have ended; of one within which a run was stopped only what the
    shards and the client have counted.

    Parameters
    ----------
    ranks : tuple of RankStats
        One for each trainer.
    staleness : dict of int to int
        How many exchanges there were after which the slowest live trainer was so many
        clocks behind.
    delays : dict of int to int
        Where `sync` is an `ASP` that bounds or dampens: how many gradients of how many
        shards had a delay of so many updates, or more, up to the next entry.
    dropped : int
        How many of them were too old, and not applied.
    duplicates : int
        Pushes the shards saw twice, of this run and of all before on the store.
    lost_trainers : int
        Trainers that went with their workers, and were started again.
    retried_rounds : int
        Rounds of the task graph that were begun anew.
    retried_runs : int
        How often the run went on after an error, as `retries` allows.
    moved_parts : int
        Blocks of dask arrays, futures and delayed parts that lay on another worker than
        the trainer they were for when it was started, and parts that went to a gradient
        task elsewhere.
    skipped_saves : int
        Checkpoints that were left out, as the one before was still being written.
    clock : int
        Rounds that there were; under SSP and ASP the last clock.
    shards : tuple of ShardShare
        Number, worker and bytes of each shard at the end.
    epochs : tuple of EpochTimes
        Where each trainer's time went, epoch by epoch; see :meth:`TrainResult.timeline`.
        Of more than 32,768 some that follow each other are one, with the first number.

    Examples
    --------
    >>> gradient = lambda params, X, y: {"w": X.mean(axis=0)}
    >>> store = daskps.create({"w": np.zeros(4)}, optimizer=daskps.optim.SGD(1.0))
    >>> options = {"trainers": 2, "batch_size": 1, "codec": "bf16"}
    >>> stats = daskps.train(store, gradient, np.eye(4), **options).stats
    >>> [(one.rank, one.sent_nbytes, one.sent_encoded_nbytes) for one in stats.ranks]
    [(0, 64, 16), (1, 64, 16)]
    >>> stats.clock, stats.staleness, stats.dropped
    (2, {0: 4}, 0)
    """

    ranks: tuple[RankStats, ...] = ()
    staleness: dict[int, int] = field(default_factory=dict)
    delays: dict[int, int] = field(default_factory=dict)
    dropped: int = 0
    duplicates: int = 0
    lost_trainers: int = 0
    retried_rounds: int = 0
    retried_runs: int = 0
    moved_parts: int = 0
    skipped_saves: int = 0
    clock: int = 0
    shards: tuple[ShardShare, ...] = ()
    epochs: tuple[EpochTimes, ...] = field(default=(), repr=False)

    def sum(self, name: str) -> Any:
        """Return what a field of `ranks` comes to over all trainers.

        Parameters
        ----------
        name : str
            Of a number, such as "sent_nbytes".

        Returns
        -------
        int or float
            The sum.

        Examples
        --------
        >>> ranks = RankStats(0, retries=1), RankStats(1, retries=2)
        >>> TrainStats(ranks).sum("retries")
        3
        """
        return sum(getattr(one, name) for one in self.ranks)


_TIMES = ("compute", "delivery", "waiting")
#: Counts of a trainer's calls, which it reports.
_COUNTED = ("retries", "messages", "socket_calls", "local_calls")
_TROUBLE = ("lost_trainers", "retried_rounds", "retried_runs", "skipped_saves")


def lines_of(stats: TrainStats) -> Iterator[str]:
    """Give what there is to say of a run, a line each."""
    bytes_said = [
        f"{what} {_sizes(*(stats.sum(f'{what}{of}_nbytes') for of in ('', '_encoded')))}"
        for what in ("sent", "received")
        if stats.sum(f"{what}_nbytes")
    ]
    times = [f"{stats.sum(f'{of}_seconds'):.2f} s {of}" for of in _TIMES]
    if bytes_said:
        yield f"{', '.join(bytes_said)}; {', '.join(times)}"
    if any(stats.staleness.keys() - {0}):
        yield f"staleness in clocks: {_counted(stats.staleness)}"
    if stats.delays:
        dropped = f", {stats.dropped} dropped" if stats.dropped else ""
        yield f"delays in updates: {_counted(stats.delays)}{dropped}"
    # Duplicates are not the run's alone: its shards count them from their first.
    trouble = {name: getattr(stats, name) for name in _TROUBLE}
    trouble["retries"] = stats.sum("retries")
    if found := [f"{name} {n}" for name, n in trouble.items() if n]:
        yield ", ".join(found)


def _sizes(plain: int, encoded: int) -> str:
    if plain == encoded:
        return format_bytes(plain)
    return f"{format_bytes(plain)} as {format_bytes(encoded)}"


def _counted(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{value}: {n}" for value, n in sorted(counts.items()))


class StatsOfRun:
    """Adds up what trainers report of their epochs."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankStats] = {}
        self._epochs: list[EpochTimes] = []
        self._staleness: Counter[int] = Counter()

    def add(self, epoch: int, reports: Iterable[Mapping[str, Any]]) -> None:
        """Take in the reports of an epoch."""
        for report in reports:
            rank = report["rank"]
            before = self._ranks.get(rank, RankStats(rank))
            more = {n: getattr(before, n) + report.get(n, 0) for n in _SUMMED}
            self._ranks[rank] = replace(before, **more)
            begin = sum(getattr(before, f"{of}_seconds") for of in _TIMES)
            times = (report[f"{of}_seconds"] for of in _TIMES)
            self._epochs.append(EpochTimes(rank, epoch, begin, *times))
            self._staleness.update(dict(report["lags"]))
        if len(self._epochs) > MOST_TIMES:
            self._epochs = joined(
                self._epochs, MOST_TIMES // 2 // len(self._ranks) or 1
            )

    def total(
        self, counted: Mapping[str, int], shards: Iterable[Mapping[str, Any]]
    ) -> TrainStats:
        """Return all of it, with what the client and the shards have counted."""
        delays: Counter[int] = Counter()
        dropped = duplicates = 0
        shards = sorted(shards, key=itemgetter("shard"))
        for row in shards:
            delays.update(dict(row["delays"]))
            dropped += row["dropped"]
            duplicates += row["duplicates"]
        return TrainStats(
            tuple(self._ranks[rank] for rank in sorted(self._ranks)),
            dict(sorted(self._staleness.items())),
            dict(sorted(delays.items())),
            dropped,
            duplicates,
            **counted,
            shards=tuple(
                ShardShare(*(row[name] for name in ShardShare._fields))
                for row in shards
            ),
            epochs=tuple(self._epochs),
        )


class Meter:
    """Counts what one trainer does in an epoch.

    Parameters
    ----------
    session : Session
        Its place in the run.
    dense : sequence of ndarray
        The arrays that each of its exchanges reads.
    more_lag : int
        Clocks by which what is used is older than what was read last.
    """

    def __init__(self, session: Session, dense: Iterable[Array], more_lag: int) -> None:
        self._session, self._more_lag = session, more_lag
        self._dense = sizes_of(dense, in_words=session.reads_in_words)
        self._quickest = math.inf
        self._told_saved, self._told = 0, dict.fromkeys(_COUNTED, 0)
        self._clear()

    def _clear(self) -> None:
        self._compute = self._exchanging = 0.0
        self._n = self._sent = self._read = self._read_encoded = 0
        self._lags: dict[int, int] = {}

    @property
    def lag(self) -> int:
        """Largest number of clocks that a live trainer was behind in the epoch."""
        return max(self._lags, default=0)

    def computed(self, found: Computed, seconds: float) -> None:
        """Count a step of the user's, before it is delivered."""
        self._compute += seconds
        for array in found.arrays.values():
            self._sent += array.nbytes
        for one in found.of_tables:
            self._sent += one.data.nbytes

    def read(self) -> None:
        """Count a read of all arrays."""
        plain, encoded = self._dense
        self._read += plain
        self._read_encoded += encoded

    def exchanged(self, seconds: float, rows: Sequence[Array] = ()) -> None:
        """Count an exchange with the shards, which has read these rows too."""
        self._exchanging += seconds
        self._quickest = min(self._quickest, seconds)
        self._n += 1
        reads = self._session.reads
        lag, reads.lag = reads.lag + self._more_lag, 0
        self._lags[lag] = self._lags.get(lag, 0) + 1
        self.read()
        if rows:
            plain, encoded = sizes_of(rows, in_words=self._session.reads_in_words)
            self._read += plain
            self._read_encoded += encoded

    def report(self) -> dict[str, Any]:
        """Return what there was since the last report, and begin anew."""
        session, delivery = self._session, 0.0
        if self._n:
            delivery = self._n * self._quickest
        saved, counters = session.saved_nbytes, session.shards.counters
        now = {name: getattr(counters, name) for name in _COUNTED}
        found = {
            "sent_nbytes": self._sent,
            "sent_encoded_nbytes": self._sent - (saved - self._told_saved),
            "received_nbytes": self._read,
            "received_encoded_nbytes": self._read_encoded,
            "compute_seconds": self._compute,
            "delivery_seconds": delivery,
            "waiting_seconds": max(0.0, self._exchanging - delivery),
            **{name: n - self._told[name] for name, n in now.items()},
            "lags": [*self._lags.items()],
        }
        self._told_saved, self._told = saved, now
        self._clear()
        return found

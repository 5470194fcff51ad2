"""The numbers of a host, as they travel with the heartbeats of its worker.

They are counted where the work is done; here they are read, and nothing is written into
a shard. However many shards there are, a report has the 16 busiest ones, and sums.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import asdict
from operator import add
from typing import TYPE_CHECKING, Any

from daskps.cluster.counters import counters_of
from daskps.shards.memory import format as words
from daskps.shards.rounds.mailbox import TURNS
from daskps.shards.rounds.words import ROUND, TICKED
from daskps.shards.run_record import POLICY_CODES
from daskps.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.shards.shard import Shard

#: How many shards, tables, runs, ranks and reasons a report names at most; letters of a
#: store's uid by which it names the store, and of a reason.
MOST_SHARDS, MOST_TABLES, MOST_RUNS, MOST_RANKS, MOST_REASONS = 16, 6, 2, 8, 6
UID_LENGTH, REASON_LENGTH = 12, 48
#: A host of more shards looks at them less often: so many more a second at most. Their
#: memory is in no cache by then, and each takes 2 µs.
FEW_SHARDS, _MORE_A_SECOND = 250, 500
#: Policies under which trainers wait for each other.
_WAITS = POLICY_CODES["bsp"], POLICY_CODES["ssp"]
#: Store and number of a shard.
_Key = tuple[str, int]


class HostReport:
    """The numbers of a host that its worker tells with each heartbeat.

    Parameters
    ----------
    host : ShardHost
        The host.

    Attributes
    ----------
    pushes : int
        How many there were here, also in shards that have left.
    latest : dict
        The last report.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host, self._at, self.pushes = host, time.monotonic(), 0
        #: By run its clock at the last report.
        self._clocks: dict[int, int] = {}
        self.latest: dict[str, Any] = {}
        self._reasons = list[str]()

    def __call__(self) -> dict[str, Any]:
        """Return the report of now; of many shards the last one may do."""
        now, host = time.monotonic(), self._host
        pause = (len(host.shards) - FEW_SHARDS) / _MORE_A_SECOND
        if self.latest and now - self._at < pause:
            return self.latest
        seconds, self._at = max(now - self._at, 0.1), now
        busy, growing, runs = list[tuple[int, _Key]](), list[_Key](), dict[int, Any]()
        sums = {"duplicates": 0, "parked": 0, "behind": 0}
        # A host may have thousands: few steps for each of them.
        for key, hosted in host.shards.items():
            shard = hosted.shard
            segment = shard.segment
            n, was = segment.header[words.N_APPLIED], hosted.told_pushes
            hosted.told_pushes = n
            if was is None:
                # One that comes from another host comes with what was counted there.
                was = 0 if shard.generation == 1 else n
            if n != was:
                busy.append((n - was, key))
            if segment.has_unbounded:
                growing.append(key)
            sums["duplicates"] += segment.header[words.N_DUPLICATES]
            if waiting := shard.waiting:
                sums["parked"] += len(waiting)
            if hosted.backing is not None:
                sums["behind"] += hosted.behind
            if run := hosted.began[0]:
                runs[run] = shard
        n_pushes = sum(n for n, _ in busy)
        self.pushes += n_pushes
        callers = asdict(counters_of(host.worker.server).total())
        self.latest = {
            "version": VERSION,
            **host.totals(),
            **sums,
            "pushes": self.pushes,
            "rate": round(n_pushes / seconds, 1),
            "calls": host.n_calls,
            "socket_calls": 0 if host.sockets is None else host.sockets.n_calls,
            "fallbacks": most(callers.pop("fallbacks"), self._reasons),
            "callers": callers,
            "tables": self._tables(growing),
            "runs": self._runs(runs, seconds),
            **self._busiest(busy, seconds),
        }
        return self.latest

    def _tables(self, growing: Iterable[_Key]) -> list[Sequence[Any]]:
        """Return rows, admissions and evictions of the largest unbounded tables."""
        sums = dict[_Key, list[int]]()
        for uid, index in growing:
            tables = self._host.shards[uid, index].shard.segment.tables
            for ordinal, memory in enumerate(tables):
                if memory.unbounded is not None:
                    of, key = memory.unbounded.counts(), (uid[:UID_LENGTH], ordinal)
                    counts = of["rows"], of["admissions"], of["evictions"]
                    sums[key] = [*map(add, sums.get(key, (0, 0, 0)), counts)]
        some = heapq.nlargest(MOST_TABLES, sums, key=lambda key: sums[key][0])
        return [(*key, *sums[key]) for key in some]

    def _busiest(self, busy: list[tuple[int, _Key]], seconds: float) -> dict[str, Any]:
        """Return store, number, pushes a second and state of the busiest shards."""
        rates, stores = dict.fromkeys(self._host.shards, 0), dict[str, int]()
        rates |= {key: n for n, key in busy}
        rows = []
        for uid, index in heapq.nlargest(MOST_SHARDS, rates, rates.__getitem__):
            hosted = self._host.shards[uid, index]
            version, parked = hosted.shard.segment.current.version, hosted.shard.waiting
            state = version, len(parked), hosted.behind
            of = stores.setdefault(uid[:UID_LENGTH], len(stores))
            rows.append((of, index, round(rates[uid, index] / seconds, 1), *state))
        return {"stores": list(stores), "busiest": rows}

    def _runs(self, shards: Mapping[int, Shard], seconds: float) -> list[Sequence[Any]]:
        """Return of runs that go on here number, clocks a second, and where ranks are."""
        run, found, before = words.RUN, list[Any](), self._clocks
        going = {n: s for n, s in shards.items() if s.segment.current.plain[run] == n}
        self._clocks = {}
        for number in heapq.nlargest(MOST_RUNS, going):
            clock, waiting, slowest = _clocks(going[number])
            self._clocks[number] = clock
            rate = round((clock - before.get(number, clock)) / seconds, 1)
            found.append((number, clock, rate, waiting, slowest))
        return found


def _clocks(shard: Shard) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the clock of a run, how many trainers wait, and those furthest behind."""
    record = shard.segment.current
    now, in_rounds = record.plain, shard.run_state.is_bsp
    ranks = record.ranks[: now[words.N_RANKS]]
    clocks = ranks[:, words.CLOCK].tolist()
    if in_rounds and (open_round := shard.run_state.round) is not None:
        mailbox = open_round.mailbox
        table = mailbox.tables[mailbox.words[TURNS] & 1]
        # Else it is that of the round before, which the next trainer empties.
        if table.words[ROUND] == now[words.ROUNDS]:
            clocks = [*map(add, clocks, (word & TICKED for word in table.ranks))]
    live = [(clocks[rank], rank) for rank in ranks[:, words.LIVE].nonzero()[0].tolist()]
    slowest = heapq.nsmallest(MOST_RANKS, live)
    clock = now[words.ROUNDS] if in_rounds else max(clocks, default=0)
    waiting = 0
    if live and now[words.POLICY] in _WAITS:
        bound = slowest[0][0] + (0 if in_rounds else now[words.STALENESS])
        waiting = sum(at > bound for at, _ in live)
    return clock, waiting, [(rank, at) for at, rank in slowest]


def most(reasons: Mapping[str, int], named: list[str]) -> dict[str, int]:
    """Return the counts of some reasons, and that of all others as one.

    None of them may fall, nor go from one to the other: a reason that has a name keeps
    it, though another one gets commoner.

    Parameters
    ----------
    reasons : mapping of str to int
        How often there was each.
    named : list of str
        Those that have a name; the commonest of the new ones are added, up to a limit.

    Returns
    -------
    dict
        The same, of a bounded size.

    Examples
    --------
    >>> most({"late": 3, "gone": 1}, [])
    {'late': 3, 'gone': 1}
    """
    found = Counter[str]()
    for reason, n in sorted(reasons.items(), key=lambda item: -item[1]):
        why = reason[:REASON_LENGTH]
        if why not in named and len(named) < MOST_REASONS:
            named.append(why)
        found[why if why in named else "others"] += n
    return dict(found)

"""The time of a run of `train` in words: who is slow, and what bounds it.

The times are those of :class:`daskps.training.stats.RankStats`; how much of an exchange
is due to its calls, and how much to its bytes, follows from the cost model of
``docs/scaling.md``.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from dask.utils import format_bytes, format_time

from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.training.stats import RankStats, TrainStats

#: Seconds of a call by message, by socket and in memory of this machine, and of a byte
#: of its arrays, as the cost model has them.
_CALL_SECONDS = {"messages": 7e-4, "socket_calls": 2.2e-4, "local_calls": 3e-5}
_BYTE_SECONDS = 7e-10
#: A slow trainer takes so many times as long as the others, and at least such a share
#: of a trainer's time more.
_SLOW, _MATTERS = 1.5, 0.1
#: A hot shard has so many times the bytes of the others.
_HOT = 3.0
#: The least share of the time, or of the calls, that is most of it.
_MOST = 0.5


class Explanation(str):
    """A text that shows itself as it is read, also in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def explain(stats: TrainStats) -> Explanation:
    """Return where the time of a run has gone; see `TrainResult.explain`."""
    ranks = stats.ranks
    whole = sum(map(_seconds, ranks))
    if not whole:
        return Explanation("nothing was measured: no epoch of the run has ended")
    lines = [_head(stats, whole), _bound(stats, whole)]
    # Under SSP and ASP they go ahead already.
    more = (
        "" if any(stats.staleness) else ', or let others go ahead (sync="ssp" or "asp")'
    )
    found = [*_slow(ranks, more), *_hot(stats, whole)]
    lines += found or ["No trainer and no shard stands out."]
    return Explanation("\n".join(lines))


def _seconds(one: RankStats) -> float:
    return one.compute_seconds + one.delivery_seconds + one.waiting_seconds


def _head(stats: TrainStats, whole: float) -> str:
    compute, delivery, waiting = (
        stats.sum(f"{name}_seconds") / whole
        for name in ("compute", "delivery", "waiting")
    )
    return (
        f"{counted(len(stats.ranks), 'trainer')}, {counted(stats.clock, 'round')}: "
        f"{compute:.0%} of their time computing, {delivery:.0%} delivering, "
        f"{waiting:.0%} waiting."
    )


def _bound(stats: TrainStats, whole: float) -> str:
    """Return whether computing, bytes or calls take the time, and what would help."""
    if stats.sum("compute_seconds") / whole >= _MOST:
        return (
            "Computing bounds the run: more trainers, or a quicker gradient, would help; "
            "codecs and more servers would not."
        )
    by_calls = sum(stats.sum(name) * cost for name, cost in _CALL_SECONDS.items())
    nbytes = stats.sum("sent_encoded_nbytes") + stats.sum("received_encoded_nbytes")
    n_calls = sum(map(stats.sum, _CALL_SECONDS))
    if not n_calls:
        return "Exchanges bound the run; tasks of the graph count no calls."
    what = f"{n_calls:,} calls with {format_bytes(nbytes)}"
    share = by_calls / (by_calls + nbytes * _BYTE_SECONDS)
    if share >= _MOST:
        return (
            f"Calls bound the exchanges: of {what} the calls take {share:.0%} by the "
            f"cost model. sync_every= with more batches{_fewer(stats)} would help; "
            f"codecs would not."
        )
    said = f"Bytes bound the exchanges: of {what} they take {1 - share:.0%} by the cost"
    if stats.sum("local_calls") >= _MOST * n_calls:
        return (
            f"{said} model, most of them in memory of this machine. sync_every= with "
            f"more batches would help; codecs would not."
        )
    return f"{said} model. A codec=, or more servers=, would help."


def _fewer(stats: TrainStats) -> str:
    """Return how there would be fewer calls, where there can be."""
    if len({one.worker for one in stats.shards}) < 2:
        return ""
    return ", or a store on fewer workers (servers=[address]),"


def _slow(ranks: Sequence[RankStats], more: str) -> Iterator[str]:
    """Say of each trainer that is much slower than the others by what it is."""
    for one in ranks:
        others = [of for of in ranks if of is not one]
        if not others:
            return
        usual = median(of.compute_seconds for of in others)
        least = _MATTERS * median(map(_seconds, others))
        if one.compute_seconds > _SLOW * usual + least:
            waited = sum(of.waiting_seconds for of in others)
            share = waited / (sum(map(_seconds, others)) or 1.0)
            yield (
                f"Trainer {one.rank} is slow to compute: {_time(one.compute_seconds)}, "
                f"the others {_time(usual)} (median), of whose time {share:.0%} was "
                f"waiting. Give it fewer rows (weights= of train){more}."
            )
        # Under BSP all exchanges take as long as the slowest one: no time tells whose.
        by_message = [_by_message(of) for of in others]
        if _by_message(one) >= _MOST > 2 * median(by_message):
            yield (
                f"Trainer {one.rank} is slow to deliver: {one.messages:,} of its calls "
                f"go by message, those of the others by socket or in memory. "
                f"store.stats() says why; workers= and servers= choose machines."
            )


def _by_message(one: RankStats) -> float:
    """Return the share of its calls that go by message."""
    return one.messages / (sum(getattr(one, name) for name in _CALL_SECONDS) or 1)


def _hot(stats: TrainStats, whole: float) -> Iterator[str]:
    """Say which shard has so much more than the others that exchanges wait for it."""
    total = sum(one.nbytes for one in stats.shards)
    exchanging = 1 - stats.sum("compute_seconds") / whole
    if len(stats.shards) < 2 or exchanging < _MATTERS:
        return
    hot = max(stats.shards, key=lambda one: one.nbytes)
    others = (total - hot.nbytes) / (len(stats.shards) - 1)
    if hot.nbytes >= _HOT * others and total:
        yield (
            f"Shard {hot.shard} on {hot.worker} is hot: it has "
            f"{hot.nbytes / total:.0%} of the bytes of {len(stats.shards)} shards, and "
            f"each exchange takes as long as it. Cut its parameters over more servers "
            f"(placement=, store.reshard)."
        )


def _time(seconds: float) -> str:
    return str(format_time(seconds))

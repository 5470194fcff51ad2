"""What a run says of bytes, seconds, staleness and what was left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import codecs, optim
from daskps.cluster.caller.routes import GRADIENT, Computed
from daskps.cluster.counters import Counters
from daskps.training.result import Epoch, TrainResult
from daskps.training.stats import Meter, RankStats, StatsOfRun, TrainStats, lines_of
from tests.support import mostly_inside

X = np.ones((10, 3), "f4")
#: Of float32 and of int64, which no codec rounds.
PARAMS = {"w": np.zeros(3, "f4"), "n": np.zeros(2, "i8")}


def gradient(params, X, y=None):
    return {"w": X.mean(axis=0)}


def trained(store, **options):
    options = {"batch_size": 2, "trainers": 2, "epochs": 2, **options}
    return daskps.train(store, gradient, X, **options)


@mostly_inside("codec", [None, "bf16", codecs.TopK(ratio=0.5)], real=["bf16"])
def test_bytes_of_each_trainer(way, train, codec):
    """Six or four gradients of 12 bytes, and reads of 28: of the first weights too."""
    pulls = "fp16" if codec == "bf16" else None
    options = {"codec": codec, "pull_codec": pulls, "trainers": 1}
    with daskps.create(PARAMS, optimizer={"w": optim.SGD(1.0)}) as store:
        if train.execution == "graph" and isinstance(codec, codecs.TopK):
            with pytest.raises(ValueError, match="codecs of 16 bits"):
                trained(store, execution=train.execution, **options)
            return
        stats = trained(store, execution=train.execution, **options).stats
    [one] = stats.ranks
    first = train.execution == "resident"
    assert one.sent_nbytes == 10 * 12
    assert one.received_nbytes == (10 + first) * 28
    if codec is None:
        assert one.sent_encoded_nbytes == one.sent_nbytes
        assert one.received_encoded_nbytes == one.received_nbytes
    elif codec == "bf16":
        assert one.sent_encoded_nbytes == 10 * 6
        assert one.received_encoded_nbytes == (10 + first) * (6 + 16)
    else:
        assert one.sent_encoded_nbytes != one.sent_nbytes
    assert one.compute_seconds > 0
    assert one.retries == 0
    assert stats.staleness == {0: 10}
    assert stats.clock == 10


def of_rows(params, X, y=None):
    return {"emb": params["emb"] - 1.0}


@mostly_inside()
def test_bytes_of_rows(way, train):
    """Each of 5 batches brings and reads two rows of 3 float64, and no arrays."""
    table = {"emb": daskps.TableSpec(10, 3, "float64")}
    with daskps.create(table, optimizer=optim.SGD(0.1)) as store:
        ids = np.arange(10)
        [one] = daskps.train(
            store,
            of_rows,
            ids,
            rows={"emb": lambda X: X},
            batch_size=2,
            trainers=1,
            execution=train.execution,
        ).stats.ranks
    assert one.sent_nbytes == one.sent_encoded_nbytes == 5 * 2 * 24
    # The rows of the first batch are read before it, in the resident run by itself.
    assert one.received_nbytes == 5 * 2 * 24


@mostly_inside()
def test_delays_and_what_was_dropped(way):
    """Of two shards; each trainer alone pulls after each push."""
    sync = daskps.ASP(max_staleness=10**6)
    with daskps.create(
        {"w": np.zeros(3, "f4")}, optimizer=optim.SGD(0.1), shards=2
    ) as s:
        stats = trained(s, sync=sync).stats
    assert sum(stats.delays.values()) == 2 * 12  # ranks have 3 batches an epoch
    assert stats.dropped == 0
    assert len(stats.ranks) == 2
    assert sum(stats.staleness.values()) == 12


def meter(more_lag: int = 0) -> tuple[Meter, Any]:
    session: Any = SimpleNamespace(
        reads=SimpleNamespace(lag=0),
        saved_nbytes=0,
        reads_in_words=True,
        shards=SimpleNamespace(counters=Counters()),
    )
    return Meter(session, [np.zeros(4, "f4"), np.zeros(1, "i8")], more_lag), session


def test_what_takes_longer_than_the_quickest_is_waiting() -> None:
    counted, session = meter()
    computed = Computed({0: np.zeros(4)}, GRADIENT, 1, None)
    for seconds, lag in ((0.5, 0), (0.25, 2), (1.0, 2)):
        counted.computed(computed, 0.125)
        session.reads.lag = lag
        counted.exchanged(seconds)
        assert session.reads.lag == 0
    session.saved_nbytes = 60
    session.shards.counters = Counters(messages=3, local_calls=7, retries=2)
    assert counted.lag == 2
    found = counted.report()
    assert found == {
        "sent_nbytes": 96,
        "sent_encoded_nbytes": 36,
        "received_nbytes": 3 * 24,
        "received_encoded_nbytes": 3 * 16,
        "compute_seconds": 0.375,
        "delivery_seconds": 0.75,
        "waiting_seconds": 1.0,
        "retries": 2,
        "messages": 3,
        "socket_calls": 0,
        "local_calls": 7,
        "lags": [(0, 1), (2, 2)],
    }
    # Only what came since.
    counted.exchanged(0.25)
    session.saved_nbytes += 4
    found = counted.report()
    assert (found["delivery_seconds"], found["waiting_seconds"]) == (0.25, 0.0)
    assert (found["sent_encoded_nbytes"], found["retries"]) == (-4, 0)
    assert found["lags"] == [(0, 1)]
    assert counted.report()["delivery_seconds"] == 0.0


def test_what_was_read_a_clock_before_is_older_by_that() -> None:
    counted, session = meter(more_lag=1)
    session.reads.lag = 2
    counted.exchanged(1.0)
    assert counted.lag == 3


def total(**counted: int) -> TrainStats:
    spent, report = StatsOfRun(), meter()[0].report()
    for rank in (1, 0, 1):
        spent.add(0, [report | {"rank": rank, "sent_nbytes": 1500, "lags": [(3, 1)]}])
    rows = [
        {"shard": 1, "delays": [(0, 2), (4, 1)], "dropped": 1, "duplicates": 2},
        {"shard": 0, "delays": [(0, 1)], "dropped": 0, "duplicates": 1},
    ]
    rows = [row | {"worker": "tcp://a:1", "nbytes": 8} for row in rows]
    names = ("lost_trainers", "retried_rounds", "moved_parts", "clock")
    return spent.total(dict.fromkeys(names, 0) | counted, rows)


def test_reports_add_up_by_rank() -> None:
    found = total(lost_trainers=1, clock=7)
    assert [(one.rank, one.sent_nbytes) for one in found.ranks] == [
        (0, 1500),
        (1, 3000),
    ]
    assert found.staleness == {3: 3}
    assert (found.delays, found.dropped, found.duplicates) == ({0: 3, 4: 1}, 1, 3)
    assert (found.lost_trainers, found.clock) == (1, 7)
    assert found.sum("sent_nbytes") == 4500
    assert found.shards == ((0, "tcp://a:1", 8), (1, "tcp://a:1", 8))


def test_it_is_said_in_a_few_lines() -> None:
    assert [*lines_of(total(lost_trainers=1))] == [
        "sent 4.39 kiB as 0 B; 0.00 s compute, 0.00 s delivery, 0.00 s waiting",
        "staleness in clocks: 3: 3",
        "delays in updates: 0: 3, 4: 1, 1 dropped",
        "lost_trainers 1",
    ]
    assert not [*lines_of(TrainStats((RankStats(0),), staleness={0: 5}))]


def test_a_notebook_shows_them_too() -> None:
    history = [Epoch(0, 1.0, {}, 0.5, 0)]
    result = TrainResult({}, history, 1, "resident", total(retried_rounds=2))
    assert "delays in updates: 0: 3, 4: 1, 1 dropped" in result._repr_html_()
    assert repr(result).endswith("retried_rounds 2>")

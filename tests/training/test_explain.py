"""Where the time of a run went, in words and over time; decided by numbers, not clocks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.training.explain import explain
from daskps.training.stats import (
    MOST_TIMES,
    RankStats,
    ShardShare,
    StatsOfRun,
    TrainStats,
)
from daskps.training.timeline import EpochTimes, Timeline
from tests.support import mostly_inside

MB = 2**20


def run_of(*ranks: dict[str, Any], nbytes: tuple[int, ...] = (MB, MB)) -> TrainStats:
    """Return a run of these trainers; each else computes half of its time."""
    usual: dict[str, Any] = {
        "compute_seconds": 4.0,
        "delivery_seconds": 2.0,
        "waiting_seconds": 1.0,
        "socket_calls": 2_000,
        "sent_encoded_nbytes": 100 * MB,
        "received_encoded_nbytes": 100 * MB,
    }
    shards = (ShardShare(i, f"tcp://w{i}:1", n) for i, n in enumerate(nbytes))
    made = (RankStats(rank, **{**usual, **more}) for rank, more in enumerate(ranks))
    return TrainStats(tuple(made), clock=1_000, shards=tuple(shards))


BALANCED = run_of({}, {}, {}, {})
SLOW = {"compute_seconds": 12.0, "waiting_seconds": 0.1}


def test_a_balanced_run_names_nobody() -> None:
    assert explain(BALANCED).splitlines() == [
        "4 trainers, 1000 rounds: 57% of their time computing, 29% delivering, 14% "
        "waiting.",
        "Computing bounds the run: more trainers, or a quicker gradient, would help; "
        "codecs and more servers would not.",
        "No trainer and no shard stands out.",
    ]


def causes(stats: TrainStats) -> list[str]:
    return explain(stats).splitlines()[2:]


def test_a_trainer_that_is_slow_to_compute_is_named() -> None:
    waits = {"waiting_seconds": 6.0}
    [text] = causes(run_of(waits, waits, SLOW, waits))
    assert text.startswith(
        "Trainer 2 is slow to compute: 12.00 s, the others 4.00 s (median), of whose "
        "time 50% was waiting."
    )
    assert text.endswith(
        'fewer rows (weights= of train), or let others go ahead (sync="ssp" or "asp").'
    )
    goes_ahead = replace(run_of(waits, waits, SLOW, waits), staleness={0: 9, 3: 1})
    assert causes(goes_ahead)[0].endswith("fewer rows (weights= of train).")
    # Half as much more, and a tenth of the time.
    assert causes(run_of({}, {"compute_seconds": 6.6})) == causes(BALANCED)
    assert len(causes(run_of({}, {"compute_seconds": 6.8}))) == 1


def test_a_trainer_that_sends_messages_is_named() -> None:
    far = {"messages": 1_900, "socket_calls": 100}
    [text] = causes(run_of({}, {}, far))
    assert text.startswith(
        "Trainer 2 is slow to deliver: 1,900 of its calls go by mess"
    )
    assert causes(run_of(far, far, far)) == causes(BALANCED)
    # Its exchanges are no quicker where it only waits for a slow one.
    waits = {"compute_seconds": 0.5, "delivery_seconds": 9.0}
    assert [c[:9] for c in causes(run_of(SLOW, waits, waits))] == ["Trainer 0"]


def test_one_trainer_has_nobody_to_be_slower_than() -> None:
    assert causes(run_of(SLOW)) == causes(BALANCED)


def test_a_shard_that_has_most_of_the_bytes_is_named() -> None:
    [text] = causes(run_of({}, {}, nbytes=(MB, MB, 8 * MB)))
    assert text.startswith(
        "Shard 2 on tcp://w2:1 is hot: it has 80% of the bytes of 3 shards,"
    )
    assert causes(run_of({}, {}, nbytes=(MB, MB, 2 * MB))) == causes(BALANCED)
    assert len(causes(run_of({}, {}, nbytes=(MB, 3 * MB)))) == 1
    # Where nearly all is computing it costs nothing.
    quick = {"delivery_seconds": 0.2, "waiting_seconds": 0.1}
    assert causes(run_of(quick, quick, nbytes=(0, 0, MB))) == causes(BALANCED)
    assert causes(run_of({}, nbytes=(0, 0))) == causes(BALANCED)


def test_no_codec_helps_in_memory_of_one_machine() -> None:
    near = {"compute_seconds": 1.0, "socket_calls": 0, "local_calls": 10}
    assert "codecs would not" in explain(run_of(near, near)).splitlines()[1]


@pytest.mark.parametrize(
    ("nbytes", "calls", "says"),
    [
        (
            10**6,
            10**4,
            "Calls bound the exchanges: of 20,000 calls with 3.81 MiB the calls",
        ),
        (
            10**10,
            10**4,
            "Bytes bound the exchanges: of 20,000 calls with 37.25 GiB they",
        ),
        (10**6, 0, "Exchanges bound the run; tasks of the graph count no calls."),
    ],
)
def test_calls_and_bytes_are_told_apart(nbytes: int, calls: int, says: str) -> None:
    busy = {"compute_seconds": 1.0, "socket_calls": calls}
    busy |= {"sent_encoded_nbytes": nbytes, "received_encoded_nbytes": nbytes}
    assert explain(run_of(busy, busy)).splitlines()[1].startswith(says)


def test_a_store_on_one_worker_has_no_fewer() -> None:
    quick = {"compute_seconds": 1.0, "sent_encoded_nbytes": 0}
    quick["received_encoded_nbytes"] = 0
    stats = run_of(quick, quick)
    assert "servers=[address]" in explain(stats)
    one = tuple(shard._replace(worker="tcp://w0:1") for shard in stats.shards)
    assert "servers=" not in explain(replace(stats, shards=one))


def test_a_run_without_an_epoch_says_so() -> None:
    text = explain(TrainStats())
    assert text == "nothing was measured: no epoch of the run has ended"
    assert repr(text) == text


def report(rank: int, *seconds: float) -> dict[str, Any]:
    names = ("compute_seconds", "delivery_seconds", "waiting_seconds")
    of = dict.fromkeys(("sent", "received"), 8)
    nbytes = {f"{k}{e}_nbytes": n for k, n in of.items() for e in ("", "_encoded")}
    more = {"rank": rank, "retries": 0, "lags": [], **nbytes}
    return {**dict(zip(names, seconds, strict=True)), **more}


def test_epochs_of_a_trainer_follow_each_other() -> None:
    spent = StatsOfRun()
    spent.add(4, [report(0, 1.0, 0.5, 0.25), report(1, 0.5, 0.25, 1.0)])
    spent.add(5, [report(0, 2.0, 0.5, 0.5)])
    stats = spent.total({}, [])
    assert stats.epochs == (
        EpochTimes(0, 4, 0.0, 1.0, 0.5, 0.25),
        EpochTimes(1, 4, 0.0, 0.5, 0.25, 1.0),
        EpochTimes(0, 5, 1.75, 2.0, 0.5, 0.5),
    )
    assert Timeline(stats.epochs).seconds == 4.75


def test_a_trace_has_a_row_for_each_trainer(tmp_path) -> None:
    timeline = Timeline((EpochTimes(0, 0, 0.0, 1.0, 0.5, 0.25),))
    timeline.save(tmp_path / "run.json")
    found = json.loads((tmp_path / "run.json").read_text())
    assert found == timeline.to_chrome()
    name, *events = found["traceEvents"]
    assert (name["ph"], name["tid"]) == ("M", 0)
    assert name["args"] == {"name": "trainer 0"}
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events] == [
        ("compute", 0.0, 1e6, 0),
        ("delivery", 1e6, 5e5, 0),
        ("waiting", 1.5e6, 2.5e5, 0),
    ]


def test_a_picture_of_a_thousand_trainers_shows_some() -> None:
    of = (EpochTimes(r, e, 3.0 * e, 1, 1, 1) for e in range(2) for r in range(1_000))
    timeline = Timeline(tuple(of))
    html = timeline._repr_html_()
    assert "1000 trainers, 2 epochs, 6.00 s" in html
    assert "and 968 trainers that are not shown" in html
    assert html.count("<rect") == 32 * 2 * 3
    assert 'x="350.00" y="0" width="106.67"' in html  # 3 s of 6, and one more
    assert len(timeline.to_chrome()["traceEvents"]) == 1_000 + 6_000
    assert "0 trainers" in Timeline()._repr_html_()


def test_a_long_run_takes_as_little_memory_and_text_as_a_short_one() -> None:
    """3,000 epochs of 64 trainers; seconds are powers of two, whose sums are exact."""
    spent = StatsOfRun()
    reports = [report(rank, 1.0, 0.5, 0.25) for rank in range(64)]
    for epoch in range(3_000):
        spent.add(epoch, reports)
    stats = spent.total({}, [])
    assert len(stats.epochs) <= MOST_TIMES
    assert len(repr(stats)) < 40_000
    timeline = Timeline(stats.epochs)
    assert repr(timeline) == "<daskps.Timeline: 64 trainers, 3000 epochs, 5250.00 s>"
    for rank in (0, 63):
        of = [one for one in timeline.epochs if one.rank == rank]
        assert [sum(one[i] for one in of) for i in (3, 4, 5)] == [3000, 1500, 750]
        follows = [one.begin + sum(one[3:]) for one in of]
        assert [one.begin for one in of] == [0.0, *follows[:-1]]
    assert len(timeline._repr_html_()) < 10**6


def gradient(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] - X.mean(axis=0)}


@mostly_inside()
def test_a_run_is_explained(way, train) -> None:
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(0.1)) as store:
        about: Any = {"trainers": 2, "epochs": 3, "batch_size": 2}
        about["execution"] = train.execution
        result = daskps.train(store, gradient, np.eye(4), **about)
        stats = result.stats
    assert [(e.rank, e.epoch) for e in sorted(stats.epochs)] == [
        (rank, epoch) for rank in range(2) for epoch in range(3)
    ]
    assert sum(one.nbytes for one in stats.shards) == 32
    assert result.explain().startswith("2 trainers, 3 rounds: ")
    n = stats.sum("messages") + stats.sum("socket_calls") + stats.sum("local_calls")
    assert (n > 0) == (result.execution == "resident")
    spent = [replace(one, compute_seconds=0.0) for one in stats.ranks]
    assert repr(result.timeline()).startswith("<daskps.Timeline: 2 trainers, 3 epochs")
    assert "Computing" not in explain(replace(stats, ranks=tuple(spent)))

"""How far the trainers of a run are, as the directory hears it and tells it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.cluster.directory.run import RunState
from daskps.cluster.directory.runs import Runs
from daskps.cluster.directory.trainers import TrainerMessages
from daskps.cluster.runs import resident as trainer_task
from daskps.errors import RunCancelledError


def run_of(size: int, *, bsp: bool) -> Any:
    entry: Any = SimpleNamespace()
    return RunState(1, entry, "client", size, restartable=True, gated=False, bsp=bsp)


def test_slowest_is_the_live_trainer_furthest_behind() -> None:
    run = run_of(3, bsp=False)
    run.tell(0, 7, None, 0)
    run.tell(1, 5, None, 0)
    # Of the third nobody has heard.
    assert (run.clock, run.slowest) == (7, 0)
    run.tell(2, 3, None, 0)
    assert (run.clock, run.slowest) == (7, 3)
    run.finished.add(2)
    assert run.slowest == 5
    run.finished |= {0, 1}
    assert run.slowest == 7


def test_a_round_is_open_until_all_have_told_of_it() -> None:
    run = run_of(2, bsp=True)
    assert (run.clock, run.slowest) == (0, 0)
    run.tell(0, 7, None, 0)
    assert (run.clock, run.slowest) == (7, 6)
    run.tell(1, 7, None, 0)
    assert (run.clock, run.slowest) == (7, 7)


def test_loss_is_the_mean_over_rows() -> None:
    run = run_of(3, bsp=True)
    run.tell(0, 1, None, 0)
    assert run.loss is None
    run.tell(1, 1, 6.0, 2)
    run.tell(2, 1, 2.0, 6)
    assert run.loss == 1.0


def test_an_epoch_is_told_when_all_live_trainers_have_ended_it() -> None:
    """The first report of a rank counts: who starts again repeats its last."""

    def report(rank: int, loss: float) -> dict[str, Any]:
        times = {"seconds": 1.0, "lag": 0, "clock": 1, "first": None}
        return {"rank": rank, "rows": 1, "loss": loss, **times}

    async def check() -> None:
        run = run_of(3, bsp=False)
        nobody: Any = None
        runs = Runs(nobody, nobody, nobody)
        runs.open[1] = run
        trainers = TrainerMessages(nobody, runs)
        await trainers.on_report(1, 0, 0, report(0, 1.0))
        await trainers.on_report(1, 0, 0, report(0, 2.0))
        await trainers.on_report(1, 1, 0, report(1, 3.0))
        assert run.events == []
        trainers.on_finished(1, 2, 0)
        [event] = run.events
        assert event["epoch"] == 0
        assert [row["loss"] for row in event["reports"]] == [1.0, 3.0]
        await trainers.on_report(1, 0, 0, report(0, 4.0))
        assert run.reports == {}

    asyncio.run(check())


def test_a_trainer_does_not_end_well_in_a_run_that_is_being_fenced() -> None:
    """Shards may have taken its last step, and end the run before that round."""
    nobody: Any = None
    runs = Runs(nobody, nobody, nobody)
    run = runs.open[1] = run_of(2, bsp=True)
    trainers = TrainerMessages(nobody, runs)
    assert trainers.on_finished(1, 0, 4) == 1
    run.fenced = RunCancelledError("cancelled by its caller")
    with pytest.raises(RunCancelledError, match="run 1 is over: cancelled by"):
        trainers.on_finished(1, 1, 4)
    assert run.finished == {0}


def test_rounds_go_on_where_others_have_their_mailboxes() -> None:
    run = run_of(2, bsp=True)
    run.mailboxes = {"rows": [[0, "block", 8, 1]]}
    assert run.survives([0])
    assert not run.survives([0, 1])
    run.mailbox_moved(1, ("other", 8, 2))
    assert run.survives([0, 1])
    assert run_of(2, bsp=False).survives([0, 1])
    # The task graph has none.
    run.graph, run.mailboxes = True, {"rows": []}
    assert run.survives([0, 1])


def test_receipts_are_kept_until_the_client_has_entered_them() -> None:
    """What comes late, of a round that the client knows, is dropped with the next ones."""
    nobody: Any = None
    runs = Runs(nobody, nobody, nobody)
    run = runs.open[1] = run_of(2, bsp=True)
    trainers = TrainerMessages(nobody, runs)
    for number in range(4):
        trainers.on_note(1, number, [(0, f"of {number}")])
    assert trainers.on_receipts(1, 2) == {2: [(0, "of 2")], 3: [(0, "of 3")]}
    trainers.on_note(1, 1, [(0, "late")])
    # Of a round that was begun anew the latest count.
    trainers.on_note(1, 3, [(0, "anew")])
    assert trainers.on_receipts(1, 3) == {3: [(0, "anew")]}
    assert run.receipts.keys() == {3}
    del runs.open[1]
    with pytest.raises(RunCancelledError):
        trainers.on_note(1, 4, [])


class Session:
    """A trainer's place in a run, whose directory notes what it hears."""

    run, rank, size = 1, 0, 1
    clock = 0
    loss_sum: float | None = None
    rows = 0

    def __init__(self) -> None:
        self.heard: list[tuple[int, float | None, int]] = []
        self.link: Any = self

    async def directory(self, method: str, **kwargs: Any) -> None:
        self.heard.append((kwargs["clock"], kwargs["loss"], kwargs["rows"]))

    def start(self, function: Any) -> Any:
        task = asyncio.ensure_future(function())
        return SimpleNamespace(stop=task.cancel)


def test_news_are_told_beside_the_loop(monkeypatch: Any) -> None:
    """Only news, and only while the loop goes on."""
    monkeypatch.setattr(trainer_task, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(trainer_task, "MOST_MESSAGES", 10**9)

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def check() -> None:
        session: Any = Session()
        with trainer_task.telling(session, watched=True):
            await turns()
            assert session.heard == []
            session.clock, session.loss_sum, session.rows = 3, 1.5, 30
            await turns()
            assert session.heard == [(3, 1.5, 30)]
        session.clock = 4
        await turns()
        assert session.heard == [(3, 1.5, 30)]

    asyncio.run(check())


def test_nobody_watches_and_nothing_is_started() -> None:
    session: Any = Session()
    session.start = None
    with trainer_task.telling(session, watched=False):
        pass


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []

    def on_start(self, run: Any) -> None:
        self.seen.append(("start", run.clock, run.rounds))

    def on_round(self, run: Any) -> None:
        self.seen.append(("round", run.clock, run.rounds))

    def on_stop(self, run: Any) -> None:
        self.seen.append(("stop", run.slowest, run.rounds))


def test_callbacks_of_a_loop_of_ones_own(client: Any) -> None:
    """Until one of its rounds was heard of, no trainer ends."""

    def loop(trainer: Any, part: Any) -> None:
        for _ in range(5):
            trainer.push({"w": np.ones(1)})
        while not store_b.pull("seen")["seen"]:
            pass

    class Seen(Recorder):
        def on_round(self, run: Any) -> None:
            super().on_round(run)
            store_b.assign({"seen": 1.0})

    recorder = Seen()
    with (
        daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(1.0)) as store,
        daskps.create({"seen": 0.0}) as store_b,
    ):
        daskps.run(store, loop, [0, 1], callbacks=[recorder], timeout=30)
    first, *rounds, last = recorder.seen
    assert (first, last) == (("start", 0, 0), ("stop", 5, 0))
    assert rounds
    assert {kind for kind, _, _ in rounds} == {"round"}

"""How a run ends where its caller is cancelled more than once."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import KilledWorker

import daskps
from daskps.cluster import upstream
from daskps.cluster.caller.link import Link
from daskps.cluster.runs import launch
from daskps.cluster.runs.resident import Trainers, WorkerLosses
from daskps.cluster.runs.spec import Launch
from daskps.consistency import BSP

SPEC = Launch(
    uid="w-uid",
    policy=BSP(),
    reduce="mean",
    reset=False,
    restartable=False,
    gated=False,
    body=print,
    parts=[0],
    name="w",
)


class FakeLink(Link):
    """A way to a directory that begins a run, and answers no more until it may."""

    def __init__(self):
        self.is_worker, self.node = False, SimpleNamespace(id="C", status="running")
        self.heard: list[str] = []
        self.fencing, self.go_on = asyncio.Event(), asyncio.Event()
        self._background = set()

    async def directory(self, method, **kwargs):
        if method == "open_run":
            return 1
        if method != "watch":
            self.heard.append(method)
            self.fencing.set()
        await self.go_on.wait()
        return None


class FakeTrainers:
    """Trainers that never end."""

    def __init__(self):
        self.at_work = asyncio.Event()
        self.n_cancels = 0

    async def results(self):
        self.at_work.set()
        await asyncio.Event().wait()

    def cancel(self):
        self.n_cancels += 1


async def ignore(event):
    pass


def test_second_cancel_leaves_no_trainers_behind(monkeypatch):
    """It strikes while the directory is told of the first."""

    async def check():
        link, trainers = FakeLink(), FakeTrainers()
        monkeypatch.setattr(launch, "Trainers", lambda *args: trainers)
        run = launch.launch(link, SPEC, ignore, began=lambda run: None)
        running = asyncio.ensure_future(run)
        await trainers.at_work.wait()
        running.cancel()
        await link.fencing.wait()
        running.cancel()
        link.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert link.heard == ["fence_run", "close_run"]
        assert trainers.n_cancels == 1

    asyncio.run(check())


WORKER: Any = SimpleNamespace(address="w")
KILLED = KilledWorker("trainer", WORKER, 3)


def lost(monkeypatch, losses, **changes):
    """Lose a trainer's worker at these clocks; return its result and its restarts."""
    restarts, left = list[int](), iter([*losses, None])
    trainers: Any = Trainers.__new__(Trainers)
    trainers.spec = replace(SPEC, restartable=True, **changes)
    trainers.futures, at = {0: "future"}, [0]

    async def result(future):
        if (loss := next(left)) is None:
            return "done"
        error, at[0] = loss if isinstance(loss, tuple) else (CancelledError(), loss)
        raise error

    async def restart(rank, attempt):
        restarts.append(attempt)

    async def clock(rank):
        return at[0]

    monkeypatch.setattr(upstream, "result", result)
    let_go = list[Any]()
    monkeypatch.setattr(upstream, "release", let_go.append)
    trainers._restart, trainers._clock = restart, clock
    found = asyncio.run(trainers._one(0))
    # Of each that was lost: it holds the error, and what that holds.
    assert len(let_go) == len(restarts)
    return found, restarts


@pytest.mark.parametrize(
    "losses",
    [
        range(134),
        [0] * 5,
        [*[7] * 5, *[8] * 5],
        [(KILLED, clock) for clock in range(20)],
        # Where no shard answers, what was known of the clock still holds.
        [3, -1, -1, -1, -1, 4, -1, -1, -1, -1],
    ],
)
def test_a_run_that_gets_on_may_lose_any_number_of_workers(monkeypatch, losses):
    found, restarts = lost(monkeypatch, losses)
    assert found == "done"
    # Each new task has a number of its own, which is part of its key.
    assert restarts == [*range(1, len(losses) + 1)]


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([0] * 6, "lost 6 workers in a row at clock 0;"),
        ([*range(134), *[133] * 6], "lost 6 workers in a row at clock 133;"),
        ([(KILLED, 5), (KILLED, 5)], "lost 8 workers in a row at clock 5;"),
        ([-1] * 6, "lost 6 workers in a row"),
    ],
)
def test_a_trainer_that_ends_each_worker_ends_its_run(monkeypatch, losses, said):
    with pytest.raises(daskps.RunCancelledError, match=said):
        lost(monkeypatch, losses)


def test_losses_count_since_the_last_step():
    losses, seen = WorkerLosses(), []
    for clock in (0, 0, 1, 1, 1, 0, 5):
        losses.add(clock)
        seen.append(losses.in_a_row)
    assert seen == [1, 2, 1, 2, 3, 4, 1]

"""How a run ends where its caller is cancelled more than once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from daskps.cluster import launch
from daskps.cluster.link import Link
from daskps.cluster.spec import Launch
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
        self.is_worker, self.node = False, SimpleNamespace(id="C")
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

"""Errors of calls whose scheduler is gone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import daskps
from daskps.cluster.caller import scheduler_lost
from daskps.cluster.caller.link import Link
from daskps.cluster.caller.scheduler_lost import scheduler_named
from daskps.errors import ConsistencyError, SchedulerLostError
from tests import inprocess


class FakeLink:
    """A link, of which is known what its client hears, and what is answered."""

    def __init__(self, *, has: bool, answer: Any = None) -> None:
        self.has_scheduler, self.answer = has, answer
        self.node = SimpleNamespace(scheduler=SimpleNamespace(addr="tcp://there"))

    async def directory(self, method: str, **about: Any) -> Any:
        assert method == "hello"
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return self.answer


def named(link: Any, error: Exception) -> BaseException:
    async def work() -> None:
        async with scheduler_named(link, "a save"):
            raise error

    with pytest.raises((type(error), SchedulerLostError)) as caught:
        asyncio.run(work())
    return caught.value


@pytest.mark.parametrize(
    "link",
    [
        FakeLink(has=False),
        FakeLink(has=True, answer=ConnectionRefusedError("nobody there")),
    ],
    ids=["heard", "asked"],
)
def test_an_error_without_a_scheduler_says_so(link):
    first = ConsistencyError("a save was given up")
    error = named(link, first)
    assert isinstance(error, SchedulerLostError)
    assert error.__cause__ is first
    assert str(error).startswith(
        "a save ended, as the scheduler at tcp://there is gone"
    )
    assert "daskps.restore(url)" in str(error)
    assert "resume=True" in str(error)


@pytest.mark.parametrize("answer", [{"protocol": 1}, ValueError("refused")])
def test_an_error_with_a_scheduler_passes_as_it_is(answer):
    for first in (
        ConsistencyError("busy"),
        FileNotFoundError("of the user's"),
        KeyError(),
    ):
        assert named(FakeLink(has=True, answer=answer), first) is first


def test_a_scheduler_that_is_only_busy_counts_as_there(monkeypatch):
    monkeypatch.setattr(scheduler_lost, "OVER_SECONDS", 0.01)
    first = ConsistencyError("busy")
    assert named(FakeLink(has=True), first) is first


def test_what_waits_for_a_scheduler_that_is_gone_is_ended(monkeypatch):
    monkeypatch.setattr(scheduler_lost, "LOST_SECONDS", 0.01)
    monkeypatch.setattr(scheduler_lost, "WATCH_SECONDS", 0.001)
    ended = []
    link: Any = FakeLink(has=False)

    async def work(**how: Any) -> None:
        async with scheduler_named(link, "a run", **how):
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

    with pytest.raises(SchedulerLostError, match="a run ended"):
        asyncio.run(work())
    assert ended == [True]
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(work(ends=False), 0.05))
    # What its caller ends is ended as it was.
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(work(), 0.001))


def test_a_close_ends_with_its_scheduler_and_a_delete_says_so(monkeypatch):
    """Dask would look for it for half a minute, to free what went with it."""
    monkeypatch.setattr(scheduler_lost, "LOST_SECONDS", 0.01)
    monkeypatch.setattr(scheduler_lost, "WATCH_SECONDS", 0.001)
    with inprocess.cluster():
        closed, deleted = (daskps.create({"w": np.zeros(1)}) for _ in range(2))

        async def unanswered(*args: Any, **about: Any) -> None:
            await asyncio.Event().wait()

        with monkeypatch.context() as gone:
            gone.setattr(Link, "has_scheduler", False)
            gone.setattr(Link, "directory", unanswered)
            gone.setattr(scheduler_lost, "_whom", lambda link: "its scheduler")
            closed.close()
            with pytest.raises(daskps.StoreClosedError):
                closed.pull()
            with pytest.raises(SchedulerLostError, match="the list of stores ended"):
                daskps.list_stores()
            with pytest.raises(SchedulerLostError, match="search for store 'm' ended"):
                daskps.open("m")
            with pytest.raises(SchedulerLostError, match="the delete of"):
                deleted.delete()

"""How often the directory is asked about hosts that do not answer."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from daskps.cluster.caller import liveness, remote
from daskps.cluster.caller.link import Link
from daskps.cluster.caller.liveness import Liveness
from daskps.cluster.caller.remote import RemoteShards
from daskps.errors import RunCancelledError, ShardLostError
from tests import virtual

OWNERS = [f"tcp://127.0.0.1:{n}" for n in range(50)]


class Asked:
    """A directory that knows of one dead worker, or refuses."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs: list[int] = []
        self.error = error

    async def locate(self, run: int) -> dict[str, Any]:
        self.runs.append(run)
        if self.error is not None:
            raise self.error
        return {"owners": OWNERS, "away": [], "lost": [(7, OWNERS[7], "died")]}


async def waiting(look: Liveness, run: int, over: asyncio.Event) -> list[Any]:
    """One call to each host; returns what became of them once the first has ended."""

    async def call(shard: int) -> str:
        async with look.over(OWNERS[shard], [shard], run):
            await over.wait()
        return "answered"

    calls = [asyncio.ensure_future(call(n)) for n in range(len(OWNERS))]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    over.set()
    return await asyncio.gather(*calls, return_exceptions=True)


def many_late_calls(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> list[Any]:
    monkeypatch.setattr(liveness, "SUSPECT_SECONDS", 0)

    async def work() -> list[Any]:
        # So many trainers that it is not asked twice within the test's time.
        look = Liveness(asked.locate, "s", size=100_000)
        found = await waiting(look, 3, asyncio.Event())
        assert (look._late, look._asking) == ({}, None)
        return found

    return asyncio.run(work())


def test_late_calls_of_a_handle_ask_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    found = many_late_calls(monkeypatch, asked)
    assert asked.runs == [3]
    assert isinstance(found[7], ShardLostError)
    assert found[:7] + found[8:] == ["answered"] * 49


def test_the_end_of_a_run_ends_all_of_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(RunCancelledError("over"))
    found = many_late_calls(monkeypatch, asked)
    assert asked.runs == [3]
    assert {type(error) for error in found} == {RunCancelledError}


@pytest.mark.parametrize(("run", "seconds"), [(0, 0.25), (3, 1.0)])
def test_a_worker_that_is_gone_holds_nobody_up_for_long(
    run: int, seconds: float
) -> None:
    """A push outside a run waits for nobody else: it is late sooner."""

    async def work() -> float:
        began = asyncio.get_running_loop().time()
        look = Liveness(Asked().locate, "s", size=1)
        found = await waiting(look, run, asyncio.Event())
        assert isinstance(found[7], ShardLostError)
        return asyncio.get_running_loop().time() - began

    assert virtual.run(work()) == pytest.approx(seconds)


@pytest.mark.parametrize(("size", "pause"), [(1, 1.0), (100, 1.0), (1000, 10.0)])
def test_a_large_run_asks_more_rarely(size: int, pause: float) -> None:
    asked = Asked()
    assert Liveness(asked.locate, "s", size).pause == pause


async def silent(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


async def refuses(*_: Any, **__: Any) -> Any:
    raise ConnectionRefusedError("nobody is there")


class LateRemote(RemoteShards):
    """What reaches hosts, of a call whose host answers nobody."""

    def __init__(self, locate: Any) -> None:
        self.link: Any = SimpleNamespace(control=refuses)
        self.meta: Any = SimpleNamespace(uid="u", where=SimpleNamespace(segments={}))
        self._carriers: Any = SimpleNamespace(run=0)
        self._waits: dict[int, str] = {}
        self._locate = locate

    async def why(self) -> str:
        return await self._who_keeps(OWNERS[0], [0])


@pytest.mark.parametrize("scheduler", [silent, refuses, None])
def test_a_call_that_is_late_says_whether_the_scheduler_is_gone_too(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ASK_SECONDS", 0.01)
    late = LateRemote(scheduler or Asked().locate)
    why = asyncio.run(late.why())
    assert why.startswith("which does not answer")
    assert ("nor does the scheduler" in why) == (scheduler is not None)


@pytest.mark.parametrize("status", ["closing", "closed"])
def test_who_calls_with_a_client_that_is_closed_is_told_so(status: str) -> None:
    link: Any = object.__new__(Link)
    link.pid, link.pool = os.getpid(), None
    link.node = SimpleNamespace(status=status, scheduler=None)
    for call in (
        partial(link.rpc, OWNERS[0], "daskps_call"),
        partial(link.directory, "list"),
    ):
        with pytest.raises(OSError, match="was closed, or has lost its scheduler"):
            asyncio.run(call())


def test_a_worker_out_of_reach_is_found_in_ten_seconds() -> None:
    """Each question takes as long as it may; tests of networks use shorter ones."""
    questions = liveness.FIRST_SECONDS, liveness.SCHEDULER_SECONDS
    assert sum((liveness.SILENT_SECONDS, *questions, liveness.AGAIN_SECONDS)) < 10

"""How many threads an update takes: as many cores as no worker of a machine claims."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
from distributed import Worker
from distributed.utils_test import async_poll_for

from daskps.cluster import cores
from daskps.cluster.cores import Cores, share
from daskps.errors import ProtocolError
from daskps.kernels import threads
from tests.support import gen_cluster, store

A, B, FAR = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "tcp://127.0.0.2:1"


@pytest.mark.parametrize(
    ("n", "claimed", "workers", "expected"),
    [
        (2, 1, 1, 2),
        (2, 2, 2, 1),
        (16, 4, 1, 8),
        (64, 8, 6, 8),
        (16, 7, 3, 4),
        (16, 14, 3, 1),
        (4, 16, 4, 1),
    ],
)
def test_idle_cores_are_shared(
    n: int, claimed: int, workers: int, expected: int
) -> None:
    assert share(n, claimed, workers) == expected


class Hosts:
    """Workers that hear a number; some do not answer."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.silent: set[str] = set()
        self.error: Exception = OSError("it is just going")
        self.tries = 0

    async def control(self, worker: str, method: str, n: int) -> None:
        assert method == "update_threads"
        if worker in self.silent:
            self.tries += 1
            raise self.error
        self.heard.append((worker, n))

    def spawn(self, work: Any) -> None:
        self.work = asyncio.ensure_future(work)


def _is_quiet(found: Cores) -> bool:
    return not (found._due or found._telling)


class Machine:
    """The directory's part, with a scheduler of which only the counts are there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores, "PAUSE_SECONDS", 0.0)
        hosts: Any = Hosts()
        self.hosts = hosts
        self.info: dict[str, Any] = {}
        scheduler: Any = SimpleNamespace(host_info=self.info)
        self.cores = Cores(scheduler, hosts)

    def has(self, claimed: int, *workers: str, machine: str = "127.0.0.1") -> None:
        self.info[machine] = {"nthreads": claimed, "addresses": set(workers)}

    async def heard(self) -> list[tuple[str, int]]:
        """Return what was told meanwhile."""
        await async_poll_for(lambda: _is_quiet(self.cores), timeout=30)
        found, self.hosts.heard = sorted(self.hosts.heard), []
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_workers_hear_only_of_another_number(machine: Machine) -> None:
    async def hear() -> None:
        machine.has(1, A)
        machine.has(4, FAR, machine="127.0.0.2")
        machine.cores.on_cores(A, 4)
        machine.cores.on_cores(FAR, 4)
        assert await machine.heard() == [(A, 4)]
        # A worker that has no host yet claims its threads, and is not told.
        machine.has(2, A, B)
        machine.cores.changed(B)
        assert await machine.heard() == [(A, 2)]
        machine.cores.on_cores(B, 4)
        assert await machine.heard() == [(B, 2)]
        machine.has(3, A, B)
        for _ in range(3):
            machine.cores.changed(B)
        assert await machine.heard() == [(A, 1), (B, 1)]
        machine.has(4, A, B)
        machine.cores.changed(B)
        assert await machine.heard() == []
        machine.has(1, A)
        machine.cores.left(B)
        assert await machine.heard() == [(A, 4)]
        del machine.info["127.0.0.1"]
        machine.cores.left(A)
        assert await machine.heard() == []

    asyncio.run(hear())


def test_who_did_not_hear_is_told_again(machine: Machine) -> None:
    async def hear() -> None:
        machine.has(1, A)
        machine.cores.on_cores(A, 2)
        assert await machine.heard() == [(A, 2)]
        machine.has(2, A, B)
        machine.hosts.silent.add(A)
        machine.cores.changed(B)
        assert await machine.heard() == []
        # Perhaps it heard, and only its answer was lost.
        machine.hosts.silent.clear()
        machine.has(1, A)
        machine.cores.left(B)
        assert await machine.heard() == [(A, 2)]

    asyncio.run(hear())


def test_who_did_not_hear_is_told_soon_though_nobody_comes(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "AGAIN_SECONDS", 0.0)

    async def hear() -> None:
        machine.has(1, A)
        machine.hosts.silent.add(A)
        machine.cores.on_cores(A, 2)
        await async_poll_for(lambda: machine.hosts.tries >= 3, timeout=30)
        machine.hosts.silent.clear()
        await async_poll_for(lambda: machine.hosts.heard, timeout=30)
        assert await machine.heard() == [(A, 2)]
        assert not machine.cores._again

    asyncio.run(hear())


def test_changes_do_not_add_to_the_tries(machine: Machine) -> None:
    async def hear() -> None:
        machine.has(1, A)
        machine.hosts.silent.add(A)
        machine.cores.on_cores(A, 2)
        for n in (1, 2, 3):
            await async_poll_for(lambda: machine.hosts.tries == n, timeout=30)  # noqa: B023 - at once
            assert await machine.heard() == []
            machine.cores.changed(A)
        # This one, and the one that waits to try again.
        assert len(asyncio.all_tasks()) == 2

    asyncio.run(hear())


@pytest.mark.parametrize("is_gone", [True, False])
def test_who_leaves_or_refuses_is_not_told_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    monkeypatch.setattr(cores, "AGAIN_SECONDS", 0.0)

    async def hear() -> None:
        machine.has(1, A)
        machine.hosts.silent.add(A)
        if not is_gone:
            machine.hosts.error = ProtocolError("it has no host")
        machine.cores.on_cores(A, 2)
        await async_poll_for(lambda: machine.hosts.tries, timeout=30)
        if is_gone:
            del machine.info["127.0.0.1"]
            machine.cores.left(A)
        is_over = lambda: _is_quiet(machine.cores) and not machine.cores._again  # noqa: E731 - polled
        await async_poll_for(is_over, timeout=30)
        if not is_gone:
            assert machine.hosts.tries == 1

    asyncio.run(hear())


class Reporter:
    """A worker whose messages to the directory fail in turn."""

    address = A

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.scheduler = self

    async def daskps_directory(self, **_: Any) -> Any:
        error = self.errors.pop(0)
        if error is not None:
            raise error
        return {"status": "OK", "value": None}


@pytest.mark.parametrize(
    ("errors", "left"),
    [
        ([OSError("away"), OSError("away"), None, None], 1),
        # Another time it would be refused, too.
        ([ValueError("no such message"), None], 1),
    ],
)
def test_a_report_that_got_lost_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None], left: int
) -> None:
    monkeypatch.setattr(cores, "AGAIN_SECONDS", 0.0)
    worker: Any = Reporter(*errors)
    asyncio.run(cores._report(worker))
    assert len(worker.errors) == left


def test_who_follows_again_reports_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_following", {})
    worker: Any = Reporter(None)

    async def follow() -> None:
        cores.follow(worker, "cluster")
        first = cores._following[A]
        cores.follow(worker, "cluster")
        second = cores._following[A]
        assert first is not None
        assert second is not None
        await asyncio.wait([first, second])
        assert first.cancelled()
        assert second.result() is None
        cores.leave(worker)

    asyncio.run(follow())
    assert not worker.errors


async def become(n: int) -> None:
    await async_poll_for(lambda: threads.allowed() == n, timeout=30)


async def silent(worker: Any) -> None:
    pass


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(cores, "cpu_count", lambda: 8)


@pytest.mark.usefixtures("eight")
def test_threads_follow_workers_that_come_and_go() -> None:
    @gen_cluster(client=True)  # one worker with one thread, one with two
    async def follow(c: Any, s: Any, a: Any, b: Any) -> None:
        assert threads.allowed() == 1
        made = await store(c)
        await become(1 + (8 - 3) // 2)
        # Whether a worker reports or not: another daskps may run there, or none.
        with mock.patch.object(cores, "_report", silent):
            async with Worker(s.address, nthreads=4):
                await become(1)
        await become(3)
        async with Worker(s.address, nthreads=1):
            await become(1 + (8 - 4) // 3)
        await made.close()
        await b.close()
        await become(1 + 8 - 1)

    follow()
    assert threads.allowed() == 1


@pytest.mark.usefixtures("eight")
def test_a_number_that_is_configured_stays() -> None:
    @gen_cluster(client=True)
    async def stay(c: Any, s: Any, a: Any, b: Any) -> None:
        with dask.config.set({"daskps.update-threads": 5}):
            made = await store(c)
            assert threads.allowed() == 5
            await a.scheduler.daskps_directory(method="cores", worker=a.address, n=8)
            directory = s.extensions["daskps-directory"].cores
            await async_poll_for(lambda: _is_quiet(directory), timeout=30)
            assert threads.allowed() == 5
            await made.close()

    stay()
    assert threads.allowed() == 1


@pytest.mark.usefixtures("eight")
def test_large_pushes_and_pulls_in_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a worker's host: 16 MiB, so that copies are cut, too."""
    calls: list[str] = []

    class Watched(threads._Job):
        def __init__(self, work: Any, n: int) -> None:
            super().__init__(work, n)
            calls.append(f"{n}")

    monkeypatch.setattr(threads, "_Job", Watched)
    n = 2**22

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
    async def use(c: Any, s: Any, a: Any) -> None:
        made = await store(c, params={"w": np.zeros(n, "f4")})
        await become(8)
        await made.push({"w": np.full(n, 10, "f4")})
        pushed = calls.count("4")
        assert pushed >= 1
        await made.add({"w": np.full(n, 3, "f4")})
        await made.assign({"w": np.full(n, 7, "f4")})
        await made.push({"w": np.arange(n, dtype="f4")})
        found = (await made.pull())["w"]
        expected = np.float32(7) - np.float32(0.1) * np.arange(n, dtype="f4")
        assert found.tobytes() == expected.tobytes()
        assert calls.count("4") >= pushed + 4
        await made.close()

    use()

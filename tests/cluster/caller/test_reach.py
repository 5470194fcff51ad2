"""A worker that does not answer a client: when that is called out of reach, and for how long."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from daskps.cluster import upstream
from daskps.cluster.caller import liveness
from daskps.cluster.caller.liveness import Reach
from daskps.errors import WorkerUnreachableError
from tests import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORKER, OTHER = "tcp://10.0.0.7:1", "tcp://10.0.0.8:1"
NEVER = float("inf")


class Network:
    """A client and workers: after how many seconds each of these answers whom, if at all.

    `direct` are the answers to the client, one for each time it connects anew.
    """

    def __init__(self, direct: list[Any], scheduler: Any = 0.0) -> None:
        self.direct, self.scheduler = direct, scheduler
        self.connected = 0
        self.sent_to: list[str] = []
        self.listed = {WORKER: 1, OTHER: 1}
        self.forgotten: list[str] = []
        scheduler = SimpleNamespace(
            addr="tcp://gate:8786", broadcast=self.broadcast, ncores=self.ncores
        )
        client: Any = SimpleNamespace(connection_args={}, scheduler=scheduler)
        self.reach = Reach(client, self.forgotten.append)

    @asynccontextmanager
    async def connection(self, worker: str, *_: Any) -> AsyncIterator[Any]:
        answer = self.direct[min(self.connected, len(self.direct) - 1)]
        self.connected += 1
        if worker == WORKER:
            await after(answer)
        yield SimpleNamespace(echo=self.echo)

    async def echo(self, data: Any) -> Any:
        return data

    async def ncores(self, workers: list[str]) -> dict[str, int]:
        return {
            worker: self.listed[worker] for worker in workers if worker in self.listed
        }

    async def broadcast(self, msg: Any, workers: list[str], on_error: str) -> Any:
        assert on_error == "return"
        assert msg == {"op": "echo", "data": True}
        self.sent_to += workers
        try:
            await after(self.scheduler)
        except OSError as error:
            return dict.fromkeys(workers, error)
        return dict.fromkeys(workers, True)

    async def call(self, worker: str = WORKER, answer: Any = NEVER) -> float:
        """Call a worker and return how long that took, negative if it is out of reach."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with self.reach.over(worker):
                await after(answer)
        except WorkerUnreachableError:
            return begin - loop.time()
        return loop.time() - begin


async def after(answer: Any) -> None:
    if isinstance(answer, Exception):
        raise answer
    await (asyncio.Event().wait() if answer == NEVER else asyncio.sleep(answer))


@pytest.fixture
def network(monkeypatch):
    def made(*about: Any) -> Network:
        found = Network(*about)
        monkeypatch.setattr(upstream, "connection", found.connection)
        return found

    return made


@pytest.mark.parametrize(("scheduler", "seconds"), [(0.0, 7.0), (1.5, 8.5)])
def test_a_worker_that_answers_the_scheduler_alone_is_out_of_reach(
    network, scheduler, seconds
):
    one = network([NEVER], scheduler)

    async def calls() -> None:
        # Several at once look for it once.
        assert await asyncio.gather(*(one.call() for _ in range(3))) == [-seconds] * 3
        assert one.connected == 2
        assert one.forgotten == [WORKER]
        for _ in range(2):
            assert await one.call() == 0.0
        assert await one.call(OTHER, 0.5) == 0.5
        await asyncio.sleep(59.0)
        assert await one.call(answer=0.0) == 0.0
        with pytest.raises(WorkerUnreachableError):
            async with one.reach.over(WORKER):
                pytest.fail("it was called")
        await asyncio.sleep(1.5)
        # A minute later it is called again, and looked for again.
        assert await one.call(answer=0.5) == 0.5
        assert await one.call() == -seconds

    virtual.run(calls())


@pytest.mark.parametrize(
    ("direct", "scheduler"),
    [
        ([NEVER], NEVER),  # stopped, or nobody reaches it
        ([NEVER], ConnectionRefusedError(errno.ECONNREFUSED, "refused")),  # it has died
        ([NEVER], OSError("the scheduler has ended")),
        ([NEVER, 0.5], 0.0),  # it was busy, or this client was
        ([3.0], 0.0),
        ([OSError(errno.EMFILE, "too many open files")], 0.0),
    ],
)
def test_a_worker_that_is_only_slow_is_waited_for(
    network, monkeypatch, direct, scheduler
):
    one = network(direct, scheduler)
    if isinstance(direct[0], OSError):
        monkeypatch.setattr(liveness, "without_descriptors", lambda: "none is left")

    async def calls() -> None:
        assert await one.call(answer=30.0) == 30.0
        assert await one.call(answer=0.25) == 0.25

    virtual.run(calls())
    assert not one.forgotten


def test_the_scheduler_is_not_sent_to_a_worker_that_it_has_let_go(network):
    one = network([NEVER])
    del one.listed[WORKER]

    async def calls() -> None:
        assert await one.call(answer=30.0) == 30.0

    virtual.run(calls())
    assert (one.connected, one.sent_to, one.forgotten) == (1, [], [])


def test_an_error_of_the_connection_says_who_is_out_of_reach(network):
    refused = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    one = network([refused])

    async def calls() -> None:
        with pytest.raises(WorkerUnreachableError) as caught:
            async with one.reach.over(WORKER):
                raise refused
        text = str(caught.value)
        assert text.startswith(f"worker {WORKER} cannot be reached from this client (")
        assert "No route to host" in text
        assert "tcp://gate:8786" in text
        assert str(pickle.loads(pickle.dumps(caught.value))) == text

    virtual.run(calls())


def test_an_error_of_a_worker_that_has_died_stays_what_it_is(network):
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    one = network([refused], refused)

    async def calls() -> None:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                await one.call(answer=refused)
        assert asyncio.get_running_loop().time() == 0.0

    virtual.run(calls())

"""Who loads the loops of a store that it may come to adopt, and when."""

from __future__ import annotations

import asyncio
import pickle
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from distributed import Worker

import daskps
from daskps import optim
from daskps.cluster.directory import machines as readiness
from daskps.cluster.directory.machines import Readiness
from daskps.cluster.host import installation
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.rules import Rules
from daskps.cluster.protocol.handlers import HOST
from daskps.errors import ProtocolError
from daskps.layout.arrays import Layout
from tests.support import gen_cluster, served_by

LAYOUT = Layout.build({"w": ((8,), "float32")}, 2)
WORKERS = ["tcp://a:1", "tcp://a:2", "tcp://a:3", "tcp://b:1"]


class Hosts:
    """Hosts that are asked; those of new workers know no message at first."""

    def __init__(self, new: int = 0) -> None:
        self.asked: list[str] = []
        self.work: list[Any] = []
        self._new = new

    def spawn(self, work: Any) -> None:
        self.work.append(work)

    def has_worker(self, worker: str) -> bool:
        return worker in WORKERS

    async def control(self, worker: str, method: str, **about: Any) -> None:
        assert method == "warm"
        Layout.from_wire(about["layout"])
        self.asked.append(worker)
        if self._new:
            self._new -= 1
            raise ProtocolError("a worker that has just come")

    def done(self) -> list[str]:
        async def all_of_it() -> None:
            await asyncio.gather(*self.work)

        asyncio.run(all_of_it())
        return sorted(self.asked)


def store(segments: Any, owners: Any = ("tcp://a:1", "tcp://a:2")) -> Any:
    return SimpleNamespace(
        uid="s",
        ready=True,
        owners=owners,
        segments=segments,
        layout=LAYOUT.to_wire(),
        rules=pickle.dumps({0: optim.SGD(0.1)}),
    )


def started(entry: Any, new: int = 0) -> tuple[Readiness, Hosts]:
    hosts: Any = Hosts(new)
    scheduler: Any = SimpleNamespace(workers=dict.fromkeys(WORKERS))
    return Readiness(scheduler, hosts, {"s": entry}), hosts


def test_workers_of_a_machine_without_a_shard_are_asked():
    entry = store([[0, "x", 1, 1], [1, "y", 1, 1]])
    ready, hosts = started(entry)
    ready.store_made(entry)
    assert hosts.done() == ["tcp://a:3"]


def test_nobody_is_asked_for_memory_that_cannot_be_mapped():
    entry = store([])
    ready, hosts = started(entry)
    ready.store_made(entry)
    ready.worker_came("tcp://a:3")
    assert hosts.done() == []


def test_who_comes_is_asked_until_it_has_its_host(monkeypatch):
    monkeypatch.setattr(readiness, "WARM_SECONDS", 0)
    ready, hosts = started(store([[0, "x", 1, 1]]), new=3)
    ready.worker_came("tcp://a:3")
    ready.worker_came("tcp://b:1")
    assert hosts.done() == ["tcp://a:3"] * 4


def test_nobody_is_asked_for_a_store_that_is_gone():
    entry = store([[0, "x", 1, 1]])
    ready, hosts = started(entry)
    ready.store_made(entry)
    ready._stores = {}
    assert hosts.done() == []


@gen_cluster(client=True)
async def test_a_cluster_asks_when_a_store_is_made_and_when_a_worker_comes(c, s, a, b):
    asked = asyncio.Queue[str]()

    async def warm(host: ShardHost, **about: Any) -> None:
        await asked.put(host.worker.address)

    with patch.dict(HOST.by_name, warm=served_by("warm", warm)):
        made = await daskps.aio.create(
            {"w": np.zeros(4)}, client=c, servers=[a.address]
        )
        assert await asyncio.wait_for(asked.get(), 30) == b.address
        async with Worker(s.address, nthreads=1) as late:
            assert await asyncio.wait_for(asked.get(), 30) == late.address
        assert asked.empty()
        await made.close()


class Busy:
    """A worker that runs a task at some looks."""

    def __init__(self, *counts: int) -> None:
        self.counts = list(counts)

    def is_busy(self) -> bool:
        return bool(self.counts.pop(0))


def loaded_by(worker: Busy, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str]]:
    """Return how often loops were loaded: whether durable, and by which thread."""
    found = list[tuple[bool, str]]()

    def loaded(self: Rules, *, durable: bool) -> None:
        found.append((durable, threading.current_thread().name))

    monkeypatch.setattr(installation, "LOOK_SECONDS", 0)
    monkeypatch.setattr(Rules, "warm", loaded)
    host: Any = SimpleNamespace(worker=worker)
    asyncio.run(installation.warm(host, LAYOUT.to_wire(), b""))
    return found


def test_loops_are_loaded_beside_everything_when_the_worker_is_idle(monkeypatch):
    worker = Busy(0, 0, 0, 1, *[0] * installation.QUIET_LOOKS)
    [(durable, name)] = loaded_by(worker, monkeypatch)
    assert durable
    assert name.startswith("daskps-warm")
    assert worker.counts == []


def test_loops_are_loaded_by_a_worker_that_is_always_busy(monkeypatch):
    worker = Busy(*[1] * installation.MOST_LOOKS)
    assert len(loaded_by(worker, monkeypatch)) == 1
    assert worker.counts == []

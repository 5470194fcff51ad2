"""How many calls of Python a call by socket takes of the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

import daskps
from daskps import optim
from daskps.cluster.caller import local, reads, socket_pool
from tests.cluster.callers import counted
from tests.seams import session_of
from tests.support import local_cluster, until

SOCKET = {
    "daskps.carriers.process": False,
    "daskps.carriers.machine": False,
    "daskps.carriers.socket": True,
    "distributed.worker.profile.enabled": False,
}
#: Of calls to the shards of one host. To be lowered by who makes the route shorter.
GET_CALLS, PUSH_CALLS, ADD_CALLS = 22, 61, 62
TRAINER_PUSH_CALLS, TRAINER_PULL_CALLS, PUSHPULL_CALLS = 21, 16, 29
#: Of 64 rows of a table, from one host and two.
ROWS_PULL_CALLS, ROWS_PUSH_CALLS = {1: 44, 2: 101}, {1: 89, 2: 116}
#: What another host adds: a socket is taken, asked, heard and given back.
HOST_CALLS = 5
N = 100


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        dask.config.set(SOCKET),
        local_cluster(processes=False, protocol="tcp") as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is opened at the first call; no nearer way is looked for meanwhile."""
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    monkeypatch.setattr(local, "AGAIN_SECONDS", 1000.0)
    monkeypatch.setattr(reads, "AGAIN_SECONDS", 1000.0)


def least(call: Callable[[], object]) -> list[str]:
    """Return the shortest route of a few: now and then something is made anew."""
    return min((counted(call) for _ in range(5)), key=len)


@pytest.mark.parametrize("hosts", [1, 2])
def test_calls_of_a_handle_take_few_calls(client, hosts):
    names = list(client.nthreads())[:hosts]
    sgd = optim.SGD(0.1)
    with (
        dask.config.set(SOCKET),
        daskps.create({"w": np.zeros(N)}, optimizer=sgd, servers=names) as s,
    ):
        grads, out = {"w": np.ones(N)}, {"w": np.empty(N)}
        until(lambda: s.pull() and s.stats()["handle"]["sockets"] >= hosts)
        found: dict[str, list[str]] = {}

        def work() -> None:
            for _ in range(3):
                s.pull(out=out)
                s.push(grads)
                s.add(grads)
            found["get"] = least(lambda: s.pull(out=out))
            found["push"] = least(lambda: s.push(grads))
            found["add"] = least(lambda: s.add(grads))

        before = s.stats()["handle"]["messages"]
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert s.stats()["handle"]["messages"] == before
    more = HOST_CALLS * (hosts - 1)
    assert len(found["get"]) <= GET_CALLS + more, found["get"]
    assert len(found["push"]) <= PUSH_CALLS + more, found["push"]
    assert len(found["add"]) <= ADD_CALLS + more, found["add"]


@pytest.mark.parametrize("hosts", [1, 2])
def test_calls_with_rows_take_few_calls(client, hosts):
    names = list(client.nthreads())[:hosts]
    emb = daskps.TableSpec(640, 8, init=1.0)
    with (
        dask.config.set(SOCKET),
        daskps.create({"emb": emb}, optimizer=optim.SGD(0.5), servers=names) as s,
    ):
        ids, g = np.arange(630, -10, -10), np.ones((64, 8), "f4")
        out, table = np.empty((64, 8), "f4"), s["emb"]
        until(
            lambda: (
                table.pull(ids) is not None and s.stats()["handle"]["sockets"] >= hosts
            )
        )
        found: dict[str, list[str]] = {}

        def work() -> None:
            for _ in range(3):
                table.pull(ids, out=out)
                table.push(ids, g)
            found["pull"] = least(lambda: table.pull(ids, out=out))
            found["push"] = least(lambda: table.push(ids, g))

        before = s.stats()["handle"]
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        after = s.stats()["handle"]
        assert after["messages"] == before["messages"]
        assert after["socket_calls"] == before["socket_calls"] + 16 * hosts
        assert table.pull(ids).tolist() == [[-3.0] * 8] * 64
        assert out.tolist() == [[-0.5] * 8] * 64
    assert len(found["pull"]) <= ROWS_PULL_CALLS[hosts], found["pull"]
    assert len(found["push"]) <= ROWS_PUSH_CALLS[hosts], found["push"]


def steps(trainer: Any, part: Any) -> dict[str, list[str]]:
    grads, out = {"w": np.ones(N)}, {"w": np.empty(N)}
    for _ in range(5):
        trainer.push(grads)
        trainer.pull(out=out)
        trainer.pushpull(grads, out=out)
    counters = session_of(trainer).shards.counters
    until(
        lambda: (
            trainer.pull() and session_of(trainer).shards.remote.sockets.count([part])
        )
    )
    before = counters.messages
    for _ in range(2):
        trainer.push(grads)
        trainer.pull(out=out)
        trainer.pushpull(grads, out=out)
    found = {
        "push": least(lambda: trainer.push(grads)),
        "pull": least(lambda: trainer.pull(out=out)),
        "pushpull": least(lambda: trainer.pushpull(grads, out=out)),
    }
    assert counters.messages == before
    return found


def test_steps_of_a_trainer_take_few_calls(client):
    there = list(client.nthreads())[1]
    sgd = optim.SGD(0.1)
    with (
        dask.config.set(SOCKET),
        daskps.create({"w": np.zeros(N)}, optimizer=sgd, servers=[there]) as s,
    ):
        [found] = daskps.run(s, steps, [there])
    assert len(found["push"]) <= TRAINER_PUSH_CALLS, found["push"]
    assert len(found["pull"]) <= TRAINER_PULL_CALLS, found["pull"]
    assert len(found["pushpull"]) <= PUSHPULL_CALLS, found["pushpull"]

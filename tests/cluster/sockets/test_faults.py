"""Sockets whose ends are killed, stopped, fenced or interrupted: each push counts once."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import dask
import numpy as np
import psutil  # type: ignore[import-untyped]  # without type hints
import pytest
from distributed import Client

import daskps
from daskps.cluster.caller import call_template, remote, socket_carrier, socket_pool
from daskps.cluster.caller.link import Link
from daskps.cluster.caller.liveness import without_descriptors
from daskps.cluster.host import host_template
from daskps.cluster.host.node import HOSTS
from tests.cluster.forks import child
from tests.seams import shards_of
from tests.support import local_cluster, store, until

SOCKET = {
    "daskps.carriers.process": False,
    "daskps.carriers.machine": False,
    "daskps.carriers.socket": True,
}
N = 16


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket is opened at the first call, and soon again."""
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    monkeypatch.setattr(socket_pool, "PAUSE_SECONDS", 0.0)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Three workers that share memory; this process reaches them by sockets alone."""
    with local_cluster(n_workers=3, threads=1) as client:
        yield client


def by_socket(handle: Any) -> Any:
    found = pickle.loads(pickle.dumps(handle))
    with dask.config.set(SOCKET):
        shards_of(found)
    return found


def one(at: int) -> Any:
    delta = np.zeros(N)
    delta[at] = 1.0
    return delta


def counts(s: Any) -> dict[str, Any]:
    found: dict[str, Any] = s.stats()["handle"]
    return found


def opened(s: Any, n: int) -> None:
    def is_open() -> bool:
        s.pull()
        return bool(counts(s)["sockets"] >= n)

    until(is_open)


def pid_of(client: Client, address: str) -> int:
    pid: int = client.run(os.getpid, workers=[address])[address]
    return pid


class Adder(threading.Thread):
    """Adds one element after the other until it is stopped, and keeps what it added."""

    def __init__(self, s: Any) -> None:
        super().__init__()
        self.s, self.added = s, np.zeros(N)
        self.ended = threading.Event()
        self.errors: list[BaseException] = []

    def run(self) -> None:
        k = 0
        try:
            while not self.ended.is_set():
                self.s.add({"w": one(k % N)})
                self.added[k % N] += 1
                k += 1
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)

    def more(self, n: int) -> None:
        """Wait until it has added so many more."""
        goal = self.added.sum() + n
        until(lambda: self.added.sum() >= goal or self.errors)


def is_gone(client: Client, victim: str) -> bool:
    return victim not in client.nthreads()


def has_more_calls(s: Any, n: int) -> bool:
    return bool(counts(s)["socket_calls"] > n)


class Reader(threading.Thread):
    """Waits for a version on its socket, whatever becomes of its owners."""

    def __init__(self, s: Any, version: int) -> None:
        super().__init__()
        self.s, self.version, self.found = s, version, list[Any]()

    def run(self) -> None:
        with contextlib.suppress(Exception):  # found is empty then
            self.found.append(self.s.pull(min_version=self.version)["w"])


def is_parked(s: Any) -> bool:
    return any(row["parked"] for row in s.stats()["shards"])


def test_an_owner_that_is_stopped_is_left_to_messages(client):
    """Those time out as they would, and go on once it does."""
    name = next(iter(client.nthreads()))
    s = by_socket(daskps.create({"w": np.zeros(N)}, name="kept", servers=[name]))
    opened(s, 1)
    pid = pid_of(client, name)
    os.kill(pid, signal.SIGSTOP)
    # One of its threads may run on until then, and answer.
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    try:
        with pytest.raises(TimeoutError, match="shard 0 at worker"):
            s.add({"w": one(1)}, timeout=0.2)
        adder = threading.Thread(target=s.add, args=({"w": one(2)},))
        adder.start()
        until(lambda: counts_of(s).fallbacks.get("TimeoutError", 0) >= 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    adder.join()
    found = s.pull()["w"]
    assert found[2] == 1.0
    assert found[1] in (0.0, 1.0)
    assert s.version == found.sum()
    s.delete()


def test_owners_that_are_killed_or_retire_apply_each_push_once(client):
    names = list(client.nthreads())[:2]
    s = by_socket(
        daskps.create({"w": np.zeros(N)}, name="kept", servers=names, shards=2)
    )
    opened(s, 2)
    adder = Adder(s)
    adder.start()
    try:
        for is_killed in (True, False):
            adder.more(50)
            before = counts(s)["socket_calls"]
            victim = s.stats()["shards"][0]["worker"]
            reader = Reader(s, s.version + 400)
            reader.start()
            until(partial(is_parked, s))
            if is_killed:
                os.kill(pid_of(client, victim), signal.SIGKILL)
            else:
                client.retire_workers([victim])
            until(partial(is_gone, client, victim))
            adder.more(50)
            until(partial(has_more_calls, s, before + 20))
            reader.join()
            assert reader.found[0].sum() >= reader.version
    finally:
        adder.ended.set()
        adder.join()
    assert not adder.errors
    np.testing.assert_array_equal(s.pull()["w"], adder.added)
    pushes = [row["version"] for row in s.stats()["shards"]]
    assert sum(pushes) >= adder.added.sum()
    s.delete()


def counts_of(s: Any) -> Any:
    """Return a handle's counters without asking the hosts."""
    return shards_of(s).counters


# -- in this process -------------------------------------------------------------------


@pytest.fixture
def here() -> Iterator[Client]:
    options: dict[str, Any] = {"processes": False, "protocol": "tcp"}
    with (
        dask.config.set({**SOCKET, "distributed.worker.profile.enabled": False}),
        local_cluster(**options) as client,
    ):
        yield client


class DeliberateError(Exception):
    pass


def loop(trainer: Any, part: int) -> None:
    for k in range(100):
        if part and k == 30:
            raise DeliberateError("of rank 1")
        trainer.push({"w": np.ones(N, "f4")})
        trainer.pull()


def test_a_fence_ends_what_waits_on_sockets(here):
    with store(here, params={"w": np.zeros(N, "f4")}) as s:
        with pytest.raises(DeliberateError, match="of rank 1"):
            daskps.run(s, loop, [0, 1])
        assert s.version == 30
        opened(s, 2)
        s.push({"w": np.ones(N, "f4")})
        assert s.version == 31


@pytest.mark.usefixtures("interruptible")
def test_interrupted_in_a_call_by_socket(here, monkeypatch):
    monkeypatch.setattr(socket_carrier, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(call_template, "PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(host_template, "MOST_WAIT_SECONDS", 60.0)
    with store(here, params={"w": np.zeros(N)}) as s:
        opened(s, 2)
        shards = [h for host in HOSTS.values() for h in host.shards.values()]

        def interrupt() -> None:
            with contextlib.suppress(AssertionError):
                until(lambda: all(h.shard.waiting for h in shards), 30)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            s.pull(min_version=s.version + 1, timeout=None)
        thread.join()
        assert shards_of(s).remote.sockets_to(s.placement) == 0
        s.push({"w": np.ones(N)})
        opened(s, 2)
        assert s.version == 1


def test_no_descriptor_is_left(here, monkeypatch):
    """Opening fails, and calls go on by message."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    with store(here, params={"w": np.zeros(N)}) as s:
        monkeypatch.setattr("daskps.cluster.connections._connect", fail)
        until(lambda: s.pull() and any(counts(s)["fallbacks"]))
        assert counts(s)["sockets"] == 0
        s.push({"w": np.ones(N)})
        assert s.version == 1
        # Nor is there one for a message: what comes to an end says why.
        monkeypatch.setattr(remote, "without_descriptors", lambda: "for want of any")
        monkeypatch.setattr(Link, "rpc", fail)
        with pytest.raises(TimeoutError, match=r"shard.*, for want of any;"):
            s.push({"w": np.ones(N)}, timeout=0.2)


def test_a_process_without_descriptors_says_so():
    assert without_descriptors() == ""

    def run(_pipe: Any) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        found = without_descriptors()
        assert f"process {os.getpid()} has as many files and sockets open" in found
        assert "ulimit -n is 0" in found

    with child(run) as process:
        assert process.end() == 0

"""Messages from workers whose memory figures stay Dask's own, which map nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
from distributed.core import Status

import daskps
from daskps.cluster import upstream
from daskps.cluster.caller.carriers import Carriers
from daskps.cluster.machine import accounting, warnings
from daskps.cluster.machine.accounting import Charge
from daskps.cluster.machine.membership import HERE
from tests.cluster.caller.test_verbs import used
from tests.seams import shards_of
from tests.support import cleaned, local_cluster, store

MB = 2**20


def test_a_worker_with_a_nanny_is_not_charged(machine_cluster):
    """From its first task on: who asks waits until the nanny has answered."""
    with cleaned(machine_cluster), store(machine_cluster) as s:
        for worker in s.placement:
            why = machine_cluster.submit(
                accounting.charged, workers=[worker], pure=False
            )
            assert why.result(30) is None
    assert set(machine_cluster.run(is_told, nanny=True).values()) == {True}


def is_told(dask_worker):
    """Whether a nanny lets its worker have blocks of others."""
    timer = dask_worker.periodic_callbacks["memory_monitor"]
    return isinstance(timer.callback, accounting._Watch)


class Nanny:
    """A connection to a nanny that answers as it is told."""

    def __init__(self, reply):
        self._reply = reply

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def plugin_add(self, plugin, name):
        if isinstance(self._reply, Exception):
            raise self._reply
        return self._reply


class Worker:
    """As much of a worker as is asked for; its nanny answers so."""

    address, nanny, status = "tcp://one", "tcp://nanny", Status.running

    def __init__(self, reply, limit=MB):
        self.monitor = SimpleNamespace(get_process_memory=lambda: 0)
        self.memory_manager = SimpleNamespace(memory_limit=limit)
        self.rpc = lambda address: Nanny(reply)


NANNY = "have the nanny import daskps and see the worker's /proc/PID/smaps"
OK = {"status": "OK"}
ERROR = {"status": "error", "exception_text": "no module named daskps"}


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        (Worker(OK), ""),
        (
            Worker(ERROR),
            "its nanny takes no plugin (no module named daskps)",
        ),
        (Worker(OSError("gone")), "its nanny takes no plugin (OSError('gone'))"),
        (Worker(ERROR, limit=None), ""),
    ],
)
def test_what_a_nanny_answers_decides(worker, why, monkeypatch):
    monkeypatch.setattr(upstream, "workers", lambda: [worker])

    async def begins():
        accounting.begin_accounting(worker)
        # On the loop nobody waits: the answer could not come.
        early = accounting.charged()
        return early, await asyncio.to_thread(accounting.charged)

    early, found = asyncio.run(begins())
    if worker.memory_manager.memory_limit is None:
        assert early is None
    else:
        assert early == Charge("tcp://one: its nanny has not answered", "")
    assert found == (Charge(f"tcp://one: {why}", NANNY) if why else None)


def test_a_worker_of_which_daskps_knows_nothing_is_charged(monkeypatch):
    """Such as one of another cluster, whose task has a client of this one."""
    monkeypatch.setattr(upstream, "workers", lambda: [Worker(OK)])
    charge = accounting.charged()
    assert charge is not None
    assert charge.why == "tcp://one: it has no host of daskps"
    assert "--preload" in charge.remedy


def test_a_system_that_does_not_tell_is_left_alone(tmp_path, monkeypatch):
    worker: Any = Worker(OK)
    monkeypatch.setattr(upstream, "workers", lambda: [worker])
    monkeypatch.setattr(accounting, "_PROC", tmp_path)
    measure = worker.monitor.get_process_memory
    accounting.begin_accounting(worker)
    charge = accounting.charged()
    assert charge is not None
    assert "does not say" in charge.why
    assert worker.monitor.get_process_memory is measure


class Silent:
    """An answer that does not come; who waits for it makes the time pass."""

    def __init__(self):
        self.now, self.waits, self.is_locked = 100.0, [], lambda: False

    def result(self, seconds):
        assert not (seconds and self.is_locked())
        self.waits.append(seconds)
        self.now += seconds
        raise TimeoutError


@pytest.fixture
def silent(monkeypatch):
    """Two workers of this process, the nannies of which say nothing."""
    both = [Worker(OK), Worker(OK)]
    answer: Any = Silent()
    monkeypatch.setattr(upstream, "workers", lambda: both)
    monkeypatch.setattr(accounting, "monotonic", lambda: answer.now)
    asked, until = accounting._asked, answer.now + accounting.PATIENCE_SECONDS
    for worker in both:
        monkeypatch.setitem(asked, worker, accounting._Question(answer, until))
    return answer


HOSTS = [f"tcp://other:{i}" for i in range(16)]


@pytest.fixture
def carriers():
    """The ways to a store on sixteen hosts, none of which can be mapped."""
    link: Any = SimpleNamespace(machine=HERE)
    where = SimpleNamespace(hosts={}, segments={})
    meta: Any = SimpleNamespace(name="s", copies=1, where=where)
    return Carriers(link, meta, None)


def test_sixteen_hosts_wait_once_and_hold_no_lock_meanwhile(silent, carriers):
    """The loop that would bring the answer asks for the lock, too."""
    silent.is_locked = carriers._lock.locked
    assert [carriers.serving(worker) for worker in HOSTS] == [None] * 16
    assert silent.waits[0] == 2.0
    assert not any(silent.waits[1:])


def test_the_log_says_once_what_lasts_and_how_to_allow_it(
    carriers, caplog, monkeypatch
):
    monkeypatch.setattr(warnings, "_said", set())
    caplog.set_level(logging.WARNING, "daskps")
    for charge in (Charge("not yet", ""), *[Charge("refused", "let it")] * 2, None):
        monkeypatch.setattr(accounting, "charged", lambda found=charge: found)
        assert carriers.serving("tcp://other") is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "(refused); to allow it let it, or start" in record.message


def ways_before_and_after(s):
    """The way to each worker before a nanny has answered, and after."""
    charge = Charge("not answered", "")
    with mock.patch.object(accounting, "charged", return_value=charge):
        before = s.stats()["handle"]["carriers"]
    return set(before.values()), set(s.stats()["handle"]["carriers"].values())


def test_memory_is_mapped_once_the_nanny_has_answered(machine_cluster):
    with cleaned(machine_cluster), store(machine_cluster) as s:
        task = machine_cluster.submit(ways_before_and_after, s, pure=False)
        assert task.result(30) == ({"message"}, {"machine"})


# -- in a cluster ----------------------------------------------------------------

CHARGED = {"daskps.correct-memory": False, "daskps.carriers.process": False}


@pytest.fixture(scope="module")
def charged_cluster(machine_cluster):
    """Two workers whose figures are Dask's own.

    Started after the others, which keep the configuration they began with.
    """
    with dask.config.set(CHARGED), local_cluster() as client:
        yield client


@pytest.fixture
def charged(charged_cluster):
    with cleaned(charged_cluster):
        yield charged_cluster


def blocks(owner):
    """Blocks of a process that are mapped into this one."""
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if "/daskps-" in line and owner in line]


def reads_and_pushes(s, segment):
    """What goes how (calls without a message, and messages), the way, what is mapped."""
    counted = []
    for verb in (s.pull, lambda: s.push({"w": np.ones(10, "f4")}), s["w"].pull):
        before = used(s)
        verb()
        counted.append(tuple(b - a for a, b in zip(before, used(s), strict=True)))
    return counted, set(s.stats()["handle"]["carriers"].values()), blocks(segment)


def test_a_worker_that_is_charged_sends_messages_and_maps_nothing(charged):
    owner, other = charged.nthreads()
    with store(charged, servers=[owner]) as s:
        segment = shards_of(s).meta.where.segments[0].name
        [mapped] = charged.run(blocks, segment, workers=[owner]).values()
        assert mapped
        task = charged.submit(reads_and_pushes, s, segment, workers=[other])
        assert task.result(30) == ([(0, 1, 0)] * 3, {"message"}, [])


def gradient(params, X, y):
    return {"w": params["w"] - X.mean(axis=0)}


def same_rounds(client, other, rng):
    """Whether rounds of the graph have the same bits."""
    X, found = rng.normal(size=(60, 10)).astype("f4"), []
    for each in (client, other):
        with each.as_current(), store(each) as s:
            trained = daskps.train(
                s, gradient, X, execution="graph", trainers=3, batch_size=5
            )
            found.append(trained.weights["w"])
    one, two = found
    np.testing.assert_array_equal(one, two, strict=True)


def test_rounds_of_the_graph_have_the_same_bits(charged, machine_cluster, rng):
    same_rounds(charged, machine_cluster, rng)

"""Shards that are read from their files, where Dask would charge for mapped pages."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
from distributed.core import Status

import daskps
from daskps.cluster import accounting, filed, once, sheets, upstream
from daskps.cluster.accounting import Charge
from daskps.cluster.filed import Filed
from daskps.cluster.machine import HERE
from daskps.cluster.messages import Call, Part
from daskps.cluster.slot import Pending, Slot
from daskps.cluster.ways import Ways
from daskps.shards.base import READ, Step, Ticket
from daskps.shards.deputies import NotHereError
from daskps.shards.update import Publication
from tests.cluster.slots import LAYOUT, bare_host, shared_slot
from tests.cluster.test_verbs import CONTRACTS, in_task, new, used
from tests.support import cleaned, local_cluster, store

MB = 2**20
PART = Part(0, 1, (), (("float64", 0, 1000),))
_SHM = Path("/dev/shm")


@pytest.fixture
def slot(tmp_path):
    """A shard whose weights are read from its file."""
    made: Any = shared_slot(tmp_path)
    copier = Filed(made.block).copier
    return Slot("s", LAYOUT, 0, made.shard, block=made.block, copier=copier)


@pytest.fixture
def reads(monkeypatch):
    """The offsets that were read from; a read brings 1,000 bytes at most."""
    found, preadv = [], os.preadv

    def part(fd, buffers, offset):
        found.append(offset)
        return preadv(fd, [buffers[0][:1000]], offset)

    monkeypatch.setattr(os, "preadv", part)
    return found


def asks(slot):
    ticket = Ticket(Step(wait=READ), owner=Pending(1, lambda: None))
    slot.put(ticket)
    slot.serve()
    return ticket


# -- the copy --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["?", "i1", "f2", "f8", "c16"])
def test_bytes_are_those_of_the_file(slot, reads, dtype, rng):
    whole = slot.block.buffer
    whole[4096:] = rng.integers(0, 2, len(whole) - 4096)
    source = whole[5001 - 5001 % 16 : 5001 - 5001 % 16 + 4096].view(dtype)
    copy = slot.copier(source.nbytes)
    for out in (np.empty_like(source), np.empty((len(source), 2), dtype)[:, 1]):
        copy(out, source)
        np.testing.assert_array_equal(out, source)
    wider = np.empty(len(source), "c16")
    copy(wider, source)
    np.testing.assert_array_equal(wider, source)
    assert reads[:5] == [4992 + k for k in range(0, 5000, 1000)]
    copy(np.empty(0, dtype), source[:0])
    assert len(reads) == 15


def test_file_that_cannot_be_read_is_left_to_its_owner(slot, monkeypatch):
    os.ftruncate(slot.block.file.fd, 4096)
    source = slot.block.buffer[4096:4104].view("f8")
    with pytest.raises(NotHereError, match="cut short"):
        slot.copier(8)(np.empty(1), source)

    def fails(*_):
        raise OSError("no such device")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(NotHereError, match="no such device"):
        slot.copier(8)(np.empty(1), source)


def test_a_glance_at_a_file_that_cannot_be_read_finds_nothing(slot, monkeypatch):
    host, call = bare_host(None, slot), Call("s", (PART,), wait=READ)
    outs = {0: [np.ones(1000)]}
    found = host.glance(call, outs)
    assert found is not None
    assert not found[0].arrays[0].any()
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    assert host.glance(call, outs) is None


def test_copy_that_an_update_ran_into_is_made_again(slot, reads, monkeypatch):
    segment, part = slot.shard.segment, os.preadv

    def late(*args):
        if len(reads) == 4:
            # Half of it is there: it is published anew, and once more.
            for value in (1.0, 2.0):
                begun = Publication(segment)
                segment.weights[begun.flip & 1][0][:] = value
                begun.commit()
        return part(*args)

    monkeypatch.setattr(os, "preadv", late)
    out = np.empty(1000)
    ready = slot.read(asks(slot), PART, [out])
    assert ready.flip == segment.flip == 2
    assert set(out) == {2.0}
    assert len(reads) == 16


# -- when ------------------------------------------------------------------------


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
        accounting.begin(worker)
        # On the loop nobody waits: the answer could not come.
        early = accounting.charged(3600)
        return early, await asyncio.to_thread(accounting.charged)

    early, found = asyncio.run(begins())
    if worker.memory_manager.memory_limit is None:
        assert early is None
    else:
        assert early == Charge("tcp://one: its nanny has not answered", True)
    assert found == (Charge(f"tcp://one: {why}") if why else None)


def test_a_worker_of_which_daskps_knows_nothing_is_charged(monkeypatch):
    """Such as one of another cluster, whose task has a client of this one."""
    monkeypatch.setattr(upstream, "workers", lambda: [Worker(OK)])
    assert accounting.charged() == Charge("tcp://one: it has no host of daskps")


def test_a_system_that_does_not_tell_is_left_alone(tmp_path, monkeypatch):
    worker: Any = Worker(OK)
    monkeypatch.setattr(upstream, "workers", lambda: [worker])
    monkeypatch.setattr(accounting, "_PROC", tmp_path)
    measure = worker.monitor.get_process_memory
    accounting.begin(worker)
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
    until = answer.now + accounting.PATIENCE_SECONDS
    for worker in both:
        monkeypatch.setitem(accounting._asked, worker, accounting._Asked(answer, until))
    return answer


def test_all_who_ask_share_one_patience(silent):
    for seconds in (0.5, 1e9, 1e9):
        charge = accounting.charged(seconds)
        assert charge is not None
        assert charge.is_passing
    assert silent.waits == [0.5, 1.5, 0.0]


HOSTS = [f"tcp://other:{i}" for i in range(16)]


@pytest.fixture
def ways():
    """The ways to a store on sixteen hosts, none of which can be mapped."""
    link: Any = SimpleNamespace(machine=HERE)
    meta: Any = SimpleNamespace(name="s", where=SimpleNamespace(hosts={}, segments={}))
    return Ways(link, meta, None)


def test_sixteen_hosts_wait_once_and_hold_no_lock_meanwhile(silent, ways):
    """The loop that would bring the answer asks for the lock, too."""
    silent.is_locked = ways._lock.locked
    assert [ways.reader(worker) for worker in HOSTS] == [None] * 16
    assert silent.waits[0] == 2.0
    assert not any(silent.waits[1:])


def test_the_log_says_what_lasts(ways, caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    lane = ways._lanes["tcp://other"] = SimpleNamespace(
        is_closed=False, is_mapped=False
    )
    ways._where = ways._meta.where
    caplog.set_level(logging.WARNING, "daskps")
    for charge in (Charge("not yet", True), Charge("refused"), Charge("refused")):
        monkeypatch.setattr(accounting, "charged", lambda *_, found=charge: found)
        assert ways.reader("tcp://other") is lane
    assert [r.args for r in caplog.records] == [("refused",)]


def ways_before_and_after(s):
    """The way to each worker before a nanny has answered, and after."""
    charge = Charge("not answered", True)
    with mock.patch.object(accounting, "charged", return_value=charge):
        before = s.stats()["handle"]["ways"]
    return set(before.values()), set(s.stats()["handle"]["ways"].values())


def test_a_lane_is_mapped_once_the_nanny_has_answered(machine_cluster):
    with cleaned(machine_cluster), store(machine_cluster) as s:
        task = machine_cluster.submit(ways_before_and_after, s, pure=False)
        assert task.result(30) == ({"machine, reading"}, {"machine"})


# -- in a cluster ----------------------------------------------------------------

CHARGED = {
    "daskps.correct-memory": False,
    "daskps.ways.process": False,
    # What the tests below look at themselves.
    "distributed.worker.memory.monitor-interval": "20ms",
}
#: Of a worker. Beside its interpreter, which imports pandas where that is installed, one
#: that maps both buffers of the weights has more.
LIMIT = 384 * MB
NAMES = [f"w{i:02}" for i in range(12)]
EACH = 10 * MB // 4


@pytest.fixture(scope="module")
def charged_cluster(machine_cluster):
    """Two workers whose figures are Dask's own.

    Started after the others, which keep the configuration they began with.
    """
    with dask.config.set(CHARGED), local_cluster(memory_limit=LIMIT) as client:
        yield client


@pytest.fixture
def charged(charged_cluster):
    with cleaned(charged_cluster):
        yield charged_cluster


def shared():
    """Bytes of shared memory that Dask charges this process for."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssShmem:\s+(\d+)", status)[0])


def read_all(s):
    """Read a large model parameter by parameter, and again after an update.

    Returns how much more is charged, what was wrong, and the ways.
    """
    out, wrong, before = np.empty(EACH, "f4"), [], shared()
    for _ in range(2):
        [last] = s.versions
        for i, name in enumerate(NAMES):
            s.pull(name, out={name: out})
            if not (out == (i or last)).all():
                wrong.append((name, last))
        # From here on the other buffer is in force.
        s.add({NAMES[0]: np.ones(EACH, "f4")})
    return shared() - before, wrong, s.stats()["handle"]["ways"]


def read_mapped(s):
    """As :func:`read_all`, of a process that takes itself for one not charged."""
    with mock.patch.object(accounting, "charged", return_value=None):
        return read_all(s)


def stop_looking(dask_worker):
    dask_worker.periodic_callbacks["memory_monitor"].stop()


@pytest.mark.skipif(
    not _SHM.is_dir() or shutil.disk_usage(_SHM).free < 1024 * MB,
    reason="needs memory in /dev/shm",
)
def test_worker_that_is_charged_reads_more_than_it_may_map(charged):
    owner, reader = charged.nthreads()
    pids = charged.run(os.getpid)
    # A limit would not let one worker own so much; owners need no more than is theirs.
    charged.run(stop_looking, workers=[owner])
    charged.run(stop_looking, workers=[owner], nanny=True)
    made = {n: daskps.ArraySpec((EACH,), "f4", i) for i, n in enumerate(NAMES)}
    with (
        dask.config.set({"daskps.memory-share": 1.0}),
        store(charged, params=made, servers=[owner], optimizer=None) as s,
    ):
        task = charged.submit(read_all, s, workers=[reader], pure=False)
        grown, wrong, ways = task.result(60)
        assert not wrong
        assert ways == {owner: "machine, reading"}
        assert 0 < grown < MB
        assert charged.run(os.getpid) == pids
        events = charged.get_events(reader)
        assert not [e for _, e in events if e.get("status") == "paused"]
        # Mapped it would be all of it, twice, for which Dask ends a worker.
        for nanny in (False, True):
            charged.run(stop_looking, workers=[reader], nanny=nanny)
        task = charged.submit(read_mapped, s, workers=[reader], pure=False)
        grown, wrong, ways = task.result(60)
        assert not wrong
        assert ways == {owner: "machine"}
        assert grown > 0.95 * 2 * 4 * EACH * len(NAMES)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_verb_of_a_worker_that_is_charged(contract, charged):
    worker = next(iter(charged.nthreads()))
    with new(charged, servers=[worker]) as s:
        charged.submit(in_task, contract, s, workers=[worker]).result(60)


def reads_and_pushes(s):
    """What goes how: calls without a message, and messages."""
    counted = []
    for verb in (s.pull, lambda: s.push({"w": np.ones(10, "f4")}), s["w"].pull):
        before = used(s)
        verb()
        counted.append(tuple(b - a for a, b in zip(before, used(s), strict=True)))
    return counted


def test_reads_need_no_message_and_pushes_do(charged):
    worker = next(iter(charged.nthreads()))
    with store(charged, servers=[worker]) as s:
        found = charged.submit(reads_and_pushes, s).result(30)
        assert found == [(1, 0), (0, 1), (1, 0)]


def learns(trainer, part):
    """Pull in every manner; return what was read."""
    found, out = [], {"w": np.empty(10, "f4"), "b": np.empty(())}
    for clock in range(6):
        trainer.pull(out=out)
        found.append({n: v.copy() for n, v in out.items()})
        found.append({n: v.copy() for n, v in trainer.pull(copy=False).items()})
        found.append(trainer.pull_async().result())
        grads = {"w": found[-1]["w"] * 0.5 + part, "b": np.float64(clock)}
        found.append(trainer.pushpull(grads))
    return found


def same_runs(client, other, sync):
    """Whether trainers of both clusters read the same bits.

    Of one trainer under ASP: of two, the order of their steps would count.
    """
    parts = [1.0, 3.0] if sync == "bsp" else [1.0]
    found = []
    for each in (client, other):
        with each.as_current(), store(each) as s:
            found.append(daskps.run(s, learns, parts, sync=sync))
    for ours, theirs in zip(*found, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            assert one.keys() == two.keys()
            for name, value in one.items():
                np.testing.assert_array_equal(value, two[name], strict=True)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_trainers_read_the_same_bits(charged, machine_cluster, sync):
    same_runs(charged, machine_cluster, sync)


def gradient(params, X, y):
    return {"w": params["w"] - X.mean(axis=0)}


def forbid_sheets(dask_worker):
    """Let nobody map what other workers contribute."""

    def refuse(*_):
        raise AssertionError("a contribution of another worker is mapped")

    # For as long as this worker lives; none of the tests here maps any.
    sheets.Neighbours._block = refuse  # type: ignore[method-assign]  # as monkeypatch


def same_rounds(client, other, rng):
    """Whether rounds of the graph have the same bits, and map no contribution."""
    client.run(forbid_sheets)
    X, found = rng.normal(size=(60, 10)).astype("f4"), []
    for each in (client, other):
        with each.as_current(), store(each) as s:
            trained = daskps.train(
                s, gradient, X, execution="graph", trainers=3, batch_size=5
            )
            found.append(trained.weights["w"])
    np.testing.assert_array_equal(*found, strict=True)


def test_rounds_of_the_graph_have_the_same_bits(charged, machine_cluster, rng):
    same_rounds(charged, machine_cluster, rng)


def test_the_log_says_each_reason_once(caplog, monkeypatch):
    monkeypatch.setattr(once, "_said", set())
    reasons = ("one: it has no nanny", "two: nor has this")
    with caplog.at_level(logging.WARNING, "daskps"):
        for why in reasons * 2:
            filed.say_once(why)
    assert [r.args for r in caplog.records] == [(why,) for why in reasons]

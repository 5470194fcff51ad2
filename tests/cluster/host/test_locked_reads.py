"""Shared memory of a processor that may reorder stores: readers take the lock too."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest

import daskps
from daskps import config
from daskps.cluster.caller.reads import PreparedRead
from daskps.cluster.host.calls import copy_out
from daskps.errors import ConsistencyError, ShardBusyError
from daskps.kernels import past
from daskps.shards.arrays.operations import PieceUpdate
from daskps.shards.memory.publication import Publication
from daskps.shards.steps import READ, Ready, Step, Ticket
from tests.cluster.caller.test_charged import same_rounds
from tests.cluster.caller.test_verbs import CONTRACTS, in_task, new
from tests.cluster.callers import ALL
from tests.cluster.hosted import shared_shard
from tests.seams import shards_of
from tests.support import cleaned, local_cluster, store

RANGES = (("float64", 0, 1000),)
LOCKED = {"daskps.carriers.locked-reads": True, "daskps.carriers.process": False}


@pytest.mark.parametrize(("ordered", "locked"), [(True, False), (False, True)])
def test_the_processor_decides(monkeypatch, ordered, locked):
    monkeypatch.setattr(config, "_ORDERED", ordered)
    assert config.load().locked_reads is locked


@pytest.fixture
def hosted(tmp_path):
    with dask.config.set(LOCKED):
        yield shared_shard(tmp_path)


def asks(hosted, exact=False):
    ticket = Ticket(Step(wait=READ), owner=mock.Mock())
    ticket.outcome = Ready(hosted.shard.segment.flip, 0, exact=exact)
    return ticket


def publish(hosted, value):
    begun = Publication(hosted.shard.segment)
    begun.add([(0, PieceUpdate(np.full(1000, value), replace=True))])
    begun.commit()


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_a_read_waits_for_whoever_has_the_lock(hosted, seconds):
    out, writer = np.empty(1000), hosted.block.lock()
    writer.acquire(1)
    # Looking without the lock is not possible at all.
    carriers: Any = SimpleNamespace(run=0, find_shard=lambda _: (None, hosted))
    assert PreparedRead.of(carriers, ALL) is None
    with pytest.raises(ShardBusyError, match=r"its turn|stayed locked"):
        copy_out(hosted, asks(hosted), RANGES, [out], seconds=seconds)
    publish(hosted, 3.0)
    timer = threading.Timer(0.05, writer.release)
    timer.start()
    assert copy_out(hosted, asks(hosted), RANGES, [out], seconds=30).flip == 1
    timer.join()
    assert set(out) == {3.0}
    # And lets go of it.
    assert hosted.block.lock().try_acquire()


def test_a_read_holds_the_lock_while_it_copies(hosted, monkeypatch):
    held = []

    def copy(out, source, **_: Any):
        held.append(hosted.block.lock().try_acquire())
        out[:] = source

    monkeypatch.setattr(past, "LARGE_NBYTES", 0)
    monkeypatch.setattr(past, "copy", copy)
    copy_out(hosted, asks(hosted), RANGES, [np.empty(1000)])
    assert held == [False]


def test_what_was_overwritten_is_not_read(hosted):
    out, old, exact = np.empty(1000), asks(hosted), asks(hosted, exact=True)
    publish(hosted, 1.0)
    # The publication before is still whole, the one before that is not.
    assert copy_out(hosted, exact, RANGES, [out]).flip == 0
    assert set(out) == {0.0}
    publish(hosted, 2.0)
    with pytest.raises(ConsistencyError):
        copy_out(hosted, exact, RANGES, [out])
    assert copy_out(hosted, old, RANGES, [out]).flip == 2
    assert set(out) == {2.0}


# -- in a cluster ----------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_cluster(machine_cluster):
    """Started after the others, which keep the configuration they began with."""
    with dask.config.set(LOCKED), local_cluster() as client:
        yield client


@pytest.fixture
def locked(locked_cluster):
    with cleaned(locked_cluster):
        yield locked_cluster


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_verb_with_locked_reads(contract, locked):
    worker = next(iter(locked.nthreads()))
    with new(locked, servers=[worker]) as s:
        locked.submit(in_task, contract, s, workers=[worker]).result(60)


def carriers(s):
    return set(s.stats()["handle"]["carriers"].values())


def shares(trainer, part):
    """Whether two reads that need no copy gave the same memory."""
    one, two = (trainer.pull("w", copy=False)["w"] for _ in range(2))
    return np.shares_memory(one, two)


def test_a_read_that_gets_no_turn_ends_with_its_timeout(locked):
    """Neither earlier, with another error, nor once for each shard."""
    worker = next(iter(locked.nthreads()))
    with store(locked, servers=[worker], shards=2) as s:
        s.pull()
        mapped = shards_of(s).carriers.serving(worker)
        first, second = (hosted.block.lock() for hosted in mapped.shards.values())
        first.acquire(1)
        second.acquire(1)
        try:
            with pytest.raises(
                TimeoutError, match=r"after 0\.3 s .* shards? .* worker"
            ):
                s.pull(timeout=0.3)
        finally:
            second.release()
            late = threading.Timer(0.2, first.release)
            late.start()
        np.testing.assert_array_equal(s["w"].pull(timeout=None), np.zeros(10))
        late.join()


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
def test_trainers_read_the_same_bits(locked, machine_cluster, sync):
    same_runs(locked, machine_cluster, sync)
    with locked.as_current(), store(locked) as s:
        assert locked.submit(carriers, s, pure=False).result(30) == {"machine"}
        assert all(row["locked_reads"] for row in s.stats()["shards"])


def test_nothing_is_seen_without_a_copy(locked):
    worker = next(iter(locked.nthreads()))
    with locked.as_current(), store(locked, servers=[worker]) as s:
        assert daskps.run(s, shares, [1, 2]) == [False, False]


def test_rounds_of_the_graph_have_the_same_bits(locked, machine_cluster, rng):
    same_rounds(locked, machine_cluster, rng)

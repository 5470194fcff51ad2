"""Ctrl-C in calls of the main thread: whenever it comes, no shard stays locked."""

from __future__ import annotations

import fcntl
import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from daskps.cluster.caller import interrupts
from daskps.cluster.caller.reads import Reads
from daskps.cluster.caller.routes import push, read
from daskps.cluster.counters import Counters
from daskps.shards.steps import ADD, Step
from tests.cluster.callers import Carriers, call, target_in
from tests.cluster.hosted import shared_shard
from tests.seams import is_taken, lock_of, mutex_of

pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture
def carriers(tmp_path):
    return Carriers(shared_shard(tmp_path))


def target():
    return target_in(np.full(1000, 9.0))


@pytest.fixture
def lockers(carriers):
    """The threads that take the lock between processes."""
    lock, threads = lock_of(carriers.hosted), []

    def noting(real):
        def noted(*args):
            threads.append(threading.current_thread())
            return real(*args)

        return noted

    lock.acquire, lock.try_acquire = noting(lock.acquire), noting(lock.try_acquire)
    return threads


def test_main_thread_takes_no_lock(carriers, lockers):
    assert threading.current_thread() is threading.main_thread()
    arrays = {0: np.ones(1000)}
    reply, remote = call(
        carriers, push(carriers.meta, arrays, Step(kind=ADD, producer=1))
    )
    assert (reply.versions, remote.sent, remote.counters.local_calls) == (
        [(0, 1)],
        [],
        1,
    )
    assert lockers
    assert threading.main_thread() not in lockers
    lockers.clear()
    pulled = target()
    assert Reads(
        carriers.meta,
        carriers,
        cast("Any", SimpleNamespace(counters=Counters(), sockets=None)),
    ).fill(pulled, [0])
    assert set(pulled.flats[0]) == {1.0}
    assert not lockers


def test_interrupt_ends_a_wait_and_leaves_no_lock(carriers, lockers):
    hosted, main = carriers.hosted, threading.get_ident()
    look, looks = hosted.look, list[Any]()

    def interrupted():
        if not looks:
            signal.pthread_kill(main, signal.SIGINT)
        looks.append(threading.current_thread())
        look()

    hosted.look = interrupted
    with pytest.raises(KeyboardInterrupt):
        call(carriers, read(carriers.meta, target(), 5, Step()))
    assert not hosted.waits
    assert not mutex_of(hosted).locked()
    assert not is_taken(lock_of(hosted))
    assert threading.main_thread() not in looks + lockers


def test_an_event_loop_of_the_main_thread_ends_its_turn_first(carriers, lockers):
    """As that of an asynchronous client with workers in its own process."""
    hosted, turns = carriers.hosted, []

    def interrupted(shard):
        signal.raise_signal(signal.SIGINT)
        turns.append(shard)

    futures = [hosted.enqueue(interrupted), hosted.enqueue(turns.append)]
    with pytest.raises(KeyboardInterrupt):
        hosted.serve()
    assert turns == [hosted.shard] * 2
    assert all(future.done() for future in futures)
    assert lockers == [threading.main_thread()]
    assert not mutex_of(hosted).locked()
    assert not is_taken(lock_of(hosted))


def test_interrupt_waits_for_the_end_of_the_work():
    stopped, ended, main = threading.Event(), [], threading.get_ident()

    def work():
        signal.pthread_kill(main, signal.SIGINT)
        ended.append(stopped.wait(30))

    with pytest.raises(KeyboardInterrupt):
        interrupts.shielded(work, stopped.set)
    assert ended == [True]


def test_error_of_a_signal_right_after_the_lock_gives_it_back(carriers, monkeypatch):
    lock, real = lock_of(carriers.hosted), fcntl.lockf
    done = []

    def lockf(fd, command, *args):
        real(fd, command, *args)
        done.append(command)
        if command != fcntl.LOCK_UN:
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with pytest.raises(KeyboardInterrupt):
        lock.try_acquire()
    assert done[1:] == [fcntl.LOCK_UN]
    assert not is_taken(lock)

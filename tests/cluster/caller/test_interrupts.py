"""Ctrl-C in calls of the main thread: whenever it comes, no shard stays locked."""

from __future__ import annotations

import fcntl
import signal
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from daskps.cluster.caller import interrupts
from daskps.cluster.caller.near import NearCall
from daskps.cluster.host.exchange import NearShards
from daskps.cluster.wire.deadline import Deadline
from daskps.cluster.wire.messages import Call, Part
from daskps.shards.steps import ADD, READ, Item
from tests.cluster.slots import shared_slot

RANGES = (("float64", 0, 1000),)


class Ours(NearShards):
    def missing(self, store, shard):
        return KeyError(shard)

    def is_live(self):
        return True


pytestmark = pytest.mark.usefixtures("interruptible")


@pytest.fixture
def serving(tmp_path):
    found = Ours(np.empty, 5.0)
    found.slots["s", 0] = shared_slot(tmp_path)
    return found


def call(serving, part, **head):
    assert threading.current_thread() is threading.main_thread()
    shards: Any = SimpleNamespace(counters=SimpleNamespace(local_calls=0))
    out = {part.shard: [np.full(1000, 9.0)]} if part.ranges else {}
    direct = NearCall(shards, out, Deadline(60, "a call"))
    [answer] = direct.call({"w": (serving, Call("s", (part,), **head))}, {}).values()
    assert shards.counters.local_calls == 1
    return answer


@pytest.fixture
def lockers(serving):
    """The threads that take the lock between processes."""
    lock, threads = serving.slots["s", 0]._lock, []

    def noting(real):
        def noted(*args):
            threads.append(threading.current_thread())
            return real(*args)

        return noted

    lock.acquire, lock.try_acquire = noting(lock.acquire), noting(lock.try_acquire)
    return threads


def test_main_thread_takes_no_lock(serving, lockers):
    items = (Item(0, 0, np.ones(1000)),)
    call(serving, Part(0, 1, items), kind=ADD, producer=1)
    assert lockers
    assert threading.main_thread() not in lockers
    lockers.clear()
    answer = call(serving, Part(0, 1, (), RANGES), wait=READ)
    assert set(answer.arrays[0]) == {1.0}
    assert not lockers


def test_interrupt_ends_a_wait_and_leaves_no_lock(serving, lockers):
    slot, main = serving.slots["s", 0], threading.get_ident()
    look, looks = slot.look, list[Any]()

    def interrupted():
        if not looks:
            signal.pthread_kill(main, signal.SIGINT)
        looks.append(threading.current_thread())
        look()

    slot.look = interrupted
    with pytest.raises(KeyboardInterrupt):
        call(serving, Part(0, 1, (), RANGES, at_least=5), wait=READ)
    assert not slot.waits
    assert not slot._mutex.locked()
    assert not slot._lock._file.mutex.locked()
    assert threading.main_thread() not in looks + lockers


def test_an_event_loop_of_the_main_thread_ends_its_turn_first(serving, lockers):
    """As that of an asynchronous client with workers in its own process."""
    slot, turns = serving.slots["s", 0], []

    def interrupted(shard):
        signal.raise_signal(signal.SIGINT)
        turns.append(shard)

    futures = [slot.run(interrupted), slot.run(turns.append)]
    with pytest.raises(KeyboardInterrupt):
        slot.serve()
    assert turns == [slot.shard] * 2
    assert all(future.done() for future in futures)
    assert lockers == [threading.main_thread()]
    assert not slot._mutex.locked()
    assert not slot._lock._file.mutex.locked()


def test_interrupt_waits_for_the_end_of_the_work():
    stopped, ended, main = threading.Event(), [], threading.get_ident()

    def work():
        signal.pthread_kill(main, signal.SIGINT)
        ended.append(stopped.wait(30))

    with pytest.raises(KeyboardInterrupt):
        interrupts.shielded(work, stopped.set)
    assert ended == [True]


def test_error_of_a_signal_right_after_the_lock_gives_it_back(serving, monkeypatch):
    lock, real = serving.slots["s", 0]._lock, fcntl.lockf
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
    assert not lock._file.mutex.locked()

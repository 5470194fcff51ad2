"""The lock of a shard between processes: exclusion, turns, and holders that die."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from daskps.cluster.machine.blocks import Block
from daskps.cluster.machine.locks import FileLock
from daskps.cluster.machine.membership import Membership
from daskps.cluster.machine.processes import THIS, pid_of
from daskps.errors import ConsistencyError, IllegalStateError, ShardBusyError
from daskps.shards.memory.format import HOLDER, WANTED
from tests.cluster.forks import child, contained

N = 8192


@pytest.fixture
def block(tmp_path: Path) -> Iterator[Block]:
    memory = Membership.join(tmp_path, "a")
    found = memory.make(N)
    found.stamp()
    yield found
    found.free()
    memory.leave()


def lock_of(base: Path, block: Block) -> tuple[FileLock, np.ndarray]:
    """In another process: the same lock, and a word under it."""
    own = Membership.visit(base, "a").attach(block.address)
    return own.lock(), own.buffer[4096:4104].view(np.int64)


def holds(pipe: Connection, base: Path, block: Block) -> None:
    lock, _ = lock_of(base, block)
    lock.acquire(30)
    pipe.send(lock.try_acquire())
    pipe.recv()
    lock.release()
    pipe.send(None)
    pipe.recv()


def counts(pipe: Connection, base: Path, block: Block, times: int) -> None:
    lock, count = lock_of(base, block)
    pipe.recv()
    for _ in range(times):
        lock.acquire(30)
        value = int(count[0])
        os.sched_yield()
        count[0] = value + 1
        lock.release()


def test_one_process_at_a_time(tmp_path: Path, block: Block) -> None:
    with (
        child(counts, tmp_path, block, 2000) as one,
        child(counts, tmp_path, block, 2000) as two,
        child(counts, tmp_path, block, 2000) as three,
    ):
        for process in (one, two, three):
            process.send()
        assert [p.end() for p in (one, two, three)] == [0, 0, 0]
    assert block.buffer[4096:4104].view(np.int64)[0] == 6000
    assert block.buffer[:128].view(np.int64)[WANTED] == 0


def test_one_thread_at_a_time(block: Block) -> None:
    one, two = block.lock(), block.lock()
    assert one.try_acquire()
    # The kernel would give it to the same process once more.
    assert not one.try_acquire()
    assert not two.try_acquire()
    with pytest.raises(ShardBusyError, match=f"process {os.getpid()} "):
        two.acquire(0.001)
    thread = threading.Thread(target=two.acquire, args=[30])
    thread.start()
    one.release()
    thread.join()
    assert not one.try_acquire()
    two.release()


def test_a_busy_lock_names_its_holder(tmp_path: Path, block: Block) -> None:
    lock, words = block.lock(), block.buffer[:128].view(np.int64)
    with child(holds, tmp_path, block) as other:
        assert other.receive() is False
        assert not lock.try_acquire()
        with pytest.raises(ShardBusyError, match=f"process {other.pid} ") as caught:
            lock.acquire(0.002)
        assert isinstance(caught.value, ConsistencyError)
        assert lock.holder == other.pid
        # Nobody waits any more.
        assert words[WANTED] == 0
        other.send()
        other.receive()
        assert lock.try_acquire()
        assert lock.holder == os.getpid()
        lock.release()


def test_a_killed_holder_frees_the_lock(tmp_path: Path, block: Block) -> None:
    lock = block.lock()
    with child(holds, tmp_path, block) as other:
        other.receive()
        assert not lock.try_acquire()
        waiting = threading.Thread(target=lock.acquire, args=[30])
        waiting.start()
        other.kill()
        waiting.join()
    assert lock.holder == os.getpid()
    lock.release()


def test_attaching_again_does_not_drop_the_lock(tmp_path: Path, block: Block) -> None:
    """Closing any descriptor of the file would."""
    lock = block.lock()
    lock.acquire(1)
    guest = Membership.visit(tmp_path, "a")
    again = guest.attach(block.address)
    again.free()
    guest.leave()
    del again
    gc.collect()

    def tries(pipe: Connection) -> None:
        pipe.send(lock_of(tmp_path, block)[0].try_acquire())

    with child(tries) as other:
        assert other.receive() is False
    lock.release()
    with child(tries) as other:
        assert other.receive() is True


def test_a_lock_outlives_its_block(tmp_path: Path) -> None:
    memory = Membership.join(tmp_path, "a")
    block = memory.make(N)
    lock = block.lock()
    block.free()
    del block
    assert lock.try_acquire()
    lock.release()
    memory.leave()


def test_a_forked_child_is_refused(block: Block) -> None:
    lock = block.lock()
    lock.acquire(1)

    def forked(pipe: Connection) -> None:
        for use in (lock.try_acquire, lambda: lock.acquire(1), lock.release):
            with pytest.raises(IllegalStateError, match="fork"):
                use()
        # One of its own is free to use, and taken.
        pipe.send(block.lock().try_acquire())

    with child(forked) as other:
        assert other.receive() is False
        assert other.end() == 0
    lock.release()


def test_the_last_holder_passes_the_turn_on(block: Block) -> None:
    lock, words = block.lock(), block.buffer[:128].view(np.int64)
    lock.acquire(1)
    lock.release()
    assert (words[HOLDER], words[WANTED]) == (THIS.number, 0)
    words[WANTED] = 1  # some process that waits
    assert not lock.try_acquire()
    # But nobody came.
    assert lock.try_acquire()
    lock.release()
    assert not lock.try_acquire()
    # Nor here: who waited has died, and counts no more.
    lock.acquire(30)
    assert words[WANTED] == 0
    lock.release()
    assert lock.try_acquire()
    lock.release()
    # The turn of another one ends when somebody has had it.
    words[[HOLDER, WANTED]] = 2, 1
    assert lock.try_acquire()
    lock.release()
    assert words[WANTED] == 1


def test_turns_alternate(tmp_path: Path, block: Block) -> None:
    """Two that want it all the time: each finds that the other one had it."""
    lock = block.lock()
    with child(counts, tmp_path, block, 50) as other:
        lock.acquire(30)
        other.send()
        words = block.buffer[:128].view(np.int64)
        while pid_of(int(words[WANTED])) != other.pid:
            os.sched_yield()
        lock.release()
        for turn in range(1, 11):
            # As long as a slow machine needs to wake the other one.
            lock._pass_on(30)
            assert lock.holder == other.pid
            lock.acquire(30)
            count = int(block.buffer[4096:4104].view(np.int64)[0])
            assert turn <= count
            if count >= 40:
                break
            while pid_of(int(words[WANTED])) != other.pid:
                os.sched_yield()
            lock.release()
        else:
            lock.acquire(30)
        lock.release()
        assert other.end() == 0


def contends(pipe: Connection, base: Path, block: Block) -> None:
    lock, _ = lock_of(base, block)
    words = block.buffer[:128].view(np.int64)
    pipe.send((os.getpid(), THIS.number))
    other = pipe.recv()
    lock.acquire(30)
    words[WANTED] = other
    lock.release()
    has_passed = not lock.try_acquire()
    lock.acquire(30)
    pipe.send((has_passed, int(words[WANTED]) == other))
    pipe.recv()


def test_processes_of_one_number_take_turns(tmp_path: Path, block: Block) -> None:
    """Each is process 1 of its container; one is killed while it has the lock."""
    lock, about = block.lock(), (tmp_path, block)
    with (
        contained(contends, *about) as (one, pid),
        contained(contends, *about) as (two, _),
    ):
        (of_one, number), (of_two, other) = one.receive(), two.receive()
        assert of_one == of_two == pid_of(number) == pid_of(other) == 1
        one.send(other)
        # No other process has come: it waits no more, as in the turns of others.
        assert one.receive() == (True, False)
        assert lock.held_by() == 1
        two.send(number)
        os.kill(pid, signal.SIGKILL)
        assert two.receive() == (True, False)
    lock.acquire(30)
    lock.release()

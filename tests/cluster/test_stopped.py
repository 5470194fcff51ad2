"""Processes that are stopped where others wait for them: nothing is broken or lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import re
import signal
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps import config, optim
from daskps.cluster.directory import candidates, move
from daskps.cluster.directory.move import Move
from daskps.cluster.machine.membership import HERE
from daskps.cluster.machine.sweeping import sweep_abandoned
from daskps.cluster.runs import launch
from tests.cluster.forks import child
from tests.seams import shards_of
from tests.support import PATIENCE, local_cluster, until


@pytest.fixture(scope="module")
def machine():
    """Three workers of one machine, whose memory this process maps too."""
    with (
        dask.config.set({"daskps.carriers.process": False}),
        local_cluster(n_workers=3, threads=1) as client,
    ):
        yield client


@pytest.fixture
def workers(machine):
    """Addresses of all three, once those that died have followers."""
    until(lambda: len(machine.cluster.scheduler.running) == 3)
    with machine.as_current():
        yield list(machine.cluster.scheduler.workers)


def book(client):
    return client.cluster.scheduler.extensions["daskps-directory"]


def pid_of(client, address):
    return client.run(os.getpid, workers=[address])[address]


def is_stopped(pid):
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    return stat.rpartition(")")[2].split()[0] == "T"


def by_message(handle):
    """Return a handle that reaches the shards by message."""
    remote = pickle.loads(pickle.dumps(handle))
    with dask.config.set(
        {"daskps.carriers.process": False, "daskps.carriers.machine": False}
    ):
        shards_of(remote)
    return remote


def add_and_stop(handle, at):
    """Add one, and stop this process in the middle of it, at the shard's lock."""
    from daskps.shards.memory.publication import Publication

    publication: Any = Publication
    commit = publication.commit

    def stop(self, *args, **kwargs):
        publication.commit = commit
        # To this thread: others would stop while it goes on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return commit(self, *args, **kwargs)

    publication.commit = stop
    return int(handle.add({"w": one(at)}))


def one(at):
    delta = np.zeros(8)
    delta[at] = 1.0
    return delta


@pytest.fixture
def stopped(machine, workers):
    """A store on one worker, and another worker that stopped while it acts for it."""
    a, b, _ = workers
    s, pid = daskps.create({"w": np.zeros(8)}, servers=[a]), pid_of(machine, b)
    task = machine.submit(add_and_stop, s, 0, workers=[b], pure=False)
    until(lambda: is_stopped(pid))
    try:
        yield s, task, pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        s.close()


def test_a_stopped_process_keeps_the_lock_and_goes_on(stopped):
    """Calls time out naming it, on all ways; then its own call lands, once."""
    s, task, pid = stopped
    for handle in (s, by_message(s)):
        with pytest.raises(TimeoutError, match=rf"process {pid} .* locked shard 0"):
            handle.add({"w": one(1)}, timeout=0.3)
    # Reading takes no lock.
    np.testing.assert_array_equal(s["w"].pull(timeout=5), 0.0)
    later = threading.Thread(target=s.add, args=({"w": one(2)},))
    later.start()
    os.kill(pid, signal.SIGCONT)
    assert task.result() >= 1
    later.join()
    found = s["w"].pull()
    assert (found[0], found[2]) == (1.0, 1.0)
    # Those that timed out: once or not at all.
    assert found[1] in (0.0, 1.0, 2.0)
    assert s.version == found.sum()


def test_a_drain_waits_for_a_stopped_process(stopped):
    """Its owner lets go of the shard once it can, however late that is."""
    s, task, pid = stopped
    (owner,) = s.placement
    with pytest.raises(TimeoutError, match="the drain of worker"):
        s.drain(owner, timeout=2)
    os.kill(pid, signal.SIGCONT)
    assert task.result() >= 1
    n = itertools.count(1)

    def has_moved() -> bool:
        s.add({"w": next(n) * 0.0 + one(1)})
        return bool(s.placement != (owner,))

    until(has_moved)
    assert s["w"].pull()[:2].tolist() == [1.0, next(n) - 1.0]


def test_a_killed_process_lets_go_of_the_lock(stopped):
    s, task, pid = stopped
    later = threading.Thread(target=s.add, args=({"w": one(2)},))
    later.start()
    os.kill(pid, signal.SIGKILL)
    later.join()
    task.cancel()
    # What it was at never was.
    np.testing.assert_array_equal(s["w"].pull(), one(2))
    assert s.version == 1


def says_of(ask, what):
    """Return whether a call that times out says it: on its way it may know less."""
    with pytest.raises(TimeoutError) as error:
        ask(timeout=0.5)
    return re.search(what, str(error.value))


def test_a_stopped_process_keeps_a_shard_away(machine, stopped):
    """The owner dies meanwhile; adopters and calls wait for the lock."""
    s, task, pid = stopped
    owner = s.placement[0]
    entry = book(machine).stores[s.uid]
    os.kill(pid_of(machine, owner), signal.SIGKILL)
    until(
        lambda: f"process {pid} of its machine has locked it" in entry.away.get(0, "")
    )
    remote = by_message(s)
    for ask in (remote.pull, s.snapshot, s.stats):
        until(partial(says_of, ask, rf"worker {owner}, which died .* {pid} of"))
    waiting = remote.pull_async()
    os.kill(pid, signal.SIGCONT)
    waiting.result(60)
    until(lambda: task.done())
    # It has landed, or an error said that its shard has moved: and then it was
    # repeated.
    assert task.status == "finished"
    np.testing.assert_array_equal(s["w"].pull(), one(0))
    assert entry.generations == (2,)
    assert not entry.lost


def hurry(patch, moves, question="ask_to_look"):
    """Have seconds pass between two questions in no time; return those that have."""
    ask, now, passed = getattr(Move, question), move.time_now, []

    async def later(*args, **more):
        found = await ask(*args, **more)
        passed.append(4.0)
        asyncio.get_running_loop().call_soon(moves.worker_came)
        return found

    patch.setattr(Move, question, later)
    patch.setattr(move, "time_now", lambda: now() + sum(passed))
    return passed


def test_a_slow_adopter_is_waited_for(machine, workers):
    """The only ones who can adopt compile."""
    a, *others = workers
    s = daskps.create({"w": np.zeros(8)}, servers=[a])
    s.add({"w": one(3)})
    entry = book(machine).stores[s.uid]
    machine.run(compile_until_told, workers=others)
    with pytest.MonkeyPatch.context() as patch:
        # The worker that comes for the dead one would be asked, and adopt it.
        patch.setattr(candidates, "ANSWER_SECONDS", 1000.0)
        passed = hurry(patch, book(machine).moves)
        os.kill(pid_of(machine, a), signal.SIGKILL)
        # Longer than a shard without a sign is kept for.
        until(lambda: sum(passed) > 2 * config.load().lost_after_seconds)
        assert "takes long to take it over" in entry.away[0]
        assert not entry.lost
        machine.run(tell, workers=others)
        np.testing.assert_array_equal(s["w"].pull(), one(3))
    assert entry.generations == (2,)
    s.close()


def compile_until_told(dask_worker):
    from daskps.cluster.host.adoption import _Adopter

    adopter: Any = _Adopter
    told, warm = threading.Event(), adopter._warm

    def slow(self):
        told.wait(PATIENCE)
        warm(self)

    dask_worker.told, adopter._warm = told, slow


def tell(dask_worker):
    dask_worker.told.set()


def test_a_stopped_owner_is_named(machine, workers):
    """Who takes messages to it waits; who shares its memory goes on without it."""
    a = workers[0]
    s, pid = daskps.create({"w": np.zeros(8)}, servers=[a]), pid_of(machine, a)
    remote = by_message(s)
    s.pull()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=rf"{a}, which .* \(process {pid} of"):
            remote.pull(timeout=0.5)
        s.add({"w": one(5)}, timeout=30)
    finally:
        os.kill(pid, signal.SIGCONT)
    np.testing.assert_array_equal(remote["w"].pull(), one(5))
    s.close()


def removed(client, address):
    """Have the scheduler give a worker up, as one that hangs longer than worker-ttl."""
    scheduler = client.cluster.scheduler
    client.sync(scheduler.remove_worker, address, stimulus_id="check-worker-ttl-1")


def test_an_owner_that_hangs_is_removed_and_lives(machine, workers):
    """Its shards are away, not lost; who shares their memory goes on."""
    a = workers[0]
    s, pid = daskps.create({"w": np.zeros(8)}, servers=[a]), pid_of(machine, a)
    remote, entry = by_message(s), book(machine).stores[s.uid]
    s.pull()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            passed = hurry(patch, book(machine).moves, "ask_to_adopt")
            removed(machine, a)
            until(lambda: sum(passed) > 2 * config.load().lost_after_seconds)
            why = rf"{a}, which died .*its owner, process {pid} of its machine, lives"
            with pytest.raises(TimeoutError, match=why):
                remote.pull(timeout=0.5)
            s.add({"w": one(5)}, timeout=30)
            assert set(entry.away) == {0}
            assert not entry.lost
    finally:
        os.kill(pid, signal.SIGKILL)
    np.testing.assert_array_equal(remote["w"].pull(), one(5))
    assert entry.generations == (2,)
    s.close()


@pytest.mark.parametrize("is_lost", [False, True], ids=["away", "lost"])
def test_an_owner_that_wakes_hands_its_shards_over(is_lost):
    """It hears that it was removed, and closes in order: with all that it has."""
    # Of its own: the worker that closes has no follower.
    with (
        dask.config.set({"daskps.carriers.process": False}),
        local_cluster(n_workers=2, threads=1) as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        a = next(iter(client.nthreads()))
        s, pid = daskps.create({"w": np.zeros(8)}, servers=[a]), pid_of(client, a)
        s.add({"w": one(4)})
        remote, entry = by_message(s), book(client).stores[s.uid]
        os.kill(pid, signal.SIGSTOP)
        try:
            if is_lost:
                patch.setattr(Move, "ask_to_adopt", silent)
            with dask.config.set({"daskps.lost-after": "1ms" if is_lost else "10s"}):
                removed(client, a)
                until(lambda: entry.lost if is_lost else entry.away)
            patch.undo()
        finally:
            os.kill(pid, signal.SIGCONT)
        # Until then it may answer a call that came while it hung.
        until(lambda: entry.generations == (2,))
        remote.add({"w": one(5)})
        np.testing.assert_array_equal(s["w"].pull(), one(4) + one(5))
        assert not entry.lost
        s.close()


async def silent(move, worker, shards):
    why = {"sight": "unknown", "why": "", "silent": True}
    return [{"shard": shard, **why} for shard in shards]


def join_another(pipe):
    """Be the first worker of another cluster of this user."""
    members = HERE.join("another")
    assert members is not None
    pipe.send(sweep_abandoned(config.load().shared_memory, seconds=0))
    members.leave()


def test_a_lost_shard_comes_back():
    """Its machine had no worker for so long; the one that comes finds its memory."""
    with (
        tempfile.TemporaryDirectory(dir=config.load().shared_memory) as base,
        dask.config.set({"daskps.shared-memory-directory": base}),
        local_cluster(n_workers=1, threads=1) as client,
    ):
        s = daskps.create({"w": np.zeros(8)})
        s.add({"w": one(6)})
        snapshot = s.snapshot()
        entry = book(client).stores[s.uid]
        with dask.config.set({"daskps.lost-after": "1ms"}):
            os.kill(pid_of(client, s.placement[0]), signal.SIGKILL)
            until(lambda: entry.lost)
        with child(join_another) as other:
            # It sweeps what has no worker; this scheduler keeps its own.
            other.receive()
        with contextlib.suppress(daskps.ShardLostError):
            s.add({"w": one(7)})
        until(lambda: entry.generations == (2,))
        found = s["w"].pull()
        assert (found[6], s.version) == (1.0, found.sum())
        said = [e["action"] for _, e in client.get_events("daskps")]
        assert said == ["store-created", "shards-lost", "shards-adopted"]
        # The copies do not: nobody waits for a worker of the old address.
        with pytest.raises(daskps.SnapshotLostError, match="another one"):
            client.compute(snapshot["w"]).result(timeout=PATIENCE)
        s.add({"w": one(7)})


def add_until_it_ends(trainer, part):
    while True:
        trainer.push({"w": np.ones(8)})


def test_a_run_says_what_it_waits_for_and_ends(machine, workers):
    """Nobody has room for a shard of it; five minutes pass in no time."""
    s = daskps.create({"w": np.zeros(8)}, optimizer=optim.SGD(1.0), servers=workers[:2])
    entry, caught, said = book(machine).stores[s.uid], [], []

    def work():
        with pytest.raises(daskps.ShardLostError) as error:
            daskps.run(s, add_until_it_ends, [None], sync="asp")
        caught.append(str(error.value))

    trainer = threading.Thread(target=work)
    trainer.start()
    until(lambda: s.version > 3)
    [run] = book(machine).runs.open.values()
    [at] = run.ranks.values()
    victim = next(w for w in s.placement if w != at)
    entry.memory_share = 1e-12
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch, book(machine).moves)
        patch.setattr(launch.logger, "warning", lambda of, *a: said.append(of % a))
        os.kill(pid_of(machine, victim), signal.SIGKILL)
        trainer.join()
    assert f"of store {s.name!r} away: died" in said[0]
    assert "was away for too long" in caught[0]
    assert "memory limit" in caught[0]
    # The next run waits as long, and so does a snapshot that nobody limits.
    with dask.config.set({"daskps.run-away-timeout": "100ms"}):
        with pytest.raises(daskps.ShardLostError, match="away for too long"):
            daskps.run(s, add_until_it_ends, [None], sync="asp")
        with pytest.raises(daskps.ShardLostError, match="away for too long"):
            s.snapshot(timeout=None)
    # It is whole, and somebody may have room again. Asked as when a worker comes: the
    # next question by itself is due by the clock that went ahead.
    entry.memory_share = 0.5
    machine.loop.add_callback(book(machine).moves.worker_came)
    assert s.snapshot().version > 3
    s.close()

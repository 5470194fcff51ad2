"""Workers that die while their machine lives: others take over their shards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import dask
import numpy as np
import psutil  # type: ignore[import-untyped]  # without type hints
import pytest
from dask.base import compute
from distributed.core import Status

import daskps
from daskps import RowGrad, TableSpec, codecs, config, optim
from daskps.cluster.caller import call_socket, socket_pool
from daskps.cluster.directory.move import Move
from daskps.cluster.machine.folder import folder_of
from tests.cluster import killing_owners
from tests.seams import push_as_another, session_of, shards_of
from tests.support import local_cluster, until

N_PUSHES = 300


@pytest.fixture(scope="module")
def machine():
    """Workers that die and are started again, for all tests of this file.

    Nobody calls a host directly: what a client does to a shard, others see.
    """
    with dask.config.set({"daskps.carriers.process": False}):
        with local_cluster(n_workers=4, threads=1) as client:
            yield client
            path = folder_of(config.load().shared_memory, scheduler(client).id)
            assert os.path.isdir(path)
        until(lambda: not os.path.exists(path))


def scheduler(client):
    return client.cluster.scheduler


def book(client):
    return scheduler(client).extensions["daskps-directory"]


@pytest.fixture
def workers(machine):
    """Addresses of all four workers, once those that died have followers."""
    nannies = machine.cluster.workers.values()
    # A nanny that is still starting its worker would not start another one.
    until(
        lambda: (
            len(scheduler(machine).running) == 4
            and all(nanny.status == Status.running for nanny in nannies)
        ),
        60,
    )
    with machine.as_current():
        yield list(scheduler(machine).workers)


def pids(client):
    return client.run(os.getpid)


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def events(client, s):
    found = [event for _, event in client.get_events("daskps")]
    return [event for event in found if event["uid"] == s.uid]


def left_of(client, owner):
    path = folder_of(config.load().shared_memory, scheduler(client).id)
    return [name for name in os.listdir(path) if name.startswith(owner)]


def owners_of(client, s):
    """Return the owner's number in the name of each shard's memory."""
    rows = book(client).stores[s.uid].segments
    return [name.split("-")[0] for _, name, _, _ in sorted(rows)]


def add_one_by_one(handle, start, step, acknowledged):
    for i in range(start, N_PUSHES, step):
        delta = np.zeros(N_PUSHES)
        delta[i] = 1
        # A row of each shard, and one of them named twice.
        ids = [*range(i, 4 * N_PUSHES, N_PUSHES), i]
        ones = np.full((5, 1), 1.0)
        ones[[0, 4]] = 0.5
        handle.add({"w": delta, "t": RowGrad(ids, ones)})
        acknowledged.append(i)


def add_as_a_task(handle, start, step):
    acknowledged: list[int] = []
    add_one_by_one(handle, start, step, acknowledged)
    return acknowledged


def follow(handle, copy, is_over):
    """Keep a copy of a table by what others say they have changed in it."""
    since = None
    # Of which nothing is its own, though it is of the process that pushes.
    push_as_another(handle)
    while True:
        is_last = is_over.is_set()
        changes = handle["t"].pull_changed(since)
        since = changes.since
        copy[changes.ids] = changes.rows
        if is_last:
            return


def test_acknowledged_pushes_count_once(machine, workers):
    """Two threads and a task push while the owner dies, then its adopter.

    Who only hears of changes has a copy of the table at the end.
    """
    a, b, _, d = workers
    params = {"w": np.zeros(N_PUSHES), "t": TableSpec(4 * N_PUSHES, 1, "float64")}
    s = daskps.create(params, servers=[a, b], shards=4)
    asleep = pickle.loads(pickle.dumps(s))
    before = asleep.placement
    owners = owners_of(machine, s)
    acknowledged: list[int] = []
    threads = [
        threading.Thread(target=add_one_by_one, args=(s, k, 3, acknowledged))
        for k in (0, 1)
    ]
    task = machine.submit(add_as_a_task, s, 2, 3, workers=[d])
    pid = pids(machine)
    copy, is_over = np.full((4 * N_PUSHES, 1), np.nan), threading.Event()
    follower = threading.Thread(target=follow, args=(s.bound(), copy, is_over))
    for thread in (*threads, follower):
        thread.start()
    entry = book(machine).stores[s.uid]
    until(lambda: len(acknowledged) > 20)
    kill(pid[a])
    until(lambda: entry.generations == (2, 2, 1, 1))
    until(lambda: len(acknowledged) > 60)
    adopters = entry.owners[:2]
    assert not {a, b} & set(adopters)
    second = next(w for w in adopters if w != d or adopters == (d, d))
    moved = [2 + (w == second) for w in adopters]
    kill(pid[second])
    until(lambda: entry.generations == (*moved, 1, 1))
    for thread in threads:
        thread.join()
    assert len(acknowledged) + len(task.result()) >= N_PUSHES - N_PUSHES // 3
    is_over.set()
    follower.join()
    np.testing.assert_array_equal(copy, 1.0)
    np.testing.assert_array_equal(s["w"].pull(), 1.0)
    np.testing.assert_array_equal(s["t"].pull(s["t"].ids()), 1.0)
    rows = s.stats()["shards"]
    assert [row["generation"] for row in rows] == [*moved, 1, 1]
    assert [row["version"] for row in rows] == [N_PUSHES] * 4
    assert {row["worker"] for row in rows[2:]} == {b}
    # A handle that has heard of nothing finds its way, also to copies.
    assert shards_of(asleep).meta.owners == before
    taken = asleep.snapshot()
    np.testing.assert_array_equal(taken["w"].compute(), 1.0)
    np.testing.assert_array_equal(taken["t"].compute(), 1.0)

    np.testing.assert_array_equal(asleep["w"].pull(), 1.0)
    actions = [e["action"] for e in events(machine, s)]
    assert "shards-lost" not in actions
    adopted = [e for e in events(machine, s) if e["action"] == "shards-adopted"]
    assert {e["worker"] for e in adopted} == {a, second}
    assert all(e["by"] not in (a, b) for e in adopted if e["worker"] == a)
    until(lambda: not left_of(machine, owners[0]))
    s.close()


class RowAdder(killing_owners.User):
    """Adds one to rows of both shards, in tables of both kinds, and counts what it did."""

    N, FAR = 20, np.array([1_000_003, -7919])

    def use(self):
        i = self.n_done % self.N
        rows = RowGrad([i, i + self.N, i], np.array([[0.5], [1.0], [0.5]]))
        unbounded = RowGrad(i * self.FAR + [1, 2], np.ones((2, 1)))
        self.handle.add({"t": rows, "any": unbounded})

    def more(self):
        goal = self.n_done + 30
        until(lambda: self.n_done >= goal or self.wrong)

    def check(self, s):
        turns, rest = divmod(self.n_done, self.N)
        counts = turns + (np.arange(self.N) < rest)
        np.testing.assert_array_equal(
            s["t"].pull(range(2 * self.N))[:, 0], [*counts] * 2
        )
        ids = np.arange(self.N)[:, None] * self.FAR + [1, 2]
        np.testing.assert_array_equal(
            s["any"].pull(ids)[..., 0], np.stack([counts, counts], 1)
        )
        assert len(s["any"]) == 2 * self.N


@pytest.mark.parametrize("way", ["socket", "rpc"])
def test_rows_count_once_where_an_owner_is_killed(machine, workers, way, monkeypatch):
    """Pushed from far; where memory is shared another test does it."""
    monkeypatch.setattr(socket_pool, "CALLS_BEFORE", 1)
    monkeypatch.setattr(socket_pool, "PAUSE_SECONDS", 0.0)
    params: Any = {"t": TableSpec(2 * RowAdder.N, 1, "float64")}
    params["any"] = TableSpec(None, 1, "float64")
    s = daskps.create(params, servers=workers[:2])
    handle = killing_owners.remote(s, way)
    adder, entry = RowAdder(handle), book(machine).stores[s.uid]
    counters = shards_of(handle).counters

    def by_socket():
        return counters.socket_calls

    adder.start()
    try:
        adder.more()
        until(lambda: by_socket() > 30 or way != "socket" or adder.wrong)
        kill(pids(machine)[workers[0]])
        until(lambda: entry.generations == (2, 1))
        before = by_socket()
        adder.more()
        until(lambda: by_socket() > before + 30 or way != "socket" or adder.wrong)
    finally:
        adder.is_over.set()
        adder.join()
    assert not adder.wrong
    adder.check(s)
    assert s.versions == (adder.n_done,) * 2
    assert (by_socket() > 0) == (way == "socket")
    assert (counters.messages > adder.n_done) == (way == "rpc")
    s.close()


def test_readers_see_nothing_torn_or_taken_back(machine, workers, seed):
    """Nor fewer versions, near the shards and by message, while an owner hangs or dies."""
    rng = random.Random(seed)
    with killing_owners.store_on(machine, workers[:2]) as s:
        strikes = [
            partial(killing_owners.strike, machine, s, fault, rng)
            for fault in ("stopped", "killed")
        ]
        found = killing_owners.disturb(s, strikes)
        assert not found.wrong
        assert min(found.n_pushes, found.n_reads) >= 4 * 5
        assert {row["generation"] for row in s.stats()["shards"]} == {1, 2}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda w: w[0, 0], "a part of a push"),
        (lambda w: w[0], "is gone"),
    ],
)
def test_what_readers_should_never_see_is_told(machine, workers, spoil, said):
    """A push is taken back, in half of a shard and in all of it."""
    with killing_owners.store_on(machine, workers[:2]) as s:

        def take_back():
            less = np.zeros(s["w"].shape)
            spoil(less)[...] = -1000.0
            s.add({"w": less})

        found = killing_owners.disturb(s, [take_back])
        assert any(said in text for text in found.wrong)
        assert any("lost" in text for text in found.wrong)


def test_a_grown_table_is_adopted_and_grows_on(machine, workers):
    """By its memory, not by the addresses that are reserved for it."""
    a, *_ = workers
    s = daskps.create({"any": TableSpec(None, 4, init=2.0)}, servers=[a], shards=2)
    entry = book(machine).stores[s.uid]
    first, ids = dict(entry.sizes), np.arange(-9000, 9000) * 1_000_003

    def push(n):
        s["any"].add(ids[:n], np.full((n, 4), 1.0))

    def holds(*pushes):
        at = sum((np.arange(len(ids)) < n).astype("f4") for n in pushes)
        found_ids, rows = compute(*s.snapshot()["any"])
        order = np.argsort(found_ids)
        np.testing.assert_array_equal(found_ids[order], ids[at > 0])
        wanted = np.repeat(2 + at[at > 0, None], 4, axis=1)
        np.testing.assert_array_equal(rows[order], wanted)
        np.testing.assert_array_equal(s["any"].pull(ids)[:, 0], 2 + at)
        told = s.stats()
        assert told["tables"]["any"]["rows"] == (at > 0).sum()
        assert sum(row["nbytes"] for row in told["shards"]) == 16 * (at > 0).sum()
        return sum(row["segment_nbytes"] for row in told["shards"])

    push(9000)
    until(lambda: all(entry.sizes[i] > first[i] for i in first))
    kill(pids(machine)[a])
    until(lambda: entry.generations == (2, 2))
    holds(9000)
    push(18000)
    held = holds(9000, 18000)
    assert a not in entry.nbytes
    # The directory is told by eighths; what it was told before a worker took it over
    # too.
    until(lambda: held / 1.125 <= sum(entry.sizes.values()) <= held)
    assert sum(entry.nbytes.values()) == sum(entry.sizes.values())
    s.close()


def steps(s, n, between=lambda i: None):
    rng = np.random.default_rng(7)
    for i in range(n):
        between(i)
        rows = RowGrad(rng.integers(0, 20, 6), rng.standard_normal((6, 2)))
        grads = {"w": rng.standard_normal(64), "b": rng.standard_normal(3)}
        s.push({**grads, "t": rows} if i % 3 else {"t": rows})
    found = s.pull(rows={"t": range(20)})
    return {name: value.tobytes() for name, value in found.items()}


def test_optimizer_slots_survive(machine, workers):
    """Adam goes on with its moments and step counts: the same bits."""
    params = {"w": np.zeros(64), "b": np.ones(3), "t": TableSpec(20, 2, "f8")}
    s, twin = (
        daskps.create(params, optimizer=optim.Adam(0.1), servers=[w], shards=2)
        for w in workers[:2]
    )
    pid, entry = pids(machine)[workers[0]], book(machine).stores[s.uid]

    def strike(i):
        if i == 20:
            kill(pid)
        elif i == 25:
            until(lambda: entry.generations == (2, 2))

    found = steps(s, 40, strike)
    assert found == steps(twin, 40)
    assert [row["generation"] for row in s.stats()["shards"]] == [2, 2]
    assert s.version == twin.version == 40
    s.close()
    twin.close()


def die_before_answering(dask_worker):
    serve = dask_worker.handlers["daskps_call"]

    async def die(comm, **message):
        comm.write = lambda reply: kill(os.getpid())
        return await serve(comm, **message)

    dask_worker.handlers["daskps_call"] = die


def test_push_whose_answer_was_lost_counts_once(machine, workers):
    """It was applied; the adopter knows it again, the other shard it never left."""
    a, b = workers[:2]
    params = {"w": np.zeros(8), "t": TableSpec(8, 2)}
    s = daskps.create(params, servers=[a, b])
    remote = killing_owners.remote(s)
    machine.run(die_before_answering, workers=[a])
    rows = RowGrad([1, 6, 1], np.ones((3, 2)))
    assert remote.add({"w": np.ones(8), "t": rows}) == 1
    np.testing.assert_array_equal(s["w"].pull(), 1.0)
    assert s["t"].pull([0, 1, 6]).tolist() == [[0, 0], [2, 2], [1, 1]]
    rows = s.stats()["shards"]
    assert [row["duplicates"] for row in rows] == [1, 0]
    assert [row["generation"] for row in rows] == [2, 1]
    s.close()


def held_back(client, monkeypatch):
    """Have the directory ask nobody to adopt before an event is set."""
    adopt, go_on = Move.ask_to_adopt, asyncio.Event()

    async def later(*args, **more):
        await go_on.wait()
        return await adopt(*args, **more)

    monkeypatch.setattr(Move, "ask_to_adopt", later)
    return lambda: client.loop.add_callback(go_on.set)


def test_calls_wait_for_the_adopter(machine, workers, monkeypatch):
    a, b = workers[:2]
    s = daskps.create({"v": np.zeros(2), "w": np.arange(6.0)}, servers=[a, b])
    # Of the last push of somebody who is idle from here on, only shard 0 knows.
    pickle.loads(pickle.dumps(s)).add({"v": np.ones(2)})
    entry, go_on = book(machine).stores[s.uid], held_back(machine, monkeypatch)
    kill(pids(machine)[a])
    until(lambda: set(entry.away) == {0})
    waiting = s.pull_async()
    counted = threading.Thread(target=lambda: rows.extend(s.versions))
    rows: list[int] = []
    counted.start()
    with pytest.raises(TimeoutError, match="a pull"):
        s.pull(timeout=0.1)
    # What does not touch the shard does not wait.
    np.testing.assert_array_equal(s["w"][2:], np.arange(2.0, 6.0))
    assert not waiting.done()
    assert not rows
    go_on()
    np.testing.assert_array_equal(waiting.result(30)["w"], np.arange(6.0))
    counted.join(30)
    assert rows == [1, 0]
    np.testing.assert_array_equal(s.snapshot()["v"].compute(), 1.0)
    s.close()


def test_store_deleted_during_its_adoption(machine, workers, monkeypatch):
    """Its callers hear that, the adopter keeps nothing, no file stays."""
    a, b = workers[:2]
    s = daskps.create({"w": np.zeros(8)}, servers=[a, b], name="doomed")
    [owner, _] = owners_of(machine, s)
    entry, go_on = book(machine).stores[s.uid], held_back(machine, monkeypatch)
    kill(pids(machine)[a])
    until(lambda: entry.away)
    waiting = s.pull_async()
    pickle.loads(pickle.dumps(s)).delete()
    with pytest.raises(daskps.StoreClosedError):
        waiting.result(30)
    go_on()
    until(lambda: not left_of(machine, owner))
    until(lambda: not held(machine, s.uid))


def held(client, uid):
    def shards(dask_worker):
        from daskps.cluster.host.node import HOSTS

        return [i for of, i in HOSTS[dask_worker.address].shards if of == uid]

    return [i for found in client.run(shards).values() for i in found]


def test_no_room_to_adopt(machine, workers):
    """The shard is away, and its memory stays, until somebody has room or it ends."""
    a, b = workers[:2]
    s = daskps.create({"w": np.zeros(8)}, servers=[a, b])
    s.add({"w": np.ones(8)})
    [owner, _] = owners_of(machine, s)
    entry = book(machine).stores[s.uid]
    share, entry.memory_share = entry.memory_share, 1e-12
    kill(pids(machine)[a])
    until(lambda: "memory limit" in entry.away.get(0, ""))
    with pytest.raises(TimeoutError, match=r"shard 0 .* memory limit"):
        s.pull(timeout=0.5)
    np.testing.assert_array_equal(s["w"][4:], 1.0)
    assert left_of(machine, owner)
    waiting = s.pull_async()
    entry.memory_share = share
    np.testing.assert_array_equal(waiting.result(30)["w"], 1.0)
    # Its end frees it though it has no owner.
    [owner, _] = owners_of(machine, s)
    entry.memory_share = 1e-12
    kill(pids(machine)[entry.owners[0]])
    until(lambda: entry.away)
    s.close()
    until(lambda: not left_of(machine, owner))


def pause(dask_worker):
    dask_worker.memory_manager.memory_pause_fraction = 1e-9


def test_a_worker_that_dask_has_paused_adopts_too():
    """No other worker is left; it serves what it adopts as what it has."""
    with local_cluster(threads=1) as client:
        cluster: Any = client.cluster
        for nanny in cluster.workers.values():
            # No other worker comes.
            nanny.instantiate = mock.AsyncMock()
        a, b = scheduler(client).workers
        s = daskps.create({"w": np.zeros(8)}, servers=[a])
        s.add({"w": np.ones(8)})
        client.run(pause, workers=[b])
        until(lambda: scheduler(client).workers[b].status is Status.paused)
        kill(client.run(os.getpid, workers=[a])[a])
        until(lambda: "shards-" in events(client, s)[-1]["action"])
        assert events(client, s)[-1]["action"] == "shards-adopted"
        s.add({"w": np.ones(8)})
        np.testing.assert_array_equal(s["w"][:], 2.0)
        assert s.placement == (b,)


def ones(params, X, y):
    return {name: np.ones_like(value) for name, value in params.items()}


def killing(pid):
    """Gradients of one, and an end for a process with the row that is not zero."""

    def gradient(params, X, y):
        if X[0, 0]:
            # Whoever has the row may begin again with it, if it was in that process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return ones(params, X, y)

    return gradient


@pytest.mark.parametrize("sync", ["bsp", "ssp", "asp", daskps.ASP(max_staleness=10**6)])
def test_run_goes_on(machine, workers, sync):
    """With a worker go two shards and a trainer; constant gradients count steps."""
    a, b = workers[:2]
    n, steps = (320, 80) if sync == "bsp" else (800, 800)
    s = daskps.create(
        {"w": np.zeros(6)}, optimizer=optim.SGD(1.0), servers=[a, b], shards=4
    )
    X = np.zeros((n, 1))
    X[20] = 1.0
    result = daskps.train(
        s,
        killing(pids(machine)[a]),
        X,
        batch_size=1,
        shuffle=False,
        trainers=4,
        sync=sync,
        timeout=100,
    )
    assert result.version == steps
    np.testing.assert_array_equal(result.weights["w"], -float(steps))
    assert [r["generation"] for r in s.stats()["shards"]] == [2, 2, 1, 1]
    s.close()


class Quarters(codecs.Codec):
    """One of a user's own that leaves something over."""

    dtype, feedback = "int8", True

    def n_words(self, n):
        return n

    def encode(self, array, words):
        words[:] = np.trunc(array * 4)

    def decode(self, words, out):
        out[:] = words / 4


SAID = np.linspace(-0.7, 0.7, 40)


def say_in_words(trainer, mark):
    """Push the same again and again; one dies when it begins its 13th step."""
    while trainer.clock < 30:
        if (trainer.rank, trainer.clock) == (1, 12):
            with contextlib.suppress(FileExistsError):
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                kill(os.getpid())
        trainer.push({"w": SAID * (trainer.rank + 1)})
    return trainer.clock


def said_in_words(codec, ranks=3, forgets=False):
    """What the pushes of trainers come to, one of which may forget its rest."""
    total = np.zeros(40)
    for rank in range(ranks):
        left = None
        for clock in range(30):
            if forgets and (rank, clock) == (1, 12):
                left = None
            made = codec.encode_pieces(SAID * (rank + 1), [(0, 40)], left)
            out, left = np.empty(40), made.residual
            codec.decode_piece(made.words[0], out)
            total += out
    return total


@pytest.mark.parametrize(
    ("codec", "sync"),
    [(codecs.TwoBit(0.5), "bsp"), (codecs.TwoBit(0.5), "ssp"), (Quarters(), "asp")],
    ids=["2bit-bsp", "2bit-ssp", "own-asp"],
)
def test_who_starts_again_has_nothing_left_over(
    machine, workers, tmp_path, codec, sync
):
    """With a worker go a shard, which another one adopts, and what a trainer had left."""
    s = daskps.create(
        {"w": np.zeros(40)}, optimizer=optim.SGD(1.0), servers=workers, shards=4
    )
    mark = str(tmp_path / "died")
    clocks = daskps.run(
        s,
        say_in_words,
        [mark] * 3,
        sync=sync,
        codec=codec,
        reduce="sum",
        resumable=True,
        timeout=100,
    )
    assert clocks == [30] * 3
    assert os.path.exists(mark)
    expected = said_in_words(codec, forgets=True)
    assert (expected != said_in_words(codec)).any()
    np.testing.assert_array_equal(s["w"].pull(), -expected)
    assert sorted(r["generation"] for r in s.stats()["shards"]) == [1, 1, 1, 2]
    assert {r["version"] for r in s.stats()["shards"]} == {30 if sync == "bsp" else 90}
    s.close()


def kill_the_owner(trainer, pid):
    while trainer.clock < 30:
        if trainer.clock == 12:
            kill(pid)
        trainer.push({"w": SAID})


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_adopters_hear_of_a_codec_that_they_have_not_known(machine, workers, sync):
    """Two shards go to several workers; the trainer, by message, is on one at most."""
    a, b = workers[:2]
    s = daskps.create(
        {"w": np.zeros(40)}, optimizer=optim.SGD(1.0), servers=[a], shards=2
    )
    pid, how = pids(machine)[a], {"workers": [b], "sync": sync, "timeout": 100}
    machine.run(set_machine_carrier, False, workers=[b])
    try:
        daskps.run(s, kill_the_owner, [pid], codec=Quarters(), **how)
    finally:
        machine.run(set_machine_carrier, True, workers=[b])
    expected = said_in_words(Quarters(), ranks=1)
    np.testing.assert_array_equal(s["w"].pull(), -expected)
    assert [r["generation"] for r in s.stats()["shards"]] == [2, 2]
    assert {*s.placement} - {a, b}
    s.close()


def disturb_in_a_push(trainer, part):
    """Push 30 times by socket; the owner dies once it was sent the 13th, or hangs before.

    It could have answered before it hangs, and nothing would be lost.
    """
    pid, is_killed = part
    shards = session_of(trainer).shards
    until(lambda: trainer.pull() and shards.remote.sockets.count(shards.meta.hosts))
    whole, n_lost = call_socket.CallSocket.ask, 0

    def ask(*args, **kwargs):
        if not is_killed:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        whole(*args, **kwargs)
        if is_killed:
            kill(pid)

    while trainer.clock < 30:
        if trainer.clock == 12 and not n_lost:
            with mock.patch.object(call_socket.CallSocket, "ask", ask):
                try:
                    trainer.push({"w": SAID}, timeout=60 if is_killed else 1)
                except TimeoutError:
                    n_lost += 1
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)
        else:
            trainer.push({"w": SAID})
    return shards.counters.socket_calls, n_lost


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_what_a_lost_push_left_over_is_put_back(machine, workers, is_killed):
    """Words of any number by socket: each counts once, with what was left over before."""
    a, b = workers[:2]
    s = daskps.create(
        {"w": np.zeros(40)}, optimizer=optim.SGD(1.0), servers=[a], shards=2
    )
    codec, part = codecs.TopK(ratio=0.1), (pids(machine)[a], is_killed)
    machine.run(set_machine_carrier, False, workers=[b])
    try:
        [(by_socket, n_lost)] = daskps.run(
            s, disturb_in_a_push, [part], codec=codec, workers=[b], timeout=100
        )
    finally:
        machine.run(set_machine_carrier, True, workers=[b])
    assert by_socket >= 12
    assert n_lost == (not is_killed)
    np.testing.assert_array_equal(s["w"].pull(), -said_in_words(codec, ranks=1))
    assert {r["version"] for r in s.stats()["shards"]} == {30}
    s.close()


WIDTH, N_TRAINERS = 30, 3
WEIGHTS = (1.0, 2.0, 4.0)


def gradient_at(rank, clock, w):
    rng = np.random.default_rng((rank, clock))
    return rng.standard_normal(WIDTH) * 10.0 ** rng.integers(-3, 3) + w * 0.01


def steps_of(trainer, strike):
    """Descend; one rank kills a process on its way."""
    out = trainer.pull()
    while trainer.clock < strike.rounds:
        rank, clock = trainer.rank, trainer.clock
        strike.maybe(trainer)
        gradient = gradient_at(rank, clock, out["w"])
        trainer.pushpull({"w": gradient}, weight=WEIGHTS[rank], out=out)
    return trainer.clock


def parts_of(trainer, strike):
    """The same, each gradient in two pushes before the tick and one with it."""
    out = trainer.pull()
    while trainer.clock < strike.rounds:
        rank, clock = trainer.rank, trainer.clock
        gradient = gradient_at(rank, clock, out["w"])
        for share in (0.25, 0.5):
            trainer.push({"w": share * gradient}, tick=False)
            strike.maybe(trainer)
        trainer.push({"w": 0.25 * gradient}, weight=WEIGHTS[rank])
        trainer.pull(out=out)
    return trainer.clock


@dataclass
class Strike:
    """The process that one rank kills at some clock."""

    pid: int
    rounds: int = 100
    rank: int = 1
    clock: int = 20

    def maybe(self, trainer):
        if (trainer.rank, trainer.clock) == (self.rank, self.clock):
            # Gone already where the trainer has started again.
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid)


def descended(rounds):
    """What the steps lead to, in plain NumPy: sums along the tree of three ranks."""
    w = np.zeros(WIDTH)
    for clock in range(rounds):
        a, b, c = (
            gradient_at(rank, clock, w) * weight for rank, weight in enumerate(WEIGHTS)
        )
        w = w - 0.5 * (((a + b) + c) / sum(WEIGHTS))
    return w


def rounds_store(servers, shards=4):
    return daskps.create(
        {"w": np.zeros(WIDTH)}, optimizer=optim.SGD(0.5), servers=servers, shards=shards
    )


@pytest.mark.parametrize(
    ("loop", "rounds"), [(steps_of, 200), (parts_of, 12)], ids=["steps", "uncommitted"]
)
def test_rounds_go_on(machine, workers, loop, rounds):
    """The dead worker has no trainer: all others go on, with the same bits."""
    *_, c, d = workers
    s = rounds_store([d, c])
    strike = Strike(pids(machine)[d], rounds, clock=rounds // 4)
    assert daskps.run(s, loop, [strike] * N_TRAINERS) == [rounds] * N_TRAINERS
    np.testing.assert_array_equal(s["w"].pull(), descended(rounds))
    rows = s.stats()["shards"]
    assert [r["generation"] for r in rows] == [2, 2, 1, 1]
    assert [r["version"] for r in rows] == [rounds] * 4
    s.close()


def test_rounds_go_on_where_a_trainer_starts_again(machine, workers):
    """With a worker go two shards and a trainer, which goes on at its clock."""
    a, b = workers[:2]
    s = rounds_store([a, b])
    strike = Strike(pids(machine)[a])
    found = daskps.run(s, steps_of, [strike] * N_TRAINERS, resumable=True)
    assert found == [100] * N_TRAINERS
    np.testing.assert_array_equal(s["w"].pull(), descended(100))
    assert [r["generation"] for r in s.stats()["shards"]] == [2, 2, 1, 1]
    s.close()


def killed_at_random(client, workers, rng, by_message):
    """Kill a worker at any moment of a run: with trainers, shards, or both."""
    servers = list(rng.permutation(workers)[:2])
    s = rounds_store(servers)
    victim, moment = pids(client)[servers[0]], rng.integers(5, 90)
    entry = book(client).stores[s.uid]

    def strike():
        until(lambda: s.version >= moment or entry.away, 60)
        end = time.perf_counter() + rng.uniform(0, 0.01)
        while time.perf_counter() < end:
            pass
        kill(victim)

    # Trainers of workers that map nothing; only the other two can adopt.
    remote = [w for w in workers if w not in servers] if by_message else []
    killer = threading.Thread(target=strike)
    client.run(set_machine_carrier, False, workers=remote)
    try:
        killer.start()
        nobody = Strike(0, rounds=100, rank=-1)
        parts = [nobody] * N_TRAINERS
        assert daskps.run(s, steps_of, parts, resumable=True) == [100] * N_TRAINERS
        np.testing.assert_array_equal(s["w"].pull(), descended(100))
    finally:
        killer.join()
        client.run(set_machine_carrier, True, workers=remote)
    s.close()


def set_machine_carrier(is_open):
    dask.config.set({"daskps.carriers.machine": is_open})


def test_rounds_killed_at_a_random_moment(machine, workers, rng):
    killed_at_random(machine, workers, rng, by_message=True)


@pytest.mark.slow
@pytest.mark.parametrize("by_message", [False, True], ids=["machine", "message"])
@pytest.mark.parametrize("_", range(10))
def test_rounds_killed_at_more_random_moments(machine, workers, rng, by_message, _):
    killed_at_random(machine, workers, rng, by_message)


def no_shared_blocks(dask_worker):
    from daskps.cluster.host.node import HOSTS

    host: Any = HOSTS[dask_worker.address]
    host.shared_blocks = lambda sizes: []


def test_rounds_that_nobody_else_can_have_are_cancelled(machine, workers):
    """What was delivered to the open round went; the store takes the next run."""
    *_, c, d = workers
    s = rounds_store([d, c])
    machine.run(no_shared_blocks, workers=[d])
    strike = Strike(pids(machine)[d])
    with pytest.raises(daskps.RunCancelledError, match=f"{d} died"):
        daskps.run(s, steps_of, [strike] * N_TRAINERS, resumable=True)
    # All shards have the same rounds; where one was withdrawn, that is a version too.
    found, [version] = s["w"].pull(), set(s.versions)
    assert any((found == descended(n)).all() for n in (version, version - 2))
    assert version >= 20
    assert daskps.run(s, counted, [7] * 2) == [7] * 2
    s.close()


def counted(trainer, part):
    for _ in range(part):
        trainer.pushpull({"w": np.ones(WIDTH)})
    return trainer.clock


def test_what_is_placed_goes_with_its_shard(machine, workers):
    """It stays whole and where its shard is, whoever has that; a snapshot has all."""
    a, b, *_ = workers
    on = {"w": b, "t": [b, a]}
    params = {"w": np.zeros(6), "v": np.zeros(6), "t": TableSpec(8, 1)}
    with daskps.create(params, placement=on, optimizer=optim.SGD(1.0)) as s:
        assert [(p.shard, p.size) for p in s.layout.pieces_of[0]] == [(1, 6)]
        for step in range(2):
            s.push({"w": np.arange(6.0), "v": np.ones(6), "t": RowGrad([7], [[1]])})
            if not step:
                kill(pids(machine)[b])
        until(lambda: b not in book(machine).stores[s.uid].owners)
        snap = s.snapshot()
        for found in (s.pull(), {n: snap[n].compute() for n in ("w", "v")}):
            np.testing.assert_array_equal(found["w"], -2.0 * np.arange(6))
            np.testing.assert_array_equal(found["v"], np.full(6, -2.0))
        assert s["t"].pull([7, 0]).tolist() == [[-2], [0]]
        assert snap["t"].compute()[:, 0].tolist() == [0] * 7 + [-2]

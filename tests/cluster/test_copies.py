"""Stores with two copies of each shard: what was answered survives a worker's machine."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from typing import Any
from unittest import mock

import dask
import numpy as np
import pytest
from distributed.core import Status

import daskps
from daskps import optim, testing
from daskps.checkpoint.storage import Storage
from daskps.cluster.caller.link import using
from daskps.cluster.directory import copies as standby
from daskps.cluster.directory import drains
from daskps.cluster.directory.entry import LeftBy
from daskps.cluster.directory.move import Move
from daskps.cluster.host import moving
from daskps.cluster.host.coming import Coming
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.node import HOSTS
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.reports import MEMORY_METRIC, Sight
from daskps.errors import ConsistencyError
from tests import inprocess
from tests.cluster import killing_copies, killing_owners
from tests.cluster.killing_copies import (
    copies_of,
    has_all,
    kill_copy,
    kill_owner,
)
from tests.cluster.test_drain import (
    Held,
    all_of,
    answer,
    drain_beside,
    drain_first,
    five_steps,
    pushed,
    same,
    specs,
)
from tests.inprocess import Cluster
from tests.support import local_cluster, popen, terminal_cluster, until

N = 40
#: What a host of another daskps says.
OTHER_PROTOCOL = {"protocol": 99, "version": "9.9"}


@pytest.fixture
def apart() -> Iterator[Any]:
    """Four workers as between machines: what a worker holds goes with it."""
    way = {"daskps.carriers.machine": False}
    with dask.config.set(way), local_cluster(n_workers=4, threads=2) as client:
        yield client


@pytest.fixture
def two() -> Iterator[Cluster]:
    with inprocess.cluster(2) as made:
        yield made


@pytest.fixture
def three() -> Iterator[Cluster]:
    with inprocess.cluster(3) as made:
        yield made


@pytest.fixture
def four() -> Iterator[Cluster]:
    with inprocess.cluster(4) as made:
        yield made


def events_of(client: Any, action: str) -> list[dict[str, Any]]:
    return [e for _, e in client.get_events("daskps") if e["action"] == action]


@pytest.mark.parametrize("is_large", [False, True])
def test_acknowledged_pushes_count_once(apart, is_large):
    """Owners die, and workers with copies, and what takes their place dies too."""
    with killing_copies.store_on(apart, is_large=is_large) as store:
        acts = [partial(kill_owner, apart, store), partial(kill_copy, apart, store)]
        found = killing_owners.disturb(store, acts * 2)
    assert found.wrong == []
    assert events_of(apart, "shards-lost") == []


def test_everything_is_in_the_copy_to_the_last_bit(apart):
    """Weights, optimizer state, rows with theirs, candidates, numbers of pushes."""
    rule = optim.Adam(0.01)
    with (
        daskps.create(specs(), optimizer=rule, client=apart, copies=2) as store,
        daskps.create(specs(), optimizer=rule, client=apart, copies=2) as other,
    ):
        for k in range(N):
            if k in (13, 27):
                until(partial(has_all, apart, store))
                until(partial(has_all, apart, other))
                before = all_of(store)
                testing.kill_owner(apart, store)
                same(all_of(store), before)
            pushed(store, k)
            pushed(other, k)
        same(all_of(store), all_of(other))
        assert store.versions == other.versions
        assert store.version == N


def n_sockets(dask_worker: Any = None) -> int:
    """Return how many sockets a worker serves."""
    return len(HOSTS[dask_worker.address].sockets)


def end_sockets(dask_worker: Any = None) -> None:
    HOSTS[dask_worker.address].sockets.close()


def test_states_go_by_socket_and_without_one_by_message(apart):
    with daskps.create({"w": np.zeros(24)}, shards=1, client=apart, copies=2) as store:
        [owner] = store.placement
        # Nobody has called the store: it is the copy that has asked for one.
        ask = partial(apart.run, n_sockets, workers=[owner])
        until(lambda: ask()[owner] == 1)
        for _ in range(N):
            store.add({"w": np.ones(24)})
        apart.run(end_sockets, workers=[owner])
        for _ in range(N):
            store.add({"w": np.ones(24)})
        stats = store.stats()
        assert stats["shards"][0]["behind"] == 0
        assert "two copies" in stats["handle"]["why"][owner]
        testing.kill_worker(apart, owner)
        assert store.pull()["w"].tolist() == [2.0 * N] * 24


# -- a machine that dies, with its memory ----------------------------------------------


MACHINES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture
def machines(tmp_path: Any) -> Iterator[tuple[Any, dict[str, list[Any]], Any]]:
    """Two workers on each of two machines, which share memory within; their processes."""
    folders = {host: tmp_path / host for host in MACHINES}
    workers = []
    for host, folder in folders.items():
        folder.mkdir(mode=0o700)
        shared = {"DASK_DASKPS__SHARED_MEMORY_DIRECTORY": str(folder)}
        workers += [(["--host", host, "--no-nanny"], shared)] * 2
    file = tmp_path / "scheduler.json"
    with terminal_cluster(file, workers) as (client, processes):
        of = dict(zip(MACHINES, (processes[:2], processes[2:]), strict=True))
        yield client, of, folders


def end_machine(client: Any, store: Any, machines: Any, folders: Any) -> None:
    until(partial(has_all, client, store))
    copies, owners = copies_of(client, store), store.placement
    assert all(
        copies[i].split(":")[1] != at.split(":")[1] for i, at in enumerate(owners)
    )
    host = owners[0].split(":")[1].strip("/")
    for process in machines[host]:
        process.kill()
    shutil.rmtree(folders[host])
    until(lambda: len(client.nthreads()) == 2)
    store.pull()


def test_pushes_survive_a_machine(machines):
    client, processes, folders = machines
    params = {"w": np.zeros((killing_owners.N_SHARDS, 2, killing_owners.HALF))}
    about: dict[str, Any] = {"shards": killing_owners.N_SHARDS, "client": client}
    with daskps.create(params, copies=2, **about) as store:
        act = partial(end_machine, client, store, processes, folders)
        found = killing_owners.disturb(store, [act])
        assert found.wrong == []
        # On one machine it goes on, and says so.
        until(partial(has_all, client, store))
        assert events_of(client, "copies-together") != []
    assert events_of(client, "shards-lost") == []


def shards_here(dask_worker: Any) -> int:
    return len(HOSTS[dask_worker.address].shards)


def test_a_neighbour_that_adopts_too_late_gives_the_shard_up(tmp_path):
    """A process that is stopped is asked to, and goes on once the copy has taken over."""
    workers = []
    for name, host in zip("aab", (*MACHINES[:1] * 2, MACHINES[1]), strict=True):
        (tmp_path / name).mkdir(mode=0o700, exist_ok=True)
        shared = {"DASK_DASKPS__SHARED_MEMORY_DIRECTORY": str(tmp_path / name)}
        workers.append((["--host", host, "--no-nanny"], shared))
    soon = {"DASK_DASKPS__SUSPECT_AFTER": "1s"}
    file = tmp_path / "scheduler.json"
    with terminal_cluster(file, workers, **soon) as (client, (owner, near, _)):
        pids = {pid: worker for worker, pid in client.run(os.getpid).items()}
        about: dict[str, Any] = {"client": client, "copies": 2}
        about |= {"servers": [pids[owner.pid]], "shards": 1}
        with daskps.create({"w": np.zeros(6)}, **about) as store:
            store.add({"w": np.ones(6)})
            os.kill(near.pid, signal.SIGSTOP)
            owner.kill()
            try:
                store.add({"w": np.ones(6)})
            finally:
                os.kill(near.pid, signal.SIGCONT)
            [taken] = events_of(client, "shards-promoted")
            assert store.placement == (taken["by"],)
            # It has been asked, and does what it was asked to.
            late = [pids[near.pid]]
            until(lambda: [*client.run(shards_here, workers=late).values()] == [0])
            store.add({"w": np.ones(6)})
            assert store.pull()["w"].tolist() == [3.0] * 6
            assert store.placement == (taken["by"],)
            assert events_of(client, "shards-adopted") == []


def test_a_copy_goes_to_a_machine_that_joins(tmp_path):
    first, second = (["--host", host, "--no-nanny"] for host in MACHINES)
    file = tmp_path / "scheduler.json"
    env = {"DASK_DASKPS__CARRIERS__MACHINE": "False"}
    with (
        dask.config.set({"daskps.carriers.machine": False}),
        terminal_cluster(file, [(first, {})] * 2, **env) as (client, _),
        daskps.create({"w": np.zeros(6)}, shards=1, client=client, copies=2) as store,
    ):
        assert copies_of(client, store)[0].startswith("tcp://127.0.0.1")
        options = ["--scheduler-file", str(file), "--dashboard-address", "127.0.0.1:0"]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), **env}
        with popen(["dask", "worker", *options, *second], env=environment):
            until(
                lambda: (
                    copies_of(client, store).get(0, "").startswith("tcp://127.0.0.2")
                )
            )
            store.add({"w": np.ones(6)})
            assert store.pull()["w"].tolist() == [1.0] * 6


def test_a_copy_stays_where_the_machine_that_joins_has_no_room(three, monkeypatch):
    """Room for one copy of three is there; the first may have to take over just now."""
    monkeypatch.setattr(standby, "get_address_host", lambda worker: "one")
    monkeypatch.setattr(standby, "_AGAIN_SECONDS", 0.01)
    [first, second, third] = three.scheduler.workers
    three.scheduler.workers[third].memory_limit = 1000
    with daskps.create(
        {"w": np.zeros(600)}, shards=3, servers=[first], copies=2
    ) as store:
        entry = three.directory.stores[store.uid]
        where = {i: copy.worker for i, copy in entry.copies.items()}
        assert where == dict.fromkeys(range(3), second)
        three.scheduler.workers[third].memory_limit = 3 * entry.sizes[0]
        three.loop.add_callback(entry.set_away, [0], "its owner has died")
        monkeypatch.setattr(standby, "get_address_host", lambda worker: worker == third)
        three.loop.add_callback(three.directory.copies.worker_came)
        until(lambda: 1 in entry.copies and entry.copies[1].worker == third)
        until(lambda: all(copy.counts for copy in entry.copies.values()))
        assert [entry.copies[i].worker for i in (0, 2)] == [second, second]
        three.loop.add_callback(entry.settle, [0])


def test_a_copy_lies_on_its_owner_s_machine_where_others_have_no_room(
    three, monkeypatch
):
    [first, second, third] = three.scheduler.workers
    monkeypatch.setattr(standby, "get_address_host", lambda worker: worker == third)
    three.scheduler.workers[third].memory_limit = 1000
    with daskps.create({"w": np.zeros(600)}, servers=[first], copies=2) as store:
        (copy,) = three.directory.stores[store.uid].copies.values()
        assert copy.worker == second


def test_a_copy_that_found_its_owner_s_memory_goes_to_a_machine_that_joins(
    three, monkeypatch
):
    """Its address is another one, but they share a machine."""
    monkeypatch.setattr(standby, "get_address_host", str)
    monkeypatch.setattr(standby, "_AGAIN_SECONDS", 0.01)
    [first, second, third] = three.scheduler.workers
    answer(three, second, "look", [{"sight": Sight.FOUND}])
    three.scheduler.workers[third].status = Status.paused
    with daskps.create({"w": np.zeros(600)}, servers=[first], copies=2) as store:
        entry = three.directory.stores[store.uid]
        assert entry.copies[0].worker == second
        three.loop.add_callback(three.directory.copies.worker_came)
        three.scheduler.workers[third].status = Status.running
        three.loop.add_callback(three.directory.copies.worker_came)
        until(lambda: 0 in entry.copies and entry.copies[0].worker == third)
        until(lambda: entry.copies[0].counts)
        assert store.add({"w": np.ones(600)}) == 1


def test_a_copy_stays_until_a_machine_with_the_same_protocol_joins(four, monkeypatch):
    monkeypatch.setattr(standby, "_AGAIN_SECONDS", 0.01)
    hosts, (first, second, third, fourth) = four.directory.hosts, four.scheduler.workers
    answer(four, third, "hello", OTHER_PROTOCOL)

    def join(*workers: str) -> None:
        for worker in workers:
            four.scheduler.workers[worker].status = Status.running
        monkeypatch.setattr(
            standby, "get_address_host", lambda w: w in {third, *workers}
        )
        four.loop.add_callback(four.directory.copies.worker_came)

    for worker in (third, fourth):
        four.scheduler.workers[worker].status = Status.paused
    monkeypatch.setattr(standby, "get_address_host", lambda worker: False)
    with daskps.create({"w": np.zeros(600)}, servers=[first], copies=2) as store:
        entry = four.directory.stores[store.uid]
        (copy,) = entry.copies.values()
        assert copy.worker == second
        join(third)
        until(lambda: third in hosts.foreign)
        assert entry.copies == {0: copy}
        hosts.foreign.clear()  # both are new
        join(third, fourth)
        until(lambda: 0 in entry.copies and entry.copies[0].worker == fourth)
        until(lambda: entry.copies[0].counts)
        assert store.add({"w": np.ones(600)}) == 1


def test_a_copy_lies_where_its_owner_s_memory_is_not(tmp_path):
    """Pods of one machine may have addresses of their own, and memory in common."""
    workers = []
    for n, folder in enumerate(("one", "one", "two"), start=1):
        (tmp_path / folder).mkdir(mode=0o700, exist_ok=True)
        memory = {"DASK_DASKPS__SHARED_MEMORY_DIRECTORY": str(tmp_path / folder)}
        workers.append((["--host", f"127.0.0.{n}", "--no-nanny"], memory))
    with terminal_cluster(tmp_path / "scheduler.json", workers) as (client, _):
        first, second, third = sorted(client.nthreads())
        about: dict[str, Any] = {"servers": [first], "client": client, "copies": 2}
        # They would be dealt out, if addresses counted alone.
        with daskps.create({"w": np.zeros(6)}, shards=4, **about) as store:
            assert copies_of(client, store) == dict.fromkeys(range(4), third)
            assert events_of(client, "copies-together") == []
        client.retire_workers([third])
        with daskps.create({"w": np.zeros(6)}, shards=1, **about) as store:
            assert copies_of(client, store) == {0: second}
            assert len(events_of(client, "copies-together")) == 1


# -- who waits for whom ----------------------------------------------------------------


def one_shard(cluster: Cluster) -> tuple[Any, str, str]:
    """Make a store of a shard with two copies; return it, its owner and the other one."""
    store = daskps.create({"w": np.zeros(6)}, shards=1, copies=2)
    (owner,) = store.placement
    entry = cluster.directory.stores[store.uid]
    return store, owner, entry.copies[0].worker


def push_beside(store: Any) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def push() -> None:
        try:
            found.append(store.add({"w": np.ones(6)}))
        except daskps.DaskPSError as error:
            found.append(error)

    thread = threading.Thread(target=push)
    thread.start()
    return thread, found


def fall_silent(cluster: Cluster, store: Any, owner: str) -> Held:
    """Have the copy tell of its owner, which answers nobody before a test lets it."""
    silent = Held(cluster, owner, "look")
    copy = cluster.directory.stores[store.uid].copies[0]
    tell = cluster.directory.copies.on_silent
    cluster.loop.add_callback(tell, store.uid, 0, copy.move)
    return silent


def shards_at(cluster: Cluster, worker: str) -> list[Any]:
    return [
        hosted
        for host in cluster.hosts
        if host.worker.address == worker
        for hosted in host.shards.values()
    ]


def questions_held(cluster: Cluster, owner: str) -> Held:
    """Hold what the copy of its only shard asks an owner from now on."""
    held = Held(cluster, owner, "copy_next")
    (hosted,) = shards_at(cluster, owner)
    hosted.send_on()  # so that it asks again at once
    assert held.reached.wait(60)
    return held


def test_an_answer_waits_for_the_copy(three):
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    [row] = store.stats()["shards"]
    assert (row["copy"], row["behind"]) == (other, 0)
    held = questions_held(three, owner)
    thread, found = push_beside(store)
    (hosted,) = shards_at(three, owner)
    until(lambda: hosted.shard.segment.current.version == 2)
    assert (found, hosted.behind) == ([], 1)
    held.go_on()
    thread.join()
    assert found == [2]


def test_what_the_copy_lacks_is_sent_again(three):
    """The owner has applied it, and dies before it could answer."""
    store, owner, other = one_shard(three)
    held = questions_held(three, owner)
    thread, found = push_beside(store)
    (hosted,) = shards_at(three, owner)
    until(lambda: hosted.shard.segment.current.version == 1)
    three.end(owner)
    held.go_on(OSError("nobody is there"))
    thread.join()
    assert found == [1]
    assert store.placement == (other,)
    assert store.pull()["w"].tolist() == [1.0] * 6


def test_a_copy_takes_over_though_its_answer_is_lost(three):
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    held = Held(three, other, "move_own", times=1)
    held.go_on(OSError("the answer is lost"), does_it=True)
    three.end(owner)
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert store.placement == (other,)


def test_a_copy_is_asked_for_as_long_as_its_worker_is_there(three):
    """There is no other one."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    held = Held(three, other, "move_own", times=5)
    held.go_on(OSError("the connection broke"))
    three.end(owner)
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert store.placement == (other,)


def test_a_shard_is_lost_whose_workers_die_at_once(three):
    """The worker of the copy has left before that is asked to take over."""
    store, *both = one_shard(three)
    three.end(*both)
    copy = rf"its second copy, on worker {both[1]}, had gone \(it was to take over\) \d"
    with pytest.raises(daskps.ShardLostError, match=rf"{both[0]} died; .*; {copy}"):
        store.pull(timeout=20)


def test_what_became_of_the_copy_of_a_lost_shard_is_said(three):
    """The last one that there was; of a shard that has one again nothing has gone."""
    store, owner, other = one_shard(three)
    entry = three.directory.stores[store.uid]
    [third] = {*three.scheduler.workers} - {owner, other}
    three.end(other)
    until(lambda: 0 in entry.copies and entry.copies[0].counts)
    assert not entry.copies_gone
    three.end(third)
    three.end(owner)
    said = rf"copy, on worker {third}, had gone \(it left\) \d+ s before\. No other"
    with pytest.raises(daskps.ShardLostError, match=said):
        store.pull(timeout=20)


def test_a_shard_is_lost_whose_copy_dies_as_it_takes_over(three):
    """Its answer has come, and nobody would hear that it has left."""
    store, owner, other = one_shard(three)
    held = Held(three, other, "move_own")
    held.after = partial(three.end_here, other)
    held.go_on(does_it=True)
    three.end(owner)
    with pytest.raises(daskps.ShardLostError):
        store.pull(timeout=20)


def test_a_shard_is_lost_in_time_whose_copy_takes_long_to_fail(three):
    """It was to take over as the shard had been away for a while, and takes too long."""
    store, owner, other = one_shard(three)
    with store:
        held = Held(three, other, "move_own", times=3)
        entry, directory = three.directory.stores[store.uid], three.directory
        left, again = LeftBy(owner, "has died"), list[int]()

        def away(of: Any, shards: list[int], _: object) -> None:
            of.set_away(shards, "nobody has room")
            again.extend(shards)

        def begin() -> None:
            directory.copies.promote(entry, [0], left, away)

        three.loop.add_callback(begin)
        assert held.reached.wait(60)
        three.loop.add_callback(directory.moves.lose, entry, [0], left)
        held.go_on(OSError("nobody is there"))
        with pytest.raises(daskps.ShardLostError, match="has died"):
            store.pull(timeout=20)
        assert again == []


def test_a_shard_is_lost_whose_copy_cannot_load_what_a_user_has_written(three):
    """As a codec, which another version of a library has pickled."""
    store, owner, other = one_shard(three)
    held = Held(three, other, "move_own")
    held.go_on(ValueError("bad marshal data"))
    three.end(owner)
    with pytest.raises(daskps.ShardLostError):
        store.pull(timeout=20)


def test_a_copy_is_tried_again_where_a_rule_cannot_be_loaded(three):
    store, owner, other = one_shard(three)
    [third] = {*three.scheduler.workers} - {owner, other}
    held = Held(three, third, "move_fill", times=1)
    held.go_on(ValueError("bad marshal data"))
    three.end(other)
    entry = three.directory.stores[store.uid]
    until(lambda: 0 in entry.copies and entry.copies[0].counts)
    assert held.n == 1


@pytest.mark.parametrize("fails", [0, 1])
def test_a_shard_that_gets_no_copy_costs_no_other_one_its_own(
    three, caplog, monkeypatch, fails
):
    """Two workers have a shard each, and one cannot load the rule of the other's."""
    monkeypatch.setattr(standby, "_AGAIN_SECONDS", 0.01)
    servers = [*three.scheduler.workers][:2]
    with daskps.create(
        {"w": np.zeros(6)}, shards=2, servers=servers, copies=2, name="pair"
    ) as store:
        held = Held(three, store.placement[1 - fails], "move_fill")
        held.go_on(ValueError("bad marshal data"))
        entry, copies = three.directory.stores[store.uid], three.directory.copies
        for shard in (0, 1):
            three.loop.add_callback(copies.strike, entry, shard, "is struck off")
        three.end([*three.scheduler.workers][2])
        until(lambda: "has yet to get second copies" in caplog.text)
        assert [*entry.copies] == [1 - fails]
        assert entry.copies[1 - fails].counts
        told = [of for _, of in three.scheduler.events if of["action"] == "copies-made"]
        assert told[-1]["shards"] == [1 - fails]
        assert caplog.text.count("has yet to get second copies: bad marshal data") == 1


def test_a_scheduler_does_other_work_where_no_shard_can_get_its_copy(
    three, monkeypatch
):
    """A store may have thousands, all of which are tried every second."""
    with daskps.create({"w": np.zeros(64)}, shards=64) as store:
        entry = three.directory.stores[store.uid]
        full = mock.Mock(side_effect=daskps.LayoutError("there is no room"))
        monkeypatch.setattr(standby, "find_room", full)

        async def most_at_a_time() -> int:
            entry.n_copies, most = 2, 0
            three.directory.copies.look(entry)
            while (before := full.call_count) < 64:
                await asyncio.sleep(0)
                most = max(most, full.call_count - before)
            return most

        loop = three.loop.asyncio_loop
        found = asyncio.run_coroutine_threadsafe(most_at_a_time(), loop)
        assert found.result(60) == 1


def test_a_copy_takes_over_while_its_owner_may_yet_say_that_it_leaves(
    three, monkeypatch
):
    """Else the directory would drop what it has, or never look for it again."""
    monkeypatch.setattr(drains, "_SAY_SECONDS", 0.2)
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    asked, entry = Held(three, other, "move_own"), three.directory.stores[store.uid]

    async def remove() -> None:
        # As one that is being made, and is there a moment later.
        entry.copies[0].counts = False
        three.end_here(owner)
        await asyncio.sleep(0)
        entry.copies[0].counts = True
        three.directory.moves.lose(entry, [0], LeftBy(owner, "was closed"))

    three.loop.add_callback(remove)
    assert asked.reached.wait(60)
    until(lambda: not entry.sent_on)
    asked.go_on()
    assert store.pull(timeout=20)["w"].tolist() == [1.0] * 6
    assert store.placement == (other,)


def test_a_large_state_takes_longer_than_one_may_be_silent(three, monkeypatch):
    """As in a slow network: the directory looks who lives, and nobody asks again."""
    monkeypatch.setattr(moving, "_LOOK_NBYTES", 1)
    with dask.config.set({"daskps.suspect-after": "400ms"}):
        store, owner, other = one_shard(three)
        looks, handlers = Held(three, owner, "look"), three.doors[owner].handlers
        looks.go_on()
        control, may_go, asked = handlers["daskps_control"], asyncio.Event(), []

        async def answer_late(**message: Any) -> Any:
            found = await control(**message)
            if message["method"] == "copy_next":
                asked.append(message["since"])
                await may_go.wait()
            return found

        handlers["daskps_control"] = answer_late
        thread, found = push_beside(store)
        until(lambda: looks.n >= 4)
        assert len(asked) == 1
        three.loop.add_callback(may_go.set)
        thread.join()
        assert found == [1]
        assert three.directory.stores[store.uid].copies[0].worker == other


def test_a_silent_owner_may_die_while_its_copy_is_asked_in_vain(three):
    """Else the shard would stay with nobody, and callers wait for it."""
    store, owner, other = one_shard(three)
    asked = Held(three, other, "move_own")
    silent = fall_silent(three, store, owner)
    assert asked.reached.wait(60)
    three.end(owner)
    asked.go_on(ConsistencyError("it leaves"))
    silent.go_on()
    with pytest.raises(daskps.ShardLostError, match="died as it handed over"):
        store.pull(timeout=20)


@pytest.mark.parametrize("hears", [True, False])
def test_a_silent_owner_goes_on_whose_copy_cannot_take_over(three, hears):
    """It was told to stop before, or hears of that when it goes on: it keeps the shard."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    asked = Held(three, other, "move_own")
    deposed = None if hears else Held(three, owner, "move_deposed")
    silent = fall_silent(three, store, owner)
    assert asked.reached.wait(60)
    thread, found = push_beside(store)
    asked.go_on(ConsistencyError("it leaves"))
    thread.join()
    assert found == [2]
    if deposed is not None:
        deposed.go_on()
    silent.go_on()
    entry = three.directory.stores[store.uid]
    until(lambda: 0 in entry.copies and entry.copies[0].counts)
    store.add({"w": np.ones(6)})
    assert store.placement == (owner,)
    assert store.pull()["w"].tolist() == [3.0] * 6
    [hosted] = shards_at(three, owner)
    assert hosted.shard.generation == entry.generations[0]
    [host] = [h for h in three.hosts if h.worker.address == owner]
    assert not host.going


def test_a_silent_owner_does_not_go_on_alone_while_its_copy_takes_over(three):
    """It says that its copy is silent: they are cut from each other."""
    store, owner, other = one_shard(three)
    questions_held(three, owner)
    asked, _ = Held(three, other, "move_own"), Held(three, owner, "move_deposed")
    copies, copy = three.directory.copies, three.directory.stores[store.uid].copies[0]
    fall_silent(three, store, owner)
    assert asked.reached.wait(60)
    thread, found = push_beside(store)
    (hosted,) = shards_at(three, owner)
    until(lambda: hosted.behind == 1)
    says = copies.on_silent(store.uid, 0, copy.move, times=1)
    asyncio.run_coroutine_threadsafe(says, three.loop.asyncio_loop).result()
    assert (hosted.behind, found) == (1, [])
    asked.go_on()
    thread.join()
    assert (found, store.placement) == ([1], (other,))
    assert store.pull()["w"].tolist() == [1.0] * 6


def test_a_save_goes_on_where_an_owner_dies_that_has_copied(three, tmp_path):
    """The cut begins again while another owner is at it."""
    store = daskps.create({"w": np.zeros(6)}, shards=2, copies=2)
    store.add({"w": np.ones(6)})
    first, second = store.placement
    at_first, at_second = (Held(three, w, "fill_cut", 1) for w in (first, second))
    copied = threading.Event()
    at_first.after = copied.set
    with futures.ThreadPoolExecutor(1) as pool:
        saved = pool.submit(store.save, tmp_path)
        assert at_first.reached.wait(60)
        assert at_second.reached.wait(60)
        at_first.go_on(does_it=True)
        assert copied.wait(60)
        three.end(first)
        entry = three.directory.stores[store.uid]
        until(lambda: first not in entry.owners)
        at_second.go_on()
        assert saved.result().version == 1
    with daskps.restore(tmp_path) as again:
        assert again.pull()["w"].tolist() == [1.0] * 6


def test_a_save_goes_on_where_an_owner_goes_that_is_writing(
    three, tmp_path, monkeypatch
):
    """What it writes is in the copy; what others have pushed since need not be."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    writes, may_end = threading.Event(), threading.Event()
    sync_names = Storage.sync_names

    def wait(storage: Storage, paths: Any) -> None:
        writes.set()
        assert may_end.wait(60)
        sync_names(storage, paths)

    monkeypatch.setattr(Storage, "sync_names", wait)
    entry = three.directory.stores[store.uid]
    with futures.ThreadPoolExecutor(1) as pool:
        saved = pool.submit(store.save, tmp_path)
        assert writes.wait(60)
        held = questions_held(three, owner)
        [hosted] = shards_at(three, owner)
        thread, found = push_beside(store)
        until(lambda: hosted.behind == 1)
        about = entry, [0], LeftBy(owner, "is silent"), print
        three.loop.add_callback(three.directory.copies.promote, *about)
        until(lambda: entry.owners[0] == other)
        thread.join()
        may_end.set()
        assert saved.result().version == 1
        held.go_on()
    assert found == [2]
    with daskps.restore(tmp_path) as again:
        assert again.pull()["w"].tolist() == [1.0] * 6


APPLYING, MAY_APPLY = threading.Event(), threading.Event()


def add_one(block: Any, name: str) -> Any:
    if block[0] == 1:
        APPLYING.set()
        assert MAY_APPLY.wait(60)
    return block + 1


def test_an_answer_on_two_shards_waits_for_one_that_has_left(three):
    """Its copy has taken over without it while the other one was at work."""
    w = np.repeat([0.0, 1.0], 3)
    APPLYING.clear()
    MAY_APPLY.clear()
    [first, *_] = three.scheduler.workers
    store = daskps.create({"w": w}, shards=2, copies=2, servers=[first])
    entry = three.directory.stores[store.uid]
    held = Held(three, first, "copy_next")
    for hosted in shards_at(three, first):
        hosted.send_on()
    until(lambda: held.n == 2)
    with futures.ThreadPoolExecutor(1) as pool:
        applied = pool.submit(store.apply, add_one)
        assert APPLYING.wait(60)
        about = entry, [0], LeftBy(first, "is silent"), print
        three.loop.add_callback(three.directory.copies.promote, *about)
        until(lambda: entry.owners[0] != first)
        until(lambda: len(shards_at(three, first)) == 1)
        MAY_APPLY.set()
        held.go_on()
        assert applied.result() == 1
    assert store.pull()["w"].tolist() == (w + 1).tolist()


@pytest.mark.parametrize("asked", ["the copy", "the owner", "the copy, which does"])
def test_a_silent_owner_that_is_retired_sends_what_its_copy_refuses(three, asked):
    """It alone has the shard; Dask removes it while one of the two is asked to go on."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    own = Held(three, other, "move_own")
    back = Held(three, owner, "move_back")
    silent = fall_silent(three, store, owner)
    assert own.reached.wait(60)
    if asked == "the owner":
        own.go_on(ConsistencyError("it leaves"))
        assert back.reached.wait(60)
    [host] = [h for h in three.hosts if h.worker.address == owner]
    loop = three.loop.asyncio_loop
    closing = asyncio.run_coroutine_threadsafe(three.retire(owner), loop)
    until(lambda: host.is_leaving)
    for held in (silent, back):
        held.go_on()
    owns = asked == "the copy, which does"
    own.go_on(None if owns else ConsistencyError("it leaves"))
    closing.result()
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert (store.placement == (other,)) if owns else (owner not in store.placement)
    actions = [event["action"] for _, event in three.scheduler.events]
    moved = "shards-promoted", "shards-moved"
    assert [actions.count(one) for one in moved] == [owns, not owns]
    assert store.add({"w": np.ones(6)}) == 2


def test_a_silent_owner_that_dies_once_it_has_gone_on_is_no_owner(three):
    """Dask has removed it when its answer comes, and tells of no worker twice."""
    store, owner, other = one_shard(three)
    own = Held(three, other, "move_own")
    back = Held(three, owner, "move_back")
    silent = fall_silent(three, store, owner)
    own.go_on(ConsistencyError("it leaves"))
    assert back.reached.wait(60)
    back.after = partial(three.end_here, owner)
    back.go_on(does_it=True)
    silent.go_on()
    with pytest.raises(daskps.ShardLostError, match=owner):
        store.pull(timeout=20)


def test_a_silent_owner_that_goes_on_and_dies_as_the_last_one_is_no_owner(two):
    """There was nobody whom it could have sent its shard to."""
    store, owner, other = one_shard(two)
    own, back = Held(two, other, "move_own"), Held(two, owner, "move_back")
    silent = fall_silent(two, store, owner)
    own.go_on(ConsistencyError("it leaves"))
    assert back.reached.wait(60)
    two.end(other)
    back.after = partial(two.end_here, owner)
    back.go_on(does_it=True)
    silent.go_on()
    with pytest.raises(daskps.ShardLostError, match=owner):
        store.pull(timeout=20)


def test_a_former_owner_keeps_nothing_that_hears_all_at_once(three):
    """It was stopped: that it stops, and that the copy owns its shard, come together."""
    store, owner, other = one_shard(three)
    deposed = Held(three, owner, "move_deposed")
    silent = fall_silent(three, store, owner)
    until(lambda: three.directory.stores[store.uid].owners == (other,))
    [host] = [h for h in three.hosts if h.worker.address == owner]
    until(lambda: deposed.n == 2)
    deposed.go_on()
    silent.go_on()
    until(lambda: not host.shards and not host.going)
    store.add({"w": np.ones(6)})
    assert store.pull()["w"].tolist() == [1.0] * 6


def test_a_former_owner_that_is_locked_is_told_again(three, monkeypatch):
    """It stops once it can, and then knows nothing of the shard any more."""
    store, owner, other = one_shard(three)
    [host] = [h for h in three.hosts if h.worker.address == owner]
    under, n = ShardHost.under, 0

    async def locked(mine: ShardHost, hosted: Any, function: Any) -> Any:
        nonlocal n
        if mine is host and n < 3:
            n += 1
            hosted.enqueue(function)
            raise daskps.ShardBusyError("another process has it")
        return await under(mine, hosted, function)

    monkeypatch.setattr(ShardHost, "under", locked)
    silent = fall_silent(three, store, owner)
    until(lambda: three.directory.stores[store.uid].owners == (other,))
    silent.go_on()
    until(lambda: not host.shards and not host.going)
    assert n == 3
    assert store.add({"w": np.ones(6)}) == 1


def test_a_late_state_of_a_former_owner_changes_nothing(three, monkeypatch):
    """It came before the copy took over, and its thread goes on after that."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    begin, found = Coming.begin, list[Exception]()
    come, go_on = threading.Event(), threading.Event()

    def begin_late(coming: Coming, *turn: Any) -> Any:
        come.set()
        assert go_on.wait(60)
        try:
            return begin(coming, *turn)
        except ConsistencyError as error:
            found.append(error)
            raise

    monkeypatch.setattr(Coming, "begin", begin_late)
    thread, answers = push_beside(store)
    assert come.wait(60)
    three.end(owner)
    thread.join()
    assert answers == [2]
    assert store.placement == (other,)
    assert store.add({"w": np.ones(6)}) == 3
    go_on.set()
    until(lambda: found)
    assert "the copy has stopped" in str(*found)
    assert store.pull()["w"].tolist() == [3.0] * 6
    assert store.version == 3


def test_a_copy_takes_over_whose_worker_is_being_retired(three):
    """It has all there is, and the worker sends it on before it closes."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    three.scheduler.workers[other].status = Status.closing_gracefully
    three.end(owner)
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert store.placement == (other,)
    drain_first(store)
    assert store.pull()["w"].tolist() == [1.0] * 6
    assert store.placement not in ((owner,), (other,))


def test_what_took_over_on_a_worker_that_closes_is_sent_on(three):
    """Dask had retired it before the copy there was the owner."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    held = Held(three, other, "move_own")
    three.end(owner)
    assert held.reached.wait(60)
    thread, found = push_beside(store)
    closing = asyncio.run_coroutine_threadsafe(
        three.retire(other), three.loop.asyncio_loop
    )
    (host,) = [h for h in three.hosts if h.worker.address == other]
    until(lambda: host.is_leaving)
    held.go_on()
    thread.join()
    closing.result()
    assert found == [2]
    assert store.pull()["w"].tolist() == [2.0] * 6
    assert store.placement not in ((owner,), (other,))


def test_a_worker_that_is_retired_sends_what_its_copy_lacks(three):
    """The copy is being made, and would not take over."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    (last,) = {*three.scheduler.workers} - {owner, other}
    held = Held(three, owner, "copy_next")
    three.end(other)
    entry = three.directory.stores[store.uid]
    until(lambda: 0 in entry.copies and entry.copies[0].worker == last)
    until(lambda: shards_at(three, owner)[0].backing is not None)
    retiring = three.retire(owner)
    closing = asyncio.run_coroutine_threadsafe(retiring, three.loop.asyncio_loop)
    [host] = [h for h in three.hosts if h.worker.address == owner]
    until(lambda: host.is_leaving)
    held.go_on()
    closing.result()
    assert store.add({"w": np.ones(6)}) == 2
    assert store.pull()["w"].tolist() == [2.0] * 6


def test_an_owner_goes_on_alone_where_its_copy_dies(three):
    store, owner, other = one_shard(three)
    held = Held(three, owner, "copy_next", times=1)
    assert held.reached.wait(60)
    thread, found = push_beside(store)
    three.end(other)
    held.go_on(OSError("nobody is there"))
    thread.join()
    assert found == [1]
    # Another one is made, on the worker that is left.
    entry = three.directory.stores[store.uid]
    until(lambda: 0 in entry.copies and entry.copies[0].worker not in (owner, other))


def test_an_owner_goes_on_alone_that_hears_of_its_copy_once_it_died(three):
    """It goes on as soon as the making of the copy has failed."""
    store, owner, other = one_shard(three)
    (last,) = {*three.scheduler.workers} - {owner, other}
    fill = Held(three, last, "move_fill", times=1)
    three.end(other)
    assert fill.reached.wait(60)
    held, each = Held(three, owner, "copy_on", times=1), Held(three, owner, "copy_on")
    struck = threading.Event()
    each.after = struck.set
    each.go_on(does_it=True)
    fill.go_on()
    assert held.reached.wait(60)
    three.end(last)
    assert struck.wait(60)
    looks = Held(three, owner, "look")
    held.go_on()
    assert (store.add({"w": np.ones(6)}), looks.n) == (1, 0)


def test_a_shard_let_go_of_while_its_copy_fails_is_not_on_its_way(three, monkeypatch):
    """Another thread uses it: both wait for their turn, and the first one lets go of it."""
    store, owner, other = one_shard(three)
    state = Held(three, owner, "move_state", times=1)
    three.end(other)
    assert state.reached.wait(60)
    [host] = [h for h in three.hosts if h.worker.address == owner]
    [hosted] = host.shards.values()
    hosted.is_shared = True
    queue, rows = mock.Mock(wraps=hosted.enqueue), [(0, hosted.shard.generation)]
    monkeypatch.setattr(hosted, "enqueue", queue)
    let_go = {"method": "let_go", "store": store.uid, "shards": rows}
    with hosted.turn(60):
        three.loop.add_callback(three.doors[owner].handlers["daskps_control"], **let_go)
        state.go_on(ConsistencyError("more rows have changed"))
        until(lambda: queue.call_count == 2)
    until(lambda: not host.going)


@pytest.fixture
def soon() -> Iterator[None]:
    """One that is silent for half a second is suspected."""
    with dask.config.set({"daskps.suspect-after": "0.5s"}):
        yield


def test_a_copy_that_its_owner_alone_cannot_hear_is_struck_off(soon, three):
    """Both reach the scheduler: it waits for the copy, but not for ever."""
    store, owner, _ = one_shard(three)
    store.add({"w": np.ones(6)})
    held = questions_held(three, owner)
    assert store.add({"w": np.ones(6)}) == 2
    events = [e for _, e in three.scheduler.events if e["action"] == "copies-lost"]
    assert [e["why"] for e in events[:1]] == ["is silent"]
    assert store.placement == (owner,)
    held.go_on(OSError("the wire is cut"))


def test_no_copy_is_made_on_a_worker_that_was_silent(three):
    """It may be without power, and Dask removes it in minutes; one that wakes may."""
    first, *others = three.scheduler.workers
    with daskps.create({"w": np.zeros(6)}, servers=[first], copies=2) as store:
        entry = three.directory.stores[store.uid]
        silent = fall_silent(three, store, first)
        until(lambda: entry.owners != (first,))
        until(lambda: 0 in entry.copies and entry.copies[0].counts)
        # It would be the first that is asked: it is the only server.
        assert {*entry.owners, entry.copies[0].worker} == {*others}
        silent.go_on()
        three.end(entry.copies[0].worker)
        until(lambda: 0 in entry.copies and entry.copies[0].counts)
        assert entry.copies[0].worker == first


def test_a_worker_that_does_not_answer_gets_no_copy(three, monkeypatch):
    """Nobody had to do with it before."""
    # As on machines of their own.
    monkeypatch.setattr(standby, "get_address_host", str)
    monkeypatch.setattr(standby, "_OWN_SECONDS", 0.05)
    first, second, third = three.scheduler.workers
    held = Held(three, second, "look")
    with daskps.create({"w": np.zeros(6)}, servers=[first], copies=2) as store:
        assert three.directory.stores[store.uid].copies[0].worker == third
        assert held.reached.is_set()
        held.go_on()


def test_an_owner_that_is_locked_is_told_again_of_its_copy(two):
    """Long before one that waits would say so."""
    with dask.config.set({"daskps.suspect-after": "600s"}):
        store, owner, other = one_shard(two)
        held = Held(two, owner, "copy_on", times=1)
        held.go_on(daskps.ShardBusyError("another process has it"))
        two.end(other)
        assert store.add({"w": np.ones(6)}) == 1
        assert held.n == 1


def test_a_copy_that_is_not_complete_does_not_take_over(three):
    """What was answered before it was may not be in it."""
    held = [Held(three, worker, "copy_next") for worker in three.scheduler.workers]
    made: list[Any] = []

    def create() -> None:
        with using(three.link):
            try:
                made.append(daskps.create({"w": np.zeros(6)}, shards=1, copies=2))
            except daskps.DaskPSError as error:
                made.append(error)

    thread = threading.Thread(target=create)
    thread.start()
    until(lambda: any(one.reached.is_set() for one in held))
    (entry,) = three.directory.stores.values()
    three.end(entry.owners[0])
    for one in held:
        one.go_on(OSError("nobody is there"))
    thread.join()
    assert isinstance(made[0], daskps.ShardLostError)


def test_a_copy_takes_over_what_a_drain_had_let_go_of_for_a_neighbour(
    three, monkeypatch
):
    """Both are gone when the worker has let go of it, and a third one has the copy."""
    store, owner, other = one_shard(three)
    store.add({"w": np.ones(6)})
    [near] = {*three.scheduler.workers} - {owner, other}
    entry, drains = three.directory.stores[store.uid], three.directory.drains
    # As where the two share memory.
    three.scheduler.workers[other].metrics = {MEMORY_METRIC: "b"}
    entry.segments, entry.memories = [(0, "n", 1, 1)], {owner: "a", near: "a"}
    monkeypatch.setattr(drains, "_near", lambda entry, worker, shards: shards)
    held = Held(three, owner, "let_go")
    with dask.config.set({"daskps.lost-after": "600s"}):
        thread, found = drain_beside(store)
        assert held.reached.wait(60)
        three.end(near, owner)
        held.go_on(OSError("nobody is there"))
        assert store.pull(timeout=20)["w"].tolist() == [1.0] * 6
        thread.join()
    assert found == [[0]]
    assert store.placement == (other,)


def test_drains_go_on_with_two_copies(three):
    store, owner, _ = one_shard(three)
    entry = three.directory.stores[store.uid]
    store.add({"w": np.ones(6)})
    drain_first(store)
    until(lambda: 0 in entry.copies and entry.copies[0].counts)
    assert entry.copies[0].worker != store.placement[0] != owner
    store.add({"w": np.ones(6)})
    three.end(store.placement[0])
    assert store.pull()["w"].tolist() == [2.0] * 6


def test_a_drain_waits_for_a_shard_that_may_come_back(three):
    """Its owner was silent, and its copy cannot take over."""
    store, owner, other = one_shard(three)
    asked = Held(three, other, "move_own")
    silent = fall_silent(three, store, owner)
    assert asked.reached.wait(60)
    thread, found = drain_beside(store)
    until(lambda: three.directory.drains.under_way)
    asked.go_on(ConsistencyError("it leaves"))
    silent.go_on()
    thread.join()
    assert found == [[0]]
    assert three.directory.stores[store.uid].owners != (owner,)


def test_copies_leave_a_worker_that_is_drained(three):
    store, owner, other = one_shard(three)
    entry = three.directory.stores[store.uid]
    assert store.drain(other) == []
    until(lambda: 0 in entry.copies and entry.copies[0].counts)
    assert entry.copies[0].worker not in (owner, other)
    # Nobody else can have it.
    assert store.drain(entry.copies[0].worker) == []
    assert entry.copies[0].worker not in (owner, other)


def test_a_copy_stays_where_a_drain_is_refused(three):
    """The only one that has room is of another daskps."""
    store, owner, other = one_shard(three)
    entry = three.directory.stores[store.uid]
    [copy] = entry.copies.values()
    [third] = {*three.scheduler.workers} - {owner, other}
    answer(three, third, "hello", OTHER_PROTOCOL)
    three.scheduler.workers[other].memory_limit = 1000
    with pytest.raises(daskps.ProtocolError, match=f"{third}.* 99 .*9.9"):
        store.drain(owner)
    assert entry.copies == {0: copy}
    store.add({"w": np.ones(6)})


def pushes_beside(client: Any, store: Any, pid: int) -> float:
    """Stop a process; push until that returns; let the process go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        store.add({"w": np.ones(24)}, timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
    return float(store.pull()["w"].sum())


def test_a_drain_leaves_the_copy_of_a_shard_that_has_no_owner(three):
    """It may have to take over."""
    store, owner, other = one_shard(three)
    entry = three.directory.stores[store.uid]
    copy = entry.copies[0]
    three.loop.add_callback(entry.set_away, [0], "its owner has died")
    until(lambda: entry.away)
    with pytest.raises(TimeoutError):
        store.drain(other, timeout=0.3)
    assert entry.copies[0] is copy
    three.loop.add_callback(entry.settle, [0])
    until(lambda: entry.copies.get(0, copy) is not copy)
    assert entry.copies[0].worker not in {owner, other}


@pytest.mark.parametrize("which", ["copy", "owner"])
def test_a_process_that_is_stopped_does_not_stop_the_store(apart, which):
    """The other one tells the directory; whoever wakes up later answers for nobody."""
    servers = list(apart.nthreads())[:1]
    about: dict[str, Any] = {"servers": servers, "client": apart, "copies": 2}
    with daskps.create({"w": np.zeros(24)}, **about) as store:
        store.add({"w": np.ones(24)})
        before = store.placement[0], copies_of(apart, store)[0]
        victim = before[which == "copy"]
        [pid] = apart.run(os.getpid, workers=[victim]).values()
        assert pushes_beside(apart, store, pid) == 48.0
        assert (store.placement[0] == before[0]) == (which == "copy")
        until(partial(has_all, apart, store))
        assert copies_of(apart, store)[0] != store.placement[0]
        for n in (3, 4):
            store.add({"w": np.ones(24)})
            assert store.pull()["w"].tolist() == [float(n)] * 24
        testing.kill_owner(apart, store)
        assert store.pull()["w"].tolist() == [4.0] * 24


def hold_the_interpreter(seconds: int) -> None:
    """Let no other thread of this process run, as some extensions do."""
    ctypes.PyDLL(None).sleep(seconds)


def test_code_that_holds_the_interpreter_for_long_promotes_once(apart):
    """For less than `suspect-after` it promotes nobody; its worker gets no shard back."""
    owner, n_pushed = next(iter(apart.nthreads())), 0
    about: dict[str, Any] = {"servers": [owner], "client": apart, "copies": 2}
    with daskps.create({"w": np.zeros(6)}, **about) as store:
        for seconds, n_promoted in ((2, 0), (9, 1)):
            held = apart.submit(
                hold_the_interpreter, seconds, workers=[owner], pure=False
            )
            while not held.done():
                store.add({"w": np.ones(6)}, timeout=60)
                n_pushed += 1
            assert len(events_of(apart, "shards-promoted")) == n_promoted
        until(partial(has_all, apart, store))
        assert store.placement[0] != owner
        assert store.pull()["w"].tolist() == [float(n_pushed)] * 6


@pytest.mark.parametrize(
    ("rule", "n"), [(None, 8), (optim.SGD(1.0, momentum=0.9), 16), (optim.Adam(), 24)]
)
def test_bytes_of_a_weight(three, rule, n):
    """Two buffers of weights and, in shared memory, of each slot; on two workers."""
    size = 10**6
    params = {"w": np.zeros(size, "f4")}
    with daskps.create(params, optimizer=rule, shards=1, copies=2) as store:
        entry = three.directory.stores[store.uid]
        assert n * size < entry.sizes[0] < (n + 0.3) * size
        assert entry.copies[0].nbytes == entry.sizes[0]
        [row] = store.stats()["shards"]
        [copy] = [of for host in three.hosts for of in host.coming.values()]
        assert row["copy_nbytes"] == copy.hosted.nbytes
        assert sorted(entry.nbytes.values()) == [entry.sizes[0]] * 2


@pytest.mark.parametrize("end", ["closed", "its client vanishes"])
def test_memory_of_both_copies_goes_with_the_store(three, end):
    """No garbage collection is needed: that may come late, and a worker would pause."""
    store, *_ = one_shard(three)
    store.add({"w": np.ones(6)})
    memory = [
        weakref.ref(hosted.shard.segment)
        for host in three.hosts
        for hosted in (*host.shards.values(), *(c.hosted for c in host.coming.values()))
    ]
    assert len(memory) == 2
    gc.disable()
    try:
        if end == "closed":
            store.close()
        else:
            three.loop.add_callback(three.directory.client_left, three.client.id)
        until(lambda: not any(segment() for segment in memory))
    finally:
        gc.enable()


def test_memory_goes_with_the_store_though_a_host_does_not_hear_of_it_at_first(three):
    """As one that is stopped for longer than Dask tries to reach it."""
    store, *workers = one_shard(three)
    for worker in workers:
        lost = Held(three, worker, "drop", times=1)
        lost.go_on(OSError("nobody answers"))
    store.close()
    until(lambda: not any(host.shards or host.coming for host in three.hosts))


def test_a_copy_goes_with_its_store_where_its_worker_could_not_adopt(three):
    """As where another process had locked the shard; a third worker takes it then."""
    store, owner, other = one_shard(three)
    entry, moves = three.directory.stores[store.uid], three.directory.moves

    async def ask() -> None:
        entry.segments = [(0, "n", 1, 1)]
        found = await Move(moves, entry, [0], LeftBy(owner, "died")).ask_to_adopt(
            other, [0]
        )
        assert found[0]["why"]

    asyncio.run_coroutine_threadsafe(ask(), three.loop.asyncio_loop).result(60)
    store.close()
    until(lambda: not any(host.coming for host in three.hosts))


def test_copies_go_to_servers_where_these_have_room(three):
    """As shards do, but for the owner's own worker."""
    first, second, third = three.scheduler.workers
    for servers in ([first, second], "resource:PS"):
        for about in (first, second):
            three.scheduler.workers[about].resources = {"PS": 1}
        with daskps.create({"w": np.zeros(6)}, servers=servers, copies=2) as store:
            entry = three.directory.stores[store.uid]
            assert {copy.worker for copy in entry.copies.values()} == {first, second}
    with daskps.create({"w": np.zeros(6)}, servers=[first], copies=2) as store:
        entry = three.directory.stores[store.uid]
        assert entry.copies[0].worker in (second, third)


def test_room_for_both_copies_is_asked_for_before_any_is_made(three):
    for about in three.scheduler.workers.values():
        about.memory_limit = 6 * 2**20
    held = Held(three, next(iter(three.scheduler.workers)), "fill", times=0)
    with pytest.raises(daskps.LayoutError, match="second copies"):
        daskps.create({"w": np.zeros(400_000)}, copies=2)
    assert not held.reached.is_set()
    assert not three.directory.stores
    with daskps.create({"w": np.zeros(400_000)}) as store:
        assert store.version == 0


@pytest.mark.parametrize("limit", ["the shards", "both copies"])
def test_what_both_copies_need_is_said_where_they_do_not_fit(three, limit):
    with daskps.create({"w": np.zeros(400_000)}) as store:
        sizes = three.directory.stores[store.uid].sizes.values()
    for about in three.scheduler.workers.values():
        about.memory_limit = (1 if limit == "the shards" else 3) * max(sizes)
    need = f"copies=2 needs {2 * sum(sizes):,} bytes in all, copies=1 half of it"
    with pytest.raises(daskps.LayoutError, match=rf"{need}$"):
        daskps.create({"w": np.zeros(400_000)}, copies=2)
    assert not three.directory.stores


def test_a_copy_is_charged_as_it_grows(three):
    """By the directory, which finds room for others, and by the host that has it."""
    params = {"emb": daskps.TableSpec(rows=None, dim=64)}
    with daskps.create(params, shards=1, copies=2) as store:
        entry = three.directory.stores[store.uid]
        before = entry.sizes[0]
        ids = np.arange(20_000)
        store["emb"].add(ids, np.ones((len(ids), 64), "f4"))
        until(lambda: entry.sizes[0] > before + 64 * 4 * len(ids))
        assert entry.copies[0].nbytes == entry.sizes[0]
        held = entry.nbytes[entry.copies[0].worker]
        assert held == entry.sizes[0]
        [host] = [h for h in three.hosts if h.worker.address == entry.copies[0].worker]
        assert before < host.totals()["nbytes"] <= held * 1.2


# -- bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "error"),
    [(0, ValueError), (3, ValueError), (True, TypeError), ("2", TypeError)],
)
def test_other_numbers_are_refused(three, tmp_path, copies, error):
    with daskps.create({"w": np.zeros(6)}) as store:
        store.save(tmp_path)
    until(lambda: not three.directory.stores)
    asked = [Held(three, worker, "hello") for worker in three.scheduler.workers]
    for make in (daskps.create, {"w": np.zeros(6)}), (daskps.restore, tmp_path):
        with pytest.raises(error, match="copies"):
            make[0](make[1], copies=copies)
    assert not any(held.reached.is_set() for held in asked)
    assert not three.directory.stores


def test_one_worker_is_not_enough():
    with inprocess.cluster(1) as one:
        with pytest.raises(daskps.NotEnoughWorkersError, match="second copy"):
            daskps.create({"w": np.zeros(6)}, copies=2)
        until(lambda: not one.directory.stores)


def test_workers_of_another_protocol_alone_are_not_enough(three):
    [first, *others] = three.scheduler.workers
    for other in others:
        answer(three, other, "hello", OTHER_PROTOCOL)
    for _ in "12":  # by then they are known
        with pytest.raises(daskps.DaskPSError, match="same daskps"):
            daskps.create({"w": np.zeros(600)}, servers=[first], copies=2)
        until(lambda: not three.directory.stores)


def test_no_room_for_the_copy_is_said(three):
    [first, *others] = three.scheduler.workers
    for other in others:
        three.scheduler.workers[other].memory_limit = 1000
    with pytest.raises(daskps.LayoutError, match="no other worker"):
        daskps.create({"w": np.zeros(600)}, servers=[first], copies=2)
    until(lambda: not three.directory.stores)


def test_shards_on_a_device_have_no_second_copy(three):
    with pytest.raises(daskps.LayoutError, match="second copy"):
        daskps.create({"w": np.zeros(6)}, copies=2, device="fake")


# -- runs, and what else there is ------------------------------------------------------


def loop(trainer: Any, turns: list[Any]) -> float:
    for _ in range(trainer.clock, 100):
        trainer.pull()
        trainer.push({"w": np.ones(24)})
    return float(trainer.pull()["w"].sum())


def kill_after(client: Any, store: Any, version: int) -> None:
    until(lambda: store.version >= version)
    until(partial(has_all, client, store))
    testing.kill_owner(client, store)


@pytest.mark.parametrize(("sync", "n"), [("asp", 200), ("ssp", 200), ("bsp", 100)])
def test_runs_go_on(apart, sync, n):
    """Trainers on the worker start again, and each of their steps counts once."""
    servers = list(apart.nthreads())[:2]
    params = {"w": np.zeros(24)}
    about: dict[str, Any] = {"servers": servers, "client": apart, "copies": 2}
    rule = optim.SGD(1.0)
    with daskps.create(params, shards=2, optimizer=rule, **about) as store:
        run = partial(daskps.run, store, loop, [0, 1], sync=sync, resumable=True)
        thread = threading.Thread(target=run)
        thread.start()
        kill_after(apart, store, 20)
        kill_after(apart, store, 70)
        thread.join()
        assert store.pull()["w"].tolist() == [-float(n)] * 24
        assert store.version == n


@pytest.mark.parametrize(
    ("sync", "codec", "total"), [("bsp", None, -5), ("asp", "int8", -10)]
)
def test_a_run_begins_though_an_owner_dies_that_has_begun_it(
    three, monkeypatch, sync, codec, total
):
    """Its copy would take over without what it needs of the rounds, or of gradients."""
    rule, learned, learn = optim.SGD(1.0), list[str](), encoding.learn

    def note(name: str, pickled: bytes) -> None:
        learned.append(name)
        learn(name, pickled)

    with daskps.create({"w": np.zeros(6)}, shards=2, optimizer=rule, copies=2) as store:
        first, second = store.placement
        held = Held(three, second, "begin_run", times=1)
        results: list[Any] = []
        how: Any = {"sync": sync, "codec": codec, "workers": [second] * 2}
        run = partial(daskps.run, store, five_steps, [0, 1], **how)
        running = threading.Thread(target=lambda: results.append(run()))
        running.start()
        assert held.reached.wait(60)
        (begins,) = three.directory.runs.open.values()
        until(lambda: begins.begun[first].done())
        monkeypatch.setattr(encoding, "learn", note)
        three.end(first)
        entry = three.directory.stores[store.uid]
        until(lambda: not entry.away and first not in entry.owners)
        assert [name[:4] for name in learned] == [codec] * bool(codec)
        held.go_on()
        running.join()
        assert len(results) == 1
        assert store.pull()["w"] == pytest.approx(total)


def test_a_neighbour_adopts_first_and_keeps_the_copy():
    """Where memory is shared; the copy follows the next owner."""
    with local_cluster(n_workers=4, threads=1) as client:
        servers = list(client.nthreads())[:1]
        about: dict[str, Any] = {"servers": servers, "client": client, "copies": 2}
        with daskps.create({"w": np.zeros(24)}, **about) as store:
            n = 0
            for _ in range(2):
                kill_owner(client, store)
                for _ in range(20):
                    store.add({"w": np.ones(24)})
                    n += 1
            assert store.pull()["w"].tolist() == [float(n)] * 24
        assert [e["shards"] for e in events_of(client, "shards-adopted")] == [(0,)] * 2
        assert events_of(client, "shards-promoted") == []


def test_checkpoints_and_snapshots_have_what_was_answered(apart, tmp_path):
    about: dict[str, Any] = {"client": apart, "copies": 2}
    with daskps.create({"w": np.zeros(24)}, **about) as store:
        store.add({"w": np.ones(24)})
        store.save(tmp_path)
        snapshot = store.snapshot()["w"]
        store.add({"w": np.ones(24)})
        assert snapshot.compute().tolist() == [1.0] * 24
        with daskps.restore(tmp_path, **about) as again:
            kill_owner(apart, again)
            assert again.pull()["w"].tolist() == [1.0] * 24


def test_a_worker_that_closes_leaves_its_copies_to_others(apart):
    with daskps.create({"w": np.zeros(24)}, client=apart, copies=2) as store:
        for k in range(3):
            until(partial(has_all, apart, store))
            apart.retire_workers([copies_of(apart, store)[0]])
            store.add({"w": np.ones(24)})
            assert store.pull()["w"].tolist() == [k + 1.0] * 24

"""Numbers of hosts: the same as `store.stats()`, small, counted once, and only read."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

import daskps
from daskps import optim
from daskps.cluster.counters import CallerCounters, Counters, counters_of
from daskps.cluster.host.node import HOSTS
from daskps.cluster.seeing import numbers
from daskps.cluster.seeing.numbers import MOST_SHARDS, UID_LENGTH, HostReport, most
from daskps.cluster.seeing.overview import COLUMNS, EXTENSION, Overview
from daskps.cluster.seeing.prometheus import of_schedulers
from tests import inprocess
from tests.support import gen_cluster, until

ROWS, BOUNDED = daskps.TableSpec(None, 2), daskps.TableSpec(1000, 2)


class User:
    """Something that counts."""


def size(report):
    return len(msgpack.dumps(report))


# A report of the worker's own, with a heartbeat, would count some of the pushes.
@gen_cluster(client=True, worker_kwargs={"heartbeat_interval": "1h"})
async def test_report_and_stats_say_the_same(c, s, a, b):
    params = {"w": np.zeros(40), "t": ROWS}
    about = {"optimizer": optim.SGD(0.1), "shards": 8, "client": c}
    async with await daskps.aio.create(params, **about) as x:
        for _ in range(5):
            await x.push({"w": np.ones(40)})
        await x["t"].push(np.arange(9), np.ones((9, 2)))
        stats = await x.stats()
        told = [HostReport(HOSTS[w.address])() for w in (a, b)]
        rows = stats["shards"]
        for key in ("pushes", "duplicates", "parked", "behind"):
            assert sum(of[key] for of in told) == sum(row[key] for row in rows)
        assert sum(of["nbytes"] for of in told) == sum(
            r["segment_nbytes"] for r in rows
        )
        versions = {
            (shard, of["stores"][store]): version
            for of in told
            for store, shard, _, version, *_ in of["busiest"]
        }
        uid = x.uid[:UID_LENGTH]
        assert versions == {(row["shard"], uid): row["version"] for row in rows}
        assert (
            sum(of["tables"][0][2] for of in told) == stats["tables"]["t"]["rows"] == 9
        )
        assert sum(of["tables"][0][3] for of in told) == 9
        assert {of["tables"][0][0] for of in told} == {uid}
        workers = {row["worker"]: row["calls"] for row in rows}
        assert [of["calls"] for of in told] == [workers[a.address], workers[b.address]]


@gen_cluster(client=True)
async def test_heartbeats_bring_it(c, s, a, b):
    async with await daskps.aio.create({"w": np.zeros(4)}, client=c):
        await a.heartbeat()
        told = s.workers[a.address].metrics["daskps"]
        assert told["shards"] == 1
        assert told["lanes"] == told["sockets"]  # its old name, for one release


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
async def test_report_is_small_however_much_there_is(c, s, a):
    """300 shards in 21 stores, 40 reasons, numbers of nine digits."""
    stores = [
        await daskps.aio.create({"w": np.zeros(n), "t": BOUNDED}, client=c, shards=n)
        for n in [*[5] * 20, 200]
    ]
    host = HOSTS[a.address]
    counters = counters_of(a).new(host)
    for name in Counters.__slots__[:-1]:
        setattr(counters, name, 10**9)
    for i in range(40):
        counters.fallbacks[f"{i:<80}"] = 10**9
    report = HostReport(host)
    for hosted in host.shards.values():
        hosted.shard.segment.header[12] = 10**9  # pushes
        hosted.shard.segment.current.plain[0] = 10**9  # version
    told = report()
    assert (told["shards"], told["pushes"]) == (300, 300 * 10**9)
    assert len(told["busiest"]) == MOST_SHARDS
    assert sum(told["fallbacks"].values()) == 40 * 10**9
    full = dict(told, runs=[[10**9, 10**9, 1e9, 1024, [[1023, 10**9]] * 8]] * 2)
    assert size(told) < size(full) < 2000
    for x in stores:
        await x.delete()


def test_many_shards_are_looked_at_less_often(monkeypatch):
    """50 more than few are told of for a tenth of a second; the rate is of that time."""
    clock, n, told = [0.0], numbers.FEW_SHARDS + 50, list[Any]()
    time: Any = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr(numbers, "time", time)
    with (
        inprocess.cluster(1) as one,
        daskps.create({"w": np.zeros(n)}, shards=n) as store,
    ):
        report = HostReport(one.hosts[0])
        for _ in range(5):
            store.add({"w": np.ones(n)})
            told.append((report()["pushes"] / n, report()["rate"]))
            clock[0] += 0.06
        assert [pushes for pushes, _ in told] == [1, 1, 3, 3, 5]
        assert told[2][1] == round(2 * n / 0.12, 1)
    assert report()["shards"] == 0


def test_reasons_are_few_and_none_is_lost():
    told = most({f"reason {i}": i for i in range(1, 50)}, [])
    assert sum(told.values()) == sum(range(50))
    assert list(told)[:2] == ["reason 49", "reason 48"]
    assert len(told) == 7
    assert most({"r" * 60 + end: 2 for end in "abc"}, []) == {"r" * 48: 6}


def test_counts_of_reasons_never_fall_as_others_get_commoner():
    """Also of two that are one in a report; one is a seventh, and overtakes a sixth."""
    with inprocess.cluster(1) as one:
        report, user = HostReport(one.hosts[0]), User()
        counters = counters_of(one.hosts[0].worker.server).new(user)
        turns = [[*"abcdef"], [*"ghhh"], [*"iii"], [*"gggg"], ["a" * 49, "a" * 50]]
        turns += [[reason] * 9 for reason in ("g", "a" * 50, "f")]
        before, n = dict[str, int](), 0
        for turn in turns:
            for reason in turn:
                counters.fell_back(reason)
            told, n = report()["fallbacks"], n + len(turn)
            assert sum(told.values()) == n
            assert all(told[reason] >= of for reason, of in before.items())
            before = told
        assert told.keys() == {*"abcdef", "others"}


@gen_cluster(client=True)
async def test_metrics_of_others_are_passed_over(c, s, a, b):
    """Anybody's may have this name, and a worker may have another daskps."""
    async with await daskps.aio.create({"w": np.zeros(4)}, client=c):
        await asyncio.gather(a.heartbeat(), b.heartbeat())
        metrics = s.workers[a.address].metrics
        good = metrics["daskps"]
        older = {"version": "0.0.1", "shards": 1}
        for bad in ("text", 3, [1], {"shards": 1}, older, {**good, "version": None}):
            metrics["daskps"] = bad
            view = Overview(s)
            assert [*view.reports] == [b.address]
            found = {of: len(view.rows(of)) for of in COLUMNS}
            assert (found["workers"], found["shards"]) == (1, 2)
            assert dict(row[::3] for row in of_schedulers([s]))["stores"] == [({}, 1)]


def test_handles_that_are_gone_count_on():
    of = CallerCounters()
    users = [User() for _ in range(600)]
    kept = [of.new(user) for user in users]
    for counters in kept:
        counters.messages += 1
        counters.fell_back("late")
    assert (of.total().messages, of.total().fallbacks) == (600, {"late": 600})
    live = kept[-1]
    del users[:-1], kept, counters
    gc.collect()
    live.messages += 1
    assert (of.total().messages, of.total().fallbacks) == (601, {"late": 600})


def test_all_handles_of_a_process_are_in_its_stats():
    with inprocess.cluster(2), daskps.create({"w": np.zeros(4)}, name="x") as x:
        before = x.stats()["process"]
        for _ in range(3):
            daskps.open("x").add({"w": np.ones(4)})
        gc.collect()
        found = x.stats()
        done = {
            key: n - before[key]
            for key, n in found["process"].items()
            if n != before[key]
        }
        assert sum(done[key] for key in done if key in ("messages", "local_calls")) == 6
        assert found["handle"]["messages"] + found["handle"]["local_calls"] == 0
        assert set(found["workers"]) == set(x.placement)
        assert all(set(of) == set(found["process"]) for of in found["workers"].values())


@gen_cluster(client=True)
async def test_counts_do_not_fall_as_shards_leave_nor_jump_as_they_come(c, s, a, b):
    about = {"optimizer": optim.SGD(0.1), "shards": 2, "client": c}
    async with await daskps.aio.create({"w": np.zeros(4)}, **about) as x:
        reports = {w.address: HostReport(HOSTS[w.address]) for w in (a, b)}
        for _ in range(7):
            await x.push({"w": np.ones(4)})
        before = {w: report()["pushes"] for w, report in reports.items()}
        assert before == dict.fromkeys(reports, 7)
        await x.drain(a.address)
        after = {w: report() for w, report in reports.items()}
        assert {w: of["pushes"] for w, of in after.items()} == before
        assert (after[a.address]["shards"], after[b.address]["shards"]) == (0, 2)
        await x.push({"w": np.ones(4)})
        assert reports[b.address]()["pushes"] == 9
        assert reports[a.address]()["pushes"] == 7


def _waits(runs):
    return runs and runs[0][1] == runs[0][3] == 1


def seen(cluster):
    """What the page shows of a cluster: reports travel as heartbeats bring them."""
    reports = {host.worker.address: HostReport(host) for host in cluster.hosts}
    scheduler: Any = SimpleNamespace(
        extensions={EXTENSION: cluster.directory},
        workers={
            address: SimpleNamespace(
                address=address, metrics={"daskps": msgpack.loads(msgpack.dumps(of()))}
            )
            for address, of in reports.items()
        },
    )
    return Overview(scheduler)


GO_ON = threading.Event()


def step(trainer, part):
    trainer.push({"w": np.ones(6)})
    if trainer.rank:
        GO_ON.wait(60)
    trainer.push({"w": np.ones(6)})
    trainer.pull()


def test_trainers_that_wait_are_told_and_nothing_is_written():
    """Trainer 1 is a step behind trainer 0; a report changes no byte of a shard."""
    told: list = []

    def watch(cluster):
        reports = [HostReport(host) for host in HOSTS.values()]
        shards = [h for host in HOSTS.values() for h in host.shards.values()]
        try:
            until(lambda: all(_waits(of()["runs"]) for of in reports), 60)
            memory = [h.shard.segment.words for h in shards]
            memory += [h.shard.run_state.round.mailbox.words for h in shards]
            were = [bytes(words) for words in memory]
            told.extend(report()["runs"] for report in reports)
            told.append([bytes(words) for words in memory] == were)
            told.append([seen(cluster).rows(of) for of in ("runs", "trainers")])
        finally:
            GO_ON.set()

    with (
        inprocess.cluster(2) as cluster,
        daskps.create({"w": np.zeros(6)}, optimizer=optim.SGD(1.0)) as x,
        ThreadPoolExecutor(1) as pool,
    ):
        watching = pool.submit(watch, cluster)
        daskps.run(x, step, [0, 0])
        watching.result()
        assert all(HostReport(host)()["runs"] == [] for host in HOSTS.values())
        assert seen(cluster).rows("runs") == seen(cluster).rows("trainers") == []
    *runs, is_unchanged, then = told
    assert is_unchanged
    assert [of[0][1:2] + of[0][3:] for of in runs] == [(1, 1, [(1, 1), (0, 2)])] * 2
    (run,), trainers = then
    assert (run["sync"], run["trainers"], run["clock"]) == ("bsp", "2 of 2", 1)
    assert run["waits"].startswith("1 for trainer 1 on ")
    ranks = [(of["rank"], of["clock"], of["behind"]) for of in trainers]
    assert ranks == [(1, 1, 0), (0, 2, 0)]


N_CALLS = itertools.count()
SECOND, OVER = threading.Event(), threading.Event()


def gradient(params, X, y):
    if next(N_CALLS) >= 2:
        SECOND.set()
        OVER.wait(60)
    return 3.0, {"w": np.zeros(2)}


@pytest.mark.parametrize("execution", ["resident", "graph"])
def test_loss_is_that_of_the_last_epoch_and_nobody_is_behind(execution, monkeypatch):
    module = sys.modules[__name__]
    for name, value in {
        "N_CALLS": itertools.count(),
        "SECOND": threading.Event(),
        "OVER": threading.Event(),
    }.items():
        monkeypatch.setattr(module, name, value)
    told: list = []

    def watch(cluster):
        try:
            assert module.SECOND.wait(60)
            until(lambda: seen(cluster).rows("runs")[0]["clock"] == 1, 60)
            if execution == "resident":
                until(lambda: seen(cluster).rows("runs")[0]["loss"] == 3.0, 60)
            told.extend(seen(cluster).rows("runs"))
        finally:
            module.OVER.set()

    with (
        inprocess.cluster(2) as cluster,
        daskps.create({"w": np.zeros(2)}, optimizer=optim.SGD(1.0)) as x,
        ThreadPoolExecutor(1) as pool,
    ):
        watching = pool.submit(watch, cluster)
        about = {"trainers": 2, "execution": execution, "callbacks": ()}
        daskps.train(x, gradient, np.ones((4, 2)), epochs=3, batch_size=4, **about)
        watching.result()
    (run,) = told
    assert (run["staleness"], run["waits"]) == (0, "")


def test_a_report_keeps_no_memory_of_a_shard_that_is_gone() -> None:
    """The next heartbeat may be seconds away."""
    with inprocess.cluster(2) as two:
        store = daskps.create({"w": np.ones(4)})
        reports = [HostReport(host) for host in two.hosts]
        assert [report()["shards"] for report in reports] == [1, 1]
        memory = [
            weakref.ref(hosted.shard.segment)
            for host in two.hosts
            for hosted in host.shards.values()
        ]
        gc.disable()
        try:
            store.close()
            until(lambda: not any(segment() for segment in memory))
        finally:
            gc.enable()

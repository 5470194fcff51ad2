"""What `store.stats()` counts, against what was done."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import psutil  # type: ignore[import-untyped]  # without type hints
from distributed import Client, get_worker

import daskps
from daskps import optim
from tests.support import gen_cluster, store, until

SHARD = {
    "shard",
    "copy",
    "behind",
    "copy_nbytes",
    "worker",
    "generation",
    "version",
    "epoch",
    "epochs",
    "nbytes",
    "device",
    "device_nbytes",
    "device_work",
    "segment_nbytes",
    "tables",
    "locked_reads",
    "socket_calls",
    "plain_reads",
    "pushes",
    "dropped",
    "delays",
    "duplicates",
    "parked",
    "calls",
    "lane_calls",
}
HANDLE = {
    "carriers",
    "why",
    "messages",
    "local_calls",
    "nbytes",
    "retries",
    "rows_pulled",
    "rows_pushed",
    "sockets",
    "socket_calls",
    "socket_nbytes",
    "fallbacks",
    "ways",
    "lanes",
    "lane_calls",
    "lane_nbytes",
}


def in_task(s):
    s.push({"w": np.ones(10, "f4")})
    return get_worker().address, s.stats()["handle"]


def test_from_a_client_all_goes_by_message(client):
    with store(client, params={"w": np.zeros(10, "f4")}) as s:
        before = s.stats()
        assert before["tables"] == {}
        assert [set(row) for row in before["shards"]] == [SHARD, SHARD]
        assert set(before["handle"]) == HANDLE
        assert [row["nbytes"] for row in before["shards"]] == [20, 20]
        assert not any(row["locked_reads"] for row in before["shards"])
        assert before["handle"]["carriers"] == dict.fromkeys(s.placement, "message")
        s.push({"w": np.ones(10, "f4")})
        s.pull()
        after = s.stats()["handle"]
        assert after["messages"] - before["handle"]["messages"] == 4
        assert after["nbytes"] - before["handle"]["nbytes"] == 80
        assert (after["local_calls"], after["retries"]) == (0, 0)


def test_from_a_task_the_own_worker_is_local(client):
    with store(client, params={"w": np.zeros(10, "f4")}) as s:
        local, remote = s.placement
        where, handle = client.submit(in_task, s, workers=[local]).result()
        assert where == local
        assert handle["carriers"] == {local: "process", remote: "message"}
        assert handle["why"] == {remote: "daskps.carriers.machine is false"}
        assert (handle["local_calls"], handle["messages"]) == (1, 1)
        assert handle["nbytes"] == 20  # of the half that went by message


def test_closed_carrier_is_shown(rpc_cluster):
    with rpc_cluster.as_current(), store(rpc_cluster) as s:
        local, remote = s.placement
        _, handle = rpc_cluster.submit(in_task, s, workers=[local]).result()
        assert handle["carriers"] == {local: "message", remote: "message"}
        assert (handle["local_calls"], handle["messages"]) == (0, 2)


def test_handle_that_has_only_just_met_its_store(client):
    with store(client) as s:
        again = daskps.ParameterStore(s.uid, s.name)
        assert set(again.stats()["handle"]) == HANDLE


@gen_cluster(client=True)
async def test_on_the_loop_of_the_hosts(c, s, a, b):
    async with await daskps.aio.create({"w": np.zeros(4)}, client=c) as x:
        carriers = (await x.stats())["handle"]["carriers"]
        assert carriers == {a.address: "process", b.address: "process"}


def test_on_another_loop_than_that_of_the_hosts():
    """A blocking client calls hosts of its process directly, an asynchronous cannot."""
    with Client(processes=False, n_workers=1, dashboard_address="127.0.0.1:0") as local:
        x = daskps.create({"w": np.zeros(4)}, name="both", client=local)

        async def carriers():
            address = local.cluster.scheduler_address
            async with Client(address, asynchronous=True) as other:
                opened = await daskps.aio.open("both", client=other)
                found = (await opened.stats())["handle"]
                await opened.pull()
                assert "an event loop" in found["why"][x.placement[0]]
                return found["carriers"], (await opened.stats())["handle"]["messages"]

        assert list(x.stats()["handle"]["carriers"].values()) == ["process"]
        assert x.stats()["handle"]["why"] == {}
        found, messages = asyncio.run(carriers())
        assert list(found.values()) == ["message"]
        assert messages == 1
        x.delete()


def held(uid):
    """Bytes of the segments of a store on this worker."""
    from daskps.cluster.host.node import HOSTS

    host = HOSTS[get_worker().address]
    return sum(
        hosted.shard.segment.buffer.nbytes
        for (u, _), hosted in host.shards.items()
        if u == uid
    )


def resident(dask_worker):
    gc.collect()
    return psutil.Process().memory_info().rss


def test_bytes_are_those_of_the_memory(client):
    """In the counters, in the worker's metrics, and in the process itself."""
    n = 4_000_000

    def metrics():
        info = client.scheduler_info()["workers"]
        return {w: info[w]["metrics"].get("daskps", {}).get("nbytes", 0) for w in info}

    # What earlier tests have left is freed.
    until(lambda: not any(metrics().values()))
    before = client.run(resident)
    s = store(
        client, params={"w": np.ones(n, "f8")}, optimizer=optim.Adam(0.1), shards=4
    )
    s.push({"w": np.ones(n)})  # touches both buffers and all slots
    by_worker = dict.fromkeys(s.placement, 0)
    for row in s.stats()["shards"]:
        by_worker[row["worker"]] += row["segment_nbytes"]
        assert row["nbytes"] == 8 * n / 4
    for worker, nbytes in by_worker.items():
        # Two buffers of weights and two slots, each of half the elements.
        assert 4 * 8 * n / 2 <= nbytes < 4 * 8 * n / 2 + 2**21
        assert client.submit(held, s.uid, workers=[worker]).result() == nbytes
        grown = client.run(resident, workers=[worker])[worker] - before[worker]
        assert grown > 0.9 * nbytes
    until(lambda: metrics() == by_worker)
    s.close()
    until(lambda: not any(metrics().values()))

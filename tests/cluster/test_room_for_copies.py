"""Copies and answers that do not fit into a worker's memory: nobody dies of them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import dask
import numpy as np
import pytest
from distributed.comm.core import CommClosedError, connect

import daskps
from daskps.cluster.host.node import HOSTS
from daskps.cluster.protocol.messages import Call, Part, unpack_answers
from daskps.errors import LayoutError
from daskps.shards.steps import READ, Step
from tests.cluster.by_socket import dtypes_of, message_of
from tests.seams import leave_no_room
from tests.support import CARRIERS, local_cluster, until


def told(dask_worker: Any) -> str:
    """Return what is another one where a nanny has started the worker again."""
    return str(dask_worker.id)


def test_a_snapshot_without_room_is_refused_and_a_save_is_not(tmp_path):
    """Its copy and the store, of 0.3 of the limit each, would be above 95 % with the rest."""
    rows = 180_000_000 // 256
    with (
        dask.config.set(CARRIERS["rpc"]),
        local_cluster(1, memory_limit="600 MB") as client,
    ):
        params = {"t": daskps.TableSpec(rows, 64), "b": np.arange(5.0)}
        store, before = daskps.create(params), client.run(told)
        store["t"].assign([rows - 1], np.ones((1, 64), "f4"))
        for take in (store.snapshot, store["t"].to_dask_array):
            with pytest.raises(
                LayoutError, match=r"needs 1\d\d,.* bytes .* save\(url\)"
            ):
                take()
        # Nothing waits for what was not taken.
        assert store["b"].to_dask_array().compute().tolist() == [0, 1, 2, 3, 4]
        store.save(tmp_path)
        assert store["t"].pull([rows - 1]).sum() == 64
        assert client.run(told) == before
        store.close()


def test_many_readers_of_one_large_shard_have_it_one_after_the_other():
    """All copies together would be twice the limit."""
    n, readers = 10_000_000, 18
    with (
        dask.config.set(CARRIERS["rpc"]),
        local_cluster(1, memory_limit="450 MB") as client,
    ):
        store, found = daskps.create({"w": np.ones(n, "f4")}), list[float]()
        before = client.run(told)

        def read() -> None:
            found.append(float(store.pull(timeout=200)["w"].sum()))

        threads = [threading.Thread(target=read) for _ in range(readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == readers * [float(n)]
        assert client.run(told) == before
        store.close()


@pytest.mark.parametrize("takes", [False, True])
def test_who_takes_nothing_of_an_answer_loses_its_connection(takes, monkeypatch):
    """Others wait for it, say so, and go on."""
    n = 8_000_000
    monkeypatch.setattr("daskps.cluster.connections.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("daskps.cluster.host.node.TAKE_SECONDS", 1e6 if takes else 0.5)
    options: dict[str, Any] = {"processes": False, "protocol": "tcp"}
    # Else the kernel closes it, after 30 s.
    how = {**CARRIERS["rpc"], "distributed.comm.timeouts.tcp": "1 hour"}
    with dask.config.set(how), local_cluster(1, **options) as client:
        store = daskps.create({"w": np.ones(n, "f4")})
        [host] = HOSTS.values()
        leave_no_room(host)
        layout = host.get_shard(store.uid, 0).layout
        step = Step(generation=1, wait=READ)
        call = Call(store.uid, (Part(0, step, (("float32", 0, n),)),), token="t")
        message = {"op": "daskps_call", "reply": True, **message_of(call, layout)}

        async def ask() -> Any:
            comm = await connect(host.worker.address)
            await comm.write(message)
            return comm

        loop: Any = client.loop
        asked = asyncio.run_coroutine_threadsafe(ask(), loop.asyncio_loop).result()
        until(lambda: host.budget.nbytes)
        if takes:
            with pytest.raises(
                TimeoutError, match=r"32,000,000 bytes of answers to oth"
            ):
                store.pull(timeout=1)
            read = asyncio.run_coroutine_threadsafe(asked.read(), loop.asyncio_loop)
            [answer] = unpack_answers(read.result(), "there", dtypes_of(call))
            assert answer.arrays[0].sum() == n
            del answer
        assert store.pull()["w"].sum() == n
        until(lambda: not host.budget.nbytes)
        if not takes:
            # What was not taken is gone with its connection.
            read = asyncio.run_coroutine_threadsafe(asked.read(), loop.asyncio_loop)
            with pytest.raises(CommClosedError):
                read.result()
        asked.abort()
        store.close()

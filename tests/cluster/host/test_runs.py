"""What a host refuses before a run begins."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest
from distributed.comm.core import CommClosedError

import daskps
from daskps.cluster.directory import runs
from daskps.cluster.host.node import HOSTS
from daskps.cluster.upstream import dumps
from daskps.errors import LayoutError, NotEnoughWorkersError, RunCancelledError
from daskps.shards.memory.format import RUN
from tests.support import gen_cluster

# The limit is below what the process uses: Dask would pause the worker for that.
UNWATCHED = {f"distributed.worker.memory.{what}": False for what in ("pause", "spill")}


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)], config=UNWATCHED)
async def test_run_whose_mailboxes_do_not_fit_is_refused(c, s, a):
    """Two slices of 4 MB for the sums of two trainers, beside a shard of 8 MB."""
    store = await daskps.aio.create({"w": np.zeros(10**6, "f4")}, client=c)
    held = sum(hosted.nbytes for hosted in HOSTS[a.address].shards.values())
    limit = a.memory_manager.memory_limit
    a.memory_manager.memory_limit = held + 8 * 10**6
    with pytest.raises(LayoutError, match=r"needs up to 8,\d+,\d+ bytes for gradients"):
        await daskps.aio.run(store, _pulls, [0, 1])
    # The same run fits where nothing is added up, and where there is room.
    assert await daskps.aio.run(store, _pulls, [0, 1], sync="asp") == [0, 0]
    a.memory_manager.memory_limit = held + 9 * 10**6
    assert await daskps.aio.run(store, _pulls, [0, 1]) == [0, 0]
    # A worker that Dask pauses starts no trainer.
    a.memory_manager.memory_pause_fraction = 0.8
    with pytest.raises(LayoutError, match=r"above 80% of its memory limit of 17,\d+"):
        await daskps.aio.run(store, _pulls, [0, 1])
    a.memory_manager.memory_limit = limit
    assert await daskps.aio.run(store, _pulls, [0, 1]) == [0, 0]
    await store.close()


@gen_cluster(client=True)
async def test_a_host_that_dies_while_a_run_begins(c, s, a, b, monkeypatch):
    """Tried again; where its shards are lost or it is silent, a typed error says so."""
    # Private memory: what a worker leaves nobody takes over.
    with dask.config.set({"daskps.carriers.machine": False}):
        store = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    hosts = s.extensions["daskps-directory"].hosts
    control, failing = hosts.control, list[Any]()

    async def breaking(worker, method, **kwargs):
        if method == "begin_run" and worker == b.address and failing:
            await failing.pop()()
            raise CommClosedError("the other end has gone")
        return await control(worker, method, **kwargs)

    async def nothing():
        pass

    monkeypatch.setattr(hosts, "control", breaking)
    failing += [nothing, nothing]
    assert await daskps.aio.run(store, _pulls, [0, 1]) == [0, 0]
    # Shorter than the pause before another try.
    monkeypatch.setattr(runs, "OPEN_SECONDS", 0.04)
    failing += [nothing]
    with pytest.raises(NotEnoughWorkersError, match="does not answer"):
        await daskps.aio.run(store, _pulls, [0, 1])
    monkeypatch.setattr(runs, "OPEN_SECONDS", 60)
    assert await daskps.aio.run(store, _pulls, [0, 1]) == [0, 0]
    failing += [b.close]
    with pytest.raises(daskps.ShardLostError) as caught:
        await daskps.aio.run(store, _pulls, [0, 1])
    assert caught.value.worker == b.address
    await store.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 2)])
async def test_a_run_that_begins_after_a_newer_one_is_refused(c, s, a):
    """A host that was stopped may hear of the old one last; the new one trains on."""
    store = await daskps.aio.create({"w": np.zeros(4)}, client=c)
    hosts = s.extensions["daskps-directory"].hosts
    begin = {
        "policy": ("bsp", 0, 0.0),
        "n_ranks": 1,
        "reduce": dumps("mean"),
        "reset": False,
        "codec": ("", b""),
        "epochs": None,
    }
    of = {"store": store.uid, "resident": True, "begin": begin}
    [hosted] = HOSTS[a.address].shards.values()

    async def begins(run, policy="bsp"):
        begin["policy"] = (policy, 0, 0.0)
        return await hosts.control(a.address, "begin_run", run=run, **of)

    def state():
        return int(hosted.shard.segment.current.fixed[RUN]), hosted.mailbox

    assert len(await begins(102)) == 1
    before = state()
    assert before[0] == before[1][0] == 102
    for policy in ("bsp", "asp"):
        with pytest.raises(RunCancelledError, match=r"run 101 .* after run 102"):
            await begins(101, policy)
        assert state() == before
    assert len(await begins(103)) == 1
    assert state()[0] == 103
    await hosts.control(a.address, "end_run", store=store.uid, run=103, reason="over")
    await store.close()


def _pulls(trainer, part):
    return int(trainer.pull()["w"].sum())

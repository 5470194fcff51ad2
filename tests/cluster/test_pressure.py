"""Workers without memory or threads to spare: their shards serve all the same."""

from __future__ import annotations

from pathlib import Path

import dask
import numpy as np
import pytest
from distributed.core import Status

import daskps
from daskps import optim
from tests.support import CARRIERS, gen_cluster

LIMITED = {"memory_limit": "8 GiB"}
ONES = {"w": np.ones(4096)}


@pytest.mark.parametrize("way", ["process", "machine", "rpc"])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs=LIMITED)
async def test_a_worker_that_dask_has_paused_serves_its_shards(c, s, a, way):
    with dask.config.set(CARRIERS[way]):
        made = await daskps.aio.create({"w": np.zeros(4096)}, client=c)
        manager = a.memory_manager
        enough, manager.memory_pause_fraction = manager.memory_pause_fraction, 1e-9
        await manager.memory_monitor(a)
        assert a.status is Status.paused
        waiting = c.submit(sum, [1, 2])
        for n in range(1, 4):
            assert await made.add(ONES) == n
        np.testing.assert_array_equal(await made["w"].pull(), 3.0)
        # It gets no shards of new stores, and the error says why.
        with (
            dask.config.set({"daskps.register-timeout": "100ms"}),
            pytest.raises(daskps.NotEnoughWorkersError, match=f"{a.address}: paused"),
        ):
            await daskps.aio.create({"w": np.zeros(4)}, client=c)
        # Paused it was all the time: no task has run.
        assert not waiting.done()
        manager.memory_pause_fraction = enough
        await manager.memory_monitor(a)
        assert await waiting == 3
        await made.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], worker_kwargs=LIMITED)
async def test_no_shard_is_what_dask_spills_to_disk(c, s, a):
    """All that it can move there is a name for each shard, and comes back as that."""
    made = await daskps.aio.create({"w": np.zeros(4096)}, client=c, shards=2)
    await made.add(ONES)
    while a.data.fast:
        a.data.evict()
    assert len(a.data.slow) == 2
    assert 0 < size_of(Path(a.local_directory) / "storage") < 2 * 1024
    await made.add(ONES)
    np.testing.assert_array_equal(await made["w"].pull(), 2.0)
    await made.close()


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def push_and_pull(store, n):
    for i in range(1, n + 1):
        version = store.push(ONES)
        if (store.pull(min_version=version)["w"] != -i).any():
            return i
    return 0


def loop(trainer, part):
    for _ in range(part):
        trainer.pushpull(ONES)
    return trainer.clock


@pytest.mark.parametrize("way", ["process", "machine", "rpc"])
@pytest.mark.parametrize("n", [50, pytest.param(10_000, marks=pytest.mark.slow)])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], timeout=120)
async def test_one_thread_is_enough_for_a_shard_and_who_waits_for_it(c, s, a, n, way):
    """A task that pushes and pulls has the only one, then a trainer."""
    with dask.config.set(CARRIERS[way]):
        rule = optim.SGD(1.0)
        made = await daskps.aio.create({"w": np.zeros(4096)}, client=c, optimizer=rule)
        assert await c.submit(push_and_pull, made, n) == 0
        assert await daskps.aio.run(made, loop, [n]) == [n]
        assert await made.version == 2 * n
        await made.close()

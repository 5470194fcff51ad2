"""Verbs in tasks that fill every thread of the cluster."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
from distributed import get_client, worker_client

import daskps
from daskps import optim
from tests.support import gen_cluster, local_cluster

ONES = {"w": np.ones(4)}


def gradient(params, X, y):
    return {"w": np.ones(4)}


def loop(trainer, part):
    trainer.push(ONES)
    return trainer.clock


def create(i):
    with daskps.create({"w": da.zeros(4, chunks=2)}) as store:
        return store["w"].pull().tolist() == [0.0] * 4


def train(i, execution="resident"):
    with daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0)) as store:
        daskps.train(store, gradient, np.ones((8, 2)), execution=execution)
        return daskps.run(store, loop, [0, 1]) == [1, 1]


def by_graph(i):
    return train(i, "graph")


def snapshot(i):
    with daskps.create({"w": np.zeros(4)}) as store:
        return float(store.snapshot()["w"].sum().compute()) == 0.0


def by_client(i):
    with daskps.create({"w": np.zeros(4)}, client=get_client()):
        pass
    with worker_client(), daskps.create({"w": np.zeros(4)}):
        return True


@pytest.mark.parametrize("task", [create, train, by_graph, snapshot, by_client])
@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2)
async def test_tasks_that_fill_all_threads_end(c, s, a, b, task):
    futures = c.map(task, range(2), pure=False)
    assert await c.gather(futures) == [True] * 2
    assert {w.state.nthreads for w in (a, b)} == {1}


def once(store):
    return int(daskps.train(store, gradient, np.ones((8, 2))).version)


def test_training_is_what_a_worker_does_first():
    """The client of its process is made for it, and connects meanwhile."""
    with local_cluster(1) as client:
        store = daskps.create({"w": np.zeros(4)}, optimizer=optim.SGD(1.0))
        assert client.submit(once, store).result(timeout=60) == 1

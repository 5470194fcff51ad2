"""Tests as the author of a library writes them, with the helpers that Dask has for these.

They run in a process of their own, without the fixtures of this project:
`tests/test_library.py` starts it.
"""

from __future__ import annotations

import numpy as np
from distributed import Client, LocalCluster

# Before daskps, whose defaults the fixtures take out of the configuration then.
from distributed.utils_test import (
    cleanup,
    client,
    cluster_fixture,
    gen_cluster,
    loop,
    loop_in_thread,
)

import daskps

__all__ = ["cleanup", "client", "cluster_fixture", "loop", "loop_in_thread"]
X = np.arange(12.0).reshape(6, 2)
Y = X @ [1.0, -2.0]


def gradient(params, X, y):
    error = X @ params["w"] - y
    return float(error @ error), {"w": X.T @ error / len(y)}


def made(**kwargs):
    params = {"w": np.zeros(2), "e": daskps.TableSpec(None, 2)}
    return daskps.create(params, optimizer=daskps.optim.SGD(0.5), **kwargs)


def use(store):
    """Call from the main thread by each of the ways, and from trainers."""
    ones = {"w": np.ones(2)}
    # More than one: the first calls go by message, others by a socket.
    assert [store.push(ones) for _ in range(8)] == [*range(1, 9)]
    assert store.pull("w")["w"].tolist() == [-4.0, -4.0]
    store["e"].push([7, -1], np.ones((2, 2)))
    assert store["e"].pull([-1]).tolist() == [[-0.5, -0.5]]
    assert store.push_async(ones).result() == 10
    assert len(daskps.train(store, gradient, X, Y, epochs=2, trainers=2).history) == 2


def test_fixture(client):
    store = made()
    use(store)
    added = client.submit(lambda s: int(s.add({"w": np.ones(2)})), store).result()
    assert added == int(store.version)


def test_local_cluster(loop):
    about = {"processes": False, "dashboard_address": "127.0.0.1:0", "loop": loop}
    with LocalCluster(n_workers=2, threads_per_worker=1, **about) as c, Client(c):
        use(made())


@gen_cluster(client=True)
async def test_coroutine(c, s, a, b):
    store = await made()
    assert await store.push({"w": np.ones(2)}) == 1
    result = await daskps.aio.train(store, gradient, X, Y, epochs=2, trainers=2)
    assert len(result.history) == 2

"""A program for an asynchronous client, as a user writes it."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import daskps
from daskps import aio


def gradient(params: Any, X: NDArray[Any], y: None) -> dict[str, NDArray[Any]]:
    return {"w": params["w"] - X.mean(axis=0)}


def loop(trainer: daskps.Trainer, part: float) -> int:
    trainer.push({"w": np.full(3, part)})
    return trainer.rank


async def verbs(store: aio.AsyncParameterStore) -> None:
    version = await store.push({"w": np.ones(3)}, lr=0.5, timeout="30s")
    assert_type(version, daskps.Version)
    assert_type((await store.pull(min_version=version))["w"].size, int)
    assert_type((await store.pull_async())["w"].ndim, int)
    assert_type(await store.add({"w": np.ones(3)}), daskps.Version)
    assert_type((await store.pushpull({"w": np.ones(3)}))["w"].nbytes, int)
    assert_type(await store.version, int)
    assert_type(await store.versions, tuple[int, ...])
    assert_type(store.names, list[str])
    assert_type(await store.stats(), dict[str, Any])
    assert_type(await store.snapshot(), daskps.Snapshot)
    async with await store.replica(every=2) as replica:
        assert_type(replica, aio.AsyncReplica)
        await replica.step({"w": np.ones(3)})


async def parameters(store: aio.AsyncParameterStore) -> None:
    w: aio.AsyncParameterArray = store["w"]
    emb: aio.AsyncParameterTable = store["emb"]
    assert_type((await store["w"].pull()).size, int)
    assert_type(await store["w"].push(np.ones(3)), daskps.Version)
    assert_type(store["w"].shape, tuple[int, ...])
    assert_type((await w.region(0, 2).pull(out=np.zeros(2))).size, int)
    await w[1:]
    await w.sum()
    assert_type((await store["emb"].pull([1, 2])).size, int)
    assert_type(await store["emb"].push([1], np.ones((1, 2))), daskps.Version)
    assert_type((await emb.pull([[1], [2]], timeout=5)).ndim, int)
    assert_type(await emb.pull_changed(), daskps.Changes)


async def main(client: Any, folder: str) -> None:
    params = {"w": np.zeros(3), "emb": daskps.TableSpec(9, 2)}
    rule = daskps.optim.SGD(0.1)
    async with aio.create(params, name="typed", client=client, optimizer=rule) as store:
        assert_type(store, aio.AsyncParameterStore)
        await verbs(store)
        await parameters(store)
        result = await aio.train(store, gradient, np.eye(3), epochs=2)
        assert_type(result, daskps.TrainResult)
        assert_type(await aio.run(store, loop, [1.0, 2.0]), list[int])
        await store.save(folder)
        assert_type((await aio.list_stores(client=client))[0].name, str)
        async with aio.restore(folder, client=client) as restored:
            assert_type(await restored.version, int)
        opened = await aio.open("typed", client=client)
        assert_type(await opened.version, int)
        assert_type(await aio.delete("typed", client=client), None)

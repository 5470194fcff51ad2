"""Mistakes with a synchronous client; each is a line with the error that it gives."""

from typing import Any

import numpy as np

import daskps


def gradient(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] - X.mean(axis=0)}


def loop(trainer: daskps.Trainer, part: Any) -> int:
    trainer.pull(device="cuda", nams="w")  # error: "nams"
    trainer.tikc()  # error: "tikc"
    return trainer.rank


def sync() -> None:
    store = daskps.create({"w": np.zeros(3)}, shard=2)  # error: "shard"
    store = daskps.create({"w": np.zeros(3)})
    store.pull().shape  # error: "shape"
    store.pull(codecs="bf16")  # error: "codecs"
    store.push({"w": np.ones(3)}, rate=0.1)  # error: "rate"
    store.push([np.ones(3)])  # error: list[
    store.version.major  # error: "major"
    store.snapshot().versions  # error: "versions"
    store["w"].pul()  # error: "pul"
    store["w"].shape.rows  # error: "rows"
    store["emb"].pull([1], devise="cuda")  # error: "devise"
    store["emb"].n_rows.total  # error: "total"
    result = daskps.train(store, gradient, np.eye(3), epoch=3)  # error: "epoch"
    result = daskps.train(store, gradient, np.eye(3))
    result.histroy  # error: "histroy"
    result.history[0].lost  # error: "lost"
    ranks: list[str]
    ranks = daskps.run(store, loop, [1, 2])  # error: "Callable[
    ranks.sort()
    daskps.open("model").save("somewhere").url.path  # error: "path"
    daskps.list_stores()[0].bytes  # error: "bytes"


async def awaited() -> None:
    store = daskps.create({"w": np.zeros(3)})
    await store.pull()  # error: await
    await store["w"].push(np.ones(3))  # error: await
    async with daskps.create({"w": np.zeros(3)}):  # error: __aenter__
        pass

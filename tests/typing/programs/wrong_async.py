"""Mistakes with an asynchronous client; each is a line with the error that it gives."""

from typing import Any

import numpy as np

import daskps
from daskps import aio


def gradient(params: Any, X: Any, y: Any) -> Any:
    return {"w": params["w"] - X.mean(axis=0)}


async def main() -> None:
    store = aio.create({"w": np.zeros(3)})
    await store.pull()  # error: "pull"
    await aio.create({"w": np.zeros(3)}, shard=2)  # error: "shard"
    ready = await aio.create({"w": np.zeros(3)})
    ready.pull()["w"]  # error: Coroutine[
    ready.version + 1  # error: Coroutine[
    ready["w"].pull().shape  # error: "shape"
    ready.names = ["w"]  # error: Never
    with ready:  # error: __enter__
        pass
    await ready.pull(codecs="bf16")  # error: "codecs"
    np.asarray(await ready["w"].pul())  # error: "pul"
    daskps.train(ready, gradient, np.eye(3))  # error: "AsyncParameterStore"
    (await aio.train(ready, gradient, np.eye(3))).histroy  # error: "histroy"

"""The same functions and handles for asynchronous clients, typed as awaitables.

With ``Client(asynchronous=True)`` verbs of a store return awaitables. Type checkers are
told so by the names of this module; at run time these are the objects of `daskps`
itself, and :class:`daskps.ParameterStore` works in both ways.

Examples
--------
>>> import asyncio
>>> from distributed import Client
>>> async def main(address: str) -> None:
...     async with Client(address, asynchronous=True):
...         async with daskps.aio.create({"w": np.zeros(2)}) as store:
...             await store.add({"w": np.ones(2)})
...             print(await store["w"].pull(), await store.version)
>>> asyncio.run(main(client.scheduler.address))
[1. 1.] 1
"""

from daskps.store.array import ParameterArray as AsyncParameterArray
from daskps.store.lifecycle import create, open, restore  # noqa: A004 - as daskps.open
from daskps.store.listed import delete, list_stores
from daskps.store.replica import Replica as AsyncReplica
from daskps.store.store import ParameterStore as AsyncParameterStore
from daskps.store.table import ParameterTable as AsyncParameterTable
from daskps.store.view import predict
from daskps.training.fit import run, train
from daskps.training.watching import progress

__all__ = [
    "AsyncParameterArray",
    "AsyncParameterStore",
    "AsyncParameterTable",
    "AsyncReplica",
    "create",
    "delete",
    "list_stores",
    "open",
    "predict",
    "progress",
    "restore",
    "run",
    "train",
]

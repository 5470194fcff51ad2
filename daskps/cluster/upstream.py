"""What we use of distributed that is untyped or not public, each behind one name.

A change in a release of distributed is mended here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed import Client, Future
from distributed import worker as _worker
from distributed.protocol import pickle as _pickle
from distributed.protocol.serialize import Serialize, to_serialize

# Its home differs between releases of Dask; this name is there in all of them.
from distributed.utils import thread_state  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from distributed.utils import SyncMethodMixin

__all__ = [
    "compute",
    "current_task",
    "done",
    "dumps",
    "frame",
    "future_of",
    "gather",
    "loads",
    "persist",
    "register",
    "release",
    "result",
    "scatter",
    "scatter_all",
    "secede",
    "submit_graph",
    "sync",
    "unframe",
    "worker_client",
]


def dumps(value: Any) -> bytes:
    """Pickle as Dask does, functions of the user's by value."""
    pickled: bytes = _pickle.dumps(value)
    return pickled


def loads(pickled: bytes) -> Any:
    """Undo :func:`dumps`."""
    return _pickle.loads(pickled)


def frame(array: Any) -> Any:
    """Wrap an array so that it travels as a frame of its own, without a copy."""
    return to_serialize(array)


def unframe(value: Any) -> Any:
    """Return what :func:`frame` wrapped, where it never left this process."""
    return value.data if isinstance(value, Serialize) else value


def sync(node: SyncMethodMixin, function: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function on a node's loop, or return its awaitable there."""
    return node.sync(function)


async def result(future: Future[Any]) -> Any:
    """Await a future on its client's loop, also that of a synchronous client."""
    return await future._result()


async def done(future: Future[Any]) -> str:
    """Wait until a future has an outcome; return its status, fetch nothing."""
    state: Any = future._state
    await state.wait()
    return str(future.status)


async def gather(client: Client, futures: Any) -> Any:
    """Fetch the results of a list of futures together."""
    return await client._gather(futures)


def future_of(client: Client, key: Any) -> Future[Any]:
    """Return a future of a key the scheduler knows."""
    return Future(key, client)


def submit_graph(client: Client, graph: Any, keys: Any) -> Any:
    """Submit a graph and return futures in place of the keys."""
    return client.get(graph, keys, sync=False)


async def scatter(client: Client, value: Any, worker: str) -> Future[Any]:
    """Send one value to a worker and return its future."""
    [future] = await scatter_all(client, [value], worker)
    return future


async def scatter_all(
    client: Client, values: list[Any], worker: str
) -> list[Future[Any]]:
    """Send values to a worker and return their futures.

    In a list, because Dask scatters a list or dict element by element; unhashed,
    because hashing reads all of it.
    """
    found: list[Future[Any]] = await client._scatter(
        values, workers=[worker], hash=False
    )
    return found


def compute(client: Client, collection: Any) -> Future[Any]:
    """Return the future of a dask collection's value."""
    future: Future[Any] = client.compute(collection)
    return future


def persist(client: Client, collection: Any) -> Any:
    """Start computing the chunks of a dask collection where they are."""
    return client.persist(collection)


def release(future: Future[Any]) -> None:
    """Tell Dask that a future is no longer wanted."""
    future.release()


def secede() -> None:
    """Take this task's thread out of the worker's pool."""
    _worker.secede()


async def register(client: Client, plugin: Any) -> None:
    """Register a scheduler plugin, once."""
    await client._register_plugin(plugin, plugin.name, True)


def worker_client(worker: Any) -> Client:
    """Return the client of a worker, which submits what its tasks submit."""
    client: Client = worker._get_client()
    return client


def current_task() -> tuple[Any, float] | None:
    """Return key and start of the task this thread runs, None outside tasks."""
    state: Any = thread_state
    key = getattr(state, "key", None)
    return None if key is None else (key, float(state.start_time))

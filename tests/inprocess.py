"""A cluster inside this process: directory, hosts, shards and trainers, without Dask's.

The directory and the hosts are the real ones, each behind a queue of messages that are
copied on their way; all of them are on one event loop, in a thread. What a client of
Dask's would send to workers as a task is called in a thread, with a copy of what it is
given. So `daskps.create`, `daskps.run`, `daskps.train` and all verbs do here what they
do anywhere, on real shards, in a fraction of the time.

No message is ever lost, nobody dies but who is told to, no memory is mapped and
snapshots have no futures to be: that is for the simulator and for real clusters.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from distributed.comm.inproc import new_address
from distributed.core import Status
from tornado.ioloop import IOLoop

from daskps.cluster import upstream
from daskps.cluster.caller.link import Link, using
from daskps.cluster.directory import drains
from daskps.cluster.directory.directory import Directory
from daskps.cluster.host.adoption import leave
from daskps.cluster.host.host import ShardHost
from daskps.cluster.host.node import HOSTS
from daskps.cluster.keys import Anchor, store_of_anchor
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.packing import unpack_reply

_numbers = itertools.count(1)


def copied(message: Any) -> Any:
    """Return a message as it arrives: of its sender's memory nothing is left in it."""
    message = upstream.unframe(message)
    if isinstance(message, np.ndarray):
        return message.copy()
    if isinstance(message, Mapping):
        return {key: copied(value) for key, value in message.items()}
    if isinstance(message, (list, tuple)):
        return tuple(copied(value) for value in message)
    return message


class Door:
    """The messages to one receiver: they are handled as they come, side by side."""

    def __init__(self) -> None:
        self.handlers: dict[str, Callable[..., Awaitable[Any]]] = {}
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks = {asyncio.ensure_future(self._serve())}

    async def ask(self, name: str, /, **message: Any) -> Any:
        """Send a message; return its reply."""
        reply = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((name, copied(message), reply))
        return copied(await reply)

    async def _serve(self) -> None:
        while True:
            task = asyncio.ensure_future(self._answer(*await self._queue.get()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, name: str, message: Any, reply: Any) -> None:
        try:
            found = await self.handlers[name](**message)
        except Exception as error:  # noqa: BLE001 - its sender's
            if not reply.done():
                reply.set_exception(error)
        else:
            if not reply.done():
                reply.set_result(found)


class _Gone(dict[str, Any]):
    """The handlers of a worker that has died: who asks it hears so, or nothing at all."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent

    def __missing__(self, name: str) -> Any:
        if not self._silent:
            raise OSError("nobody is there")

        async def never(**_: Any) -> None:
            await asyncio.Event().wait()

        return never


class Carriers:
    """Asks one receiver as Dask's own objects do: by a method of the message's name."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return partial(self._door.ask, name)


class Hub:
    """What the directory needs of a scheduler."""

    id = "inprocess"
    status = Status.running

    def __init__(self, doors: Mapping[str, Door], names: Sequence[str]) -> None:
        self._doors = doors
        self.handlers, self.extensions = dict[str, Any](), dict[str, Any]()
        self.tasks, self.host_info = dict[Any, Any](), dict[str, Any]()
        self.clients: dict[str, Any] = {}
        self.events: list[tuple[str, Any]] = []
        self.workers = {name: about(name) for name in names}

    @property
    def running(self) -> list[Any]:
        return list(self.workers.values())

    def rpc(self, worker: str) -> Carriers:
        return Carriers(self._doors[worker])

    def log_event(self, topic: str, event: Any) -> None:
        self.events.append((topic, event))

    def client_desires_keys(self, keys: Sequence[str], client: str) -> None:
        self.clients[client] = SimpleNamespace(wants_what=[])

    def client_releases_keys(self, **names: Any) -> None: ...


def about(name: str) -> Any:
    """Return what the scheduler knows of a worker that has come."""
    return SimpleNamespace(
        address=name,
        memory_limit=None,
        resources={},
        status=Status.running,
        metrics={},
    )


class Site:
    """A node for hosts and links; see :class:`daskps.cluster.host.node.WorkerNode`."""

    status = "running"
    asynchronous = False
    memory_limit = None
    pause_share = 1.0

    def __init__(self, cluster: Cluster, address: str) -> None:
        self.address = self.id = address
        self.server, self.loop = self, cluster.loop
        self.scheduler = SimpleNamespace(
            daskps_directory=partial(cluster.hub.ask, "daskps_directory"),
            identity=cluster.identity,
        )
        self._cluster = cluster

    def is_busy(self) -> bool:
        return False

    def is_connected(self) -> bool:
        return True

    def measure(self) -> int:
        return sum(s.nbytes for s in HOSTS[self.address].shards.values())

    def serve(self, name: str, handler: Callable[..., Awaitable[Any]]) -> None:
        self._cluster.doors[self.address].handlers[name] = handler

    async def ask(self, worker: str, method: str, **kwargs: Any) -> Any:
        reply = await self.rpc(worker).daskps_control(method=method, **kwargs)
        return unpack_reply(reply, worker)

    async def directory(self, method: str, **kwargs: Any) -> Any:
        reply = await self.scheduler.daskps_directory(method=method, **kwargs)
        return unpack_reply(reply, "the scheduler")

    def rpc(self, worker: str) -> Carriers:
        return Carriers(self._cluster.doors[worker])

    def _get_client(self) -> Site:
        return self._cluster.client

    # -- a client's -----------------------------------------------------------

    def submit(
        self, function: Callable[..., Any], *args: Any, key: Any = "", **options: Any
    ) -> Result:
        """Call a function in a thread of one of the workers."""
        return self._task(key, (function, *args), options.get("workers"), {})

    def get(self, graph: Any, keys: Any, *, sync: bool) -> Any:
        """Call the functions of a graph, each once those before it have ended."""
        made: dict[Any, Result] = {}
        for layer in graph.layers.values():
            workers = (layer.annotations or {}).get("workers")
            for key, task in layer.items():
                made[key] = self._task(key, task, workers, made)
        return [[made[key] for key in of] for of in keys]

    def _task(
        self, key: Any, task: Any, workers: Any, made: Mapping[Any, Result]
    ) -> Result:
        function, *args = given(task, made)
        worker = next(iter(workers or self._cluster.doors))
        result = Result(self, key)
        before = {id(one): one for one in results_in(args)}.values()
        left, lock = [len(before) + 1], threading.Lock()

        def ready(_: Any = None) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            self._cluster.start(worker, function, args, result.future)

        for one in before:
            one.future.add_done_callback(ready)
        ready()
        return result

    async def _scatter(self, values: Sequence[Any], **_: Any) -> list[Result]:
        found = []
        for value in values:
            found.append(Result(self, f"scattered-{next(_numbers)}"))
            found[-1].future.set_result(upstream.loads(upstream.dumps(value)))
        return found

    async def _gather(self, futures: Sequence[Result]) -> list[Any]:
        return [await future._result() for future in futures]


class Result:
    """What a client's future is here."""

    def __init__(self, client: Site, key: Any) -> None:
        self.client, self.key = client, key
        self.future: Future[Any] = Future()
        self._state = self

    @property
    def status(self) -> str:
        if not self.future.done():
            return "pending"
        return "error" if self.future.exception() else "finished"

    async def wait(self) -> None:
        waiting = asyncio.wrap_future(self.future)
        await asyncio.wait({waiting})
        waiting.exception()  # or asyncio complains that nobody has heard of it

    async def _result(self) -> Any:
        return await asyncio.wrap_future(self.future)

    def release(self) -> None: ...


def given(value: Any, made: Mapping[Any, Result]) -> Any:
    """Return what a graph says with results in place of their keys."""
    if type(value) is tuple and value and isinstance(value[0], str):
        return made.get(value, value)
    if type(value) in (list, tuple):
        return type(value)(given(one, made) for one in value)
    return value


def results_in(value: Any) -> Iterator[Result]:
    """Give all results that a task is called with."""
    if isinstance(value, Result):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from results_in(one)


def resolved(value: Any) -> Any:
    """Return an argument of a task as the task gets it."""
    if isinstance(value, Result):
        return value.future.result()
    if type(value) in (list, tuple):
        return type(value)(map(resolved, value))
    return value


class WayIn(Link):
    """The way of a worker's trainers, or of the client, to the cluster."""

    def __init__(self, site: Any, is_worker: bool) -> None:
        super().__init__(site)
        self.reach = None  # no way to a worker here is ever cut
        self.has_directory = True
        if is_worker:
            self.is_worker, self.owner = True, ("worker", site.address)


class Cluster:
    """Directory, hosts and one client, each behind a queue.

    Attributes
    ----------
    link : Link
        The client's.
    hosts : list of ShardHost
        Those of all workers.
    directory : Directory
        The directory.
    """

    loop: Any
    hub: Door
    client: Site
    link: Link
    directory: Directory

    def __init__(self, n_workers: int = 2) -> None:
        self.doors: dict[str, Door] = {}
        self.hosts: list[ShardHost] = []
        self._links: dict[str, Link] = {}
        self._pool = ThreadPoolExecutor(64, thread_name_prefix="inprocess")
        begun: Future[None] = Future()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._main(n_workers, begun),), name="inprocess"
        )
        self._thread.start()
        begun.result()

    async def _main(self, n_workers: int, begun: Future[None]) -> None:
        self.loop, self._over = IOLoop.current(), asyncio.Event()
        try:
            self._begin([new_address() for _ in range(n_workers)])
        except BaseException as error:
            begun.set_exception(error)
            raise
        begun.set_result(None)
        await self._over.wait()
        for host in self.hosts:
            host.close("the test is over")
            del HOSTS[host.worker.address]
        self.directory.hosts.close()

    def _begin(self, names: Sequence[str]) -> None:
        self.hub = Door()
        scheduler: Any = Hub(self.doors, names)
        self.scheduler = scheduler
        scheduler.handlers = self.hub.handlers
        self.directory = Directory(scheduler)
        for name in names:
            self._add(name)
        self.client = Site(self, f"client-{next(_numbers)}")
        scheduler.clients[self.client.id] = SimpleNamespace(wants_what=[])
        self.link = WayIn(self.client, is_worker=False)

    def _add(self, name: str) -> None:
        self.doors[name] = Door()
        site: Any = Site(self, name)
        host = HOSTS[name] = ShardHost(site, HOST)
        self.hosts.append(host)
        self._links[name] = WayIn(site, is_worker=True)

    async def identity(self) -> dict[str, Any]:
        """Return what the scheduler says of its workers."""
        return {"workers": {name: {"nthreads": 2} for name in self.doors}}

    def start(
        self,
        worker: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        future: Future[Any],
    ) -> None:
        """Call a function in a thread that reaches the cluster from a worker."""

        def call() -> None:
            try:
                with using(self._links[worker]):
                    found = function(*map(resolved, args))
            except BaseException as error:  # noqa: BLE001 - the future's
                future.set_exception(error)
            else:
                future.set_result(found)

        self._pool.submit(call)

    def run(self, function: Callable[..., Any]) -> None:
        """Call a function once: all workers are this process."""
        function(self.hosts[0].worker)

    def end(self, *workers: str, silent: bool = False) -> None:
        """Have workers die at once, and what they hold with them."""

        async def die() -> None:
            for worker in workers:
                self.end_here(worker, silent=silent)

        asyncio.run_coroutine_threadsafe(die(), self.loop.asyncio_loop).result()

    def end_here(self, worker: str, *, silent: bool = False) -> None:
        """Have a worker die, on the loop."""
        host = HOSTS.pop(worker)
        self.hosts.remove(host)
        del self.scheduler.workers[worker]
        self.doors[worker].handlers = _Gone(silent=silent)
        host.close("has died")
        self.directory.worker_left(worker, "died")

    async def retire(self, worker: str) -> None:
        """Have a worker close that Dask has retired, and removed."""
        host = HOSTS[worker]
        del self.scheduler.workers[worker]
        why = "was retired"
        sent = self.directory.worker_left(worker, why, is_retired=True)
        await leave(host, "closes")
        if sent is not None:
            await sent
        self.hosts.remove(HOSTS.pop(worker))
        self.doors[worker].handlers = _Gone(silent=False)

    def join(self) -> str:
        """Have another worker come; return its name."""

        async def come() -> str:
            name = new_address()
            self._add(name)
            self.scheduler.workers[name] = about(name)
            self.directory.worker_came(name)
            return name

        coming = asyncio.run_coroutine_threadsafe(come(), self.loop.asyncio_loop)
        return coming.result()

    def future_of(self, client: Site, key: Any) -> Result:
        """Return the future of a shard's anchor."""
        result = Result(client, key)
        result.future.set_result(Anchor(str(store_of_anchor(key)), key[-1], 0))
        return result

    def close(self) -> None:
        """End all of it."""
        self._pool.shutdown()
        self.loop.add_callback(self._over.set)
        self._thread.join()


@contextmanager
def cluster(n_workers: int = 2) -> Iterator[Cluster]:
    """Have what is done in this thread go to a cluster inside the process."""
    made = Cluster(n_workers)
    try:
        with (
            using(made.link),
            mock.patch.object(upstream, "future_of", made.future_of),
            # A worker that ends here has closed its host before.
            mock.patch.object(drains, "_SAY_SECONDS", 0.0),
        ):
            yield made
    finally:
        made.close()

"""Links: the way of this process to the cluster, through a client or a worker.

A handle binds late. Inside a worker it uses the worker's own connections, never a
client made for the purpose: `get_client` there doubles the connections and blocks a
thread the scheduler may need.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import traceback
from concurrent.futures import InvalidStateError
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from distributed import Client, Worker, get_client, get_worker
from distributed.core import Status
from distributed.utils import SyncMethodMixin

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.caller import interrupts
from daskps.cluster.caller.liveness import Reach
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine.membership import HERE, Machine
from daskps.cluster.protocol.deadline import Deadline, silence
from daskps.cluster.protocol.packing import unpack_reply
from daskps.tracebacks import shown
from daskps.usercode import UserFuture

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterator
    from contextlib import AbstractAsyncContextManager


T = TypeVar("T")


logger = logging.getLogger(__name__)
#: How long a call that is over waits for the end of the work that it leaves behind.
GRACE_SECONDS = 1.5
#: How long the scheduler may take to hear that something is over.
OVER_SECONDS = 5.0
_LOCK = threading.Lock()
#: In a forked process the clients and workers of its parent, whose event loops do
#: not run there.
_PARENTS: list[Client | Worker] = []


class CallFuture(UserFuture[T]):
    """A future of work on an event loop; cancelling it cancels that.

    Parameters
    ----------
    loop : IOLoop
        The event loop.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self._loop = loop
        #: The one thread that wakes the waiting ones after a cancellation holds this
        #: lock.
        self._told = threading.Lock()
        #: Kept so that it is not collected half way.
        self.task: asyncio.Future[T] | None = None

    def take(self, task: asyncio.Future[T]) -> None:
        """Take over the outcome of the task behind the future."""
        error = None if task.cancelled() else task.exception()
        # The caller's thread may cancel it meanwhile.
        with contextlib.suppress(InvalidStateError):
            if task.cancelled():
                self._cancel()
            elif error:
                self.set_exception(error)
            else:
                self.set_result(task.result())

    def cancel(self) -> bool:
        """Cancel the future and the work behind it."""
        done = self._cancel()
        if done:
            self.stop()
        return done

    def _cancel(self) -> bool:
        """Cancel it and wake waiting threads, in `wait` and `as_completed` as well."""
        done = super().cancel()
        # Once: a second call raises. No thread lets go of the lock.
        if done and self._told.acquire(blocking=False):
            self.set_running_or_notify_cancel()
        return done

    def stop(self) -> None:
        """Cancel the work behind it, also where it is about to begin."""

        def cancel() -> None:
            if self.task is not None:
                self.task.cancel()

        self._loop.add_callback(cancel)


class Link(SyncMethodMixin):
    """The way of one process to the scheduler and to the hosts.

    Parameters
    ----------
    node : Client or Worker
        The owner of the event loop and connections that are used.
    """

    def __init__(self, node: Client | Worker) -> None:
        self.node: Any = node
        self.pid = os.getpid()
        self.loop: Any = node.loop
        self.pool = node.rpc
        #: Whether the cluster is known to have a directory and hosts.
        self.has_directory = False
        self._in_process = config.load().process_carrier
        if isinstance(node, Worker):
            self.is_worker, self._asynchronous = True, False
            #: The client or worker with whose end the directory closes this link's
            #: producers.
            self.owner = ("worker", node.address)
        else:
            self.is_worker, self._asynchronous = False, bool(node.asynchronous)
            self.owner = ("client", node.id)
        #: The machine of this process, for memory that it shares with local hosts.
        self.machine: Machine = HERE
        #: Producers of pushes, by store and task.
        self.producers: dict[Any, Any] = {}
        #: Producers for pushes that may be sent again and again, while no push uses
        #: them.
        self.idle_producers: dict[Any, Any] = {}
        #: By uid the holds that keep session stores until this client closes.
        self.holds: dict[str, Any] = {}
        #: Views that a client has, by uid of the store; those of a worker are its host's.
        self.views: dict[str, Any] = {}
        #: Session stores that are being freed, as their last handles are gone.
        self.freeing: set[asyncio.Future[Any]] = set()
        #: By uid of a store the uid of its replacement, as far as this process was
        #: told.
        self.restored: dict[str, str] = {}
        #: The :class:`SocketPool` of its sockets to the hosts, where calls may use these:
        #: see `pool_of`.
        self.socket_pool: Any = None
        #: Knows workers that a client cannot reach. Between workers a run waits on.
        self.reach = None if self.is_worker else Reach(node, self._forget)
        #: Work that goes on after its call: the event loop alone would not keep it
        #: alive.
        self._background: set[asyncio.Future[Any]] = set()

    @property
    def live(self) -> bool:
        """Whether the client or worker can still be used."""
        if self.pid != os.getpid():
            return False
        status = self.node.status
        name = status if isinstance(status, str) else status.name
        return name not in ("closed", "closing", "failed")

    @property
    def has_scheduler(self) -> bool:
        """Whether there is a connection to the scheduler, as far as Dask has heard."""
        return self.live and self.node.status != "connecting"

    def may_wait(self) -> bool:
        """Return whether this thread may wait for a call, of a node that runs.

        It takes few steps, as every call asks; where it says no, `live` and
        `asynchronous` say why.
        """
        status = self.node.status
        if status is not Status.running and status != "running":
            return False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        return (
            not self._asynchronous
            and (loop is None or loop is not self.loop.asyncio_loop)
            and self.pid == os.getpid()
        )

    @property
    def client(self) -> Client:
        """The client, or a worker's own where a graph must be submitted."""
        client: Client = (
            upstream.worker_client(self.node) if self.is_worker else self.node
        )
        return client

    async def directory(self, method: str, **kwargs: Any) -> Any:
        """Send a message to the directory."""
        scheduler = self.node.scheduler
        if scheduler is None:
            raise self._ended()
        self._check_live()
        reply = await scheduler.daskps_directory(method=method, **kwargs)
        return unpack_reply(reply, "the scheduler")

    async def control(self, worker: str, method: str, **kwargs: Any) -> Any:
        """Send a control message to the host on a worker."""
        reply = await self.reply(worker, method, **kwargs)
        return unpack_reply(reply, f"worker {worker}")

    async def reply(self, worker: str, method: str, **kwargs: Any) -> Any:
        """Return a host's answer as it is; raise only errors of the connection."""
        if self._in_process and worker in HOSTS:
            host = HOSTS[worker]
            if host.worker.loop is self.loop:
                return await host.handle_control(method, **kwargs)
        return await self.rpc(worker, "daskps_control", method=method, **kwargs)

    async def rpc(self, worker: str, op: str, **kwargs: Any) -> Any:
        """Call a handler of a worker directly.

        `ShardHost` registers them by name: "daskps_call" is its `handle_call`,
        "daskps_control" its `handle_control`. That one serves a method by the function
        that `HOST.handles` has marked with its name.
        """
        self._check_live()
        async with self.reaching(worker):
            return await getattr(self.pool(worker), op)(**kwargs)

    def reaching(self, worker: str) -> AbstractAsyncContextManager[None]:
        """End a question to a worker once this client cannot reach the worker."""
        if self.reach is None:
            return contextlib.nullcontext()
        return self.reach.over(worker)

    def _forget(self, worker: str) -> None:
        if self.socket_pool is not None:
            self.socket_pool.close_idle(worker)

    def _check_live(self) -> None:
        """Refuse to send after the end: Dask would only call the connection closed."""
        if not self.live:
            raise self._ended()

    def _ended(self) -> OSError:
        return OSError(
            f"{self.node} was closed, or has lost its scheduler for too long; open the "
            f"store again with another client"
        )

    async def within(
        self,
        function: Callable[[], Awaitable[T]],
        seconds: float | None,
        what: str,
        silent: Collection[str] = (),
    ) -> T:
        """Await a function's work, or raise a TimeoutError after `seconds`.

        The error names the work, and the workers that are `silent` then; a TimeoutError
        of the work itself passes as it is. It takes a function so that a cancellation
        before the work begins leaves nothing unawaited.
        """
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                return await function()
        except TimeoutError as late:
            if not scope.expired():
                raise
            if late.__cause__ is not None:
                # Else futures in them stay with the cluster until garbage is collected.
                traceback.clear_frames(late.__cause__.__traceback__)
            deadline = Deadline(seconds, what)
            raise deadline.error(silence(silent), changes=False) from None

    async def wind_up(self, work: Awaitable[Any]) -> None:
        """Await work that a call leaves behind for a moment; then it goes on alone.

        It is not cancelled with its caller, and an error of it is logged.
        """
        await asyncio.wait({self.keep(work)}, timeout=GRACE_SECONDS)

    def keep(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Begin work on the event loop that goes on alone; log an error of it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._wound_up)
        return task

    async def over(self, method: str, **kwargs: Any) -> None:
        """Tell the directory that work which a call began is over; for `wind_up`.

        Where that fails the caller has an error that says more.
        """
        await asyncio.wait_for(self.directory(method, **kwargs), OVER_SECONDS)

    def free(self, uid: str) -> None:
        """Have a session store freed whose last handle is gone.

        Python may collect garbage in any thread, between any two lines: this only hands
        the work over to the event loop.
        """
        if self.live:
            self.loop.add_callback(self._free, uid)

    def _free(self, uid: str) -> None:
        freeing = self.keep(self.over("close", uid=uid))
        self.freeing.add(freeing)
        freeing.add_done_callback(self.freeing.discard)

    def latest(self, uid: str) -> str:
        """Return the uid of a store's latest replacement, as known here, or its own."""
        while uid in self.restored:
            uid = self.restored[uid]
        return uid

    def _wound_up(self, task: asyncio.Future[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.info("what a call left behind ended with %r", error)

    def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function from a thread, or hand its awaitable over.

        Raises
        ------
        RuntimeError
            On a worker's event loop, which must not block.
        """
        if self.is_worker and self.asynchronous:
            raise RuntimeError(
                "a store's blocking methods were called on a worker's event loop, "
                "which would stop the worker; use pull_async and push_async there "
                "and await them, or make the task a plain function"
            )
        work = shown(function) if self.asynchronous else function
        result: T = upstream.sync(self, work)
        return result

    def run_beside(self, function: Callable[[], Awaitable[T]]) -> T:
        """As :meth:`run`, for work that waits for tasks; a task leaves its pool for it.

        Tasks that fill all threads would wait for ever for the tasks behind them.
        """
        if self.asynchronous:
            return self.run(function)
        with upstream.stepped_aside():
            return self.run(function)

    def start(self, function: Callable[[], Awaitable[T]]) -> CallFuture[T]:
        """Start a coroutine function on the loop and return its future at once."""
        future: CallFuture[T] = CallFuture(self.loop)

        work = shown(function)  # an error that it raises at once is the task's, too

        def begin() -> None:
            if not future.cancelled():
                task = asyncio.ensure_future(work())
                task.add_done_callback(future.take)
                future.task = task

        self.loop.add_callback(begin)
        return future


_LINKS: dict[int, Link] = {}


def _in_child() -> None:
    """Forget the links of the parent in a forked process."""
    _PARENTS.extend(link.node for link in _LINKS.values())
    _PARENTS.extend(host.worker.server for host in HOSTS.values())
    HOSTS.clear()
    _LINKS.clear()


os.register_at_fork(after_in_child=_in_child)


def link_of(node: Client | Worker) -> Link:
    """Return the link of a client or worker, one for each."""
    if any(node is old for old in _PARENTS):
        raise RuntimeError(
            "a store cannot be used in a forked process, whose connections are its "
            "parent's; pull before the fork, or start the process by spawn and open "
            "the store there with a client of its own"
        )
    with _LOCK:
        link = _LINKS.get(id(node))
        if link is None or link.node is not node or not link.live:
            link = _LINKS[id(node)] = Link(node)
            upstream.at_close(node, "daskps-links", _forget_closed)
        return link


def _forget_closed() -> None:
    """Forget links of closed nodes; the last one ends the threads of calls."""
    with _LOCK:
        for key in [k for k, link in _LINKS.items() if not link.live]:
            link = _LINKS.pop(key)
            # Their finalizers know the link, and with it the client.
            link.holds.clear()
            link.views.clear()
            if link.reach is not None:
                link.loop.add_callback(link.reach.close)
    if not _LINKS:
        interrupts.end()


#: The link that :func:`using` has given to the code of this context.
_GIVEN: ContextVar[Link | None] = ContextVar("daskps-link", default=None)


@contextlib.contextmanager
def using(link: Link) -> Iterator[None]:
    """Have the code of a block, and none of other threads, reach the cluster by a link.

    For code that is no task of Dask's and has no client of Dask's.
    """
    token = _GIVEN.set(link)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def task_link() -> Link:
    """Return the link of the worker whose task this is.

    Raises
    ------
    ValueError
        Outside tasks.
    """
    return _GIVEN.get() or link_of(get_worker())


def current_link(client: Client | None = None) -> Link:
    """Return the nearest way to the cluster from here.

    The given client, else the link that is given here, else the worker whose task this
    is, else Dask's current client, else the one worker of this process.

    Raises
    ------
    ValueError
        When there is none of these.
    TypeError
        For a `client` that is none.
    """
    if client is not None:
        if not isinstance(client, (Client, Worker)):
            raise TypeError(
                f"client is a distributed.Client, found {client!r:.60}; make one with "
                f"client = distributed.Client(...)"
            )
        if (link := link_of(client)).live:
            return link
        raise ValueError(
            f"{client} is closed; make another one with client = distributed.Client()"
        )
    try:
        return task_link()
    except ValueError:
        pass
    try:
        return link_of(get_client())
    except ValueError:
        hosts = list(HOSTS.values())
        if len(hosts) == 1:
            return link_of(hosts[0].worker.server)
        raise ValueError(
            "there is no Dask client here to reach a cluster with, and one whose scheduler "
            "is gone has closed; make one with client = distributed.Client(), or "
            "Client(address) for a cluster that runs already"
        ) from None


def blocking_link(what: str, client: Client | None = None) -> Link:
    """Return the link of :func:`current_link`; refuse one that returns awaitables.

    Raises
    ------
    TypeError
        With the text, for a client whose calls return awaitables.
    """
    link = current_link(client)
    if link.asynchronous:
        raise TypeError(f"{what}: give it a client that is not asynchronous")
    return link

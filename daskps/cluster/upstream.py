"""The untyped or private parts of distributed that we use, each behind one name.

Also all that changes what distributed does: its servers' handlers and metrics, what
they measure, what they log. A change in a release of distributed is mended here.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeGuard

from dask._expr import Expr
from dask.base import is_dask_collection
from dask.core import flatten
from distributed import Client, Future, KilledWorker, rpc
from distributed import worker as _worker
from distributed.comm import tcp as _tcp
from distributed.core import Status
from distributed.protocol import pickle as _pickle
from distributed.protocol.serialize import (
    Serialize,
    Serialized,
    serialize,
    to_serialize,
)
from distributed.security import Security
from distributed.threadpoolexecutor import rejoin as _rejoin
from distributed.threadpoolexecutor import thread_state as _pool_state

# Its home differs between releases of Dask; this name is there in all of them.
from distributed.utils import thread_state  # type: ignore[attr-defined]  # not declared as exported

from daskps import config
from daskps.errors import ProtocolError
from daskps.usercode import holding_interrupts, user_code

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    from distributed import Nanny, Scheduler, Worker
    from distributed.utils import SyncMethodMixin

#: Errors that Dask raises of a task whose worker, or what was there, is gone.
LOSSES = (CancelledError, KilledWorker)
_RUNNING = (Status.running, Status.paused, Status.closing_gracefully)


def dumps(value: Any) -> bytes:
    """Pickle as Dask does, functions of the user's by value."""
    with user_code("what was to be pickled"):
        pickled: bytes = _pickle.dumps(value)
    return pickled


def loads(pickled: bytes) -> Any:
    """Undo :func:`dumps`."""
    # On an event loop, which may be the main thread's, nobody else must raise Ctrl-C.
    with holding_interrupts(), user_code("what was pickled"):
        try:
            return _pickle.loads(pickled)
        except (UnpicklingError, EOFError) as error:
            raise ProtocolError(f"{len(pickled)} bytes that are no pickle") from error


def check_travels(value: Any, what: str) -> None:
    """Refuse what Dask could not send from here to another process.

    Its own error comes where it is received: a text of nested tracebacks.

    Raises
    ------
    TypeError
        Naming what cannot, and why.
    """
    try:
        serialize(value, on_error="raise")
    except Exception as error:  # noqa: BLE001 - a user's, whatever pickling it raises
        why = error.__cause__ or error
        raise TypeError(
            f"{what} is a {type(value).__name__} that cannot be pickled ({why}); return "
            f"arrays, numbers and other plain values"
        ) from None


def frame(array: Any) -> Any:
    """Wrap an array so that it travels as a frame of its own, without a copy.

    And in one piece: Dask cuts what is longer than ``distributed.comm.shard``, and its
    receiver joins the pieces by copying, save those of a message's first array. Dask
    sends a value that is serialized already as it is, also uncompressed: where
    connections compress, such an array is left to Dask.
    """
    if array.nbytes <= _tcp.TCP.max_shard_size or config.compresses():
        return to_serialize(array)
    whole: Any = Serialized(*serialize(array))
    whole.data = array
    return whole


def unframe(value: Any) -> Any:
    """Return what :func:`frame` wrapped, where it never left this process."""
    if isinstance(value, Serialize | Serialized):
        return vars(value).get("data", value)
    return value


def sync(node: SyncMethodMixin, function: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function on a node's loop, or return its awaitable there."""
    return node.sync(function)


async def result(future: Future[Any]) -> Any:
    """Await a future on its client's loop, also that of a synchronous client.

    Shielded: a client fetches results together, and a task cancelled while waiting
    for a batch would cancel it for all others.
    """
    return await _shielded(future._result())


async def _shielded(work: Awaitable[Any]) -> Any:
    """Await something that goes on where the caller is cancelled."""
    task = asyncio.ensure_future(work)
    # Or asyncio complains of an error that nobody is left to hear of.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


async def results(client: Client, futures: Sequence[Future[Any]]) -> list[Any]:
    """Await several futures on their client's loop, in one message."""
    found: list[Any] = await _shielded(client._gather(list(futures)))
    return found


def future_of(client: Client, key: Any) -> Future[Any]:
    """Return a future of a key the scheduler knows."""
    return Future(key, client)


def submit_graph(client: Client, graph: Any, keys: Any) -> Any:
    """Submit a graph and return futures in place of the keys."""
    return client.get(graph, keys, sync=False)


def unrunnable(scheduler: Scheduler) -> list[Any]:
    """Return the keys of tasks that wait for a worker they may run on."""
    return [ts.key for ts in scheduler.unrunnable]


def let_run_anywhere(scheduler: Scheduler, keys: Iterable[Any]) -> None:
    """Have tasks that wait for a worker run on any, where those they prefer are gone.

    A scheduler without workers sets tasks aside, and of a worker that comes then it gives
    them none that prefer others (`allow_other_workers`): they would wait for ever.
    """
    found = [scheduler.tasks[key] for key in keys]
    lost = [
        ts.key
        for ts in found
        if ts.loose_restrictions
        and ts.worker_restrictions
        and ts.worker_restrictions.isdisjoint(scheduler.workers)
    ]
    scheduler.set_restrictions(worker=dict.fromkeys(lost, ()))


async def computed(*futures: Future[Any]) -> None:
    """Wait for futures on their client's loop and leave the results where they are.

    Raises
    ------
    Exception
        The error of the first task that failed, or that it was cancelled.
    """
    for future in futures:
        # Not None: only a future that was unpickled without a client has no state.
        state: Any = future._state
        await state.wait()
        if future.status != "finished":
            await future._result()


async def scatter(client: Client, values: list[Any], worker: str) -> list[Future[Any]]:
    """Send values to a worker and return their futures.

    In a list, because Dask scatters a list or dict element by element; unhashed,
    because hashing reads all of it.

    Raises
    ------
    OSError
        If the worker has gone.
    """
    # Shielded: of a scatter that is cut short the data stays, and nobody has futures.
    sending = _shielded(client._scatter(values, workers=[worker], hash=False))
    try:
        found: list[Future[Any]] = await sending
    except KeyError as error:  # what the scheduler raises where it knows it no more
        if error.args != (worker,):
            raise
        raise OSError(f"worker {worker} has gone") from None
    return found


def compute(client: Client, collection: Any) -> Future[Any]:
    """Return the future of a dask collection's value."""
    future: Future[Any] = client.compute(collection)
    return future


def compute_all(client: Client, collections: Sequence[Any]) -> list[Future[Any]]:
    """Return the futures of several collections' values, with what they share run once.

    In two graphs: beside others Dask optimizes expressions one by one, and says so. The
    others it leaves as they are: those of a kind are fused alone, also with what another
    kind needs of them.
    """
    found: dict[int, Future[Any]] = {}
    for expressed in (False, True):
        members = [
            i for i, c in enumerate(collections) if _is_expressed(c) is expressed
        ]
        if members:
            chosen = [collections[i] for i in members]
            futures = client.compute(chosen, optimize_graph=False)
            found.update(zip(members, futures, strict=True))
    return [found[i] for i in range(len(collections))]


def _is_expressed(collection: Any) -> bool:
    """Whether Dask has an expression of it, such as of a DataFrame, rather than a graph."""
    return isinstance(getattr(collection, "expr", None), Expr)


def persist(client: Client, values: Sequence[Any]) -> list[Any]:
    """Start computing the chunks of dask collections where they are, in one graph.

    Chunks that are futures stay what they are; the futures in the result are new
    objects, so that dropping them drops nothing of the caller's. A value that is no
    collection is returned as it is.
    """
    lazy = [value for value in values if is_dask_collection(value)]
    stored = iter(client.persist(lazy) if lazy else ())
    return [next(stored) if is_dask_collection(value) else value for value in values]


def chunk_futures(persisted: Any) -> list[list[Future[Any]]]:
    """Return the futures of a persisted collection, one list per chunk of axis 0."""
    graph = persisted.__dask_graph__()
    return [
        [graph[key] for key in flatten([keys])] for keys in persisted.__dask_keys__()
    ]


def is_future(value: Any) -> bool:
    """Whether it is a future of Dask's."""
    return isinstance(value, Future)


def own(client: Client, future: Future[Any]) -> Future[Any]:
    """Return a future of the same result that this client can wait for."""
    if future.client is client or future.status in ("cancelled", "error"):
        return future
    found: Future[Any] = Future(future.key, client)
    # As an unpickled future does: else the scheduler never tells this client of it.
    client._send_to_scheduler(
        {"op": "client-desires-keys", "keys": [future.key], "client": client.id}
    )
    return found


def release(future: Future[Any]) -> None:
    """Tell Dask that a future is no longer wanted."""
    future.release()


def secede() -> None:
    """Take this task's thread out of the worker's pool; outside tasks do nothing."""
    try:
        _worker.get_worker()
    except ValueError:
        return
    _worker.secede()


@contextmanager
def stepped_aside() -> Iterator[None]:
    """Leave a worker's thread pool for a while, if this is one of its threads.

    A task may wait for something that needs the very thread it runs in.
    """
    in_pool = getattr(_pool_state, "proceed", False)
    if in_pool:
        _worker.secede()
    try:
        yield
    finally:
        if in_pool:
            _rejoin()


@asynccontextmanager
async def connection(
    address: str, seconds: float, args: Mapping[str, Any] | None = None
) -> AsyncIterator[Any]:
    """Connect to a server of Dask's as a client does, but register nothing there.

    `seconds` is for each try to connect. TLS is as Dask's configuration says, where
    no `args` of a client's connections are given.
    """
    security = args or Security().get_connection_args("client")
    node: Any = rpc(address, timeout=seconds, connection_args=security)
    try:
        yield node
    finally:
        await node.close_rpc()


class _AtClose:
    """Stands among the timers of a client or worker, to hear when it closes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.stop = function

    def start(self) -> None:
        """Do nothing: it is no timer."""

    def is_running(self) -> bool:
        """Return that nothing need be started."""
        return True


def at_close(node: Any, name: str, function: Callable[[], None]) -> None:
    """Have a function called when a client or worker closes, once for each name.

    On its event loop. The function may be called more than once.
    """
    is_client = isinstance(node, Client)
    timers = node._periodic_callbacks if is_client else node.periodic_callbacks
    timers.setdefault(name, _AtClose(function))


async def register(client: Client, plugin: Any) -> None:
    """Register a scheduler plugin, once."""
    await client._register_plugin(plugin, plugin.name, True)


def worker_client(worker: Any) -> Client:
    """Return the client of a worker, which submits what its tasks submit."""
    client: Client = worker._get_client()
    return client


async def connected(client: Client) -> None:
    """Wait until the scheduler knows a client.

    That of a worker is made when a task needs it first, and connects meanwhile.
    """
    if client.status in ("newly-created", "connecting"):
        await client


def workers() -> list[Any]:
    """Return the workers that run in this process, of whatever cluster."""
    while True:
        try:
            # Starting ones have loaded no data yet, closing ones are not looked after.
            return [w for w in _worker.Worker._instances if w.status in _RUNNING]
        except RuntimeError:  # another thread has just made one
            continue


def add_handlers(server: Any, handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Have a worker or scheduler answer messages of ours.

    Parameters
    ----------
    server : Worker or Scheduler
        The server.
    handlers : mapping of str to callable
        The handler of each kind of message, by the name of its operation.
    """
    server.handlers.update(handlers)


def add_metric(worker: Worker, name: str, measure: Callable[[Worker], Any]) -> None:
    """Have a worker tell the scheduler a figure of ours with each heartbeat."""
    metrics: Any = worker.metrics
    metrics[name] = measure


def measure_memory_by(
    worker: Worker, correct: Callable[[Callable[[], int]], int]
) -> None:
    """Have a worker measure its memory by a function of ours.

    Parameters
    ----------
    worker : distributed.Worker
        The worker; it spills and pauses by that figure, and tells the scheduler.
    correct : callable
        Gets the measure it had before, and returns bytes.
    """
    monitor: Any = worker.monitor
    monitor.get_process_memory = partial(correct, monitor.get_process_memory)


def nanny_look(nanny: Nanny) -> Callable[[], Any] | None:
    """Return how a nanny looks at its worker's memory, None where it does not."""
    timer: Any = nanny.periodic_callbacks.get("memory_monitor")
    look: Callable[[], Any] | None = None if timer is None else timer.callback
    return look


def set_nanny_look(nanny: Nanny, look: Callable[[], Any]) -> None:
    """Have a nanny look at its worker's memory in another way."""
    timer: Any = nanny.periodic_callbacks["memory_monitor"]
    timer.callback = look


def add_pages(
    scheduler: Scheduler, pages: Mapping[str, Callable[..., None]], link: str
) -> bool:
    """Add pages to a scheduler's dashboard, and a link to one of them.

    They are served beside Dask's own by one application, which comes first: JupyterLab
    lists the pages of the first one only.

    Parameters
    ----------
    scheduler : Scheduler
        The scheduler, which serves its dashboard already.
    pages : mapping of str to callable
        By path functions of scheduler, variables of templates and document.
    link : str
        The page that all others have a link to.

    Returns
    -------
    bool
        Whether there is a dashboard.
    """
    applications = getattr(scheduler.http_application, "applications", [])
    shown = [app for app in applications if hasattr(app, "app_paths")]
    if not shown:
        return False
    from distributed.dashboard import core
    from distributed.dashboard import scheduler as dashboard

    # The same object for all pages of the scheduler.
    variables = dashboard.template_variables(scheduler)
    variables["pages"].append(link)
    every = {**dashboard.applications, **pages}
    about = {"prefix": shown[0].prefix, "template_variables": variables}
    application = core.BokehApplication(every, scheduler, **about)
    applications.insert(0, application)
    application.initialize(scheduler.loop)
    application.start()
    return True


def metric_names(subsystem: str) -> Callable[[str], str]:
    """Return how metrics of a subsystem are named, in the namespace of Dask's own."""
    from distributed.http.prometheus import PrometheusCollector

    of: Any = PrometheusCollector(None)
    of.subsystem = subsystem
    named: Callable[[str], str] = of.build_name
    return named


def update_page(doc: Any, component: Any, pause_ms: int) -> None:
    """Have a component of a page updated again and again while it is open."""
    from distributed.dashboard.components import add_periodic_callback

    add_periodic_callback(doc, component, pause_ms)


def dress_page(doc: Any, title: str, variables: Mapping[str, Any] | None) -> None:
    """Give a page the look of Dask's own, and with variables the navigation."""
    from distributed.dashboard.components import scheduler as dashboard

    doc.title, doc.theme = f"Dask: {title}", dashboard.BOKEH_THEME
    if variables is not None:
        doc.template = dashboard.env.get_template("simple.html")
        doc.template_variables.update(variables)


class _Shortened(logging.Filter):
    """One line for a task of ours that failed: its caller gets error and traceback.

    Dask logs "Compute Failed" with key, state, task, error and all frames on a line.
    """

    def __init__(self, ours: str) -> None:
        super().__init__()
        self._ours = ours

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite the record of a failure; return whether it is worth a line."""
        args = record.args
        if not (str(record.msg).startswith("Compute Failed") and _is_long(args)):
            return True
        key, error = args[0], str(args[3])
        name = key[0] if isinstance(key, tuple) else key
        # Not at its begin only: Dask joins the names of tasks that it fuses. An
        # error that nobody should ever see keeps its frames.
        if self._ours not in str(name) or error.startswith("IllegalState"):
            return True
        # Another trainer's error ended the run of this one; or the worker is closing,
        # and nobody is left to hear what came of the task.
        if error.startswith("RunCancelledError(") or not workers():
            return False
        record.msg = "%s failed: %s (its caller gets the traceback)"
        record.args = (key, error if len(error) <= 500 else f"{error[:500]}...")
        return True


def _is_long(args: object) -> TypeGuard[tuple[Any, ...]]:
    return isinstance(args, tuple) and len(args) >= 4


_shortened = cache(_Shortened)


def shorten_failures(ours: str) -> None:
    """Have this process's workers log the failures of tasks so named in one line."""
    _worker.logger.addFilter(_shortened(ours))  # once, however often this is called


def current_task() -> tuple[Any, float] | None:
    """Return key and start of the task this thread runs, None outside tasks."""
    state: Any = thread_state
    key = getattr(state, "key", None)
    return None if key is None else (key, float(state.start_time))

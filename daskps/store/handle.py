"""A light, picklable handle: its store, how it binds to a cluster, and how it calls.

Where a shard of its store is lost, and the store is restored from a checkpoint, a
handle says so once and goes on with the restored one.
"""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from daskps import config
from daskps.cluster.caller import recovery, snapshots
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.link import Link, current_link
from daskps.cluster.caller.producer import Producer, Turn, producer_of
from daskps.cluster.caller.questions import name_applied
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.upstream import current_task
from daskps.errors import (
    DaskPSError,
    IllegalStateError,
    PushRejectedError,
    ShardLostError,
    StaleGenerationError,
    StoreClosedError,
    StoreNotFoundError,
    StoreRestoredError,
)
from daskps.store.repr import store_html, store_line
from daskps.tracebacks import hide

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from daskps.cluster.caller.lifetime import Hold
    from daskps.cluster.caller.producer import Repeated
    from daskps.cluster.caller.routes import Reply, Request
    from daskps.cluster.caller.snapshots import Taken
    from daskps.layout.arrays import Layout

T = TypeVar("T")
#: Errors of a call after which the store may have been restored, or may have to be.
LOST = ShardLostError, StoreClosedError, StoreNotFoundError
ELSEWHERE = (*LOST, StaleGenerationError)
DEFAULT = config.DEFAULT
#: Number of a push that gets its real number with its turn, in fewer calls.
_NEXT: Sequence[int] = (-1,)


class Handle:
    """A handle of a store, which binds to the cluster where it finds itself.

    It knows nothing of parameters; each verb goes through :meth:`_do`, or through
    :meth:`_with_shards` where the event loop does its work.

    Parameters
    ----------
    uid, name : str
        The store.
    """

    def __init__(self, uid: str, name: str) -> None:
        self.uid = uid
        self.name = name
        #: The uid of the first store that this one has the place of. It makes handles
        #: equal: the uid is another one once the store was restored.
        self._origin = uid
        #: Why this handle cannot be used any more, and what can.
        self._closed = ""
        self._link: Link | None = None
        self._shards: ShardClient | None = None
        #: Set by `bound`: the producer of the task that made it.
        self._producer: Producer | None = None
        #: Of a session store, where it was made; shared by all that must keep it.
        self._hold: Hold | None = None

    @classmethod
    def _of(
        cls,
        meta: StoreMap,
        link: Link,
        producer: Producer | None = None,
        hold: Hold | None = None,
    ) -> Self:
        """Return a handle that is bound already; it may push as one producer."""
        store = cls(meta.known_as, meta.name)
        store._origin = meta.origin
        store._link = link
        store._shards = ShardClient(link, meta)
        store._producer = producer
        store._hold = hold
        return store

    # -- identity ------------------------------------------------------------

    def __reduce__(self) -> Any:
        if self._hold is not None:
            self._hold.note_pickled()
        # The nonce: Dask names a task by its arguments, also those captured in a
        # closure, and would run two equal calls once.
        known = self.uid, self.name, self._origin
        return _rebuild, (type(self), known, uuid.uuid4().hex)

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.uid, uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other._origin == self._origin

    def __hash__(self) -> int:
        return hash(self._origin)

    def __repr__(self) -> str:
        return store_line(self.name, self._meta_if_known(), self._end_told())

    def _repr_html_(self) -> str:
        meta, ends = self._meta_if_known(), self._end_told()
        return store_html(self.name, meta, self._last_versions, ends)

    def _end_told(self) -> str:
        """Return when a session store is freed, in words; "" of a named one."""
        if (meta := self._meta_if_known()) is None or not meta.session:
            return ""
        is_kept = self._hold is None or self._hold.is_kept
        return f"; freed with its {'client' if is_kept else 'last handle'}"

    _last_versions: tuple[int, ...] = ()

    def _meta_if_known(self) -> StoreMap | None:
        return self._shards.meta if self._shards else None

    @property
    def layout(self) -> Layout:
        """Names, shapes, dtypes and how they are cut into shards."""
        try:
            return self._attached().meta.layout
        except BaseException as error:
            hide(error)
            raise

    # -- binding -------------------------------------------------------------

    def _bind(self) -> Link:
        """Return the way to the cluster from where this is called."""
        if self._closed:
            raise StoreClosedError(self._closed)
        if self._link is None or not self._link.live:
            self._link = current_link()
            self._shards = None
        return self._link

    async def _attach(self, link: Link) -> ShardClient:
        """Return what routes calls, asking the directory the first time."""
        if self._shards is None or self._shards.link is not link:
            # A handle that comes here by a task says once in a process what was lost.
            uid = self.uid = link.latest(self.uid)
            try:
                wire = await link.directory("find", uid=uid)
            except StoreRestoredError as error:
                self._go_on(link, uid, error)
                raise
            self._shards = ShardClient(link, StoreMap(wire))
        return self._shards

    async def _attach_within(self, link: Link, deadline: Deadline) -> ShardClient:
        left = deadline.remaining()
        return await link.within(partial(self._attach, link), left, deadline.what)

    def _attached(self, deadline: Deadline | None = None) -> ShardClient:
        """Return what routes calls, asking the directory the first time."""
        link = self._bind()
        if self._shards is not None and self._shards.link is link:
            return self._shards
        if link.asynchronous and not link.is_worker:
            raise RuntimeError(
                f"store {self.name!r} has not met this cluster yet; await one of its "
                f"methods first"
            )
        within = deadline or Deadline(config.deadline(), f"store {self.name!r}")
        return link.run(lambda: self._attach_within(link, within))

    def bound(self) -> Self:
        """Return a handle for threads that a task starts.

        Dask knows which task a thread runs only in the task's own thread. The bound
        handle takes that along: it uses this worker, and its pushes count as pushes
        of this task.

        Returns
        -------
        ParameterStore
            A handle that stays in this process.

        Raises
        ------
        ValueError
            Where neither a client nor a worker is there to bind to.
        StoreNotFoundError, StoreClosedError, TimeoutError
            If the store is gone, or the directory does not answer.

        Examples
        --------
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> def task(store):
        ...     mine = store.bound()
        ...     with ThreadPoolExecutor(2) as pool:
        ...         deltas = [{"w": np.ones(2)}] * 4
        ...         return [int(version) for version in pool.map(mine.add, deltas)]
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> sorted(client.submit(task, store).result())
        [1, 2, 3, 4]
        """
        shards = self._attached()
        producer = self._producer_here(shards.link)
        return self._of(shards.meta, shards.link, producer, self._hold)

    def _producer_here(self, link: Link) -> Producer:
        """Return the identity of pushes from this thread: its task, or the handle."""
        if self._producer is not None:
            return self._producer
        task = current_task() if link.is_worker else None
        # Numbers go on where the store is restored: a task that runs again begins with
        # what it has pushed to the one that was lost.
        return producer_of(link, self._origin, task)

    # -- where a shard is lost -------------------------------------------------

    async def _tell_loss(
        self, link: Link, uid: str, error: DaskPSError, deadline: Deadline
    ) -> None:
        """Raise what a call has to say that found its store lost, or gone.

        Where the store is restored this handle goes on with what has its place. Returns
        where the error itself is to be raised.
        """
        found: DaskPSError = error
        try:
            if self._recovers(error):
                found = await recovery.after_loss(link, uid, error, deadline)
            if isinstance(found, StoreRestoredError):
                seen = max(self._last_versions, default=0)
                found = recovery.known_to(found, seen)
                self._go_on(link, uid, found)
            if found is not error:
                raise found from None
        finally:
            # It has this frame in its traceback, and shards in that of the caller.
            del found, error

    def _recovers(self, error: DaskPSError) -> bool:
        """Return whether the directory may know more than an error says."""
        if isinstance(error, StoreRestoredError):
            return False
        meta = self._meta_if_known()
        if meta is None:
            # Else the directory has said it.
            return isinstance(error, ShardLostError)
        return meta.recovers

    def _go_on(self, link: Link, uid: str, error: StoreRestoredError) -> None:
        """Go on with what has the place of a store, which this process knows by now."""
        link.restored[uid] = error.uid
        if self.uid == uid:
            self.uid, shards, self._shards = error.uid, self._shards, None
            self._last_versions = ()
            if shards is not None:
                shards.close()

    async def _guarded(
        self, link: Link, work: Callable[[], Awaitable[T]], deadline: Deadline
    ) -> T:
        """Do some work of this store; where that is lost, have it restored."""
        uid = self.uid
        try:
            return await work()
        except LOST as error:
            await self._tell_loss(link, uid, error, deadline)
            raise

    # -- how it calls ----------------------------------------------------------

    def _deadline(self, timeout: Any, what: str) -> Deadline:
        if type(timeout) is Deadline:  # of what this call is a part of
            return timeout
        return Deadline(config.deadline(timeout), f"{what} of store {self.name!r}")

    def _at_hand(self) -> ShardClient | None:
        """Return what routes calls, where that is known and this thread may wait."""
        shards = self._shards
        if self._closed or shards is None or shards.link is not self._link:
            return None
        return shards if shards.link.may_wait() else None

    def _do(
        self,
        make: Callable[[StoreMap], Request],
        timeout: Any,
        what: str,
        *,
        producer: bool = False,
        source: Producer | Repeated | None = None,
    ) -> Any:
        """Make a call and carry it out, in a thread or as an awaitable."""
        deadline = self._deadline(timeout, what)
        shards = self._at_hand()
        link = self._bind() if shards is None else shards.link
        if producer:
            source = self._producer_here(link)
        if shards is None and link.asynchronous:
            return link.run(lambda: self._do_async(link, make, deadline, source))
        uid = self.uid
        try:
            shards = shards or self._attached(deadline)
            if source is None:
                request = make(shards.meta)
                return self._finish(request, shards.pull(request, deadline))
            request = make(shards.meta)
            parts, tell = (request, *request.rest), shards.acknowledge
            # Before anything can fail that may not fail where a task is tried again.
            is_slow = request.rest or not source.id
            numbers = source.take(len(parts)) if is_slow else _NEXT
            try:
                if not source.id:
                    left = deadline.remaining()
                    ask = partial(source.identify, link)
                    link.run(lambda: link.within(ask, left, deadline.what))
                for n, one in enumerate(parts):
                    to = one.route.slices
                    with source.turn(deadline, tell, to, numbers[n]) as turn:
                        signed = one.signed(source.id, turn)
                        try:
                            found = self._finish(signed, shards.call(signed, deadline))
                        except (PushRejectedError, StaleGenerationError) as error:
                            about: Any = {"make": make, "signed": signed, "n": n}
                            again = partial(self._again, error, shards, deadline)
                            found = link.run(partial(again, **about))
            except BaseException:
                source.give_up(numbers, tell, range(shards.meta.layout.n_shards))
                raise
            return found
        except ELSEWHERE as error:
            if shards and source is None and isinstance(error, StaleGenerationError):
                again = partial(self._again, make=make)
                return link.run(partial(again, error, shards, deadline))
            # A task steps aside: a store that is restored may need its thread.
            link.run_beside(partial(self._tell_loss, link, uid, error, deadline))
            raise

    async def _again(
        self,
        error: DaskPSError,
        shards: ShardClient,
        deadline: Deadline,
        *,
        make: Callable[[StoreMap], Request],
        signed: Request | None = None,
        n: int = 0,
    ) -> Any:
        """Make a call once more, a push by its number, or raise why not: its error."""
        try:
            if signed is not None and isinstance(error, PushRejectedError):
                await name_applied(shards, signed.step, error, n)
                raise error
            shards = await self._renewed(error, shards, deadline)
            request = make(shards.meta)
            if signed is not None:
                step = signed.step
                turn = Turn(step.sequence, step.floor, step.given_up)
                request = (request, *request.rest)[n].signed(step.producer, turn)
            try:
                return self._finish(request, await shards.call_async(request, deadline))
            except (PushRejectedError, StaleGenerationError) as found:
                about: Any = {"make": make, "signed": signed, "n": n}
                return await self._again(found, shards, deadline, **about)
        finally:
            del error  # as of `_tell_loss`

    async def _renewed(
        self, error: DaskPSError, old: ShardClient, deadline: Deadline
    ) -> ShardClient:
        """Return what routes calls now that the store was resharded; or raise the error."""
        if self._shards is old:
            self._shards, self._last_versions = None, ()
        shards = await self._attach_within(old.link, deadline)
        if shards.meta.uid == old.meta.uid:
            raise error
        old.close()
        return shards

    async def _do_async(
        self,
        link: Link,
        make: Callable[[StoreMap], Request],
        deadline: Deadline,
        source: Producer | Repeated | None = None,
    ) -> Any:
        """Make a call and carry it out, on the event loop."""
        work = partial(self._call_async, make, source)
        return await self._on_loop(link, work, deadline)

    async def _call_async(
        self,
        make: Callable[[StoreMap], Request],
        source: Producer | Repeated | None,
        shards: ShardClient,
        deadline: Deadline,
    ) -> Any:
        link = shards.link
        request = make(shards.meta)
        if source is None:
            return self._finish(request, await shards.call_async(request, deadline))
        parts, tell = (request, *request.rest), shards.acknowledge
        numbers = source.take(len(parts))
        try:
            if not source.id:
                left = deadline.remaining()
                ask = partial(source.identify, link)
                await link.within(ask, left, deadline.what)
            for n, one in enumerate(parts):
                to = one.route.slices
                async with source.turn_async(deadline, tell, to, numbers[n]) as turn:
                    signed = one.signed(source.id, turn)
                    try:
                        reply = await shards.call_async(signed, deadline)
                        found = self._finish(signed, reply)
                    except (PushRejectedError, StaleGenerationError) as error:
                        about: Any = {"make": make, "signed": signed, "n": n}
                        found = await self._again(error, shards, deadline, **about)
        except BaseException:
            source.give_up(numbers, tell, range(shards.meta.layout.n_shards))
            raise
        return found

    def _finish(self, request: Request, reply: Reply) -> Any:
        """Return what was read, or else the version that a push has led to."""
        if request.target is not None:
            if request.read_codec:
                request.round_read()
            return request.target.finish()
        version = reply.version
        # For `_repr_html_`, which must not ask anybody.
        known = dict(enumerate(self._last_versions)) | dict(version.pairs)
        if self._shards is not None:
            n = self._shards.meta.layout.n_shards
            self._last_versions = tuple([known.get(i, 0) for i in range(n)])
        return version

    def _with_shards(
        self,
        work: Callable[[ShardClient, Deadline], Awaitable[T]],
        timeout: Any,
        what: str,
        *,
        beside: bool = False,
    ) -> T:
        """Do some other work on the event loop; `beside` where it waits for tasks."""
        deadline, link = self._deadline(timeout, what), self._bind()
        done = partial(self._on_loop, link, work, deadline)
        return link.run_beside(done) if beside else link.run(done)

    async def _on_loop(
        self,
        link: Link,
        work: Callable[[ShardClient, Deadline], Awaitable[T]],
        deadline: Deadline,
    ) -> T:
        async def call() -> T:
            shards = await self._attach_within(link, deadline)
            while True:
                try:
                    return await work(shards, deadline)
                except StaleGenerationError as error:
                    shards = await self._renewed(error, shards, deadline)

        return await self._guarded(link, call, deadline)

    def _taken(
        self, index: int | None, make: Callable[[Taken], T], timeout: Any, what: str
    ) -> T:
        """Take a snapshot of one parameter or table, or of all; make something of it."""

        async def work(shards: ShardClient, deadline: Deadline) -> T:
            return make(await snapshots.take_snapshot(shards, index, deadline))

        return self._with_shards(work, timeout, what, beside=True)

    def _ask(
        self, method: str, finish: Callable[[Any], T], timeout: Any = DEFAULT
    ) -> T:
        """Send a control message to all hosts and make something of the replies."""

        async def question(shards: ShardClient, deadline: Deadline) -> T:
            return finish(await shards.control(method, deadline))

        return self._with_shards(question, timeout, f"the {method}")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread, all of whose calls wait in this very thread."""
    try:
        work.send(None)
    except StopIteration as end:
        found: T = end.value
        return found
    raise IllegalStateError(f"{work} waits for an event loop")


async def nothing() -> None:
    """Do nothing, where an awaitable is asked for."""


def _rebuild(cls: type[Handle], known: tuple[str, str, str], nonce: str) -> Handle:
    uid, name, origin = known
    store = cls(uid, name)
    store._origin = origin
    return store

"""A light, picklable handle: how it binds to a cluster, and how it calls."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from daskps import config
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.link import Link, current_link
from daskps.cluster.caller.producer import Producer, producer_of
from daskps.cluster.caller.shard_map import StoreMap
from daskps.cluster.caller.takers import name_takers
from daskps.cluster.upstream import current_task
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import PushRejectedError, StoreClosedError
from daskps.store.repr import store_html, store_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from daskps.cluster.caller.routes import Reply, Request

DEFAULT = config.DEFAULT


class Handle:
    """The part of a store's handle that knows nothing of parameters.

    Parameters
    ----------
    uid, name : str
        The store.
    """

    def __init__(self, uid: str, name: str) -> None:
        self.uid = uid
        self.name = name
        #: Why this handle cannot be used any more, and what can.
        self._closed = ""
        self._link: Link | None = None
        self._shards: ShardClient | None = None
        #: Set by `bound`: the producer of the task that made it.
        self._producer: Producer | None = None

    @classmethod
    def _of(cls, meta: StoreMap, link: Link, producer: Producer | None = None) -> Self:
        """Return a handle that is bound already; it may push as one producer."""
        store = cls(meta.uid, meta.name)
        store._link = link
        store._shards = ShardClient(link, meta)
        store._producer = producer
        return store

    # -- identity ------------------------------------------------------------

    def __reduce__(self) -> Any:
        # The nonce: Dask names a task by its arguments, also those captured in a
        # closure, and would run two equal calls once.
        return _rebuild, (type(self), self.uid, self.name, uuid.uuid4().hex)

    def __dask_tokenize__(self) -> Any:
        return type(self).__name__, self.uid, uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and other.uid == self.uid

    def __hash__(self) -> int:
        return hash(self.uid)

    def __repr__(self) -> str:
        return store_line(self.name, self._meta_if_known())

    def _repr_html_(self) -> str:
        return store_html(self.name, self._meta_if_known(), self._last_versions)

    _last_versions: tuple[int, ...] = ()

    def _meta_if_known(self) -> StoreMap | None:
        return self._shards.meta if self._shards else None

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
            wire = await link.directory("find", uid=self.uid)
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
        return self._of(shards.meta, shards.link, producer)

    def _producer_here(self, link: Link) -> Producer:
        """Return the identity of pushes from this thread: its task, or the handle."""
        if self._producer is not None:
            return self._producer
        task = current_task() if link.is_worker else None
        return producer_of(link, self.uid, task)

    # -- the one way through which every verb goes ----------------------------

    def _deadline(self, timeout: Any, what: str) -> Deadline:
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
    ) -> Any:
        """Make a call and carry it out, in a thread or as an awaitable."""
        deadline = self._deadline(timeout, what)
        shards = self._at_hand()
        link = self._bind() if shards is None else shards.link
        source = self._producer_here(link) if producer else None
        if shards is None:
            if link.asynchronous:
                return link.run(lambda: self._do_async(link, make, deadline, source))
            shards = self._attached(deadline)
        if source is None:
            request = make(shards.meta)
            return self._finish(request, shards.pull(request, deadline))
        if not source.id:
            left = deadline.remaining()
            ask = partial(source.identify, link)
            link.run(lambda: link.within(ask, left, deadline.what))
        request = make(shards.meta)
        for n, one in enumerate((request, *request.rest)):
            with source.turn(deadline, shards.settle) as turn:
                signed = one.signed(source.id, turn.number, turn.floor)
                try:
                    found = self._finish(signed, shards.call(signed, deadline))
                except PushRejectedError as error:
                    link.run(partial(name_takers, shards, signed.step, error, n))
                    raise
        return found

    async def _do_async(
        self,
        link: Link,
        make: Callable[[StoreMap], Request],
        deadline: Deadline,
        source: Producer | None = None,
    ) -> Any:
        """Make a call and carry it out, on the event loop."""
        shards = await self._attach_within(link, deadline)
        request = make(shards.meta)
        if source is None:
            return self._finish(request, await shards.call_async(request, deadline))
        if not source.id:
            left = deadline.remaining()
            ask = partial(source.identify, link)
            await link.within(ask, left, deadline.what)
        for n, one in enumerate((request, *request.rest)):
            async with source.turn_async(deadline, shards.settle) as turn:
                signed = one.signed(source.id, turn.number, turn.floor)
                try:
                    reply = await shards.call_async(signed, deadline)
                except PushRejectedError as error:
                    await name_takers(shards, signed.step, error, n)
                    raise
                found = self._finish(signed, reply)
        return found

    def _finish(self, request: Request, reply: Reply) -> Any:
        """Return what was read, or else the version that a push has led to."""
        if request.target is not None:
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
        work: Callable[[ShardClient, Deadline], Awaitable[Any]],
        timeout: Any,
        what: str,
        *,
        beside: bool = False,
    ) -> Any:
        """Do some other work on the event loop; `beside` where it waits for tasks."""
        deadline = self._deadline(timeout, what)
        link = self._bind()

        async def attached() -> Any:
            return await work(await self._attach_within(link, deadline), deadline)

        return link.run_beside(attached) if beside else link.run(attached)

    def _ask(
        self, method: str, finish: Callable[[Any], Any], timeout: Any = DEFAULT
    ) -> Any:
        """Send a control message to all hosts and make something of the replies."""

        async def question(shards: ShardClient, deadline: Deadline) -> Any:
            return finish(await shards.control(method, deadline))

        return self._with_shards(question, timeout, f"the {method}")


def _rebuild(cls: type[Handle], uid: str, name: str, nonce: str) -> Handle:
    return cls(uid, name)

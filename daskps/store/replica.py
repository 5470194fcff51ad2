"""A replica: a copy of a store's arrays that is trained by itself, and synced at times."""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from daskps import config
from daskps.cluster.caller import routes
from daskps.cluster.caller.producer import Repeated
from daskps.cluster.caller.routes import ADD, Step, load_rules
from daskps.cluster.upstream import current_task
from daskps.errors import PushRejectedError
from daskps.optim.local import LocalModel, check_rules
from daskps.store import intake
from daskps.store.handle import DEFAULT, at_once, nothing
from daskps.store.replica_weights import Exchange, ReplicaParams, ReplicaWeights
from daskps.tracebacks import entrances

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.cluster.caller.link import CallFuture, Link
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.store.pushes import Writable
    from daskps.typing import Array

_WHAT = "a sync of a replica"


class _Pending(NamedTuple):
    """A sync that has begun, and the number under which all of it is sent."""

    exchange: Exchange
    source: Repeated


#: Makes a call of a sync, and returns what it has read.
_Call: TypeAlias = "Callable[[Callable[[StoreMap], Request], Repeated | None], Any]"


@entrances
class Replica:
    """A copy of a store's arrays that is trained by itself, and synced at times.

    Made by :meth:`ParameterStore.replica`. A step updates the replica alone, by the
    store's rules, with optimizer state of its own that syncs leave as it is. A sync
    *adds* to the store what was done here since the one before, and takes over what
    others have done: no optimizer of the store sees it.

    A replica belongs to one thread at a time. It stays in its process; in a task, make
    one of the store's handle.

    Parameters
    ----------
    store : ParameterStore
        The store.
    params : dict of str to ndarray
        Its arrays.
    every : int
        Steps between two syncs.
    elastic : float or None
        Share of elastic averaging.

    Notes
    -----
    Exactly once: each shard adds what a sync sends once, however often it is sent. A
    sync that ends with an error is not forgotten. The next sync sends its deltas under
    the same number, before all that was done since; refused ones are worked out anew.

    With `elastic` replica and store move towards each other instead: d = a (w - s) is
    added to the store's s and taken from the replica's w (Zhang, Choromanska and LeCun,
    2015, Deep learning with Elastic Averaging SGD, algorithm 1, arXiv:1412.6651).
    Parameters of integers are synced as without it.

    Examples
    --------
    >>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(0.1))
    >>> with store.replica(every=2) as replica:
    ...     for _ in range(3):
    ...         replica.step({"w": np.ones(2)})
    ...     print(store.pull()["w"], replica.params["w"])
    [-0.2 -0.2] [-0.3 -0.3]
    >>> store.pull()["w"]
    array([-0.3, -0.3])
    """

    def __init__(
        self,
        store: Writable,
        params: dict[str, Array],
        every: int,
        elastic: float | None,
    ) -> None:
        self._store, self._every = store, every
        self._weights = ReplicaWeights(params, elastic)
        self._local: LocalModel | None = None
        self._steps = 0
        #: A sync that has not ended, or whose outcome was not taken over.
        self._pending: _Pending | None = None
        self._future: CallFuture[None] | None = None

    @property
    def params(self) -> ReplicaParams:
        """The replica's arrays by name; a sync sends values written to them too."""
        return self._weights.params

    @property
    def steps(self) -> int:
        """How many steps it has made."""
        return self._steps

    def step(self, grads: Mapping[str, Any], *, timeout: Any = DEFAULT) -> None:
        """Update the replica by the store's rules; every `every` steps sync it.

        Parameters
        ----------
        grads : mapping
            As in :meth:`ParameterStore.push`, of arrays.
        timeout : float, str or None
            Of a sync: seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        None
            With an asynchronous client an awaitable.

        Raises
        ------
        PushRejectedError, UnknownParameterError, NoOptimizerError
            For gradients that do not fit; nothing was changed.
        ValueError
            For optimizers with state for each trainer.
        ShardLostError, StoreClosedError, ConsistencyError, TimeoutError
            As :meth:`sync`: the step was made, and goes with the next sync.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)}, optimizer=daskps.optim.SGD(0.1))
        >>> replica = store.replica(every=10)
        >>> replica.step({"w": np.ones(2)})
        >>> replica.params["w"], store.pull()["w"]
        (array([-0.1, -0.1]), array([0., 0.]))
        """
        self._take_over()
        meta = self._store._attached().meta  # noqa: SLF001 (ours)
        arrays = intake.gradients(
            meta.layout, meta.optimizers, grads, finite=config.check_finite()
        )
        if self._local is None:
            cache = str(config.load().cache)
            rules, what = load_rules(meta), "Replica.step"
            check_rules(rules, meta.layout.names, what, rounds=False)
            self._local = LocalModel(meta.layout, rules, cache)
            self._local.reset(self.params)
        self._local.update(self.params, arrays, None)
        self._steps += 1
        if self._steps % self._every == 0:
            return self.sync(timeout=timeout)
        link = self._store._bind()  # noqa: SLF001 (ours)
        return link.run(nothing) if link.asynchronous else None

    def sync(self, *, timeout: Any = DEFAULT) -> None:
        """Add what was done here since the last sync, and take over what others did.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        None
            With an asynchronous client an awaitable.

        Raises
        ------
        PushRejectedError
            For weights that are not finite; the store has not changed.
        ConsistencyError
            During a BSP run on the store, which has it to itself.
        ShardLostError, StoreClosedError, TimeoutError
            For what its name says. Nothing is forgotten: sync again.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(2)})
        >>> replica = store.replica()
        >>> replica.params["w"][0] = 5.0
        >>> _ = store.add({"w": np.array([1.0, 2.0])})
        >>> replica.sync()
        >>> replica.params["w"], store.pull()["w"]
        (array([6., 2.]), array([6., 2.]))
        """
        store = self._store
        deadline = store._deadline(timeout, _WHAT)  # noqa: SLF001 (ours)
        link = store._bind()  # noqa: SLF001 (ours)
        if link.asynchronous:
            return link.run(lambda: self._sync(link, deadline))

        async def here(
            make: Callable[[StoreMap], Request], source: Repeated | None
        ) -> Any:
            return store._do(make, deadline, _WHAT, source=source)  # noqa: SLF001 (ours)

        if self._future is not None:
            wait([self._future], deadline.remaining())
        return at_once(self._send_all(link, here, deadline))

    async def _sync(self, link: Link, deadline: Deadline) -> None:
        """Sync on the event loop."""
        if self._future is not None:
            ended = asyncio.wrap_future(self._future)
            await asyncio.wait([ended], timeout=deadline.remaining())
            if ended.done() and not ended.cancelled():
                ended.exception()  # the owner of the future hears of it
        await self._send_all(link, self._on_loop(link, deadline), deadline)

    async def _send_all(self, link: Link, call: _Call, deadline: Deadline) -> None:
        """Send what is in doubt, and after it what was done since."""
        self._take_over()
        if self._future is not None:
            raise deadline.error("the sync before it", changes=False)
        for _ in range(1 if self._pending is None else 2):
            await self._send(self._begun(link), call)
            self._take_over()

    def _on_loop(self, link: Link, deadline: Deadline) -> _Call:
        """Return what makes a call of a sync on the event loop."""
        do = self._store._do_async  # noqa: SLF001 (ours)
        return lambda make, source: do(link, make, deadline, source)

    def sync_async(self, *, timeout: Any = DEFAULT) -> CallFuture[None]:
        """Start a sync, and go on with the replica meanwhile.

        The next call of :meth:`step`, :meth:`sync` or this method after its answer has
        come takes over the values in it. Steps done meanwhile stay, and go with the
        next sync. There is one sync at a time: while it is under way its future is
        returned again.

        Parameters
        ----------
        timeout : float, str or None
            Seconds or a duration such as "30s"; None waits for ever.

        Returns
        -------
        Future
            Like one of `concurrent.futures`, and awaitable. Its errors are those of
            :meth:`sync`.

        Raises
        ------
        PushRejectedError, StoreClosedError
            For what cannot be sent, and a handle that was closed.

        Examples
        --------
        >>> store = daskps.create({"w": np.zeros(1)}, optimizer=daskps.optim.SGD(0.1))
        >>> with store.replica(every=100) as replica:
        ...     replica.step({"w": np.ones(1)})
        ...     future = replica.sync_async()
        ...     replica.step({"w": np.ones(1)})
        ...     future.result()
        >>> store.pull()["w"]
        array([-0.2])
        """
        self._take_over()
        if self._future is not None:
            return self._future
        store = self._store
        deadline = store._deadline(timeout, _WHAT)  # noqa: SLF001 (ours)
        link = store._bind()  # noqa: SLF001 (ours)
        pending = self._begun(link)
        call = self._on_loop(link, deadline)
        self._future = link.start(lambda: self._send(pending, call))
        return self._future

    # -- one exchange ----------------------------------------------------------

    def _begun(self, link: Link) -> _Pending:
        """Return the sync that is in doubt, or else a new one."""
        if self._pending is None:
            exchange = self._weights.begin()
            task = current_task() if link.is_worker else None
            uid = self._store._origin  # noqa: SLF001 (ours)
            self._pending = _Pending(exchange, Repeated(link, uid, task))
        return self._pending

    async def _send(self, pending: _Pending, call: _Call) -> None:
        """Carry out an exchange."""
        exchange, source = pending
        try:
            if not exchange.is_complete:
                self._weights.meet(exchange, await call(_reading, None))
            if exchange.deltas:
                adding = partial(_adding, exchange.deltas)
                exchange.found = await call(adding, source)
            else:
                exchange.found = await call(_reading, None)
        except PushRejectedError:
            # Nothing of it was or will be applied.
            exchange.is_refused = True
            raise

    def _take_over(self) -> None:
        """Take over what a sync has brought that has ended."""
        if self._future is not None:
            if not self._future.done():
                return
            self._future = None
        pending = self._pending
        if pending is None:
            return
        exchange, source = pending
        if exchange.found is not None:
            self._weights.end(exchange)
        elif not exchange.is_refused:
            return
        source.end(is_answered=exchange.found is not None)
        self._pending = None

    # -- its end -----------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._store._bind().asynchronous:  # noqa: SLF001 (ours)
            raise TypeError(
                "this replica belongs to an asynchronous client; use async with, which "
                "can await the sync at its end"
            )
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.sync()

    if not TYPE_CHECKING:  # see `daskps.aio`

        async def __aenter__(self) -> Self:
            return self

        async def __aexit__(self, kind: object, *exc: object) -> None:
            if kind is None:
                await self.sync()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a replica stays in its process, with what it has not synced; send the "
            "store's handle and make a replica there"
        )

    def __repr__(self) -> str:
        return (
            f"<daskps.Replica of store {self._store.name!r} after {self._steps} steps>"
        )


def _reading(meta: StoreMap) -> Request:
    return routes.read(meta, routes.whole(meta))


def _adding(deltas: Mapping[str, Array], meta: StoreMap) -> Request:
    finite = config.check_finite()
    arrays = intake.values(meta.layout, deltas, "change", finite=finite)
    return routes.push(meta, arrays, Step(kind=ADD), target=routes.whole(meta))

"""How a handle calls: the one way through which every verb goes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.caller.takers import name_takers
from daskps.cluster.wire.deadline import Deadline
from daskps.errors import DaskPSError, PushRejectedError
from daskps.store.binding import LOST, Binding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.producer import Producer, Repeated
    from daskps.cluster.caller.routes import Reply, Request
    from daskps.cluster.caller.shard_map import StoreMap

DEFAULT = config.DEFAULT
#: What a push has that gets its number with its turn, in fewer calls.
_NEXT: Sequence[int] = (-1,)


class Handle(Binding):
    """The part of a store's handle that knows nothing of parameters."""

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
            if shards is None:
                shards = self._attached(deadline)
            if source is None:
                request = make(shards.meta)
                return self._finish(request, shards.pull(request, deadline))
            request = make(shards.meta)
            parts, tell = (request, *request.rest), shards.settle
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
                        except PushRejectedError as error:
                            name = partial(name_takers, shards, signed.step, error, n)
                            link.run(name)
                            raise
            except BaseException:
                source.give_up(numbers, tell, range(shards.meta.layout.n_shards))
                raise
            return found
        except LOST as error:
            self._hear_loss(link, uid, error, deadline)
            raise

    def _hear_loss(
        self, link: Link, uid: str, error: DaskPSError, deadline: Deadline
    ) -> None:
        """Raise what a call has to say that found its store lost, in a thread."""
        # A task steps aside: what is made anew may need its thread.
        link.run_beside(partial(self._tell_loss, link, uid, error, deadline))

    async def _do_async(
        self,
        link: Link,
        make: Callable[[StoreMap], Request],
        deadline: Deadline,
        source: Producer | Repeated | None = None,
    ) -> Any:
        """Make a call and carry it out, on the event loop."""
        work = partial(self._call_async, link, make, deadline, source)
        return await self._guarded(link, work, deadline)

    async def _call_async(
        self,
        link: Link,
        make: Callable[[StoreMap], Request],
        deadline: Deadline,
        source: Producer | Repeated | None,
    ) -> Any:
        shards = await self._attach_within(link, deadline)
        request = make(shards.meta)
        if source is None:
            return self._finish(request, await shards.call_async(request, deadline))
        parts, tell = (request, *request.rest), shards.settle
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
                    except PushRejectedError as error:
                        await name_takers(shards, signed.step, error, n)
                        raise
                    found = self._finish(signed, reply)
        except BaseException:
            source.give_up(numbers, tell, range(shards.meta.layout.n_shards))
            raise
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

        async def call() -> Any:
            return await work(await self._attach_within(link, deadline), deadline)

        async def attached() -> Any:
            return await self._guarded(link, call, deadline)

        return link.run_beside(attached) if beside else link.run(attached)

    def _ask(
        self, method: str, finish: Callable[[Any], Any], timeout: Any = DEFAULT
    ) -> Any:
        """Send a control message to all hosts and make something of the replies."""

        async def question(shards: ShardClient, deadline: Deadline) -> Any:
            return finish(await shards.control(method, deadline))

        return self._with_shards(question, timeout, f"the {method}")

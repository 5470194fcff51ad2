"""Pushes of a trainer at its clock before the tick, kept to send them again.

Until the tick only the owners of the shards have these arrays, and an owner may die.
The shard's next owner then asks for all pushes of the clock. The next step also brings
them all after a push that ended with an error, which some shards have and others do
not. The shards get one sum, made as a shard would have made it: the same bits.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Never

from daskps.cluster.caller import routes
from daskps.cluster.caller.row_routes import joined_rows
from daskps.cluster.protocol.deadline import Deadline
from daskps.cluster.protocol.encoding import numbers
from daskps.errors import ContributionLostError
from daskps.shards.steps import GRADIENT, NOTHING, Step

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.codecs import Codec
    from daskps.reduction import Empty
    from daskps.typing import Array

#: How often a trainer that waits for others looks whether all shards have its last step.
_LOOK_SECONDS = 2.0


class Uncommitted:
    """The sums of one trainer's pushes since its last tick, by parameter index.

    Parameters
    ----------
    meta : StoreMap
        The store.
    codec : Codec or None
        The codec that encodes the arrays of the run's gradients.
    empty : callable
        Makes arrays.
    """

    def __init__(self, meta: StoreMap, codec: Codec | None, empty: Empty) -> None:
        self._meta, self._codec, self._empty = meta, codec, empty
        self._sums: dict[int, Array] = {}
        #: Rows of tables, in the order of the pushes: a shard adds up rows named again
        #: in it.
        self._rows: list[RowBatch] = []

    def add(self, arrays: Mapping[Any, Array], rows: Sequence[RowBatch] = ()) -> None:
        """Keep a push that was accepted; the arrays stay the caller's.

        Arrays are by parameter index, words of a codec by shard and position of the
        piece.
        """
        self._rows += [one.copied() for one in rows]
        for index, array in self._numbers(arrays).items():
            known = self._sums.get(index)
            if known is not None:
                known += array
            else:
                self._sums[index] = array if _are_words(arrays) else array.copy()

    def whole(
        self, step: Step, arrays: Mapping[Any, Array], rows: Sequence[RowBatch]
    ) -> Request:
        """Return a push that brings all pushes of its clock, in arrays of its own."""
        found = dict(self._sums)
        for index, array in self._numbers(arrays).items():
            known = self._sums.get(index)
            found[index] = array.copy() if known is None else known + array
        last = [one.copied() for one in rows]
        rows = joined_rows([*self._rows, *last], self._meta.layout.n_shards)
        kind = GRADIENT if step.kind == NOTHING and (found or rows) else step.kind
        step = step._replace(kind=kind, whole=True)
        return routes.push(self._meta, found, step, everywhere=True, rows=rows)

    def clear(self) -> None:
        """Forget the clock: its tick was accepted."""
        self._sums.clear()
        self._rows.clear()

    def waiter(
        self, shards: ShardClient, step: Step, last: Request | None
    ) -> Callable[[Awaitable[Any]], Awaitable[Any]]:
        """Return a function that waits for other trainers, where no shard is asked.

        Meanwhile it sends the last step to copies that take over: the others may wait
        for it there. A shard that lacks it refuses `step`, a read. A trainer that was
        started again has no last step; the wait ends with ContributionLostError, so
        that it starts once more.
        """

        async def look() -> Never:
            deadline = Deadline(None, "a look for the last step")
            asks = routes.push(self._meta, {}, step, everywhere=True)
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                try:
                    await shards.call_async(asks, deadline)
                except ContributionLostError:
                    if last is None:
                        raise
                    await shards.call_async(last, deadline)

        async def wait(work: Awaitable[Any]) -> Any:
            if not step.floor:
                # Nothing was sent yet, or no shard has a copy.
                return await work
            both = found, _ = asyncio.ensure_future(work), asyncio.ensure_future(look())
            try:
                done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                return await (found if found in done else done.pop())
            finally:
                for future in both:
                    future.cancel()

        return wait

    def _numbers(self, arrays: Mapping[Any, Array]) -> Mapping[int, Array]:
        if self._codec is None or not _are_words(arrays):
            return arrays
        return numbers(self._meta.layout, arrays, self._codec, self._empty)


def _are_words(arrays: Mapping[Any, Array]) -> bool:
    """Whether arrays are words of a codec: in a coded run only gradients are."""
    return isinstance(next(iter(arrays), None), tuple)

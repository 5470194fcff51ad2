"""Edges of a snapshot's rows: elements fetched from the hosts of other shards."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import config
from daskps.cluster.caller.fetching import Fetch, Fetched, fetch_all
from daskps.cluster.caller.lanes import lanes_of
from daskps.cluster.wire.packing import unpack_array
from daskps.errors import ConsistencyError, DaskPSError, SnapshotLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.caller.link import Link
    from daskps.layout.chunks import Edge
    from daskps.layout.spans import Span
    from daskps.typing import Array

#: How often to look whether anybody still waits for the edges of a silent host.
LOOK_SECONDS = 1.0


class EdgeOf(NamedTuple):
    """An edge, and where it is: a worker, and the key of a copy there."""

    edge: Edge
    owner: str
    key: str


def fetch_edges(
    link: Link,
    wanted: Sequence[EdgeOf],
    *,
    store: tuple[str, str],
    is_over: Callable[[], bool],
) -> dict[tuple[int, Span], Array]:
    """Fetch edges of other hosts' copies, from a thread that may wait.

    Parameters
    ----------
    link : Link
        The way to them.
    wanted : sequence of EdgeOf
        The edges to fetch.
    store : (str, str)
        Uid and name of the store.
    is_over : callable
        Says whether nobody waits for them any more.

    Returns
    -------
    dict of (int, Span) to ndarray
        The values, by shard and span.

    Raises
    ------
    SnapshotLostError
        Where a host has gone, or its copies have.
    """
    hosts: dict[str, list[EdgeOf]] = {}
    for one in wanted:
        hosts.setdefault(one.owner, []).append(one)
    fetches = [
        _fetch(link, owner, of, store[1], is_over=is_over)
        for owner, of in hosts.items()
    ]
    every = [one.edge for of in hosts.values() for one in of]
    lanes = lanes_of(link) if config.load().lane_way else None
    found = fetch_all(fetches, lanes, lambda: None, store=store[0])
    arrays = [array for fetched in found for array in fetched.arrays]
    return {(e.shard, e.span): a for e, a in zip(every, arrays, strict=True)}


def _fetch(
    link: Link,
    owner: str,
    wanted: Sequence[EdgeOf],
    store: str,
    *,
    is_over: Callable[[], bool],
) -> Fetch:
    """Return the fetch of one host's edges."""
    about: dict[str, Any] = {"wanted": [(one.key, one.edge.span) for one in wanted]}
    shard = wanted[0].edge.shard

    def make(said: object) -> list[Array]:
        """Return arrays for the edges, whatever the host says of them."""
        sizes = [(e.span.stop - e.span.start, e.dtype) for e, _, _ in wanted]
        return [np.empty(n, dtype) for n, dtype in sizes]

    async def ask() -> Fetched:
        asked = asyncio.ensure_future(link.control(owner, "edges", **about))
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_SECONDS))[0]:
                if is_over():
                    raise ConsistencyError("nobody waits for them any more")
            packed = asked.result()
        except (OSError, DaskPSError) as error:
            raise SnapshotLostError(store, shard, owner, str(error)) from error
        finally:
            asked.cancel()
        dtypes = [one.edge.dtype for one in wanted]
        return Fetched(None, [*map(unpack_array, packed, dtypes)])

    return Fetch(owner, "edges", about, make, partial(link.start, ask))

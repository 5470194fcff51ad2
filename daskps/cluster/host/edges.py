"""Edges of a snapshot's copies, for hosts whose rows end in shards of this one.

They are fetched while the cut keeps the copies here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster.wire.handlers import FETCHES, HOST
from daskps.cluster.wire.packing import pack_array
from daskps.errors import ConsistencyError, ProtocolError
from daskps.layout.spans import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.typing import Array


@FETCHES.handles("edges")
def edges_here(
    host: ShardHost, *, wanted: Sequence[tuple[str, tuple[str, int, int, int]]]
) -> tuple[None, list[Array]]:
    """Return elements of copies; each request has the key of a copy and a span.

    Raises
    ------
    ConsistencyError
        If a copy, or the requested span of it, is not here.
    ProtocolError
        If more elements are requested than all copies have: some come twice.
    """
    found, copies = [], {}
    for key, span in wanted:
        copy = host.snapshots.find(key)
        if copy is None:
            raise ConsistencyError(
                f"worker {host.worker.address} no longer has copy {key}"
            )
        copies[key] = copy
        try:
            found.append(copy.get(Span(*span)))
        except LookupError as error:
            raise ConsistencyError(f"copy {key} has no {span}") from error
    asked = sum(values.nbytes for values in found)
    if asked > sum(copy.nbytes for copy in copies.values()):
        raise ProtocolError(
            f"{len(found)} edges with {asked:,} bytes, some of it twice"
        )
    return None, found


@HOST.handles("edges")
async def edges(
    host: ShardHost, wanted: Sequence[tuple[str, tuple[str, int, int, int]]]
) -> list[Any]:
    """Return the elements of :func:`edges_here` by message."""
    _, arrays = edges_here(host, wanted=wanted)
    return [pack_array(array) for array in arrays]

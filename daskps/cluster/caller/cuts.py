"""A cut from its caller's side: hosts keep their copies until the cut is dropped."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.wire.deadline import Deadline

#: How much longer than asked for the directory may take to say that it timed out.
_MARGIN_SECONDS = 1.0


async def take_cut(
    shards: ShardClient,
    cut: str,
    *,
    index: int | None,
    deadline: Deadline,
) -> Mapping[str, Any]:
    """Have all hosts copy their shards at one moment.

    The caller ends it by :func:`drop_cut` in any case.

    Parameters
    ----------
    shards : ShardClient
        The store.
    cut : str
        A name that no other cut has.
    index : int or None
        The part of the shards to copy, see :mod:`daskps.layout.chunks`.
    deadline : Deadline
        When to give up.

    Returns
    -------
    mapping
        "where" the shards are, and "versions": shard, version and numbers of rows.

    Raises
    ------
    ConsistencyError, ShardLostError, StoreClosedError, TimeoutError
        As their names say; no shard is held any more.
    """
    link, meta, seconds = shards.link, shards.meta, deadline.remaining()
    ask = partial(
        link.directory,
        "cut",
        uid=meta.uid,
        owner=link.owner,
        seconds=seconds,
        cut=cut,
        index=index,
    )
    margin = None if seconds is None else seconds + _MARGIN_SECONDS
    found: Mapping[str, Any] = await link.within(ask, margin, deadline.what)
    if "waited_for" in found:
        raise deadline.error(
            f"it waited for {found['waited_for']}; no shard is held", changes=False
        )
    meta.update(found["where"])
    return found


async def drop_cut(shards: ShardClient, cut: str) -> None:
    """Have the hosts free the copies of a cut, also where it was cancelled half-way."""
    link = shards.link
    # The directory forgets the cuts of a client that left by itself.
    if link.live:
        await link.wind_up(link.over("drop_cut", cut=cut))

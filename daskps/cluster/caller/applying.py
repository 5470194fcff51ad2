"""Putting the parameters of a store through a function of the user's, on the owners."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.caller.routes import runs_of
from daskps.cluster.wire.packing import unpack_error
from daskps.errors import DaskPSError
from daskps.layout.arrays import counted
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.producer import Producer
    from daskps.cluster.wire.deadline import Deadline


class Applied(NamedTuple):
    """What is applied to which parameters."""

    #: Pickled.
    function: bytes
    #: Their indices.
    parameters: Sequence[int]
    #: Whether what it returns must be finite.
    finite: bool


async def apply(
    shards: ShardClient, source: Producer, applied: Applied, deadline: Deadline
) -> Version:
    """Have all shards that have any of some parameters put these through a function.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        Whose step it is.
    applied : Applied
        What is done.
    deadline : Deadline
        Its end.

    Returns
    -------
    Version
        What the shards have come to.

    Raises
    ------
    PushRejectedError, ConsistencyError
        Naming the shards that have applied it.
    """
    meta = shards.meta
    pieces = [p for i in applied.parameters for p in meta.layout.pieces_of[i]]
    wanted = sorted({piece.shard for piece in pieces})
    if not wanted:
        return Version.of([])
    touched = None if len(wanted) == meta.layout.n_shards else runs_of(wanted)
    about = {"applied": tuple(applied), "touched": touched}
    return await take_each(shards, source, ("apply", about, wanted), deadline)


async def take_each(
    shards: ShardClient,
    source: Producer,
    what: tuple[str, Mapping[str, Any], Sequence[int]],
    deadline: Deadline,
) -> Version:
    """Have shards do something under one number, wherever they are and move to.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        Whose step it is.
    what : (str, mapping, sequence of int)
        What hosts are asked, what it says to all of them, and the shards.
    deadline : Deadline
        Its end.

    Returns
    -------
    Version
        What the shards have come to.

    Raises
    ------
    DaskPSError
        What the first shard says that has not done it, naming those that have.
    """
    meta, (method, more, wanted) = shards.meta, what
    async with source.turn_async(deadline, shards.settle, wanted) as turn:
        if not source.id:
            await source.identify(shards.link)
        about = {**more, "identity": (source.id, *turn)}

        def plan() -> Mapping[str, Mapping[str, Any]]:
            where, of = meta.where, dict[str, list[tuple[int, int]]]()
            for shard in wanted:
                row = shard, where.generations[shard]
                of.setdefault(where.owners[shard], []).append(row)
            return {worker: {"shards": rows, **about} for worker, rows in of.items()}

        answers = await shards.control_each(method, plan, deadline)
        rows = [row for answer in answers for row in answer]
        if failed := [(shard, packed) for shard, _, packed in rows if packed]:
            have = sorted(shard for shard, _, packed in rows if not packed)
            raise _told(unpack_error(min(failed)[1]), have, meta.name)
    return Version.of(sorted((shard, version) for shard, version, _ in rows))


def _told(error: Exception, have: Sequence[int], name: str) -> Exception:
    """Return an error that says which shards have applied it nevertheless."""
    said = "no shard has applied it"
    if have:
        said = f"{counted(len(have), 'shard')} had applied it: {list(have)[:20]}"
    kind = type(error) if isinstance(error, DaskPSError) else DaskPSError
    return kind(f"{error}. Of store {name!r} {said}; the others are as they were")

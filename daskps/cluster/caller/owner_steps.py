"""Work of owners: a function of their weights, learning rates, sums of contributions."""

from __future__ import annotations

import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from daskps.cluster.caller.questions import applied_by
from daskps.cluster.caller.routes import route_of, runs_of
from daskps.cluster.protocol.packing import pack_array, unpack_array, unpack_error
from daskps.cluster.upstream import dumps
from daskps.errors import (
    ContributionLostError,
    DaskPSError,
    LayoutError,
    StaleGenerationError,
)
from daskps.layout.arrays import compute_dtype
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.producer import Producer
    from daskps.cluster.caller.shard_map import StoreMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

#: Returns what routes calls once the store was resharded, or raises its error.
_Renew: TypeAlias = (
    "Callable[[DaskPSError, ShardClient, Deadline], Awaitable[ShardClient]]"
)
#: One contribution's rows for one host: shard, position of the piece, data.
_PartRows = list[tuple[int, int, Any]]


class Applied(NamedTuple):
    """A function to apply, and the parameters that it is applied to."""

    #: The function, pickled.
    function: bytes
    #: Indices of the parameters.
    parameters: Sequence[int]
    #: Whether the values that the function returns must be finite.
    finite: bool


async def apply(
    shards: ShardClient,
    source: Producer,
    applied: Applied,
    *,
    deadline: Deadline,
    renew: _Renew,
) -> Version:
    """Have all shards that have any of some parameters put these through a function.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        The producer of the step.
    applied : Applied
        The function and its parameters.
    deadline : Deadline
        Its end.
    renew : callable
        Returns what routes calls once the store was resharded, or raises its error.

    Returns
    -------
    Version
        The versions that the shards have reached.

    Raises
    ------
    PushRejectedError, ConsistencyError
        With the numbers of the shards that have applied it.
    """

    def wanted(layout: Layout) -> set[int]:
        return {p.shard for i in applied.parameters for p in layout.pieces_of[i]}

    what = "apply", {"applied": tuple(applied)}, wanted
    return await _take_each(shards, source, what, deadline, renew=renew)


class Scaled(NamedTuple):
    """A factor for learning rates, and the parameters and tables that have them."""

    factor: float
    #: Their indices, None for all.
    indices: Sequence[int] | None = None


async def scale_lr(
    shards: ShardClient,
    source: Producer,
    scaled: Scaled,
    *,
    deadline: Deadline,
    run: int = 0,
    renew: _Renew | None = None,
) -> Version:
    """Have all shards that have any of some parameters multiply their rates, each once.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        The producer of the step.
    scaled : Scaled
        The rates, and the factor.
    deadline : Deadline
        Its end.
    run : int, default 0
        The run in rounds whose trainers wait for it.
    renew : callable, optional
        As of :func:`apply`.

    Returns
    -------
    Version
        The versions that the shards have reached.

    Raises
    ------
    PushRejectedError, ConsistencyError
        With the numbers of the shards that have done it.
    """
    indices = scaled.indices

    def wanted(layout: Layout) -> set[int]:
        # Each shard has a piece of each table.
        if indices is None or max(indices, default=0) >= len(layout.parameters):
            return set(range(layout.n_shards))
        return {piece.shard for i in indices for piece in layout.pieces_of[i]}

    what = "scale_lr", {"scaled": tuple(scaled), "run": run}, wanted
    return await _take_each(shards, source, what, deadline, renew=renew)


async def lr_factors(shards: ShardClient, deadline: Deadline) -> dict[int, float]:
    """Return the factors of learning rates by index, of rates that have one.

    Parameters
    ----------
    shards : ShardClient
        The store.
    deadline : Deadline
        When to give up.

    Returns
    -------
    dict of int to float
        The least factor that any shard has.
    """
    answers = await shards.control("lr_factors", deadline)
    found: dict[int, float] = {}
    for index, factor in (row for answer in answers for of in answer for row in of):
        found[index] = min(factor, found.get(index, factor))
    return found


async def aggregate(
    shards: ShardClient,
    contributions: Sequence[Mapping[int, Array]],
    reduce: Any,
    deadline: Deadline,
) -> dict[str, Array]:
    """Return the reduced arrays by name, in the compute dtype of the parameters."""
    meta = shards.meta
    plan = partial(_by_host, meta, contributions, reduce=dumps(reduce))
    found = await shards.control_each("aggregate", plan, deadline)
    wanted = {index for arrays in contributions for index in arrays}
    parameters = [p for p in meta.layout.parameters if p.index in wanted]
    flats = {p.index: np.empty(p.size, compute_dtype(p.dtype)) for p in parameters}
    for answers in found:
        for shard, position, data in answers:
            piece = meta.layout.pieces[shard][position]
            flat = flats[piece.parameter.index]
            flat[piece.start : piece.stop] = unpack_array(data, flat.dtype.name)
    return {p.name: flats[p.index].reshape(p.shape) for p in parameters}


def check_same_layout(mine: StoreMap, its: StoreMap) -> None:
    """Refuse a store that is cut in another way.

    Raises
    ------
    LayoutError
        Naming both.
    """
    if mine.layout.to_wire() != its.layout.to_wire():
        raise LayoutError(
            f"store {its.name!r} has other parameters than {mine.name!r}, or other "
            f"shards; aggregate takes into= a store of the same names, shapes, dtypes "
            f"and number of shards"
        )


async def aggregate_into(
    shards: ShardClient,
    contributions: Sequence[Mapping[int, Array]],
    reduce: Any,
    *,
    source: Producer,
    deadline: Deadline,
) -> Version:
    """Leave the reduced arrays with the shards; return the versions that this led to.

    Each host keeps its reduced arrays until all hosts have theirs: a failure on one
    host, as of a function of the user's, changes no shard. Then the shards take the
    arrays, under one number of the producer: a message that is sent again counts once.
    """
    meta, token = shards.meta, uuid.uuid4().hex
    how = {"reduce": dumps(reduce), "token": token}

    async def reduces() -> dict[str, str]:
        plan = partial(_by_host, meta, contributions, **how)
        await shards.control_each("aggregate", plan, deadline)
        return {"token": token}

    pieces = [p for of in contributions for i in of for p in meta.layout.pieces_of[i]]
    what: Any = "take_aggregate", {}, lambda _: {piece.shard for piece in pieces}
    try:
        return await _take_each(shards, source, what, deadline, before=reduces)
    finally:
        # A host that this does not reach drops its arrays after a while.
        shards.tell("drop_aggregate", token=token)


def _by_host(
    meta: StoreMap, contributions: Sequence[Mapping[int, Array]], **how: Any
) -> dict[str, dict[str, Any]]:
    """Return the message to each host that gets a part of any contribution."""
    where = meta.where
    hosts: dict[str, list[_PartRows]] = {
        w: [[] for _ in contributions] for w in where.hosts
    }
    for rank, arrays in enumerate(contributions):
        for shard, of in route_of(meta, tuple(arrays), ()).slices.items():
            hosts[where.owners[shard]][rank] += [
                (shard, position, pack_array(arrays[index][start:stop]))
                for position, index, start, stop in of
            ]
    return {w: {"contributions": of, **how} for w, of in hosts.items() if any(of)}


async def _take_each(
    shards: ShardClient,
    source: Producer,
    what: tuple[str, Mapping[str, Any], Callable[[Layout], Set[int]]],
    deadline: Deadline,
    *,
    before: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
    renew: _Renew | None = None,
) -> Version:
    """Have shards do something once, under one number, wherever they move to.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        The producer of the step.
    what : (str, mapping, callable)
        The message to the hosts, its arguments for all of them, and what returns the
        shards of a layout.
    deadline : Deadline
        Its end.
    before : callable, optional
        Prepares the step and returns more arguments of the message; called again where
        a host has lost its part.
    renew : callable, optional
        As of :func:`apply`: other shards know the number, too.

    Returns
    -------
    Version
        The versions that the shards have reached.

    Raises
    ------
    DaskPSError
        The error of the first shard that has not done it, with the numbers of those
        that have.
    """
    method, more, shards_in = what
    if not (wanted := sorted(shards_in(shards.meta.layout))):
        return Version.of([])
    async with source.turn_async(deadline, shards.acknowledge, wanted) as turn:
        if not source.id:
            await source.identify(shards.link)
        about = {**more, "identity": (source.id, *turn)}
        while True:
            of = shards.with_generation
            is_all = len(wanted) == shards.meta.layout.n_shards
            about["touched"] = None if is_all else runs_of(wanted)
            try:
                if before is not None:
                    about |= await before()
                rows = await shards.ask_owners(method, wanted, of, deadline, **about)
                break
            except ContributionLostError:
                # Shards that have taken the step know its number.
                deadline.left()
            except StaleGenerationError as error:
                if renew is None:
                    raise
                shards = await renew(error, shards, deadline)
                wanted = sorted(shards_in(shards.meta.layout))
        if failed := [(shard, packed) for shard, _, packed in rows if packed]:
            have = sorted(shard for shard, _, packed in rows if not packed)
            raise _told(unpack_error(min(failed)[1]), have, shards.meta.name)
    return Version.of(sorted((shard, version) for shard, version, _ in rows))


def _told(error: Exception, have: Sequence[int], name: str) -> Exception:
    """Return an error that says which shards have applied it nevertheless."""
    kind = type(error) if isinstance(error, DaskPSError) else DaskPSError
    said = f"{applied_by(have)}; the others are as they were"
    return kind(f"{error}. Of store {name!r}: {said}")

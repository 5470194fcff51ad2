"""Steps that owners make of their own weights: a user's function, or learning rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.caller.routes import runs_of
from daskps.cluster.wire.packing import unpack_error
from daskps.errors import ContributionLostError, DaskPSError
from daskps.layout.arrays import counted
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.producer import Producer
    from daskps.cluster.wire.deadline import Deadline


class Applied(NamedTuple):
    """A function to apply, and the parameters that it is applied to."""

    #: The function, pickled.
    function: bytes
    #: Indices of the parameters.
    parameters: Sequence[int]
    #: Whether the values that the function returns must be finite.
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
        The producer of the step.
    applied : Applied
        The function and its parameters.
    deadline : Deadline
        Its end.

    Returns
    -------
    Version
        The versions that the shards have reached.

    Raises
    ------
    PushRejectedError, ConsistencyError
        With the numbers of the shards that have applied it.
    """
    meta = shards.meta
    pieces = [p for i in applied.parameters for p in meta.layout.pieces_of[i]]
    wanted = sorted({piece.shard for piece in pieces})
    if not wanted:
        return Version.of([])
    touched = None if len(wanted) == meta.layout.n_shards else runs_of(wanted)
    about = {"applied": tuple(applied), "touched": touched}
    return await take_each(shards, source, ("apply", about, wanted), deadline)


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

    Returns
    -------
    Version
        The versions that the shards have reached.

    Raises
    ------
    PushRejectedError, ConsistencyError
        With the numbers of the shards that have done it.
    """
    layout, indices = shards.meta.layout, scaled.indices
    wanted = list(range(layout.n_shards))
    n = len(layout.parameters)
    # Each shard has a piece of each table.
    if indices is not None and all(i < n for i in indices):
        wanted = sorted({piece.shard for i in indices for piece in layout.pieces_of[i]})
    if not wanted:
        return Version.of([])
    touched = None if len(wanted) == layout.n_shards else runs_of(wanted)
    about = {"scaled": tuple(scaled), "touched": touched, "run": run}
    return await take_each(shards, source, ("scale_lr", about, wanted), deadline)


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


async def take_each(
    shards: ShardClient,
    source: Producer,
    what: tuple[str, Mapping[str, Any], Sequence[int]],
    deadline: Deadline,
    *,
    before: Callable[[], Awaitable[Mapping[str, Any]]] | None = None,
) -> Version:
    """Have shards do something once, under one number, wherever they move to.

    Parameters
    ----------
    shards : ShardClient
        The store.
    source : Producer
        The producer of the step.
    what : (str, mapping, sequence of int)
        The message to the hosts, its arguments for all of them, and the shards.
    deadline : Deadline
        Its end.
    before : callable, optional
        Prepares the step and returns more arguments of the message; called again where
        a host has lost its part.

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
    method, more, wanted = what
    async with source.turn_async(deadline, shards.settle, wanted) as turn:
        if not source.id:
            await source.identify(shards.link)
        of, about = shards.with_generation, {**more, "identity": (source.id, *turn)}
        while True:
            try:
                if before is not None:
                    about |= await before()
                rows = await shards.ask_owners(method, wanted, of, deadline, **about)
                break
            except ContributionLostError:
                # Shards that have taken the step know its number.
                deadline.left()
        if failed := [(shard, packed) for shard, _, packed in rows if packed]:
            have = sorted(shard for shard, _, packed in rows if not packed)
            raise _told(unpack_error(min(failed)[1]), have, shards.meta.name)
    return Version.of(sorted((shard, version) for shard, version, _ in rows))


def _told(error: Exception, have: Sequence[int], name: str) -> Exception:
    """Return an error that says which shards have applied it nevertheless."""
    said = "no shard has applied it"
    if have:
        said = f"{counted(len(have), 'shard')} had applied it: {list(have)[:20]}"
    kind = type(error) if isinstance(error, DaskPSError) else DaskPSError
    return kind(f"{error}. Of store {name!r} {said}; the others are as they were")

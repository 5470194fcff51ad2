"""Handlers of sums over ranks: aggregates, trainers' all-reduces, and graph rounds.

The sums go back to those that ask, or, of an aggregate, stay for the shards to take. In
that case the host keeps them until all owners have reduced theirs: then a failure on
one owner leaves all shards unchanged.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.collectives import (
    Offered,
    OfferedWire,
    PartPlace,
    narrowed,
)
from daskps.cluster.host.contributions import RoundId
from daskps.cluster.host.owner_steps import take_each
from daskps.cluster.host.partial_sums import described
from daskps.cluster.protocol.handlers import FETCHES, HOST
from daskps.cluster.protocol.messages import (
    dtype_of_item,
    piece_at,
    unpack_identity,
)
from daskps.cluster.protocol.packing import pack_array, unpack_array
from daskps.cluster.upstream import loads
from daskps.errors import (
    ClockError,
    ConsistencyError,
    DaskPSError,
    ProtocolError,
    PushRejectedError,
    RunCancelledError,
)
from daskps.limits import MOST_PARTS
from daskps.reduction import Reduction, check_reduce
from daskps.shards.steps import ASSIGN, GRADIENT, Item, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.host.collectives import Collective, ReducedPieces
    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.host.partial_sums import PackedSums
    from daskps.typing import Array

#: All-reduces may take at most this share of the memory that the shards leave.
_SHARE = 0.5


# -- aggregates --------------------------------------------------------------


@HOST.handles("aggregate", user_code=True)
async def _aggregate(
    host: ShardHost,
    *,
    store: str,
    contributions: Sequence[Sequence[tuple[int, int, Any]]],
    reduce: bytes,
    token: str = "",
) -> list[tuple[int, int, Any]]:
    """Reduce contributions to the shards held here; the shards stay as they are.

    Each contribution is a list of (shard, position, data); so is the result. With a
    `token` the host keeps the result, in the dtypes of the parameters, and returns
    none.
    """
    function = loads(reduce)
    check_reduce(function)
    if not contributions:
        raise ProtocolError("a reduction of no contributions")

    def work() -> ReducedPieces:
        found = Reduction(len(contributions), function)
        for rank, rows in enumerate(contributions):
            arrays = {}
            for shard, position, data in rows:
                piece = piece_at(host.get_shard(store, shard).layout, shard, position)
                array = unpack_array(data, dtype_of_item(piece, GRADIENT))
                if array.shape != (piece.size,):
                    raise PushRejectedError(
                        f"{array.size} elements of a contribution to piece {position} "
                        f"of shard {shard}, which has {piece.size}"
                    )
                # Copied: the sum is made in place, and the caller may be in this
                # process.
                arrays[shard, position] = np.array(array)
            found.add((arrays, dict.fromkeys(arrays, 1.0)), rank)
        reduced = _taken(found)
        return _fitted(host, store, reduced) if token else reduced

    reduced: ReducedPieces = await host.in_thread(work)
    if token:
        host.collectives.keep_pieces(token, reduced)
        return []
    return [(*key, pack_array(array)) for key, array in reduced.items()]


def _taken(found: Reduction) -> ReducedPieces:
    """Return the sums of contributions, by a name or a function of the user's.

    Raises
    ------
    DaskPSError
        If the function raises an error that a caller would take for an unreachable
        host, or for moved shards, and would ask again until its time is over.
    """
    try:
        with np.errstate(all="ignore"):
            return found.take()
    except (OSError, ConsistencyError) as error:
        raised = f"the reduce function raised {type(error).__name__}: {error}"
        raise DaskPSError(raised) from error


def _fitted(host: ShardHost, store: str, found: ReducedPieces) -> ReducedPieces:
    """Return reduced pieces in the form that shards can take.

    Raises
    ------
    PushRejectedError
        If a sum is too large for the dtype of its parameter.
    """
    fitted = {}
    for (shard, position), array in found.items():
        piece = host.get_shard(store, shard).layout.pieces[shard][position]
        name, dtype = piece.parameter.name, piece.parameter.dtype
        fitted[shard, position] = narrowed(
            array,
            dtype,
            f"what contributions to {name[:60]!r} come to is not finite as {dtype}; "
            f"nothing was changed, scale them before",
        )
    return fitted


@HOST.handles("take_aggregate")
async def _take_aggregate(
    host: ShardHost,
    *,
    store: str,
    token: str,
    shards: Sequence[tuple[int, int]],
    identity: Sequence[Any],
    touched: Sequence[tuple[int, int]] | None,
) -> list[list[Any]]:
    """Have shards take the kept sums, each shard in one publication.

    `shards` has each and its generation, `identity` the identity of this step. Returns
    shard, version and error of each, up to the first that failed.
    """
    found = host.collectives.pieces(token, [shard for shard, _ in shards])

    def items(hosted: HostedShard) -> list[Item]:
        return [Item(p, 0, data) for (s, p), data in found.items() if s == hosted.index]

    step = Step(ASSIGN, **unpack_identity(identity, touched))
    return await take_each(
        host, store, shards, step, make_of=lambda hosted: lambda _: items(hosted)
    )


@HOST.handles("drop_aggregate")
async def _drop_aggregate(host: ShardHost, store: str, token: str) -> None:
    """Drop the sums kept for shards to take."""
    host.collectives.drop_pieces(token)


# -- all-reduces -------------------------------------------------------------


def shard_of(part: int, parts: int, n_shards: int) -> int:
    """Return the shard whose host reduces a part."""
    return part * n_shards // parts


@HOST.handles("allreduce", user_code=True)
async def _allreduce(
    host: ShardHost,
    *,
    store: str,
    run: int,
    rank: int,
    asked: tuple[int, int, int, OfferedWire],
    given: Sequence[tuple[int, Sequence[Any] | None]],
    wait_seconds: float,
) -> tuple[int, list[tuple[int, str, Sequence[int], Sequence[Any]]]]:
    """Take a rank's arrays into an all-reduce; return the state of each part.

    `asked` has the number of the all-reduce, the first one that the rank may ask for
    again, the number of parts and the arrays; `given` are the rank's arrays, by part,
    or None for those that it has sent before. Returns the first number that any rank
    may still ask for; and for each part "done" with the ranks that are not in it and
    the arrays, "waits", or "send" if the rank must send its arrays again.
    """
    number, floor, parts, offered = asked
    about = Offered.of(*offered)
    shards = [_hosted(host, store, part, parts) for part, _ in given]
    if not shards or len({part for part, _ in given}) < len(given):
        raise ProtocolError(f"an allreduce of parts {[p for p, _ in given]!r:.60}")
    [live] = await host.each(shards[:1], partial(_live_ranks, run=run, rank=rank))
    if not 0 <= floor <= number:
        raise ProtocolError(f"allreduce {number}, and none below {floor}")
    held, room = host.collectives, _room_at(host)
    least = held.told(
        run, rank, floor, [r for r, is_live in enumerate(live) if is_live]
    )
    found: list[tuple[int, Collective]] = []
    for part, packed in given:
        place = PartPlace(run, number, part, parts)
        collective = held.join(place, rank, about, live=live, room=room)
        found.append((part, collective))
        if packed is None:
            continue
        arrays = _unpacked(about, place, packed)
        bring = partial(held.bring, collective, rank, arrays)
        if collective.nbytes <= host.inline_nbytes:
            bring()
        else:
            await host.in_thread(bring)
            # Else the host would keep the message as long as this waits.
            wait_seconds = 0.0
    # Not if the rank must send arrays first: nobody would wait for the rest.
    if wait_seconds and all(rank in g.present or g.done for _, g in found):
        answers = [collective.on_loop() for _, collective in found]
        first = asyncio.FIRST_EXCEPTION
        await asyncio.wait(answers, timeout=wait_seconds, return_when=first)
    return least, [_answer(part, rank, collective) for part, collective in found]


def _hosted(host: ShardHost, store: str, part: int, parts: int) -> HostedShard:
    n_shards = host.of(store)[0].layout.n_shards
    if not 0 <= part < parts <= n_shards:
        raise ProtocolError(
            f"part {part} of {parts} of an allreduce by {n_shards} shards"
        )
    return host.get_shard(store, shard_of(part, parts, n_shards))


def _live_ranks(hosted: HostedShard, *, run: int, rank: int) -> list[bool]:
    """Return for each rank of a run whether the others wait for it."""
    state = hosted.shard.run_state
    if state.run != run:
        raise state.why_over(run)
    state.check_goes_on(run)
    live = state.live
    if not 0 <= rank < len(live):
        raise ProtocolError(f"trainer {rank} of the {len(live)} of run {run}")
    if not live[rank]:
        raise ClockError(f"trainer {rank} has finished and takes part in no allreduce")
    return live


def _room_at(host: ShardHost) -> int | None:
    """Return how many bytes all-reduces may take here, None if there is no limit."""
    limit = host.worker.memory_limit
    if not limit:
        return None
    return max(0, int(_SHARE * (host.worker.pause_share * limit - host.held_nbytes)))


def _unpacked(about: Offered, place: PartPlace, packed: Sequence[Any]) -> list[Array]:
    """Return a rank's arrays of a part, in memory of their own."""
    if len(packed) != len(about.arrays):
        raise ProtocolError(f"{len(packed)} arrays for {len(about.arrays)}")
    arrays = []
    for index, (name, _, dtype) in enumerate(about.arrays):
        start, stop = about.extent(index, place.part, place.parts)
        array = unpack_array(packed[index], dtype)
        if array.shape != (stop - start,):
            raise ProtocolError(
                f"{array.shape} elements of {name!r:.60} for the {stop - start} of a part"
            )
        # Copied: sums are made in place, and the caller may be in this process.
        arrays.append(np.array(array))
    return arrays


def _answer(
    part: int, rank: int, collective: Collective
) -> tuple[int, str, Sequence[int], Sequence[Any]]:
    if collective.done:
        arrays = [pack_array(array) for array in collective.answer.result()]
        return part, "done", sorted(collective.absent), arrays
    return part, "waits" if rank in collective.present else "send", (), ()


@HOST.handles("reduced")
async def _reduced(
    host: ShardHost, *, store: str, run: int, number: int, offered: OfferedWire
) -> list[Any] | None:
    """Return the result of an all-reduce if a rank here has got it."""
    whole = host.collectives.find(run, number)
    if whole is None or whole.brought != Offered.of(*offered):
        return None
    return [pack_array(flat) for flat in whole.flats]


# -- sums of contributions to rounds of the graph -----------------------------


@FETCHES.handles("sums")
def sums_here(
    host: ShardHost,
    *,
    place: tuple[int, int, int],
    shards: Sequence[int],
    ranks: Sequence[int],
    nodes: Sequence[tuple[int, int]],
) -> tuple[PackedSums, list[Array]]:
    """Return the sums of this worker's contributions to a round, for other shards.

    The description of the arrays, and the arrays in its order.

    Raises
    ------
    ProtocolError
        If no reduction asks for such sums: they could take any time or memory.
    """
    ends = [0, *(end for node in nodes for end in node)]
    is_tree = all(lo < hi for lo, hi in nodes) and ends == sorted(ends)
    if not is_tree or ends[-1] > MOST_PARTS or len(set(shards)) < len(shards):
        raise ProtocolError(
            f"sums over nodes {list(nodes)!r:.60} for shards {list(shards)!r:.60}"
        )
    place_of = RoundId(*place)
    spans = [(lo, hi) for lo, hi in nodes]
    return described(host.contributions.sums(place_of, shards, ranks, spans))


@HOST.handles("sums")
async def sums(
    host: ShardHost,
    *,
    place: tuple[int, int, int],
    shards: Sequence[int],
    ranks: Sequence[int],
    nodes: Sequence[tuple[int, int]],
) -> tuple[PackedSums, list[Any]]:
    """Return the result of :func:`sums_here` by message."""
    work = partial(
        sums_here, host, place=place, shards=shards, ranks=ranks, nodes=nodes
    )
    small = host.contributions.nbytes <= host.inline_nbytes
    said, arrays = work() if small else await host.in_thread(work)
    return said, [pack_array(array) for array in arrays]


@HOST.handles("free")
async def _free(host: ShardHost, run: int, attempt: int, last: int) -> None:
    """Drop the contributions to an attempt's rounds up to `last`."""
    host.contributions.free(run, attempt, last)


@HOST.handles("end_sums")
async def _end_sums(host: ShardHost, run: int) -> None:
    """Drop all all-reduces of a run, or contributions to it; refuse later ones."""
    host.collectives.end(run, RunCancelledError(f"run {run} is over"))
    host.contributions.end(run)
    host.pool.clear()

"""What callers ask of a host: to put weights through a function of the user's.

The function gets copies, without the shard's lock, and what it returns is published where
no update has come in between; where several have, it is called in the shard's turn.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.upstream import loads
from daskps.cluster.wire.handlers import HOST
from daskps.cluster.wire.messages import unpack_identity
from daskps.cluster.wire.packing import pack_error
from daskps.errors import (
    PushRejectedError,
    ShardBusyError,
    StaleGenerationError,
)
from daskps.layout.arrays import FLOATS
from daskps.shards import producers
from daskps.shards.refusals import find_refusal
from daskps.shards.steps import ASSIGN, Item, Ready, Step, Ticket
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.shards.shard import Shard
    from daskps.typing import Array

    Make = Callable[[int], "Sequence[Item] | None"]

#: How often the function is called for nothing before the shard is held for it.
TRIES = 4
#: How long a step that a cut holds back is tried again, and how often.
HELD_SECONDS, AGAIN_SECONDS = 20.0, 0.01
_WHAT = "the function given to apply"


class _Work(NamedTuple):
    """What is done to one shard."""

    function: Callable[[Array, str], Any]
    #: Of the pieces.
    positions: Sequence[int]
    finite: bool


@HOST.handles("apply", user_code=True)
async def apply(
    host: ShardHost,
    *,
    store: str,
    shards: Sequence[tuple[int, int]],
    applied: tuple[bytes, Sequence[int], bool],
    identity: Sequence[Any],
    touched: Sequence[tuple[int, int]] | None,
) -> list[list[Any]]:
    """Put what some shards have of parameters through a function, each in one publication.

    `shards` has each and its generation, `applied` the function, the parameters and
    whether what it returns must be finite, `identity` that of the
    step that this is. Returns shard, version and error of each, up to the first
    that failed.
    """
    who, (function, parameters, finite) = unpack_identity(identity, touched), applied
    hosted_shards = [host.get_shard(store, shard) for shard, _ in shards]
    called, found = loads(function), []
    for hosted, (_, generation) in zip(hosted_shards, shards, strict=True):
        at = hosted.layout.positions
        positions = [at[hosted.index, i] for i in parameters if (hosted.index, i) in at]
        step = Step(ASSIGN, generation=generation, **who)
        make = partial(_made, hosted, _Work(called, positions, finite))
        try:
            version = await host.in_thread(partial(take, host, hosted, step, make))
        except StaleGenerationError:
            raise
        except Exception as error:  # noqa: BLE001 - its caller's
            found.append([hosted.index, 0, pack_error(error)])
            break
        found.append([hosted.index, version, None])
    return found


def take(host: ShardHost, hosted: HostedShard, step: Step, make: Make) -> int:
    """Have a shard take a step whose items are made of what is in force.

    Parameters
    ----------
    host, hosted : ShardHost, HostedShard
        Whose shard.
    step : Step
        Without items.
    make : callable
        ``make(flip) -> items``, None where the next publication but one overwrites what
        it was made of. It may be called again, after a few times in the shard's turn.

    Returns
    -------
    int
        The version that the shard has come to.

    Raises
    ------
    ShardBusyError
        Where a cut holds the shard for too long.
    DaskPSError
        For what the step was refused.
    """
    known: int | None
    ticket: Ticket | None
    host.make_room(hosted, step.producer, LOCK_SECONDS)
    known = _under(hosted, partial(_known, step=step))
    if known is not None:
        return known
    segment, end = hosted.shard.segment, time.monotonic() + HELD_SECONDS
    n = 0
    while True:
        if n >= TRIES:
            ticket = _under(hosted, partial(_now, step, make))
        else:
            flip = segment.flip
            items = make(flip)
            if items is None:
                n += 1
                continue
            ticket = _under(hosted, partial(_publish, step, items, flip))
        if ticket is None:  # another update came first
            n += 1
        elif isinstance(ticket.outcome, Exception):
            raise ticket.outcome
        elif isinstance(ticket.outcome, Ready):
            return ticket.version or ticket.outcome.version
        elif time.monotonic() > end:
            raise ShardBusyError(
                f"shard {hosted.index} of store {hosted.name!r} was held by a snapshot for "
                f"{HELD_SECONDS:g} s; nothing was changed there"
            )
        else:
            time.sleep(AGAIN_SECONDS)


def _known(shard: Shard, step: Step) -> int | None:
    """Return the version where the step was applied before; refuse what may not be."""
    record = shard.segment.current
    ticket = Ticket(step._replace(items=()))
    error = find_refusal(ticket, shard.segment, shard.run_state, shard.generation)
    if error is not None:
        raise error
    done = producers.repeats(record, step.producer, step.sequence)
    return record.version if done else None


def _made(hosted: HostedShard, work: _Work, flip: int) -> list[Item] | None:
    """Call the function for each piece; return what it makes of them."""
    segment = hosted.shard.segment
    record, copy = segment.record(flip), segment.payload.duplicate
    blocks = [copy(segment.weights_of(record, p)) for p in work.positions]
    if segment.writing > flip + 1:
        return None
    items = []
    for position, block in zip(work.positions, blocks, strict=True):
        name = hosted.layout.pieces[hosted.index][position].parameter.name
        where = f"{name[:60]!r} in shard {hosted.index}"
        dtype, shape = block.dtype, block.shape
        try:
            with user_code(_WHAT):
                found = np.asarray(work.function(block, name))
        except Exception as error:
            raise PushRejectedError(
                f"{_WHAT} raised {type(error).__name__} for {where}: {error}"
            ) from error
        if found.shape != shape or not np.can_cast(found.dtype, dtype, "same_kind"):
            raise PushRejectedError(
                f"{_WHAT} returned shape {found.shape} and dtype {found.dtype} for "
                f"{where}, which has shape {shape} and {dtype}; return an array like the "
                f"block that it gets"
            )
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(found, dtype)
        if work.finite and dtype.name in FLOATS and not np.isfinite(array).all():
            raise PushRejectedError(f"{_WHAT} returned NaN or Inf for {where}")
        items.append(Item(position, 0, array))
    return items


def _now(step: Step, make: Make, shard: Shard) -> Ticket | None:
    """Make the items in the shard's turn, and publish them."""
    flip = shard.segment.flip
    items = make(flip)
    return None if items is None else _publish(step, items, flip, shard)


def _publish(
    step: Step, items: Sequence[Item], flip: int, shard: Shard
) -> Ticket | None:
    """Have a shard take a step unless an update has come since; None where one has."""
    if shard.segment.flip != flip:
        return None
    ticket = Ticket(step._replace(items=items), owner=_Nobody())
    for other in shard.submit([ticket]):
        other.owner.one_done()
    if ticket.outcome is None:
        # Held: what is let go of later may be another moment's.
        shard.cancel([ticket])
    return ticket


class _Nobody:
    """Whom a ticket tells of its end where its thread looks itself."""

    def one_done(self) -> None:
        """Hear that a ticket is done."""


def _under(hosted: HostedShard, function: Callable[[Shard], Any]) -> Any:
    """Call a function of a shard in its turn, from a thread that waits for that."""
    future = hosted.run(function)
    hosted.serve(LOCK_SECONDS)
    try:
        return future.result(LOCK_SECONDS)
    except TimeoutError:
        raise ShardBusyError(
            f"shard {hosted.index} of store {hosted.name!r} was in use for "
            f"{LOCK_SECONDS:g} s; apply again"
        ) from None

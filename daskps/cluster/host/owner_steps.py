"""Steps that a host computes from its shards: by a user's function, or of rates.

The function gets copies, without the shard's lock, and the host publishes its result if
no update has come in between; after several such updates the host calls the function in
the shard's turn.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.backend import returned, stacked
from daskps.cluster.host.hosted import LOCK_SECONDS
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.messages import unpack_identity
from daskps.cluster.protocol.packing import pack_error
from daskps.cluster.upstream import loads
from daskps.errors import (
    ProtocolError,
    PushRejectedError,
    ShardBusyError,
    StaleGenerationError,
)
from daskps.shards import producers
from daskps.shards.installation import factors_of
from daskps.shards.refusals import find_refusal
from daskps.shards.steps import ASSIGN, SCALE, Item, Ready, Step, Ticket
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.shards.shard import Shard
    from daskps.typing import Array

    Make = Callable[[int], "Sequence[Item] | None"]

#: How often an update may make a call of the function useless before the shard is held.
TRIES = 4
#: How long, and how often, to retry a step that a cut holds back.
HELD_SECONDS, AGAIN_SECONDS = 20.0, 0.01
_WHAT = "the function given to apply"
_NO_DATA = np.empty(0)


class _Work(NamedTuple):
    """One call of a user's function on pieces of one shard."""

    function: Callable[[Array, str], Any]
    #: Positions of the pieces.
    positions: Sequence[int]
    finite: bool


@HOST.handles("apply", user_code=True)
async def _apply(
    host: ShardHost,
    *,
    store: str,
    shards: Sequence[tuple[int, int]],
    applied: tuple[bytes, Sequence[int], bool],
    identity: Sequence[Any],
    touched: Sequence[tuple[int, int]] | None,
) -> list[list[Any]]:
    """Put parameters in some shards through a function, each shard in one publication.

    `shards` has each and its generation, `applied` the function, the parameters and
    whether its results must be finite, `identity` the identity of this step. Returns
    shard, version and error of each, up to the first that failed.
    """
    function, parameters, finite = applied
    called = loads(function)

    def make_of(hosted: HostedShard) -> Make:
        at = hosted.layout.positions
        positions = [at[hosted.index, i] for i in parameters if (hosted.index, i) in at]
        return partial(_made, hosted, _Work(called, positions, finite))

    step = Step(ASSIGN, **unpack_identity(identity, touched))
    return await take_each(host, store, shards, step, make_of=make_of)


@HOST.handles("scale_lr")
async def _scale_lr(
    host: ShardHost,
    *,
    store: str,
    shards: Sequence[tuple[int, int]],
    scaled: tuple[float, Sequence[int] | None],
    identity: Sequence[Any],
    touched: Sequence[tuple[int, int]] | None,
    run: int,
) -> list[list[Any]]:
    """Multiply learning rates in some shards, each shard in one publication.

    `shards` has each and its generation, `scaled` the factor and the indices of the
    parameters and tables, None for all, `identity` the identity of this step, `run`
    the run in rounds whose trainers wait for it, 0 for none.
    Returns shard, version and error of each.
    """
    factor, indices = scaled
    if not 0 < factor < math.inf:
        raise ProtocolError(f"a factor {factor!r:.60} in step {identity!r:.60}")

    def make_of(hosted: HostedShard) -> Make:
        positions = _positions(hosted, indices)
        items = [Item(position, 0, _NO_DATA) for position in positions]
        return lambda _: items

    who = unpack_identity(identity, touched)
    step = Step(SCALE, lr=float(factor), clock=run, **who)
    return await take_each(host, store, shards, step, make_of=make_of)


def _positions(hosted: HostedShard, indices: Sequence[int] | None) -> list[int]:
    """Return the positions of a shard's pieces of some parameters and tables."""
    layout, shard = hosted.layout, hosted.index
    if indices is None:
        return list(range(len(layout.pieces[shard]) + len(layout.tables)))
    n, at = len(layout.parameters), layout.positions
    return [
        at[shard, i] if i < n else layout.table_position(shard, i)
        for i in indices
        if i >= n or (shard, i) in at
    ]


@HOST.handles("lr_factors")
async def _lr_factors(host: ShardHost, store: str) -> list[list[tuple[int, float]]]:
    """Return the factors of learning rates of each shard here, with their positions."""
    shards = [hosted.shard.segment for hosted in host.of(store)]
    return [[*factors_of(segment, segment.flip).items()] for segment in shards]


async def take_each(
    host: ShardHost,
    store: str,
    shards: Sequence[tuple[int, int]],
    step: Step,
    *,
    make_of: Callable[[HostedShard], Make],
) -> list[list[Any]]:
    """Have shards, each with its generation, take a step with items from `make_of`.

    Returns shard, version and error of each, up to the first that failed.
    """
    found: list[list[Any]] = []
    hosted_shards = [host.get_shard(store, shard) for shard, _ in shards]
    for hosted, (_, generation) in zip(hosted_shards, shards, strict=True):
        made = step._replace(generation=generation), make_of(hosted)
        try:
            version = await host.in_thread(partial(_take, host, hosted, *made))
        except StaleGenerationError:
            raise
        except Exception as error:  # noqa: BLE001 - its row tells the caller
            return [*found, [hosted.index, 0, pack_error(error)]]
        found.append([hosted.index, version, None])
    return found


def _take(host: ShardHost, hosted: HostedShard, step: Step, make: Make) -> int:
    """Have a shard take a step whose items are made from the weights in force.

    Parameters
    ----------
    host, hosted : ShardHost, HostedShard
        The shard and its host.
    step : Step
        The step, without items.
    make : callable
        ``make(flip) -> items``, None if the next publication but one overwrites the
        weights it uses. It may be called again, after some tries in the shard's turn.

    Returns
    -------
    int
        The version of the shard after the step.

    Raises
    ------
    ShardBusyError
        If a cut holds the shard for too long.
    DaskPSError
        If the step is refused.
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
    """Return the version if the step was applied before; raise if it is not allowed."""
    record = shard.segment.current
    ticket = Ticket(step._replace(items=()))
    error = find_refusal(ticket, shard.segment, shard.run_state, shard.generation)
    if error is not None:
        raise error
    done = producers.repeats(record, step.producer, step.sequence)
    return record.version if done else None


def _made(hosted: HostedShard, work: _Work, flip: int) -> list[Item] | None:
    """Call the function for each piece; return the results as items."""
    segment = hosted.shard.segment
    record = segment.record(flip)
    blocks = [stacked([segment.weights_of(record, p)])[0] for p in work.positions]
    if segment.writing > flip + 1:
        return None
    items = []
    for position, block in zip(work.positions, blocks, strict=True):
        name = hosted.layout.pieces[hosted.index][position].parameter.name
        where = f" for {name[:60]!r} in shard {hosted.index}"
        try:
            with user_code(_WHAT):
                found = work.function(block, name)
        except Exception as error:
            raise PushRejectedError(
                f"{_WHAT} raised {type(error).__name__}{where}: {error}"
            ) from error
        try:
            array = returned(found, block, _WHAT, where, finite=work.finite)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PushRejectedError(str(error)) from error
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
    """Have a shard take a step; return None if an update has come since `flip`."""
    if shard.segment.flip != flip:
        return None
    ticket = Ticket(step._replace(items=items), owner=_Nobody())
    for other in shard.submit([ticket]):
        other.owner.one_done()
    if ticket.outcome is None:
        # A cut holds it: after its release the weights may have changed.
        shard.cancel([ticket])
    return ticket


class _Nobody:
    """Owner of a ticket whose thread itself checks whether it is done."""

    def one_done(self) -> None:
        """Hear that a ticket is done."""


def _under(hosted: HostedShard, function: Callable[[Shard], Any]) -> Any:
    """Call a function of a shard in its turn; this thread waits for the turn."""
    future = hosted.enqueue(function)
    hosted.serve(LOCK_SECONDS)
    try:
        return future.result(LOCK_SECONDS)
    except TimeoutError:
        raise ShardBusyError(
            f"shard {hosted.index} of store {hosted.name!r} was in use for "
            f"{LOCK_SECONDS:g} s; apply again"
        ) from None

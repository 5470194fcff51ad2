"""Asks a worker to adopt shards, and tells it what has ended meanwhile.

`candidates` chooses that worker; `move` decides when it is asked, and what follows.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.run import rounds_lost
from daskps.cluster.wire.reports import Sight
from daskps.errors import DaskPSError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.runs import Runs

logger = logging.getLogger(__name__)
#: How long an adopter may take to end a run, and when one that has not is asked again.
END_SECONDS, LATER_SECONDS = 5.0, 1.0


@dataclass(frozen=True)
class MoveContext:
    """The parts of the directory that every move needs."""

    scheduler: Scheduler
    hosts: Hosts
    runs: Runs
    #: By uid.
    stores: Mapping[str, StoreEntry]


async def adopt(
    context: MoveContext,
    entry: StoreEntry,
    worker: str,
    shards: Sequence[int],
    *,
    left_by: str,
) -> list[dict[str, Any]]:
    """Ask a worker to adopt shards that another one left; return what became of each.

    Where it has them, and with them a run that cannot go on, it has ended that run or
    will be asked to until it has.
    """
    about = {
        "name": entry.name,
        "layout": entry.layout,
        "rules": entry.rules,
        "cluster": entry.cluster,
    }
    rounds = context.runs.rounds_of(entry)
    rows = [[*row, entry.generations[row[0]] + 1] for row in entry.rows_of(shards)]
    more: dict[str, Any] = {"store": entry.uid, "about": about}
    more |= {"rows": rows, "rounds": rounds}
    more["codecs"] = context.runs.codecs_of(entry)
    # Until it has answered it may have done so: it is told when the store ends, and
    # has no room for others.
    entry.strays.add(worker)
    need = sum(entry.sizes[shard] for shard in shards)
    entry.charge(worker, need)
    try:
        found = await _ask(context, worker, "adopt", shards, **more)
        if not any(answer.get("silent") for answer in found):
            entry.strays.discard(worker)
        taken = [answer for answer in found if "name" in answer]
        if rounds and any(a["stopped"] or a["run"] != rounds["run"] for a in taken):
            context.runs.fence_all(entry, rounds_lost(left_by), lambda run: run.bsp)
        for run in {a["run"] for a in taken}:
            if not await _try_end_run(context, entry, worker, run):
                context.hosts.spawn(_end_run(context, entry, worker, run))
        return found
    finally:
        entry.charge(worker, -need)


async def look(
    context: MoveContext, entry: StoreEntry, worker: str, shards: Sequence[int]
) -> list[dict[str, Any]]:
    """Ask a worker what it sees of the memory of shards."""
    about = {"cluster": entry.cluster, "rows": entry.rows_of(shards)}
    return await _ask(context, worker, "look", shards, **about)


async def _ask(
    context: MoveContext, worker: str, method: str, shards: Sequence[int], **more: Any
) -> list[dict[str, Any]]:
    try:
        return list(await context.hosts.control(worker, method, **more))
    except ProtocolError as error:
        # A worker that has just come gets its host in a moment.
        said = {"why": str(error), "silent": False}
    except Exception as error:  # noqa: BLE001 - told to the callers that wait
        said = {"why": f"{worker}: {error!r}", "silent": isinstance(error, OSError)}
    return [{"shard": i, "sight": Sight.UNKNOWN, **said} for i in shards]


async def _try_end_run(
    context: MoveContext, entry: StoreEntry, worker: str, run: int
) -> bool:
    """Have an adopter end a run that has ended while nobody held its shards."""
    if not run or (how := context.runs.how_over(run)) is None:
        return True
    asked = context.hosts.control(worker, "end_run", store=entry.uid, run=run, **how)
    try:
        await asyncio.wait_for(asked, END_SECONDS)
    except (OSError, DaskPSError) as error:
        logger.info("daskps: %s keeps run %d: %r", worker, run, error)
        return False
    return True


async def _end_run(
    context: MoveContext, entry: StoreEntry, worker: str, run: int
) -> None:
    """Ask an adopter to end a run until it has, however long that takes.

    Else its shards would stay in a run that is over, and take no other step.
    """
    while entry.uid in context.stores and context.hosts.has_worker(worker):
        await asyncio.sleep(LATER_SECONDS)
        if await _try_end_run(context, entry, worker, run):
            return

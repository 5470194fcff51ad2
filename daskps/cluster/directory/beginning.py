"""How a run begins on all hosts of its store, as the directory sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from daskps.errors import NotEnoughWorkersError

if TYPE_CHECKING:
    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.run import RunState


async def begin_everywhere(
    hosts: Hosts, run: RunState, begin: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Begin a run on all hosts of its store; return what to know of its mailboxes.

    A host may take its time, for there may be much memory to take and code to compile,
    but not be silent meanwhile: TimeoutError when one is for `seconds`.
    """
    asked = hosts.everywhere(
        run.entry, "begin_run", run=run.id, resident=not run.graph, begin=begin
    )
    # Not cancelled where it takes too long: what a silent host was sent it will do.
    work = hosts.spawn(asked)
    try:
        while not (await asyncio.wait({work}, timeout=seconds / 2))[0]:
            async with asyncio.timeout(seconds / 2):
                await _hear(hosts, run)
    except BaseException:
        hosts.spawn(_end_late(hosts, run, work))
        raise
    of = {key: begin[key] for key in ("reduce", "codec")}
    return {"rows": [row for rows in work.result() for row in rows], **of}


async def _hear(hosts: Hosts, run: RunState) -> None:
    """Have all hosts of a run's store say a word."""
    await asyncio.gather(*(hosts.control(w, "hello") for w in run.entry.hosts))


async def _end_late(hosts: Hosts, run: RunState, work: asyncio.Future[Any]) -> None:
    """End a run that begins late: after its end, where other runs came between."""
    await asyncio.wait({work})
    reason = "it could not begin in time"
    await hosts.everywhere(run.entry, "end_run", run=run.id, reason=reason)


def give_up(entry: StoreEntry, error: Exception, seconds: float) -> NoReturn:
    """Raise what ends a run that has tried to begin for so long.

    A host that answers says itself why it could not.
    """
    if not isinstance(error, OSError):
        raise error
    raise NotEnoughWorkersError(
        f"a run on store {entry.name!r} could not begin within {seconds:g} s, for a "
        f"worker that holds shards does not answer ({error!r}); wait for it or end it, "
        f"and start the run again"
    ) from error

"""How the shards of a run that is fenced end with the same round."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from daskps.errors import DaskPSError

if TYPE_CHECKING:
    from daskps.cluster.entry import Hosts
    from daskps.cluster.progress import Run

logger = logging.getLogger(__name__)


async def settle(hosts: Hosts, run: Run) -> None:
    """Let all shards end with the same round.

    A trainer sends its step to all hosts at once, so what one of them has applied is on
    its way to the rest. Shards are held first, so that none gets ahead while others are
    asked or ended.
    """
    try:
        await hosts.everywhere(run.entry, "hold", run=run.id, limit=None)
        last = max(await _rounds(hosts, run), default=-1)
        await hosts.everywhere(run.entry, "hold", run=run.id, limit=last)
        # Polled: the hosts have no reason to tell the scheduler of each round.
        while not set(await _rounds(hosts, run)) <= {-1, last}:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    except (OSError, DaskPSError) as error:
        logger.info("run %d ends as it is: %r", run.id, error)


async def _rounds(hosts: Hosts, run: Run) -> list[int]:
    """Return the rounds each shard has completed, -1 where the run has ended."""
    rows = await hosts.everywhere(run.entry, "rounds", run=run.id)
    return [n for row in rows for n in row]

"""Errors of refused pushes: they name the shards that have applied the push.

A shard refuses a push when it has no more memory for new unbounded rows, which each
shard finds out by itself. The caller finds all other faults before it sends the push.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daskps.errors import DaskPSError
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.errors import PushRejectedError
    from daskps.shards.steps import Step

#: How long the hosts may take to answer.
_ASK_SECONDS = 5.0


async def name_applied(
    shards: ShardClient, step: Step, error: PushRejectedError, n_before: int = 0
) -> None:
    """Add to an error the shards that have applied the push that ended with it.

    Parameters
    ----------
    shards : ShardClient
        The store.
    step : Step
        The push.
    error : PushRejectedError
        The error that it ended with.
    n_before : int
        Number of parts of a large push that all shards have applied before this one.
    """
    meta = shards.meta
    if not meta.layout.grows:
        return
    owner = -1 - step.rank if step.run else step.producer
    try:
        asked = shards.control(
            "has_step", run=step.run, owner=owner, sequence=step.sequence
        )
        found = await asyncio.wait_for(asked, _ASK_SECONDS)
    except (OSError, DaskPSError) as why:
        said = f"which shards have applied it could not be found out: {why}"
    else:
        said = applied_by(sorted(shard for of in found for shard in of))
    if n_before:
        before = counted(n_before, "part")
        said = f"all shards have applied {before} of the push; of the next one {said}"
    error.args = (f"{error}. Of store {meta.name!r}: {said}",)


def applied_by(have: Sequence[int]) -> str:
    """Return in words which shards have applied a step."""
    if not have:
        return "no shard has applied it"
    named = ", ".join(map(str, have[:20])) + (", ..." if len(have) > 20 else "")
    return f"{counted(len(have), 'shard')} ({named}) had applied it"

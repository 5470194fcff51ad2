"""Trials of a checkpoint URL: a file is written there that all owners must see."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

from daskps.checkpoint.local_files import UNFINISHED
from daskps.checkpoint.storage import Storage, shown
from daskps.cluster.wire.deadline import gather
from daskps.cluster.wire.options import pack_options
from daskps.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from daskps.checkpoint.listing import CheckpointTarget
    from daskps.cluster.caller.link import Link


async def try_out(
    link: Link,
    target: CheckpointTarget,
    owners: Sequence[str],
    ask: Callable[..., Awaitable[Any]],
) -> None:
    """Write a file, have all owners look for it, and remove it.

    Parameters
    ----------
    link : Link
        The link that sees to the file's removal where the call is given up.
    target : CheckpointTarget
        The place where checkpoints are to go.
    owners : sequence of str
        Owners of the shards, which would write them.
    ask : callable
        ``await ask(owner, message, **about)`` returns a host's answer.

    Raises
    ------
    CheckpointError
        If the file cannot be written, or an owner does not see it.
    """
    path = f"{UNFINISHED}{uuid.uuid4().hex}"
    where = target.url, pack_options(target.options)
    try:
        await asyncio.to_thread(_write, target, path)
        workers = [*dict.fromkeys(owners)]
        seen = await gather(
            *(ask(worker, "sees_file", where=where, path=path) for worker in workers)
        )
    except BaseException:
        await link.wind_up(asyncio.to_thread(_remove, target, path))
        raise
    await asyncio.to_thread(_remove, target, path)
    for worker, sees in zip(workers, seen, strict=True):
        if not sees:
            raise CheckpointError(
                f"checkpoints cannot go to {shown(target.url)}: worker {worker} does not "
                f"see there what this process has written, as where a path or memory:// "
                f"is another one on each machine or in each process; give recover_from= "
                f"an URL that all workers reach"
            )


def _write(target: CheckpointTarget, path: str) -> None:
    storage = Storage(target.url, target.options)
    storage.write(path, b"")
    # A restore lists the folders, so that must work, too.
    storage.folders()


def _remove(target: CheckpointTarget, path: str) -> None:
    Storage(target.url, target.options).remove(path)

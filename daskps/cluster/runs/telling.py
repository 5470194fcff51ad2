"""Tells the directory how far a trainer is, beside its loop, for those who watch.

A task on the worker's event loop looks at the session now and then: the loop that
trains does nothing for it, and where the scheduler is slow to answer less is told.
The client hears of it in `launch`.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from daskps.cluster.caller.session import Session

#: Seconds between two messages of a trainer, and how many of them a second reach the
#: scheduler at most, those of all trainers together.
PAUSE_SECONDS = 0.1
MOST_MESSAGES = 100


@contextmanager
def telling(session: Session, *, watched: bool) -> Iterator[None]:
    """Tell how far a trainer is until the block ends, if somebody watches its run."""
    if not watched:
        yield
        return
    under_way = session.link.start(lambda: _tell(session))
    try:
        yield
    finally:
        under_way.stop()


async def _tell(session: Session) -> None:
    pause = max(PAUSE_SECONDS, session.size / MOST_MESSAGES)
    # They begin together, and would tell together ever after.
    await asyncio.sleep(pause * session.rank / session.size)
    told = 0
    while True:
        if session.clock > told:
            told = session.clock
            await session.link.directory(
                "progress",
                run=session.run,
                rank=session.rank,
                clock=told,
                loss=session.loss_sum,
                rows=session.rows,
            )
        await asyncio.sleep(pause)

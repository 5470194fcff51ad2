"""The Dask task of a trainer, which tells the directory how far it is.

A task on the worker's event loop looks at the session now and then: the loop that
trains does nothing for it, and where the scheduler is slow to answer less is told.
The client hears of it in `launch`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskps.cluster.caller.link import Link, task_link
from daskps.cluster.caller.session import Session
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.runs.portable import sends_errors
from daskps.cluster.upstream import check_travels, loads, secede
from daskps.cluster.wire import encoding
from daskps.cluster.wire.packing import sendable
from daskps.cluster.wire.wellformed import MOST_SECONDS
from daskps.errors import RunCancelledError
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)
#: Seconds between two messages of a trainer, and how many of them a second reach the
#: scheduler at most, those of all trainers together.
PAUSE_SECONDS = 0.1
MOST_MESSAGES = 100


@sends_errors
def run_trainer(
    body: bytes, place: dict[str, Any], wait_seconds: float, part: Any
) -> Any:
    """Be one trainer: the task behind `train` and `run`.

    It leaves the worker's thread pool first: trainers wait for each other, and a
    cluster with fewer free threads than trainers would stand still.

    Parameters
    ----------
    body : bytes
        Pickled function of a session and a part of the data.
    place : dict
        uid of the store, run, rank, size, whether it is a BSP run,
        whether somebody watches how far it is, and the codec of what it pulls.
    wait_seconds : float
        How long to wait for the other trainers to register.
    part : object
        This trainer's data.

    Returns
    -------
    object
        The value that the body returns.
    """
    secede()
    link = task_link()
    session: Session | None = None
    try:
        session = _join(link, place, wait_seconds)
        # Code that takes data from the part may be the user's too.
        with telling(session, watched=place["watched"]), user_code("the trainer"):
            result = loads(body)(session, part)
            if not link.node.address.startswith("inproc://"):
                check_travels(result, f"what trainer {place['rank']} returned")
        session.finish()
    except RunCancelledError:
        raise
    except BaseException as error:
        rank, clock = place["rank"], session.clock if session else 0
        error.add_note(f"raised in trainer {rank} of {place['size']} at clock {clock}")
        reason = f"trainer {rank} raised {type(error).__name__}: {error}"
        # Others should hear whose error it is before the fence has come to its end.
        told = {"run": place["run"], "reason": sendable(reason[:500]), "wait": False}
        fence = link.directory("fence_run", worker=link.node.address, **told)
        link.run(lambda: fence)
        raise
    finally:
        if session is not None:
            session.close()
    return result


def _join(link: Link, place: dict[str, Any], wait_seconds: float) -> Session:
    run, rank, size = place["run"], place["rank"], place["size"]
    register = link.directory(
        "register",
        run=run,
        rank=rank,
        worker=link.node.address,
        wait_seconds=min(wait_seconds, MOST_SECONDS),
    )
    found = link.run(lambda: register)
    find = link.directory("find", uid=place["uid"])
    meta = StoreMap(link.run(lambda: find))
    joined = RunMembership(run, size, found["mailboxes"], place["read_codec"])
    joined = replace(joined, measures_delay=place["measures_delay"])
    encoding.learn(*joined.coded)
    session = Session(link, meta, joined, rank=rank, bsp=place["bsp"])
    if found["attempt"] > 1:
        session.resume(found["attempt"], found["goes_on"])
        logger.warning(
            "%s goes on with trainer %d of run %d at clock %d, which lost its worker",
            link.node.address,
            rank,
            run,
            session.clock,
        )
    return session


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

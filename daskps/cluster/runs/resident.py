"""Resident trainers: their tasks, and these from the client: started, awaited, replaced.

A task on the worker's event loop looks at the session of a trainer now and then: the
loop that trains does nothing for it, and where the scheduler is slow to answer less is
told. The client hears of it in `launch`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed import Client, Future, KilledWorker

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.caller.client import ShardClient
from daskps.cluster.caller.lifetime import for_a_run
from daskps.cluster.caller.link import Link, task_link
from daskps.cluster.caller.session import Session
from daskps.cluster.caller.shard_map import RunMembership, StoreMap
from daskps.cluster.keys import label_of, trainer_key
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.packing import sendable
from daskps.cluster.protocol.wellformed import MOST_SECONDS
from daskps.cluster.runs.parts import DataPart, check_there, is_fence, sent
from daskps.cluster.runs.portable import sends_errors
from daskps.cluster.upstream import check_travels, loads, secede
from daskps.consistency import BSP, measures_delay
from daskps.errors import (
    ContributionLostError,
    NotEnoughWorkersError,
    RunCancelledError,
)
from daskps.usercode import user_code

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.cluster.runs.spec import Launch

#: How long to wait for a better reason once a run has failed. One that comes ends the
#: wait; on a machine at a load of 28 it came after more than 2 s.
LAST_WORDS_SECONDS = 10.0
#: How often in a row a trainer whose data went with its worker is given new data.
_MOST_RESTARTS = 5


class WorkerLosses:
    """Workers that one trainer has lost without a step between them.

    Its shards' word counts: a run may lose as many workers as it likes, as long as it
    gets on.
    """

    def __init__(self) -> None:
        self.clock, self.in_a_row = -1, 0

    def add(self, clock: int, workers: int = 1) -> None:
        """Count workers that were lost when the trainer was at a clock."""
        if clock > self.clock:
            self.clock, self.in_a_row = clock, 0
        self.in_a_row += workers


class Trainers:
    """The futures of a run's trainers."""

    def __init__(self, link: Link, spec: Launch, run: int, body: bytes) -> None:
        self.link, self.spec, self.run, self.body = link, spec, run, body
        self.client: Client = link.client
        self.futures: dict[int, Future[Any]] = {}
        #: Held so that Dask keeps the data as long as a trainer may need it.
        self._data: dict[int, Any] = {}

    async def results(self) -> list[Any]:
        """Start all trainers and await what they return."""
        await sent(self.link, self._start_all, self.spec.workers)
        tasks = [asyncio.ensure_future(self._one(rank)) for rank in self.futures]
        try:
            if errors := await _errors(tasks):
                # The first one of a trainer's own, if there is one.
                raise min(errors, key=is_fence)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start_all(self, workers: list[str]) -> None:
        """Start the trainers that have not started yet."""
        for rank in range(len(self.futures), len(self.spec.parts)):
            await self._start(rank, 0, workers)

    async def _start(self, rank: int, attempt: int, workers: list[str]) -> None:
        read_codec = self.spec.read_codec
        part, worker = self.spec.parts[rank], workers[rank % len(workers)]
        if isinstance(part, DataPart):
            # Where its data went with a worker, it is anywhere by now.
            worker = part.worker if part.worker in workers and not attempt else worker
            part = await part.deliver(self.client, worker)
        elif not isinstance(part, Future):
            with for_a_run():
                [part] = await upstream.scatter(self.client, [part], worker)
        self._data[rank] = part
        label = label_of(self.spec.name, self.spec.uid)
        self.futures[rank] = self.client.submit(
            run_trainer,
            self.body,
            {
                "uid": self.spec.uid,
                "run": self.run,
                "rank": rank,
                "size": len(self.spec.parts),
                "bsp": isinstance(self.spec.policy, BSP),
                "measures_delay": measures_delay(self.spec.policy),
                "watched": self.spec.watched,
                "restartable": self.spec.restartable,
                "read_codec": read_codec.name if read_codec else "",
            },
            config.load().register_timeout_seconds,
            part,
            key=trainer_key(label, self.run, rank, attempt),
            # Not one alone of those it may be on: it would wait for that if it left.
            workers=list(self.spec.workers) or [worker],
            allow_other_workers=not self.spec.workers,
            pure=False,
        )

    async def _one(self, rank: int) -> Any:
        """Await one trainer, with new data where the old went with its worker."""
        losses, attempt = WorkerLosses(), 0
        while True:
            attempt += 1
            try:
                return await upstream.result(self.futures[rank])
            except upstream.LOSSES as error:
                # The data it was given went with a worker, so Dask gave it up. Or Dask
                # could make the data anew and has counted workers, over the whole run.
                if not self.spec.restartable:
                    raise RunCancelledError(
                        f"trainer {rank} was lost with its worker; use "
                        f"on_trainer_lost='restart' in train, or resumable=True in run"
                    ) from None
                workers = 1
                if isinstance(error, KilledWorker):
                    workers += error.allowed_failures
                losses.add(await self._clock(rank), workers)
                if losses.in_a_row > _MOST_RESTARTS:
                    raise RunCancelledError(
                        f"trainer {rank} lost {losses.in_a_row} workers in a row at "
                        f"clock {losses.clock}; see in the workers' logs what ends "
                        f"them (often memory), then start the run again"
                    ) from None
                # Dask keeps the error as long as the future, and with it what waited.
                error.__traceback__ = None
                upstream.release(self.futures[rank])
                await self._restart(rank, attempt)

    async def _clock(self, rank: int) -> int:
        """Return how far the shards say a trainer is; -1 where none of them answers."""
        try:
            meta = StoreMap(await self.link.directory("find", uid=self.spec.uid))
            shards = ShardClient(self.link, meta, RunMembership(self.run, 1))
            rows = await shards.control("resume", run=self.run, rank=rank)
        except OSError:
            return -1
        return min(int(clock) for row in rows for clock, _ in row)

    def _check(self, rank: int) -> None:
        """Refuse to go on where a trainer's data is gone for good."""
        part = self.spec.parts[rank]
        if isinstance(part, DataPart):
            part.check(rank)
        elif isinstance(part, Future):
            check_there(rank, [part])

    async def _restart(self, rank: int, attempt: int) -> None:
        self._check(rank)
        try:
            start = partial(self._start, rank, attempt)
            await sent(self.link, start, self.spec.workers)
        except NotEnoughWorkersError as error:
            # The directory may know more, for example of `client.restart`.
            raise RunCancelledError(f"trainer {rank} was lost: {error}") from error

    def cancel(self) -> None:
        """Tell Dask that nobody wants the trainers any more."""
        for future in self.futures.values():
            upstream.release(future)
        self._data.clear()


async def _errors(trainers: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    """Wait for all trainers or an error of one's own; return the errors.

    The trainer that is the reason for a fence reports after those it has fenced.
    """
    errors: list[BaseException] = []
    waiting, timeout = set(trainers), None
    while waiting:
        done, waiting = await asyncio.wait(
            waiting, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION
        )
        errors += [error for t in done if (error := t.exception())]
        if not done or not all(map(is_fence, errors)):
            break
        timeout = LAST_WORDS_SECONDS
    return errors


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
        uid of the store, run, rank, size, whether it is a BSP run, whether
        somebody watches how far it is, whether trainers may start again, and the codec
        of what it pulls.
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
        for left in reversed(range(_MOST_RESTARTS if place["restartable"] else 1)):
            session = _join(link, place, wait_seconds)
            try:
                result = _result(session, body, place, part)
                break
            except ContributionLostError:
                # A copy lacks a step of the one before it: the next one makes it again.
                if not left:
                    raise
                session.close()
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


def _result(session: Session, body: bytes, place: dict[str, Any], part: Any) -> Any:
    """Be a trainer to its end; return what the body returns."""
    # Code that takes data from the part may be the user's too.
    with telling(session, watched=place["watched"]), user_code("the trainer"):
        result = loads(body)(session, part)
        if not session.link.node.address.startswith("inproc://"):
            check_travels(result, f"what trainer {place['rank']} returned")
    session.finish()
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

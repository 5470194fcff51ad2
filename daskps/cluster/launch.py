"""Starting the trainers of a run, hearing from them, and ending it whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distributed import Client, Future

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.blocks import Part
from daskps.cluster.graph import Work
from daskps.cluster.messages import unpack_error
from daskps.cluster.rounds import GraphRun
from daskps.cluster.tasks import run_trainer
from daskps.consistency import BSP, SSP, Policy
from daskps.errors import NotEnoughWorkersError, ProtocolError, RunCancelledError

if TYPE_CHECKING:
    from daskps.cluster.link import Link
    from daskps.cluster.windows import Schedule

#: How long to wait for a better reason once a run has failed.
LAST_WORDS_SECONDS = 2.0
#: How often a trainer whose data went with its worker is given new data.
MOST_RESTARTS = 5
#: A resident trainer's function of its session and its part of the data; for graph
#: execution a function of the store's `Meta` that makes a thread's stepper.
Body = Callable[..., Any]
Listener = Callable[[dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Launch:
    """One run, before it begins."""

    uid: str
    policy: Policy
    reduce: Any
    reset: bool
    restartable: bool
    gated: bool
    body: Body
    #: What each trainer trains on: a `Part`, a future of it, or itself.
    parts: Sequence[Any]
    name: str
    #: The rounds of graph execution; None for resident trainers.
    graph: Schedule | None = None

    @property
    def n_ranks(self) -> int:
        """Ranks that the shards know: a round of the graph, reduced, comes from one."""
        return 1 if self.graph else len(self.parts)


async def threads_of(link: Link) -> dict[str, int]:
    """Return the number of threads of each worker."""
    info = await link.node.scheduler.identity()
    return {w: int(about["nthreads"]) for w, about in info["workers"].items()}


async def workers_for(link: Link, size: int | None) -> list[str]:
    """Return a worker for each of `size` trainers, one per worker by default."""
    found = list(await threads_of(link))
    if not found:
        raise NotEnoughWorkersError("the cluster has no worker to train on; add some")
    return [found[i % len(found)] for i in range(size or len(found))]


async def launch(
    link: Link, spec: Launch, listen: Listener, began: Callable[[int], None]
) -> list[Any]:
    """Run the trainers to their end.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    spec : Launch
        What to run.
    listen : callable
        Awaited with every event of the run and with new clocks.
    began : callable
        Called with the run's id.

    Returns
    -------
    list
        What each trainer's body returned, in rank order.

    Raises
    ------
    Exception
        The first error of a trainer's own code; else why the run was fenced.
    """
    client = link.client
    staleness = spec.policy.staleness if isinstance(spec.policy, SSP) else 0
    body, reduce = _pickled(spec)
    opening = link.directory(
        "open_run",
        uid=spec.uid,
        begin={
            "policy": (spec.policy.name, staleness),
            "n_ranks": spec.n_ranks,
            "reduce": upstream.dumps("sum") if spec.graph else reduce,
            "reset": spec.reset,
        },
        client=client.id,
        size=len(spec.parts),
        restartable=spec.restartable,
        gated=spec.gated,
        graph=spec.graph is not None,
    )
    run = await _opened(link, opening)
    began(run)
    news = _News(link, run, listen)
    trainers: _Trainers | GraphRun = (
        GraphRun(
            link,
            Work(spec.uid, run, len(spec.parts), reduce, body),
            spec.parts,
            spec.graph,
            listen,
        )
        if spec.graph
        else _Trainers(link, spec, run, body)
    )
    try:
        watch = asyncio.ensure_future(news.follow())
        work = asyncio.ensure_future(trainers.results())
        try:
            await _first_error(work, watch)
            await news.rest(watch)
            return work.result()
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
    except BaseException as error:
        reason = f"cancelled by its caller ({type(error).__name__})"
        await asyncio.shield(_fence(link, run, reason))
        trainers.cancel()
        raise
    finally:
        await asyncio.shield(_close(link, run))


async def _opened(link: Link, opening: Awaitable[int]) -> int:
    """Await the run's id; a caller cancelled meanwhile leaves no run behind."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:

        async def close_late() -> None:
            with contextlib.suppress(Exception):
                await _close(link, await task)

        await asyncio.shield(asyncio.wait_for(close_late(), 5))
        raise


def _pickled(spec: Launch) -> tuple[bytes, bytes]:
    """Return the functions of the user, pickled: before anything is started."""
    try:
        return upstream.dumps(spec.body), upstream.dumps(spec.reduce)
    except Exception as error:
        raise TypeError(
            f"the function to train with cannot be pickled ({error}); define it at "
            f"module level or without open files, locks and clients"
        ) from error


async def _first_error(work: asyncio.Future[Any], watch: asyncio.Future[Any]) -> None:
    """Wait for the results; a fence without an error of its own says why."""
    await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    # Where the directory fenced the run, the trainer that is the reason may still be
    # about to report its own exception, which says more; where a trainer was fenced,
    # the directory knows why. An error of the user's callbacks is its own reason.
    if work.done():
        if isinstance(work.exception(), RunCancelledError):
            await asyncio.wait({watch}, timeout=LAST_WORDS_SECONDS)
    elif isinstance(watch.exception(), RunCancelledError):
        await asyncio.wait({work}, timeout=LAST_WORDS_SECONDS)
    own = work.exception() if work.done() else None
    if own is not None and not isinstance(own, RunCancelledError):
        raise own
    if watch.done() and (error := watch.exception()):
        raise error
    if own is not None:
        raise own


class _News:
    """What the directory says of a run, told to who listens, all of it and once."""

    def __init__(self, link: Link, run: int, listen: Listener) -> None:
        self.link, self.run, self.listen = link, run, listen
        self._seen, self._clock = 0, 0
        self._telling = asyncio.Lock()

    async def follow(self) -> None:
        """Tell all news until the run is fenced, which raises."""
        while True:
            news = await self._ask(10.0)
            async with self._telling:
                await self._tell(news)
            if news["error"] is not None:
                raise unpack_error(news["error"])
            # News of clocks come with every report; ten a second are enough.
            await asyncio.sleep(0 if news["events"] else 0.1)

    async def rest(self, follower: asyncio.Future[None]) -> None:
        """Tell what is left once all trainers have ended."""
        async with self._telling:
            if not follower.done():
                follower.cancel()
            elif error := follower.exception():
                raise error
            await self._tell(await self._ask(0.0))

    async def _ask(self, wait_seconds: float) -> dict[str, Any]:
        news: dict[str, Any] = await self.link.directory(
            "watch",
            run=self.run,
            seen=self._seen,
            clock=self._clock,
            wait_seconds=wait_seconds,
        )
        return news

    async def _tell(self, news: dict[str, Any]) -> None:
        for event in news["events"]:
            self._seen += 1
            await self.listen(event)
        if news["clock"] > self._clock:
            self._clock = news["clock"]
            await self.listen({"clock": self._clock})


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
        if not done or not all(isinstance(e, RunCancelledError) for e in errors):
            break
        timeout = LAST_WORDS_SECONDS
    return errors


async def _fence(link: Link, run: int, reason: str) -> None:
    with contextlib.suppress(OSError, ProtocolError):
        fence = link.directory("fence_run", run=run, reason=reason)
        await asyncio.wait_for(fence, 5)


async def _close(link: Link, run: int) -> None:
    with contextlib.suppress(OSError, ProtocolError):
        await asyncio.wait_for(link.directory("close_run", run=run), 5)


class _Trainers:
    """The futures of a run's trainers."""

    def __init__(self, link: Link, spec: Launch, run: int, body: bytes) -> None:
        self.link, self.spec, self.run, self.body = link, spec, run, body
        self.client: Client = link.client
        self.futures: dict[int, Future[Any]] = {}
        #: Held so that Dask keeps the data as long as a trainer may need it.
        self._data: dict[int, Any] = {}

    async def results(self) -> list[Any]:
        """Start all trainers and await what they return."""
        workers = await workers_for(self.link, len(self.spec.parts))
        for rank, worker in enumerate(workers):
            await self._start(rank, worker, 0)
        tasks = [asyncio.ensure_future(self._one(rank)) for rank in self.futures]
        try:
            errors = await _errors(tasks)
            own = [e for e in errors if not isinstance(e, RunCancelledError)]
            for error in own or errors:
                raise error
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(self, rank: int, worker: str, attempt: int) -> None:
        part = self.spec.parts[rank]
        if isinstance(part, Part):
            # Where its data went with a worker, it is anywhere by now.
            worker = part.worker if part.worker and not attempt else worker
            part = await part.deliver(self.client, worker)
        elif not isinstance(part, Future):
            [part] = await upstream.scatter(self.client, [part], worker)
        self._data[rank] = part
        self.futures[rank] = self.client.submit(
            run_trainer,
            self.body,
            {
                "uid": self.spec.uid,
                "run": self.run,
                "rank": rank,
                "size": len(self.spec.parts),
                "bsp": isinstance(self.spec.policy, BSP),
            },
            config.load().register_timeout_seconds,
            part,
            key=f"daskps-trainer-{self.spec.name}-{self.run}-{rank}-{attempt}",
            workers=[worker],
            allow_other_workers=True,
            pure=False,
        )

    async def _one(self, rank: int) -> Any:
        """Await one trainer, with new data where the old went with its worker."""
        for attempt in range(1, MOST_RESTARTS + 2):
            future = self.futures[rank]
            try:
                return await upstream.result(future)
            except CancelledError:
                # The data it was given went with a worker, so Dask gave it up.
                if not self.spec.restartable:
                    raise RunCancelledError(
                        f"trainer {rank} was lost with its worker"
                    ) from None
                if attempt <= MOST_RESTARTS:
                    await self._restart(rank, attempt)
        raise RunCancelledError(f"trainer {rank} lost {attempt} workers in a row")

    async def _restart(self, rank: int, attempt: int) -> None:
        part = self.spec.parts[rank]
        if isinstance(part, Part) and part.is_lost:
            raise RunCancelledError(
                f"trainer {rank} lost its data with a worker, and Dask cannot compute "
                f"what was scattered again; give delayed parts or futures of tasks"
            )
        try:
            workers = await workers_for(self.link, len(self.spec.parts))
        except NotEnoughWorkersError as error:
            # The directory may know more, for example of `client.restart`.
            raise RunCancelledError(f"trainer {rank} was lost: {error}") from error
        await self._start(rank, workers[rank], attempt)

    def cancel(self) -> None:
        """Tell Dask that nobody wants the trainers any more."""
        for future in self.futures.values():
            upstream.release(future)
        self._data.clear()

"""Starting the trainers of a run, hearing from them, and ending it whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.cluster import upstream
from daskps.cluster.caller.lifetime import for_a_run
from daskps.cluster.protocol.packing import unpack_error
from daskps.cluster.runs.graph.driver import GraphDriver
from daskps.cluster.runs.graph.tasks import GraphWork
from daskps.cluster.runs.parts import DataHomes, is_fence
from daskps.cluster.runs.resident import LAST_WORDS_SECONDS, Trainers
from daskps.consistency import encoded
from daskps.epochs import Epochs
from daskps.errors import RunCancelledError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.spec import Launch

logger = logging.getLogger(__name__)
#: When it is said that a run cannot begin yet, as a shard is away.
_SAY_SECONDS = 5.0
_Listener = Callable[[dict[str, Any]], Awaitable[Any]]


async def launch(
    link: Link, spec: Launch, listen: _Listener, began: Callable[[int], None]
) -> list[Any]:
    """Run the trainers to their end.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    spec : Launch
        The run to launch.
    listen : callable
        Awaited with every event of the run and with new clocks.
    began : callable
        Called with the run's id.

    Returns
    -------
    list
        The values that the trainers' bodies returned, in rank order.

    Raises
    ------
    Exception
        The first error of a trainer's own code; else why the run was fenced.
    """
    body, reduce, codec = _pickled(spec)
    await upstream.connected(link.client)
    async with _saying_away(link, spec.uid, spec.name):
        run = await _opened(link, _open(link, spec, reduce, codec))
    began(run)
    trainers: Trainers | GraphDriver
    if spec.graph:
        work = GraphWork(spec.uid, run, len(spec.parts), reduce, body, spec.codec)
        work = replace(work, read_codec=spec.read_codec)
        homes = DataHomes(link, spec.parts, run, only=spec.workers)
        trainers = GraphDriver(
            link, work, homes=homes, schedule=spec.graph, listen=listen
        )
    else:
        trainers = Trainers(link, spec, run, body)
    try:
        return await _followed(trainers.results(), _News(link, run, listen))
    except BaseException as error:
        reason = f"cancelled by its caller ({type(error).__name__})"
        try:
            await link.wind_up(link.over("fence_run", run=run, reason=reason))
        finally:
            # Also where the caller is cancelled once more.
            trainers.cancel()
        raise
    finally:
        await link.wind_up(link.over("close_run", run=run))


async def _open(
    link: Link, spec: Launch, reduce: bytes, codec: tuple[str, bytes]
) -> int:
    """Have the directory begin a run on all shards; return its id."""
    run: int = await link.directory(
        "open_run",
        uid=spec.uid,
        begin={
            "policy": encoded(spec.policy),
            "n_ranks": spec.n_ranks,
            "reduce": upstream.dumps("sum") if spec.graph else reduce,
            "reset": spec.reset,
            "codec": codec,
            "epochs": spec.epochs,
        },
        client=link.client.id,
        size=len(spec.parts),
        restartable=spec.restartable,
        gated=spec.gated,
        graph=spec.graph is not None,
        described=spec.described,
        workers=list(spec.workers),
    )
    return run


async def _opened(link: Link, opening: Coroutine[Any, Any, int]) -> int:
    """Await the run's id; a caller cancelled meanwhile leaves no run behind."""
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:

        async def close_late() -> None:
            # Without a limit: a host may take as long as it likes to begin a run,
            # and until then nobody else can train the store.
            await link.over("close_run", run=await task)

        await link.wind_up(close_late())
        raise


async def _followed(results: Awaitable[list[Any]], news: _News) -> list[Any]:
    """Await what the trainers return, and tell what the directory says meanwhile."""
    watch = asyncio.ensure_future(news.follow())
    work = asyncio.ensure_future(results)
    try:
        await _first_error(work, watch)
        await news.rest(watch)
        return work.result()
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


def _pickled(spec: Launch) -> tuple[bytes, bytes, tuple[str, bytes]]:
    """Return what is the user's, pickled, before anything is started.

    The functions to train and to reduce with, and the codec with its name.
    """
    what = "the function to train with"
    try:
        with for_a_run():
            body, reduce = upstream.dumps(spec.body), upstream.dumps(spec.reduce)
        if spec.codec is None:
            return body, reduce, ("", b"")
        what = f"codec={spec.codec.name!r}"
        pickled = upstream.dumps(spec.codec)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be pickled ({error}); define it at module level or without "
            f"open files, locks and clients"
        ) from error
    return body, reduce, (codecs.name_of(spec.codec, pickled), pickled)


async def _first_error(work: asyncio.Future[Any], watch: asyncio.Future[Any]) -> None:
    """Wait for the results; a fence without an error of its own says why."""
    await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    # Where the directory fenced the run, the trainer that is the reason may still be
    # about to report its own exception, which says more; where a trainer was fenced,
    # the directory knows why. An error of the user's callbacks is its own reason.
    if work.done():
        if is_fence(work.exception()):
            await asyncio.wait({watch}, timeout=LAST_WORDS_SECONDS)
    elif isinstance(watch.exception(), RunCancelledError):
        await asyncio.wait({work}, timeout=LAST_WORDS_SECONDS)
    error = work.exception() if work.done() else None
    if watch.done() and (error is None or is_fence(error)):
        error = watch.exception() or error
    if error is not None:
        raise error


class _News:
    """Tells a listener all that the directory says of a run, each event once."""

    def __init__(self, link: Link, run: int, listen: _Listener) -> None:
        self.link, self.run, self.listen = link, run, listen
        self._seen, self._clock, self._slowest = 0, 0, 0
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
            slowest=self._slowest,
            wait_seconds=wait_seconds,
        )
        return news

    async def _tell(self, news: dict[str, Any]) -> None:
        for event in news["events"]:
            self._seen += 1
            if "away" in event:
                logger.warning("daskps: run %d waits: %s", self.run, event["away"])
            else:
                await self.listen(event)
        clock, slowest = news["clock"], news["slowest"]
        if clock > self._clock or slowest > self._slowest:
            self._clock, self._slowest = clock, slowest
            await self.listen(
                {"clock": clock, "slowest": slowest, "loss": news["loss"]}
            )


async def epochs_of(link: Link, uid: str, name: str) -> tuple[Epochs, str]:
    """Return where a store is in its epochs, and what was said of its last run.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    uid, name : str
        The store.

    Returns
    -------
    Epochs
        Where the run that ended last has left it.
    str
        The text of its `Launch.described`, "" where there was none.

    Raises
    ------
    ConsistencyError
        While a run goes on.
    """
    async with _saying_away(link, uid, name):
        epochs, described = await link.directory("epochs", uid=uid)
        return Epochs(*epochs), described


@asynccontextmanager
async def _saying_away(link: Link, uid: str, name: str) -> AsyncIterator[None]:
    """Say why a run cannot begin, once that takes long."""
    saying = asyncio.ensure_future(_say_away(link, uid, name))
    try:
        yield
    finally:
        saying.cancel()


async def _say_away(link: Link, uid: str, name: str) -> None:
    await asyncio.sleep(_SAY_SECONDS)
    now = await link.directory("find", uid=uid)
    located = await link.directory("locate", uid=now["uid"])
    for shard, why in sorted(located["away"])[:1]:
        worker = located["owners"][shard]
        logger.warning(
            "daskps: a run on store %r waits to begin: shard %d is away, for worker "
            "%s %s",
            *(name, shard, worker, why),
        )

"""Finds where a trainer's data lies on the cluster, and sends it to workers."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from distributed import Client, Future

from daskps.cluster import upstream
from daskps.cluster.protocol.run_start import none_left
from daskps.errors import NotEnoughWorkersError, RunCancelledError

if TYPE_CHECKING:
    from daskps.cluster.caller.link import Link

#: By key: bytes of a result, and the workers that hold it.
DataPlaces: TypeAlias = Mapping[Any, tuple[int, Sequence[str]]]
#: How often data is sent anew because a worker died under it.
_MOST_TRIES = 5


class DataLostError(RunCancelledError):
    """Data of a trainer is gone for good: of why the run ends nobody can say more."""


def is_fence(error: BaseException | None) -> bool:
    """Whether an error says that a run was ended, and others may know why."""
    return isinstance(error, RunCancelledError) and not isinstance(error, DataLostError)


@dataclass(frozen=True, slots=True, eq=False)
class DataPart:
    """One trainer's rows.

    Parameters
    ----------
    rows : int
        Number of rows.
    X : tuple
        The blocks of rows it is made of, in order: futures, or arrays on the client.
    y : tuple or None
        Their labels. The blocks may be cut at other rows than those of `X`.
    worker : str or None
        Where most of it lies; None where that is nowhere yet.
    moved : int
        How many blocks lie on other workers and travel to that one.
    """

    rows: int
    X: tuple[Any, ...]
    y: tuple[Any, ...] | None = None
    worker: str | None = None
    moved: int = 0

    @property
    def blocks(self) -> tuple[Any, ...]:
        """All blocks, those of `X` first."""
        return self.X + (self.y or ())

    @property
    def futures(self) -> Iterator[Future[Any]]:
        """The blocks that are on the cluster."""
        return (block for block in self.blocks if isinstance(block, Future))

    def check(self, rank: int) -> None:
        """Refuse to go on where a block is gone that Dask cannot compute again.

        Raises
        ------
        RunCancelledError
            Naming the trainer.
        """
        check_there(rank, self.futures)

    async def deliver(self, client: Client, worker: str) -> tuple[Any, Any]:
        """Return the argument for tasks on a worker, with the client's arrays sent.

        It resolves to ``(blocks of X, blocks of y or None)``, two lists; the caller
        holds it as long as tasks may need it. Once its worker died, deliver anew:
        what was sent from here went with it.
        """
        here = self.values
        return self.payload(
            await upstream.scatter(client, here, worker) if here else ()
        )

    @property
    def values(self) -> list[Any]:
        """The blocks that are on the client."""
        return [block for block in self.blocks if not isinstance(block, Future)]

    def payload(self, sent: Iterable[Future[Any]]) -> tuple[Any, Any]:
        """Return the argument for tasks, given futures in place of `values`."""
        rest = iter(sent)
        blocks = [b if isinstance(b, Future) else next(rest) for b in self.blocks]
        X, y = blocks[: len(self.X)], blocks[len(self.X) :]
        return X, None if self.y is None else y


def check_there(rank: int, futures: Iterable[Future[Any]]) -> None:
    """Refuse to go on where data of a trainer is gone for good; see `DataPart.check`."""
    for future in futures:
        if future.status == "cancelled":
            raise DataLostError(
                f"trainer {rank} lost its data, part {rank} with {future.key!r:.80}, with "
                f"a worker, and Dask cannot compute what was scattered again; give delayed "
                f"parts or futures of tasks"
            )


async def threads_of(link: Link, only: Sequence[str] = ()) -> dict[str, int]:
    """Return the number of threads of each worker; with `only`, of those it names."""
    info = await link.node.scheduler.identity()
    found = {w: int(about["nthreads"]) for w, about in info["workers"].items()}
    return {w: found[w] for w in only if w in found} if only else found


async def workers_of(link: Link, only: Sequence[str] = ()) -> list[str]:
    """Return the workers there are; with `only`, those of them that it names.

    Raises
    ------
    NotEnoughWorkersError
        If there is none.
    """
    if not (found := list(await threads_of(link, only))):
        if only:
            raise none_left(only)
        raise NotEnoughWorkersError("the cluster has no worker to train on; add some")
    return found


async def check_workers(link: Link, only: Sequence[str]) -> None:
    """Refuse workers that are not there.

    Raises
    ------
    NotEnoughWorkersError
        Naming them, and those there are.
    """
    if not only:
        return
    there = list(await threads_of(link))
    if absent := [worker for worker in only if worker not in there]:
        raise NotEnoughWorkersError(
            f"workers= names {absent[0]!r:.80}, which is no worker of the cluster; it has "
            f"{there[:8]}. Name some of these, or start that one"
        )


async def sent(
    link: Link,
    send: Callable[[list[str]], Awaitable[None]],
    only: Sequence[str] = (),
) -> None:
    """Send data to the workers there are, again where one of them dies under it.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    send : callable
        Given the workers it sends what none of them has yet.
    only : sequence of str
        The workers that may have it; all, where it names none.
    """
    for tries in itertools.count(1):
        try:
            await send(await workers_of(link, only))
        except OSError:
            # The scheduler may have yet to hear of that.
            if tries > _MOST_TRIES:
                raise
            await asyncio.sleep(0.1 * tries)
        else:
            return


async def computed(futures: Iterable[Future[Any]]) -> None:
    """Wait until all results are there, or raise the first error, without a copy."""
    waiting = [asyncio.ensure_future(upstream.computed(f)) for f in futures]
    try:
        await asyncio.gather(*waiting)
    finally:
        for task in waiting:
            task.cancel()


async def places(link: Link, futures: Sequence[Future[Any]]) -> DataPlaces:
    """Wait for results, and ask the scheduler where they are and how large."""
    await computed(futures)
    keys = list({future.key for future in futures})
    if not keys:
        return {}
    scheduler = link.node.scheduler
    workers, nbytes = await asyncio.gather(
        scheduler.who_has(keys=keys), scheduler.nbytes(keys=keys, summary=False)
    )
    return {key: (nbytes[key], workers[key]) for key in keys}


async def placed(
    link: Link, parts: Sequence[DataPart], only: Sequence[str] = ()
) -> list[DataPart]:
    """Wait for the data of parts, give each the worker that holds most of it."""
    futures = [future for part in parts for future in part.futures]
    return homes(parts, await places(link, futures), only)


def homes(
    parts: Sequence[DataPart], held: DataPlaces, only: Sequence[str] = ()
) -> list[DataPart]:
    """Give each part the worker that holds most of its bytes, with `only` one of these.

    Among workers that hold as much, the one with the fewest parts so far.
    """
    load: Counter[str] = Counter()
    found = []
    for part in parts:
        nbytes: Counter[str] = Counter(dict.fromkeys(only, 0))
        for future in part.futures:
            size, workers = held[future.key]
            can = [w for w in workers if w in nbytes] if only else workers
            nbytes.update(dict.fromkeys(can, size))
        worker = min(nbytes, key=lambda w: (-nbytes[w], load[w], w), default=None)
        if worker is not None:
            load[worker] += 1
        moved = sum(is_elsewhere(held, f, worker) for f in part.futures)
        found.append(replace(part, worker=worker, moved=moved))
    return found


def is_elsewhere(held: DataPlaces, future: Future[Any], worker: str | None) -> bool:
    """Whether a result is on the cluster, but not on this worker."""
    _, workers = held[future.key]
    return bool(workers) and worker not in workers


async def asked(
    link: Link, futures: Sequence[Future[Any]], function: Any
) -> tuple[list[Any], DataPlaces]:
    """Return what a small function says of each result, and where they are."""
    held = await places(link, futures)
    answers = [beside(link.client, held, function, future) for future in futures]
    return await upstream.results(link.client, answers), held


def beside(
    client: Client, held: DataPlaces, function: Any, future: Future[Any], *args: Any
) -> Future[Any]:
    """Submit a small function of a result to where the result is."""
    _, workers = held[future.key]
    found: Future[Any] = client.submit(
        function,
        future,
        *args,
        workers=list(workers) or None,
        allow_other_workers=bool(workers),
        pure=False,
    )
    return found


class DataHomes:
    """Where the data of each rank is; brought back where it was lost.

    Parameters
    ----------
    link : Link
        The client's way to the cluster.
    parts : list of DataPart
        Data of each rank. Its maker may empty the list once the run is over.
    run : int
        The run.
    only : sequence of str
        The workers that ranks may be on; all, where it names none.
    """

    def __init__(
        self,
        link: Link,
        parts: Sequence[DataPart],
        run: int,
        *,
        only: Sequence[str] = (),
    ) -> None:
        self._link, self._parts, self._run, self.only = link, parts, run, only
        #: By rank its data, in the form in which tasks get it.
        self.payloads: list[Any] = [None] * len(parts)
        #: Worker that holds it, "" where that is anywhere.
        self.workers: list[str] = [part.worker or "" for part in parts]
        self._sent: dict[int, list[Future[Any]]] = {}

    async def settle(self) -> None:
        """Send what is on the client to a worker, contiguous ranks together."""
        await sent(self._link, self._settle, self.only)

    async def _settle(self, workers: list[str]) -> None:
        missing: dict[str, list[int]] = {}
        for rank, part in enumerate(self._parts):
            part.check(rank)
            if part.values:
                if not self._is_there(rank, workers):
                    home = self._home(rank, part, workers)
                    missing.setdefault(home, []).append(rank)
            else:
                self.payloads[rank] = part.payload(())
                if self.workers[rank] not in workers:
                    # Dask computes it again, wherever it likes.
                    self.workers[rank] = ""
        for home, ranks in missing.items():
            await self._send(home, ranks)
        await self._link.directory("trains_on", run=self._run, workers=self.workers)

    def _home(self, rank: int, part: DataPart, workers: Sequence[str]) -> str:
        """Return where to send the client's arrays: to the rest, if that is somewhere.

        Else contiguous ranks go to one worker: their sums are formed there.
        """
        if any(part.futures) and self.workers[rank] in workers:
            return self.workers[rank]
        return workers[rank * len(workers) // len(self._parts)]

    def _is_there(self, rank: int, workers: Sequence[str]) -> bool:
        return (
            rank in self._sent
            and self.workers[rank] in workers
            and all(future.status == "finished" for future in self._sent[rank])
        )

    async def _send(self, home: str, ranks: Sequence[int]) -> None:
        """Send the arrays of some ranks in one message."""
        here = {rank: self._parts[rank].values for rank in ranks}
        flat = [value for rank in ranks for value in here[rank]]
        futures = iter(await upstream.scatter(self._link.client, flat, home))
        for rank in ranks:
            self._sent[rank] = [next(futures) for _ in here[rank]]
            self.payloads[rank] = self._parts[rank].payload(self._sent[rank])
            self.workers[rank] = home

    def clear(self) -> None:
        """Let go of the data."""
        self._sent.clear()
        self.payloads.clear()

"""Keeps track of the workers that hold the data of a graph run's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from daskps.cluster import upstream
from daskps.cluster.runs.parts import sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distributed import Future

    from daskps.cluster.caller.link import Link
    from daskps.cluster.runs.parts import DataPart


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
        sent = iter(await upstream.scatter(self._link.client, flat, home))
        for rank in ranks:
            self._sent[rank] = [next(sent) for _ in here[rank]]
            self.payloads[rank] = self._parts[rank].payload(self._sent[rank])
            self.workers[rank] = home

    def clear(self) -> None:
        """Let go of the data."""
        self._sent.clear()
        self.payloads.clear()

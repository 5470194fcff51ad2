"""How many threads apply one update: those of cores that no worker's thread claims.

The directory knows what the workers of a machine claim, each of them how many cores it
may use. What is idle is shared among them. Changes are told a little later and together,
and only to whom they mean another number: where every core is claimed, to nobody.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from dask.system import cpu_count
from distributed.comm.addressing import get_address_host

from daskps import config
from daskps.cluster.handlers import DIRECTORY, HOST
from daskps.cluster.messages import unpack_reply
from daskps.errors import DaskPSError, ProtocolError
from daskps.kernels import threads

if TYPE_CHECKING:
    from distributed import Scheduler, Worker

    from daskps.cluster.entry import Hosts
    from daskps.cluster.host import ShardHost

logger = logging.getLogger(__name__)
#: How long changes are collected: many workers start at the same time.
PAUSE_SECONDS = 0.5
#: How long a worker may take to answer.
ANSWER_SECONDS = 15.0
#: Pause after a message that did not get through.
AGAIN_SECONDS = 5.0
#: Threads that an update takes at most: more than two cores were not measured.
MOST = 8
#: Cores that a machine may have; more are a mistake.
MOST_CORES = 65_536

#: Hosts of this process by address, and what tells the directory of their cores.
_following: dict[str, asyncio.Future[None] | None] = {}


def share(cores: int, claimed: int, workers: int) -> int:
    """Return how many threads a worker's updates take.

    Parameters
    ----------
    cores : int
        What its process may use.
    claimed, workers : int
        Threads of all workers of its machine, and how many workers these are.
    """
    return min(MOST, 1 + max(0, cores - claimed) // workers)


class Cores:
    """What the workers of each machine may use and claim, for the directory.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    """

    def __init__(self, scheduler: Scheduler, hosts: Hosts) -> None:
        self._scheduler, self._hosts = scheduler, hosts
        #: Cores by worker, of those that have a host, and what they were told.
        self._cores: dict[str, int] = {}
        self._told: dict[str, int] = {}
        #: Machines by address: those to look at soon, and those that are being told.
        self._due: set[str] = set()
        self._telling: set[str] = set()
        #: Those of which a worker did not answer, until they are looked at again.
        self._again: set[str] = set()

    @DIRECTORY.handles("cores")
    def on_cores(self, worker: str, n: int) -> None:
        """Hear from a host how many cores it may use; a new one takes one thread."""
        if not 1 <= n <= MOST_CORES:
            raise ProtocolError(f"worker {worker} with {n} cores")
        self._cores[worker] = n
        self._told.setdefault(worker, 1)
        self.changed(worker)

    def left(self, worker: str) -> None:
        """Hear of a worker that left."""
        self._cores.pop(worker, None)
        self._told.pop(worker, None)
        self.changed(worker)

    def changed(self, worker: str) -> None:
        """Look, a little later, at the machine of a worker that came or left."""
        self._changed(get_address_host(worker))

    def _changed(self, machine: str) -> None:
        if machine not in self._due:
            self._due.add(machine)
            self._look_later(machine)

    def _look_later(self, machine: str) -> None:
        # A timer: unlike a task it may be left over when the scheduler closes.
        asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._look, machine)

    def _look(self, machine: str) -> None:
        if machine in self._telling:
            # What is told last must be heard last.
            self._look_later(machine)
            return
        self._due.discard(machine)
        if news := self._news(machine):
            self._telling.add(machine)
            self._hosts.spawn(self._tell(machine, news))

    async def _tell(self, machine: str, news: dict[str, int]) -> None:
        try:
            work = (self._tell_one(w, n) for w, n in news.items())
            is_lost = any(await asyncio.gather(*work))
        finally:
            self._telling.discard(machine)
        if not is_lost or machine in self._again:
            return
        # Perhaps nobody comes or leaves any more. A task, which ends with the directory.
        self._again.add(machine)
        try:
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            self._again.discard(machine)
        self._changed(machine)

    def _news(self, machine: str) -> dict[str, int]:
        """Return the numbers that workers of a machine have yet to hear."""
        info = self._scheduler.host_info.get(machine)
        if info is None:
            return {}
        near, claimed = info["addresses"], info["nthreads"]
        found = {
            worker: share(self._cores[worker], claimed, len(near))
            for worker in near
            if worker in self._cores
        }
        return {w: n for w, n in found.items() if n != self._told[w]}

    async def _tell_one(self, worker: str, n: int) -> bool:
        """Tell one worker; return whether that got lost, and not refused."""
        heard, is_lost = 0, False
        try:
            told = self._hosts.control(worker, "update_threads", n=n)
            await asyncio.wait_for(told, ANSWER_SECONDS)
            heard = n
        except (OSError, DaskPSError) as error:
            logger.debug("%s was not told of %d threads: %r", worker, n, error)
            is_lost = isinstance(error, OSError)
        if worker in self._told:
            # Where it is not known, whatever comes next is news.
            self._told[worker] = heard
        return is_lost


def follow(worker: Worker, cluster: str) -> None:
    """Have the updates of this process take as many threads as they may.

    Parameters
    ----------
    worker : Worker
        Who has a host here now.
    cluster : str
        The scheduler's id, "" where it is not known to have a directory.
    """
    n = config.load().update_threads
    before = _following.pop(worker.address, None)
    reporting: asyncio.Future[None] | None = None
    if n is not None:
        threads.allow(n)
    elif cluster:
        reporting = asyncio.ensure_future(_report(worker))
    else:
        # Who knows of no directory takes nothing back.
        reporting, before = before, None
    if before is not None:
        before.cancel()
    _following[worker.address] = reporting


async def _report(worker: Worker) -> None:
    """Tell the directory, until it hears or refuses."""
    scheduler: Any = worker.scheduler
    while True:
        try:
            reply = await scheduler.daskps_directory(
                method="cores", worker=worker.address, n=cpu_count()
            )
            unpack_reply(reply, "the scheduler")
            return
        except OSError as error:
            logger.debug("%s updates in one thread yet: %r", worker.address, error)
        except Exception as error:  # noqa: BLE001 - a task nobody awaits
            logger.info("%s updates in one thread: %r", worker.address, error)
            return
        await asyncio.sleep(AGAIN_SECONDS)


def leave(worker: Worker) -> None:
    """Let go of a host; the threads end with the last one of this process."""
    if (reporting := _following.pop(worker.address, None)) is not None:
        reporting.cancel()
    if not _following:
        threads.allow(1)


@HOST.handles("update_threads")
async def update_threads(host: ShardHost, n: int) -> None:
    """Hear from the directory how many threads an update may take."""
    if config.load().update_threads is None:
        threads.allow(n)

"""The memory that Dask counts for a worker, without the blocks of other processes.

The system charges every process for the pages of shared memory it has touched: one
block of ours would count once in each process that reads it, and Dask would pause and
kill workers that hold nothing. Here a block counts once, for the process that made or
adopted it. Two measurements are corrected: the worker's own, which decides whether it
spills and pauses, and that of its nanny, which decides whether to end it. A process in
which one of them cannot be corrected maps no blocks of others, see :func:`may_map`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from concurrent.futures import CancelledError, Future
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from distributed.diagnostics.plugin import NannyPlugin

from daskps import config
from daskps.cluster import upstream
from daskps.cluster.machine.mapping import FILES
from daskps.cluster.machine.processes import THIS, are_one
from daskps.cluster.machine.warnings import warn_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from distributed import Nanny, Worker

logger = logging.getLogger(__name__)
#: Looks of a nanny, ten a second by Dask's default, after it has seen blocks of others:
#: while a large one is being unmapped, the system still charges for it but does not
#: list it any more.
GRACE = 5
#: How long after its worker was told to, callers wait for what a nanny answers.
PATIENCE_SECONDS = 2.0
_PROC = Path("/proc")
_SHARED = re.compile(rb"^RssShmem:\s+(\d+) kB$", re.MULTILINE)
#: Head of a mapping of ours in ``smaps``, with its owner, and what of it is resident.
_OURS = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ [^\n]*/daskps-\d+-[0-9a-f]{16}/([0-9a-f]{16})-[0-9a-f]{16}"
    rb"(?: \(deleted\))?\n(?:[A-Z][^\n]*\n)*?Rss:\s+(\d+) kB$",
    re.MULTILINE,
)


class Charge(NamedTuple):
    """That Dask charges a worker for blocks of others."""

    why: str
    #: The way to end that; "" where the nanny has yet to answer, which may end it.
    remedy: str


class _Question(NamedTuple):
    """A question to a nanny, and how long callers wait for its answer."""

    #: That its worker is charged, None if it is not.
    answer: Future[Charge | None]
    #: When the patience of all callers is over, as :func:`time.monotonic`.
    until: float


_asked: WeakKeyDictionary[Worker, _Question] = WeakKeyDictionary()


def begin_accounting(worker: Worker) -> None:
    """Have Dask count for a worker what is its own; on its event loop.

    Parameters
    ----------
    worker : distributed.Worker
        The worker; its nanny hears of it a little later, as soon as it has started.
    """
    charge = _uncorrectable(worker.address)
    if charge is not None or worker.nanny is None:
        answer = Future[Charge | None]()
        answer.set_result(charge)
    else:
        loop = asyncio.get_running_loop()
        answer = asyncio.run_coroutine_threadsafe(_tell_nanny(worker), loop)
    _asked[worker] = _Question(answer, monotonic() + PATIENCE_SECONDS)
    if charge is None:
        upstream.measure_memory_by(worker, _corrected)


def _uncorrectable(address: str) -> Charge | None:
    """Return why a worker's own figure stays as it is, None where it need not."""
    if not config.load().correct_memory:
        why = f"{address}: daskps.correct-memory is false"
        return Charge(why, "set it to true where the worker starts")
    if _shared_nbytes() is None:
        why = f"{address}: {_PROC} does not say what of its memory is shared"
        return Charge(why, "give it a Linux whose /proc tells RssShmem")
    return None


async def _tell_nanny(worker: Any) -> Charge | None:
    """Give a worker's nanny its part; return why that was not possible."""
    plugin = upstream.dumps(NannyMemory(THIS.number))
    try:
        async with worker.rpc(worker.nanny) as nanny:
            reply = await nanny.plugin_add(plugin=plugin, name=NannyMemory.name)
    except Exception as error:  # noqa: BLE001 - messages can be sent without it
        found = repr(error)
    else:
        if reply["status"] == "OK":
            return None
        found = reply.get("exception_text", reply)
    return Charge(
        f"{worker.address}: its nanny takes no plugin ({found})",
        "have the nanny import daskps and see the worker's /proc/PID/smaps",
    )


def may_map() -> bool:
    """Return whether blocks of other workers may be mapped into this process.

    Where that will stay impossible the log says why, and how to allow it, once.
    """
    charge = charged()
    if charge is not None and charge.remedy:
        warn_once(
            logger,
            charge.why,
            "calls of shards on other workers of this machine are sent as messages, and "
            "their memory is not mapped: Dask would count it as this worker's own (%s); "
            "to allow it %s, or start the worker without a memory limit",
            *charge,
        )
    return charge is None


def charged() -> Charge | None:
    """Return why a worker of this process is charged for blocks of others.

    The nanny of a worker that has just started is waited for: all who ask share one
    patience, and on an event loop, which brings the answer, there is none.

    Returns
    -------
    Charge or None
        None where none is, and any block may be touched.
    """
    is_on_loop = _is_on_loop()
    for worker in upstream.workers():
        if worker.memory_manager.memory_limit is None:
            continue
        asked = _asked.get(worker)
        if asked is None:
            return Charge(
                f"{worker.address}: it has no host of daskps",
                "start it with --preload daskps.preload",
            )
        left = 0.0 if is_on_loop else max(0.0, asked.until - monotonic())
        try:
            charge = asked.answer.result(left)
        except (TimeoutError, CancelledError):
            return Charge(f"{worker.address}: its nanny has not answered", "")
        if charge is not None:
            return charge
    return None


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _corrected(measure: Callable[[], int]) -> int:
    """Return what a worker measures, without blocks of other processes."""
    # A large block that goes at this moment is in one of the three.
    before, charged = _ours_nbytes(), measure()
    ours = max(before, _ours_nbytes())
    return charged - min(ours, charged) + FILES.nbytes(owned=True)


def _ours_nbytes() -> int:
    """Return the bytes of blocks that this process is charged for."""
    mapped = FILES.nbytes()
    # Never more than is ours: a user's code may share memory of its own.
    return min(_shared_nbytes() or 0, mapped) if mapped else 0


def _shared_nbytes() -> int | None:
    """Return the bytes of shared memory that this process is charged for.

    None where the system does not say.
    """
    try:
        found = _SHARED.search((_PROC / "self/status").read_bytes())
    except OSError:  # another system, or a sandbox
        return None
    return int(found[1]) * 1024 if found else None


def foreign_nbytes(pid: int | None, number: int) -> int:
    """Return what a process is charged for blocks of others.

    Parameters
    ----------
    pid : int
        The process.
    number : int
        Its number: another one that shares memory may have its process id.

    Returns
    -------
    int
        Resident bytes; 0 where the system does not tell.
    """
    try:
        smaps = (_PROC / str(pid) / "smaps").read_bytes()
    except OSError:  # gone, not ours, or another system
        return 0
    return 1024 * sum(
        int(nkib)
        for owner, nkib in _OURS.findall(smaps)
        if not are_one(int(owner, 16), number)
    )


class NannyMemory(NannyPlugin):
    """Keeps a nanny from ending a worker for blocks of other processes.

    Each worker process that a nanny starts registers its own, in place of the last one's.
    Where the nanny may not see what its worker has mapped it is refused, by an OSError.

    Parameters
    ----------
    number : int
        That of the worker's process.
    """

    name = "daskps-nanny-memory"
    idempotent = True

    def __init__(self, number: int) -> None:
        self.number = number

    def setup(self, nanny: Nanny) -> None:
        """Go between the nanny's timer and its monitor."""
        look = upstream.nanny_look(nanny)
        if look is None:
            return
        with (_PROC / str(nanny.pid) / "smaps").open("rb") as smaps:
            if not smaps.readline():
                raise OSError(f"{smaps.name} is empty")
        monitor = look.monitor if isinstance(look, _Watch) else look
        upstream.set_nanny_look(nanny, _Watch(nanny, monitor, self.number))

    def teardown(self, nanny: Nanny) -> None:
        """Let the nanny measure by itself again."""
        look = upstream.nanny_look(nanny)
        if isinstance(look, _Watch):
            upstream.set_nanny_look(nanny, look.monitor)


class _Watch:
    """Lets a nanny look only where its worker has too much of its own."""

    def __init__(self, nanny: Nanny, monitor: Callable[[], None], number: int) -> None:
        self._nanny, self.monitor, self.number = nanny, monitor, number
        #: Looks at which the system may still charge for blocks that are gone.
        self._grace = 0

    def __call__(self) -> None:
        manager: Any = self._nanny.memory_manager
        pid = self._nanny.pid
        try:
            pages = int((_PROC / str(pid) / "statm").read_bytes().split()[1])
        except OSError:
            # Without these figures Dask decides alone.
            self.monitor()
            return
        allowed: float = manager.memory_limit * manager.memory_terminate_fraction
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        if resident <= allowed:
            return
        # Listing all mappings takes a while, and is seldom needed.
        if resident - foreign_nbytes(pid, self.number) <= allowed:
            self._grace = GRACE
        elif self._grace:
            self._grace -= 1
        else:
            self.monitor()

"""Runs as the directory sees them: who has registered, who is lost, when to stop.

Nothing here happens per step: a trainer talks to the directory when it registers, at
the end of an epoch and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.directory.beginning import begin_everywhere, give_up
from daskps.cluster.directory.entry import remember
from daskps.cluster.directory.fencing import END_SECONDS, SETTLE_SECONDS, Ending
from daskps.cluster.directory.run import EpochReport, RunState, rounds_lost
from daskps.cluster.wire.begin import Who, check_begin
from daskps.cluster.wire.handlers import DIRECTORY
from daskps.cluster.wire.messages import pack_error
from daskps.cluster.wire.wellformed import check
from daskps.errors import (
    ConsistencyError,
    NotEnoughWorkersError,
    ProtocolError,
    RunCancelledError,
    ShardLostError,
    StaleGenerationError,
)
from daskps.limits import check_trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.directory.entry import Hosts, StoreEntry

logger = logging.getLogger(__name__)
#: How long a run tries to begin while a host of its store fails or is silent.
OPEN_SECONDS = 10.0


class Runs:
    """The runs of all stores."""

    def __init__(
        self,
        hosts: Hosts,
        entry: Callable[[str], StoreEntry],
        new_id: Callable[[], int],
    ) -> None:
        self._hosts = hosts
        self._entry = entry
        self._new_id = new_id
        self._runs: dict[int, RunState] = {}
        #: Why runs have ended that are over, and what their shards were told.
        self._ended: dict[int, tuple[Exception | None, dict[str, Any]]] = {}

    # -- life ----------------------------------------------------------------

    @DIRECTORY.handles("open_run")
    async def on_open_run(self, uid: str, begin: dict[str, Any], **who: Any) -> int:
        """Start a run on every shard of a store.

        `begin` is for the hosts, as `Begin` has it; `who` is as `Who` has it.
        """
        check(Who, who, "a request for a run")
        check_trainers(who["size"], graph=who["graph"])
        check_begin(begin)
        sync, staleness = begin["policy"]
        left, clock = OPEN_SECONDS, asyncio.get_running_loop().time
        for tries in itertools.count(1):
            entry = await self._free_entry(uid)
            if not self._hosts.has_client(who["client"]):
                # The run would never end, and keeps all others from the store.
                raise RunCancelledError(f"client {who['client']} left before its run")
            run = RunState(self._new_id(), entry, bsp=sync == "bsp", **who)
            began, pause = clock(), min(0.05 * tries, 0.5)
            try:
                await self._begin(run, begin, left)
                break
            except (OSError, StaleGenerationError, RunCancelledError) as error:
                # A host dies: its shards find an owner, or are lost. How long that
                # takes does not count, and the scheduler may have yet to hear of it.
                left -= clock() - began + pause
                if left <= 0:
                    give_up(entry, error, OPEN_SECONDS)
                await asyncio.sleep(pause)
        self._tell(
            "run-begun",
            run,
            sync=sync,
            staleness=staleness,
            trainers=run.size,
            execution="graph" if run.graph else "resident",
        )
        return run.id

    async def _free_entry(self, uid: str) -> StoreEntry:
        """Return a store that can be trained now, or refuse."""
        away = config.load().run_away_seconds
        await self._entry(uid).settled_within(away)
        entry = self._entry(uid)
        while runs := [r for r in self._of(entry) if r.ended or not r.fenced]:
            if not runs[0].fenced:
                raise ConsistencyError(
                    f"run {runs[0].id} is training store {entry.name!r} already; wait "
                    f"for it to end or cancel it, a store takes one run at a time"
                )
            await self._over(runs[0], OPEN_SECONDS)
            entry = self._entry(uid)
        for shard, (worker, reason) in entry.lost.items():
            raise ShardLostError(entry.name, shard, worker, reason)
        return entry

    async def _begin(
        self, run: RunState, begin: dict[str, Any], seconds: float
    ) -> None:
        """Begin a run on all hosts of its store; where one fails, on none."""
        self._runs[run.id] = run
        try:
            mailboxes = await begin_everywhere(self._hosts, run, begin, seconds)
            if run.fenced:
                raise run.fenced
        except BaseException as error:
            fenced = run.fenced
            # Also where it was fenced: that end may have come before its beginning.
            await self._undo(run)
            if fenced and isinstance(error, Exception):
                raise fenced from None
            raise
        run.mailboxes, run.began = mailboxes, True

    @DIRECTORY.handles("close_run")
    async def on_close_run(self, run: int) -> None:
        """End a run that is over."""
        if run in self._runs:
            if not self._runs[run].fenced:
                self._tell("run-ended", self._runs[run])
            await self._end(self._runs[run], RunCancelledError("it has ended"))

    @DIRECTORY.handles("fence_run")
    async def on_fence_run(
        self, run: int, reason: str, wait: bool = True, worker: str = ""
    ) -> None:
        """Cancel a run: its trainers' calls fail from here on.

        With `wait` the caller hears of it when all shards have ended it. `worker` is
        whose trainer asks; one that has left cannot: another trainer is in its place.
        """
        if worker and not self._hosts.has_worker(worker):
            logger.info("daskps: %s has left, and ends no run: %s", worker, reason)
        elif run in self._runs:
            fencing = self._fence(self._runs[run], RunCancelledError(reason))
            if wait:
                await fencing
            else:
                self._hosts.spawn(fencing)

    async def _fence(self, run: RunState, error: Exception) -> None:
        if not run.fenced:
            self._tell("run-fenced", run, reason=str(error))
        await self._end(run, error)

    async def _end(self, run: RunState, error: Exception) -> None:
        """End a run on all shards; wait for that as long as it gets on.

        A store one of whose shards is away or silent stays held until that has heard
        of it, and takes no other run.
        """
        clock = asyncio.get_running_loop().time
        run.fenced = run.fenced or error
        if not run.began:
            await self._undo(run)
        elif run.ended is None:
            run.end_by = clock() + END_SECONDS
            run.ended = self._hosts.spawn(self._settle(run))
        await self._notify(run)
        while run.ended and not run.ended.done() and (left := run.end_by - clock()) > 0:
            await asyncio.wait({run.ended}, timeout=left)

    async def _settle(self, run: RunState) -> None:
        """End a run on all its shards, however long one of them is away."""
        how: dict[str, Any] = {"reason": str(run.fenced)}
        try:
            found = await Ending(self._hosts, run, how["reason"]).settle()
            how |= found.to_wire()
        finally:
            await self._forget(run, how)

    async def _forget(self, run: RunState, how: dict[str, Any]) -> None:
        """Remember of a run what became of it, and nothing else."""
        self._runs.pop(run.id, None)
        remember(self._ended, run.id, (run.fenced, how))
        await self._notify(run)
        if run.graph:
            # On all workers: a task of the run may be at work on any of them.
            self._hosts.spawn(self._hosts.broadcast("end_graph", run=run.id))

    async def _undo(self, run: RunState) -> None:
        """End a run that could not begin everywhere: no shard has taken a step of it."""
        reason = "it could not begin"
        run.fenced = run.fenced or RunCancelledError(reason)
        await self._forget(run, {"reason": reason})
        ended = self._hosts.everywhere(run.entry, "end_run", run=run.id, reason=reason)
        # The others have ended when a silent host has not; it is told when it wakes.
        await asyncio.wait({self._hosts.spawn(ended)}, timeout=SETTLE_SECONDS)

    async def _over(self, run: RunState, seconds: float) -> None:
        """Wait until a run that was fenced has ended on all shards, or refuse."""
        if run.ended is None:
            return
        done, _ = await asyncio.wait({run.ended}, timeout=seconds)
        if not done:
            raise NotEnoughWorkersError(
                f"run {run.id} on store {run.entry.name!r} is over, but has not ended on "
                f"all shards yet: that waits for {run.waits_for}; start the run again "
                f"when that is there, or end the worker"
            )

    def _tell(self, action: str, run: RunState, **more: Any) -> None:
        self._hosts.tell(action, run.entry, run=run.id, **more)

    async def _notify(self, run: RunState) -> None:
        async with run.changed:
            run.changed.notify_all()

    def _get(self, run: int, rank: int = 0) -> RunState:
        if run not in self._runs:
            error = self.why_over(run)
            raise RunCancelledError(f"run {run} is over: {error or 'it is unknown'}")
        entry = self._runs[run]
        if not 0 <= rank < entry.size:
            raise ProtocolError(f"trainer {rank} of the {entry.size} of run {run}")
        return entry

    async def _wait(self, run: RunState, done: Any, seconds: float) -> bool:
        """Wait until `done()` or the run is fenced; return whether it was done."""
        timeout = None if math.isinf(seconds) else seconds
        async with run.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    run.changed.wait_for(lambda: done() or run.fenced), timeout
                )
        return bool(done())

    def why_over(self, run: int) -> Exception | None:
        """Return why a run is over, None while it is not or where it is unknown."""
        if run in self._runs:
            return self._runs[run].fenced
        return self._ended[run][0] if run in self._ended else None

    def how_over(self, run: int) -> dict[str, Any] | None:
        """Return how a run has ended on all shards that could be reached, once it has."""
        return self._ended[run][1] if run in self._ended else None

    # -- trainers ------------------------------------------------------------

    @DIRECTORY.handles("register")
    async def on_register(
        self, run: int, rank: int, worker: str, wait_seconds: float
    ) -> dict[str, Any]:
        """Register a trainer and wait for the others.

        Returns which of its rank it is, from 1, and where the mailboxes of the run are.
        """
        entry = self._get(run, rank)
        if not self._hosts.has_worker(worker):
            # Dask has given its task to another one, whose place it must not take.
            raise RunCancelledError(
                f"worker {worker} is none of the cluster's any more"
            )
        attempt = entry.attempts.get(rank, 0) + 1
        if attempt > 1 and not entry.restartable:
            error = RunCancelledError(
                f"trainer {rank} lost its worker and may not start again; use "
                f"on_trainer_lost='restart' in train, or resumable=True in run with "
                f"a loop that begins at trainer.clock"
            )
            await self._fence(entry, error)
            raise error
        entry.attempts[rank] = attempt
        entry.ranks[rank] = worker
        await self._notify(entry)
        met = await self._wait(
            entry, lambda: len(entry.attempts) == entry.size, wait_seconds
        )
        if entry.fenced:
            raise RunCancelledError(f"run {run} is over: {entry.fenced}")
        if not met:
            short = NotEnoughWorkersError(
                f"{len(entry.attempts)} of {entry.size} trainers registered within "
                f"{wait_seconds:g} s; add workers, ask for fewer trainers=, or free "
                f"threads that other tasks hold"
            )
            await self._fence(entry, short)
            raise short
        return {"attempt": attempt, "mailboxes": entry.mailboxes}

    @DIRECTORY.handles("trains_on")
    async def on_trains_on(self, run: int, workers: Sequence[str]) -> None:
        """Hear where the data of each rank of a graph run is."""
        entry = self._get(run)
        if len(workers) != entry.size:
            raise ProtocolError(f"{len(workers)} workers for {entry.size} parts")
        entry.ranks = dict(enumerate(workers))

    def contributed(self, run: int, worker: str) -> None:
        """Note that a gradient task has ended on a worker."""
        if run in self._runs:
            self._runs[run].holders.add(worker)

    def forgotten(self, run: int, attempt: int, number: int) -> None:
        """Free contributions whose task the scheduler has forgotten.

        A window is forgotten as a whole: one message to each worker will do.
        """
        entry = self._runs.get(run)
        if entry is None:
            return
        if not entry.forgotten:
            # Later: this is called in the middle of the scheduler's transitions.
            asyncio.get_running_loop().call_soon(self._free, entry)
        entry.forgotten = max(entry.forgotten, (attempt, number))

    def _free(self, run: RunState) -> None:
        attempt, last = run.forgotten
        run.forgotten = ()
        for worker in run.holders:
            self._hosts.spawn(
                self._hosts.control(
                    worker, "free", run=run.id, attempt=attempt, last=last
                )
            )

    @DIRECTORY.handles("finishes")
    async def on_finishes(self, run: int, rank: int, worker: str) -> None:
        """Refuse a trainer that would end its rank, which another one goes on with."""
        entry = self._get(run, rank)
        if entry.ranks.get(rank) != worker or not self._hosts.has_worker(worker):
            raise RunCancelledError(
                f"trainer {rank} of run {run} on {worker} ends nothing: its worker was "
                f"taken for lost, and another one goes on in its place"
            )

    @DIRECTORY.handles("finished")
    async def on_finished(self, run: int, rank: int, clock: int) -> None:
        """Hear that a trainer has ended."""
        entry = self._get(run, rank)
        entry.finished.add(rank)
        entry.clock = max(entry.clock, clock)
        await self._announce(entry)

    @DIRECTORY.handles("report")
    async def on_report(
        self, run: int, rank: int, epoch: int, report: dict[str, Any]
    ) -> bool:
        """Take one trainer's epoch, return whether it should stop.

        In a gated run it waits until the client has decided.
        """
        entry = self._get(run, rank)
        check(EpochReport, report, "the report of an epoch")
        if epoch < 0 or (entry.gated and epoch > entry.allowed):
            raise ProtocolError(
                f"trainer {rank} reports epoch {epoch}, and may have trained no more "
                f"than epoch {entry.allowed}"
            )
        if epoch >= entry.announced:
            # The first report counts: a trainer that starts again repeats its last.
            entry.reports.setdefault(epoch, {}).setdefault(rank, report)
        await self._announce(entry)
        if entry.gated:
            await self._wait(entry, lambda: entry.allowed > epoch, math.inf)
            if entry.fenced:
                raise RunCancelledError(f"run {run} is over: {entry.fenced}")
        return entry.stopped

    async def _announce(self, run: RunState) -> None:
        """Tell the client of every epoch that all live trainers have ended."""
        while rows := run.reports.get(run.announced):
            if len(rows.keys() | run.finished) < run.size:
                break
            run.events.append({"epoch": run.announced, "reports": list(rows.values())})
            del run.reports[run.announced]
            run.announced += 1
        await self._notify(run)

    @DIRECTORY.handles("progress")
    async def on_progress(
        self, run: int, rank: int, *, clock: int, loss: float | None, rows: int
    ) -> None:
        """Hear how far a trainer is: its clock, and the epoch's losses and rows."""
        entry = self._get(run, rank)
        entry.tell(rank, clock, loss, rows)
        await self._notify(entry)

    # -- the client ----------------------------------------------------------

    @DIRECTORY.handles("watch")
    async def on_watch(
        self, run: int, *, seen: int, clock: int, slowest: int, wait_seconds: float
    ) -> dict[str, Any]:
        """Wait for news of a run: events after the first `seen`, a later clock."""
        entry = self._runs.get(run)
        if entry is None:
            unknown = f"the scheduler knows no run {run}; start it again"
            error = self.why_over(run) or RunCancelledError(unknown)
            return {
                "events": [],
                "clock": clock,
                "slowest": slowest,
                "loss": None,
                "error": pack_error(error),
            }
        # What the client has seen need not be kept.
        n_seen = min(max(0, seen - entry.first_event), len(entry.events))
        del entry.events[:n_seen]
        entry.first_event += n_seen
        await self._wait(
            entry,
            lambda: (
                bool(entry.events) or entry.clock > clock or entry.slowest > slowest
            ),
            wait_seconds,
        )
        return {
            "events": list(entry.events),
            "clock": entry.clock,
            "slowest": entry.slowest,
            "loss": entry.loss,
            "error": pack_error(entry.fenced) if entry.fenced else None,
        }

    @DIRECTORY.handles("verdict")
    async def on_verdict(self, run: int, epoch: int, stop: bool) -> None:
        """Let the trainers of a gated run go on after an epoch, or stop."""
        entry = self._get(run)
        entry.allowed = epoch + 1
        entry.stopped = entry.stopped or stop
        await self._notify(entry)

    # -- what the cluster tells us -------------------------------------------

    def worker_left(self, worker: str) -> None:
        """Fence runs that may not restart the trainers of a worker that left."""
        for run in list(self._runs.values()):
            ranks = [r for r, w in run.ranks.items() if w == worker]
            ranks = [r for r in ranks if r not in run.finished]
            run.holders.discard(worker)
            for rank in ranks:
                del run.ranks[rank]
                self._tell("trainer-lost", run, rank=rank, worker=worker)
            if ranks:
                run.events.append({"lost": ranks, "worker": worker})
            if ranks and not run.restartable:
                error = RunCancelledError(
                    f"trainer {ranks[0]} was lost with worker {worker}; use "
                    f"on_trainer_lost='restart' in train, or resumable=True in run"
                )
                self._hosts.spawn(self._fence(run, error))
            elif ranks:
                self._hosts.spawn(self._notify(run))

    def client_left(self, client: str) -> None:
        """Fence the runs of a client that left."""
        for run in list(self._runs.values()):
            if run.client == client:
                error = RunCancelledError(f"client {client} left during its run")
                self._hosts.spawn(self._fence(run, error))

    def shards_away(self, entry: StoreEntry, shards: Sequence[int], why: str) -> None:
        """Tell the runs of a store that they wait for shards."""
        for run in self._of(entry):
            which = "shard" if len(shards) == 1 else "shards"
            named = ", ".join(map(str, shards[:8])) + (", ..." if shards[8:] else "")
            words = f"{which} {named} of store {entry.name!r} away: {why}"
            run.events.append({"away": words})
            self._hosts.spawn(self._notify(run))

    def fence_all(self, entry: StoreEntry, error: Exception) -> None:
        """Fence the runs of a store."""
        for run in self._of(entry):
            self._hosts.spawn(self._fence(run, error))

    def store_gone(self, entry: StoreEntry, error: Exception) -> None:
        """End the runs of a store that is gone: its shards go too."""
        for run in self._of(entry):
            if not run.fenced:
                self._tell("run-fenced", run, reason=str(error))
            run.fenced = run.fenced or error
            if run.ended is not None:
                run.ended.cancel()
            self._hosts.spawn(self._forget(run, {"reason": str(error)}))

    def _of(self, entry: StoreEntry) -> list[RunState]:
        return [run for run in self._runs.values() if run.entry is entry]

    # -- shards that move ----------------------------------------------------

    def shards_move(
        self, entry: StoreEntry, worker: str, shards: Sequence[int]
    ) -> None:
        """Fence a run in rounds that does not survive a change of owners."""
        for run in self._of(entry):
            if not run.survives(worker, shards):
                self._hosts.spawn(self._fence(run, rounds_lost(worker)))

    def rounds_lost(self, entry: StoreEntry, worker: str) -> None:
        """Fence a run in rounds whose open round went with a worker."""
        for run in self._of(entry):
            if run.bsp:
                self._hosts.spawn(self._fence(run, rounds_lost(worker)))

    def rounds_of(self, entry: StoreEntry) -> dict[str, Any] | None:
        """Return what an adopter needs to know of a store's run in rounds."""
        # Also of one that is ending: its shards may have to catch up.
        found = [run.rounds for run in self._of(entry) if run.bsp]
        return found[0] if found else None

    def mailboxes_at(self, run: int) -> list[Any]:
        """Return where the mailboxes of a run are, for trainers that map them."""
        return self._runs[run].mailboxes_at if run in self._runs else []

    def mailbox_moved(self, run: int, shard: int, place: Sequence[Any]) -> None:
        """Note where the mailboxes of a run are in a shard that has moved."""
        if run in self._runs:
            self._runs[run].mailbox_moved(shard, place)

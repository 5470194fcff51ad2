"""Hears of a run from its trainers, and from the client that watches them.

Nothing here happens per step: a trainer talks to the directory when it registers, at
the end of an epoch, when it ends, and where its loop calls a barrier.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.run import EpochReport, mean_loss
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.packing import pack_error
from daskps.cluster.protocol.wellformed import check
from daskps.errors import NotEnoughWorkersError, ProtocolError, RunCancelledError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.directory.entry import Hosts
    from daskps.cluster.directory.run import RunState
    from daskps.cluster.directory.runs import Runs


class TrainerMessages:
    """The trainers of all runs."""

    def __init__(self, hosts: Hosts, runs: Runs) -> None:
        self._hosts, self._runs = hosts, runs

    # -- trainers ------------------------------------------------------------

    @DIRECTORY.handles("register")
    async def on_register(
        self, run: int, rank: int, worker: str, wait_seconds: float
    ) -> dict[str, Any]:
        """Register a trainer and wait for the others.

        Returns which of its rank it is, from 1, and where the mailboxes of the run are.
        """
        entry = self._runs.get_open(run, rank)
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
            await self._runs.fence(entry, error)
            raise error
        entry.attempts[rank] = attempt
        entry.ranks[rank] = worker
        entry.notify()
        if not await entry.met(lambda: len(entry.attempts) == entry.size, wait_seconds):
            short = NotEnoughWorkersError(
                f"{len(entry.attempts)} of {entry.size} trainers registered within "
                f"{wait_seconds:g} s; add workers, ask for fewer trainers=, or free "
                f"threads that other tasks hold"
            )
            await self._runs.fence(entry, short)
            raise short
        return {
            "attempt": attempt,
            "mailboxes": entry.mailboxes,
            "goes_on": entry.goes_on(rank),
        }

    @DIRECTORY.handles("collects")
    def on_collects(
        self, run: int, rank: int, *, worker: str, clock: int, number: int
    ) -> dict[str, Any]:
        """Hear that a trainer begins an all-reduce, and on which worker.

        Returns whether it may be started again, which workers keep what all-reduces
        have come to, and whether others are past this one: they bring nothing to it
        again.
        """
        entry = self._taking_part(run, rank, worker)
        if clock < 0 or number < 0:
            raise ProtocolError(f"allreduce {number} at clock {clock}")
        entry.collectives.note(rank, clock, number)
        entry.collecting.add(worker)
        there = filter(self._hosts.has_worker, sorted(entry.collecting))
        firsts = [of[1] for one, of in entry.collectives.places.items() if one != rank]
        return {
            "restartable": entry.restartable,
            "workers": list(there),
            "is_past": max(firsts, default=0) > number,
        }

    @DIRECTORY.handles("barrier")
    async def on_barrier(
        self,
        run: int,
        rank: int,
        *,
        worker: str,
        clock: int,
        number: int,
        wait_seconds: float,
    ) -> dict[str, Any]:
        """Wait until all live trainers have called a barrier as often as this one.

        Returns the live trainers that have not, and the least clock of those that have.

        Raises
        ------
        ValueError
            Where one that may have been started again has left one out.
        """
        entry = self._taking_part(run, rank, worker)
        calls = entry.barriers
        if clock < 0 or not 0 <= number <= calls.place(rank)[2] + 1:
            raise ProtocolError(f"barrier {number} at clock {clock}")
        if entry.bsp and entry.restartable and number >= entry.passed:
            for at, _, last, *_ in calls.places.values():
                if last == number and at != clock:
                    raise ValueError(
                        f"trainer {rank} calls a barrier at clock {clock} for which "
                        f"another one waits at clock {at}; all trainers must call it as "
                        f"often between two ticks, and a resumable loop before the push "
                        f"that ends a step"
                    )
        calls.note(rank, clock, number)
        if entry.count_barriers():
            entry.notify()
        passed = await entry.met(lambda: entry.passed > number, wait_seconds)
        missing = [] if passed else entry.missing(number)
        return {"missing": missing, "clock": entry.passed_clock}

    def _taking_part(
        self, run: int, rank: int, worker: str, does: str = "takes part in"
    ) -> RunState:
        """Return the run of a trainer, unless another one goes on in its place."""
        entry = self._runs.get_open(run, rank)
        if entry.ranks.get(rank) != worker or not self._hosts.has_worker(worker):
            raise RunCancelledError(
                f"trainer {rank} of run {run} on {worker} {does} nothing: its worker was "
                f"taken for lost, and another one goes on in its place"
            )
        return entry

    @DIRECTORY.handles("trains_on")
    def on_trains_on(self, run: int, workers: Sequence[str]) -> None:
        """Hear where the data of each rank of a graph run is."""
        entry = self._runs.get_open(run)
        if len(workers) != entry.size:
            raise ProtocolError(f"{len(workers)} workers for {entry.size} parts")
        entry.ranks = dict(enumerate(workers))

    @DIRECTORY.handles("note")
    def on_note(self, run: int, number: int, receipts: Sequence[Any]) -> None:
        """Keep the receipts of a round of the graph that is about to be applied."""
        self._runs.get_open(run).receipts[number] = receipts

    @DIRECTORY.handles("receipts")
    def on_receipts(self, run: int, since: int) -> dict[int, Sequence[Any]]:
        """Return the receipts of the rounds from `since` on; forget older ones."""
        entry = self._runs.get_open(run)
        kept = {n: of for n, of in entry.receipts.items() if n >= since}
        entry.receipts = kept
        return kept

    def note_contribution(self, run: int, worker: str) -> None:
        """Note that a gradient task has ended on a worker."""
        if run in self._runs.open:
            self._runs.open[run].holders.add(worker)

    def free_contributions(self, run: int, attempt: int, number: int) -> None:
        """Free contributions whose task the scheduler has forgotten.

        A window is forgotten as a whole: one message to each worker will do.
        """
        entry = self._runs.open.get(run)
        if entry is None:
            return
        if not entry.forgotten:
            # Later: this is called in the middle of the scheduler's transitions.
            asyncio.get_running_loop().call_soon(self._free, entry)
        entry.forgotten = max(entry.forgotten, (attempt, number))

    def _free(self, run: RunState) -> None:
        attempt, last = run.forgotten
        run.forgotten = ()
        what = {"run": run.id, "attempt": attempt, "last": last}
        for worker in run.holders:
            self._hosts.spawn(self._hosts.control(worker, "free", **what))

    @DIRECTORY.handles("finishes")
    def on_finishes(self, run: int, rank: int, worker: str) -> None:
        """Refuse a trainer that would end its rank, which another one goes on with."""
        self._taking_part(run, rank, worker, "ends").finishing.add(rank)

    @DIRECTORY.handles("finished")
    def on_finished(self, run: int, rank: int, clock: int) -> int:
        """Hear that a trainer has ended, as all shards have; return how many have."""
        entry = self._runs.get_open(run, rank)
        if entry.fenced:
            # The run may end before the round of the last step that shards have taken.
            raise RunCancelledError(f"run {run} is over: {entry.fenced}")
        entry.finished.add(rank)
        entry.clock = max(entry.clock, clock)
        entry.count_barriers()
        self._announce(entry)
        return len(entry.finished)

    @DIRECTORY.handles("report")
    async def on_report(
        self, run: int, rank: int, epoch: int, report: dict[str, Any]
    ) -> bool:
        """Take one trainer's epoch, return whether it should stop.

        In a gated run it waits until the client has decided.
        """
        entry = self._runs.get_open(run, rank)
        check(EpochReport, report, "the report of an epoch")
        if epoch < 0 or (entry.gated and epoch > entry.allowed):
            raise ProtocolError(
                f"trainer {rank} reports epoch {epoch}, and may have trained no more "
                f"than epoch {entry.allowed}"
            )
        if epoch >= entry.announced:
            # The first report counts: a trainer that starts again repeats its last.
            entry.reports.setdefault(epoch, {}).setdefault(rank, report)
        self._announce(entry)
        if entry.gated:
            await entry.met(lambda: entry.allowed > epoch, None)
        return entry.stopped

    def _announce(self, run: RunState) -> None:
        """Tell the client of every epoch that all live trainers have ended."""
        while rows := run.reports.get(run.announced):
            if len(rows.keys() | run.finished) < run.size:
                break
            run.last_loss = mean_loss((r["loss"], r["rows"]) for r in rows.values())
            run.events.append({"epoch": run.announced, "reports": list(rows.values())})
            del run.reports[run.announced]
            run.announced += 1
        run.notify()

    @DIRECTORY.handles("progress")
    def on_progress(
        self, run: int, rank: int, *, clock: int, loss: float | None, rows: int
    ) -> None:
        """Hear how far a trainer is: its clock, and the epoch's losses and rows."""
        entry = self._runs.get_open(run, rank)
        entry.tell(rank, clock, loss, rows)
        entry.notify()

    # -- the client ----------------------------------------------------------

    @DIRECTORY.handles("watch")
    async def on_watch(
        self, run: int, *, seen: int, clock: int, slowest: int, wait_seconds: float
    ) -> dict[str, Any]:
        """Wait for news of a run: events after the first `seen`, a later clock."""
        if (entry := self._runs.open.get(run)) is None:
            unknown = f"the scheduler knows no run {run}; start it again"
            error = self._runs.why_over(run) or RunCancelledError(unknown)
            return {
                "events": [],
                "clock": clock,
                "slowest": slowest,
                "loss": None,
                "error": pack_error(error),
            }
        # Events that the client has seen need not be kept.
        n_seen = min(max(0, seen - entry.first_event), len(entry.events))
        del entry.events[:n_seen]
        entry.first_event += n_seen
        await entry.wait(
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

    @DIRECTORY.handles("running")
    def on_running(self, uid: str) -> dict[str, Any] | None:
        """Return number, text and loss of the run on a store, None where none goes on."""
        for run in self._runs.open.values():
            if run.entry.uid == uid and not run.fenced:
                return {"run": run.id, "described": run.described, "loss": run.loss}
        return None

    @DIRECTORY.handles("verdict")
    def on_verdict(self, run: int, epoch: int, stop: bool) -> None:
        """Let the trainers of a gated run go on after an epoch, or stop."""
        entry = self._runs.get_open(run)
        entry.allowed = epoch + 1
        entry.stopped = entry.stopped or stop
        entry.notify()

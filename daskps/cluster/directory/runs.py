"""Runs as the directory sees them: how they begin and end, and epochs between them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.entry import insist, remember
from daskps.cluster.directory.fencing import END_SECONDS, SETTLE_SECONDS, RunEnd
from daskps.cluster.directory.run import RunState
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.run_start import Who, check_begin, none_left
from daskps.cluster.protocol.wellformed import check
from daskps.epochs import Epochs
from daskps.errors import (
    ConsistencyError,
    NotEnoughWorkersError,
    ProtocolError,
    RunCancelledError,
    StaleGenerationError,
)
from daskps.limits import check_trainers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.directory.entry import Hosts, StoreEntry

logger = logging.getLogger(__name__)
#: When a host that could not be told of an end is told again.
_AGAIN_SECONDS = 0.5
#: How long a run tries to begin while a host of its store fails or is silent.
OPEN_SECONDS = 10.0
#: Between two tries to ask for epochs, while a host of the store dies.
_LOOK_SECONDS = 0.1


def _not_begun(entry: StoreEntry, error: Exception) -> NotEnoughWorkersError:
    """Return the error for a run whose store has a host that does not answer."""
    return NotEnoughWorkersError(
        f"a run on store {entry.name!r} could not begin within {OPEN_SECONDS:g} s, for a "
        f"worker that holds shards does not answer ({error!r}); wait for it or end it, "
        f"and start the run again"
    )


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
        #: Those that are not over.
        self.open: dict[int, RunState] = {}
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
        sync, staleness, _ = begin["policy"]
        left, clock = OPEN_SECONDS, asyncio.get_running_loop().time
        for tries in itertools.count(1):
            # First: a run that is refused waits for nobody.
            await self.free_entry(uid)
            # No shard is handed over meanwhile.
            locked = self._entry(uid)
            async with locked.cutting:
                entry = await self.free_entry(uid)
                if entry is not locked:
                    continue  # it was resharded meanwhile
                if not self._hosts.has_client(who["client"]):
                    # The run would never end, and keeps all others from the store.
                    raise RunCancelledError(
                        f"client {who['client']} left before its run"
                    )
                policy = {"bsp": sync == "bsp", "sync": sync, "staleness": staleness}
                policy["codec"] = begin["codec"]
                run = RunState(self._new_id(), entry, **policy, **who)
                began, pause = clock(), min(0.05 * tries, 0.5)
                try:
                    await self._begin(run, begin, left)
                    break
                except (OSError, StaleGenerationError, RunCancelledError) as error:
                    # A host dies: its shards find an owner, or are lost. How long that
                    # takes does not count, and the scheduler may have yet to hear of it.
                    left -= clock() - began + pause
                    if left <= 0:
                        # A host that answers says itself why it could not.
                        if not isinstance(error, OSError):
                            raise
                        raise _not_begun(entry, error) from error
            await asyncio.sleep(pause)
        self._tell(
            "run-begun",
            run,
            sync=sync,
            staleness=max(staleness, 0),
            trainers=run.size,
            execution="graph" if run.graph else "resident",
        )
        return run.id

    async def free_entry(self, uid: str) -> StoreEntry:
        """Return a store that can be trained, once the run before has ended, or refuse."""
        while True:
            await self._entry(uid).wait_for_owners()
            entry = self._entry(uid)
            runs = [r for r in self._of(entry) if r.ended or not r.fenced]
            if not runs:
                entry.check_found(entry.lost)
                return entry
            if not runs[0].fenced:
                raise ConsistencyError(
                    f"run {runs[0].id} is training store {entry.name!r} already; wait "
                    f"for it to end or cancel it, a store takes one run at a time"
                )
            await self._over(runs[0], OPEN_SECONDS)

    async def _begin(
        self, run: RunState, begin: dict[str, Any], seconds: float
    ) -> None:
        """Begin a run on all hosts of its store; where one fails, on none.

        A host may take its time, for there may be much memory to take and code to
        compile, but not be silent meanwhile: TimeoutError when one is for `seconds`.
        """
        self.open[run.id] = run
        hosts, entry = self._hosts, run.entry
        about = {"store": entry.uid, "run": run.id, "begin": begin}
        for worker in entry.hosts:
            work = hosts.control(worker, "begin_run", resident=not run.graph, **about)
            run.begun[worker] = hosts.spawn(work)
        try:
            # Not cancelled where it takes too long: what a silent host was sent it
            # does.
            while (await asyncio.wait(run.begun.values(), timeout=seconds / 2))[1]:
                async with asyncio.timeout(seconds / 2):
                    said = (hosts.control(worker, "hello") for worker in entry.hosts)
                    await asyncio.gather(*said)
            rows = [row for work in run.begun.values() for row in work.result()]
            if run.fenced:
                raise run.fenced
        except BaseException as error:
            fenced = run.fenced
            await self._undo(run)
            if fenced and isinstance(error, Exception):
                raise fenced from None
            raise
        run.mailboxes = {
            "rows": rows,
            "reduce": begin["reduce"],
            "codec": begin["codec"],
        }
        run.began, entry.trained_by = True, run.described

    @DIRECTORY.handles("close_run")
    async def on_close_run(self, run: int) -> None:
        """End a run that is over."""
        if run in self.open:
            error = RunCancelledError("it has ended")
            await self._end(self.open[run], error, "run-ended")

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
        elif run in self.open:
            fencing = self.fence(self.open[run], RunCancelledError(reason))
            if wait:
                await fencing
            else:
                self._hosts.spawn(fencing)

    async def fence(self, run: RunState, error: Exception) -> None:
        """End a run whose trainers have not chosen that."""
        await self._end(run, error, "run-fenced", reason=str(error))

    async def _end(
        self, run: RunState, error: Exception, action: str, **about: Any
    ) -> None:
        """End a run on all shards; wait for that as long as it gets on.

        A store one of whose shards is away or silent stays held until that has heard
        of it, and takes no other run.
        """
        clock = asyncio.get_running_loop().time
        if not run.fenced:
            run.fenced = error
            self._tell(action, run, **about)
        if not run.began:
            await self._undo(run)
        elif run.ended is None:
            run.end_by = clock() + END_SECONDS
            run.ended = self._hosts.spawn(self._settle(run))
        run.notify()
        while run.ended and not run.ended.done() and (left := run.end_by - clock()) > 0:
            await asyncio.wait({run.ended}, timeout=left)

    async def _settle(self, run: RunState) -> None:
        """End a run on all its shards, however long one of them is away."""
        how: dict[str, Any] = {"reason": str(run.fenced)}
        try:
            found = await RunEnd(self._hosts, run, how["reason"]).settle()
            how |= found._asdict()
        finally:
            self._forget(run, how)

    def _forget(self, run: RunState, how: dict[str, Any]) -> None:
        """Remember of a run what became of it, and nothing else."""
        self.open.pop(run.id, None)
        remember(self._ended, run.id, (run.fenced, how))
        run.notify()
        for worker in run.collecting:
            self._hosts.spawn(self._hosts.control(worker, "end_sums", run=run.id))
        if run.graph:
            # On all workers: a task of the run may be at work on any of them.
            self._hosts.spawn(self._hosts.broadcast("end_sums", run=run.id))

    async def _undo(self, run: RunState) -> None:
        """End a run that could not begin everywhere: no shard has taken a step of it."""
        reason = "it could not begin"
        run.fenced = run.fenced or RunCancelledError(reason)
        self._forget(run, {"reason": reason})
        # Shards that have another owner since then are in the run all the same.
        asked = dict.fromkeys(run.entry.hosts) | run.begun
        ended = asyncio.gather(*(self._end_late(run, *of) for of in asked.items()))
        # The others have ended when a silent host has not; it is told when it wakes.
        await asyncio.wait({self._hosts.spawn(ended)}, timeout=SETTLE_SECONDS)

    async def _end_late(
        self, run: RunState, worker: str, begun: asyncio.Future[Any] | None
    ) -> None:
        """Have a host end a run when it has answered whether it could begin it."""
        if begun is not None:
            await asyncio.wait({begun})
        about: Any = {"store": run.entry.uid, "run": run.id, "reason": str(run.fenced)}
        # Until it has heard of it its shards take no other step.
        await insist(self._hosts, worker, "end_run", _AGAIN_SECONDS, **about)

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

    def get_open(self, run: int, rank: int = 0) -> RunState:
        """Return a run that is not over, in which a rank can be."""
        if run not in self.open:
            error = self.why_over(run)
            raise RunCancelledError(f"run {run} is over: {error or 'it is unknown'}")
        entry = self.open[run]
        if not 0 <= rank < entry.size:
            raise ProtocolError(f"trainer {rank} of the {entry.size} of run {run}")
        return entry

    def why_over(self, run: int) -> Exception | None:
        """Return why a run is over, None while it is not or where it is unknown."""
        if run in self.open:
            return self.open[run].fenced
        return self._ended[run][0] if run in self._ended else None

    def how_over(self, run: int) -> dict[str, Any] | None:
        """Return how a run has ended on all shards that could be reached, once it has."""
        return self._ended[run][1] if run in self._ended else None

    # -- epochs: in the records of shards ---------------------------------------

    @DIRECTORY.handles("epochs")
    async def on_epochs(self, uid: str) -> tuple[Epochs, str]:
        """Return where a store is in its epochs, once no run is on its way to an end.

        And what its client has said of the run that ended last.

        Raises
        ------
        ConsistencyError
            While one goes on.
        """
        left, clock = OPEN_SECONDS, asyncio.get_running_loop().time
        while True:
            entry, began = await self.free_entry(uid), clock()
            try:
                async with asyncio.timeout(max(left, 0)):
                    return await self._furthest(entry), entry.trained_by
            except (OSError, StaleGenerationError) as error:
                # A host dies: its shards find an owner, or are lost.
                left -= clock() - began + _LOOK_SECONDS
                if left <= 0:
                    raise _not_begun(entry, error) from error
                await asyncio.sleep(_LOOK_SECONDS)

    @DIRECTORY.handles("trained_by")
    def on_trained_by(
        self, uid: str, described: str | None = None, lineage: str = ""
    ) -> str:
        """Return what run has trained a store last, or does; or note it of a new one.

        And the lineage of the checkpoint that it was loaded from.
        """
        entry = self._entry(uid)
        if described is not None:
            entry.trained_by = described
        entry.lineage = lineage or entry.lineage
        return entry.trained_by

    async def _furthest(self, entry: StoreEntry) -> Epochs:
        """Return where the shard is that has come furthest.

        After rounds all are at the same place. Without, a run that was fenced may have
        left one of them a step ahead.
        """
        found = await self._hosts.everywhere(entry, "epochs")
        rows = [Epochs(*row) for of in found for row in of]
        return max(rows, key=lambda epochs: epochs.place)

    # -- what the cluster tells us -------------------------------------------

    def worker_left(self, worker: str) -> None:
        """Fence runs that may not restart the trainers of a worker that left."""
        for run in list(self.open.values()):
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
                self._hosts.spawn(self.fence(run, error))
            elif run.workers and not any(map(self._hosts.has_worker, run.workers)):
                self._hosts.spawn(self.fence(run, none_left(run.workers)))
            run.notify()

    def client_left(self, client: str) -> None:
        """Fence the runs of a client that left."""
        for run in list(self.open.values()):
            if run.client == client:
                error = RunCancelledError(f"client {client} left during its run")
                self._hosts.spawn(self.fence(run, error))

    def shards_away(self, entry: StoreEntry, shards: Sequence[int], why: str) -> None:
        """Tell the runs of a store that they wait for shards."""
        for run in self._of(entry):
            which = "shard" if len(shards) == 1 else "shards"
            named = ", ".join(map(str, shards[:8])) + (", ..." if shards[8:] else "")
            words = f"{which} {named} of store {entry.name!r} away: {why}"
            run.events.append({"away": words})
            run.notify()

    def fence_all(
        self,
        entry: StoreEntry,
        error: Exception,
        hit: Callable[[RunState], bool] = lambda run: True,
    ) -> None:
        """Fence the runs of a store, or those that something has hit."""
        for run in filter(hit, self._of(entry)):
            self._hosts.spawn(self.fence(run, error))

    def store_gone(self, entry: StoreEntry, error: Exception) -> None:
        """End the runs of a store that is gone: its shards go too."""
        for run in self._of(entry):
            if not run.fenced:
                self._tell("run-fenced", run, reason=str(error))
            run.fenced = run.fenced or error
            if run.ended is not None:
                run.ended.cancel()
            self._forget(run, {"reason": str(error)})

    def _of(self, entry: StoreEntry) -> list[RunState]:
        return [run for run in self.open.values() if run.entry is entry]

    # -- shards that move ----------------------------------------------------

    def rounds_of(self, entry: StoreEntry) -> dict[str, Any] | None:
        """Return what an adopter needs to know of a store's run in rounds."""
        # Also of one that is ending: its shards may have to catch up.
        found = [run.rounds for run in self._of(entry) if run.bsp]
        return found[0] if found else None

    def survives(self, entry: StoreEntry, shards: Sequence[int]) -> bool:
        """Return whether the runs of a store go on where others adopt shards."""
        return all(run.survives(shards) for run in self._of(entry))

    def mailbox_moved(self, entry: StoreEntry, row: Mapping[str, Any]) -> None:
        """Note where the mailboxes in a shard are that has a new owner."""
        if row["mailbox"] and (run := self.open.get(row["run"])):
            run.mailbox_moved(row["shard"], row["mailbox"])

    def for_owner(self, entry: StoreEntry) -> dict[str, Any]:
        """Return the same, and the codecs of all runs, for the next owner of a shard."""
        return {"rounds": self.rounds_of(entry), "codecs": self.codecs_of(entry)}

    async def tell_ended(self, entry: StoreEntry, shard: int) -> None:
        """Tell the next owner of a shard which trainers have ended.

        Of some the former one alone may have heard, while this one took over.
        """
        of = self._hosts, entry.owners[shard]
        for run in self._of(entry):
            about: Any = {"store": entry.uid, "run": run.id, "holds": [shard]}
            for rank in sorted(run.finishing):
                await insist(*of, "finish", _AGAIN_SECONDS, **about, rank=rank)
            n_ranks = len(run.finished)
            await insist(*of, "heard", _AGAIN_SECONDS, **about, n_ranks=n_ranks)

    def codecs_of(self, entry: StoreEntry) -> list[tuple[str, bytes]]:
        """Return how gradients travel in the runs of a store, for an adopter."""
        return [run.codec for run in self._of(entry) if run.codec[0]]

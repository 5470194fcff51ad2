"""Moves of shards from workers that left to others, as the directory leads them.

The memory of a shard outlives its process where other processes of the machine can map
it. `ShardMoves` hears of workers that die, leave or come, and begins a :class:`Move`
for each store and worker that left. The move alone acts: it asks workers of that
machine to adopt the shards, makes those that have them the owners, and says what is
away or lost. `Candidates` chooses the workers that it asks, a `Verdict` for each shard
decides what is due (both in `candidates`); they are data, and send nothing. Also of a
lost shard somebody is asked now and then. A shard's generation rises with its owner, so
what was meant for the former one is refused and sent again.

Where nobody else of a machine serves, second copies of shards become the owners first,
see :mod:`daskps.cluster.directory.copies`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps import config
from daskps.cluster.directory.candidates import Candidates, Due, Verdict
from daskps.cluster.directory.entry import LeftBy, insist
from daskps.cluster.directory.machines import memory_of, near_to
from daskps.cluster.directory.run import rounds_error
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.reports import Sight
from daskps.errors import DaskPSError, ProtocolError, ShardLostError
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.runs import Runs

logger = logging.getLogger(__name__)
#: How long an adopter may take to end a run, and when one that has not is asked again.
END_SECONDS, LATER_SECONDS = 5.0, 1.0
#: How often one that fills a copy is asked whether it lives, and how long it may take.
_WATCH_SECONDS = 5.0
#: Ends the message about a shard that no other process of its machine can map.
_WAS_PRIVATE = (
    "; its memory was private, so that nobody could adopt it: daskps.carriers.machine is "
    "false there or where the store was created, or the worker's log says why it shares "
    "none"
)
#: The same of a shard on a device.
_WAS_ON_DEVICE = (
    "; its memory was that of a device, which goes with its process: make such a store "
    "with recover_from=, or restore the last checkpoint by daskps.restore(url, device=)"
)


def time_now() -> float:
    """Return the time, in seconds of the event loop."""
    return asyncio.get_running_loop().time()


class Standby(Protocol):
    """The second copies of shards."""

    def promote(
        self,
        entry: StoreEntry,
        shards: list[int],
        left_by: LeftBy,
        otherwise: Callable[[StoreEntry, list[int], LeftBy], Any],
    ) -> list[int]:
        """Make copies the owners of shards; return the shards that have none."""

    def moved(self, entry: StoreEntry, shards: Sequence[int]) -> None:
        """Hear that shards have another owner, or their owner again."""

    def depose(self, entry: StoreEntry, shard: int, worker: str) -> object:
        """Tell a worker that another one is the owner of a shard."""


class ShardMoves:
    """The moves of all shards whose worker left, and the workers that come and go.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    runs : Runs
        The runs, some of which end where a shard is away or lost.
    stores : mapping of str to StoreEntry
        All stores.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: Hosts,
        runs: Runs,
        stores: Mapping[str, StoreEntry],
    ) -> None:
        self.scheduler, self.hosts, self.runs = scheduler, hosts, runs
        self.stores = stores
        #: In the order in which they began: that of a set would be that of addresses.
        self._open: list[Move] = []
        #: By store and worker: it sends one shard after the other.
        self._turns = WeakValueDictionary[tuple[str, str], asyncio.Lock]()
        self.standby: Standby

    def turn(self, entry: StoreEntry, worker: str) -> asyncio.Lock:
        """Return the turn of a worker to send shards of a store."""
        return self._turns.setdefault((entry.uid, worker), asyncio.Lock())

    def install(
        self, entry: StoreEntry, by: str, rows: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Make a worker the owner of shards; nobody looks for them any more."""
        shards = entry.install(by, rows)
        if memory := memory_of(self.scheduler, by):
            entry.memories[by] = memory
        for row in rows:
            self.runs.mailbox_moved(entry, row)
        self._give_up(entry, shards)
        self.standby.moved(entry, shards)
        return shards

    @DIRECTORY.handles("awaits")
    def awaits_shards(self, worker: str) -> bool:
        """Return whether shards of workers that died may have an owner again.

        Then their memory must outlast a worker that closes, were it the last of its
        machine: one may come that adopts them. The worker itself has not died, even if
        its connection has ended first.
        """
        for move in self._open:
            if move.left_by.worker == worker:
                move.left_by = move.left_by._replace(in_order=True)
        return any(move.is_open and not move.left_by.in_order for move in self._open)

    @DIRECTORY.handles("removed")
    def on_removed(self, worker: str, names: Sequence[str], memory: str) -> None:
        """Hear what went with a worker that was the last one of its memory."""
        gone, why = set(names), "was closed, as were all others of its machine"
        here = get_address_host(worker), memory
        for entry in self.stores.values():
            shards = set[int]()
            for shard, name, *_ in entry.segments:
                host = get_address_host(owner := entry.owners[shard])
                was_here = (host, entry.memories.get(owner)) == here
                # One that adopted it may have renamed it, and left before it said so.
                if name in gone or (was_here and shard in entry.away):
                    shards.add(shard)
            if shards := shards - entry.lost.keys():
                self._give_up(entry, shards)
                for owner in {entry.owners[i] for i in shards}:
                    of = [i for i in sorted(shards) if entry.owners[i] == owner]
                    # Most likely somebody has closed the cluster.
                    self.lose(entry, of, LeftBy(owner, why), level=logging.INFO)

    @DIRECTORY.handles("memory-lost")
    def on_memory_lost(
        self, worker: str, shards: Sequence[tuple[str, int]], reason: str
    ) -> None:
        """Hear that a worker has lost arrays on a device, and goes on itself."""
        for entry in self.stores.values():
            named = {shard for uid, shard in shards if uid == entry.uid}
            held = {i for i, w in enumerate(entry.owners) if w == worker}
            if gone := sorted(named & held - entry.without_owner):
                self.lose(entry, gone, LeftBy(worker, reason + _WAS_ON_DEVICE))

    def worker_left(self, left_by: LeftBy) -> None:
        """Look for new owners of what a worker held, or mark it as lost."""
        for entry in self.stores.values():
            self.left(entry, left_by)
        for move in [*self._open]:
            move.promote()

    def left(self, entry: StoreEntry, left_by: LeftBy) -> None:
        """Do the same for one store."""
        worker = left_by.worker
        held = {i for i, w in enumerate(entry.owners) if w == worker}
        entry.uncharge(held)
        sent_on = {i for i, by in entry.sent_on if by == worker}
        if not (shards := sorted(held - entry.without_owner - sent_on)):
            return
        if rest := self.promote(entry, shards, left_by):
            self._look_for(entry, rest, left_by)

    def promote(
        self, entry: StoreEntry, shards: list[int], left_by: LeftBy
    ) -> list[int]:
        """Make second copies owners where a machine serves no more; return the rest."""
        running = entry.ready and self.scheduler.status == Status.running
        if not running or near_to(self.scheduler, entry, left_by.worker):
            return shards
        return self.standby.promote(entry, shards, left_by, self._look_for)

    def _look_for(self, entry: StoreEntry, shards: list[int], left_by: LeftBy) -> None:
        """Look for new owners of shards, or mark them as lost."""
        shared = {row[0] for row in entry.segments}
        running = entry.ready and self.scheduler.status == Status.running
        if running and shared.issuperset(shards):
            self.begin(entry, shards, left_by)
        else:
            told = _WAS_ON_DEVICE if entry.device else _WAS_PRIVATE
            reason = left_by.reason + told * running
            self.lose(entry, shards, left_by._replace(reason=reason))

    def begin(self, entry: StoreEntry, shards: list[int], left_by: LeftBy) -> Move:
        """Look for new owners of shards that other processes can map."""
        # Also where that worker lives, and has let go of them.
        entry.uncharge({*shards})
        error = rounds_error(left_by.worker)
        self.runs.fence_all(entry, error, lambda run: not run.survives(shards))
        move = Move(self, entry, shards, left_by)
        self._open.append(move)
        work = self.hosts.spawn(move.run())
        work.add_done_callback(lambda _: self._open.remove(move))
        return move

    async def settle_runs(
        self,
        entry: StoreEntry,
        by_from: tuple[str, str],
        taken: Sequence[Mapping[str, Any]],
        rounds: Mapping[str, Any] | None,
    ) -> None:
        """End runs that cannot go on with a new owner, and there those that are over.

        That is now, or as soon as it can. `taken` are its rows, `rounds` the run in
        rounds that it was to continue.
        """
        by, worker = by_from
        if rounds and any(a["stopped"] or a["run"] != rounds["run"] for a in taken):
            self.runs.fence_all(entry, rounds_error(worker), lambda run: run.bsp)
        for run in {a["run"] for a in taken}:
            if not await self._try_end_run(entry, by, run):
                self.hosts.spawn(self._end_run(entry, by, run))

    async def _try_end_run(self, entry: StoreEntry, by: str, run: int) -> bool:
        """Have a new owner end a run that has ended while nobody held its shards."""
        if not run or (how := self.runs.how_over(run)) is None:
            # A former owner may have answered for one that ends just now.
            return not run or self.runs.why_over(run) is None
        about = {"store": entry.uid, "run": run, **how}
        try:
            asked = self.hosts.control(by, "end_run", **about)
            await asyncio.wait_for(asked, END_SECONDS)
        except (OSError, DaskPSError) as error:
            logger.info("daskps: %s keeps run %d: %r", by, run, error)
            return False
        return True

    async def _end_run(self, entry: StoreEntry, by: str, run: int) -> None:
        """Ask a new owner to end a run until it has, however long that takes.

        Else its shards would stay in a run that is over, and take no other step.
        """
        while entry.uid in self.stores and self.hosts.has_worker(by):
            await asyncio.sleep(LATER_SECONDS)
            if await self._try_end_run(entry, by, run):
                return

    def worker_came(self) -> None:
        """Hear that a worker came, which may find what others did not."""
        for move in self._open:
            move.look_now()

    async def have_filled(self, worker: str, **about: Any) -> None:
        """Have a worker fill a copy, which may take long, while it answers others.

        Raises
        ------
        OSError
            Where it does not, or cannot.
        """
        async with asyncio.timeout(None) as until:
            watch = self.hosts.spawn(self._watch(worker, until))
            try:
                await self.hosts.control(worker, "move_fill", **about)
            finally:
                watch.cancel()

    async def _watch(self, worker: str, until: asyncio.Timeout) -> None:
        nothing: dict[str, Any] = {"cluster": "", "rows": []}
        with suppress(OSError):
            while True:
                await asyncio.sleep(_WATCH_SECONDS)
                answer = self.hosts.control(worker, "look", **nothing)
                await asyncio.wait_for(answer, _WATCH_SECONDS)
        until.reschedule(asyncio.get_running_loop().time())

    def store_gone(self, entry: StoreEntry) -> None:
        """Look for nobody any more for a store that has ended."""
        self._give_up(entry, ())

    def _give_up(self, entry: StoreEntry, shards: Iterable[int]) -> None:
        for move in self._open:
            if move.entry is entry:
                move.give_up(shards)

    def lose(
        self,
        entry: StoreEntry,
        shards: list[int],
        left_by: LeftBy,
        *,
        level: int = logging.WARNING,
    ) -> None:
        """Mark shards as lost with a worker that left for a reason, and tell everybody.

        But those of which there are copies, which become the owners.
        """
        worker, reason, _ = left_by
        lose = partial(self.lose, level=level)
        if not (shards := self.standby.promote(entry, shards, left_by, lose)):
            return
        entry.settle(shards)
        entry.set_lost(shards, worker, reason)
        if not entry.ready:
            return  # nobody had anything there; who makes it is told
        self.hosts.tell(
            "shards-lost", entry, shards=shards, worker=worker, reason=reason
        )
        error = ShardLostError(entry.name, shards[0], *entry.lost[shards[0]])
        self.runs.fence_all(entry, error)
        lost = counted(len(shards), "shard")
        logger.log(
            level, "daskps: store %r lost %s with worker %s", entry.name, lost, worker
        )


class Move:
    """One move: which worker is asked when, what it says, and the new owners."""

    def __init__(
        self,
        moves: ShardMoves,
        entry: StoreEntry,
        shards: list[int],
        left_by: LeftBy,
    ) -> None:
        self.entry, self.left_by = entry, left_by
        self.worker, self._reason, in_order = left_by
        self._moves, self._hosts, self._runs = moves, moves.hosts, moves.runs
        self._candidates = Candidates(moves.scheduler, moves.stores, entry, self.worker)
        settings, now = config.load(), time_now()
        #: The verdict on each shard that has no owner yet.
        self._left = {
            shard: Verdict(
                now,
                lost_after=settings.lost_after_seconds,
                runs_end_after=settings.run_away_seconds,
            )
            for shard in shards
        }
        self._news = asyncio.Event()
        why = f"{self._reason}; no other worker of its machine runs or is paused"
        entry.set_away(shards, why)
        if in_order:
            # It has yet to let go of them.
            for verdict in self._left.values():
                verdict.asked(now)

    async def run(self) -> None:
        """Ask until all shards have an owner, or nobody wants them any more."""
        while self._left and self._is_known():
            self._ask_around()
            self._act()
            self._news.clear()
            wakes = min(verdict.wakes_at() for verdict in self._left.values())
            with suppress(TimeoutError):
                seconds = max(0.0, wakes - time_now())
                await asyncio.wait_for(self._news.wait(), seconds)

    @property
    def is_open(self) -> bool:
        """Whether some of its shards have no owner yet, and are not lost."""
        return not self._left.keys() <= self.entry.lost.keys()

    def look_now(self) -> None:
        """Ask again at once, or stop."""
        for verdict in self._left.values():
            verdict.ask_now(time_now())
        self._news.set()

    def give_up(self, shards: Iterable[int]) -> None:
        """Look for shards no longer whose memory was removed."""
        for shard in shards:
            self._left.pop(shard, None)
        self.look_now()

    def promote(self) -> None:
        """Leave shards to their second copies once nobody else can have them."""
        rest = self._moves.promote(self.entry, [*self._left], self.left_by)
        self.give_up(self._left.keys() - rest)

    def _is_known(self) -> bool:
        return self._moves.stores.get(self.entry.uid) is self.entry

    # -- questions -----------------------------------------------------------

    def _ask_around(self) -> None:
        """Have workers adopt the shards that are due, and others look for them."""
        now = time_now()
        due = sorted(i for i, verdict in self._left.items() if verdict.is_to_ask(now))
        if not due:
            return
        dealt = self._candidates.deal(due, now, self._wait_for)
        for shard in due:
            self._left[shard].asked(now)
        for (question, by), shards in dealt.items():
            self._hosts.spawn(self._ask(question, by, shards))

    async def _ask(self, question: str, by: str, shards: list[int]) -> None:
        """Have a worker adopt shards, or look for them."""
        try:
            put = self.ask_to_adopt if question == "adopt" else self.ask_to_look
            answers = await put(by, shards)
        finally:
            self._candidates.end_question(question, by, shards)
        for shard, (sight, why) in self._candidates.hear(by, answers).items():
            if shard in self._left:
                self._left[shard].see(sight, time_now())
                self._wait_for(shard, why)
        self._news.set()
        if taken := [answer for answer in answers if "name" in answer]:
            self._install(by, taken)

    async def ask_to_adopt(
        self, by: str, shards: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Ask a worker to adopt shards; return what became of each.

        It is `adopt` of :mod:`daskps.cluster.host.adoption` that does it there.

        Where it has them, and with them a run that cannot go on, it has ended that run
        or will be asked to until it has.
        """
        entry, runs = self.entry, self._runs
        rounds = runs.rounds_of(entry)
        rows = [[*row, entry.generations[row[0]] + 1] for row in entry.rows_of(shards)]
        more: dict[str, Any] = {"store": entry.uid, "about": entry.described}
        more |= {"rows": rows, "rounds": rounds, "codecs": runs.codecs_of(entry)}
        # It answers nobody before they have what it tells.
        more["copies"] = [(i, c.move) for i, c in entry.copies.items() if i in shards]
        # Until it has answered it may have done so: it is told when the store ends, and
        # has no room for others.
        entry.strays.add(by)
        need = sum(entry.sizes[shard] for shard in shards)
        entry.charge(by, need)
        try:
            found = await self._answers(by, "adopt", shards, **more)
            taken = [answer for answer in found if "name" in answer]
            await self._moves.settle_runs(entry, (by, self.worker), taken, rounds)
            return found
        finally:
            entry.charge(by, -need)

    async def ask_to_look(self, by: str, shards: Sequence[int]) -> list[dict[str, Any]]:
        """Ask a worker what it sees of the memory of shards."""
        about = {"cluster": self.entry.cluster, "rows": self.entry.rows_of(shards)}
        return await self._answers(by, "look", shards, **about)

    async def _answers(
        self, by: str, method: str, shards: Sequence[int], **more: Any
    ) -> list[dict[str, Any]]:
        try:
            return list(await self._hosts.control(by, method, **more))
        except ProtocolError as error:
            # A worker that has just come gets its host in a moment.
            said = {"why": str(error), "silent": False}
        except Exception as error:  # noqa: BLE001 - callers that wait get it as the reason
            said = {"why": f"{by}: {error!r}", "silent": isinstance(error, OSError)}
        return [{"shard": i, "sight": Sight.UNKNOWN, **said} for i in shards]

    # -- answers -------------------------------------------------------------

    def _wait_for(self, shard: int, why: str) -> None:
        """Note what keeps a shard from an owner, for callers that wait for it."""
        if why and shard in self.entry.away:
            self.entry.away[shard] = f"{self._reason}; {why}"

    def _install(self, by: str, taken: list[dict[str, Any]]) -> None:
        """Make a worker the owner of the shards that it has adopted.

        Callers that wait in `Directory.on_locate` go on: the entry is settled.
        """
        entry, hosts = self.entry, self._hosts
        if not self._is_known():
            hosts.spawn(insist(hosts, by, "drop", LATER_SECONDS, store=entry.uid))
            return
        if not hosts.has_worker(by):
            # The adopter has died: others are asked, and find what it has renamed.
            return
        for row in [row for row in taken if row["shard"] not in self._left]:
            # A second copy has taken its place meanwhile.
            self._moves.standby.depose(entry, row["shard"], by)
            taken.remove(row)
        if not taken:
            return
        shards = self._moves.install(entry, by, taken)
        hosts.tell("shards-adopted", entry, shards=shards, worker=self.worker, by=by)
        about = by, counted(len(shards), "shard"), entry.name, self.worker
        logger.info("daskps: %s adopted %s of store %r from %s", *about)

    # -- verdicts ------------------------------------------------------------

    def _act(self) -> None:
        """Do what the verdicts ask for."""
        now, found = time_now(), dict[Due, list[int]]()
        unheard = self._candidates.unheard(self._left)
        for shard, verdict in sorted(self._left.items()):
            for due in verdict.due(now, others=shard in unheard):
                found.setdefault(due, []).append(shard)
        for due, shards in found.items():
            why = self.entry.away[shards[0]]
            if due is Due.SAY:
                self._say_away(shards, why)
            elif due is Due.END_RUNS:
                about = self.entry.name, shards[0], self.worker, why, True
                self._runs.fence_all(self.entry, ShardLostError(*about))
            else:
                why = why.replace("; ", "; nobody could adopt it: ", 1)
                self._moves.lose(self.entry, shards, LeftBy(self.worker, why))

    def _say_away(self, shards: list[int], why: str) -> None:
        """Say that shards have been away for a while, also to callers that wait.

        Their second copies take over: there may be memory that nobody has room for.
        """
        entry, n = self.entry, counted(len(shards), "shard")
        self._hosts.tell(
            "shards-away", entry, shards=shards, worker=self.worker, reason=why
        )
        self._runs.shards_away(entry, shards, why)
        logger.warning("daskps: %s of store %r away: %s", n, entry.name, why)
        self._moves.standby.promote(
            entry, shards, self.left_by, lambda of, i, _: of.set_away(i, why)
        )

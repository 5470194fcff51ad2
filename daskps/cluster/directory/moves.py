"""New owners for the shards of a worker that died, as the directory appoints them.

The memory of a shard outlives its process where other processes of the machine can
map it. The directory asks workers of that machine to take it over: who can map it is
there, whatever its address says. Until one has, the shards are away and their callers
wait, or lost, as :class:`~daskps.cluster.directory.verdict.Verdict` says of each; also of a lost
one somebody is asked now and then. A shard's generation rises with its owner, so
whatever was meant for the former one is refused and sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps import config
from daskps.cluster.directory.verdict import Due, Verdict
from daskps.cluster.wire.reports import Sight
from daskps.errors import DaskPSError, LayoutError, ProtocolError, ShardLostError
from daskps.layout.arrays import counted
from daskps.layout.placement import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from distributed import Scheduler

    from daskps.cluster.directory.entry import Hosts, StoreEntry
    from daskps.cluster.directory.runs import Runs

logger = logging.getLogger(__name__)
#: How long an adopter is waited for alone: it may have to compile an update rule.
#: Then others are asked too; only one of them can have the memory.
ANSWER_SECONDS = 15.0
#: How long an adopter may take to end a run.
END_SECONDS = 5.0
#: When one that has not is asked again.
LATER_SECONDS = 1.0
#: Workers of other addresses that are asked: a machine may have several.
MOST_FAR = 3


class Moves:
    """The shards of dead workers on their way to new owners.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    runs : Runs
        The runs of all stores.
    stores : mapping of str to StoreEntry
        The stores, by uid.
    lose : callable
        Takes a store, shards, worker and reason where nobody adopts them.
    left : callable
        Takes a worker and reason where an adopter has died in its turn.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: Hosts,
        runs: Runs,
        stores: Mapping[str, StoreEntry],
        *,
        lose: Callable[[StoreEntry, list[int], str, str], None],
        left: Callable[[str, str], None],
    ) -> None:
        self._scheduler, self._hosts = scheduler, hosts
        self.runs = runs
        self._stores, self._lose, self._left = stores, lose, left
        self._moves: dict[_Move, None] = {}

    def is_possible(self, entry: StoreEntry, shards: Iterable[int]) -> bool:
        """Return whether other processes can have the memory of shards."""
        shared = {row[0] for row in entry.segments}
        return (
            entry.ready
            and self._scheduler.status == Status.running
            and shared.issuperset(shards)
        )

    def begin(
        self,
        worker: str,
        reason: str,
        left: list[tuple[StoreEntry, list[int]]],
        *,
        in_order: bool = False,
    ) -> None:
        """Look for new owners of what a worker left: stores and their shards.

        One that leaves in order has yet to let go of them, and others may leave with
        it.
        """
        for entry, shards in left:
            entry.adopting.update(shards)
            entry.settled.clear()
            self.runs.shards_move(entry, worker, shards)
            move = _Move(self, entry, (worker, reason), shards)
            if in_order:
                move.wait()
            self._moves[move] = None
            work = self._hosts.spawn(move.run())
            work.add_done_callback(partial(self._ended, move))

    def _ended(self, move: _Move, work: object) -> None:
        self._moves.pop(move, None)

    def came(self) -> None:
        """Hear that a worker came, which may find what others did not."""
        for move in self._moves:
            move.look_now()

    def freed(self, entry: StoreEntry) -> None:
        """Look for nobody any more for a store that has ended."""
        for move in self._moves:
            if move.entry is entry:
                move.look_now()

    def give_up(self, entry: StoreEntry, shards: Collection[int]) -> None:
        """Look for shards no longer whose memory was removed."""
        for move in self._moves:
            if move.entry is entry:
                move.left.difference_update(shards)
                move.look_now()

    # -- what a move needs to know and do ------------------------------------

    def now(self) -> float:
        """Return the time, in seconds of the event loop."""
        return asyncio.get_running_loop().time()

    def spawn(self, work: Any) -> asyncio.Future[Any]:
        """Do something beside all else."""
        return self._hosts.spawn(work)

    def is_known(self, entry: StoreEntry) -> bool:
        """Return whether a store is still there."""
        return self._stores.get(entry.uid) is entry

    def candidates(self, worker: str) -> dict[str, bool]:
        """Return workers that may be on the machine of another: whether it seems so."""
        found = [ws.address for ws in self._scheduler.running]
        near = [w for w in found if _host(w) == _host(worker)]
        far = [w for w in found if _host(w) != _host(worker)]
        return dict.fromkeys(near, True) | dict.fromkeys(far[:MOST_FAR], False)

    def held(self) -> Counter[str]:
        """Return the bytes of all shards on each worker."""
        held: Counter[str] = Counter()
        for entry in self._stores.values():
            held.update(entry.nbytes)
        return held

    def why_not(
        self, worker: str, nbytes: int, held: Mapping[str, int], share: float
    ) -> str:
        """Return why a worker has no room for a shard, "" where it has."""
        state = self._scheduler.workers.get(worker)
        limit = state.memory_limit if state is not None else 0
        try:
            check_memory({worker: nbytes}, held, {worker: limit}, share)
        except LayoutError as error:
            return str(error)
        return ""

    async def adopt(
        self, entry: StoreEntry, worker: str, shards: Sequence[int], rounds: Any
    ) -> list[dict[str, Any]]:
        """Ask a worker to adopt shards, and rounds; return what became of each."""
        places = {row[0]: list(row) for row in entry.segments}
        rows = [[*places[i], entry.generations[i] + 1] for i in shards]
        about = {
            "name": entry.name,
            "layout": entry.layout,
            "rules": entry.rules,
            "cluster": entry.cluster,
        }
        # Until it has answered it may have done so: it is told when the store ends.
        entry.strays.add(worker)
        more = {"store": entry.uid, "about": about, "rows": rows, "rounds": rounds}
        found = await self._asked(worker, "adopt", shards, **more)
        if not any(answer.get("silent") for answer in found):
            entry.strays.discard(worker)
        return found

    async def look(
        self, entry: StoreEntry, worker: str, shards: Sequence[int]
    ) -> list[dict[str, Any]]:
        """Ask a worker what it sees of the memory of shards."""
        places = {row[0]: list(row) for row in entry.segments}
        rows = [places[i] for i in shards]
        more = {"cluster": entry.cluster, "rows": rows}
        return await self._asked(worker, "look", shards, **more)

    async def _asked(
        self, worker: str, method: str, shards: Sequence[int], **more: Any
    ) -> list[dict[str, Any]]:
        why, silent = "", False
        try:
            found: list[dict[str, Any]] = await self._hosts.control(
                worker, method, **more
            )
        except ProtocolError as error:
            # A worker that has just come gets its host in a moment.
            why = str(error)
        except Exception as error:  # noqa: BLE001 - one host's error ends no move
            why, silent = f"{worker}: {error!r}", isinstance(error, OSError)
        else:
            return found
        said = {"sight": Sight.UNKNOWN, "why": why, "silent": silent}
        return [{"shard": i, **said} for i in shards]

    async def settle_run(self, entry: StoreEntry, worker: str, run: int) -> None:
        """Have an adopter end a run that has ended while nobody held its shards."""
        if run and (how := self.runs.how_over(run)) is not None:
            ended = self._hosts.control(
                worker, "end_run", store=entry.uid, run=run, **how
            )
            await asyncio.wait_for(ended, END_SECONDS)

    def drop(self, entry: StoreEntry, worker: str) -> None:
        """Tell an adopter that the store has ended meanwhile."""
        self._hosts.spawn(self._hosts.control(worker, "drop", store=entry.uid))

    def end_later(self, entry: StoreEntry, worker: str, run: int) -> None:
        """Have an adopter that did not answer end a run, however long that takes.

        Else its shards would stay in a run that is over, and take no other step.
        """

        async def ask() -> None:
            while self.is_known(entry) and worker in self._scheduler.workers:
                await asyncio.sleep(LATER_SECONDS)
                try:
                    await self.settle_run(entry, worker, run)
                except (OSError, DaskPSError) as error:
                    logger.info("daskps: %s keeps run %d: %r", worker, run, error)
                else:
                    return

        self._hosts.spawn(ask())

    def look_after(self, worker: str) -> None:
        """Look for new owners again where an adopter died before it had its shards."""
        if worker not in self._scheduler.workers:
            self._left(worker, "died when it had adopted them")

    def tell(self, entry: StoreEntry, worker: str, by: str, shards: list[int]) -> None:
        """Say which workers have adopted shards."""
        self._hosts.tell("shards-adopted", entry, shards=shards, worker=worker, by=by)
        logger.info(
            "daskps: %s adopted %s of store %r from %s",
            by,
            counted(len(shards), "shard"),
            entry.name,
            worker,
        )

    def say(self, entry: StoreEntry, worker: str, shards: list[int], why: str) -> None:
        """Say that shards have been away for a while, also to callers that wait."""
        self._hosts.tell("shards-away", entry, shards=shards, worker=worker, reason=why)
        self.runs.shards_away(entry, shards, why)
        logger.warning(
            "daskps: %s of store %r %s: %s",
            counted(len(shards), "shard"),
            entry.name,
            "is away" if len(shards) == 1 else "are away",
            why,
        )

    def end_runs(self, entry: StoreEntry, worker: str, shard: int, why: str) -> None:
        """End the runs that have waited long enough for a shard."""
        error = ShardLostError(entry.name, shard, worker, why, True)
        self.runs.fence_all(entry, error)

    def lose(self, entry: StoreEntry, worker: str, shards: list[int], why: str) -> None:
        """Say that shards are lost."""
        entry.settle(shards)
        self._lose(entry, shards, worker, why)


class _Move:
    """The shards of one store that one worker left, until others have them."""

    def __init__(
        self,
        adoptions: Moves,
        entry: StoreEntry,
        left_by: tuple[str, str],
        shards: list[int],
    ) -> None:
        self.entry, self.left = entry, set(shards)
        self.worker, self._reason = left_by
        self._all = adoptions
        settings, now = config.load(), adoptions.now()
        self._verdicts = {
            shard: Verdict(
                now,
                "there is no other worker on its machine",
                lost_after=settings.lost_after_seconds,
                runs_end_after=settings.run_away_seconds,
            )
            for shard in shards
        }
        #: For each shard the worker asked to adopt it, since when, and who is to look.
        self._adopting: dict[int, dict[str, float]] = {i: {} for i in shards}
        self._looking: set[tuple[str, int]] = set()
        #: How often a worker was asked; who cannot have a shard.
        self._asked: Counter[tuple[str, int]] = Counter()
        self._refused: set[tuple[str, int]] = set()
        #: How often workers did not answer that may hold a shard: no other has it then.
        self._silent: Counter[tuple[str, int]] = Counter()
        self._nbytes = {row[0]: int(row[2]) for row in entry.segments}
        self._news = asyncio.Event()
        for shard, verdict in self._verdicts.items():
            self._wait_for(shard, verdict.why)

    async def run(self) -> None:
        """Ask until all shards have an owner, or nobody wants them any more."""
        while self.left and self._all.is_known(self.entry):
            self._ask_around()
            self._act()
            self._news.clear()
            wakes = min(self._verdicts[i].wakes_at() for i in self.left)
            with suppress(TimeoutError):
                seconds = max(0.0, wakes - self._all.now())
                await asyncio.wait_for(self._news.wait(), seconds)

    def wait(self) -> None:
        """Ask nobody for a moment."""
        now = self._all.now()
        for verdict in self._verdicts.values():
            verdict.asked(now)

    def look_now(self) -> None:
        """Ask again at once, or stop."""
        now = self._all.now()
        for shard in self.left:
            self._verdicts[shard].ask_now(now)
        self._news.set()

    # -- whom to ask ---------------------------------------------------------

    def _ask_around(self) -> None:
        """Have whoever may have them adopt the shards, and others look for them."""
        now = self._all.now()
        due = [i for i in sorted(self.left) if self._verdicts[i].is_to_ask(now)]
        if not due:
            return
        adopt, look = self._deal(due, now)
        for shard in due:
            self._verdicts[shard].asked(now)
        for by, shards in adopt.items():
            for shard in shards:
                self._adopting[shard][by] = now
            self._all.spawn(self._adopt(by, shards))
        for by, shards in look.items():
            self._looking.update((by, i) for i in shards)
            self._all.spawn(self._look(by, shards))

    def _deal(
        self, due: list[int], now: float
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Deal shards out to those who are to adopt them, and to look for them."""
        entry, candidates = self.entry, self._all.candidates(self.worker)
        held = self._all.held()
        adopt, look = dict[str, list[int]](), dict[str, list[int]]()
        away = entry.adopting | entry.lost.keys()
        n = Counter(w for i, w in enumerate(entry.owners) if i not in away)
        for shard in due:
            nbytes = self._nbytes[shard]
            may = [w for w in candidates if (w, shard) not in self._refused]
            if fit := self._fit(shard, may, held, now):
                by = min(
                    fit,
                    key=lambda w: (
                        self._turn(w, shard),
                        not candidates[w],
                        self._asked[w, shard],
                        n[w],
                        held[w],
                    ),
                )
                adopt.setdefault(by, []).append(shard)
                n[by] += 1
                held[by] += nbytes
            elif can := [w for w in may if (w, shard) not in self._looking]:
                by = min(can, key=lambda w: (not candidates[w], self._asked[w, shard]))
                look.setdefault(by, []).append(shard)
            else:
                continue
            self._asked[by, shard] += 1
        return adopt, look

    def _fit(
        self, shard: int, may: list[str], held: Mapping[str, int], now: float
    ) -> list[str]:
        """Return the workers that can be asked to adopt a shard now."""
        asked = self._adopting[shard]
        if any(now - at < ANSWER_SECONDS for at in asked.values()):
            return []
        fit = []
        for w in may:
            if w in asked:
                continue
            nbytes, share = self._nbytes[shard], self.entry.memory_share
            if why := self._all.why_not(w, nbytes, held, share):
                self._wait_for(shard, why)
            else:
                fit.append(w)
        return fit

    def _turn(self, worker: str, shard: int) -> int:
        """Return the next worker: first one that may hold it, last one asked again."""
        return (1, 0, 2)[min(self._silent[worker, shard], 2)]

    def _act(self) -> None:
        """Do what the verdicts ask for."""
        now, found = self._all.now(), dict[Due, list[int]]()
        near = [
            w for w, is_near in self._all.candidates(self.worker).items() if is_near
        ]
        for shard in sorted(self.left):
            others = any((w, shard) not in self._refused for w in near)
            for due in self._verdicts[shard].due(now, others=others):
                found.setdefault(due, []).append(shard)
        for due, shards in found.items():
            why = self.entry.waits[shards[0]]
            if due is Due.SAY:
                self._all.say(self.entry, self.worker, shards, why)
            elif due is Due.END_RUNS:
                self._all.end_runs(self.entry, self.worker, shards[0], why)
            else:
                why = why.replace("; ", "; nobody could adopt it: ", 1)
                self._all.lose(self.entry, self.worker, shards, why)

    # -- what they say -------------------------------------------------------

    async def _look(self, by: str, shards: list[int]) -> None:
        """Have a worker look for shards."""
        try:
            answers = await self._all.look(self.entry, by, shards)
        finally:
            self._looking.difference_update((by, i) for i in shards)
        for answer in answers:
            self._hear(by, answer)
        self._news.set()

    async def _adopt(self, by: str, shards: list[int]) -> None:
        """Have a worker adopt shards."""
        entry, need = self.entry, sum(self._nbytes[i] for i in shards)
        entry.nbytes[by] = entry.nbytes.get(by, 0) + need
        rounds = self._all.runs.rounds_of(entry)
        try:
            answers = await self._all.adopt(entry, by, shards, rounds)
            taken = [a for a in answers if "name" in a]
            await self._settle_runs(by, taken, rounds)
        finally:
            for shard in shards:
                del self._adopting[shard][by]
        need -= sum(a["nbytes"] for a in taken)
        kept = entry.nbytes.pop(by, 0) - need
        if kept > 0:
            entry.nbytes[by] = kept
        for answer in answers:
            self._hear(by, answer)
        if taken:
            self._install(by, taken)
        self._news.set()

    async def _settle_runs(
        self, by: str, taken: list[dict[str, Any]], rounds: Mapping[str, Any] | None
    ) -> None:
        """End what runs an adopter found that cannot go on."""
        if rounds and any(a["stopped"] or a["run"] != rounds["run"] for a in taken):
            self._all.runs.rounds_lost(self.entry, self.worker)
        for run in {a["run"] for a in taken}:
            try:
                await self._all.settle_run(self.entry, by, run)
            except (OSError, DaskPSError):
                self._all.end_later(self.entry, by, run)

    def _hear(self, by: str, answer: dict[str, Any]) -> None:
        """Take in what a worker says of one shard."""
        shard, key = answer["shard"], (by, answer["shard"])
        if answer.get("silent"):
            self._silent[key] += 1
        else:
            del self._silent[key]
        if "sight" not in answer or shard not in self.left:
            return
        if not answer.get("silent"):
            self._ask_the_silent(shard)
        sight, why = Sight(answer["sight"]), answer["why"]
        if sight is not Sight.FOUND and "silent" not in answer:
            self._refused.add(key)
            if not self._all.candidates(self.worker).get(by, False):
                # Perhaps it is not on that machine.
                sight = Sight.UNKNOWN
        adopters = [w for w in self._adopting[shard] if w != by]
        if sight is Sight.FOUND and not why and adopters:
            why = f"worker {adopters[-1]} takes long to take it over"
        self._verdicts[shard].see(sight, why, self._all.now())
        self._wait_for(shard, why)

    def _ask_the_silent(self, shard: int) -> None:
        """Have workers that never answered asked next: one that answers has it not."""
        for key in self._silent:
            if key[1] == shard:
                self._silent[key] = 1

    def _wait_for(self, shard: int, why: str) -> None:
        """Note what keeps a shard from an owner, for callers that wait for it."""
        if why:
            self._verdicts[shard].why = why
            self.entry.waits[shard] = f"{self._reason}; {why}"

    def _install(self, by: str, taken: list[dict[str, Any]]) -> None:
        entry = self.entry
        if not self._all.is_known(entry):
            self._all.drop(entry, by)
            return
        owners, generations = list(entry.owners), list(entry.generations)
        places = {row[0]: row for row in entry.segments}
        for row in taken:
            shard = row["shard"]
            owners[shard], generations[shard] = by, row["generation"]
            places[shard] = (shard, row["name"], row["nbytes"], row["nonce"])
            if row["mailbox"]:
                self._all.runs.mailbox_moved(row["run"], shard, row["mailbox"])
        entry.owners, entry.generations = tuple(owners), tuple(generations)
        entry.segments = [places[shard] for shard in sorted(places)]
        shards = sorted(row["shard"] for row in taken)
        self.left.difference_update(shards)
        entry.settle(shards)
        self._all.tell(entry, self.worker, by, shards)
        self._all.look_after(by)


def _host(address: str) -> str:
    return get_address_host(address)

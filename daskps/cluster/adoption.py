"""New owners for the shards of a worker that died, as the directory appoints them.

The memory of a shard outlives its process where other processes of the machine can
map it. The directory asks workers of that machine to take it over: who can map it is
there, whatever its address says. Until that is decided the shards are neither lost nor
served, and their callers wait. A shard's generation rises with its owner, so whatever
was meant for the dead one is refused and sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps.errors import DaskPSError, LayoutError, ProtocolError
from daskps.layout import counted
from daskps.placement import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distributed import Scheduler

    from daskps.cluster.entry import Entry, Hosts
    from daskps.cluster.runs import Runs

logger = logging.getLogger(__name__)
#: How long a worker may take to die, or a new one to appear where there is none.
ADOPT_SECONDS = 5.0
#: How long an adopter may take to answer: it may have to compile an update rule.
ANSWER_SECONDS = 15.0
#: Between two questions.
PAUSE_SECONDS = 0.05
#: Workers of other addresses that are asked: a machine may have several.
MOST_FAR = 3


class Adoptions:
    """The shards of dead workers on their way to new owners.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    hosts : Hosts
        The way to them.
    runs : Runs
        The runs of all stores.
    stores : mapping of str to Entry
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
        stores: Mapping[str, Entry],
        *,
        lose: Callable[[Entry, list[int], str, str], None],
        left: Callable[[str, str], None],
    ) -> None:
        self._scheduler, self._hosts = scheduler, hosts
        self.runs = runs
        self._stores, self._lose, self._left = stores, lose, left

    def is_possible(self, entry: Entry, shards: Iterable[int]) -> bool:
        """Return whether other processes can have the memory of shards."""
        shared = {row[0] for row in entry.segments}
        return (
            entry.ready
            and self._scheduler.status == Status.running
            and shared.issuperset(shards)
        )

    def begin(
        self, worker: str, reason: str, left: list[tuple[Entry, list[int]]]
    ) -> None:
        """Look for new owners of what a worker left: stores and their shards."""
        for entry, shards in left:
            entry.adopting.update(shards)
            entry.settled.clear()
            self.runs.shards_move(entry, worker, shards)
            self._hosts.spawn(self._one(_Move(self, entry, worker, shards), reason))

    async def _one(self, move: _Move, reason: str) -> None:
        entry = move.entry
        try:
            await move.run()
        finally:
            left = sorted(move.left & entry.adopting)
            entry.adopting.difference_update(left)
            if not entry.adopting:
                entry.settled.set()
            if left and entry.uid in self._stores:
                why = f"{reason}; nobody could adopt it: {move.why}"
                self._lose(entry, left, move.worker, why)

    # -- what a move needs to know and do ------------------------------------

    def is_known(self, entry: Entry) -> bool:
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

    async def ask(
        self, entry: Entry, worker: str, shards: list[int], rounds: Any
    ) -> list[dict[str, Any]]:
        """Ask a worker to adopt shards, and rounds; return what became of each."""
        places = {row[0]: list(row) for row in entry.segments}
        rows = [[*places[i], entry.generations[i] + 1] for i in shards]
        asked = self._hosts.control(
            worker,
            "adopt",
            store=entry.uid,
            about={
                "name": entry.name,
                "layout": entry.layout,
                "rules": entry.rules,
                "cluster": entry.cluster,
            },
            rows=rows,
            rounds=rounds,
        )
        try:
            found: list[dict[str, Any]] = await asyncio.wait_for(asked, ANSWER_SECONDS)
        except ProtocolError as error:
            # A worker that has just come gets its host in a moment.
            return [{"shard": i, "why": str(error), "lives": True} for i in shards]
        except (OSError, DaskPSError) as error:
            # It may do so yet: it is told when the store ends.
            entry.strays.add(worker)
            why, silent = f"{worker}: {error!r}", isinstance(error, OSError)
            return [{"shard": i, "why": why, "silent": silent} for i in shards]
        return found

    async def settle_run(self, entry: Entry, worker: str, run: int) -> None:
        """Have an adopter end a run that has ended while nobody held its shards."""
        if run and (over := self.runs.why_over(run)) is not None:
            await self._hosts.control(
                worker, "end_run", store=entry.uid, run=run, reason=str(over)
            )

    def drop(self, entry: Entry, worker: str) -> None:
        """Tell an adopter that the store has ended meanwhile."""
        self._hosts.spawn(self._hosts.control(worker, "drop", store=entry.uid))

    def look_after(self, worker: str) -> None:
        """Look for new owners again where an adopter died before it had its shards."""
        if worker not in self._scheduler.workers:
            self._left(worker, "died when it had adopted them")

    def tell(self, entry: Entry, worker: str, by: str, shards: list[int]) -> None:
        """Say who has adopted shards."""
        self._hosts.tell("shards-adopted", entry, shards=shards, worker=worker, by=by)
        logger.info(
            "daskps: %s adopted %s of store %r from %s",
            by,
            counted(len(shards), "shard"),
            entry.name,
            worker,
        )


class _Move:
    """The shards of one store that one worker left."""

    def __init__(
        self, adoptions: Adoptions, entry: Entry, worker: str, shards: list[int]
    ) -> None:
        self.entry, self.worker, self.left = entry, worker, set(shards)
        #: What was said last against it.
        self.why = "there is no other worker on its machine"
        self._all = adoptions
        self._asked: set[tuple[str, int]] = set()
        self._refused: set[tuple[str, int]] = set()
        #: How often those did not answer who may hold a shard: nobody else has it then.
        self._silent: Counter[tuple[str, int]] = Counter()
        self._nbytes = {row[0]: int(row[2]) for row in entry.segments}

    async def run(self) -> None:
        """Ask until all shards have an owner, nobody is left, or time is over."""
        loop = asyncio.get_running_loop()
        end = loop.time() + ADOPT_SECONDS
        while self.left and self._all.is_known(self.entry):
            # Then only who was not asked yet, the others may have been slow, and once
            # more who did not answer.
            late = loop.time() > end
            asked, is_near = self._choose(late)
            waits = await asyncio.gather(
                *(self._ask(by, shards) for by, shards in asked.items())
            )
            if not self.left or (not asked and (is_near or late)):
                return
            if any(waits) or not asked:
                await asyncio.sleep(PAUSE_SECONDS)

    def _choose(self, late: bool) -> tuple[dict[str, list[int]], bool]:
        """Deal the shards out, and say whether there is anybody on the machine."""
        entry, candidates = self.entry, self._all.candidates(self.worker)
        held, asked = self._all.held(), dict[str, list[int]]()
        n = Counter(w for i, w in enumerate(entry.owners) if i not in entry.adopting)
        for shard in sorted(self.left):
            nbytes, fit = self._nbytes[shard], []
            for w in candidates:
                if not self._may_ask(w, shard, late):
                    continue
                if why := self._all.why_not(w, nbytes, held, entry.memory_share):
                    self.why = why
                else:
                    fit.append(w)
            if fit:
                silent = {w: self._silent[w, shard] for w in fit}
                by = min(
                    fit,
                    # First who may hold it already, last who never answers.
                    key=lambda w: (
                        (1, 0, 2)[min(silent[w], 2)],
                        not candidates[w],
                        n[w],
                        held[w],
                    ),
                )
                asked.setdefault(by, []).append(shard)
                self._asked.add((by, shard))
                n[by] += 1
                held[by] += nbytes
        return asked, any(candidates.values())

    def _may_ask(self, worker: str, shard: int, late: bool) -> bool:
        key = worker, shard
        if not late:
            return key not in self._refused
        return key not in self._asked or self._silent[key] == 1

    async def _ask(self, by: str, shards: list[int]) -> bool:
        """Have a worker adopt shards; return whether to ask it again."""
        entry, need = self.entry, sum(self._nbytes[i] for i in shards)
        entry.nbytes[by] = entry.nbytes.get(by, 0) + need
        rounds = self._all.runs.rounds_of(entry)
        answers = await self._all.ask(entry, by, shards, rounds)
        taken = [a for a in answers if "name" in a]
        if rounds and any(a["run"] != rounds["run"] for a in taken):
            self._all.runs.rounds_lost(entry, self.worker)
        try:
            for run in {a["run"] for a in taken}:
                await self._all.settle_run(entry, by, run)
        except (OSError, DaskPSError) as error:
            logger.info("daskps: an adopter left at once: %r", error)
        need -= sum(a["nbytes"] for a in taken)
        kept = entry.nbytes.pop(by, 0) - need
        if kept > 0:
            entry.nbytes[by] = kept
        again = False
        for answer in answers:
            key = by, answer["shard"]
            if answer.get("silent"):
                self._silent[key] += 1
            else:
                del self._silent[key]
            if "why" in answer:
                self.why = answer["why"]
                waits = bool(answer.get("lives") or answer.get("silent"))
                again = again or waits
                if not waits:
                    self._refused.add(key)
        if taken:
            self._install(by, taken)
        return again

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
        entry.adopting.difference_update(shards)
        if not entry.adopting:
            entry.settled.set()
        self._all.tell(entry, self.worker, by, shards)
        self._all.look_after(by)


def _host(address: str) -> str:
    return get_address_host(address)

"""Workers to ask to adopt the shards of one that died, or to look for them.

Those of its machine, as far as addresses tell, then others, a few at a time: a worker
that can map the memory is on that machine whatever its address says. First comes one
that may hold a shard already, for its answer was lost. A worker that Dask has paused
serves its shards, so it adopts some where no running one does; one that closes adopts
none.

A shard without an owner is away while there is evidence of its memory, which is asked
for again and again; without evidence it is lost. A :class:`Verdict` knows neither clock
nor worker: the move says what it heard and when, in seconds of any clock that only
rises, and does what is due.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from distributed.core import Status

from daskps.cluster.directory.machines import near_to
from daskps.cluster.directory.placement import held_bytes
from daskps.cluster.protocol.reports import Sight
from daskps.errors import LayoutError
from daskps.layout.placement import check_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from distributed import Scheduler

    from daskps.cluster.directory.entry import StoreEntry

#: How long an adopter is waited for alone: it may have to compile an update rule.
#: Then others are asked too; only one of them can have the memory.
ANSWER_SECONDS = 15.0
#: Workers of other addresses that are asked at a time: a machine may have several.
_MOST_REMOTE = 3
#: So often others are asked before the worker that has left the shard.
_LATER_TURNS = 3


@dataclass(slots=True)
class _Poll:
    """The questions that workers got about one shard, and their answers."""

    nbytes: int
    #: Since when which worker is asked to adopt it, and which to look for it.
    asking: dict[str, dict[str, float]] = field(
        default_factory=lambda: {"adopt": {}, "look": {}}
    )
    #: How often a worker was asked; which cannot have it.
    n: Counter[str] = field(default_factory=Counter)
    refused: set[str] = field(default_factory=set)
    #: How often workers did not answer that may hold it: no other has it then.
    silent: Counter[str] = field(default_factory=Counter)

    def askable(self, may: list[str], now: float) -> list[str]:
        """Return the workers that can be asked to adopt it now.

        None while one that was asked a moment ago has yet to answer.
        """
        adopting = self.asking["adopt"]
        if any(now - at < ANSWER_SECONDS for at in adopting.values()):
            return []
        return [w for w in may if w not in adopting]

    def priority(self, worker: str) -> int:
        """Return 0 for a worker to ask first, which was silent once and may hold it.

        1 for one that was never silent, 2 for one that was silent again.
        """
        return (1, 0, 2)[min(self.silent[worker], 2)]

    def ask_the_silent(self) -> None:
        """Have workers that never answered asked next: one that answers has it not."""
        for worker in self.silent:
            self.silent[worker] = 1

    def hear(
        self, by: str, answer: dict[str, Any], is_local: bool
    ) -> tuple[Sight, str]:
        """Take in what a worker says; return what that says of the shard, and why."""
        # Where there is "silent" the move says it, of a worker that could not be asked.
        if answer.get("silent"):
            self.silent[by] += 1
        else:
            del self.silent[by]
            self.ask_the_silent()
        sight, why = Sight(answer["sight"]), answer["why"]
        if sight is not Sight.FOUND and "silent" not in answer:
            # It has looked itself, and does not find the memory.
            self.refused.add(by)
            if not is_local:
                # Perhaps it is not on that machine.
                sight = Sight.UNKNOWN
        others = [worker for worker in self.asking["adopt"] if worker != by]
        if sight is Sight.FOUND and not why and others:
            why = f"worker {others[-1]} takes long to take it over"
        return sight, why


class Candidates:
    """The workers that may adopt the shards of one store.

    Parameters
    ----------
    scheduler : Scheduler
        Knows the workers.
    stores : mapping of str to StoreEntry
        All stores, which take their memory.
    entry : StoreEntry
        The store.
    worker : str
        The worker that left the shards. Where it still runs it may have them back, if
        no other one can have them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        stores: Mapping[str, StoreEntry],
        entry: StoreEntry,
        worker: str,
    ) -> None:
        self._scheduler, self._stores = scheduler, stores
        self._entry, self._left_by = entry, worker
        self._asked = {row[0]: _Poll(entry.sizes[row[0]]) for row in entry.segments}

    def _workers(self) -> tuple[dict[str, None], list[str]]:
        """Return the workers that seem to be on the machine, and all others.

        Running ones come first.
        """
        known = self._scheduler.workers
        both = Status.running, Status.paused
        found = [w for status in both for w in known if known[w].status == status]
        near = near_to(self._scheduler, self._entry, self._left_by) | {self._left_by}
        local = dict.fromkeys(w for w in found if w in near)
        return local, [w for w in found if w not in local]

    # -- questions -----------------------------------------------------------

    def deal(
        self, due: Iterable[int], now: float, wait_for: Callable[[int, str], None]
    ) -> dict[tuple[str, str], list[int]]:
        """Deal shards out to workers that are to adopt them, or to look for them.

        `wait_for` hears of a shard that a worker has no room for, and why. Returns by
        question, "adopt" or "look", and worker the shards.
        """
        (local, remote), held = self._workers(), held_bytes(self._stores.values())
        known = self._scheduler.workers
        n, share = Counter(self._entry.holders), self._entry.memory_share
        found = dict[tuple[str, str], list[int]]()
        for shard in due:
            asked, rank = self._asked[shard], dict[str, tuple[float, ...]]()
            # Of the others the next ones, where these do not find the memory.
            others = (w for w in remote if w not in asked.refused)
            may = [w for w in local if w not in asked.refused]
            may += islice(others, _MOST_REMOTE)
            for w in asked.askable(may, now):
                limits = {w: known[w].memory_limit}
                is_paused = known[w].status is Status.paused
                try:
                    check_memory({w: asked.nbytes}, held, limits, share)
                except LayoutError as error:
                    wait_for(shard, str(error))
                else:
                    # Asked all the same: a worker of its address may hold it by now.
                    turn = asked.n[w] + _LATER_TURNS * (w == self._left_by)
                    first = asked.priority(w), w not in local, turn, is_paused
                    rank[w] = *first, n[w], held[w]
            if rank:
                question, by = "adopt", min(rank, key=rank.__getitem__)
                n[by] += 1
                held[by] += asked.nbytes
            elif can := [w for w in may if w not in asked.asking["look"]]:
                question = "look"
                by = min(can, key=lambda w: (w not in local, asked.n[w]))
            else:
                continue
            found.setdefault((question, by), []).append(shard)
            asked.asking[question][by] = now
            asked.n[by] += 1
        return found

    # -- answers -------------------------------------------------------------

    def end_question(self, question: str, by: str, shards: Iterable[int]) -> None:
        """Note that a worker has answered a question about shards, or failed."""
        for shard in shards:
            del self._asked[shard].asking[question][by]

    def hear(
        self, by: str, answers: Iterable[dict[str, Any]]
    ) -> dict[int, tuple[Sight, str]]:
        """Return what a worker's answers say of shards, and why.

        An adopter that has a shard says where it is, and nothing of what it sees.
        """
        is_local = by in self._workers()[0]
        said = [answer for answer in answers if "sight" in answer]
        return {a["shard"]: self._asked[a["shard"]].hear(by, a, is_local) for a in said}

    def unheard(self, shards: Iterable[int]) -> set[int]:
        """Return the shards of which not all workers of the machine were heard yet."""
        local = {*self._workers()[0]}
        return {i for i in shards if local - self._asked[i].refused}


#: When an absence is no longer a matter of moments, and is said.
_SAY_SECONDS = 5.0
#: Between two questions: at first often, as a worker dies within milliseconds and the
#: next one comes within a second; then every second; rarely once a shard is lost.
FIRST_SECONDS, PAUSE_SECONDS, LOST_SECONDS = 0.05, 1.0, 10.0
#: The share of its absence that may pass between two questions.
_PATIENCE = 0.125


class Due(enum.Enum):
    """An action that a verdict asks for, each once."""

    #: Say that the shard is away, and why.
    SAY = enum.auto()
    #: End the runs that wait for it.
    END_RUNS = enum.auto()
    #: It is lost, until somebody finds it after all.
    LOSE = enum.auto()


class Verdict:
    """The evidence of one shard that its worker left, and what follows from it.

    Parameters
    ----------
    now : float
        When the worker left.
    lost_after : float
        Seconds without evidence after which it is lost.
    runs_end_after : float or None
        Seconds after which its runs end; None for never.
    """

    def __init__(
        self,
        now: float,
        *,
        lost_after: float,
        runs_end_after: float | None = None,
    ) -> None:
        self.is_lost = False
        self._left_at = self._evident_at = self._ask_at = now
        self._lost_after = lost_after
        end = math.inf if runs_end_after is None else runs_end_after
        self._found_at, self._absent = -math.inf, False
        self._to_come = {Due.SAY: now + _SAY_SECONDS, Due.END_RUNS: now + end}

    def see(self, sight: Sight, now: float) -> None:
        """Take in what one worker says, and when to ask again."""
        if sight is Sight.FOUND:
            self._evident_at = self._found_at = now
            self._absent = False
        elif sight is Sight.ABSENT:
            self._absent = True
        self.asked(now)

    def asked(self, now: float) -> None:
        """Note that a question was put; the answer may be long in coming."""
        self._ask_at = now + self._pause(now)

    def ask_now(self, now: float) -> None:
        """Ask at once, as where a worker came."""
        self._ask_at = now

    def is_to_ask(self, now: float) -> bool:
        """Return whether it is time for the next question."""
        return now >= self._ask_at

    def due(self, now: float, *, others: bool) -> list[Due]:
        """Return what is due now.

        Parameters
        ----------
        now : float
            The time.
        others : bool
            Whether there are workers on its machine that were not heard yet.
        """
        found = [what for what, at in self._to_come.items() if now >= at]
        for what in found:
            del self._to_come[what]
        is_silent = now >= self._evident_at + self._lost_after
        if not self.is_lost and (is_silent or (self._absent and not others)):
            self.is_lost = True
            # Its runs end by that.
            self._to_come.clear()
            return [Due.LOSE]
        return found

    def wakes_at(self) -> float:
        """Return when there is something to ask or to do next."""
        silent_at = math.inf if self.is_lost else self._evident_at + self._lost_after
        return min(self._ask_at, silent_at, *self._to_come.values())

    def _pause(self, now: float) -> float:
        if self.is_lost and now > self._found_at:
            return LOST_SECONDS
        since = (now - self._left_at) * _PATIENCE
        return min(max(FIRST_SECONDS, since), PAUSE_SECONDS, self._lost_after / 4)

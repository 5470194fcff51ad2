"""The shards of one store that one worker left, until others have them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from daskps import config
from daskps.cluster.directory import adopters
from daskps.cluster.directory.candidates import Candidates
from daskps.cluster.directory.verdict import Due, Verdict
from daskps.errors import ShardLostError
from daskps.layout.arrays import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.cluster.directory.adopters import MoveContext
    from daskps.cluster.directory.entry import StoreEntry

logger = logging.getLogger(__name__)


def time_now() -> float:
    """Return the time, in seconds of the event loop."""
    return asyncio.get_running_loop().time()


def lose_shards(
    context: MoveContext,
    entry: StoreEntry,
    shards: list[int],
    left_by: tuple[str, str],
    *,
    level: int = logging.WARNING,
) -> None:
    """Mark shards as lost with a worker that left for a reason, and tell everybody."""
    worker, reason = left_by
    entry.settle(shards)
    entry.lost |= dict.fromkeys(shards, left_by)
    context.hosts.tell(
        "shards-lost", entry, shards=shards, worker=worker, reason=reason
    )
    error = ShardLostError(entry.name, shards[0], worker, reason)
    context.runs.fence_all(entry, error)
    lost = counted(len(shards), "shard")
    logger.log(
        level, "daskps: store %r lost %s with worker %s", entry.name, lost, worker
    )


class Move:
    """One move: which worker is asked when, what it says, and the new owners."""

    def __init__(
        self,
        context: MoveContext,
        entry: StoreEntry,
        left_by: tuple[str, str],
        shards: list[int],
    ) -> None:
        self.entry = entry
        self.worker, self._reason = left_by
        self._context, self._hosts = context, context.hosts
        self._candidates = Candidates(context, entry, self.worker)
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

    def wait(self) -> None:
        """Ask nobody for a moment."""
        for verdict in self._left.values():
            verdict.asked(time_now())

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

    def _is_known(self) -> bool:
        return self._context.stores.get(self.entry.uid) is self.entry

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
        about = self._context, self.entry, by, shards
        try:
            if question == "adopt":
                answers = await adopters.adopt(*about, left_by=self.worker)
            else:
                answers = await adopters.look(*about)
        finally:
            self._candidates.end_question(question, by, shards)
        self._hear(by, answers)
        if taken := [answer for answer in answers if "name" in answer]:
            self._install(by, taken)

    # -- answers -------------------------------------------------------------

    def _hear(self, by: str, answers: list[dict[str, Any]]) -> None:
        """Take in what a worker says of shards."""
        for shard, (sight, why) in self._candidates.hear(by, answers).items():
            if shard in self._left:
                self._left[shard].see(sight, time_now())
                self._wait_for(shard, why)
        self._news.set()

    def _wait_for(self, shard: int, why: str) -> None:
        """Note what keeps a shard from an owner, for callers that wait for it."""
        if why and shard in self.entry.away:
            self.entry.away[shard] = f"{self._reason}; {why}"

    def _install(self, by: str, taken: list[dict[str, Any]]) -> None:
        """Make a worker the owner of the shards that it has adopted."""
        entry, hosts = self.entry, self._hosts
        if not self._is_known():
            hosts.spawn(hosts.control(by, "drop", store=entry.uid))
            return
        if not hosts.has_worker(by):
            # The adopter has died: others are asked, and find what it has renamed.
            return
        shards = entry.install(by, taken)
        for row in taken:
            self._left.pop(row["shard"], None)
            if row["mailbox"] and (run := self._context.runs.open.get(row["run"])):
                run.mailbox_moved(row["shard"], row["mailbox"])
        hosts.tell("shards-adopted", entry, shards=shards, worker=self.worker, by=by)
        logger.info(
            "daskps: %s adopted %s of store %r from %s",
            by,
            counted(len(shards), "shard"),
            entry.name,
            self.worker,
        )

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
                self._context.runs.fence_all(self.entry, ShardLostError(*about))
            else:
                why = why.replace("; ", "; nobody could adopt it: ", 1)
                left_by = self.worker, why
                lose_shards(self._context, self.entry, shards, left_by)

    def _say_away(self, shards: list[int], why: str) -> None:
        """Say that shards have been away for a while, also to callers that wait."""
        entry = self.entry
        self._hosts.tell(
            "shards-away", entry, shards=shards, worker=self.worker, reason=why
        )
        self._context.runs.shards_away(entry, shards, why)
        logger.warning(
            "daskps: %s of store %r %s: %s",
            counted(len(shards), "shard"),
            entry.name,
            "is away" if len(shards) == 1 else "are away",
            why,
        )

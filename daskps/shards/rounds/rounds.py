"""The rounds of one BSP run in one shard: what came for the round being formed.

Nothing that counts is kept here but in the mailboxes, so several processes may take
turns: each call looks at the table in force. Only pushes before the tick stay with the
process that got them; where that one is gone, their trainer sends all of its clock
again, as one *whole* step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.errors import ClockError, ConsistencyError, ContributionLostError
from daskps.shards import run_record
from daskps.shards.rounds.tables import KINDS, Arrival, Tables
from daskps.shards.rounds.words import FINISHED, KIND, N_IN, N_TICKED, ROUND, TICKED

if TYPE_CHECKING:
    from daskps.shards.rounds.mailbox import Table
    from daskps.shards.steps import Step
    from daskps.typing import Array

#: What a round says to a step.
NEW: Final = "new"
REPEAT: Final = "repeat"
EARLY: Final = "early"


@dataclass(slots=True)
class Open:
    """What a rank has pushed in a round before its tick."""

    round: int
    next: int
    kind: str | None = None
    arrays: dict[int, Array] = field(default_factory=dict)


class Rounds:
    """Steps of trainers, on their way into the table of the open round.

    Parameters
    ----------
    tables : Tables
        The table.
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._open: dict[int, Open] = {}

    def verdict(self, step: Step) -> str:
        """Return whether a step is NEW, a REPEAT, or EARLY by one round.

        Parameters
        ----------
        step : Step
            What a trainer sends.

        Raises
        ------
        ClockError
            When its rank has finished, or has skipped a round.
        RunCancelledError
            When another trainer has taken the place of the one that sends it.
        """
        table, rank = self.tables.table(), step.rank
        if run_record.is_older(step, table.next[rank]):
            # Also where it would complete what its successor has dropped.
            raise run_record.replaced(step)
        now = table.words[ROUND]
        state = table.ranks[rank]
        waiting = self._waiting(rank, now)
        if step.sequence < (waiting.next if waiting else table.next[rank]):
            return REPEAT
        if state & FINISHED:
            raise ClockError(run_record.finished(step))
        if step.clock < now:
            # Sent again after a timeout, under a new number: the first one counts.
            return REPEAT
        if step.clock == now:
            return REPEAT if state & TICKED else NEW
        if step.clock == now + 1 and state & TICKED:
            return EARLY
        raise ClockError(
            f"rank {rank} sends clock {step.clock} while this shard is in round "
            f"{now}; a trainer ticks once per round, on every shard"
        )

    def arrive(self, step: Step) -> Arrival | None:
        """Take one step of a rank, which the verdict was NEW for.

        Returns what the round gets by it, None before the tick.

        Raises
        ------
        ContributionLostError
            When the rank's pushes before this one went with the shard's worker.
        """
        table, rank = self.tables.table(), step.rank
        now = table.words[ROUND]
        waiting = None if step.whole else self._waiting(rank, now)
        if waiting is None and not step.whole and table.has_pushed(rank):
            raise ContributionLostError(
                f"what trainer {rank} pushed before its tick at clock {step.clock} "
                f"went with the worker that had it; push all of it again"
            )
        kind = self._kind(step, table) if step.items else None
        arrays = waiting.arrays if waiting else {}
        if waiting or not step.tick or _twice(step):
            arrays = _joined(arrays, step)
            kind = kind or (waiting.kind if waiting else None)
        else:
            arrays = {item.position: item.data for item in step.items}
        if not step.tick:
            table.note_pushed(rank, True)
            self._open[rank] = Open(now, step.sequence + 1, kind, arrays)
            return None
        return self.tables.arrival(
            rank,
            sequence=step.sequence,
            kind=kind,
            weight=step.weight,
            arrays=arrays,
        )

    def look(self, rank: int, clock: int, sequence: int, kind: str | None) -> int:
        """Return how many slices a step with a tick meets that joins as it is.

        Not -1 only where :meth:`verdict` says NEW, the kind fits and nothing was pushed
        before the tick. Whatever else there is to say is for the verdict.
        """
        return -1 if self._open else self.tables.look(rank, clock, sequence, kind)

    def finish(self, rank: int) -> Arrival | None:
        """Wait for `rank` no longer, from the open round on."""
        table = self.tables.table()
        now, state = table.words[ROUND], table.ranks[rank]
        waiting = self._waiting(rank, now)
        self._open.pop(rank, None)
        if state & FINISHED:
            return None
        sequence = waiting.next if waiting else table.next[rank]
        if state:
            nowhere = (rank, rank + 1)
            return Arrival(rank, FINISHED, sequence, None, 0.0, nowhere, [], {}, False)
        node, slices = self.tables.climb(rank)
        n_in, n_ticked = table.words[N_IN], table.words[N_TICKED]
        last = n_in + 1 == self.tables.size and n_ticked > 0
        return Arrival(rank, FINISHED, sequence, None, 0.0, node, slices, {}, last=last)

    def restart(self, rank: int, attempt: int) -> tuple[int, int]:
        """Let a trainer take the place of a lost one; return where its rank stands.

        What that one left of an unfinished step is dropped, and what it sends from here
        on is refused. Asked again, or with 0, nothing changes.

        Parameters
        ----------
        rank : int
            The rank.
        attempt : int
            Which of the rank's trainers asks, as the directory counts them.

        Returns
        -------
        tuple of (int, int)
            Its clock and its next sequence number.
        """
        table, first = self.tables.table(), run_record.first_of(attempt)
        ticked = table.ranks[rank] & TICKED
        if table.next[rank] < first:
            if not ticked:
                self._open.pop(rank, None)
                table.note_pushed(rank, False)
            # Last: a process that dies before has changed nothing that counts.
            table.next[rank] = first
        return self.tables.clock(rank) + ticked, table.next[rank]

    def store(self, arrival: Arrival) -> None:
        """Keep what came; its rank's pushes before the tick are in it."""
        self.tables.store(arrival)
        self._open.pop(arrival.rank, None)

    def close(self) -> None:
        """Forget what was pushed before the tick: the round was published."""
        self._open.clear()

    def _waiting(self, rank: int, now: int) -> Open | None:
        """Return what a rank has pushed before its tick in the open round."""
        waiting = self._open.get(rank)
        return waiting if waiting is not None and waiting.round == now else None

    def _kind(self, step: Step, table: Table) -> str:
        """Return the kind of a step with arrays, if it is that of the round."""
        now = table.words[ROUND]
        kinds = [KINDS[table.words[KIND]]]
        kinds += [w.kind for w in self._open.values() if w.round == now]
        for kind in kinds:
            if kind not in (None, step.kind):
                raise ConsistencyError(
                    f"rank {step.rank} sends a {step.kind} in a round of {kind}s; all "
                    f"trainers of a run must send the same kind"
                )
        return step.kind

    @property
    def next(self) -> Array:
        """The next sequence number of every rank."""
        table = self.tables.table()
        found = np.array(table.next)
        for rank, waiting in self._open.items():
            if waiting.round == table.words[ROUND]:
                found[rank] = waiting.next
        return found


def _twice(step: Step) -> bool:
    """Return whether a piece comes more than once in a step."""
    items = step.items
    return len(items) > 1 and len({item.position for item in items}) < len(items)


def _joined(arrays: dict[int, Array], step: Step) -> dict[int, Array]:
    """Return the arrays of a rank's earlier pushes with those of one more.

    Before the tick they are kept: in place, and what came is copied. With the tick
    they are used up at once, and nothing changes that a refusal would have to undo.
    """
    if step.tick:
        arrays = dict(arrays)
    for item in step.items:
        known = arrays.get(item.position)
        if step.tick:
            data = item.data
            arrays[item.position] = data if known is None else known + data
        elif known is None:
            arrays[item.position] = _own(item.data, step.owned)
        else:
            known += item.data
    return arrays


def _own(data: Array, owned: bool) -> Array:
    if owned and data.flags.writeable:
        return data
    return data.copy()

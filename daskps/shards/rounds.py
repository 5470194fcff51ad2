"""The mailboxes of one BSP run in one shard: what came for the round being formed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from daskps.errors import ClockError, ConsistencyError
from daskps.reduction import Node, Reducer, Tree, leaf, mean, reduce_all
from daskps.shards import runs
from daskps.shards.base import MODEL, Step
from daskps.shards.segment import (
    CLOCK,
    FIRST,
    LIVE,
    N_RANKS,
    NEXT,
    ROUNDS,
    VERSION,
    Record,
)

#: What a round says to a step.
NEW: Final = "new"
REPEAT: Final = "repeat"
EARLY: Final = "early"

Array = np.ndarray[Any, np.dtype[Any]]


class Rounds:
    """Contributions of the open round, merged as they come.

    Parameters
    ----------
    size : int
        Number of trainers P.
    reduce : "mean", "sum" or callable
        How contributions become one gradient.
    """

    def __init__(self, size: int, reduce: str | Reducer) -> None:
        self.size, self.reduce = size, reduce
        self.finished: set[int] = set()
        self.next = np.zeros(size, dtype=np.int64)
        self._reset()

    def _reset(self) -> None:
        self.done: set[int] = set()
        self.weight = 0.0
        self.kind: str | None = None
        self._open: dict[int, dict[int, Array]] = {}
        self._nodes: dict[int, Node] = {}
        self._tree = Tree(self.size)
        for rank in self.finished:
            self._tree.put(rank, None)

    def restart(self, rank: int, clock: int, sequence: int) -> tuple[int, int]:
        """Drop what a lost trainer left of an unfinished step; return where it stands.

        Parameters
        ----------
        rank : int
            The trainer.
        clock, sequence : int
            Where the last complete round left it.

        Returns
        -------
        tuple of (int, int)
            Its clock and its next sequence number.
        """
        if rank in self.done:
            return clock + 1, int(self.next[rank])
        self._open.pop(rank, None)
        self.next[rank] = sequence
        return clock, sequence

    def verdict(self, step: Step, now: int) -> str:
        """Return whether a step is NEW, a REPEAT, or EARLY by one round.

        Parameters
        ----------
        step : Step
            What a trainer sends.
        now : int
            Number of the open round.

        Raises
        ------
        ClockError
            When its rank has finished, or has skipped a round.
        """
        if step.sequence < self.next[step.rank]:
            return REPEAT
        if step.rank in self.finished:
            raise ClockError(runs.finished(step))
        if step.clock < now:
            # Sent again after a timeout, under a new number: the first one counts.
            return REPEAT
        ticked = step.rank in self.done
        if step.clock == now:
            return REPEAT if ticked else NEW
        if step.clock == now + 1 and ticked:
            return EARLY
        raise ClockError(
            f"rank {step.rank} sends clock {step.clock} while this shard is in round "
            f"{now}; a trainer ticks once per round, on every shard"
        )

    def join(self, step: Step) -> None:
        """Take one step of a rank that has not ticked in this round."""
        if step.items:
            if self.kind not in (None, step.kind):
                raise ConsistencyError(
                    f"rank {step.rank} sends a {step.kind} in a round of "
                    f"{self.kind}s; all trainers of a run must send the same kind"
                )
            self.kind = step.kind
        self.next[step.rank] = step.sequence + 1
        pending = self._open.setdefault(step.rank, {})
        for item in step.items:
            if item.position in pending:
                # The first array may still be the caller's own, if it was alone.
                pending[item.position] += item.data
            else:
                pending[item.position] = _own(item.data, step.owned)
        if step.tick:
            self._close(step.rank, step.weight)

    def _close(self, rank: int, weight: float) -> None:
        arrays = self._open.pop(rank, {})
        self.done.add(rank)
        self.weight += weight
        node = leaf(list(arrays.items()), weight, self.reduce) if weight else None
        if not callable(self.reduce):
            self._tree.put(rank, node)
        elif node is not None:
            self._nodes[rank] = node

    def finish(self, rank: int) -> None:
        """Wait for `rank` no longer, from the open round on."""
        self._open.pop(rank, None)
        if rank in self.finished:
            return
        self.finished.add(rank)
        if rank not in self.done:
            self._tree.put(rank, None)

    @property
    def complete(self) -> bool:
        """Whether all live trainers have ticked, and any has."""
        return bool(self.done) and len(self.done | self.finished) == self.size

    def reduced(self) -> dict[int, Array]:
        """Return the reduced arrays of the complete round, by position."""
        if callable(self.reduce):
            return reduce_all(self._nodes, self.size, self.reduce)
        root = self._tree.root()
        return mean(root) if self.reduce == "mean" else root[0]

    def close_round(self) -> None:
        """Start the next round."""
        self._reset()

    def note(self, record: Record) -> None:
        """Note the complete round in a record."""
        record.fixed[ROUNDS] += 1
        record.fixed[VERSION] += self.weight > 0
        rows = record.ranks[: record.fixed[N_RANKS]]
        rows[sorted(self.done), CLOCK] += 1
        rows[:, NEXT] = rows[:, FIRST] = self.next
        rows[sorted(self.finished), LIVE] = 0

    @property
    def n_nodes(self) -> int:
        """Number of contributions and partial sums held."""
        return self._tree.n_nodes + len(self._nodes)

    @property
    def bound(self) -> int:
        """Largest number of them a round may come to."""
        return self.size if callable(self.reduce) else -(-self.size // 2) + 1

    @property
    def is_model(self) -> bool:
        """Whether the round averages models instead of reducing gradients."""
        return self.kind == MODEL


def _own(data: Array, owned: bool) -> Array:
    if owned and data.flags.writeable:
        return data
    return data.copy()

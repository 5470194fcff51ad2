"""The table of the open round: who is in, and where the sums of their arrays are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from daskps.reduction import Node, Reducer, path, reduce_all
from daskps.shards.base import GRADIENT, MODEL
from daskps.shards.forming import Sum, gather
from daskps.shards.mailbox import (
    FINISHED,
    FREE,
    KIND,
    N_IN,
    N_TICKED,
    ROUND,
    TICKED,
    Mailbox,
    Table,
    packed,
)
from daskps.shards.segment import (
    CLOCK,
    FIRST,
    FLIP,
    LIVE,
    NEXT,
    RANK_WORDS,
    ROUNDS,
    RUN,
    VERSION,
    Segment,
    integers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Kinds of a round, by their word in a table.
KINDS: Final = (None, GRADIENT, MODEL)

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(slots=True)
class Arrival:
    """A rank that is in now, and how the table changes by it."""

    rank: int
    #: What is added to the rank's word, and its next sequence number.
    bits: int
    next: int
    kind: str | None
    weight: float
    #: The node that is complete now, and the slices of which it is the sum, the lowest
    #: first: their indices, and whether each is the left part.
    node: tuple[int, int]
    slices: list[tuple[int, bool]]
    #: Its own arrays; none where it sits out.
    arrays: Mapping[int, Array]
    #: Whether it was out until now, and whether the round is complete by it.
    new: bool = True
    last: bool = False


class Tables:
    """The table of the open round of one run in one shard.

    Parameters
    ----------
    run : int
        The run.
    segment : Segment
        The memory of the shard.
    mailbox : Mailbox
        The memory of the contributions.
    reduce : "mean", "sum" or callable
        How contributions become one gradient.
    """

    def __init__(
        self, run: int, segment: Segment, mailbox: Mailbox, reduce: str | Reducer
    ) -> None:
        self.run, self.size, self.reduce = run, mailbox.n_ranks, reduce
        self._mailbox = mailbox
        self._words = integers(segment.words)
        self._heads = [integers(record.fixed) for record in segment.records]
        rows = (record.ranks[: self.size] for record in segment.records)
        self._rows = [integers(of_ranks) for of_ranks in rows]

    @property
    def current(self) -> bool:
        """Whether the run is the one in progress."""
        return self._heads[self._words[FLIP] & 1][RUN] == self.run

    def clock(self, rank: int) -> int:
        """Return where the last complete round left a rank."""
        return self._rows[self._words[FLIP] & 1][rank * RANK_WORDS + CLOCK]

    def table(self) -> Table:
        """Return the table of the open round, after emptying it where that is due."""
        mailbox, side = self._mailbox, self._words[FLIP] & 1
        now, (table, other) = self._heads[side][ROUNDS], mailbox.both
        if table.words[ROUND] != now:
            table = other
            rows = self._rows[side].tolist()
            table.empty(now, rows[LIVE::RANK_WORDS], rows[NEXT::RANK_WORDS])
            mailbox.turn()
        return table

    def climb(self, rank: int) -> tuple[tuple[int, int], list[tuple[int, bool]]]:
        """Return the node that `rank` completes, and the slices that make it up."""
        table, node, slices = self._mailbox.table, (rank, rank + 1), []
        if not callable(self.reduce):
            first = table.first.tolist()
            for lo, hi, border, left in path(rank, self.size):
                a, b = (lo, border) if left else (border, hi)
                if 0 in table.ranks[a:b].tolist():
                    break
                if a in first:
                    slices.append((first.index(a), left))
                node = lo, hi
        return node, slices

    def arrival(
        self,
        rank: int,
        *,
        sequence: int,
        kind: str | None,
        weight: float,
        arrays: Mapping[int, Array],
    ) -> Arrival:
        """Return what the open round gets by the tick of a rank that was not in."""
        node, slices = self.climb(rank)
        last = self._mailbox.table.words[N_IN] + 1 == self.size
        given = arrays if weight else {}
        return Arrival(
            rank, TICKED, sequence + 1, kind, weight, node, slices, given, last=last
        )

    def standing(self) -> Arrival | None:
        """Return nobody's arrival at a round that is complete and was not applied."""
        table = self.table()
        if table.words[N_IN] < self.size or not table.words[N_TICKED]:
            return None
        root = []
        if not callable(self.reduce):
            held = enumerate(table.first.tolist())
            root = [(index, True) for index, first in held if first != FREE]
        nobody = (-1, 0, 0, None, 0.0)
        return Arrival(*nobody, (0, self.size), root, {}, new=False, last=True)

    # -- what an arrival changes ---------------------------------------------

    def store(self, arrival: Arrival) -> None:
        """Note that a rank is in, and keep the sum of the node it completes."""
        mailbox = self._mailbox
        table, other = mailbox.both
        into = arrival.slices[0][0] if arrival.slices else FREE
        if arrival.arrays or len(arrival.slices) > 1:
            into = table.first.tolist().index(FREE)
            mailbox.slice(into).fill(self._sums(arrival))
        other.words[:] = table.words
        for index, _ in arrival.slices:
            other.first[index] = FREE
        if into != FREE:
            other.first[into], other.last[into] = arrival.node
        if table.has_pushed(arrival.rank):
            other.note_pushed(arrival.rank, False)
        other.ranks[arrival.rank] |= arrival.bits
        other.next[arrival.rank] = arrival.next
        if arrival.kind is not None:
            other.words[KIND] = KINDS.index(arrival.kind)
        other.words[N_IN] += arrival.new
        other.words[N_TICKED] += arrival.bits == TICKED
        other.weight[0] += arrival.weight
        mailbox.turn()

    def _sums(self, arrival: Arrival) -> dict[int, Sum]:
        scale = arrival.weight if self.reduce == "mean" else 1.0
        slices = [(self._mailbox.slice(i), left) for i, left in arrival.slices]
        return gather(arrival.arrays, arrival.weight, scale, slices)

    def reduced(self, arrival: Arrival) -> dict[int, Sum | Array]:
        """Return the reduced arrays of the round it completes, by position."""
        if callable(self.reduce):
            return dict(reduce_all(self._nodes(arrival), self.size, self.reduce))
        found: dict[int, Sum | Array] = {}
        for position, total in self._sums(arrival).items():
            if self.reduce == "mean":
                total.divisor = total.weight
            total.check()
            ready = total.ready
            found[position] = total if ready is None else ready
        return found

    def _nodes(self, arrival: Arrival) -> dict[int, Node]:
        """Return every contribution, where each is kept."""
        nodes: dict[int, Node] = {}
        for index, rank in enumerate(self._mailbox.table.first.tolist()):
            if rank != FREE:
                nodes[rank] = self._mailbox.slice(index).node()
        if arrival.arrays:
            weights = dict.fromkeys(arrival.arrays, arrival.weight)
            nodes[arrival.rank] = dict(arrival.arrays), weights
        return nodes

    def kind_of(self, arrival: Arrival) -> str:
        """Return whether the round averages models or reduces gradients."""
        return arrival.kind or KINDS[self._mailbox.table.words[KIND]] or GRADIENT

    def note(self, flip: int, arrival: Arrival) -> int:
        """Note the complete round in the record of a flip; return how many pushed."""
        table, rank = self._mailbox.table, arrival.rank
        ranks, following = table.ranks.tolist(), table.next.tolist()
        if rank >= 0:
            ranks[rank] |= arrival.bits
            following[rank] = arrival.next
        weight = table.weight[0] + arrival.weight
        head, rows = self._heads[flip & 1], self._rows[flip & 1].tolist()
        head[ROUNDS] += 1
        head[VERSION] += weight > 0
        clocks = zip(rows[CLOCK::RANK_WORDS], ranks, strict=True)
        rows[CLOCK::RANK_WORDS] = [clock + (state & TICKED) for clock, state in clocks]
        rows[LIVE::RANK_WORDS] = [state < FINISHED for state in ranks]
        rows[NEXT::RANK_WORDS] = rows[FIRST::RANK_WORDS] = following
        self._rows[flip & 1][:] = packed(rows)
        ticked = table.words[N_TICKED] + (arrival.bits == TICKED)
        return ticked if weight > 0 else 0

    # -- checks --------------------------------------------------------------

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """Ranks [first, last) of the sums and contributions held."""
        table = self.table()
        pairs = zip(table.first.tolist(), table.last.tolist(), strict=True)
        return sorted(pair for pair in pairs if pair[0] != FREE)

    @property
    def bound(self) -> int:
        """Largest number of them a round may come to."""
        return self.size if callable(self.reduce) else -(-self.size // 2)

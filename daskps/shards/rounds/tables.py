"""The table of the open round: who is in, and where the sums of their arrays are."""
# ruff: noqa: PLR0917  (what the compiled functions take)

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from daskps.reduction import Node, Reducer, path, reduce_all
from daskps.shards.memory.format import CLOCK, FLIP, RANK_WORDS, ROUNDS, RUN, integers
from daskps.shards.rounds import words
from daskps.shards.rounds.mailbox import gather
from daskps.shards.rounds.words import (
    FREE,
    HI,
    INTO,
    KIND,
    LAST,
    LO,
    N_IN,
    N_TICKED,
    ROUND,
    SLICES,
    TICKED,
)
from daskps.shards.steps import GRADIENT, MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.mailbox import Mailbox, Table
    from daskps.shards.rounds.sums import LazySum
    from daskps.shards.rounds.words import Compiled
    from daskps.typing import Array

#: Kinds of a round, by their word in a table.
KINDS: Final = (None, GRADIENT, MODEL)


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
    cache_dir : str, optional
        Where compiled functions are kept.
    """

    def __init__(
        self,
        run: int,
        segment: Segment,
        mailbox: Mailbox,
        reduce: str | Reducer,
        cache_dir: str | None = None,
    ) -> None:
        self.run, self.size, self.reduce = run, mailbox.n_ranks, reduce
        self.mailbox = mailbox
        self._cache_dir = cache_dir
        self._words = integers(segment.words)
        self._heads = [integers(record.fixed) for record in segment.records]
        self._records = [record.words for record in segment.records]
        #: Where the rows of the ranks begin in a record.
        self._ranks_at = len(segment.records[0].fixed)
        self._paths: dict[int, Array] = {}
        #: What was found last, see `tablework`; the same as plain integers.
        self._found = np.zeros(SLICES + 2 * self.size.bit_length(), np.int64)
        self.found = integers(self._found)
        sizes = (piece.size for piece in segment.pieces)
        self._largest = max(sizes, default=0) * np.dtype(np.float64).itemsize

    @cached_property
    def work(self) -> Compiled:
        """The functions of :mod:`tablework`; who only reads needs no compiler."""
        return words.compiled(self._cache_dir)

    @cached_property
    def scratch(self) -> Array:
        """Room to form any one piece in, for all trainers of this process in turn."""
        return np.empty(self._largest, np.uint8)

    @property
    def current(self) -> bool:
        """Whether the run is the one in progress."""
        return self._heads[self._words[FLIP] & 1][RUN] == self.run

    def clock(self, rank: int) -> int:
        """Return where the last complete round left a rank."""
        record = self._records[self._words[FLIP] & 1]
        return int(record[self._ranks_at + rank * RANK_WORDS + CLOCK])

    def table(self) -> Table:
        """Return the table of the open round, after emptying it where that is due."""
        mailbox, side = self.mailbox, self._words[FLIP] & 1
        now, (table, other) = self._heads[side][ROUNDS], mailbox.both
        if table.words[ROUND] != now:
            table = other
            record, at = self._records[side], self._ranks_at
            self.work.empty(table.array, record, at, self.size, mailbox.n_slices)
            mailbox.turn()
        return table

    def _path(self, rank: int) -> Array:
        """Return the nodes above a rank whose sums are formed."""
        known = self._paths.get(rank)
        if known is None:
            above = () if callable(self.reduce) else path(rank, self.size)
            known = self._paths[rank] = np.array(above, np.int64).reshape(-1)
        return known

    def look(self, rank: int, clock: int, sequence: int, kind: str | None) -> int:
        """Return how many slices meet a step that joins as it is; -1 for any other.

        What else there is to say of it is in :attr:`found`.
        """
        n: int = self.work.look(
            self.table().array,
            self.size,
            self.mailbox.n_slices,
            rank,
            clock,
            sequence,
            KINDS.index(kind),
            self._path(rank),
            self._found,
        )
        return n

    def climb(self, rank: int) -> tuple[tuple[int, int], list[tuple[int, bool]]]:
        """Return the node that `rank` completes, and the slices that make it up."""
        table, n_slices = self.mailbox.table, self.mailbox.n_slices
        n = self.work.climb(
            table.array, self.size, n_slices, rank, self._path(rank), self._found
        )
        found = self.found
        slices = [
            (found[SLICES + 2 * i], bool(found[SLICES + 2 * i + 1])) for i in range(n)
        ]
        return (found[LO], found[HI]), slices

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
        last, given = bool(self.found[LAST]), arrays if weight else {}
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
        mailbox, found = self.mailbox, self.found
        table = mailbox.table
        into = arrival.slices[0][0] if arrival.slices else FREE
        if arrival.arrays or len(arrival.slices) > 1:
            into = table.first.tolist().index(FREE)
            mailbox.slice(into).fill(self._sums(arrival))
        found[LO], found[HI] = arrival.node
        found[INTO] = into
        for i, (index, _) in enumerate(arrival.slices):
            found[SLICES + 2 * i] = index
        self.join(
            len(arrival.slices),
            arrival.rank,
            arrival.bits,
            arrival.next,
            KINDS.index(arrival.kind),
            arrival.weight,
            new=arrival.new,
        )

    def join(
        self,
        n: int,
        rank: int,
        bits: int,
        after: int,
        kind: int,
        weight: float,
        *,
        new: bool = True,
    ) -> None:
        """Put the table in force that has a rank in it; see :func:`words.join`."""
        mailbox = self.mailbox
        table, other = mailbox.both
        self.work.join(
            table.array,
            other.array,
            self.size,
            mailbox.n_slices,
            self._found,
            n,
            rank,
            bits,
            after,
            kind,
            new,
            weight,
        )
        mailbox.turn()

    def _sums(self, arrival: Arrival) -> dict[int, LazySum]:
        scale = arrival.weight if self.reduce == "mean" else 1.0
        slices = [(self.mailbox.slice(i), left) for i, left in arrival.slices]
        return gather(arrival.arrays, arrival.weight, scale, slices)

    def reduced(self, arrival: Arrival) -> dict[int, LazySum | Array]:
        """Return the reduced arrays of the round it completes, by position."""
        if callable(self.reduce):
            return dict(reduce_all(self._nodes(arrival), self.size, self.reduce))
        found: dict[int, LazySum | Array] = {}
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
        for index, rank in enumerate(self.mailbox.table.first.tolist()):
            if rank != FREE:
                nodes[rank] = self.mailbox.slice(index).node()
        if arrival.arrays:
            weights = dict.fromkeys(arrival.arrays, arrival.weight)
            nodes[arrival.rank] = dict(arrival.arrays), weights
        return nodes

    def kind_of(self, arrival: Arrival) -> str:
        """Return whether the round averages models or reduces gradients."""
        return arrival.kind or KINDS[self.mailbox.table.words[KIND]] or GRADIENT

    def note(self, flip: int, rank: int, bits: int, after: int, weight: float) -> int:
        """Note the complete round in the record of a flip; return how many pushed."""
        n: int = self.work.note(
            self._records[flip & 1],
            self._ranks_at,
            self.mailbox.table.array,
            self.size,
            rank,
            bits,
            after,
            weight,
        )
        return n

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

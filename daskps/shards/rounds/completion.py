"""The results of complete rounds of any arrays and rows, and how they take effect.

Those of small shards, whose sums are formed at once, need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.reduction import reduce_all
from daskps.shards.arrays.counting import count
from daskps.shards.memory.growth import make_room
from daskps.shards.memory.publication import Publication
from daskps.shards.memory.undo import settle
from daskps.shards.rounds import sums, words
from daskps.shards.rounds.sums import KINDS, is_mean
from daskps.shards.steps import GRADIENT, MODEL, NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.reduction import Reducer
    from daskps.shards.arrays.planning import UpdatePlanner
    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.mailbox import Mailbox, MailboxTable
    from daskps.shards.rounds.row_sums import Arenas
    from daskps.shards.rounds.sums import Delivery, LazySum
    from daskps.typing import Array


class Completion:
    """Publishes complete rounds of any arrays and rows.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    planner : UpdatePlanner
        Makes operations of arrays.
    mailbox : Mailbox
        The memory of the contributions.
    reduce : "mean", "sum" or callable
        How contributions become one gradient.
    arenas : Arenas
        The rows that ranks have brought.
    found : memoryview
        The last findings about the slices that meet what came.
    check : bool
        Whether sums that are not finite are refused.
    """

    def __init__(
        self,
        segment: Segment,
        planner: UpdatePlanner,
        mailbox: Mailbox,
        *,
        reduce: str | Reducer,
        arenas: Arenas,
        found: memoryview[int],
        check: bool,
    ) -> None:
        self._segment, self._planner, self._check = segment, planner, check
        self._mailbox, self._size = mailbox, mailbox.n_ranks
        self._reduction = reduce
        self._arenas, self._found = arenas, found
        #: Positions of tables come after those of arrays.
        self._n_pieces = len(segment.pieces)

    def publish(
        self, table: MailboxTable, came: Delivery, note: Callable[[Delivery, int], int]
    ) -> int:
        """Publish a complete round; return what `note` has, which notes it in a record."""
        kind = KINDS[came.code or table.words[words.KIND]]
        if kind == NOTHING:
            kind = GRADIENT
        if self._segment.has_any_ids:
            settle(self._segment)
        counts = self._segment.current.steps
        planned = self._planner.round(
            self._reduce(table, came, kind),
            kind,
            counts,
            self._merge(table, came, kind),
            check=self._check,
        )
        if self._segment.has_any_ids:
            make_room(self._segment, planned)
        # Not before: it overwrites the round before the one in force.
        publication = Publication(self._segment, of_sums=True)
        publication.add(planned)
        count(planned, publication.record.steps)
        n_pushes = note(came, publication.flip)
        publication.commit()
        return n_pushes

    def _reduce(
        self, table: MailboxTable, came: Delivery, kind: str
    ) -> dict[int, LazySum | Array]:
        """Return the reduced arrays of a complete round by position."""
        weighs = is_mean(kind, self._reduction)
        if not callable(self._reduction):
            return sums.divide(sums.gather(came, weighs, self._found), weighs)
        held = enumerate(table.first.tolist())
        nodes = {r: self._mailbox.slice(i).node() for i, r in held if r != words.FREE}
        if came.arrays:
            weight, arrays = came.tick.weight, dict(came.arrays)
            if weighs:
                arrays = {
                    p: array * array.dtype.type(weight) for p, array in arrays.items()
                }
            nodes[came.tick.rank] = arrays, dict.fromkeys(arrays, weight)
        if kind == GRADIENT:
            return dict(reduce_all(nodes, self._size, self._reduction))
        # Sums are not to be made in place of what others have in their slices.
        views = {
            rank: ({p: _read_only(array) for p, array in arrays.items()}, weights)
            for rank, (arrays, weights) in nodes.items()
        }
        how = "mean" if kind == MODEL else "sum"
        return dict(reduce_all(views, self._size, how))

    def _merge(
        self, table: MailboxTable, came: Delivery, kind: str
    ) -> dict[int, tuple[Array, Array]]:
        """Return ids and sums of the rows of a complete round by position."""
        tick = came.tick
        weight = tick.weight if is_mean(kind, self._reduction) else None
        merged = self._arenas.merge(table, tick.rank, came.spans, weight)
        return {self._n_pieces + ordinal: found for ordinal, found in merged.items()}


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view

"""What a follower of a shard is told: each change, complete, before it takes effect.

A *witness* is a function that a segment calls with every :class:`Change`, by whoever is
about to make it, in that thread and under the shard's lock. If it raises, the change is
not made; rows, which were written in place, are rolled back. Between two calls nothing
changes in the records, the weights, the rows and the slots.

From the changes follows what the segment becomes, without its rules' arithmetic of
steps and without knowing any push:

- Operations are elementwise and have their scalars ready. So a copy that has elements
  [0, n) of a piece stays right in these by each operation's :meth:`PieceUpdate.within`
  of them, and has nothing to catch up with once it has the rest.
- They read the buffers that the record in force names, or in a withdrawal the record
  before it, and write those that the new record names. A piece whose buffer differs in
  the two and that no operation names was copied, its slots as well as its weights; in a
  withdrawal nothing is.
- Arrays are good until the witness returns.

Words of the header that say who is at the shard (flip, writing, gate, generation,
nonce, lock, counters) are the follower's own affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.shards.arrays.operations import PieceUpdate
    from daskps.shards.arrays.rows import RowUpdate
    from daskps.shards.memory.format import Words

    Witness: TypeAlias = Callable[["Change"], object]


class Change(NamedTuple):
    """A publication, or words that are stored beside any."""

    #: The flip of the publication; of words the one in force.
    flip: int
    #: What is applied, each with the position of its piece, in order.
    operations: Sequence[tuple[int, PieceUpdate]] = ()
    #: The record that comes into force, None for words.
    record: Words | None = None
    #: Whether all slots get their first values, before the operations.
    resets: bool = False
    #: Whether the record before the one in force is the base.
    withdraws: bool = False
    #: Which rows of tables are changed, as `operations`; each row once in one of them. Of
    #: these the ids are numbers in the piece, and the witness finds them changed already.
    rows: Sequence[tuple[int, RowUpdate]] = ()
    #: Words of one area, the header or the record in force: where, and their values.
    area: str = ""
    words: Sequence[tuple[int, int]] = ()

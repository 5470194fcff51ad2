"""Rows that the ranks of a graph round bring: kept, added up by id, and combined.

The bits are those of the arena of a resident run (:mod:`daskps.shards.rounds.arena`):
repeats of one rank are summed first, in order of appearance; a mean multiplies by the
rank's weight; each row is added up along the tree over the ranks, which skips those
without it; and a sum is divided once, by the weight of the ranks that named its table.
The sum of a node of the tree depends on how many ranks it spans, and not on its first
rank: so workers add complete nodes up locally, and the owner adds their sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.config import cache_dir
from daskps.errors import ProtocolError
from daskps.kernels.row_merge import Brought, merge_rows
from daskps.kernels.row_moves import gather
from daskps.kernels.row_repeats import are_distinct, repeats
from daskps.shards.arrays.row_planning import each_once
from daskps.shards.rounds.arena import tree_sum
from daskps.shards.steps import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.tables import Table, TablePiece
    from daskps.reduction import Empty
    from daskps.shards.steps import Item
    from daskps.typing import Array


class NodeRows(NamedTuple):
    """Rows of one table piece from one node of the rank tree; each id at most once."""

    ids: Array
    #: Of shape (n, dim).
    rows: Array
    #: Weight of the ranks that named the table, with rows or without.
    weight: float


#: Rows by position of the table's piece in its shard.
RowNode = dict[int, NodeRows]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows of one table from one rank, ordered by shard."""

    ids: Array
    rows: Array
    #: First row of each shard, and the end of the last shard's rows.
    starts: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of rows and ids."""
        return self.ids.nbytes + self.rows.nbytes

    def of_shard(self, shard: int, weight: float) -> NodeRows:
        """Return views of the rows of a shard."""
        part = slice(self.starts[shard], self.starts[shard + 1])
        return NodeRows(self.ids[part], self.rows[part], weight)


def keep_rows(
    table: Table,
    item: Item,
    starts: Sequence[int],
    *,
    scale: float,
    empty: Empty = np.empty,
) -> KeptRows:
    """Return rows times `scale`, each id once, in memory of the result's own.

    Parameters
    ----------
    table : Table
        The table of the rows.
    item : Item
        Ids ordered by shard, perhaps repeated, and their rows, in the dtype of
        gradients of the table.
    starts : sequence of int
        First id of each shard, and the end of the last shard's ids.
    scale : float
        The factor.
    empty : callable, optional
        Makes the memory.
    """
    whole, kept_in = table.whole, cache_dir()
    ids, rows, at, _ = each_once(item, whole, GRADIENT, kept_in, empty=empty)
    n = len(ids)
    if n < starts[-1]:
        # These are sums. They are still ordered by shard, but there are fewer rows.
        found = table.split(ids, len(starts) - 1, cache_dir=kept_in)
        if found is None:
            raise TypeError(f"ids of table {table.name!r} that it does not have")
        ids, starts, own = found.ids, found.starts, rows
    else:
        own = empty(n * table.dim, rows.dtype).reshape(n, table.dim)
    if at is not None:
        gather(rows, at, own, cache_dir=kept_in)
        rows = own
    if scale != 1.0:
        np.multiply(rows, scale, out=own)
    elif rows is not own:
        np.copyto(own, rows)
    own.flags.writeable = False
    return KeptRows(ids.copy(), own, starts)


def fold_rows(
    nodes: Mapping[int, RowNode], lo: int, hi: int, empty: Empty = np.empty
) -> RowNode:
    """Return the sums over the ranks [lo, hi), a node of the tree.

    `nodes` are parts of it by their first rank: single ranks, or sums. Other ranks in
    the span are left out.
    """
    found = {}
    for position, of in _by_position(nodes).items():
        weight = _weight(of, lo, hi)
        relative = {rank - lo: node for rank, node in of.items()}
        ids, rows = _merged(relative, hi - lo, 1.0, empty)
        found[position] = NodeRows(ids, rows, weight)
    return found


def reduce_rows(
    nodes: Mapping[int, RowNode], size: int, *, is_mean: bool, empty: Empty = np.empty
) -> RowNode:
    """Return a round's reduced rows, from nodes of the tree by their first rank."""
    found = {}
    for position, of in _by_position(nodes).items():
        weight = _weight(of, 0, size)
        ids, rows = _merged(of, size, weight if is_mean else 1.0, empty)
        found[position] = NodeRows(ids, rows, weight)
    return found


def check_ids(piece: TablePiece, ids: Array) -> None:
    """Check the ids of a node from another host: they become memory offsets.

    Raises
    ------
    ProtocolError
        If an id is not of the piece, or is repeated.
    """
    if piece.table.is_bounded:
        try:
            are_fine = are_distinct(
                ids, piece.first_row, piece.n_rows, cache_dir=cache_dir()
            )
        except ValueError:
            are_fine = False
    else:
        are_fine = piece.holds(ids, cache_dir=cache_dir())
        are_fine &= len(repeats(ids, cache_dir=cache_dir()).ids) == len(ids)
    if not are_fine:
        raise ProtocolError(
            f"sums of {len(ids):,} rows came to shard {piece.shard}, some of them twice, "
            f"or none of {piece}"
        )


def _by_position(nodes: Mapping[int, RowNode]) -> dict[int, dict[int, NodeRows]]:
    found: dict[int, dict[int, NodeRows]] = {}
    for rank in sorted(nodes):
        for position, node in nodes[rank].items():
            found.setdefault(position, {})[rank] = node
    return found


def _weight(nodes: Mapping[int, NodeRows], lo: int, hi: int) -> float:
    return tree_sum({rank: node.weight for rank, node in nodes.items()}, lo, hi)


def _merged(
    nodes: Mapping[int, NodeRows], size: int, divisor: float, empty: Empty
) -> tuple[Array, Array]:
    """Add up rows of nodes, by their first rank in order, and divide the sums."""
    first, *others = nodes.values()
    if not others and divisor == 1.0:
        return first.ids, first.rows
    ids, rows = first.ids, first.rows
    dtype, dim = rows.dtype, rows.shape[1]

    def make(n: int) -> Array:
        return empty(n * dim, dtype).reshape(n, dim)

    brought, start = [], 0
    for rank, node in nodes.items():
        brought.append(Brought(start, len(node.ids), rank))
        start += len(node.ids)
    if others:
        ids = np.concatenate([node.ids for node in nodes.values()])
        rows = np.concatenate([n.rows for n in nodes.values()], out=make(start))
    return merge_rows(
        brought, ids, rows, size, divisor, out=make, cache_dir=cache_dir()
    )

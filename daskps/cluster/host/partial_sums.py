"""Sums of graph rounds at nodes of the rank tree, by piece: kept, asked for, reduced.

The bits of rows are those of the arena of a resident run
(:mod:`daskps.shards.rounds.arena`): repeats of one rank are summed first, in order of
appearance; a mean multiplies by the rank's weight; each row is added up along the tree
over the ranks, which skips those without it; and a sum is divided once, by the weight
of the ranks that named its table. The sum of a node of the tree depends on how many
ranks it spans, and not on its first rank: so workers add complete nodes up locally, and
the owner adds their sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps import codecs
from daskps.cluster.protocol.encoding import decoded
from daskps.cluster.protocol.wellformed import fits
from daskps.config import cache_dir
from daskps.errors import ProtocolError
from daskps.kernels.row_merge import Brought, merge_rows
from daskps.kernels.row_moves import gather
from daskps.kernels.row_repeats import are_distinct, repeats
from daskps.layout.arrays import compute_dtype
from daskps.reduction import Reduction
from daskps.shards.arrays.row_planning import each_once
from daskps.shards.rounds.arena import tree_sum
from daskps.shards.steps import GRADIENT
from daskps.typing import Array

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Piece
    from daskps.layout.tables import Table, TablePiece
    from daskps.reduction import Empty, Reducer
    from daskps.shards.steps import Item

#: Stands for the number of rows of an array.
_NO_ROWS = -1
#: By shard and node of the rank tree the sums of pieces: position and weight, the
#: number of rows, the codec of words, "" for numbers, and their factor. The arrays
#: follow in this order, those of rows behind their ids.
PackedSums = list[list[list[tuple[int, float, int, str, float]]]]


class PartialSum(NamedTuple):
    """Sum of one piece at a node of the rank tree, or words of the single rank there."""

    #: Flat numbers or words; rows of a table are of shape (n, dim).
    data: Array
    #: Weight of the ranks that brought the piece; of a table also those without rows.
    weight: float
    #: Ids of rows, each at most once.
    ids: Array | None = None
    #: The codec of words, and the factor for their numbers.
    codec: Codec | None = None
    scale: float = 1.0

    def numbers(self, piece: Piece, empty: Empty) -> Array:
        """Return the numbers; words are widened into a new array."""
        if self.codec is None:
            return self.data
        found = decoded(self.codec, self.data, piece, empty)
        if self.scale != 1.0:
            found *= self.scale
        return found


#: The sums of one node and shard, by position of the piece.
NodeSums = dict[int, PartialSum]
#: Ids, rows and weight of one node.
_Rows = tuple[Array, Array, float]


def reduced(
    nodes: Mapping[tuple[int, int], NodeSums],
    pieces: Sequence[Piece],
    size: int,
    *,
    reduce: str | Reducer = "sum",
    empty: Empty = np.empty,
) -> NodeSums:
    """Return the sums that nodes of the tree over `size` ranks come to, in one shard.

    Parameters
    ----------
    nodes : mapping of (int, int) to NodeSums
        Single ranks, or sums; other ranks are left out.
    pieces : sequence of Piece
        The pieces of arrays in the shard.
    size : int
        Number of ranks of the tree, or of the part of it that is summed.
    reduce : "mean", "sum" or callable
        The reduction.
    empty : callable, optional
        Makes the memory.
    """
    sums = Reduction(size, reduce, empty)
    of_rows: dict[int, dict[int, _Rows]] = {}
    for (lo, hi), of in sorted(nodes.items()):
        arrays, weights = {}, {}
        for position, one in of.items():
            if one.ids is None:
                arrays[position] = one.numbers(pieces[position], empty)
                weights[position] = one.weight
            else:
                rows = one.ids, one.data, one.weight
                of_rows.setdefault(position, {})[lo] = rows
        sums.add((arrays, weights), lo, hi)
    found = {p: PartialSum(data, weight) for p, data, weight in sums.take_weighed()}
    for position, brought in of_rows.items():
        weight = tree_sum({rank: w for rank, (_, _, w) in brought.items()}, 0, size)
        divisor = weight if reduce == "mean" else 1.0
        ids, data = _merged(brought, size, divisor, empty)
        found[position] = PartialSum(data, weight, ids)
    return found


def _merged(
    nodes: Mapping[int, _Rows], size: int, divisor: float, empty: Empty
) -> tuple[Array, Array]:
    """Add up rows of nodes, by their first rank in order, and divide the sums."""
    ids, rows, _ = next(iter(nodes.values()))
    if len(nodes) == 1 and divisor == 1.0:
        return ids, rows
    dtype, dim = rows.dtype, rows.shape[1]

    def make(n: int) -> Array:
        return empty(n * dim, dtype).reshape(n, dim)

    brought, start = [], 0
    for rank, (of, _, _) in nodes.items():
        brought.append(Brought(start, len(of), rank))
        start += len(of)
    if len(nodes) > 1:
        ids = np.concatenate([of for of, _, _ in nodes.values()])
        rows = np.concatenate([data for _, data, _ in nodes.values()], out=make(start))
    return merge_rows(
        brought, ids, rows, size, divisor, out=make, cache_dir=cache_dir()
    )


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

    def of_shard(self, shard: int, weight: float) -> PartialSum:
        """Return views of the rows of a shard."""
        part = slice(self.starts[shard], self.starts[shard + 1])
        return PartialSum(self.rows[part], weight, self.ids[part])


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


def described(sums: Sequence[Sequence[NodeSums]]) -> tuple[PackedSums, list[Array]]:
    """Return sums by shard and node as a description, and the arrays in its order."""
    said, arrays = PackedSums(), list[Array]()
    for row in sums:
        said.append([])
        for node in row:
            said[-1].append([])
            for position, (data, weight, ids, codec, scale) in node.items():
                n = _NO_ROWS if ids is None else len(ids)
                name = codec.name if codec else ""
                said[-1][-1].append((position, weight, n, name, scale))
                arrays += [data] if ids is None else [ids, data.reshape(-1)]
    return said, arrays


@dataclass(frozen=True, slots=True)
class SumsRequest:
    """Sums of contributions, by shard and node, that one worker is asked for."""

    layout: Layout
    worker: str
    shards: Sequence[int]
    nodes: Sequence[tuple[int, int]]
    #: Ranks whose contributions it has.
    ranks: Sequence[int]
    #: Bytes of all rows, and of their ids, that its receipts tell of.
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        """About how many bytes the answer has."""
        dense = sum(map(self.layout.dense_nbytes, self.shards))
        return dense * len(self.nodes) + self.row_nbytes

    def sizes(self, said: Any) -> list[tuple[str, int]]:
        """Return dtype and length of each array of an answer.

        Raises
        ------
        ProtocolError
            For what is none, before memory is taken for it.
        """
        is_whole = fits(said, PackedSums) and len(said) == len(self.shards)
        if not is_whole or any(len(row) != len(self.nodes) for row in said):
            raise ProtocolError(
                f"worker {self.worker} has other sums than were asked for"
            )
        found: list[tuple[str, int]] = []
        nbytes = 0
        for shard, node in self._nodes(said):
            # Each piece once: what is named twice would take memory twice.
            if len({position for position, *_ in node}) < len(node):
                raise ProtocolError(f"sums of a piece of shard {shard} twice")
            for position, _, n, codec, _ in node:
                sizes = self._sizes(shard, position, n, codec)
                found += sizes
                if n != _NO_ROWS:
                    nbytes += sum(k * np.dtype(dtype).itemsize for dtype, k in sizes)
        if nbytes > self.row_nbytes:
            raise ProtocolError(
                f"worker {self.worker} has {nbytes:,} bytes of sums of rows, from "
                f"contributions of {self.row_nbytes:,}"
            )
        return found

    def _nodes(self, said: PackedSums) -> Iterator[tuple[int, Any]]:
        for shard, row in zip(self.shards, said, strict=True):
            for node in row:
                yield shard, node

    def _sizes(
        self, shard: int, position: int, n: int, codec: str
    ) -> list[tuple[str, int]]:
        """Return dtype and length of the arrays of one sum."""
        pieces, tables = self.layout.pieces[shard], self.layout.table_pieces[shard]
        if n == _NO_ROWS and 0 <= position < len(pieces):
            piece = pieces[position]
            numbers = compute_dtype(piece.parameter.dtype)
            return [(codecs.named(codec).dtype if codec else numbers, piece.size)]
        if n >= 0 and 0 <= position - len(pieces) < len(tables) and not codec:
            table = tables[position - len(pieces)].table
            return [("int64", n), (compute_dtype(table.dtype), n * table.dim)]
        raise ProtocolError(f"sums of pieces that shard {shard} has not")

    def sums(self, said: PackedSums, arrays: Sequence[Array]) -> list[list[NodeSums]]:
        """Put together the arrays that have come, by shard and node.

        Raises
        ------
        ProtocolError
            For rows that are none of their piece, or come twice.
        """
        coming = iter(arrays)
        found = [self._node(shard, node, coming) for shard, node in self._nodes(said)]
        n = len(self.nodes)
        return [found[i : i + n] for i in range(0, len(found), n)]

    def _node(self, shard: int, node: Any, coming: Iterator[Array]) -> NodeSums:
        tables, n_pieces = (
            self.layout.table_pieces[shard],
            len(self.layout.pieces[shard]),
        )
        found: NodeSums = {}
        for position, weight, n, name, scale in node:
            codec, ids, data = codecs.named(name) if name else None, None, next(coming)
            if n != _NO_ROWS:
                piece, ids = tables[position - n_pieces], data
                check_ids(piece, ids)
                data = next(coming).reshape(n, piece.table.dim)
            found[position] = PartialSum(data, weight, ids, codec, scale)
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

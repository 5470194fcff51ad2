"""The request to one worker for a reduction, and the answers that it may give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps import codecs
from daskps.cluster.host.contributed_rows import NodeRows, check_ids
from daskps.cluster.host.contributions import PartialSum
from daskps.cluster.host.reductions import Said
from daskps.cluster.wire.wellformed import fits
from daskps.errors import ProtocolError
from daskps.layout.arrays import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.layout.arrays import Layout
    from daskps.layout.tables import TablePiece
    from daskps.typing import Array


@dataclass(frozen=True, slots=True)
class SumsAsked:
    """Sums of contributions, by shard and node, that one worker is asked for."""

    layout: Layout
    worker: str
    shards: Sequence[int]
    nodes: Sequence[tuple[int, int]]
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
        n = len(self.nodes)
        is_whole = fits(said, Said) and len(said) == len(self.shards)
        if not is_whole or any(len(row) != n for row in said):
            raise ProtocolError(
                f"worker {self.worker} has other sums than were asked for"
            )
        for shard, row in zip(self.shards, said, strict=True):
            for _, _, arrays, rows in row:
                self._check(shard, arrays, rows)
        nbytes = sum(
            (8 + piece.table.dim * _dtype(piece).itemsize) * n
            for piece, n in self._rows(said)
        )
        if nbytes > self.row_nbytes:
            raise ProtocolError(
                f"worker {self.worker} has {nbytes:,} bytes of sums of rows, from "
                f"contributions of {self.row_nbytes:,}"
            )
        return [*self._sizes(said)]

    def _check(self, shard: int, arrays: Any, rows: Any) -> None:
        n = len(self.layout.pieces[shard])
        n_all = n + len(self.layout.table_pieces[shard])
        positions = [position for position, *_ in (*arrays, *rows)]
        # Each piece once: what is named twice would take memory twice.
        if len(set(positions)) < len(positions):
            raise ProtocolError(f"sums of a piece of shard {shard} twice")
        if not (
            all(0 <= position < n for position, _ in arrays)
            and all(n <= position < n_all and k >= 0 for position, _, k in rows)
        ):
            raise ProtocolError(f"sums of pieces that shard {shard} has not")

    def _sizes(self, said: Said) -> Iterator[tuple[str, int]]:
        for shard, row in zip(self.shards, said, strict=True):
            for name, _, arrays, rows in row:
                for position, _ in arrays:
                    piece = self.layout.pieces[shard][position]
                    numbers = compute_dtype(piece.parameter.dtype)
                    yield codecs.named(name).dtype if name else numbers, piece.size
                for position, _, n in rows:
                    of = self._piece(shard, position)
                    yield "int64", n
                    yield str(_dtype(of)), n * of.table.dim

    def _rows(self, said: Said) -> Iterator[tuple[TablePiece, int]]:
        """Give piece and number of all rows."""
        for shard, row in zip(self.shards, said, strict=True):
            for *_, rows in row:
                for position, _, n in rows:
                    yield self._piece(shard, position), n

    def parcels(self, said: Said, arrays: Sequence[Array]) -> list[list[PartialSum]]:
        """Put together what has come, by shard and node.

        Raises
        ------
        ProtocolError
            For rows that are none of their piece, or come twice.
        """
        coming = iter(arrays)
        return [
            [self._parcel(shard, of, coming) for of in row]
            for shard, row in zip(self.shards, said, strict=True)
        ]

    def _parcel(self, shard: int, of: Any, coming: Iterator[Array]) -> PartialSum:
        name, scale, about, about_rows = of
        node = {position: next(coming) for position, _ in about}, dict(about)
        rows = {}
        for position, weight, _ in about_rows:
            piece, ids = self._piece(shard, position), next(coming)
            check_ids(piece, ids)
            data = next(coming).reshape(len(ids), piece.table.dim)
            rows[position] = NodeRows(ids, data, weight)
        return PartialSum(node, codecs.named(name) if name else None, scale, rows)

    def _piece(self, shard: int, position: int) -> TablePiece:
        pieces = self.layout.table_pieces[shard]
        return pieces[position - len(self.layout.pieces[shard])]


def _dtype(piece: TablePiece) -> np.dtype[Any]:
    """Return the dtype that sums of a piece's rows have."""
    return np.dtype(compute_dtype(piece.table.dtype))

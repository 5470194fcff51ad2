"""Tables: named sets of rows by number, and which shard has which of them.

The rows of a table that has a number of them are cut into contiguous ranges like
``np.array_split``; no row is ever split. Those of an unbounded table are cut by a hash
of the id, see :mod:`daskps.layout.buckets`. A table may be placed on some of the
shards: then it is cut over these. Every shard has a piece of every table, of no rows
where it is placed elsewhere or has fewer rows than shards: a push of a table goes to
all of them, and so each counts the table's steps.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from daskps.init import constant, normal, uniform
from daskps.kernels import id_hash, row_split
from daskps.layout.bounds import bounds, spread
from daskps.layout.buckets import bucket_edges, bucket_rows, n_buckets
from daskps.layout.ids import check_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.row_split import Split
    from daskps.typing import Array

#: The first value of a row: a function of the seed, the table's name and the id, and of
#: nothing that only some processes have.
FirstRows: TypeAlias = constant | normal | uniform
#: Bytes of addresses, about, that the piece of an unbounded table is given in a shard.
#: Memory comes later, as rows do.
ROOM_NBYTES = 1 << 38
_KINDS: dict[str, type[FirstRows]] = {
    kind.__name__: kind for kind in (constant, normal, uniform)
}


@dataclass(frozen=True, slots=True)
class UnboundedIds:
    """The definition of an unbounded table, in place of a number of rows."""

    init: FirstRows
    #: That of the store.
    seed: int
    #: How many rows a shard may ever have of it; 0 for what its addresses allow.
    room: int = 0
    #: How many rows all shards have at most; 0 for any number.
    max_rows: int = 0
    #: How many pushes of the table a row outlives that do not name it; 0 for any
    #: number.
    ttl: int = 0
    #: With which of its pushes an id gets a row.
    admit_after: int = 1

    def to_wire(self) -> tuple[str, list[float], str, list[int]]:
        """Return it as plain values; a seed may have any number of digits."""
        kind = type(self.init)
        numbers = [getattr(self.init, name) for name in kind.__dataclass_fields__]
        policy = [self.max_rows, self.ttl, self.admit_after]
        return kind.__name__, numbers, str(self.seed), policy

    @classmethod
    def from_wire(
        cls, kind: str, numbers: list[float], seed: str, policy: list[int]
    ) -> UnboundedIds:
        """Rebuild it from :meth:`to_wire`.

        Raises
        ------
        ValueError, TypeError, KeyError
            For what that never returns.
        """
        return cls(_KINDS[kind](*numbers), int(seed), 0, *policy)


@dataclass(frozen=True, slots=True)
class Table:
    """One table; its rows are numbered from 0."""

    #: Among parameters and tables together, which come after them.
    index: int
    name: str
    rows: int
    #: Length of a row.
    dim: int
    dtype: str
    #: The shards that it is cut over, ascending; None for all.
    shards: tuple[int, ...] | None = field(default=None, kw_only=True)

    #: Whether it has a number of rows, and these from the beginning.
    is_bounded: ClassVar[bool] = True

    @property
    def whole(self) -> TablePiece:
        """All of it as one piece."""
        return TablePiece(self, 0, 0, self.rows)

    @property
    def told(self) -> str:
        """Its rows, in words."""
        return f"{self.rows:,} rows of {self.dim} {self.dtype}"

    @property
    def row_nbytes(self) -> int:
        """Number of bytes of one row."""
        return self.dim * np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.rows * self.dim

    @property
    def nbytes(self) -> int:
        """Number of bytes of one copy of the rows."""
        return self.rows * self.row_nbytes

    def check(self, ids: Array, what: str, error: type[Exception]) -> None:
        """Refuse ids that can be none of it; see :func:`daskps.layout.ids.check_ids`."""
        check_ids(ids, self.rows, what, error)

    def check_removal(self, error: type[Exception]) -> None:
        """Refuse to remove rows of it: it has a number of them at any time."""
        raise error(
            f"table {self.name[:60]!r} has {self.rows} rows at any time, none of them can "
            f"be removed; nothing was changed, use assign to replace a row"
        )

    def split(
        self, ids: Array, n_shards: int, *, cache_dir: str | None = None
    ) -> Split | None:
        """Sort ids by the shard that has their row, and keep their order in each.

        None where one of them is none of the table.
        """
        over = self.shards
        edges = _row_edges(self.rows, n_shards if over is None else len(over))
        found = row_split.split(ids, edges, cache_dir=cache_dir)
        if found is None or over is None:
            return found
        return found._replace(starts=[*spread(found.starts, over, n_shards)])

    def cut(self, n_shards: int, shard: int) -> TablePiece:
        """Return the piece that a shard has."""
        start, stop = self.edges(n_shards)[shard : shard + 2]
        return TablePiece(self, shard, int(start), int(stop - start))

    def edges(self, n_shards: int) -> Array:
        """Return where the rows of each shard begin, and the last of them ends."""
        if self.shards is None:
            return _row_edges(self.rows, n_shards)
        return _spread(_row_edges, self.rows, self.shards, n_shards)


@dataclass(frozen=True, slots=True)
class UnboundedTable(Table):
    """An unbounded table. It begins without rows: `rows`, and bytes with it, is 0."""

    of: UnboundedIds

    is_bounded: ClassVar[bool] = False

    @property
    def whole(self) -> TablePiece:
        """All of it as one piece."""
        return UnboundedPiece(self, 0, 0, 0, 0, self.n_buckets)

    @property
    def told(self) -> str:
        """Its rows, in words."""
        return f"unbounded rows, {self.dim} {self.dtype} each"

    @property
    def hash_seed(self) -> int:
        """The seed of the hash of its ids, 64 bits without a sign."""
        return _hash_seed(self.of.seed, self.name)

    @property
    def n_buckets(self) -> int:
        """Into how many buckets its ids fall."""
        return n_buckets(self.of.max_rows or None)

    def edges(self, n_shards: int) -> Array:
        """Return where the buckets of each shard begin, and the last of them ends."""
        if self.shards is None:
            return _bucket_edges(self.n_buckets, n_shards)
        return _spread(_bucket_edges, self.n_buckets, self.shards, n_shards)

    def check(self, ids: Array, what: str, error: type[Exception]) -> None:
        """Refuse ids that can be none of it: there are none."""

    def check_removal(self, error: type[Exception]) -> None:
        """Refuse to remove rows of it: it may."""

    def split(
        self, ids: Array, n_shards: int, *, cache_dir: str | None = None
    ) -> Split | None:
        """Sort ids by the shard that their hash says; see :meth:`Table.split`."""
        over = self.shards
        edges = _bucket_edges(self.n_buckets, n_shards if over is None else len(over))
        found = id_hash.split(ids, self.hash_seed, edges, cache_dir=cache_dir)
        if over is None:
            return found
        return found._replace(starts=[*spread(found.starts, over, n_shards)])

    def cut(self, n_shards: int, shard: int) -> TablePiece:
        """Return the piece that a shard has."""
        first, stop = self.edges(n_shards)[shard : shard + 2].tolist()
        return UnboundedPiece(self, shard, 0, 0, first, stop)


@dataclass(frozen=True, slots=True)
class TablePiece:
    """The rows of one table that one shard owns."""

    table: Table
    shard: int
    first_row: int
    n_rows: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.n_rows * self.table.dim

    @property
    def nbytes(self) -> int:
        """Number of bytes of one copy of the rows."""
        return self.n_rows * self.table.row_nbytes

    @property
    def is_empty(self) -> bool:
        """Whether no row is ever in it."""
        return not self.n_rows

    def holds(self, ids: Array, *, cache_dir: str | None) -> bool:
        """Return whether all of these rows are in the piece."""
        if not ids.size:
            return True
        # Not their methods, each of which is a call of Python.
        low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
        return self.first_row <= low and high < self.first_row + self.n_rows

    def __str__(self) -> str:
        stop = self.first_row + self.n_rows
        return f"the rows {self.first_row:,} to {stop:,} of table {self._name}"

    @property
    def _name(self) -> str:
        return repr(self.table.name[:60])


@dataclass(frozen=True, slots=True)
class UnboundedPiece(TablePiece):
    """The rows of an unbounded table that one shard owns: those of some buckets."""

    first_bucket: int
    stop_bucket: int

    @property
    def is_empty(self) -> bool:
        """Whether no row is ever in it."""
        return self.first_bucket == self.stop_bucket

    @property
    def of(self) -> UnboundedIds:
        """The definition of its table, in place of a number of rows."""
        table = self.table
        if not isinstance(table, UnboundedTable):
            raise TypeError(f"table {self._name} has a number of rows")
        return table.of

    @property
    def room(self) -> int:
        """How many rows it may ever have: addresses are reserved for so many."""
        if most := self.of.max_rows:
            edges = self.stop_bucket, self.first_bucket
            stop, start = (bucket_rows(most, bucket) for bucket in edges)
            return stop - start
        return self._addresses

    @property
    def most_ids(self) -> int:
        """How many ids it may ever know of: some are counted and have no row."""
        counts = self.of.admit_after > 1
        return max(self.room, self._addresses) if counts else self.room

    @property
    def _addresses(self) -> int:
        return self.of.room or ROOM_NBYTES // (4 * self.table.row_nbytes + 256)

    def holds(self, ids: Array, *, cache_dir: str | None) -> bool:
        """Return whether all of these rows would be in the piece."""
        table = self.table
        if not ids.size or not isinstance(table, UnboundedTable):
            return not ids.size
        if self.first_bucket == 0 and self.stop_bucket == table.n_buckets:
            return True
        hashed = table.hash_seed, table.n_buckets
        found = id_hash.buckets(ids, *hashed, cache_dir=cache_dir)
        low, high = int(np.minimum.reduce(found)), int(np.maximum.reduce(found))
        return self.first_bucket <= low and high < self.stop_bucket

    def __str__(self) -> str:
        return (
            f"the buckets {self.first_bucket:,} to {self.stop_bucket:,} of table "
            f"{self._name}"
        )


@functools.lru_cache(maxsize=64)
def _row_edges(rows: int, n_shards: int) -> Array:
    """Return where the ranges of the shards begin, and the last of them ends."""
    starts = [bounds(rows, n_shards, i)[0] for i in range(n_shards)]
    return np.array([*starts, rows], np.int64)


@functools.lru_cache(maxsize=64)
def _bucket_edges(n_buckets: int, n_shards: int) -> Array:
    return bucket_edges(n_buckets, n_shards)


@functools.lru_cache(maxsize=64)
def _spread(
    edges: Callable[[int, int], Array], n: int, shards: tuple[int, ...], n_shards: int
) -> Array:
    """Return where the parts of all shards begin, of `n` cut over some of them."""
    return np.array(spread(edges(n, len(shards)).tolist(), shards, n_shards), np.int64)


@functools.lru_cache(maxsize=256)
def _hash_seed(seed: int, name: str) -> int:
    """Return a word that tells a table from others, apart from what draws its rows."""
    told = f"shards of {seed}/{name}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")


#: A table in a layout: number of rows, their length and dtype; of an unbounded one
#: (with 0 rows) also its definition.
TableShape: TypeAlias = tuple[int, int, str] | tuple[int, int, str, UnboundedIds]

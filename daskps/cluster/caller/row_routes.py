"""Routes of rows: the ids of one call, split by shard.

For arrays one route serves all calls. For a table only the shards stay the same, the
ids change with each call: this module splits them, and puts a call's answer in order
again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.cluster.caller.device_arrays import on_host, put
from daskps.cluster.protocol.row_messages import asked_of
from daskps.config import cache_dir
from daskps.errors import IllegalStateError, PushRejectedError
from daskps.shards.reader import RowsRead
from daskps.shards.steps import Item

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daskps.cluster.protocol.row_messages import RowRequest
    from daskps.codecs import Codec
    from daskps.layout.arrays import Layout
    from daskps.layout.tables import Table
    from daskps.reduction import Empty
    from daskps.typing import Array


class IdSplit(NamedTuple):
    """Ids of one table, grouped by shard."""

    table: Table
    ids: Array
    #: The place where each of them was, None where their order is the same.
    at: Array | None
    #: The places where the ids of each shard begin, and where the last shard's end.
    starts: Sequence[int]

    @classmethod
    def of(cls, table: Table, ids: Array, n_shards: int) -> IdSplit:
        """Cut ids, all of which are of the table."""
        found = cls.find(table, ids, n_shards)
        if found is None:  # changed since they were looked at, by another thread
            raise IllegalStateError(
                f"ids of table {table.name!r} that it does not have"
            )
        return found

    @classmethod
    def find(cls, table: Table, ids: Array, n_shards: int) -> IdSplit | None:
        """Cut ids; None where one of them is not of the table.

        Most loops push to the rows that they have pulled: these ids are cut once.
        """
        if n_shards == 1:
            return cls(table, ids, None, (0, len(ids)))
        is_kept = MIN_KEPT <= len(ids) <= MAX_KEPT
        if is_kept and _latest.fits(table, ids, n_shards):
            return _latest.split
        found = table.split(ids, n_shards, cache_dir=cache_dir())
        if found is None:
            return None
        split = cls(table, found.ids, found.pos, found.starts)
        if is_kept:
            # A copy: the caller may write other ids into its array.
            _latest.split, _latest.n_shards, _latest.ids = split, n_shards, ids.copy()
        return split

    def shards(self) -> Iterator[int]:
        """Return the shards that have any of them."""
        starts = self.starts
        return (i for i in range(len(starts) - 1) if starts[i] < starts[i + 1])

    def ids_of(self, shard: int) -> Array:
        """Return the ids of a shard."""
        return self.ids[self.starts[shard] : self.starts[shard + 1]]

    def at_of(self, shard: int) -> Array | None:
        """Return where the ids of a shard were, None for one after the other."""
        if self.at is None:
            return None
        return self.at[self.starts[shard] : self.starts[shard + 1]]


#: A comparison of fewer ids costs as much as the cut, and more ids take too much
#: memory.
MIN_KEPT, MAX_KEPT = 256, 65_536


class _Latest(threading.local):
    """The last cut of this thread."""

    split: IdSplit | None = None
    n_shards = 0
    #: In the order in which they came.
    ids = np.empty(0, np.int64)

    def fits(self, table: Table, ids: Array, n_shards: int) -> bool:
        """Return whether the last cut was of these ids."""
        split = self.split
        return (
            split is not None
            and split.table is table
            and self.n_shards == n_shards
            and np.array_equal(self.ids, ids)
        )


_latest = _Latest()


class RowBatch(NamedTuple):
    """Rows that a call brings, of one table."""

    split: IdSplit
    #: Flat, in the order in which the caller has them; empty for rows to be removed.
    data: Array
    #: By shard the words that a codec has made of its rows; the data are their numbers.
    words: Sequence[Array] | None = None

    def on_host(self) -> RowBatch:
        """Return the same with rows of a device brought to the host."""
        return self._replace(data=on_host({0: self.data})[0])

    def copied(self) -> RowBatch:
        """Return the same in arrays that no caller has."""
        split = self.split._replace(ids=self.split.ids.copy())
        return RowBatch(split, self.data.copy())

    @property
    def ids(self) -> Array:
        """Ids in the order in which the caller has them."""
        split = self.split
        if split.at is None:
            return split.ids
        ids = np.empty_like(split.ids)
        ids[split.at] = split.ids
        return ids

    def in_words(self, codec: Codec, *, finite: bool, empty: Empty) -> RowBatch:
        """Return the same in words, with the numbers that these stand for as data.

        Local shards take the data, so results do not depend on the carrier.

        Raises
        ------
        PushRejectedError
            If one of them is too large for the codec, or the codec breaks its promises.
            Nothing has been changed anywhere.
        """
        split, dim = self.split, self.split.table.dim
        rows, of_rows = self.data.reshape(-1, dim), codec.of_rows(dim)
        back, words = empty(len(self.data), self.data.dtype), []
        for shard in range(len(split.starts) - 1):
            start, stop = split.starts[shard], split.starts[shard + 1]
            if start == stop:
                words.append(np.empty(0, codec.dtype))
                continue
            at = split.at_of(shard)
            where = slice(start, stop) if at is None else at
            part = np.ascontiguousarray(rows[where]).reshape(-1)
            made = of_rows.encode_pieces(
                part, [(0, len(part))], empty=empty, cache_dir=cache_dir()
            )
            if finite and not made.finite:
                raise PushRejectedError(
                    f"the gradient of rows of table {split.table.name[:60]!r} has elements "
                    f"that are too large for codec={codec.name!r}; clip it, lower the "
                    f"learning rate, or leave codec at None"
                )
            out = empty(len(part), part.dtype)
            of_rows.decode_piece(made.words[0], out, cache_dir=cache_dir())
            back.reshape(-1, dim)[where] = out.reshape(-1, dim)
            words.append(made.words[0])
        return self._replace(data=back, words=words)

    def item(self, layout: Layout, shard: int, *, sent: bool) -> Item:
        """Return the rows for a shard; one after the other where they are `sent`."""
        split, dim = self.split, self.split.table.dim
        position = layout.table_position(shard, split.table.index)
        start, stop = split.starts[shard], split.starts[shard + 1]
        ids, data = split.ids[start:stop], self.data
        at = None if split.at is None else split.at[start:stop]
        if not len(data):  # rows to be removed, or none
            return Item(position, 0, data, ids)
        if sent and self.words is not None:
            return Item(position, 0, self.words[shard], ids)
        if at is None:
            return Item(position, 0, data[start * dim : stop * dim], ids)
        if sent:
            return Item(position, 0, data.reshape(-1, dim)[at].reshape(-1), ids)
        return Item(position, 0, data, ids, at)


def joined_rows(given: Sequence[RowBatch], n_shards: int) -> list[RowBatch]:
    """Return several deliveries of rows as one for each table, in their order."""
    by_table: dict[Table, list[RowBatch]] = {}
    for one in given:
        by_table.setdefault(one.split.table, []).append(one)
    found = []
    for table, of in by_table.items():
        if len(of) > 1:
            ids = np.concatenate([one.ids for one in of])
            data = np.concatenate([one.data for one in of])
            found.append(RowBatch(IdSplit.of(table, ids, n_shards), data))
        else:
            # They are sent as numbers.
            found.append(of[0]._replace(words=None))
    return found


class RowSlice(NamedTuple):
    """Rows of a shard that a read asks for, and where they go."""

    asked: RowRequest
    #: Number of an array of the target, and the rows of it.
    number: int
    at: Array | slice
    #: For an unbounded table the array of the target that gets the marks, and the part
    #: of it.
    marks: tuple[int, slice] | None = None

    def read_into(self, flats: Sequence[Array]) -> RowsRead:
        """Return the read of a shard whose memory this process has."""
        position, ids, dim, *_ = self.asked
        out, at = flats[self.number], self.at
        found = None
        if self.marks is not None:
            number, where = self.marks
            found = flats[number][where]
        if isinstance(at, slice):
            out = out[at.start * dim : at.stop * dim]
            return RowsRead(position, ids, out, found=found)
        return RowsRead(position, ids, out, at, found)

    def fill(self, flats: Sequence[Array], rows: Array) -> None:
        """Put the rows that a shard has answered where they belong."""
        if dim := self.asked.dim:
            out = flats[self.number].reshape(-1, dim)
            here = out if type(out) is np.ndarray else on_host({0: out})[0]
            here[self.at] = rows.reshape(-1, dim)
            if here is not out:
                put(out, here)


def slices_of(
    layout: Layout,
    split: IdSplit,
    number: int,
    start: int,
    *,
    marks: int | None = None,
    finds: bool = False,
) -> dict[int, RowSlice]:
    """Return by shard the part of a read into one array.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    split : IdSplit
        The ids.
    number : int
        Number of the array of the target that they go to.
    start : int
        The row of it that the first id goes to.
    marks : int, optional
        For an unbounded table the number of the array that gets a mark for each id, in
        the order of `split`.
    finds : bool, default False
        Whether the read asks for the marks alone.
    """
    table, found = split.table, {}
    for shard in split.shards():
        position = layout.table_position(shard, table.index)
        ids = split.ids_of(shard)
        asked = asked_of(table, position, ids, finds=finds)
        first, last = split.starts[shard], split.starts[shard + 1]
        given = split.at_of(shard)
        at: Array | slice = slice(start + first, start + last)
        if given is not None and not finds:
            at = given + start if start else given
        where = None if marks is None else (marks, slice(first, last))
        found[shard] = RowSlice(asked, number, at, where)
    return found

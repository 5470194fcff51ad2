"""Targets of reads: the elements and rows of each shard, and arrays for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.array_utils import byte_bounds

from daskps.cluster.caller.device_arrays import overlap_of_devices, put
from daskps.cluster.protocol.read_words import CODED
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from daskps.cluster.caller.row_routes import RowSlice
    from daskps.cluster.protocol.messages import Range
    from daskps.cluster.protocol.row_messages import RowRequest
    from daskps.shards.reader import RowsRead
    from daskps.typing import Array


def at_least(shard: int, min_version: int | None) -> int:
    """Return the version a shard must have reached for a pull to proceed."""
    if min_version is None:
        return 0
    if isinstance(min_version, Version):
        return dict(min_version.pairs).get(shard, 0)
    return int(min_version)


def sizes_of(arrays: Iterable[Array], *, in_words: bool) -> tuple[int, int]:
    """Return the bytes of arrays that are read, as numbers and as they travel.

    With `in_words` floats travel as the words of a codec of 16 bits.
    """
    plain = encoded = 0
    for array in arrays:
        plain += array.nbytes
        coded = in_words and str(array.dtype) in CODED
        encoded += array.size * 2 if coded else array.nbytes
    return plain, encoded


def find_overlap(arrays: Iterable[tuple[Any, Array]]) -> tuple[Any, Any] | None:
    """Return the names of two arrays that share memory; None where none do."""
    given = [*arrays]
    by_start = sorted(
        (*byte_bounds(array), number, name, array)
        for number, (name, array) in enumerate(given)
        if array.size and type(array) is np.ndarray
    )
    before: list[tuple[int, Any, Array]] = []
    for start, stop, _, name, array in by_start:
        before = [one for one in before if one[0] > start]
        for _, other, earlier in before:
            if np.shares_memory(earlier, array):
                return other, name
        before.append((stop, name, array))
    return None if len(by_start) == len(given) else overlap_of_devices(given)


class ReadSlice(NamedTuple):
    """Elements of a shard that a read asks for, and the place that they go to."""

    range: Range
    #: Number of an array of the target, and the elements of it.
    number: int
    where: slice


#: By shard.
ReadSlices: TypeAlias = "Mapping[int, tuple[ReadSlice, ...]]"


#: The elements of a read of tables alone, and the rows of a read without tables.
NO_SLICES: ReadSlices = {}
NO_ROWS: Mapping[int, tuple[RowSlice, ...]] = {}


class Target(NamedTuple):
    """The target of a read: elements and rows of each shard, and arrays for them."""

    slices: ReadSlices
    #: Flat arrays.
    flats: Sequence[Array]
    #: Makes the caller's result once they are filled.
    finish: Callable[[], Any]
    #: Rows of tables, by shard; they are read with the slices.
    rows: Mapping[int, tuple[RowSlice, ...]] = NO_ROWS

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards that are read."""
        if not self.rows:
            return tuple(self.slices)
        return tuple(dict.fromkeys([*self.slices, *self.rows]))

    def reads(self, shard: int) -> bool:
        """Return whether anything is read of a shard."""
        return bool(self.slices.get(shard) or self.rows.get(shard))

    def rows_asked(self, shard: int) -> tuple[RowRequest, ...]:
        """Return the rows that are read of a shard."""
        return tuple([one.asked for one in self.rows.get(shard, ())])

    def row_reads(self, shard: int) -> list[RowsRead]:
        """Return the same for a shard whose memory this process has."""
        return [one.read_into(self.flats) for one in self.rows.get(shard, ())]

    def fill(self, shard: int, arrays: Sequence[Array]) -> None:
        """Copy the answer of a shard into the arrays of the target."""
        outs = self.outs(shard)
        for out, array in zip(outs, arrays, strict=False):
            put(out, array)
        rows = self.rows.get(shard, ())
        given = iter(arrays[len(outs) :])
        for one in rows:
            one.fill(self.flats, next(given))
        for one in rows:
            if one.marks is not None:
                number, where = one.marks
                np.copyto(self.flats[number][where], next(given))

    def ranges(self, shard: int) -> tuple[Range, ...]:
        """Return the elements that are read of a shard."""
        return tuple([one.range for one in self.slices.get(shard, ())])

    def outs(self, shard: int) -> list[Array]:
        """Return the arrays that the elements of a shard go to."""
        slices = self.slices.get(shard, ())
        return [self.flats[one.number][one.where] for one in slices]

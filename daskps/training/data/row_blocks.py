"""Rows of several arrays as if they were one: a view for batches."""

from __future__ import annotations

from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.training.data.rows import n_rows, take_rows, why_unusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.training.data.rows import Rows
    from daskps.typing import Array


class _Addresses:
    """Places of the rows of some arrays, counted from the first byte of them all.

    NumPy gathers from one array only. To it these are one: where each row is contiguous,
    an array of a row for every byte from the first block on, overlapping, of which only
    those are ever read that begin where a row does; else an array of all elements from
    there on. Nothing between the blocks is ever read: it may not even be memory.

    Parameters
    ----------
    blocks : sequence of ndarray
        As `_addresses_of` finds them fit. The caller must hold them as long as this object.
    """

    def __init__(self, blocks: Sequence[Array]) -> None:
        full = [block for block in blocks if len(block)]
        home = min(full, key=_address)
        whole = _has_whole_rows(full)
        self._dtype, self._trailing = home.dtype, home.shape[1:]
        item, unit = home[(slice(1),) * home.ndim].reshape(-1), home.itemsize
        if whole:
            row = home[:1].reshape(-1)
            item, unit = row.view(np.dtype((np.void, row.nbytes))), 1
        span = max(map(_end, full)) - _address(home)
        self._items = np.lib.stride_tricks.as_strided(
            item,
            shape=((span - item.nbytes) // unit + 1,),
            strides=(unit,),
            writeable=False,
        )
        self._strides = np.array([block.strides[0] for block in blocks]) // unit
        #: Of a row 0, were it in the block: rows are numbered over all blocks.
        begins = np.cumsum([0, *map(len, blocks[:-1])])
        starts = np.array([_address(block) for block in blocks]) - _address(home)
        self._starts = starts // unit - begins * self._strides
        #: Of the elements of a row, in each block, counted from the row's first one.
        self._elements: Array | None = None
        if not whole:
            self._elements = np.stack([_elements(block) for block in blocks]) // unit

    def take(self, index: Array, owners: Array) -> Array:
        """Return a copy of rows.

        Parameters
        ----------
        index : ndarray of int
            Their numbers over all blocks, each at least 0.
        owners : ndarray of int
            The block of each. Of a row behind the last one there is none.

        Returns
        -------
        ndarray
            Contiguous.

        Raises
        ------
        IndexError
            If there is no such row.
        """
        where = self._starts[owners] + index * self._strides[owners]
        if self._elements is not None:
            where = where[:, np.newaxis] + self._elements[owners]
        found: Array = self._items[where].view(self._dtype)
        return found.reshape(len(index), *self._trailing)


def _addresses_of(blocks: Sequence[Any]) -> _Addresses | None:
    """Return where the rows of blocks lie, if they can be gathered by that.

    Parameters
    ----------
    blocks : sequence of array_like
        Their trailing axes agree.

    Returns
    -------
    _Addresses or None
        None unless all are ordinary arrays of one dtype without references, none of
        them reversed, and there is something in them; where rows are not contiguous,
        of numbers that lie as processors like it.
    """
    if any(type(block) is not np.ndarray for block in blocks):
        return None
    full = [block for block in blocks if block.size]
    if not full or full[0].dtype.hasobject:
        return None
    if any(b.dtype != full[0].dtype or min(b.strides) < 0 for b in full):
        return None
    if not (_has_whole_rows(full) or all(map(_is_aligned, full))):
        return None
    span = max(map(_end, full)) - min(map(_address, full))
    if span * full[0][:1].nbytes > np.iinfo(np.intp).max:
        return None  # NumPy's limit for any array
    return _Addresses(blocks)


def _has_whole_rows(blocks: Sequence[Array]) -> bool:
    return all(block[:1].flags.c_contiguous for block in blocks)


def _is_aligned(block: Array) -> bool:
    """Whether elements lie at multiples of their size only."""
    return block.flags.aligned and block.dtype.alignment == block.itemsize


def _elements(block: Array) -> Array:
    """Return where the elements of a row lie, in the order of its axes."""
    axes = zip(block.shape[1:], block.strides[1:], strict=True)
    found: Array = reduce(np.add.outer, (np.arange(n) * step for n, step in axes))
    return found.reshape(-1)


def _address(block: Array) -> int:
    return int(block.__array_interface__["data"][0])


def _end(block: Array) -> int:
    """Return the address behind the last element."""
    axes = zip(block.shape, block.strides, strict=True)
    last: int = sum((n - 1) * step for n, step in axes)
    return _address(block) + last + block.itemsize


class Blocks:
    """The rows of several arrays, one array after the other, without joining them.

    Only what is asked for is copied: joining all of it would take the memory twice.
    Taking rows costs as much as there are of them, whatever they are taken from.

    Parameters
    ----------
    blocks : sequence of array_like, each of shape (n_i, ...)
        The arrays; trailing axes agree.

    Attributes
    ----------
    shape : tuple of int
        ``(sum of n_i,)`` and the trailing axes.

    Examples
    --------
    >>> import numpy as np
    >>> view = Blocks([np.arange(3), np.arange(10, 12)])
    >>> view[1:4].tolist(), view[np.array([4, 0])].tolist()
    ([1, 2, 10], [11, 0])
    """

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = _alike(blocks)
        trailing = {tuple(block.shape[1:]) for block in blocks}
        if len(trailing) > 1:
            raise ValueError(
                f"rows of shapes {sorted(trailing)} in the blocks of one part; they "
                f"must agree"
            )
        #: Row after the last of each block.
        self._ends = np.cumsum([n_rows(block) for block in blocks])
        self.shape: tuple[int, ...] = (int(self._ends[-1]), *trailing.pop())

    @cached_property
    def _addresses(self) -> _Addresses | None:
        return _addresses_of(self._blocks)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Rows) -> Any:
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._run(start, max(start, stop))
            return self._gather(np.arange(start, stop, step))
        return self._gather(_from_zero(rows, len(self)))

    def _run(self, start: int, stop: int) -> Any:
        """Return successive rows: a view where they are in one block."""
        ends = (start, max(start, stop - 1))
        found = np.searchsorted(self._ends, ends, "right")
        # No rows after the last one: nothing of the last block.
        first, last = np.minimum(found, len(self._blocks) - 1)
        pieces = []
        for number in range(first, last + 1):
            begin = self._begin(number)
            pieces.append(
                take_rows(
                    self._blocks[number], slice(max(start - begin, 0), stop - begin)
                )
            )
        return pieces[0] if len(pieces) == 1 else _join(pieces)

    def _gather(self, index: Array) -> Any:
        """Return rows in any order."""
        owners = np.searchsorted(self._ends, index, "right")
        if self._addresses is not None:
            return self._addresses.take(index, owners)
        used = np.unique(owners)
        if len(used) < 2:
            number = used[0] if len(used) else 0
            return take_rows(self._blocks[number], index - self._begin(number))
        order = np.argsort(owners, kind="stable")
        pieces = [
            take_rows(
                self._blocks[number], index[owners == number] - self._begin(number)
            )
            for number in used
        ]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return take_rows(_join(pieces), back)

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0


def _alike(blocks: Sequence[Any]) -> list[Any]:
    """Return NumPy's arrays in one dtype: that of a row must not depend on which.

    As NumPy has it where it joins them. Only those of another dtype are copied.
    """
    dtypes = {block.dtype for block in blocks if type(block) is np.ndarray}
    if len(dtypes) < 2 or any(type(block) is not np.ndarray for block in blocks):
        return list(blocks)
    return [block.astype(np.result_type(*dtypes), copy=False) for block in blocks]


def _from_zero(index: Array, n: int) -> Array:
    """Return the same of `n` rows, none of them counted from the end."""
    if not len(index) or index.min() >= 0:
        return index
    index = np.where(index < 0, index + n, index)
    if index.min() < 0:
        raise IndexError(f"there is no row {index.min() - n}: there are {n}")
    return index


def joined(blocks: Sequence[Any]) -> Any:
    """Return the blocks of a part as one thing with rows: the block itself if one."""
    # A dask array may say otherwise of its blocks.
    if why := next(filter(None, map(why_unusable, blocks)), ""):
        raise TypeError(f"a block of the data {why}")
    given = [b if hasattr(b, "shape") else np.asarray(b) for b in blocks]
    full = [block for block in given if n_rows(block)] or given[:1]
    return full[0] if len(full) == 1 else Blocks(full)


def rows_of(part: tuple[Sequence[Any], Sequence[Any] | None]) -> tuple[Any, Any]:
    """Return features and labels of a part as a task gets it.

    Parameters
    ----------
    part : tuple
        The blocks of `X` and those of `y`, or None.

    Returns
    -------
    tuple
        ``(X, y)``, each something with a shape whose rows can be taken by a slice or
        an array of row numbers.

    Raises
    ------
    ValueError
        If they differ in length: their chunks are not what their shapes say.
    """
    X = joined(part[0])
    y = None if part[1] is None else joined(part[1])
    if y is not None and n_rows(X) != n_rows(y):
        raise ValueError(
            f"a part has {n_rows(X)} rows of X and {n_rows(y)} of y; the chunks of a "
            f"dask array are not as long as it says"
        )
    return X, y


def _join(pieces: Sequence[Any]) -> Any:
    """Concatenate rows; Dask knows how for the types that its arrays may hold."""
    if type(pieces[0]) is np.ndarray:
        # Of one dtype, which NumPy would turn into the processor's own byte order.
        joined = np.concatenate(pieces, dtype=pieces[0].dtype)
        return np.ascontiguousarray(joined)
    # Slow to import and seldom needed.
    from dask.array.dispatch import concatenate_lookup

    lookup: Any = concatenate_lookup
    return lookup.dispatch(type(pieces[0]))(list(pieces), axis=0)

"""Rows of several arrays as if they were one: a view for batches."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.training.data.addresses import addresses
from daskps.training.data.rows import n_rows, take_rows, why_unusable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.training.data.addresses import Addresses
    from daskps.training.data.rows import Rows
    from daskps.typing import Array


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
    def _addresses(self) -> Addresses | None:
        return addresses(self._blocks)

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

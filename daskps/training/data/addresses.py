"""Rows of several arrays, gathered in one step by where they lie in memory."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.typing import Array


class Addresses:
    """Places of the rows of some arrays, counted from the first byte of them all.

    NumPy gathers from one array only. To it these are one: where each row is contiguous,
    an array of a row for every byte from the first block on, overlapping, of which only
    those are ever read that begin where a row does; else an array of all elements from
    there on. Nothing between the blocks is ever read: it may not even be memory.

    Parameters
    ----------
    blocks : sequence of ndarray
        As `addresses` finds them fit. The caller must hold them as long as this object.
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


def addresses(blocks: Sequence[Any]) -> Addresses | None:
    """Return where the rows of blocks lie, if they can be gathered by that.

    Parameters
    ----------
    blocks : sequence of array_like
        Their trailing axes agree.

    Returns
    -------
    Addresses or None
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
    return Addresses(blocks)


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

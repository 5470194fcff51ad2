"""From the rows of a step to updates of a table: what is wrong with them, and repeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import PushRejectedError
from daskps.kernels import scratch
from daskps.kernels.row_repeats import are_distinct, repeats
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.steps import ASSIGN, MODEL, REMOVE

if TYPE_CHECKING:
    from daskps.layout.tables import TablePiece
    from daskps.reduction import Empty
    from daskps.shards.arrays.payload import Payload
    from daskps.shards.steps import Item
    from daskps.typing import Array

_ID = np.dtype(np.int64)


def check_rows(
    item: Item, piece: TablePiece, dtype: np.dtype[np.generic], kind: str
) -> None:
    """Refuse rows that do not fit a piece of a table, whatever their ids.

    Raises
    ------
    PushRejectedError
        Naming the table.
    """
    _, start, data, ids, at = item
    name, dim = piece.table.name[:60], piece.table.dim
    if kind == MODEL:
        raise PushRejectedError(
            f"the rows of table {name!r} cannot be averaged as part of a model; nothing "
            f"was applied, push gradients of them instead"
        )
    if kind == REMOVE:
        piece.table.check_removal(PushRejectedError)
        dim = 0
    if (
        ids is None
        or start
        or not _is_flat(ids, _ID)
        or not _is_flat(data, dtype)
        or not (
            len(data) == len(ids) * dim
            if at is None
            else _fits(len(ids), len(data), dim, at)
        )
    ):
        about = "no ids" if ids is None else f"{ids.shape} ids of {ids.dtype}"
        raise PushRejectedError(
            f"{about} and {data.shape} elements of {data.dtype} do not fit table "
            f"{name!r}, rows of {dim} {piece.table.dtype}; nothing was applied"
        )


def _is_flat(array: Array, dtype: np.dtype[np.generic]) -> bool:
    return array.dtype == dtype and array.ndim == 1 and array.flags.c_contiguous


def _fits(n_ids: int, n_elements: int, dim: int, at: Array) -> bool:
    n, rest = divmod(n_elements, dim) if dim else (0, n_elements)
    return not rest and _is_flat(at, _ID) and len(at) == n_ids and _are_below(at, n)


def _are_below(numbers: Array, n: int) -> bool:
    """Return whether all are from 0 to n - 1."""
    # Numbers below 0 are the largest ones without a sign: one pass finds both.
    return not len(numbers) or int(np.maximum.reduce(numbers.view(np.uint64))) < n


def each_once(
    item: Item,
    piece: TablePiece,
    kind: str,
    cache_dir: str | None,
    *,
    empty: Empty = scratch.empty,
    numbers: Array | None = None,
    payload: Payload = NUMPY,
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return the ids of rows, none twice, their data, which is whose, and their numbers.

    Of rows that are named again the data are added up, in the order in which they
    come and with the precision of gradients, in memory that `empty` makes, or of the
    `payload`; of those that are assigned the last holds. In an unbounded table `numbers`
    may say which row each id has, -1 for none: where all have one, those tell quicker
    whether any repeats.

    Raises
    ------
    PushRejectedError
        For an id that is no row of the piece.
    """
    _, _, data, ids, at = item
    if ids is None:
        raise TypeError(f"rows of table {piece.table.name!r} without their ids")
    rows = data.reshape(-1, piece.table.dim)
    if _are_distinct(ids, piece, numbers, cache_dir):
        return ids, rows, at, numbers
    found = repeats(ids, cache_dir=cache_dir)
    if len(found.ids) == len(ids):
        return ids, rows, at, numbers
    if numbers is not None:
        numbers = numbers[found.last()]
    if kind == ASSIGN:
        return found.ids, rows, found.last(at), numbers
    if kind == REMOVE:
        return found.ids, rows, None, numbers
    if rows.dtype == np.float16:
        wide = payload.empty(rows.size, np.float32)
        payload.round(wide, data)
        rows = wide.reshape(rows.shape)
    return found.ids, payload.sum_rows(found, rows, at, empty=empty), None, numbers


def _are_distinct(
    ids: Array, piece: TablePiece, numbers: Array | None, cache_dir: str | None
) -> bool:
    """Return whether no id repeats; False too where only a look at all of them tells."""
    if piece.table.is_bounded:
        try:
            return are_distinct(ids, piece.first_row, piece.n_rows, cache_dir=cache_dir)
        except ValueError as error:
            raise _elsewhere(ids, piece) from error
    if numbers is not None and len(ids) and np.minimum.reduce(numbers) >= 0:
        end = int(np.maximum.reduce(numbers)) + 1
        return are_distinct(numbers, 0, end, cache_dir=cache_dir)
    if not piece.holds(ids, cache_dir=cache_dir):
        raise _elsewhere(ids, piece)
    return False


def _elsewhere(ids: Array, piece: TablePiece) -> PushRejectedError:
    has = str(piece)
    if piece.table.is_bounded:
        has = f"{piece.n_rows} rows from {piece.first_row} on"
    return PushRejectedError(
        f"ids from {ids.min()} to {ids.max()} of table {piece.table.name[:60]!r} were "
        f"sent to shard {piece.shard}, which has {has}; nothing was applied"
    )

"""Operations on the arrays of a segment, by the kind of memory that they are in.

Weights, slots and what comes for them are touched by these functions and by the loops of
the update rules, and by nothing else in a shard; a segment has them as
:attr:`daskps.shards.memory.segment.Segment.payload`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.backend.host import untouched
from daskps.kernels import finite, row_log, row_moves, row_writes
from daskps.kernels.row_repeats import Repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from daskps.kernels.device.kernel import Launcher
    from daskps.kernels.row_log import TableRows, UndoLog
    from daskps.typing import Array


class Payload(NamedTuple):
    """The functions of one kind of memory; arrays are flat, of one dtype and length.

    In memory of a device they only say what is to be done, in order: it is done when
    `wait` returns.
    """

    #: Copies to the first array what the second one holds.
    copy: Callable[[Array, Array], object]
    #: Writes the sum of the first two arrays to the third one.
    add: Callable[[Array, Array, Array], object]
    #: Write an array times a number, or divided by one, to another array.
    multiply: Callable[[Array, float, Array], object]
    divide: Callable[[Array, float, Array], object]
    #: Writes to the first array, of another float dtype, what the second one is rounded to.
    round: Callable[[Array, Array], object]
    #: Sets all elements to a number.
    fill: Callable[[Array, float], object]
    #: Returns whether an array has no NaN and no infinity.
    is_finite: Callable[[Array], bool]
    #: The same; True where `wait` will say.
    look: Callable[[Array], bool]
    #: Returns memory for so many elements of a dtype, aligned to a page.
    allocate: Callable[[int, Any], Array]
    #: The same, until `wait`.
    empty: Callable[[int, Any], Array]
    #: Returns the same numbers in memory of their own.
    duplicate: Callable[[Array], Array]
    #: Returns the same numbers in host memory of their own, now.
    fetch: Callable[[Array], Array]
    #: Returns what a caller has brought in this kind of memory.
    bring: Callable[[Array], Array]
    #: Copies to each first array, in host memory, what the second one holds, now.
    read: Callable[[Iterable[tuple[Array, Array]]], object]
    #: Copies to an array what one in host memory holds, now; before anybody sees it.
    write: Callable[[Array, Array], object]
    #: Copies rows of a table to rows of another array, see `row_moves.gather`; and now, to
    #: a caller's array beside an update.
    gather: Callable[..., object]
    read_rows: Callable[..., object]
    #: Add to rows of a table, or replace them, under a log; see `row_writes`.
    add_rows: Callable[..., bool]
    assign_rows: Callable[..., bool]
    #: Returns the sum of the rows of each id, see `Repeats.sum`.
    sum_rows: Callable[..., Array]
    #: Puts back what rows were before the first entries of a log.
    restore: Callable[[TableRows, UndoLog, int], object]
    #: Returns, when all is done, whether all that was looked at was finite.
    wait: Callable[[], bool]
    #: Writes to the first array (a * s + b) / d of the others, where this memory has that.
    form: Callable[[Array, Array, float, Array, float], bool | None] | None = None
    #: The device that the memory is on, None for that of the host.
    device: str | None = None
    #: Where loops of rules are launched there.
    launcher: Launcher | None = None
    #: Has the shard given up after an error of a device; returns the error to raise.
    give_up: Callable[[Exception], Exception] | None = None

    def part(self, nbytes: int, whole: int) -> int:
        """Return how much to take at a time: a tile that stays in caches, or the whole."""
        return nbytes if self.device is None else max(whole, 1)


def _round(out: Array, values: Array) -> None:
    with np.errstate(over="ignore"):  # too large for them is infinity there
        np.copyto(out, values, casting="same_kind")


def _fill(out: Array, value: float) -> None:
    out[:] = value


def _allocate(n: int, dtype: Any) -> Array:
    return untouched(n * np.dtype(dtype).itemsize).view(dtype)


def _read(pairs: Iterable[tuple[Array, Array]]) -> None:
    for out, a in pairs:
        np.copyto(out, a)


def _here(a: Array) -> Array:
    return a


def _done() -> bool:
    return True


#: Memory of the process, or shared with others.
NUMPY: Final = Payload(
    copy=np.copyto,
    add=np.add,
    multiply=np.multiply,
    divide=np.divide,
    round=_round,
    fill=_fill,
    is_finite=finite,
    look=finite,
    allocate=_allocate,
    empty=np.empty,
    duplicate=np.array,
    fetch=np.array,
    bring=_here,
    read=_read,
    write=np.copyto,
    gather=row_moves.gather,
    read_rows=row_moves.gather,
    add_rows=row_writes.add,
    assign_rows=row_writes.assign,
    sum_rows=Repeats.sum,
    restore=row_log.restore,
    wait=_done,
)

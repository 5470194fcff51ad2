"""Operations on the arrays of a segment, by the kind of memory that they are in.

Weights, slots and what comes for them are touched by these functions and by the loops of
the update rules, and by nothing else in a shard; a segment has them as
:attr:`daskps.shards.memory.segment.Segment.payload`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.kernels import finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


class Payload(NamedTuple):
    """The functions of one kind of memory; arrays are flat, of one dtype and length."""

    #: Copies to the first array what the second one holds.
    copy: Callable[[Array, Array], object]
    #: Writes the sum of the first two arrays to the third one.
    add: Callable[[Array, Array, Array], object]
    #: Sets all elements to a number.
    fill: Callable[[Array, float], object]
    #: Returns whether an array has no NaN and no infinity.
    is_finite: Callable[[Array], bool]
    #: Returns the same numbers in memory of their own.
    duplicate: Callable[[Array], Array]


def _fill(out: Array, value: float) -> None:
    out[:] = value


#: Memory of the process, or shared with others.
NUMPY = Payload(np.copyto, np.add, _fill, finite, np.array)

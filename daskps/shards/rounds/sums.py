"""Sums of contributions, formed where they are needed.

A sum goes into a slice of the mailboxes or straight into the update of the weights,
tile by tile: the arrays that came are read once and never changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from daskps.layout.arrays import compute_dtype
from daskps.shards.arrays.operations import Formed, overflows
from daskps.shards.steps import ADD, GRADIENT, MODEL, NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.layout.parameters import Piece
    from daskps.shards.arrays.payload import Payload
    from daskps.shards.rounds.arena import RowSpan
    from daskps.shards.rounds.mailbox import Slice
    from daskps.shards.rounds.words import Compiled
    from daskps.shards.steps import Step
    from daskps.typing import Array

#: Bytes of a sum that are formed at a time and then used: they stay in a second-level
#: cache. (A round of 16 MB: 3.6 ms of processor time, with 64 KiB 4.7, in one piece 8.)
TILE_NBYTES = 512 * 1024
#: Kinds of a round, and their words in a table.
KINDS: Final = (NOTHING, GRADIENT, MODEL, ADD)
KIND_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}


class Delivery(NamedTuple):
    """A rank on its way into a round, and what its arrays are added to."""

    #: Its kind is that of all that the rank brings.
    step: Step
    #: None where it sits out.
    arrays: Mapping[int, Array]
    #: The sums that meet them, the lowest first.
    slices: Sequence[Slice]
    #: Word of the kind of its arrays, and what is added to the rank's word.
    code: int = 0
    bits: int = 0
    #: Where its rows are, by the number of their table.
    spans: Mapping[int, RowSpan] = MappingProxyType({})


@dataclass(slots=True)
class Sum(Formed):
    """The sum of one piece over a node of the rank tree, not yet formed.

    Slicing it forms that part of it, in memory that the next slicing of any sum of the
    round writes again; the parts in order, where it looks whether they are finite.
    """

    #: The deepest array, and what it is multiplied by first.
    start: Array
    scale: float
    #: Weight of all that is summed.
    weight: float
    how: Forming
    #: The other arrays, going up the tree.
    others: list[Array] = field(default_factory=list)
    #: The sum is divided by it at the end.
    divisor: float = 1.0

    def __len__(self) -> int:
        """Return the number of elements."""
        return len(self.start)

    @property
    def step(self) -> int:
        """Number of elements to form at a time."""
        return self.how.step

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        return self.start.dtype

    def __getitem__(self, part: slice) -> Array:
        """Form elements [part.start, part.stop); refuse those that are not finite."""
        nbytes = (part.stop - part.start) * self.start.itemsize
        out = self.how.room[:nbytes].view(self.start.dtype)
        is_finite = self._form(part, out)
        if (name := self.how.name) is not None and not (
            self.how.payload.look(out) if is_finite is None else is_finite
        ):
            raise overflows(name, self.start.dtype)
        return out

    @property
    def checks(self) -> bool:
        """Whether it refuses what is not finite."""
        return self.how.name is not None

    def write(self, out: Array) -> None:
        """Form all of it in `out`, for a sum that others are added to."""
        if self.scale == 1.0 and not self.others:
            if self.how.payload.device is None:
                out[:] = self.start  # `copyto` would be a call of Python
            else:
                self.how.payload.copy(out, self.start)
            return
        size = len(self.start)
        # Several passes over a tile stay in the second-level cache; one needs none.
        step = self.step if len(self.others) > 1 else max(size, 1)
        for lo in range(0, size, step):
            stop = min(lo + step, size)
            self._form(slice(lo, stop), out[lo:stop])

    def _form(self, part: slice, out: Array) -> bool | None:
        """Form a part in `out`; return whether it is finite, None if nobody has looked."""
        # Of a small piece, cutting its arrays costs as much as adding them.
        whole, form = len(out) == len(self.start), self.how.form
        found: Array = self.start if whole else self.start[part]
        scale, last = self.scale, len(self.others) - 1
        is_finite: bool | None = True
        if form is None or last < 0:
            self._form_slowly(found, part, out)
            return None
        for i, array in enumerate(self.others):
            other, divisor = array if whole else array[part], 1.0
            if i == last:
                divisor = self.divisor
            is_finite = form(out, found, scale, other, divisor)
            found, scale = out, 1.0
        return is_finite

    def _form_slowly(self, found: Array, part: slice, out: Array) -> None:
        """Form a part of integers, or of what is no sum of several."""
        payload = self.how.payload
        with np.errstate(all="ignore"):
            if self.scale != 1.0:
                payload.multiply(found, self.scale, out)
                found = out
            for other in self.others:
                payload.add(found, other[part], out)
                found = out
            if self.divisor != 1.0 or found is not out:
                payload.divide(found, self.divisor, out)


class Forming(NamedTuple):
    """How sums of one piece are formed."""

    #: Memory for a part of a sum; one for all pieces: a copy of a shard would be as
    #: large.
    room: Array
    #: Adds two arrays, after the first was multiplied and before the sum is divided;
    #: None for integers.
    form: Callable[[Array, Array, float, Array, float], bool | None] | None
    #: Of its parameter, where sums that are not finite are refused.
    name: str | None
    #: Number of elements to form at a time.
    step: int
    payload: Payload


def forms_of(
    pieces: Sequence[Piece], work: Compiled, payload: Payload, *, check: bool
) -> list[Forming]:
    """Return how sums of some pieces are formed, with `check` finite ones alone."""
    dtypes = [np.dtype(compute_dtype(piece.parameter.dtype)) for piece in pieces]
    most = max(
        (p.size * d.itemsize for p, d in zip(pieces, dtypes, strict=True)), default=0
    )
    room = payload.allocate(min(most, payload.part(TILE_NBYTES, most)), np.uint8)
    forms = {"f4": payload.form or work.form4, "f8": payload.form or work.form8}
    return [
        Forming(
            room,
            forms.get(dtype.str[1:]),
            piece.parameter.name if check else None,
            payload.part(TILE_NBYTES, most) // dtype.itemsize,
            payload,
        )
        for piece, dtype in zip(pieces, dtypes, strict=True)
    ]


def gather(came: Delivery, weighs: bool, forms: Sequence[Forming]) -> dict[int, Sum]:
    """Return the sums, by position, of a contribution and what it meets on its way up.

    Nothing is added yet: a :class:`Sum` notes the arrays, in the order of the rank tree.
    With `weighs` the contribution is multiplied by its weight, as those in the slices
    were when they came.
    """
    weight = came.step.weight
    scale = weight if weighs else 1.0
    sums: dict[int, Sum] = {}
    for position, array in came.arrays.items():
        sums[position] = Sum(array, scale, weight, forms[position])
    for sibling in came.slices:
        for position, other in enumerate(sibling.weights.tolist()):
            if isnan(other):
                continue  # no rank below that node has brought this piece
            array, known = sibling.arrays[position], sums.get(position)
            if known is None:  # the rank itself has brought none
                sums[position] = Sum(array, 1.0, other, forms[position])
            else:
                known.others.append(array)
                known.weight += other
    return sums


def divide(sums: Mapping[int, Sum], divides: bool) -> dict[int, Sum | Array]:
    """Return what the sums over all ranks come to, by position.

    With `divides` each is divided by its weight. A sum of one array that nothing is to be
    done to is that array. Raises what forming would, for integers that cannot be weighed.
    """
    reduced: dict[int, Sum | Array] = {}
    for position, total in sums.items():
        if divides:
            total.divisor = total.weight
        needs = total.scale != 1.0 or total.others or total.divisor != 1.0
        if needs and total.start.dtype.kind != "f":
            total[0:0]  # forms no element, and raises what any would
        reduced[position] = total if needs else total.start
    return reduced

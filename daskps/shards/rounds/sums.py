"""Sums of contributions, formed where they are needed.

A sum goes into a slice of the mailboxes or straight into the update of the weights:
the arrays that came are read once and never changed. Those of small shards are formed
in one pass each, all others lazily, tile by tile; the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan, nan
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from daskps.kernels.past import PAST_NBYTES
from daskps.layout.arrays import compute_dtype
from daskps.optim import Bound, BoundFunction
from daskps.reduction import REDUCTIONS
from daskps.shards.arrays.operations import overflows
from daskps.shards.rounds.words import SLICES
from daskps.shards.steps import ADD, GRADIENT, MODEL, NOTHING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.reduction import Reducer
    from daskps.shards.arrays.planning import UpdatePlanner
    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.arena import RowSpan
    from daskps.shards.rounds.mailbox import Slice
    from daskps.shards.rounds.words import Compiled
    from daskps.shards.steps import Tick
    from daskps.typing import Array

#: Bytes of a sum that are formed at a time and then used: they stay in a second-level
#: cache. (A round of 16 MB: 3.6 ms of processor time, with 64 KiB 4.7, in one piece 8.)
TILE_NBYTES = 512 * 1024
#: Weights that a float32 can hold, with room for their sum.
MOST_WEIGHT: Final = 1e30
#: Kinds of a round, and their words in a table.
KINDS: Final = (NOTHING, GRADIENT, MODEL, ADD)
CODES: Final = {kind: code for code, kind in enumerate(KINDS)}
#: All elements: of a small piece, cutting its arrays costs as much as adding them.
_ALL = slice(None)


def is_mean(kind: str, reduce: str | Reducer) -> bool:
    """Return whether what ranks bring is weighed, and the sum of it divided.

    Of gradients that is as the run says; models are averaged, and deltas added up.
    """
    return kind == MODEL or (kind == GRADIENT and reduce == "mean")


class Delivery(NamedTuple):
    """A rank on its way into a round, and what its arrays are added to."""

    tick: Tick
    #: None where it sits out.
    arrays: Mapping[int, Array]
    #: The sums that meet them, the lowest first.
    slices: Sequence[Slice]
    #: Word of the kind of its arrays, and what is added to the rank's word.
    code: int = 0
    bits: int = 0
    #: Weight of a sum that is formed at once, 0 where it is formed lazily.
    weight: float = 0.0
    #: Where its rows are, by the number of their table.
    spans: Mapping[int, RowSpan] = MappingProxyType({})


@dataclass(slots=True)
class LazySum:
    """The sum of one piece over a node of the rank tree, not yet formed.

    Slicing it forms that part of it, in memory that the next slicing writes again.
    """

    #: The deepest array, and what it is multiplied by first.
    start: Array
    scale: float
    #: Weight of all that is summed.
    weight: float
    #: The other arrays, going up the tree; whether each is the left part of its node.
    others: list[tuple[Array, bool]] = field(default_factory=list)
    #: The sum is divided by it at the end.
    divisor: float = 1.0
    _tile: Array | None = None

    def __len__(self) -> int:
        """Return the number of elements."""
        return len(self.start)

    @property
    def step(self) -> int:
        """Number of elements to form at a time."""
        return TILE_NBYTES // self.start.dtype.itemsize

    def __getitem__(self, part: slice) -> Array:
        """Form elements [part.start, part.stop)."""
        n = part.stop - part.start
        if self._tile is None or len(self._tile) < n:
            self._tile = np.empty(n, self.start.dtype)
        if n == len(self.start):
            return self._form(_ALL, self._tile)
        return self._form(part, self._tile[:n])

    @property
    def ready(self) -> Array | None:
        """The array that the sum is, where nothing needs forming."""
        formed = self.scale != 1.0 or self.others or self.divisor != 1.0
        return None if formed else self.start

    def check(self) -> None:
        """Raise what forming would, for numbers that cannot be weighed."""
        if self.start.dtype.kind != "f":
            self[0:0]

    def write(self, out: Array) -> None:
        """Form all of it in `out`."""
        if (ready := self.ready) is not None:
            np.copyto(out, ready)
            return
        size = len(self.start)
        # Several passes over a tile stay in the second-level cache; one needs none.
        several = (self.scale != 1.0) + len(self.others) > 1
        step = self.step if several else max(size, 1)
        with np.errstate(all="ignore"):
            for lo in range(0, size, step):
                self._form(slice(lo, lo + step), out[lo : lo + step])

    def _form(self, part: slice, out: Array) -> Array:
        """Form a part, in `out` where it needs forming at all."""
        whole = part is _ALL
        found: Array = self.start if whole else self.start[part]
        if self.scale != 1.0:
            found = np.multiply(found, self.scale, out=out)
        for other, left in self.others:
            added: Array = other if whole else other[part]
            pair = (added, found) if left else (found, added)
            found = np.add(*pair, out=out)
        if self.divisor != 1.0:
            found = np.divide(found, self.divisor, out=out)
        return found


def gather(came: Delivery, weighs: bool, found: memoryview[int]) -> dict[int, LazySum]:
    """Return the sums, by position, of a contribution and what it meets on its way up.

    `found` says of each slice whether that is the left part.
    """
    weight = came.tick.weight
    scale = weight if weighs else 1.0
    sums = {p: LazySum(array, scale, weight) for p, array in came.arrays.items()}
    for i, sibling in enumerate(came.slices):
        left = bool(found[SLICES + 2 * i + 1])
        for position, other in enumerate(sibling.weights.tolist()):
            if isnan(other):
                continue
            known = sums.get(position)
            if known is None:
                sums[position] = LazySum(sibling.arrays[position], 1.0, other)
            else:
                known.others.append((sibling.arrays[position], left))
                known.weight += other
    return sums


def divide(sums: Mapping[int, LazySum], divides: bool) -> dict[int, LazySum | Array]:
    """Return what the sums over all ranks come to, by position."""
    reduced: dict[int, LazySum | Array] = {}
    for position, total in sums.items():
        if divides:
            total.divisor = total.weight
        total.check()
        ready = total.ready
        reduced[position] = total if ready is None else ready
    return reduced


def fill_slice(out: Slice, sums: Mapping[int, LazySum]) -> None:
    """Form sums in a slice, by position."""
    weights = [nan] * len(out.arrays)
    for position, total in sums.items():
        weights[position] = total.weight
        total.write(out.arrays[position])
    out.weigh(weights)


class DirectSums:
    """Sums of gradients for all pieces of a small shard, each formed in one pass.

    A shard that is written past the caches, or whose pieces are formed tile by tile,
    costs so much that the rest does not count. Pieces of float16 are widened first. A
    shard without pieces gets no arrays.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    rules : sequence of Bound
        The update rule of each piece.
    is_mean : bool
        Whether gradients are multiplied by their weight.
    work : Compiled
        The functions that form sums.
    """

    def __init__(
        self,
        segment: Segment,
        rules: Sequence[Bound],
        is_mean: bool,
        work: Compiled,
    ) -> None:
        self.rules, self.is_mean = rules, is_mean
        self._pieces = segment.pieces
        dtypes = [np.dtype(piece.parameter.dtype) for piece in segment.pieces]
        nbytes = [
            p.size * d.itemsize for p, d in zip(segment.pieces, dtypes, strict=True)
        ]
        self._forms = [work.form4 if d.itemsize == 4 else work.form8 for d in dtypes]
        # One after the other in the same place: all of a shard would be a copy of it.
        room = np.empty(max(nbytes), np.uint8)
        self.formed = [room[:n].view(d) for n, d in zip(nbytes, dtypes, strict=True)]

    @classmethod
    def of(
        cls,
        segment: Segment,
        planner: UpdatePlanner,
        reduce: str | Reducer,
        work: Compiled,
    ) -> Self | None:
        """Return what forms the sums of a run, None where all are formed lazily."""
        if reduce not in REDUCTIONS or segment.weights_nbytes >= PAST_NBYTES:
            return None
        rules: list[Bound] = []
        for position, piece in enumerate(segment.pieces):
            dtype, rule = piece.parameter.dtype, planner.binding(position)
            nbytes = piece.size * np.dtype(dtype).itemsize
            if rule is None or isinstance(rule, BoundFunction):
                return None
            if dtype != compute_dtype(dtype) or nbytes > TILE_NBYTES:
                return None
            rules.append(rule)
        return cls(segment, rules, reduce == "mean", work) if rules else None

    def weigh(
        self, tick: Tick, arrays: Mapping[int, Array], slices: Sequence[Slice]
    ) -> float:
        """Return the weight of a sum, 0 where it is to be formed lazily."""
        weight = tick.weight
        if (
            len(arrays) < len(self.rules)
            or tick.kind != GRADIENT
            or not 0 < weight < MOST_WEIGHT
        ):
            return 0.0
        for one in slices:
            weights = one.weights.tolist()
            # NaN where a piece was not delivered.
            if not weights[0] > 0 or weights.count(weights[0]) < len(weights):
                return 0.0
            weight += weights[0]
        return weight

    def fill(self, came: Delivery, to: Slice) -> None:
        """Form the sums of all pieces in a slice."""
        for position, array in came.arrays.items():
            out = to.arrays[position]
            if self.form(came, position, out) is array:
                out[:] = array
        to.weigh([came.weight] * len(self.rules))

    def form(
        self,
        came: Delivery,
        position: int,
        out: Array,
        divisor: float = 1.0,
        *,
        check: bool = False,
    ) -> Array:
        """Form the sum of a piece in `out`; return the array itself where that is it.

        Raises
        ------
        PushRejectedError
            With `check`, where it is not finite.
        """
        array, slices = came.arrays[position], came.slices
        scale = came.tick.weight if self.is_mean else 1.0
        form, last, is_finite = self._forms[position], slices and slices[-1], True
        for one in slices:
            is_finite = form(
                out, array, scale, one.arrays[position], divisor if one is last else 1.0
            )
            array, scale = out, 1.0
        if not slices:
            if not scale == 1.0 == divisor:
                LazySum(array, scale, 1.0, divisor=divisor).write(out)
                array = out
            if check:
                is_finite = 0 not in np.isfinite(array).tobytes()
        if check and not is_finite:
            parameter = self._pieces[position].parameter
            raise overflows(parameter.name, array.dtype)
        return array

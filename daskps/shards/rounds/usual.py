"""A step as nearly all are: every piece of a small shard, in rounds that form sums.

It does what :meth:`daskps.shards.rounds.joining.Joining.arrived` does for an arrival, on the
same words by the same functions and in the same order of stores, without the objects
that stand for what else an arrival may be. Whatever is not as usual is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from daskps.layout.arrays import compute_dtype
from daskps.reduction import REDUCTIONS
from daskps.shards.memory.format import N_APPLIED
from daskps.shards.memory.publication import PAST_NBYTES, Publication
from daskps.shards.rounds.sums import TILE_NBYTES, LazySum
from daskps.shards.rounds.tables import KINDS
from daskps.shards.rounds.words import INTO, LAST, SLICES, TICKED
from daskps.shards.steps import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.shards.arrays.operations import Binding
    from daskps.shards.arrays.planning import UpdatePlanner
    from daskps.shards.memory.segment import Segment
    from daskps.shards.rounds.mailbox import Slice
    from daskps.shards.rounds.tables import Tables
    from daskps.shards.steps import Tick
    from daskps.typing import Array

_KIND: Final = KINDS.index(GRADIENT)
#: Weights that a float32 can hold, with room for their sum.
_MOST: Final = 1e30


def usual_of(
    segment: Segment,
    planner: UpdatePlanner,
    tables: Tables,
    fail: Callable[[int, Exception], None],
) -> Usual | None:
    """Return what takes the usual steps of a run; None where none is usual.

    A shard that is written past the caches, or whose pieces are formed tile by tile,
    costs so much that the rest does not count. Pieces of float16 are widened first. A
    shard without pieces gets no arrays, so its steps are of another kind.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    planner : UpdatePlanner
        Knows the rules of its pieces.
    tables : Tables
        The table of the run's open round.
    fail : callable
        Gets a run and the error for which a round of it cannot be applied.
    """
    if tables.reduce not in REDUCTIONS or not segment.pieces:
        return None
    if segment.weights_nbytes >= PAST_NBYTES:
        return None
    bindings = []
    for position, piece in enumerate(segment.pieces):
        dtype, binding = piece.parameter.dtype, planner.binding(position)
        nbytes = piece.size * np.dtype(dtype).itemsize
        if binding is None or dtype != compute_dtype(dtype) or nbytes > TILE_NBYTES:
            return None
        bindings.append(binding)
    return Usual(segment, bindings, tables, fail)


class _Sum(NamedTuple):
    """What arrays are added to, the lowest slice first, and their factor and divisor."""

    slices: Sequence[Slice]
    scale: float
    divisor: float


class Usual:
    """The usual steps that one process takes for one run at one shard."""

    def __init__(
        self,
        segment: Segment,
        bindings: Sequence[Binding],
        tables: Tables,
        fail: Callable[[int, Exception], None],
    ) -> None:
        self._segment, self._bindings = segment, bindings
        self._tables, self._fail = tables, fail
        self._is_mean = tables.reduce == "mean"
        forms = {4: tables.work.form4, 8: tables.work.form8}
        dtypes = [np.dtype(piece.parameter.dtype) for piece in segment.pieces]
        self._forms = [forms[dtype.itemsize] for dtype in dtypes]
        #: Where gradients are formed, one after the other in the same place: trainers
        #: are many, and all of a shard for each of them would be a copy of the store.
        self._formed = [
            tables.scratch[: piece.size * dtype.itemsize].view(dtype)
            for piece, dtype in zip(segment.pieces, dtypes, strict=True)
        ]

    def fits(self, tick: Tick, arrays: Mapping[int, Array]) -> bool:
        """Return whether a step is a usual one, if it joins the open round as it is."""
        return (
            len(arrays) == len(self._bindings)
            and tick.kind == GRADIENT
            and 0 < tick.weight < _MOST
        )

    def take(self, n: int, rank: int, tick: Tick, arrays: Mapping[int, Array]) -> bool:
        """Take such a step into the round, after `Tables.look` has found `n` slices.

        Returns
        -------
        bool
            False where what it meets is not usual; nothing was changed then.

        Raises
        ------
        Exception
            What a rule says to its next step. Nothing was changed.
        """
        tables = self._tables
        found = tables.found
        slices, weight = [], tick.weight
        for at in range(SLICES, SLICES + 2 * n, 2):
            one = tables.mailbox.slice(found[at])
            weights = one.weights.tolist()
            # NaN where a piece was not delivered.
            if not weights[0] > 0 or weights.count(weights[0]) < len(weights):
                return False
            slices.append(one)
            weight += weights[0]
        scale = tick.weight if self._is_mean else 1.0
        if found[LAST]:
            divisor = weight if self._is_mean else 1.0
            self._apply(_Sum(slices, scale, divisor), rank, tick, arrays)
        else:
            into, total = tables.mailbox.slice(found[INTO]), _Sum(slices, scale, 1.0)
            for position, array in arrays.items():
                out = into.arrays[position]
                if self._form(total, position, array, out) is array:
                    out[:] = array
            into.weigh(weight)
            tables.join(n, rank, TICKED, tick.sequence + 1, _KIND, tick.weight)
        return True

    def _apply(
        self, total: _Sum, rank: int, tick: Tick, arrays: Mapping[int, Array]
    ) -> None:
        """Publish the round that a step completes."""
        steps, tables = self._segment.current.steps, self._tables
        scalars = [
            rule.scalars(steps.item(position) + 1, None)
            for position, rule in enumerate(self._bindings)
        ]
        publication = Publication(self._segment)
        try:
            n_pushes = tables.note(
                publication.flip, rank, TICKED, tick.sequence + 1, tick.weight
            )
            for position, array in arrays.items():
                formed = self._form(total, position, array, self._formed[position])
                rule = self._bindings[position]
                publication.update(position, rule, formed, scalars[position])
            publication.finish()
        except Exception as error:  # noqa: BLE001  (every trainer gets it)
            self._fail(tables.run, error)
            return
        self._segment.header[N_APPLIED] += n_pushes

    def _form(self, total: _Sum, position: int, array: Array, out: Array) -> Array:
        """Return the sum of a piece in `out`; the array itself where that is it."""
        slices, scale, divisor = total
        if not slices:
            if scale == 1.0 == divisor:
                return array
            LazySum(array, scale, 1.0, divisor=divisor).write(out)
            return out
        form, last = self._forms[position], len(slices) - 1
        for i, one in enumerate(slices):
            form(out, array, scale, one.arrays[position], divisor if i == last else 1.0)
            array, scale = out, 1.0
        return out

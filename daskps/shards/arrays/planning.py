"""From the arrays of a step or a round to operations on the weights.

Everything that can be wrong with them is found here, before the first byte is written:
an array that does not fit, a parameter without an optimizer, a rule that raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from daskps.errors import NoOptimizerError, PushRejectedError
from daskps.kernels import finite
from daskps.layout.arrays import compute_dtype
from daskps.shards.arrays.operations import Formed, PieceUpdate
from daskps.shards.steps import ADD, GRADIENT, MODEL, Item, Step, Tick

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.layout.arrays import Piece
    from daskps.optim import Bound
    from daskps.typing import Array


class Bindings(Protocol):
    """Update rules by parameter index: a mapping, or what makes them when asked."""

    def get(self, index: int, /) -> Bound | None:
        """Return the rule of a parameter, None where it has none."""


#: Operations, each with the position of its piece.
Operations = list[tuple[int, PieceUpdate]]
#: The gradient of a whole piece: position, rule, array and what the rule has prepared.
Whole = tuple[int, "Bound", "Array", tuple[float, ...]]


class UpdatePlanner:
    """Plans updates of one shard's weights.

    Parameters
    ----------
    pieces : sequence of Piece
        The pieces of the shard.
    bindings : Bindings
        The update rule of each parameter index that has one.
    """

    def __init__(self, pieces: Sequence[Piece], bindings: Bindings) -> None:
        self._pieces = pieces
        names = [p.parameter.dtype for p in pieces]
        self._indices = [piece.parameter.index for piece in pieces]
        #: Of weights, which `add` and `assign` take, and of gradients and models.
        self._dtypes = [np.dtype(name) for name in names]
        self._computed = [np.dtype(compute_dtype(name)) for name in names]
        self._shapes = [(piece.size,) for piece in pieces]
        self._bindings = bindings

    def binding(self, position: int) -> Bound | None:
        """Return the rule of a piece, None where it has none."""
        return self._bindings.get(self._indices[position])

    def check(self, step: Step, whole: bool = False) -> None:
        """Refuse arrays that do not fit, with `whole` also parts of a piece.

        Raises
        ------
        PushRejectedError
            Naming the parameter.
        """
        for item in step.items:
            if item.ids is not None:
                raise PushRejectedError(
                    f"{len(item.ids)} rows by their ids were sent to "
                    f"{self._named(item.position)}, which is no table; nothing was "
                    f"applied, send the elements of the array instead"
                )
            if not self._fits(item, step.kind, whole):
                raise PushRejectedError(
                    f"{item.data.shape} elements of {item.data.dtype} at {item.start} "
                    f"do not fit {self._named(item.position)}; nothing was applied"
                )

    def _fits(self, item: Item, kind: str, whole: bool) -> bool:
        if not 0 <= item.position < len(self._pieces):
            return False
        piece, data = self._pieces[item.position], item.data
        dtypes = self._computed if kind in (GRADIENT, MODEL) else self._dtypes
        return (
            data.dtype == dtypes[item.position]
            and data.ndim == 1
            and data.flags.c_contiguous
            and 0 <= item.start <= piece.size - len(data)
            and not (whole and len(data) != piece.size)
        )

    def _named(self, position: int) -> str:
        if not 0 <= position < len(self._pieces):
            return f"piece {position} of a shard of {len(self._pieces)}"
        piece = self._pieces[position]
        name = piece.parameter.name[:60]
        return f"the {piece.size} elements of {name!r} ({piece.parameter.dtype})"

    def step(self, step: Step, counts: Array, *, fused: bool = False) -> Operations:
        """Return the operations of a step that is an update of its own.

        `counts` has the steps that each piece has taken.

        Where it was not looked for NaN and infinity yet, that is done here, or with
        `fused` by those operations.
        """
        self.check(step)
        # A product may be infinite where the gradient is not.
        fused = fused and step.kind == GRADIENT and step.weight == 1.0
        if step.check and not fused:
            self._look(step)
        planned = []
        for item in step.items:
            if step.kind == GRADIENT:
                data = _scaled(item.data, step.weight)
                op = self._gradient(
                    item.position, data, item.start, counts, lr=step.lr, check=fused
                )
            else:
                op = PieceUpdate(item.data, item.start, replace=step.kind != ADD)
            planned.append((item.position, op))
        return planned

    def whole(
        self, tick: Tick, arrays: Mapping[int, Array], counts: Array
    ) -> list[Whole] | None:
        """Return the updates of gradients for whole pieces, in one part each.

        None for what is not as simple, and what is refused.
        """
        if tick.kind != GRADIENT and (arrays or not tick.run):
            return None
        planned: list[Whole] = []
        for position, data in arrays.items():
            if (
                data.dtype != self._computed[position]
                or data.shape != self._shapes[position]
                or not data.flags.c_contiguous
            ):
                return None
            rule = self._bindings.get(self._indices[position])
            if rule is None:
                return None
            scalars = rule.scalars(counts.item(position) + 1, tick.lr)
            planned.append((position, rule, _scaled(data, tick.weight), scalars))
        return planned

    def round(
        self, reduced: Mapping[int, Array | Formed], kind: str, counts: Array
    ) -> Operations:
        """Return the operations of a complete round."""
        planned = []
        for position in sorted(reduced):
            data = reduced[position]
            if kind == GRADIENT:
                op = self._gradient(position, data, 0, counts, lr=None)
            else:
                op = PieceUpdate(data, replace=True)
            planned.append((position, op))
        return planned

    def _look(self, step: Step) -> None:
        """Refuse arrays with NaN or infinity."""
        for item in step.items:
            binding = self.binding(item.position)
            # The rule's look is kept on disk, as its loops are.
            look = finite if binding is None else binding.is_finite
            if not look(item.data):
                name = self._pieces[item.position].parameter.name
                raise PushRejectedError(
                    f"the {step.kind} of {name[:60]!r} has NaN or Inf; nothing was "
                    f"applied"
                )

    def _gradient(
        self,
        position: int,
        data: Array | Formed,
        start: int,
        counts: Array,
        *,
        lr: float | None,
        check: bool = False,
    ) -> PieceUpdate:
        binding = self.binding(position)
        if binding is None:
            name = self._pieces[position].parameter.name
            raise NoOptimizerError(
                f"parameter {name!r} has no optimizer, so a gradient cannot be "
                f"applied; give create(optimizer=...) one, or use add or assign"
            )
        scalars = binding.scalars(counts.item(position) + 1, lr)
        return PieceUpdate(data, start, binding, scalars, check=check)


def count(planned: Operations, counts: Array) -> None:
    """Note the optimizer steps of planned operations, one per piece they touch."""
    for position in {p for p, op in planned if op.binding is not None}:
        counts[position] += 1


def _scaled(data: Array, weight: float) -> Array:
    if weight == 1.0:
        return data
    with np.errstate(all="ignore"):
        scaled: Array = np.multiply(data, weight, dtype=data.dtype)
    return scaled

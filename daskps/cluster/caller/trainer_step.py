"""What one step of a trainer brings: arrays and rows, and what is said of them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.caller.routes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.finite_check import FiniteCheck
    from daskps.cluster.caller.row_routes import RowsGiven
    from daskps.typing import Array


class TrainerStep(NamedTuple):
    """What one step of a trainer brings."""

    #: Flat arrays by parameter index.
    arrays: Mapping[int, Array]
    weight: float = 1.0
    #: Of tables.
    rows: Sequence[RowsGiven] = ()
    #: Who looks for NaN and Inf in the arrays on their way, where nobody has: at the
    #: latest before they take a message.
    look: FiniteCheck | None = None
    #: What arrays and rows are, where there are any.
    of: str = GRADIENT
    #: What a codec has made of the arrays, by shard and position of the piece.
    words: Mapping[tuple[int, int], Array] | None = None
    #: What these do not say, by parameter index: left over for the next gradient.
    left: Mapping[int, Array] = MappingProxyType({})

    @property
    def sent(self) -> Mapping[Any, Array]:
        """What goes to the shards."""
        return self.arrays if self.words is None else self.words

    def copied(self) -> TrainerStep:
        """Return the same in arrays that no caller has."""
        arrays = {index: array.copy() for index, array in self.arrays.items()}
        return self._replace(arrays=arrays, rows=[one.copied() for one in self.rows])


#: What ends a step that brings no more.
NO_MORE = TrainerStep({})

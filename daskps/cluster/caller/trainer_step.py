"""Steps of a trainer: their arrays and rows, and the facts about these."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps.cluster.caller.routes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.caller.finite_check import FiniteCheck
    from daskps.cluster.caller.row_routes import RowBatch
    from daskps.typing import Array


class TrainerStep(NamedTuple):
    """One step of a trainer: its arrays and rows."""

    #: Flat arrays by parameter index.
    arrays: Mapping[int, Array]
    weight: float = 1.0
    #: Rows of tables.
    rows: Sequence[RowBatch] = ()
    #: A look for NaN and Inf in the arrays on their way, if nobody has looked: at the
    #: latest before a message takes them.
    look: FiniteCheck | None = None
    #: The kind of the arrays and rows, where there are any.
    of: str = GRADIENT
    #: The words that a codec has made of the arrays, by shard and position of the
    #: piece.
    words: Mapping[tuple[int, int], Array] | None = None
    #: By parameter index the rest that the words do not say, for the next gradient.
    left: Mapping[int, Array] = MappingProxyType({})

    @property
    def sent(self) -> Mapping[Any, Array]:
        """The arrays or words that go to the shards."""
        return self.arrays if self.words is None else self.words

    def copied(self) -> TrainerStep:
        """Return the same in arrays that no caller has."""
        arrays = {index: array.copy() for index, array in self.arrays.items()}
        return self._replace(arrays=arrays, rows=[one.copied() for one in self.rows])


#: An empty step, which ends a clock that brings no more.
NO_MORE = TrainerStep({})

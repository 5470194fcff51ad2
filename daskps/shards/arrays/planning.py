"""From the arrays of a step or a round to operations on the weights.

Everything that can be wrong with them is found here, before the first byte is written:
an array that does not fit, a parameter without an optimizer, a rule that raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from daskps import config
from daskps.errors import NoOptimizerError, PushRejectedError
from daskps.kernels import finite
from daskps.layout.arrays import compute_dtype
from daskps.limits import MOST_PUSHED_ROWS
from daskps.optim import Bound, BoundFunction
from daskps.shards.arrays import by_function
from daskps.shards.arrays.operations import Formed, PieceUpdate, overflows, scaled
from daskps.shards.arrays.row_planning import check_rows, each_once
from daskps.shards.arrays.rows import RowUpdate
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    GRADIENT,
    MODEL,
    REMOVE,
    Item,
    Step,
    Tick,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.layout.parameters import Parameter, Piece
    from daskps.layout.tables import Table, TablePiece
    from daskps.typing import Array


_NO_WEIGHTS = np.empty(0)


class Bindings(Protocol):
    """Update rules by parameter index: a mapping, or what makes them when asked."""

    def get(self, index: int, /) -> Bound | None:
        """Return the rule of a parameter, None where it has none."""


#: Operations, each with the position of its piece; those of tables come after the others.
Operations = list[tuple[int, PieceUpdate | RowUpdate]]
#: The gradient of a whole piece: position, rule, array and what the rule has prepared.
Whole = tuple[int, "Bound", "Array", tuple[float, ...]]


class UpdatePlanner:
    """Plans updates of one shard's weights.

    Parameters
    ----------
    pieces : sequence of Piece
        The pieces of the shard.
    bindings : Bindings
        The update rule of each index of a parameter or table that has one.
    tables : sequence of (TablePiece, callable or None), default ()
        Its pieces of tables, after `pieces`; of any ids with what finds rows of ids.
    cache_dir : str, optional
        Where compiled functions are kept.
    factors : (sequence of memoryview, memoryview)
        Of both records the factors of learning rates, as words, and the flip word.
    epoch : callable, optional
        Returns the epoch of the run in progress, None where there is none.
    weights : callable, optional
        Returns the weights of a piece, for rules that are functions of them.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        bindings: Bindings,
        tables: Sequence[tuple[TablePiece, Callable[[Array], Array] | None]] = (),
        cache_dir: str | None = None,
        *,
        factors: tuple[Sequence[memoryview[int]], memoryview[int]],
        epoch: Callable[[], int | None] = lambda: None,
        weights: Callable[[int], Array] = lambda _: _NO_WEIGHTS,
    ) -> None:
        (self._factors, self._flip), self._weights = factors, weights
        self._cache_dir, self._epoch = cache_dir, epoch
        self._pieces, self._tables = pieces, [piece for piece, _ in tables]
        self._finds = dict(enumerate((find for _, find in tables), len(pieces)))
        whole: list[Parameter | Table] = [piece.parameter for piece in pieces]
        whole += [piece.table for piece in self._tables]
        names = [one.dtype for one in whole]
        self._indices = [one.index for one in whole]
        self._names = [one.name for one in whole]
        #: Of weights, which `add` and `assign` take, and of gradients and models.
        self._dtypes = [np.dtype(name) for name in names]
        self._computed = [np.dtype(compute_dtype(name)) for name in names]
        self._shapes = [(piece.size,) for piece in pieces]
        self._bindings = bindings

    def binding(self, position: int) -> Bound | None:
        """Return the rule of a piece, None where it has none."""
        return self._bindings.get(self._indices[position])

    def epoch_of(self, said: Step | Tick | None = None) -> int | None:
        """Return the epoch of a step or round, for rules that go by it alone.

        Outside of runs nobody counts epochs.
        """
        return self._epoch() if said is None or said.run else None

    def check(self, step: Step, whole: bool = False) -> None:
        """Refuse arrays and rows that do not fit, with `whole` also parts of a piece.

        Raises
        ------
        PushRejectedError
            Naming the parameter.
        """
        for item in step.items:
            if item.ids is not None:
                self._check_rows(item, step.items, step.kind)
            elif not self._fits(item, step.kind, whole):
                raise PushRejectedError(
                    f"{item.data.shape} elements of {item.data.dtype} at {item.start} "
                    f"do not fit {self._named(item.position)}; nothing was applied"
                )

    def _check_rows(self, item: Item, items: Sequence[Item], kind: str) -> None:
        ordinal = item.position - len(self._pieces)
        if not 0 <= ordinal < len(self._tables):
            raise PushRejectedError(
                f"rows by their ids were sent to {self._named(item.position)}, which "
                f"is no table; nothing was applied, send the elements of the array "
                f"instead"
            )
        if len(items) > 1 and [i.position for i in items].count(item.position) > 1:
            raise PushRejectedError(
                f"{self._named(item.position)} is named twice in one step; nothing was "
                f"applied, send all of its rows together"
            )
        kinds = self._computed if kind in (GRADIENT, MODEL) else self._dtypes
        check_rows(item, self._tables[ordinal], kinds[item.position], kind)

    def _fits(self, item: Item, kind: str, whole: bool) -> bool:
        if not 0 <= item.position < len(self._pieces) or kind == REMOVE:
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
        n, n_all = len(self._pieces), len(self._names)
        if not 0 <= position < n_all:
            return f"piece {position} of a shard of {n_all}"
        if position >= n:
            of = self._tables[position - n]
            return f"the {of.n_rows} rows of table {of.table.name[:60]!r}"
        piece = self._pieces[position]
        name = piece.parameter.name[:60]
        return f"the {piece.size} elements of {name!r} ({piece.parameter.dtype})"

    def step(
        self, step: Step, counts: Array, *, fused: bool = False, alone: bool = False
    ) -> Operations:
        """Return the operations of a step that is an update of its own.

        `counts` has the steps that each piece has taken.

        Where it was not looked for NaN and infinity yet, that is done here, or with
        `fused` by those operations; of rows where it is `alone`, as they can be rolled
        back.
        """
        self.check(step)
        # A product may be infinite where the gradient is not.
        fused = fused and step.kind == GRADIENT and step.weight == 1.0
        if step.check and not fused:
            for item in step.items:
                if item.ids is None:
                    self._look(item, step.kind)
        planned: Operations = []
        for item in step.items:
            if item.ids is not None:
                look = step.check, alone
                planned.append((item.position, self._rows(item, step, counts, look)))
                continue
            if step.kind == GRADIENT:
                data = self._weighed(item.position, item.data, step.weight)
                op = self._gradient(
                    item.position, data, item.start, counts, said=step, check=fused
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
        if tick.kind != GRADIENT and arrays:
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
            if rule is None or isinstance(rule, BoundFunction):
                return None
            epoch = self.epoch_of(tick) if rule.goes_by_epoch else None
            word = self._factors[self._flip[0] & 1][position]
            scalars = rule.scalars(counts.item(position) + 1, tick.lr, epoch, word)
            if rule.ranks:
                if not tick.run:
                    return None
                scalars = rule.of_rank(scalars, tick.rank)
            data = self._weighed(position, data, tick.weight)
            planned.append((position, rule, data, scalars))
        return planned

    def rows(
        self, tick: Tick, items: Sequence[Item], counts: Array, *, check: bool
    ) -> Operations:
        """Return the updates of rows of a step that is alone; with `check` they look.

        Raises
        ------
        PushRejectedError, NoOptimizerError
            For what does not fit.
        """
        planned: Operations = []
        for item in items:
            self._check_rows(item, items, tick.kind)
            planned.append(
                (item.position, self._rows(item, tick, counts, (check, True)))
            )
        return planned

    def _rows(
        self, item: Item, step: Step | Tick, counts: Array, look: tuple[bool, bool]
    ) -> RowUpdate:
        """Return the update of rows: repeats come to one, and are no rows twice.

        `look` says whether they must be looked at, and whether the update may do that.
        """
        position, kind = item.position, step.kind
        piece = self._tables[position - len(self._pieces)]
        find = self._finds[position]
        to = None if find is None or item.ids is None else find(item.ids)
        ids, data, at, to = each_once(item, piece, kind, self._cache_dir, numbers=to)
        if len(ids) > MOST_PUSHED_ROWS:
            raise PushRejectedError(
                f"{len(ids)} rows of {self._named(position)} in one {kind}: a shard "
                f"takes {MOST_PUSHED_ROWS} at most; nothing was applied, use more shards, or "
                f"send them in parts"
            )
        if kind == REMOVE:
            return RowUpdate(ids, data, forget=True, rows=to, by=step.producer)
        # Sums and products may be infinite where what was pushed is not.
        is_as_pushed = (
            step.weight == 1.0 and len(ids) == len(item.data) // data.shape[1]
        )
        fused = all(look) and is_as_pushed
        if kind == GRADIENT and step.weight != 1.0:
            data = scaled(data, step.weight)
        # Sums are finite only of what is; there are fewer of them.
        looks = (look[0] and not fused) or not (is_as_pushed or kind == ASSIGN)
        if looks and not self._is_finite(position, data):
            if look[0]:
                self._look(item, kind)
            self._refuse_overflow(position, item.data)
        if kind != GRADIENT:
            replace, by = kind == ASSIGN, step.producer
            return RowUpdate(ids, data, at, None, (), replace, fused, rows=to, by=by)
        binding = self._bindings.get(self._indices[position])
        if binding is None:
            raise self._no_rule(position)
        epoch = self.epoch_of(step) if binding.goes_by_epoch else None
        word = self._factors[self._flip[0] & 1][position]
        scalars = binding.scalars(counts.item(position) + 1, step.lr, epoch, word)
        by = step.producer
        return RowUpdate(ids, data, at, binding, scalars, check=fused, rows=to, by=by)

    def each_once(self, item: Item) -> tuple[Array, Array, Array | None]:
        """Return ids of rows, none twice, and their data; see `row_planning`."""
        piece = self._tables[item.position - len(self._pieces)]
        return each_once(item, piece, GRADIENT, self._cache_dir)[:3]

    def check_rules(self, step: Step) -> None:
        """Refuse gradients of rows without an optimizer.

        Raises
        ------
        NoOptimizerError
            Naming the table.
        """
        for item in step.items:
            if item.ids is not None and self.binding(item.position) is None:
                raise self._no_rule(item.position)

    def round(
        self,
        reduced: Mapping[int, Array | Formed],
        kind: str,
        counts: Array,
        rows: Mapping[int, tuple[Array, Array]],
        *,
        check: bool = False,
    ) -> Operations:
        """Return the operations of a complete round, of whose rows there are sums.

        With `check` they look whether the sums are finite.
        """
        planned: Operations = []
        for position in sorted(reduced):
            data = reduced[position]
            if kind == GRADIENT:
                op = self._gradient(position, data, 0, counts, check=check)
            else:
                op = PieceUpdate(data, replace=kind == MODEL, check=check)
            planned.append((position, op))
        for position in sorted(rows):
            find, (ids, data) = self._finds[position], rows[position]
            to = None if find is None else find(ids)
            if kind != GRADIENT:
                planned.append((position, RowUpdate(ids, data, check=check, rows=to)))
                continue
            binding = self.binding(position)
            if binding is None:
                raise self._no_rule(position)
            epoch = self.epoch_of() if binding.goes_by_epoch else None
            word = self._factors[self._flip[0] & 1][position]
            scalars = binding.scalars(counts.item(position) + 1, None, epoch, word)
            how = binding, scalars, False, check
            update = RowUpdate(ids, data, None, *how, rows=to)
            planned.append((position, update))
        return planned

    def look(self, step: Step) -> None:
        """Refuse arrays and rows of a step with NaN or infinity.

        Raises
        ------
        PushRejectedError
            Naming the parameter or table.
        """
        for item in step.items:
            self._look(item, step.kind)

    def _look(self, item: Item, kind: str) -> None:
        """Refuse an array with NaN or infinity."""
        if not self._is_finite(item.position, item.data):
            name = self._names[item.position]
            raise PushRejectedError(
                f"the {kind} of {name[:60]!r} has NaN or Inf; nothing was applied"
            )

    def _weighed(self, position: int, data: Array, weight: float) -> Array:
        """Return a gradient times its weight, or refuse what overflows."""
        if weight == 1.0:
            return data
        product = scaled(data, weight)
        if weight > 1.0 and not self._is_finite(position, product):
            self._refuse_overflow(position, data)
        return product

    def _refuse_overflow(self, position: int, given: Array) -> None:
        """Refuse what is not finite, if what was pushed for it is."""
        if config.check_finite() and self._is_finite(position, given):
            raise overflows(self._names[position], given.dtype)

    def _is_finite(self, position: int, data: Array) -> bool:
        binding = self.binding(position)
        # The rule's look is kept on disk, as its loops are.
        look = finite if binding is None else binding.is_finite
        return look(data.reshape(-1))

    def _gradient(
        self,
        position: int,
        data: Array | Formed,
        start: int,
        counts: Array,
        *,
        said: Step | None = None,
        check: bool = False,
    ) -> PieceUpdate:
        binding = self.binding(position)
        if binding is None:
            raise self._no_rule(position)
        lr = None if said is None else said.lr
        epoch = self.epoch_of(said) if binding.goes_by_epoch else None
        word = self._factors[self._flip[0] & 1][position]
        scalars = binding.scalars(counts.item(position) + 1, lr, epoch, word)
        if isinstance(binding, BoundFunction):
            what = binding, self._pieces[position], PieceUpdate(data, start)
            weights, number = self._weights(position), counts.item(position) + 1
            return by_function.update_of(*what, weights=weights, step=number)
        if binding.ranks:
            rank = said.rank if said is not None and said.run else -1
            scalars = binding.of_rank(scalars, rank)
        return PieceUpdate(data, start, binding, scalars, check=check)

    def _no_rule(self, position: int) -> NoOptimizerError:
        return NoOptimizerError(
            f"parameter {self._names[position]!r} has no optimizer, so a gradient "
            f"cannot be applied; give create(optimizer=...) one, or use add or assign"
        )

"""From the arrays of a step or a round to operations on the weights.

Everything that can be wrong with them is found here, before the first byte is written:
an array that does not fit, a parameter without an optimizer, a rule that raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from daskps import config
from daskps.backend import on_host
from daskps.errors import NoOptimizerError, PushRejectedError
from daskps.layout.arrays import compute_dtype
from daskps.limits import MOST_PUSHED_ROWS
from daskps.optim import Bound, BoundFunction
from daskps.shards import run_record
from daskps.shards.arrays import by_function
from daskps.shards.arrays.operations import Formed, PieceUpdate, overflows, scaled
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.arrays.row_planning import check_rows, each_once
from daskps.shards.memory.growth import look_up
from daskps.shards.steps import (
    ADD,
    ASSIGN,
    GRADIENT,
    MODEL,
    REMOVE,
    Item,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from daskps.layout.parameters import Parameter
    from daskps.layout.tables import Table
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.growth import Operations
    from daskps.shards.memory.segment import Segment
    from daskps.typing import Array


class Bindings(Protocol):
    """Update rules by parameter index: a mapping, or what makes them when asked.

    In a host and its deputies it is :class:`~daskps.cluster.host.rules.Rules`.
    """

    def get(self, index: int, /) -> Bound | None:
        """Return the rule of a parameter, None where it has none."""


class UpdatePlanner:
    """Plans updates of one shard's weights.

    Parameters
    ----------
    segment : Segment
        The memory of the shard.
    bindings : Bindings
        The update rule of each index of a parameter or table that has one.
    """

    def __init__(self, segment: Segment, bindings: Bindings) -> None:
        self._segment, self._bindings = segment, bindings
        self._cache_dir = segment.cache_dir
        pieces, tables = segment.pieces, [table.piece for table in segment.tables]
        self._pieces, self._tables = pieces, tables
        whole: list[Parameter | Table] = [piece.parameter for piece in pieces]
        whole += [piece.table for piece in tables]
        names = [one.dtype for one in whole]
        self._indices = [one.index for one in whole]
        self._names = [one.name for one in whole]
        #: Of weights, which `add` and `assign` take, and of gradients and models.
        self._dtypes = [np.dtype(name) for name in names]
        self._computed = [np.dtype(compute_dtype(name)) for name in names]
        #: The rules that were found, by position: bindings make them when asked first.
        self._rules: dict[int, Bound] = {}
        #: Plans of gradients of whole pieces, where scalars follow from the number of
        #: an update: the rule, and the dtype and shape of arrays.
        self._kept: dict[int, tuple[Bound, np.dtype[Any], tuple[int]]] = {}

    def binding(self, position: int) -> Bound | None:
        """Return the rule of a piece, None where it has none."""
        return self._bindings.get(self._indices[position])

    def brought(self, step: Step, *, of_round: bool = False) -> Step:
        """Return a step with its arrays on the device, and rows of a round in host memory.

        Other rows in host memory go there when it is known which of them are needed.
        """
        items, bring = [], self._segment.payload.bring
        for item in step.items:
            data: Any = item.data
            if item.ids is None or not isinstance(data, np.ndarray):
                data = bring(data)
                if item.ids is not None and of_round:
                    data = on_host(data)
            items.append(item._replace(data=data))
        return step._replace(items=items, owned=False)

    def check(self, step: Step, whole: bool = False) -> None:
        """Refuse arrays and rows that do not fit, with `whole` also parts of a piece.

        Raises
        ------
        PushRejectedError
            Naming the parameter.
        """
        kind, sizes = step.kind, self._segment.sizes
        dtypes = self._computed if kind in (GRADIENT, MODEL) else self._dtypes
        n = 0 if kind == REMOVE else len(sizes)
        for item in step.items:
            position, start, data, ids, _ = item
            if ids is not None:
                ordinal = position - len(sizes)
                if not 0 <= ordinal < len(self._tables) or (
                    len(step.items) > 1
                    and [i.position for i in step.items].count(position) > 1
                ):
                    self._refuse_rows(position)
                check_rows(item, self._tables[ordinal], dtypes[position], kind)
            elif (
                not 0 <= position < n
                or data.dtype != dtypes[position]
                or data.ndim != 1
                or not data.flags.c_contiguous
                or not 0 <= start <= sizes[position] - len(data)
                or (whole and len(data) != sizes[position])
            ):
                raise PushRejectedError(
                    f"{data.shape} elements of {data.dtype} at {start} do not fit "
                    f"{self._named(position)}; nothing was applied"
                )

    def _refuse_rows(self, position: int) -> NoReturn:
        """Say why rows are no part of a step, where a table is named once."""
        if not 0 <= position - len(self._pieces) < len(self._tables):
            raise PushRejectedError(
                f"rows by their ids were sent to {self._named(position)}, which is no "
                f"table; nothing was applied, send the elements of the array instead"
            )
        raise PushRejectedError(
            f"{self._named(position)} is named twice in one step; nothing was applied, "
            f"send all of its rows together"
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

    def plan(
        self, step: Step, record: Record, *, fused: bool = False, alone: bool = False
    ) -> Operations:
        """Return the operations of a step that is an update of its own.

        `record` has the steps that each piece has taken.

        Where it was not looked for NaN and infinity yet, that is done here, or with
        `fused` by those operations; of rows where it is `alone`, as they can be rolled
        back.
        """
        if self._segment.payload.device is not None:
            step = self.brought(step)
        if (planned := self._plan_kept(step, record)) is not None:
            return planned
        self.check(step)
        weighs = step.kind == GRADIENT and step.weight != 1.0
        # A product may be infinite where the gradient is not.
        fused = fused and step.kind == GRADIENT and not weighs
        if step.check and not fused:
            for item in step.items:
                if item.ids is None:
                    self._look(item, step.kind)
        planned = []
        for item in step.items:
            position, start, data, ids, _ = item
            update: PieceUpdate | RowUpdate
            if ids is not None:
                update = self._rows(item, step, record, (step.check, alone))
            else:
                if weighs:
                    data = self._weighed(position, data, step.weight)
                update = self._array((position, start, data), step, record, fused)
            planned.append((position, update))
        return planned

    def _plan_kept(self, step: Step, record: Record) -> Operations | None:
        """Return the operations of gradients of whole pieces whose plans are kept.

        None for any other step, and where arrays do not fit.
        """
        if step.kind != GRADIENT or step.check or step.weight != 1.0:
            return None
        kept, lr, steps, factors = self._kept, step.lr, record.steps, record.factors
        planned: Operations = []
        for position, start, data, ids, _ in step.items:
            plan = kept.get(position)
            if plan is None or ids is not None or start:
                return None
            rule, dtype, shape = plan
            if (
                data.dtype != dtype
                or data.shape != shape
                or not data.flags.c_contiguous
            ):
                return None
            scalars = rule.scalars(steps[position] + 1, lr, None, factors[position])
            # As `PieceUpdate(...)`, at half of what that takes.
            values = data, 0, rule, scalars, False, False
            planned.append((position, tuple.__new__(PieceUpdate, values)))
        return planned

    def _array(
        self,
        item: tuple[int, int, Array | Formed],
        said: Step,
        record: Record,
        check: bool,
    ) -> PieceUpdate:
        """Return the update of a piece by what a step, or a round, brings for it."""
        position, start, data = item
        rule, scalars = self._prepare(position, record, said)
        if isinstance(rule, BoundFunction):
            given, segment = PieceUpdate(data, start), self._segment
            weights = segment.weights_of(segment.current, position)
            piece, step = self._pieces[position], record.steps[position] + 1
            of, payload = (rule, piece, given), segment.payload
            with np.errstate(all="ignore"):
                return by_function.update_of(
                    *of, weights=weights, step=step, payload=payload
                )
        replace = rule is None and said.kind != ADD
        values = data, start, rule, scalars, replace, check
        return tuple.__new__(PieceUpdate, values)

    def _prepare(
        self, position: int, record: Record, said: Step
    ) -> tuple[Bound | None, tuple[float, ...]]:
        """Return the rule for gradients of a piece, and its scalars for the next update.

        Raises
        ------
        NoOptimizerError
            For gradients of a piece that has none.
        """
        if said.kind != GRADIENT:
            return None, ()
        rule = self._rules.get(position) or self._find_rule(position)
        epoch, word = None, record.factors[position]
        if rule.goes_by_epoch and said.run:  # outside of runs nobody counts epochs
            epoch = run_record.epoch_of(self._segment.current)
        scalars = rule.scalars(record.steps[position] + 1, said.lr, epoch, word)
        if rule.ranks:
            scalars = rule.of_rank(scalars, said.rank if said.run else -1)
        return rule, scalars

    def _find_rule(self, position: int) -> Bound:
        """Return the rule of a piece, and keep it; refuse gradients where it has none."""
        rule = self.binding(position)
        if rule is None:
            raise NoOptimizerError(
                f"parameter {self._names[position]!r} has no optimizer, so a gradient "
                f"cannot be applied; give create(optimizer=...) one, or use add or assign"
            )
        self._rules[position] = rule
        n, is_function = len(self._pieces), isinstance(rule, BoundFunction)
        if position < n and not (rule.goes_by_epoch or rule.ranks or is_function):
            shape = (self._pieces[position].size,)
            self._kept[position] = rule, self._computed[position], shape
        return rule

    def _rows(
        self, item: Item, step: Step, record: Record, look: tuple[bool, bool]
    ) -> RowUpdate:
        """Return the update of rows: repeats come to one, and are no rows twice.

        `look` says whether they must be looked at, and whether the update may do that.
        """
        position, kind = item.position, step.kind
        piece = self._tables[position - len(self._pieces)]
        table = self._segment.tables[position - len(self._pieces)]
        to = None
        if table.unbounded is not None and item.ids is not None:
            to = look_up(self._segment, table, item.ids)
        given: Any = item.data
        payload = where = self._segment.payload
        if where.device is not None and isinstance(given, np.ndarray):
            payload = NUMPY
        kept_in = self._cache_dir
        found = each_once(item, piece, kind, kept_in, numbers=to, payload=payload)
        ids, data, at, to = found
        if len(ids) > MOST_PUSHED_ROWS:
            raise PushRejectedError(
                f"{len(ids)} rows of {self._named(position)} in one {kind}: a shard "
                f"takes {MOST_PUSHED_ROWS} at most; nothing was applied, use more shards, or "
                f"send them in parts"
            )
        if kind == REMOVE:
            return RowUpdate(ids, data, forget=True, rows=to, by=step.producer)
        # Sums and products may be infinite where what was pushed is not.
        named = item.ids
        is_as_pushed = (
            step.weight == 1.0 and named is not None and len(ids) == len(named)
        )
        fused = all(look) and is_as_pushed
        if kind == GRADIENT and step.weight != 1.0:
            data = scaled(data, step.weight, payload)
        # Sums are finite only of what is; there are fewer of them.
        checks = (look[0] and not fused) or not (is_as_pushed or kind == ASSIGN)
        if checks and not self._is_finite(position, data):
            if look[0]:
                self._look(item, kind)
            self._refuse_overflow(position, item.data)
        rule, scalars = self._prepare(position, record, step)
        how = rule, scalars, kind == ASSIGN, fused
        if payload is not where:
            data, at = where.bring(data if at is None else data[at]), None
        return RowUpdate(ids, data, at, *how, rows=to, by=step.producer)

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
            if item.ids is not None:
                self._find_rule(item.position)

    def round(
        self,
        said: Step,
        reduced: Mapping[int, Array | Formed],
        rows: Mapping[int, tuple[Array, Array]],
        record: Record,
        *,
        check: bool = False,
    ) -> Operations:
        """Return the operations of a complete round, which `said` speaks for.

        Of its arrays and rows there are sums. With `check` they look whether these are
        finite.
        """
        planned: Operations = []
        for position in sorted(reduced):
            data = reduced[position]
            checks = check and not isinstance(data, Formed)
            update = self._array((position, 0, data), said, record, checks)
            planned.append((position, update))
        for position in sorted(rows):
            ids, data = rows[position]
            table = self._segment.tables[position - len(self._pieces)]
            to = None
            if table.unbounded is not None:
                to = look_up(self._segment, table, ids)
            if self._segment.payload.device is not None:
                data = self._segment.payload.bring(data)
            rule, scalars = self._prepare(position, record, said)
            of_rows = RowUpdate(ids, data, None, rule, scalars, check=check, rows=to)
            planned.append((position, of_rows))
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
        product = scaled(data, weight, self._segment.payload)
        if weight > 1.0 and not self._is_finite(position, product):
            self._refuse_overflow(position, data)
        return product

    def _refuse_overflow(self, position: int, given: Array) -> None:
        """Refuse what is not finite, if what was pushed for it is."""
        if config.check_finite() and self._is_finite(position, given):
            error = overflows(self._names[position], given.dtype)
            error.add_note(
                "shards with other rows and parameters may have applied theirs"
            )
            raise error

    def _is_finite(self, position: int, data: Any) -> bool:
        binding, payload = self.binding(position), self._segment.payload
        # The rule's look is kept on disk, as its loops are.
        look = payload.is_finite if binding is None else binding.is_finite
        if payload.device is not None and isinstance(data, np.ndarray):
            look = NUMPY.is_finite  # rows that are not there yet
        found: bool = look(data.reshape(-1))
        return found

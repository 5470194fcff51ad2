"""The loops of an update rule over rows of tables."""
# ruff: noqa: PLR0917  (compiled loops take positional arguments only: weights,
# gradient, slots, scalars; the methods around them keep that order)

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels.finite import finite
from daskps.kernels.row_log import (
    TableRows,
    UndoLog,
    check_inside,
    in_blocks,
    outside,
)
from daskps.kernels.row_moves import NOWHERE
from daskps.kernels.rule_kernel import FixedRows, RuleForm, RuleKernel, Scalars

if TYPE_CHECKING:
    from daskps.kernels.compiled import Module
    from daskps.kernels.rule_kernel import Arrays
    from daskps.typing import Array


class RowLoops(RuleKernel):
    """The loops of an update rule over rows, for weights of one dtype.

    Parameters
    ----------
    module : Module
        The generated module.
    form : RuleForm
        What its loops take.
    """

    def __init__(self, module: Module, form: RuleForm) -> None:
        super().__init__(form)
        self.module = module
        #: Whether a gradient has no NaN and no infinity; its loop is kept with the rule's.
        self.is_finite = partial(finite, cache_dir=module.cache_dir)

    def rows(
        self,
        table: TableRows,
        ids: Array,
        at: Array | None,
        g: Array,
        scalars: Scalars,
        log: UndoLog,
        *,
        check: bool = False,
    ) -> bool:
        """Update some rows of weights and slots in place, and touch no other.

        Each of them has the bits that `inplace` would give it. Their old values are put
        into a log, 16 rows at a time, where they count before the rows change.

        Parameters
        ----------
        table : TableRows
            Weights of shape (n_rows, dim) and `dtype`; slots of as many rows, of
            one number each where the rule says so, and `compute_dtype`. Contiguous,
            aligned and writable.
        ids : ndarray, shape (k,), int64
            The rows, in any order. One that repeats is updated as often, one gradient
            after the other: those of one row are summed before.
        at : ndarray, shape (k,), int64, optional
            The gradient of row `ids[i]` is `g[at[i]]`; `g[i]` without it.
        g : ndarray, shape (n, dim), `compute_dtype` or `dtype`
            Gradients; contiguous. Like `ids` and `at` they may be read-only and start
            at any address.
        scalars : tuple of float
            What `Bound.scalars` returns.
        log : UndoLog
            Takes k entries from `begin` on: the number of the row, which is its id
            less that of the first row, and copies of weights and slots.
        check : bool, default False
            Whether to look for NaN and infinity in the gradients of these rows.

        Returns
        -------
        bool
            False where `check` found one. Rows before that have changed:
            `row_log.restore` puts them back, as many as the word of the log says.

        Raises
        ------
        ValueError
            If an array is not as described, before anything is changed; or if an id
            or a position is outside, with rows before it changed as above.

        Notes
        -----
        `warm` does not compile this loop: `warm_rows` or the first call does.
        """
        places = self._check_rows(table, ids, at, g, log)
        loop: Any = self.module.function("rows")
        if self._is_wide:
            self.check_scalars(scalars)
            check_inside(table, ids, at, g)
            if check and not self.is_finite(g if at is None else g[at]):
                return False
        c = self._cast(scalars)
        if not self._is_wide:
            where = log.rows, log.w, *log.slots, log.word, log.begin, log.base
            what = table.w, table.first, ids, places, g, *table.slots
            done = loop(*what, *where, check, c)
            if done < 0:
                raise outside(ids, at, -1 - done, table)
            return bool(done == len(ids))

        def change(w: Array, given: Array, slots: Arrays) -> None:
            # Copies, which nobody else sees: their log is for nobody either.
            wide, numbers = w.astype(self.compute_dtype), np.arange(len(w))
            given = given.astype(self.compute_dtype, copy=False)
            unread = [np.empty_like(a) for a in (numbers, wide, *slots, numbers[:1])]
            loop(wide, 0, numbers, NOWHERE, given, *slots, *unread, 0, 0, False, c)
            with np.errstate(over="ignore"):
                w[:] = wide

        cache_dir = self.module.cache_dir
        in_blocks(table, ids, at, g, log, change, cache_dir=cache_dir)
        return True

    def fixed_rows(self, table: TableRows, log: UndoLog) -> FixedRows:
        """Return `rows` for a table and a log that stay where they are.

        They are checked once, here, which for few rows is most of the work; for float16
        in each call.

        Parameters
        ----------
        table, log
            As in `rows`; `base` and `begin` of the log come with each call.

        Returns
        -------
        callable
            Called with ids, positions, gradients, scalars, `base`, `begin` and `check`
            it does what `rows` does.

        Raises
        ------
        ValueError
            As `rows`, here or from the callable.
        """
        dtype, dim, room = self.dtype, table.w.shape[1], len(log.rows)
        self._check_rows(table, NOWHERE, None, np.empty((0, dim), dtype), log)
        # Compiled from the text that `kernels.rows.rows_source` builds.
        loop: Any = self.module.function("rows")
        w, slots, first, word = table.w, table.slots, table.first, log.word
        logs = log.rows, log.w, *log.slots
        latest: tuple[Scalars | None, Array] = None, np.empty(0)

        def update(
            ids: Array,
            at: Array | None,
            g: Array,
            scalars: Scalars,
            base: int,
            begin: int,
            check: bool,
        ) -> bool:
            nonlocal latest
            n = len(ids)
            usual = g.dtype is dtype and g.ndim == 2 and g.shape[1] == dim
            if self._is_wide or not (
                usual
                and 0 <= begin <= room - n
                and (at is None or (at.shape == (n,) and at.flags.c_contiguous))
            ):
                place = log._replace(base=base, begin=begin)
                return self.rows(table, ids, at, g, scalars, place, check=check)
            kept = latest
            if scalars is not kept[0]:
                kept = latest = scalars, self._cast(scalars)
            # The compiled function refuses all else that may be wrong with its arrays.
            where = *logs, word, begin, base, check, kept[1]
            places = NOWHERE if at is None else at
            done = loop(w, first, ids, places, g, *slots, *where)
            if done < 0:
                raise outside(ids, at, -1 - done, table)
            return bool(done == n)

        return update

    def warm_rows(self) -> None:
        """Compile, or load, the loop over rows.

        Raises
        ------
        TypeError
            If Numba cannot compile the update function.
        """
        self.module.function("rows")

    def _cast(self, scalars: Scalars) -> Array:
        """Return scalars in the compute dtype; their values were checked before."""
        if len(scalars) != self.n_scalars:
            self.check_scalars(scalars)
        return np.array(scalars, self.compute_dtype)

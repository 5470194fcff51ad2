"""The interface of a kernel, and the checks of the arguments that one usually gets."""
# ruff: noqa: PLR0913, PLR0917  (every loop takes the same five things)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from daskps.kernels.finite import finite
from daskps.kernels.inputs import check_input, check_output
from daskps.typing import Array

if TYPE_CHECKING:
    from daskps.kernels.compiled import Module
    from daskps.kernels.inputs import Shape

Arrays: TypeAlias = tuple[Array, ...]
Scalars: TypeAlias = tuple[float, ...]
#: An update of arrays that stay where they are, given a gradient and scalars.
Fixed: TypeAlias = Callable[[Array, Scalars], None]
#: An update of rows of a table that stays where it is, like its log: given ids, where
#: their gradients are, gradients, scalars, `base` and `begin` of the log, and `check`.
FixedRows: TypeAlias = Callable[
    [Array, Array | None, Array, Scalars, int, int, bool], bool
]

_LARGEST = {
    np.dtype(dtype): float(np.finfo(dtype).max) for dtype in (np.float32, np.float64)
}


class TableRows(NamedTuple):
    """The rows of a table that are here, and their slots."""

    w: Array
    slots: Arrays = ()
    #: Id of the first of them.
    first: int = 0


class UndoLog(NamedTuple):
    """Where the rows that change are kept as they were, an entry each."""

    #: Of each entry: which row, from 0; its weights, its slots.
    rows: Array
    w: Array
    slots: Arrays
    #: One word. It becomes `base` and the number of entries that count.
    word: Array
    base: int
    #: The first entry to use.
    begin: int = 0


class Kernel(ABC):
    """An update rule for arrays of one dtype; made by `build`.

    Notes
    -----
    Every element is computed alone and without fast-math, so the result has the
    same bits however the arrays are cut. The loops hold no GIL. The caller sees to it that
    no two threads update the same elements, and that no array overlaps another one in
    part. A kernel itself may be used by several threads.
    """

    #: Dtype of weights and gradients, and that of slots and arithmetic.
    dtype: np.dtype[Any]
    compute_dtype: np.dtype[Any]
    n_slots: int
    n_scalars: int
    #: Of each slot whether it has one number per row; None of a rule for arrays too.
    per_row: tuple[bool, ...] | None = None
    #: The generated module: its cache counters and its LLVM code.
    module: Module

    @abstractmethod
    def inplace(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        """Update weights and slots in place.

        Parameters
        ----------
        w : ndarray, shape (n,), `dtype`
            Weights; contiguous, aligned and writable, like the slots.
        g : ndarray, shape (n,), `compute_dtype` or `dtype`
            Gradient; contiguous. It may be read-only and start at any address.
        slots : tuple of ndarray, shape (n,), `compute_dtype`
            State, one array per slot.
        scalars : tuple of float
            The result of the rule's `prepare`.

        Raises
        ------
        ValueError
            If an array or the number of slots or scalars is not as described;
            nothing is changed.
        """

    @abstractmethod
    def publish(
        self,
        w_in: Array,
        w_out: Array,
        g: Array,
        slots: Arrays,
        scalars: Scalars,
        slots_out: Arrays | None = None,
        *,
        past: bool = False,
        check: bool = False,
    ) -> bool:
        """Write updated weights, and maybe slots, to other arrays.

        Parameters
        ----------
        w_in : ndarray, shape (n,), `dtype`
            Weights; not written.
        w_out : ndarray, shape (n,), `dtype`
            Where the new weights go; contiguous, aligned and writable.
        g : ndarray, shape (n,), `compute_dtype` or `dtype`
            Gradient; contiguous. It may be read-only and start at any address.
        slots : tuple of ndarray, shape (n,), `compute_dtype`
            State, one array per slot; updated in place without `slots_out`, else not
            written.
        scalars : tuple of float
            The result of the rule's `prepare`.
        slots_out : tuple of ndarray, shape (n,), `compute_dtype`, optional
            Where the new slots go; quickest where each starts at a multiple of 64
            bytes. They are written past the caches.
        past : bool, default False
            Whether to write weights past the caches too: for arrays larger than these.
            Without slots it is quick from any address; with slots it takes
            `slots_out`, and the same start within 64 bytes for them and `w_out`.
        check : bool, default False
            Whether to look for NaN and infinity in the gradient.

        Returns
        -------
        bool
            False where `check` found one. Then slots in place are as they were, and
            the arrays that were to be written hold anything.

        Raises
        ------
        ValueError
            As `inplace`.
        """

    def fixed(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None = None
    ) -> Fixed:
        """Return `publish` for arrays that stay where they are.

        They are checked once, here, which for a small shard is most of the work; for
        float16, and for slots to write that do not begin cache lines together, in
        each call.

        Parameters
        ----------
        w_in, w_out, slots, slots_out
            As in `publish`.

        Returns
        -------
        callable
            Called with a gradient and scalars it does what `publish` does.

        Raises
        ------
        ValueError
            As `inplace`, here or from the callable.
        """

        def update(g: Array, scalars: Scalars) -> None:
            self.publish(w_in, w_out, g, slots, scalars, slots_out)

        return update

    @abstractmethod
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
            The result of the rule's `prepare`.
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

        def update(
            ids: Array,
            at: Array | None,
            g: Array,
            scalars: Scalars,
            base: int,
            begin: int,
            check: bool,
        ) -> bool:
            place = log._replace(base=base, begin=begin)
            return self.rows(table, ids, at, g, scalars, place, check=check)

        return update

    @abstractmethod
    def warm_rows(self) -> None:
        """Compile, or load, the loop over rows.

        Raises
        ------
        TypeError
            If Numba cannot compile the update function.
        """

    @abstractmethod
    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        """Compile, or load, the loops that will be used now.

        Parameters
        ----------
        durable : bool, default False
            Whether `publish` will be called with `slots_out`, instead of without.
        past : bool, default False
            Whether that will be with `past` too, in the same way.

        Raises
        ------
        TypeError
            If Numba cannot compile the update function.
        """

    def is_finite(self, g: Array) -> bool:
        """Return whether a gradient has no NaN and no infinity.

        Parameters
        ----------
        g : ndarray
            As in `publish`. The loop for large ones is kept where those of the rule
            are.

        Returns
        -------
        bool
            True iff every element is finite.
        """
        return finite(g, cache_dir=self.module.cache_dir)

    def check_scalars(self, scalars: Scalars) -> None:
        """Refuse scalars that a loop cannot take.

        Parameters
        ----------
        scalars : tuple of float
            The result of the rule's `prepare`.

        Raises
        ------
        ValueError
            If there are more or fewer, or one does not fit into the dtype.
        """
        if len(scalars) != self.n_scalars:
            raise ValueError(
                f"the rule has {self.n_scalars} scalars, got {len(scalars)}: {scalars}"
            )
        largest = _LARGEST[self.compute_dtype]
        if not all(-largest <= scalar <= largest for scalar in scalars):
            raise ValueError(
                f"scalars must be finite in {self.compute_dtype}, got {scalars}. "
                f"Check what `prepare` returns."
            )

    def _cast(self, scalars: Scalars) -> Array:
        """Return scalars in the compute dtype; their values were checked before."""
        if len(scalars) != self.n_scalars:
            self.check_scalars(scalars)
        return np.array(scalars, self.compute_dtype)

    def _check_arrays(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None
    ) -> Arrays:
        """Refuse weights and slots that do not fit; return the slots to write."""
        written = slots if slots_out is None else slots_out
        self._check_written(w_out, written, (len(w_out),))
        check_input(w_in, self.dtype, w_out.shape)
        if written is not slots:
            self._check_number(slots)
            for slot in slots:
                check_input(slot, self.compute_dtype, w_out.shape)
        return written

    def _check_gradient(self, g: Array, shape: Shape) -> None:
        wide = g.dtype == self.compute_dtype
        check_input(g, self.compute_dtype if wide else self.dtype, shape)

    def _check_number(self, slots: Arrays) -> None:
        """Refuse more or fewer slots than the rule has, and arrays for one of rows."""
        if self.per_row is not None:
            raise ValueError("the rule needs rows: it updates tables, and no arrays")
        if len(slots) != self.n_slots:
            raise ValueError(f"the rule has {self.n_slots} slots, got {len(slots)}")

    def _check_written(self, w: Array, slots: Arrays, shape: Shape) -> None:
        check_output(w, self.dtype, shape, "weights")
        self._check_number(slots)
        for slot in slots:
            check_output(slot, self.compute_dtype, shape, "a slot")

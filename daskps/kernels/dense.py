"""The loops of an update rule: over arrays, and over rows of tables."""
# ruff: noqa: PLR0913, PLR0917  (compiled loops take positional arguments only: weights in and
# out, gradient, slots, scalars; the methods around them keep that order)

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.finite import finite
from daskps.kernels.inputs import check_input, check_output
from daskps.kernels.row_log import (
    TableRows,
    UndoLog,
    check_inside,
    check_log,
    check_named,
    in_blocks,
    outside,
)
from daskps.kernels.row_moves import NOWHERE
from daskps.kernels.update_source import update_source
from daskps.typing import Array

if TYPE_CHECKING:
    from daskps.kernels.compiled import Module
    from daskps.kernels.rows import OfRows
    from daskps.kernels.update_source import Before

Arrays: TypeAlias = tuple[Array, ...]
Scalars: TypeAlias = tuple[float, ...]
#: An update of arrays that stay where they are, given a gradient and scalars.
Fixed: TypeAlias = Callable[[Array, Scalars], None]
#: An update of rows of a table that stays where it is, like its log: given ids, where
#: their gradients are, gradients, scalars, `base` and `begin` of the log, and `check`.
FixedRows: TypeAlias = Callable[
    [Array, Array | None, Array, Scalars, int, int, bool], bool
]

#: Bytes of a cache line: what is written past the caches is written in full lines.
LINE = 64
#: Elements that weights are widened at a time: the two float32 scratch arrays
#: of it stay in a second-level cache.
_SCRATCH = 16_384
#: The compute dtype by the dtype of weights that there are kernels for; then the same
#: for weights with a master.
_COMPUTED: Final = {
    np.dtype(of): np.dtype(wide)
    for of, wide in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))
}
_WIDER: Final = {
    np.dtype(of): np.dtype(wide) for of, wide in (("f2", "f4"), ("f4", "f8"))
}
_LARGEST = {
    np.dtype(dtype): float(np.finfo(dtype).max) for dtype in (np.float32, np.float64)
}


class Kernel:
    """An update rule for arrays of one dtype; made by `build`.

    Notes
    -----
    Every element is computed alone and without fast-math, so the result has the
    same bits however the arrays are cut. The loops hold no GIL. The caller sees to it that
    no two threads update the same elements, and that no array overlaps another one in
    part. A kernel itself may be used by several threads.

    Weights that are narrower than the arithmetic are float16, which Numba does not know on
    CPUs, or have a master. Blocks of weights and gradient are widened by NumPy, updated,
    and rounded to nearest once; NumPy's casts write as they do, past the caches or not.

    A rule with slots of ranks is given those of all, and updates those of one: its scalars
    are followed by the rank.

    Parameters
    ----------
    module : Module
        The generated module.
    dtypes : (dtype, dtype)
        Of weights and gradients, and of slots and arithmetic.
    sizes : (int, int)
        How many slots the loops take, and scalars.
    per_row : tuple of bool, optional
        Of each slot whether it has one number per row; None of a rule for arrays too.
    ranks : range
        The slots of ranks, of which the loops take one; none where it is empty.
    """

    def __init__(
        self,
        module: Module,
        dtypes: tuple[np.dtype[Any], np.dtype[Any]],
        sizes: tuple[int, int],
        per_row: tuple[bool, ...] | None,
        ranks: range,
    ) -> None:
        self.module, self.per_row, self._ranks = module, per_row, ranks
        self.dtype, self.compute_dtype = dtypes
        self.n_slots, self.n_scalars = sizes[0] + max(0, len(ranks) - 1), sizes[1]
        self._is_wide = self.dtype != self.compute_dtype

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
        self._check_gradient(g, (len(w),))
        self._check_arrays(w, w, slots, None)
        if self._ranks:
            slots, _, scalars = self._of_rank(slots, None, scalars)
        c = self._cast(scalars)
        if self._is_wide:
            self._widened(w, w, g, slots, slots, c)
        else:
            self.module.function("inplace")(w, g, *slots, c)

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
        self._check_gradient(g, (len(w_out),))
        self._check_arrays(w_in, w_out, slots, slots_out)
        if self._ranks:
            slots, slots_out, scalars = self._of_rank(slots, slots_out, scalars)
        c, outs = self._cast(scalars), slots_out or ()
        if (fast := self._past(w_out, slots, outs, past)) is not None:
            name, first = fast
            loop = self.module.function(name)
            done = loop(w_in, w_out, g, *slots, *outs, c, first, check)
            return done is not False
        if check and not self.is_finite(g):
            return False
        if self._is_wide:
            self._widened(w_in, w_out, g, slots, outs or slots, c)
            return True
        for slot, out in zip(slots, outs, strict=False):
            np.copyto(out, slot)
        self.module.function("publish")(w_in, w_out, g, *(outs or slots), c)
        return True

    def _of_rank(
        self, slots: Arrays, outs: Arrays | None, scalars: Scalars
    ) -> tuple[Arrays, Arrays | None, Scalars]:
        """Return the slots of the rank that is named last, with those of all.

        Slots of other ranks are copied where they are to be written too.
        """
        ranks, rank = self._ranks, scalars[-1]
        if not 0 <= rank < len(ranks):
            raise ValueError(
                f"rank {rank:g} is none of the {len(ranks)} that have slots"
            )
        own = ranks[int(rank)]
        for at in ranks:
            if outs is not None and at != own:
                np.copyto(outs[at], slots[at])
        kept, to = (
            None if of is None else (*of[: ranks.start], of[own], *of[ranks.stop :])
            for of in (slots, outs)
        )
        return kept or (), to, scalars[:-1]

    def _widened(
        self, w_in: Array, w_out: Array, g: Array, slots: Arrays, outs: Arrays, c: Array
    ) -> None:
        """Write updated weights and slots block by block."""
        n, loop = len(w_out), self.module.function("inplace")
        wide = np.empty((2, min(n, _SCRATCH)), self.compute_dtype)
        with np.errstate(over="ignore"):  # too large for them is infinity there
            for start in range(0, n, _SCRATCH):
                part = slice(start, min(start + _SCRATCH, n))
                w, g_wide = wide[:, : part.stop - start]
                w[:] = w_in[part]
                g_wide[:] = g[part]
                if outs is not slots:
                    for slot, out in zip(slots, outs, strict=True):
                        out[part] = slot[part]
                loop(w, g_wide, *(out[part] for out in outs), c)
                w_out[part] = w

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
        self._check_arrays(w_in, w_out, slots, slots_out)
        shape, outs = (len(w_out),), slots_out or ()
        fast = self._past(w_out, slots, outs, past=False)
        if self._is_wide or self._ranks or (fast is None and outs):

            def publish(g: Array, scalars: Scalars) -> None:
                self.publish(w_in, w_out, g, slots, scalars, slots_out)

            return publish
        name, first = fast or ("publish", 0)
        loop = self.module.function(name)
        before, after = (w_in, w_out), (first, False) if fast else ()
        between = (*slots, *outs)
        latest: tuple[Scalars | None, Array] = None, np.empty(0)

        def update(g: Array, scalars: Scalars) -> None:
            nonlocal latest
            usual = g.dtype is self.compute_dtype and g.flags.c_contiguous
            if not usual or g.shape != shape:
                self._check_gradient(g, shape)
            kept = latest
            # Most rules have the same ones in every update.
            if scalars is not kept[0]:
                kept = latest = scalars, self._cast(scalars)
            loop(*before, g, *between, kept[1], *after)

        return update

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
        # Several updates in one pass begin with the one and go on with the other; blocks
        # that are widened are updated in place.
        self.module.function("inplace")
        if self._is_wide:
            return
        moves = durable and self.n_slots
        self.module.function("move" if moves else "publish")
        if past and (moves or not self.n_slots):
            self.module.function("past")

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
        for scalar in scalars:
            if not -largest <= scalar <= largest:
                raise ValueError(
                    f"scalars must be finite in {self.compute_dtype}, got {scalars}. "
                    f"Check what `prepare` returns."
                )

    def _cast(self, scalars: Scalars) -> Array:
        """Return scalars in the compute dtype; their values were checked before."""
        if len(scalars) != self.n_scalars:
            self.check_scalars(scalars)
        return np.array(scalars, self.compute_dtype)

    def _past(
        self, w_out: Array, slots: Arrays, outs: Arrays, past: bool
    ) -> tuple[str, int] | None:
        """Return a loop that writes past the caches and where lines begin, if any."""
        if len(outs) == len(slots) and not self._is_wide:
            for name, arrays in (("past", (w_out, *outs)), ("move", outs)):
                first = _first_line(arrays) if past or name == "move" else None
                if first is not None:
                    return name, first
        return None

    def _check_gradient(self, g: Array, shape: tuple[int, ...]) -> None:
        wide = g.dtype == self.compute_dtype
        check_input(g, self.compute_dtype if wide else self.dtype, shape)

    def _check_arrays(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None
    ) -> None:
        """Refuse weights and slots that do not fit, and arrays for a rule of rows."""
        shape = (len(w_out),)
        if self.per_row is not None:
            raise ValueError("the rule needs rows: it updates tables, and no arrays")
        for some in (slots, slots if slots_out is None else slots_out):
            if len(some) != self.n_slots:
                raise ValueError(f"the rule has {self.n_slots} slots, got {len(some)}")
        check_output(w_out, self.dtype, shape, "weights")
        for slot in slots if slots_out is None else slots_out:
            check_output(slot, self.compute_dtype, shape, "a slot")
        if w_in is not w_out:
            check_input(w_in, self.dtype, shape)
        for slot in () if slots_out is None else slots:
            check_input(slot, self.compute_dtype, shape)

    def _check_rows(
        self, table: TableRows, ids: Array, at: Array | None, g: Array, log: UndoLog
    ) -> Array:
        """Refuse rows that do not fit; return the positions of their gradients."""
        if self._ranks:
            raise ValueError("a rule with slots of ranks updates arrays, and no tables")
        wide, (n, dim) = self.compute_dtype, table.w.shape
        if table.w.dtype != self.dtype or g.dtype not in (self.dtype, wide):
            raise ValueError(
                f"expected rows of {self.dtype} and gradients of {wide}, got "
                f"{table.w.dtype} and {g.dtype}"
            )
        if [a.dtype for a in table.slots] != [wide] * self.n_slots:
            raise ValueError(
                f"the rule has {self.n_slots} slots of {wide}, got "
                f"{[str(a.dtype) for a in table.slots]}"
            )
        per_row = self.per_row or (False,) * self.n_slots
        for slot, of_row in zip(table.slots, per_row, strict=True):
            if slot.shape != (shape := (n, 1 if of_row else dim)):
                raise ValueError(f"expected a slot of {shape}, got {slot.shape}")
        places = check_named(table, ids, at, g)
        check_log(table, log, len(ids))
        return places


def _first_line(arrays: Arrays) -> int | None:
    """Return the element with which all arrays begin a cache line, if there is one."""
    starts = {-array.ctypes.data % LINE for array in arrays}
    if len(starts) != 1:
        return None
    return min(starts.pop() // arrays[0].itemsize, len(arrays[0]))


_kernel = functools.cache(Kernel)


def build(
    update: Callable[..., Any],
    n_slots: int,
    n_scalars: int,
    dtype: Any,
    cache_dir: str | None = None,
    of_rows: OfRows | None = None,
    *,
    before: Before = (),
    master: bool = False,
    ranks: int = 0,
) -> Kernel:
    """Return the kernel of an update function for one dtype.

    Nothing is compiled before the first call or `Kernel.warm`. Equal functions get
    the same kernel.

    Parameters
    ----------
    update : function
        `(w, g, *slots, *scalars) -> (w, *slots)` for one weight: arithmetic, numpy
        and math functions and numbers. Numbers are taken at this call.
    n_slots, n_scalars : int
        How many slots and scalars it takes.
    dtype : dtype
        Of the weights: float16 (computed in float32), float32 or float64.
    cache_dir : str, optional
        Where generated modules and machine code are kept between processes; see
        `daskps.kernels.cache` for the layout. In memory if it is None or cannot be
        written.
    of_rows : OfRows, optional
        The parts of a rule that need whole rows: `update` takes a mean after the
        gradient, and the kernel updates rows of tables only.
    before : tuple of (function, int)
        Functions `(g, *scalars) -> g` that each element of the gradient goes through,
        the last one first, and how many scalars each takes. They follow those of
        `update`, in this order, and are part of `n_scalars`.
    master : bool, default False
        Whether the first slot, one of `n_slots` that `update` does not take, is the
        weights in a wider dtype, which everything is computed in: float32 for float16,
        float64 for float32. The kernel rounds the result of `update` for it to the
        weights.
    ranks : int
        How many trainers of a run have a slot each in place of the first one of `update`.

    Returns
    -------
    Kernel
        The loops.

    Raises
    ------
    TypeError
        If `update` takes another number of arguments or refers to anything else.
    ValueError
        If there is no kernel for `dtype`.
    """
    dtype = np.dtype(dtype)
    wide = _WIDER.get(dtype) if master else _COMPUTED.get(dtype)
    if wide is None:
        known = ", ".join(map(str, _WIDER if master else _COMPUTED))
        raise ValueError(f"no kernel for {dtype}: use one of {known}")
    per_row = None if of_rows is None else of_rows.per_row
    sizes = n_slots, n_scalars
    source = update_source(
        update, *sizes, wide, of_rows=of_rows, before=before, master=master
    )
    of_ranks = range(master, master + ranks)
    module = module_of(source, cache_dir)
    return _kernel(module, (dtype, wide), sizes, per_row, of_ranks)

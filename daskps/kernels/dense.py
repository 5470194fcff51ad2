"""The loops of an update rule over arrays."""
# ruff: noqa: PLR0913, PLR0917  (compiled loops take positional arguments only: weights in and
# out, gradient, slots, scalars; the methods around them keep that order)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, final

import numpy as np

from daskps.kernels import threads
from daskps.kernels.compiled import module_of
from daskps.kernels.interface import Kernel
from daskps.kernels.row_log import (
    check_inside,
    check_log,
    check_named,
    in_blocks,
    outside,
)
from daskps.kernels.row_moves import NOWHERE
from daskps.kernels.source import update_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.compiled import Module
    from daskps.kernels.interface import (
        Arrays,
        Fixed,
        FixedRows,
        Scalars,
        TableRows,
        UndoLog,
    )
    from daskps.kernels.rows import OfRows
    from daskps.typing import Array

#: Elements that float16 weights are widened at a time: the two float32 scratch arrays
#: of it stay in a second-level cache.
_SCRATCH = 16_384
#: Bytes of a cache line: what is written past the caches is written in full lines.
LINE = 64


@final
class _Native(Kernel):
    """A kernel whose weights have the compute dtype."""

    def __init__(
        self,
        module: Module,
        dtype: np.dtype[Any],
        sizes: tuple[int, int],
        per_row: tuple[bool, ...] | None,
    ) -> None:
        self.dtype = self.compute_dtype = dtype
        self.n_slots, self.n_scalars = sizes
        self.module, self.per_row = module, per_row

    def inplace(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        self._check_gradient(g, (len(w),))
        self._check_written(w, slots, (len(w),))
        loop = self.module.function("inplace")
        threads.in_ranges(loop, (w, g, *slots), self._cast(scalars))

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
        self._check_gradient(g, (len(w_out),))
        written = self._check_arrays(w_in, w_out, slots, slots_out)
        c, outs = self._cast(scalars), slots_out or ()
        fast = self._past(w_out, outs, past)
        if fast is not None:
            name, first = fast
            loop = self.module.function(name)
            # All ranges begin lines where the arrays do.
            arrays = w_in, w_out, g, *slots, *outs
            return threads.in_ranges(loop, arrays, c, first, check)
        if check and not self.is_finite(g):
            return False
        for slot, out in zip(slots, outs, strict=False):
            threads.in_ranges(np.copyto, (out, slot))
        # Only now: a range that was looked at while others are written is too late.
        loop = self.module.function("publish")
        return threads.in_ranges(loop, (w_in, w_out, g, *written), c)

    def fixed(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None = None
    ) -> Fixed:
        written = self._check_arrays(w_in, w_out, slots, slots_out)
        shape, outs = (len(w_out),), slots_out or ()
        fast = self._past(w_out, outs, past=False)
        if fast is None and outs:
            return super().fixed(w_in, w_out, slots, slots_out)
        name, first = fast or ("publish", 0)
        loop = self.module.function(name)
        before, between = (w_in, w_out), (*slots, *outs) if fast else written
        after = (first, False) if fast else ()
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
        places = _check_rows(self, table, ids, at, g, log)
        where = log.rows, log.w, *log.slots, log.word, log.begin, log.base
        loop: Any = self.module.function("rows")
        done = loop(
            *(table.w, table.first, ids, places, g, *table.slots),
            *where,
            check,
            self._cast(scalars),
        )
        if done < 0:
            raise outside(ids, at, -1 - done, table)
        return bool(done == len(ids))

    def fixed_rows(self, table: TableRows, log: UndoLog) -> FixedRows:
        dtype, dim, room = self.dtype, table.w.shape[1], len(log.rows)
        _check_rows(self, table, NOWHERE, None, np.empty((0, dim), dtype), log)
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
            if not (
                usual
                and 0 <= begin <= room - n
                and (at is None or (at.shape == (n,) and at.flags.c_contiguous))
            ):
                place = log._replace(base=base, begin=begin)
                return self.rows(table, ids, at, g, scalars, place, check=check)
            kept = latest
            if scalars is not kept[0]:
                kept = latest = scalars, self._cast(scalars)
            # What else may be wrong with its arrays the compiled function refuses.
            where = *logs, word, begin, base, check, kept[1]
            places = NOWHERE if at is None else at
            done = loop(w, first, ids, places, g, *slots, *where)
            if done < 0:
                raise outside(ids, at, -1 - done, table)
            return bool(done == n)

        return update

    def warm_rows(self) -> None:
        self.module.function("rows")

    def _past(self, w_out: Array, outs: Arrays, past: bool) -> tuple[str, int] | None:
        """Return a loop that writes past the caches and where lines begin, if any."""
        if len(outs) == self.n_slots:
            for name, arrays in (("past", (w_out, *outs)), ("move", outs)):
                first = _first_line(arrays) if past or name == "move" else None
                if first is not None:
                    return name, first
        return None

    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        # Several updates in one pass begin with the one and go on with the other.
        self.module.function("inplace")
        moves = durable and self.n_slots
        self.module.function("move" if moves else "publish")
        if past and (moves or not self.n_slots):
            self.module.function("past")


def _check_rows(
    kernel: Kernel,
    table: TableRows,
    ids: Array,
    at: Array | None,
    g: Array,
    log: UndoLog,
) -> Array:
    """Refuse rows that do not fit a kernel; return the positions of their gradients."""
    if table.w.dtype != kernel.dtype or g.dtype not in (
        kernel.dtype,
        kernel.compute_dtype,
    ):
        raise ValueError(
            f"expected rows of {kernel.dtype} and gradients of {kernel.compute_dtype}, "
            f"got {table.w.dtype} and {g.dtype}"
        )
    if [a.dtype for a in table.slots] != [kernel.compute_dtype] * kernel.n_slots:
        raise ValueError(
            f"the rule has {kernel.n_slots} slots of {kernel.compute_dtype}, got "
            f"{[str(a.dtype) for a in table.slots]}"
        )
    n, dim = table.w.shape
    for slot, of_row in zip(
        table.slots, kernel.per_row or (False,) * kernel.n_slots, strict=True
    ):
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


@final
class _Widened(Kernel):
    """A kernel whose weights are narrower than its arithmetic: float16.

    Numba knows no float16 on CPUs. Blocks of weights and gradient are widened by
    NumPy, updated, and rounded to nearest once.
    """

    def __init__(self, inner: Kernel, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.compute_dtype = inner.dtype
        self.n_slots, self.n_scalars = inner.n_slots, inner.n_scalars
        self._inner, self.module = inner, inner.module
        self.per_row = inner.per_row

    def inplace(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        self.publish(w, w, g, slots, scalars)

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
        # NumPy's casts write as they do, past the caches or not.
        self._check_gradient(g, (len(w_out),))
        self._check_arrays(w_in, w_out, slots, slots_out)
        if check and not self.is_finite(g):
            return False
        arrays = w_in, w_out, g, *slots, *(slots_out or ())
        return threads.in_ranges(self._publish, arrays, scalars)

    def _publish(self, w_in: Array, w_out: Array, g: Array, *more: Any) -> None:
        """Write updated weights block by block; `more` are slots, then scalars."""
        *slots, scalars = more
        # With slots to read and slots to write there are twice as many.
        written = slots[-self.n_slots :] if self.n_slots else []
        n = len(w_out)
        wide = np.empty((2, min(n, _SCRATCH)), self.compute_dtype)
        with np.errstate(over="ignore"):  # too large for float16 is infinity there
            for start in range(0, n, _SCRATCH):
                part = slice(start, min(start + _SCRATCH, n))
                w, g_wide = wide[:, : part.stop - start]
                w[:] = w_in[part]
                g_wide[:] = g[part]
                if len(slots) > len(written):
                    for slot, out in zip(slots, written, strict=False):
                        out[part] = slot[part]
                self._inner.inplace(w, g_wide, tuple(s[part] for s in written), scalars)
                w_out[part] = w

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
        _check_rows(self, table, ids, at, g, log)
        self.check_scalars(scalars)
        check_inside(table, ids, at, g)
        if check and not self.is_finite(g if at is None else g[at]):
            return False

        def change(w: Array, given: Array, slots: Arrays) -> None:
            if self.per_row is not None:
                self._whole(w, given, slots, scalars)
                return
            # Views all of them: what was copied is contiguous.
            flat = tuple(slot.reshape(-1) for slot in slots)
            self._publish(*[w.reshape(-1)] * 2, given.reshape(-1), *flat, scalars)

        cache_dir = self.module.cache_dir
        in_blocks(table, ids, at, g, log, change, cache_dir=cache_dir)
        return True

    def _whole(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        """Update all rows of some arrays, each of which needs the whole of it."""
        loop: Any = self.module.function("whole")
        wide = w.astype(self.compute_dtype)
        loop(wide, g.astype(self.compute_dtype), *slots, self._cast(scalars))
        with np.errstate(over="ignore"):
            w[:] = wide

    def warm_rows(self) -> None:
        self.module.function("inplace" if self.per_row is None else "whole")

    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        # Whatever is written where: the blocks are updated in place.
        self.module.function("inplace")


_native = functools.cache(_Native)


def build(
    update: Callable[..., Any],
    n_slots: int,
    n_scalars: int,
    dtype: Any,
    cache_dir: str | None = None,
    of_rows: OfRows | None = None,
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
        What `update` needs whole rows for: it then takes a mean after the gradient, and
        the kernel updates rows of tables only.

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
    if dtype == np.float16:
        inner = build(update, n_slots, n_scalars, np.float32, cache_dir, of_rows)
        return _Widened(inner, dtype)
    if dtype not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"no kernel for {dtype}: use float16, float32 or float64")
    per_row = None if of_rows is None else of_rows.per_row
    source = update_source(update, n_slots, n_scalars, dtype, of_rows=of_rows)
    module = module_of(source, cache_dir)
    return _native(module, dtype, (n_slots, n_scalars), per_row)

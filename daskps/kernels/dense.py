"""The loops of an update rule over arrays."""
# ruff: noqa: PLR0913, PLR0917  (compiled loops take positional arguments only: weights in and
# out, gradient, slots, scalars; the methods around them keep that order)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.interface import Kernel
from daskps.kernels.row_log import (
    check_rows,
    outside,
)
from daskps.kernels.row_moves import NOWHERE
from daskps.kernels.update_source import update_source
from daskps.kernels.widened import Widened

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
    from daskps.kernels.update_source import Before
    from daskps.typing import Array

#: Bytes of a cache line: what is written past the caches is written in full lines.
LINE = 64
#: The compute dtype by the dtype of weights that there are kernels for; then the same
#: for weights with a master.
_COMPUTED: Final = {
    np.dtype(of): np.dtype(wide)
    for of, wide in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))
}
_WIDER: Final = {
    np.dtype(of): np.dtype(wide) for of, wide in (("f2", "f4"), ("f4", "f8"))
}


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
        loop(w, g, *slots, self._cast(scalars))

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
            done = loop(w_in, w_out, g, *slots, *outs, c, first, check)
            return done is not False
        if check and not self.is_finite(g):
            return False
        for slot, out in zip(slots, outs, strict=False):
            np.copyto(out, slot)
        self.module.function("publish")(w_in, w_out, g, *written, c)
        return True

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
        places = check_rows(self, table, ids, at, g, log)
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
        check_rows(self, table, NOWHERE, None, np.empty((0, dim), dtype), log)
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
            # The compiled function refuses all else that may be wrong with its arrays.
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


def _first_line(arrays: Arrays) -> int | None:
    """Return the element with which all arrays begin a cache line, if there is one."""
    starts = {-array.ctypes.data % LINE for array in arrays}
    if len(starts) != 1:
        return None
    return min(starts.pop() // arrays[0].itemsize, len(arrays[0]))


_native = functools.cache(_Native)


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
    native = _native(module_of(source, cache_dir), wide, sizes, per_row)
    return native if wide == dtype else Widened(native, dtype)

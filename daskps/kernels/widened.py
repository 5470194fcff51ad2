"""The loops of an update rule over weights that are narrower than its arithmetic."""
# ruff: noqa: PLR0913, PLR0917  (compiled loops take positional arguments only: weights in and
# out, gradient, slots, scalars; the methods around them keep that order)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from daskps.kernels.interface import Kernel
from daskps.kernels.row_log import (
    check_inside,
    check_rows,
    in_blocks,
)

if TYPE_CHECKING:
    from daskps.kernels.interface import (
        Arrays,
        Scalars,
        TableRows,
        UndoLog,
    )
    from daskps.typing import Array

#: Elements that weights are widened at a time: the two float32 scratch arrays
#: of it stay in a second-level cache.
_SCRATCH = 16_384


@final
class Widened(Kernel):
    """A kernel whose weights are narrower than its arithmetic.

    They are float16, which Numba does not know on CPUs, or have a master. Blocks of
    weights and gradient are widened by NumPy, updated, and rounded to nearest once.
    """

    def __init__(self, inner: Kernel, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.compute_dtype = inner.dtype
        self.n_slots, self.n_scalars = inner.n_slots, inner.n_scalars
        self._inner, self.module = inner, inner.module
        self.per_row = inner.per_row

    def inplace(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        """As :meth:`Kernel.inplace`."""
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
        """As :meth:`Kernel.publish`."""
        # NumPy's casts write as they do, past the caches or not.
        self._check_gradient(g, (len(w_out),))
        self._check_arrays(w_in, w_out, slots, slots_out)
        if check and not self.is_finite(g):
            return False
        self._publish(w_in, w_out, g, *slots, *(slots_out or ()), scalars)
        return True

    def _publish(self, w_in: Array, w_out: Array, g: Array, *more: Any) -> None:
        """Write updated weights block by block; `more` are slots, then scalars."""
        *slots, scalars = more
        # With slots to read and slots to write there are twice as many.
        written = slots[-self.n_slots :] if self.n_slots else []
        n = len(w_out)
        wide = np.empty((2, min(n, _SCRATCH)), self.compute_dtype)
        with np.errstate(over="ignore"):  # too large for them is infinity there
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
        """As :meth:`Kernel.rows`."""
        check_rows(self, table, ids, at, g, log)
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
        """As :meth:`Kernel.warm_rows`."""
        self.module.function("inplace" if self.per_row is None else "whole")

    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        """As :meth:`Kernel.warm`."""
        # Whatever is written where: the blocks are updated in place.
        self.module.function("inplace")

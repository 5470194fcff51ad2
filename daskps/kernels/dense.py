"""The kernel of an update rule: its loops over arrays, beside those over rows."""
# ruff: noqa: PLR0913, PLR0917  (compiled loops take positional arguments only: weights in and
# out, gradient, slots, scalars; the methods around them keep that order)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels.compiled import module_of
from daskps.kernels.row_updates import RowLoops
from daskps.kernels.rule_kernel import Arrays, Fixed, Scalars, form_of
from daskps.kernels.update_source import update_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.rows import OfRows
    from daskps.kernels.update_source import Before
    from daskps.typing import Array

#: Bytes of a cache line: what is written past the caches is written in full lines.
LINE = 64
#: Elements that weights are widened at a time: the two float32 scratch arrays
#: of it stay in a second-level cache.
_SCRATCH = 16_384


class Kernel(RowLoops):
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
    """

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
            What `Bound.scalars` returns, from the rule's `prepare`.

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
            What `Bound.scalars` returns, from the rule's `prepare`.
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
        loop, usual = self.module.entry(name), self.compute_dtype
        after = (first, False) if fast else ()
        latest: tuple[Scalars | None, tuple[Any, ...]] = None, ()

        def update(g: Array, scalars: Scalars) -> None:
            nonlocal latest
            if g.dtype is not usual or g.shape != shape or not g.flags.c_contiguous:
                self._check_gradient(g, shape)
            kept = latest
            # Most rules have the same ones in every update.
            if scalars is not kept[0]:
                kept = latest = scalars, (*slots, *outs, self._cast(scalars), *after)
            loop(w_in, w_out, g, *kept[1])

        return update

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
    sizes = n_slots, n_scalars
    form = form_of(*sizes, dtype, of_rows, master=master, ranks=ranks)
    wide = form.compute_dtype
    source = update_source(
        update, *sizes, wide, of_rows=of_rows, before=before, master=master
    )
    return _kernel(module_of(source, cache_dir), form)

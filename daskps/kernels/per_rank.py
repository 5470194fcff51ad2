"""The loops of an update rule that has slots for each trainer of a run."""
# ruff: noqa: PLR0913, PLR0917  (as in the interface: every loop takes the same five things)

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

import numpy as np

from daskps.kernels.interface import Kernel

if TYPE_CHECKING:
    from daskps.kernels.interface import Arrays, Scalars, TableRows, UndoLog
    from daskps.typing import Array


@final
class PerRank(Kernel):
    """A kernel that is given the slots of all ranks, and updates those of one.

    In all calls the scalars are followed by the rank.

    Parameters
    ----------
    inner : Kernel
        The loops, which take one slot in the place of those of the ranks.
    ranks : int
        How many there are.
    first : int
        The number of the slot of rank 0.
    """

    def __init__(self, inner: Kernel, ranks: int, *, first: int) -> None:
        self.dtype, self.compute_dtype = inner.dtype, inner.compute_dtype
        self.n_slots, self.n_scalars = inner.n_slots - 1 + ranks, inner.n_scalars
        self.module, self._inner = inner.module, inner
        self._first, self._end = first, first + ranks

    def inplace(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        """As :meth:`Kernel.inplace`."""
        self._check_number(slots)
        self._inner.inplace(w, g, self._of(slots, scalars), scalars[:-1])

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
        self._check_arrays(w_in, w_out, slots, slots_out)
        outs = None
        if slots_out is not None:
            outs = self._of(slots_out, scalars)
            for slot, out in zip(slots, slots_out, strict=True):
                if not any(out is one for one in outs):
                    np.copyto(out, slot)
        arrays = w_in, w_out, g, self._of(slots, scalars), scalars[:-1], outs
        return self._inner.publish(*arrays, past=past, check=check)

    def _of(self, slots: Arrays, scalars: Scalars) -> Arrays:
        """Return the slots of the rank that the scalars name, and those of all."""
        at = self._first + int(scalars[-1])
        if not self._first <= at < self._end:
            n = self._end - self._first
            raise ValueError(f"rank {scalars[-1]:g} is none of the {n} that have slots")
        return *slots[: self._first], slots[at], *slots[self._end :]

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
    ) -> NoReturn:
        """Refuse rows."""
        raise ValueError("a rule with slots of ranks updates arrays, and no tables")

    def warm_rows(self) -> None:
        """Compile nothing: there are no such loops."""

    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        """As :meth:`Kernel.warm`."""
        self._inner.warm(durable=durable, past=past)

"""The kernel of an update rule for arrays of a device."""
# ruff: noqa: PLR0913, PLR0917  (the methods of :class:`~daskps.kernels.dense.Kernel`)

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from daskps.kernels.device.pieces import (
    RuleText,
    elementwise,
    look_loop,
    update_loop,
)
from daskps.kernels.rule_kernel import Arrays, RuleKernel, Scalars, form_of
from daskps.kernels.update_source import functions_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.kernels.device.loops import DeviceLoop
    from daskps.kernels.rows import OfRows
    from daskps.kernels.rule_kernel import Fixed
    from daskps.kernels.update_source import Before
    from daskps.typing import Array


class Launcher(Protocol):
    """The queue of a device that loops are put into; nothing here waits for it."""

    #: One int64 of the device, 0 unless a look has found NaN or infinity.
    flag: Array

    def load(self, loop: DeviceLoop) -> None:
        """Make a loop ready, so that its first launch finds it."""

    def empty(self, n: int, dtype: Any) -> Array:
        """Return memory of the device, with anything in it."""

    def update(
        self, loop: DeviceLoop, arrays: Sequence[Array], scalars: Scalars
    ) -> None:
        """Queue a piece, of arrays of one length, for a loop over pieces.

        Consecutive ones of one loop and the same scalars may share a launch. Where the loop
        is guarded, the flag is its second argument.
        """

    def launch(
        self, loop: DeviceLoop, rows: int, columns: int, args: Sequence[Array | float]
    ) -> None:
        """Queue a loop. NumPy arrays are copied to the device first, as they are now."""

    def is_finite(self, loop: DeviceLoop, a: Array) -> bool:
        """Wait for a look at one array, with a flag of its own; return what it says."""


class DeviceKernel(RuleKernel):
    """An update rule for arrays of one dtype on a device.

    Parameters
    ----------
    rule : RuleText
        The rule.
    launcher : Launcher
        Where its loops run.

    Notes
    -----
    Its methods are those of :class:`~daskps.kernels.dense.Kernel`. They check what they are
    given, and queue loops: nothing has changed before the launcher's wait.
    """

    def __init__(self, rule: RuleText, launcher: Launcher) -> None:
        super().__init__(rule.form)
        self.rule, self.launcher = rule, launcher

    def inplace(self, w: Array, g: Array, slots: Arrays, scalars: Scalars) -> None:
        """Update weights and slots in place, see `Kernel.inplace`."""
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
        """Write updated weights, and maybe slots, to other arrays: see `Kernel.publish`.

        With `check` a look at the gradient comes before it. The launcher's wait tells what
        it found; then no update that came after it has changed anything.
        """
        del past
        self._check_arrays(w_in, w_out, slots, slots_out)
        self._queue(w_in, w_out, g, slots, scalars, slots_out, check=check)
        return True

    def fixed(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None = None
    ) -> Fixed:
        """Return `publish` for arrays that stay where they are, see `Kernel.fixed`."""
        self._check_arrays(w_in, w_out, slots, slots_out)

        def update(g: Array, scalars: Scalars) -> None:
            self._queue(w_in, w_out, g, slots, scalars, slots_out)

        return update

    def is_finite(self, a: Array) -> bool:
        """Return whether an array has no NaN and no infinity; it waits for the device."""
        return a.dtype.kind != "f" or self.launcher.is_finite(look_loop(a.dtype), a)

    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        """Make the loops ready that will be used, see `Kernel.warm`."""
        del durable, past
        for loop in (update_loop(self.rule, self.compute_dtype), look_loop(self.dtype)):
            self.launcher.load(loop)

    def _queue(
        self,
        w_in: Array,
        w_out: Array,
        g: Array,
        slots: Arrays,
        scalars: Scalars,
        outs: Arrays | None,
        *,
        check: bool = False,
    ) -> None:
        """Queue an update of arrays that were checked."""
        self._check_gradient(g, (len(w_out),))
        if self._ranks:
            slots, outs, scalars = self._of_rank(slots, outs, scalars)
        if len(scalars) != self.n_scalars:
            self.check_scalars(scalars)
        if check:
            self.launcher.update(look_loop(g.dtype), (g,), ())
        arrays = w_in, w_out, g, *slots, *(slots if outs is None else outs)
        self.launcher.update(update_loop(self.rule, g.dtype), arrays, scalars)

    def _copy(self, out: Array, a: Array) -> None:
        """Copy slots that an update leaves as they are."""
        bits = np.dtype(f"u{a.itemsize}")
        self.launcher.update(elementwise("a", bits), (out, a), ())


def build(
    update: Callable[..., Any],
    n_slots: int,
    n_scalars: int,
    dtype: Any,
    of_rows: OfRows | None = None,
    *,
    launcher: Launcher,
    what: str,
    before: Before = (),
    master: bool = False,
    ranks: int = 0,
) -> DeviceKernel:
    """Return the kernel of an update function for one dtype and a device.

    Parameters
    ----------
    update, n_slots, n_scalars, dtype, of_rows, before, master, ranks
        As :func:`daskps.kernels.dense.build` takes them.
    launcher : Launcher
        Where its loops run.
    what : str
        The rule, in messages.

    Returns
    -------
    DeviceKernel
        The loops; nothing is compiled before their first use or `warm`.

    Raises
    ------
    TypeError, ValueError
        As `dense.build`.
    """
    sizes = n_slots, n_scalars
    form = form_of(*sizes, dtype, of_rows, master=master, ranks=ranks)
    text = functions_text(
        update,
        *sizes,
        form.compute_dtype,
        of_rows=of_rows,
        before=before,
        master=master,
    )
    return DeviceKernel(RuleText(text, form, what), launcher)

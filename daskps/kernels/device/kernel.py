"""The kernel of an update rule for arrays and rows of a device."""
# ruff: noqa: PLR0913, PLR0917  (the methods of :class:`~daskps.kernels.dense.Kernel`)

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from daskps.kernels.device.pieces import RuleText, elementwise, look_loop, update_loop
from daskps.kernels.device.row_loops import gather_loop, row_look_loop, row_loop
from daskps.kernels.row_log import TableRows, UndoLog, check_inside
from daskps.kernels.rule_kernel import Arrays, RuleKernel, Scalars, form_of
from daskps.kernels.update_source import functions_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.kernels.device.loops import DeviceLoop
    from daskps.kernels.rows import OfRows
    from daskps.kernels.rule_kernel import Fixed, FixedRows
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
    given, and queue loops: no array of the device has changed before the launcher's wait.
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
        self._queue((w_in, w_out, slots, slots_out), g, scalars, check=check)
        return True

    def fixed(
        self, w_in: Array, w_out: Array, slots: Arrays, slots_out: Arrays | None = None
    ) -> Fixed:
        """Return `publish` for arrays that stay where they are, see `Kernel.fixed`."""
        self._check_arrays(w_in, w_out, slots, slots_out)
        return functools.partial(self._queue, (w_in, w_out, slots, slots_out))

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
        """Update some rows of weights and slots in place, see `Kernel.rows`.

        Ids and positions, and the word and the numbers of rows of the log, are on the host;
        none of the ids repeats. With `check` as `publish`: the log then has rows as they are.
        """
        self._check_rows(table, ids, at, g, log)
        check_inside(table, ids, at, g)
        if len(scalars) != self.n_scalars:
            self.check_scalars(scalars)
        n, dim = len(ids), table.w.shape[1]
        if not n:
            return True
        numbers = log.rows[log.begin : log.begin + n]
        np.subtract(ids, table.first, out=numbers)
        flag = self.launcher.flag
        # Nobody reads positions of what is in order: any array of the device will do.
        where = numbers, flag if at is None else at, at is None, dim
        if check and g.dtype.kind == "f":
            self.launcher.launch(row_look_loop(g.dtype), n, dim, (flag, *where, g))
        slots = [a for pair in zip(table.slots, log.slots, strict=True) for a in pair]
        given = flag, *where, log.begin, table.w, log.w, g, *slots, *scalars
        columns = dim if self.per_row is None else 1
        self.launcher.launch(row_loop(self.rule, g.dtype), n, columns, given)
        # Not before: where no more was queued, nothing of it is to be put back.
        log.word[0] = log.base + log.begin + n
        return True

    def fixed_rows(self, table: TableRows, log: UndoLog) -> FixedRows:
        """Return `rows` for a table and a log that stay, see `Kernel.fixed_rows`."""

        def update(*given: Any) -> bool:
            ids, at, g, scalars, base, begin, check = given
            place = log._replace(base=base, begin=begin)
            return self.rows(table, ids, at, g, scalars, place, check=check)

        return update

    def is_finite(self, a: Array) -> bool:
        """Return whether an array has no NaN and no infinity; it waits for the device."""
        return a.dtype.kind != "f" or self.launcher.is_finite(look_loop(a.dtype), a)

    def warm(self, *, durable: bool = False, past: bool = False) -> None:
        """Make the loops ready that will be used, see `Kernel.warm`."""
        del durable, past
        self._load(update_loop, look_loop)

    def warm_rows(self) -> None:
        """Make the loops over rows ready."""
        self._load(row_loop, row_look_loop)
        self.launcher.load(gather_loop(self.dtype.itemsize))

    def _load(self, update: Callable[..., Any], look: Callable[..., Any]) -> None:
        """Load loops for gradients of both dtypes, and a look at these."""
        for dtype in {self.dtype, self.compute_dtype}:
            self.launcher.load(update(self.rule, dtype))
            self.launcher.load(look(dtype))

    def _queue(
        self,
        where: tuple[Array, Array, Arrays, Arrays | None],
        g: Array,
        scalars: Scalars,
        *,
        check: bool = False,
    ) -> None:
        """Queue an update of arrays that were checked."""
        w_in, w_out, slots, outs = where
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
    update, n_slots, n_scalars, dtype, of_rows
        As :func:`daskps.kernels.dense.build` takes them.
    launcher : Launcher
        Where its loops run.
    what : str
        The rule, in messages.
    before, master, ranks
        As there, too.

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
    wide = form.compute_dtype
    text = functions_text(
        update, *sizes, wide, of_rows=of_rows, before=before, master=master
    )
    return DeviceKernel(RuleText(text, form, what), launcher)

"""Rows of tables of a device, beside their updates, as the modules of hosts move them.

Numbers of rows, entries and positions are NumPy arrays, which a launcher copies to the
device; a log has its numbers of rows on the host too.
"""
# ruff: noqa: PLR0917  (launcher, table, ids, rows, and where they are)

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.kernels.device.kernel import DeviceKernel
from daskps.kernels.device.pieces import RuleText
from daskps.kernels.device.row_loops import gather_loop, sum_loop
from daskps.kernels.row_log import TableRows, check_inside, logged_rows
from daskps.kernels.row_moves import check_rows
from daskps.kernels.rule_kernel import RuleForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.kernels.device.kernel import Launcher
    from daskps.kernels.device.pieces import Kind
    from daskps.kernels.row_log import UndoLog
    from daskps.kernels.row_repeats import Repeats
    from daskps.typing import Array

_WRITE = """\
from daskps.kernels.intrinsics import weight


@inner
def _update(w, g):
    return {made}
"""


def writing(launcher: Launcher, dtype: Kind, *, adds: bool) -> DeviceKernel:
    """Return the kernel whose `rows` adds to rows, or replaces them, under a log.

    Parameters
    ----------
    launcher : Launcher
        Where its loops run.
    dtype : dtype
        Of the rows.
    adds : bool
        Whether it does what `row_writes.add` does, else `row_writes.assign`.

    Returns
    -------
    DeviceKernel
        One without slots and scalars.
    """
    made = "w | g" if dtype.kind == "b" else "w + g"
    wide = np.dtype(np.float32) if adds and dtype == np.float16 else dtype
    text = _WRITE.format(made=made if adds else "g")
    rule = RuleText(text, RuleForm(dtype, wide, 0, 0), f"a write of {dtype}")
    return DeviceKernel(rule, launcher)


def gather(
    launch: Callable[..., object],
    w: Array,
    ids: Array,
    out: Array,
    at: Array | None = None,
    *,
    first: int = 0,
) -> None:
    """Copy rows of a table to rows of another array, see `row_moves.gather`.

    Parameters
    ----------
    launch : callable
        Queues the loop, as `Launcher.launch`.
    w, ids, out, at, first
        As in `row_moves.gather`; none of `at` repeats.

    Raises
    ------
    ValueError
        If an array is not as described, or an index is outside; nothing was queued.
    """
    check_rows(w, out)
    check_inside(TableRows(w, (), first), ids, at, out)
    if not len(ids):
        return
    dim = w.shape[1]
    # Nobody reads positions of what is in order: any array of the device will do.
    given = ids - first, w if at is None else at, at is None, dim, w, out
    launch(gather_loop(w.dtype.itemsize), len(ids), dim, given)


def restore(launcher: Launcher, table: TableRows, log: UndoLog, n: int) -> None:
    """Put back what rows were before the first `n` entries of a log.

    Parameters
    ----------
    launcher : Launcher
        Where the loop runs.
    table, log, n
        As in `row_log.restore`.

    Raises
    ------
    ValueError
        As there.
    """
    # Of several entries of a row the oldest one is first.
    rows, entries = np.unique(logged_rows(table, log, n), return_index=True)
    pairs = zip((table.w, *table.slots), (log.w, *log.slots), strict=True)
    for a, kept in pairs:
        gather(launcher.launch, kept, entries, a, rows)


def sums(
    launcher: Launcher, repeats: Repeats, rows: Array, at: Array | None = None
) -> Array:
    """Return the sum of the rows of each id, added up in order of appearance.

    Parameters
    ----------
    launcher : Launcher
        Where the loop runs.
    repeats : Repeats
        The ids.
    rows, at
        As in `Repeats.sum`.

    Returns
    -------
    Array, shape (k, dim), dtype of `rows`
        On the device.

    Raises
    ------
    ValueError
        If rows are not contiguous or of float16, or a position is outside.
    """
    if rows.dtype == np.float16:
        raise ValueError("expected rows of float16 widened")
    order, ends = repeats.grouped(at)
    table, n, dim = TableRows(rows), len(ends), rows.shape[1]
    check_rows(rows, rows)
    check_inside(table, order, None, rows)
    out: Array = launcher.empty(n * dim, rows.dtype).reshape(n, dim)
    if n:
        launcher.launch(sum_loop(rows.dtype), n, dim, (order, ends, dim, rows, out))
    return out

"""A launcher without a device: loops over NumPy arrays, in an order that a seed chooses."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.kernels import OfRows, device
from daskps.optim.master import WithMaster
from tests.kernels.compiling import kept

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.kernels.device.loops import DeviceLoop


class Launcher:
    """Queues launches; nothing runs before the wait."""

    def __init__(self, seed: int = 0) -> None:
        self.flag = np.zeros(1, np.int64)
        self.rng = np.random.default_rng(seed)
        self.queue: list[Any] = []
        self.launches = 0

    def load(self, loop: DeviceLoop) -> None:
        loop.ptx(kept())

    def empty(self, n: int, dtype: Any) -> Any:
        return np.full(n, 7, dtype)

    def update(self, loop: DeviceLoop, arrays: Any, scalars: Any) -> None:
        self.queue.append(((loop, scalars), arrays))

    def launch(self, loop: DeviceLoop, rows: int, columns: int, args: Any) -> None:
        self.queue.append(((loop, (rows, columns)), args))

    def is_finite(self, loop: DeviceLoop, a: Any) -> bool:
        other = Launcher()
        other.update(loop, (a,), ())
        return other.wait()

    def wait(self) -> bool:
        """Run what was asked for; return whether no look has found NaN or infinity."""
        for (loop, how), group in groupby(self.queue, key=lambda item: item[0]):
            many = [arrays for _, arrays in group]
            if loop.width:
                self._pieces(loop, many, how)
            else:
                for args in many:
                    self._run(loop, how[0], how[1], args)
        self.queue.clear()
        found = not self.flag[0]
        self.flag[0] = 0
        return found

    def _pieces(self, loop: DeviceLoop, many: Any, scalars: Any) -> None:
        table = np.array([[len(a[0]), *map(address, a)] for a in many], np.int64)
        guard = [self.flag] * loop.guarded
        self._run(loop, len(many), table[:, 0].max(), [table, *guard, *scalars])

    def _run(self, loop: DeviceLoop, rows: int, columns: int, args: Any) -> None:
        self.launches += 1
        order = self.rng.permutation(rows * columns)
        given = [address(a) if isinstance(a, np.ndarray) else a for a in args]
        loop.host(kept())(order, columns, *given)


def address(a: Any) -> int:
    found: int = a.ctypes.data
    return found


def kernel_of(rule: Any, dtype: Any, launcher: Launcher) -> device.DeviceKernel:
    """Return the kernel of a rule, as `optim.bind` makes that of hosts."""
    n_slots = len(rule.slots) - max(len(rule.rank_slots) - 1, 0)
    of_rows = None
    if rule.row_mean is not None:
        per_row = tuple(name in rule.row_slots for name in rule.slots)
        of_rows = OfRows(rule.row_mean, per_row)
    return device.build(
        rule.update,
        n_slots,
        len(rule.scalars(1, epoch=0)),
        dtype,
        of_rows,
        launcher=launcher,
        what=repr(rule),
        before=tuple(rule.before),
        master=isinstance(rule, WithMaster),
        ranks=len(rule.rank_slots),
    )


def same_bits(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Return whether arrays have the same bits, but for those of NaNs."""

    def same(a: Any, b: Any) -> bool:
        nan = a != a
        there = a[~nan].tobytes() == b[~nan].tobytes()
        return a.dtype == b.dtype and there and np.array_equal(nan, b != b)

    return all(same(a, b) for a, b in zip(some, others, strict=True))


#: Numbers that arithmetic treats in ways of its own; each meets each other one.
SPECIAL = (
    0.0,
    -0.0,
    1e-42,
    -1e-320,
    np.inf,
    -np.inf,
    np.nan,
    6e4,
    1e38,
    1.0,
    -1.0,
    6e-8,
)


def numbers(rng: np.random.Generator, n: int, dtype: Any) -> tuple[Any, Any]:
    """Return two arrays, in which each special number meets each other one."""
    a, b = rng.normal(size=(2, n))
    m = len(SPECIAL)
    a[: m * m], b[: m * m] = np.repeat(SPECIAL, m), np.tile(SPECIAL, m)
    with np.errstate(over="ignore"):
        return a.astype(dtype), b.astype(dtype)

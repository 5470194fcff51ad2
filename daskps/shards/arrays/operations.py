"""Operations: arrays on their way into the weights of one piece, element by element.

Everything that can fail (a user's `prepare`, a schedule) happens while the operations
are planned. Once the first byte is written, only two things raise: a gradient that is
looked at in the very pass that applies it, which writes nothing that is in force; and
memory that ran out, here or in a thread that helps, after which slots in place may be
half-way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.errors import PushRejectedError
from daskps.shards.arrays.payload import NUMPY, Payload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.optim import Bound
    from daskps.typing import Array

#: Where several updates meet in one pass, they go tile by tile, in elements: a tile
#: of weights and slots stays in the second-level cache between two updates.
TILE = 16_384


class Formed:
    """An array that is formed part by part as it is sliced, and must not be kept.

    It refuses a part that is not finite itself, if it `checks`. No abstract class, which
    takes ten times as long to tell from an array.
    """

    __slots__ = ()

    @property
    def checks(self) -> bool:
        """Whether it refuses what is not finite."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Number of elements to take at a time."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the elements."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return the number of elements."""
        raise NotImplementedError

    def __getitem__(self, part: slice) -> Array:
        """Return a part, good until the next one is formed."""
        raise NotImplementedError


class PieceBuffers(NamedTuple):
    """The arrays of a piece: what is read and what is written, maybe the same."""

    w_in: Array
    w_out: Array
    slots: tuple[Array, ...]
    slots_out: tuple[Array, ...]
    payload: Payload = NUMPY
    #: Whether the first slot is a master: the weights, in a wider dtype.
    master: bool = False

    def part(self, lo: int, hi: int) -> PieceBuffers:
        """Return elements [lo, hi), the same array where these are the same."""
        if lo == 0 and hi == len(self.w_out):
            return self
        w_out = self.w_out[lo:hi]
        w_in = w_out if self.w_in is self.w_out else self.w_in[lo:hi]
        slots = slots_out = tuple(slot[lo:hi] for slot in self.slots_out)
        if self.slots is not self.slots_out:
            slots = tuple(slot[lo:hi] for slot in self.slots)
        how = self.payload, self.master
        return PieceBuffers(w_in, w_out, slots, slots_out, *how)

    @property
    def moves(self) -> bool:
        """Whether the slots are read from one buffer and written to the other."""
        return self.slots is not self.slots_out

    @property
    def written(self) -> PieceBuffers:
        """The buffers that were written, to go on with in place."""
        w, slots = self.w_out, self.slots_out
        return PieceBuffers(w, w, slots, slots, self.payload, self.master)


class PieceUpdate(NamedTuple):
    """One array on its way into one piece."""

    data: Array | Formed
    start: int = 0
    #: None for a plain `+=` or, with `replace`, an assignment.
    binding: Bound | None = None
    scalars: tuple[float, ...] = ()
    replace: bool = False
    #: Whether NaN and infinity are looked for in the pass, as :func:`checks`.
    check: bool = False

    def formed(self, payload: Payload) -> Array:
        """Return its array, or what was formed part by part in memory of its own."""
        data = self.data
        if not isinstance(data, Formed):
            return data
        out, n = payload.empty(len(data), data.dtype), len(data)
        for lo in range(0, n, data.step):
            hi = min(lo + data.step, n)
            payload.copy(out[lo:hi], data[lo:hi])
        return out

    def apply(
        self, target: PieceBuffers, lo: int, hi: int, *, past: bool = False
    ) -> bool:
        """Apply elements [lo, hi) of the piece, with `past` past the caches.

        Returns False for a gradient that was to be looked at and is not finite.
        """
        start = self.start
        a, b = max(lo, start), min(hi, start + len(self.data))
        if a >= b:
            return True
        data, to = self.data[a - start : b - start], target.part(a, b)
        is_plain = self.replace or self.binding is None
        if is_plain and self.check and not to.payload.look(data):
            return False
        if to.master and is_plain:
            self._to_master(data, to)
        elif self.replace:
            to.payload.copy(to.w_out, data)
        elif self.binding is None:
            to.payload.add(to.w_in, data, to.w_out)
        elif to.w_in is to.w_out and not to.moves:
            self.binding.inplace(to.w_out, data, to.slots, self.scalars)
        else:
            outs = to.slots_out if to.moves else None
            arrays = to.w_in, to.w_out, data, to.slots, self.scalars, outs
            return self.binding.publish(*arrays, past=past, check=self.check)
        return True

    def _to_master(self, data: Array, to: PieceBuffers) -> None:
        """Add to a master, or replace it; the weights are what it is rounded to."""
        copy, master = to.payload.copy, to.slots_out[0]
        if to.moves:
            for slot, out in zip(to.slots[1:], to.slots_out[1:], strict=True):
                copy(out, slot)
        if self.replace:
            copy(master, data)
        else:
            to.payload.add(to.slots[0], data, master)
        to.payload.round(to.w_out, master)


def run_operations(
    operations: Sequence[PieceUpdate], target: PieceBuffers, large: bool
) -> bool:
    """Apply operations to a piece; False for a gradient that is not finite."""
    first, *others = operations
    n = len(target.w_out)
    covers = first.start == 0 and len(first.data) == n
    if covers and not others:
        step = first.data.step if isinstance(first.data, Formed) else max(n, 1)
        for lo in range(0, n, step):
            if not first.apply(target, lo, min(lo + step, n), past=large):
                return False
        return True
    # Slots that move are not read again from memory: they are copied tile by tile
    # and updated in the cache.
    covers = covers and not target.moves
    written, copy = target.written, target.payload.copy
    step = target.payload.part(TILE, n)
    for lo in range(0, n, step):
        hi = min(lo + step, n)
        if target.moves:
            for slot, out in zip(target.slots, target.slots_out, strict=True):
                copy(out[lo:hi], slot[lo:hi])
        if not covers:
            copy(target.w_out[lo:hi], target.w_in[lo:hi])
        first.apply(target if covers else written, lo, hi)
        for operation in others:
            operation.apply(written, lo, hi)
    return True


def overflows(name: str, dtype: np.dtype[Any]) -> PushRejectedError:
    """Return why the sum of what trainers have pushed is refused."""
    return PushRejectedError(
        f"the sum of what was pushed for {name[:60]!r} is not finite: gradients that are "
        f"finite, times their weights, overflow {dtype} together; nothing was applied, "
        f"scale them down, clip them, or set the configuration value daskps.finite to "
        f"'allow'"
    )


def scaled(data: Array, weight: float, payload: Payload = NUMPY) -> Array:
    """Return a gradient times its weight."""
    if weight == 1.0:
        return data
    product = payload.empty(data.size, data.dtype)
    with np.errstate(all="ignore"):
        payload.multiply(data.reshape(-1), weight, product)
    return product.reshape(data.shape)

"""Applying arrays to the weights of a segment: what to do first, then doing it.

Everything that can fail (a user's `prepare`, a schedule) happens while the operations
are planned; once the first byte is written, nothing raises.
"""
# ruff: noqa: PLR0917  (every loop takes the same five things)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.shards.segment import Record, Segment

Array = np.ndarray[Any, np.dtype[Any]]
#: Where several updates meet in one pass, they go tile by tile, in elements: a tile
#: of weights and slots stays in the second-level cache between two updates.
TILE = 16_384


class Binding(Protocol):
    """A rule bound to a dtype: scalars once per update, then the compiled loops."""

    def scalars(self, step: int, lr: float | None) -> tuple[float, ...]:
        """Return the scalars of update number `step`, counted from 1."""

    def publish(
        self,
        w_in: Array,
        w_out: Array,
        g: Array,
        slots: tuple[Array, ...],
        scalars: tuple[float, ...],
    ) -> None:
        """Write the updated `w_in` to `w_out`."""

    def inplace(
        self,
        w: Array,
        g: Array,
        slots: tuple[Array, ...],
        scalars: tuple[float, ...],
    ) -> None:
        """Update `w` in place."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One array on its way into one piece."""

    data: Array
    start: int = 0
    #: None for a plain `+=` or, with `replace`, an assignment.
    binding: Binding | None = None
    scalars: tuple[float, ...] = ()
    replace: bool = False

    def apply(
        self, w_in: Array, w_out: Array, slots: tuple[Array, ...], lo: int, hi: int
    ) -> None:
        """Apply elements [lo, hi) of the piece; `w_in` may be `w_out`."""
        a, b = max(lo, self.start), min(hi, self.start + len(self.data))
        if a >= b:
            return
        data = self.data[a - self.start : b - self.start]
        if self.replace:
            w_out[a:b] = data
        elif self.binding is None:
            np.add(w_in[a:b], data, out=w_out[a:b])
        else:
            part = tuple(slot[a:b] for slot in slots)
            if w_in is w_out:
                self.binding.inplace(w_out[a:b], data, part, self.scalars)
            else:
                self.binding.publish(w_in[a:b], w_out[a:b], data, part, self.scalars)


class Publication:
    """The updates that become visible together, by position of their piece.

    Takes the record that is not in force for its own, so at most one is under way,
    and each ends with :meth:`commit` or :meth:`drop`.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.flip = segment.flip + 1
        self.old: Record = segment.record(self.flip - 1)
        self.record: Record = segment.record(self.flip)
        self._operations: dict[int, list[Operation]] = {}
        #: Whether the weights written to hold the publication before the current one.
        self._whole = segment.writing == segment.flip
        segment.writing = self.flip
        self.record.copy_from(self.old)

    def add(self, operations: Sequence[tuple[int, Operation]]) -> None:
        """Take operations, each with the position of its piece."""
        for position, operation in operations:
            self._operations.setdefault(position, []).append(operation)
            self.record.changed[position] = self.flip

    def commit(self) -> None:
        """Write the weights that changed and flip.

        A piece that this publication leaves alone is copied if the one before changed
        it: else both buffers hold the same. After a publication that stopped half-way
        every piece is copied.
        """
        segment, flip = self.segment, self.flip
        for position, w_out in enumerate(segment.weights[flip & 1]):
            w_in = segment.weights[(flip - 1) & 1][position]
            operations = self._operations.get(position)
            if operations:
                _run(operations, w_in, w_out, segment.slots[position])
            elif not self._whole or self.old.changed[position] == flip - 1:
                np.copyto(w_out, w_in)
        segment.flip = flip

    def drop(self) -> None:
        """Give up before a weight was written: no reader need start again."""
        if self._whole:
            self.segment.writing = self.flip - 1


def _run(
    operations: Sequence[Operation],
    w_in: Array,
    w_out: Array,
    slots: tuple[Array, ...],
) -> None:
    first, *others = operations
    n = len(w_out)
    covers = first.start == 0 and len(first.data) == n
    if covers and not others:
        first.apply(w_in, w_out, slots, 0, n)
        return
    for lo in range(0, n, TILE):
        hi = min(lo + TILE, n)
        if covers:
            first.apply(w_in, w_out, slots, lo, hi)
        else:
            w_out[lo:hi] = w_in[lo:hi]
            first.apply(w_out, w_out, slots, lo, hi)
        for operation in others:
            operation.apply(w_out, w_out, slots, lo, hi)

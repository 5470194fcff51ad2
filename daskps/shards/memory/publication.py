"""Applying arrays to the weights of a segment: what to do first, then doing it.

Everything that can fail (a user's `prepare`, a schedule) happens while the operations
are planned. Once the first byte is written, only two things raise: a gradient that is
looked at in the very pass that applies it, which writes nothing that is in force; and
memory that ran out, here or in a thread that helps, after which slots in place may be
half-way.
"""
# ruff: noqa: PLR0917  (every loop takes the same five things)

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from daskps.errors import PushRejectedError
from daskps.kernels import in_ranges
from daskps.shards.memory.segment import MIXED, SIDE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.kernels.interface import Fixed
    from daskps.shards.memory.segment import Record, Segment
    from daskps.shards.steps import Item
    from daskps.typing import Array

#: Where several updates meet in one pass, they go tile by tile, in elements: a tile
#: of weights and slots stays in the second-level cache between two updates.
TILE = 16_384
#: Shards with so many bytes of weights write them past the caches, which do not hold
#: both buffers, a gradient and what readers copy. With a pull after each push 4 MiB
#: gained a little, 2 MiB lost as much, 8 MiB and more gained a quarter.
PAST_NBYTES = 4 * 2**20


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
        slots_out: tuple[Array, ...] | None = None,
    ) -> None:
        """Write the updated `w_in` to `w_out`, and the slots to `slots_out`."""

    def fixed(
        self,
        w_in: Array,
        w_out: Array,
        slots: tuple[Array, ...],
        slots_out: tuple[Array, ...] | None = None,
    ) -> Fixed:
        """Return `publish` for arrays that stay where they are."""

    def stream(
        self,
        w_in: Array,
        w_out: Array,
        g: Array,
        slots: tuple[Array, ...],
        scalars: tuple[float, ...],
        slots_out: tuple[Array, ...] | None = None,
        *,
        check: bool = False,
    ) -> bool:
        """Do so past the caches; with `check`, False says that `g` is not finite."""

    def inplace(
        self,
        w: Array,
        g: Array,
        slots: tuple[Array, ...],
        scalars: tuple[float, ...],
    ) -> None:
        """Update `w` in place."""

    def is_finite(self, g: Array) -> bool:
        """Return whether a gradient has no NaN and no infinity."""


class Formed(Protocol):
    """An array that is formed part by part as it is sliced, and must not be kept."""

    @property
    def step(self) -> int:
        """Number of elements to take at a time."""

    def __len__(self) -> int:
        """Return the number of elements."""

    def __getitem__(self, part: slice) -> Array:
        """Return a part, good until the next one is formed."""


class PieceBuffers(NamedTuple):
    """The arrays of a piece: what is read and what is written, maybe the same."""

    w_in: Array
    w_out: Array
    slots: tuple[Array, ...]
    slots_out: tuple[Array, ...]

    def part(self, lo: int, hi: int) -> PieceBuffers:
        """Return elements [lo, hi), the same array where these are the same."""
        if lo == 0 and hi == len(self.w_out):
            return self
        w_out = self.w_out[lo:hi]
        w_in = w_out if self.w_in is self.w_out else self.w_in[lo:hi]
        slots_out = tuple(slot[lo:hi] for slot in self.slots_out)
        if self.slots is self.slots_out:
            return PieceBuffers(w_in, w_out, slots_out, slots_out)
        return PieceBuffers(w_in, w_out, tuple(s[lo:hi] for s in self.slots), slots_out)

    @property
    def moves(self) -> bool:
        """Whether the slots are read from one buffer and written to the other."""
        return self.slots is not self.slots_out

    @property
    def written(self) -> PieceBuffers:
        """What was written, to go on with in place."""
        return PieceBuffers(self.w_out, self.w_out, self.slots_out, self.slots_out)


class PieceUpdate(NamedTuple):
    """One array on its way into one piece."""

    data: Array | Formed
    start: int = 0
    #: None for a plain `+=` or, with `replace`, an assignment.
    binding: Binding | None = None
    scalars: tuple[float, ...] = ()
    replace: bool = False
    #: Whether NaN and infinity are looked for in the pass, as :func:`looks`.
    check: bool = False

    def apply(self, target: PieceBuffers, lo: int, hi: int) -> None:
        """Apply elements [lo, hi) of the piece."""
        start = self.start
        a, b = max(lo, start), min(hi, start + len(self.data))
        if a >= b:
            return
        data, to = self.data[a - start : b - start], target.part(a, b)
        if self.replace:
            in_ranges(_assign, (to.w_out, data))
        elif self.binding is None:
            in_ranges(np.add, (to.w_in, data, to.w_out))
        elif to.moves:
            self.binding.publish(
                to.w_in, to.w_out, data, to.slots, self.scalars, to.slots_out
            )
        elif to.w_in is not to.w_out:
            self.binding.publish(to.w_in, to.w_out, data, to.slots, self.scalars)
        else:
            self.binding.inplace(to.w_out, data, to.slots, self.scalars)

    def stream(self, target: PieceBuffers, lo: int, hi: int) -> bool:
        """As :meth:`apply`, past the caches; False for a gradient that is not finite."""
        if self.binding is None:
            self.apply(target, lo, hi)
            return True
        to = target.part(lo, hi)
        return self.binding.stream(
            to.w_in,
            to.w_out,
            self.data[lo:hi],
            to.slots,
            self.scalars,
            to.slots_out if to.moves else None,
            check=self.check,
        )


class Publication:
    """The updates that become visible together, by position of their piece.

    Takes the record that is not in force for its own, so at most one is under way,
    and none is begun that may be given up: what can fail is planned before.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, flip = segment, segment.flip
        self.flip = flip + 1
        self.old: Record = segment.records[flip & 1]
        self.record: Record = segment.records[self.flip & 1]
        self._operations: dict[int, list[PieceUpdate]] = {}
        self._begin()

    def _begin(self) -> None:
        """Say what is being written, and begin with the record in force."""
        self.segment.writing = self.flip
        self.record.copy_from(self.old)

    def add(self, operations: Sequence[tuple[int, PieceUpdate]]) -> None:
        """Take operations, each with the position of its piece."""
        for position, operation in operations:
            self._operations.setdefault(position, []).append(operation)
            self.record.changed[position] = self.flip

    @property
    def _is_large(self) -> bool:
        return _is_large(self.segment)

    def commit(self) -> None:
        """Write the weights that changed and flip.

        Raises
        ------
        PushRejectedError
            Where a gradient was to be looked at and is not finite. This publication
            stopped half-way then; the one in force is whole.
        """
        segment = self.segment
        if segment.is_together and 0 < len(self._operations) < len(segment.pieces):
            self._take_along()
        for position, operations in self._operations.items():
            n = segment.pieces[position].size
            if (rule := self._plain(operations, n)) is not None:
                (only,) = operations
                self._update(position, rule, only.data[0:n], only.scalars)
                continue
            bound = any(op.binding is not None for op in operations)
            slots = self._slots(position) if bound else ((),) * 2
            target = PieceBuffers(*self._weights(position), *slots)
            if not _run(operations, target, self._is_large):
                piece = segment.pieces[position].parameter
                raise PushRejectedError(
                    f"the gradient of {piece.name[:60]!r} has NaN or Inf; nothing "
                    f"was applied"
                )
        self.finish()

    def _take_along(self) -> None:
        """Copy what a small shard has into the buffer that the changes go to."""
        side = self.old.plain[SIDE]
        if side == MIXED:
            return
        np.asarray(self.record.weight_sides)[:] = 1 - side
        now, then = self.segment.vectors[side], self.segment.vectors[1 - side]
        for dtype, weights in now.items():
            np.copyto(then[dtype], weights)

    def _move(self, position: int) -> int:
        """Note that a piece gets new weights; return the buffer that they go to.

        It is the one that the record in force does not name.
        """
        into = 1 - self.old.weight_sides[position]
        self.record.weight_sides[position] = into
        return into

    def _weights(self, position: int) -> tuple[Array, Array]:
        """Return where to read the weights of a piece and where to write them."""
        into, weights = self._move(position), self.segment.weights
        return weights[1 - into][position], weights[into][position]

    def _plain(self, operations: Sequence[PieceUpdate], n: int) -> Binding | None:
        """Return the rule, where this is one update of a whole piece in one part."""
        data, start, binding, *_ = operations[0]
        fits = len(operations) == 1 and start == 0 and len(data) == n
        if self._is_large or not (isinstance(data, np.ndarray) or n <= data.step):
            return None
        return binding if fits else None

    def update(
        self, position: int, binding: Binding, data: Array, scalars: tuple[float, ...]
    ) -> None:
        """Note one optimizer step of a whole piece and apply it at once.

        Where every piece is given to it, :meth:`finish` takes the place of `commit`.
        """
        self.record.steps[position] += 1
        self.record.changed[position] = self.flip
        self._update(position, binding, data, scalars)

    def finish(self) -> None:
        """Put all updates in force in one store."""
        self.record.plain[SIDE] = self.record.side
        self.segment.flip = self.flip

    def _update(
        self, position: int, binding: Binding, data: Array, scalars: tuple[float, ...]
    ) -> None:
        """Apply one update to a whole piece, as each step of a small shard is."""
        into = self._move(position)
        slots, slots_out = self._slots(position)
        outs = slots_out if slots is not slots_out else None
        key = position, into, self.record.slot_sides.item(position), outs is None
        known = self.segment.updates.get(key)
        if known is None or known[0] is not binding:
            w_in, w_out = self._weights(position)
            known = binding, binding.fixed(w_in, w_out, slots, outs)
            self.segment.updates[key] = known
        known[1](data, scalars)

    def reset(self) -> None:
        """Begin anew with the steps of every piece and the first values of its slots.

        Written at once.
        """
        self.record.steps[:] = 0
        for position, values in enumerate(self.segment.slot_init):
            _, slots = self._slots(position)
            for slot, value in zip(slots, values, strict=True):
                slot[:] = value

    def gather_weights(self) -> None:
        """Bring all weights into one buffer, that which holds most, to be read at once.

        For a publication that changes none of them.
        """
        weights, record = self.segment.weights, self.record
        if record.side != MIXED:
            return
        nbytes = [0, 0]
        for side, piece in zip(record.weight_sides, weights[0], strict=True):
            nbytes[side] += piece.nbytes
        into = int(nbytes[1] > nbytes[0])
        for position, side in enumerate(record.weight_sides.tolist()):
            if side != into:
                record.weight_sides[position] = into
                pair = weights[into][position], weights[side][position]
                in_ranges(np.copyto, pair)

    def gather_slots(self) -> None:
        """Bring the slots of memory that is to have one buffer of them back into it.

        The other one holds nothing that is in force, for these pieces.
        """
        segment, record = self.segment, self.record
        if segment.is_durable:
            return
        for position in np.flatnonzero(record.slot_sides).tolist():
            slots = segment.slots_of(record, position)
            record.slot_sides[position] = 0
            for slot, out in zip(
                slots, segment.slots_of(record, position), strict=True
            ):
                in_ranges(np.copyto, (out, slot))

    def _slots(self, position: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return where to read the slots of a piece and where to write them.

        Of a durable segment that is the other buffer, which the record of this
        publication notes; the record in force goes on with the one it has.
        """
        segment, old, new = self.segment, self.old.slot_sides, self.record.slot_sides
        slots = segment.slots_of(self.record, position)
        if segment.n_sides == 1 or not slots or new[position] != old[position]:
            return slots, slots
        new[position] = 1 - old[position]
        return slots, segment.slots_of(self.record, position)


def looks(segment: Segment, items: Sequence[Item]) -> bool:
    """Return whether gradients can be looked at in the pass that applies them.

    They must be all that a publication applies, each to a whole piece, and nothing may
    be written that is in force: slots of one buffer are.
    """
    return (
        _is_large(segment)
        and len({item.position for item in items}) == len(items)
        and all(
            len(item.data) == segment.pieces[item.position].size
            and (segment.n_sides > 1 or not segment.slot_init[item.position])
            for item in items
        )
    )


def _is_large(segment: Segment) -> bool:
    return segment.weights_nbytes >= PAST_NBYTES


def _assign(out: Array, data: Array) -> None:
    out[:] = data


def _run(operations: Sequence[PieceUpdate], target: PieceBuffers, large: bool) -> bool:
    """Apply operations to a piece; False for a gradient that is not finite."""
    first, *others = operations
    n = len(target.w_out)
    covers = first.start == 0 and len(first.data) == n
    if covers and not others:
        step = max(n, 1) if isinstance(first.data, np.ndarray) else first.data.step
        for lo in range(0, n, step):
            hi = min(lo + step, n)
            if not large:
                first.apply(target, lo, hi)
            elif not first.stream(target, lo, hi):
                return False
        return True
    # Slots that move are not read again from memory: they are copied tile by tile
    # and updated in the cache.
    covers = covers and not target.moves
    written = target.written
    for lo in range(0, n, TILE):
        hi = min(lo + TILE, n)
        if target.moves:
            for slot, out in zip(target.slots, target.slots_out, strict=True):
                out[lo:hi] = slot[lo:hi]
        if not covers:
            target.w_out[lo:hi] = target.w_in[lo:hi]
        first.apply(target if covers else written, lo, hi)
        for operation in others:
            operation.apply(written, lo, hi)
    return True

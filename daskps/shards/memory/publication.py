"""The updates of a segment that become visible together, and the store that shows them.

:mod:`daskps.shards.memory.format` says what the words mean that are written here, and
why a reader without the lock has a whole copy.

A round is one publication, so what a shard was before it is all there: the record that
is not in force has the counts, and names the buffers of weights and slots. To
*withdraw* a round that other shards do not have is to put that record in force once
more, under a flip and a version of its own: no version ever names two states. Nothing
is written but words of the record. A process that is killed on the way leaves a shard
that still has the round, and a header word that says what was under way; the next
process with the lock does all of it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import IllegalStateError, PushRejectedError, StaleGenerationError
from daskps.kernels.past import PAST_NBYTES
from daskps.layout.arrays import compute_dtype
from daskps.shards.arrays.operations import (
    Formed,
    PieceBuffers,
    PieceUpdate,
    overflows,
    run_operations,
)
from daskps.shards.arrays.row_operations import RowUpdate
from daskps.shards.memory import undo
from daskps.shards.memory.feed import ON, Feed
from daskps.shards.memory.format import (
    CHANGED_ROW,
    FLIP,
    MIXED,
    ROUNDS,
    ROWS_SEQUENCE,
    RUN,
    SIDE,
    WRITING,
)
from daskps.shards.memory.room import Need, has_room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.optim import Bound
    from daskps.shards.memory.format import Record
    from daskps.shards.memory.segment import Segment
    from daskps.shards.steps import Item
    from daskps.typing import Array


#: Ids that are taken away by what takes none.
_NONE = np.empty(0, np.int64)


class Publication:
    """The updates that become visible together, by position of their piece.

    Making one starts writing: it says in the header which flip is coming, and copies the
    record in force over the other one. So at most one is under way,
    and none is begun that may be given up: what can fail is planned before.
    """

    #: Whether it begins with the record before the one in force.
    withdraws = False
    #: Where the only row of a rank or a producer begins that it changes; 0 for any
    #: rows.
    row = 0
    _resets = False

    def __init__(self, segment: Segment, *, of_sums: bool = False) -> None:
        #: Whether what is applied are sums of what others have looked at.
        self._of_sums = of_sums
        if segment.header[ROWS_SEQUENCE] & 1:
            undo.roll_back(segment)
        self.segment, flip = segment, segment.header[FLIP]
        self.flip = flip + 1
        self.old: Record = segment.records[flip & 1]
        self.record: Record = segment.records[self.flip & 1]
        self._operations: dict[int, tuple[PieceUpdate, ...]] = {}
        #: By the number of their table.
        self._rows: dict[int, list[RowUpdate]] = {}
        #: Those of which any row changes.
        self._changed: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """Say what is being written, and begin with the record in force."""
        header = self.segment.header
        # The writes of one that stopped half-way are unknown.
        row = header[CHANGED_ROW] if header[WRITING] == header[FLIP] else 0
        # First: else a process that goes on between the flip and its row takes the old
        # row for that one.
        header[CHANGED_ROW] = 0
        header[WRITING] = self.flip
        self.record.copy_from(self.old, row)

    def add(self, operations: Sequence[tuple[int, PieceUpdate | RowUpdate]]) -> None:
        """Take the operations of one step or round, each with the position of its piece.

        Each piece that they touch by its rule has taken one step more.
        """
        record, flip, sizes = self.record, self.flip, self.segment.sizes
        counted: set[int] = set()
        for position, operation in operations:
            if operation.binding is not None and position not in counted:
                counted.add(position)
                record.steps[position] += 1
            record.changed[position] = flip
            if isinstance(operation, RowUpdate):
                ordinal = position - len(sizes)
                self._rows.setdefault(ordinal, []).append(operation)
                if len(operation.ids) and ordinal not in self._changed:
                    self._changed.append(ordinal)
                # A removal is no push: how many steps it takes must not age rows.
                record.clocks[ordinal] += not operation.forget
            elif len(operation.data) or not sizes[position]:
                before = self._operations.get(position)
                them = (*before, operation) if before else (operation,)
                self._operations[position] = them

    def has_room(
        self, operations: Sequence[tuple[int, PieceUpdate | RowUpdate]]
    ) -> bool:
        """Return whether there is room for more rows, in the undo logs first of all."""
        pieces, all_tables = self.segment.pieces, self.segment.tables
        for position, operation in operations:
            if isinstance(operation, RowUpdate):
                ordinal = position - len(pieces)
                table, of = all_tables[ordinal], self._rows.get(ordinal, ())
                if not has_room(table, Need.of([*of, operation], table)):
                    return False
        return True

    def commit(self) -> None:
        """Write the rows and weights that changed, and flip.

        Raises
        ------
        PushRejectedError
            Where something was to be looked at and is not finite. This publication
            stopped half-way then; the one in force is whole once rows are settled.
        """
        segment, changed = self.segment, self._operations
        if self._changed:
            # First: what is refused there must not be in slots of one buffer yet.
            self._write_rows()
        if segment.is_together and 0 < len(changed) < len(segment.pieces):
            self._take_along()
        # As `is_large`, which each update would call.
        is_here, sizes = segment.payload.device is None, segment.sizes
        if not is_here or (segment.n_sides == 1 and segment.has_slots):
            self._look_first()
        large = segment.weights_nbytes >= PAST_NBYTES
        for position, operations in changed.items() if is_here else ():
            data, start, rule, scalars, replace, check = operations[0]
            n = sizes[position]
            if (
                # One update of a whole piece by its rule, in one part; the result of a
                # function of whole arrays replaces the weights.
                rule is not None
                and not (large or replace or start)
                and len(operations) == 1
                and len(data) == n
                and (not isinstance(data, Formed) or n <= data.step)
            ):
                whole = data[0:n] if isinstance(data, Formed) else data
                if check and not rule.is_finite(whole):
                    raise self._not_finite(position)
                self._update(position, rule, whole, scalars)
            else:
                self._run(position, operations, large=large)
        if segment.parts is not None:
            self._note_parts(segment.parts)
        self.record.plain[SIDE] = self.record.side
        if (self._resets or self.withdraws) and segment.tables:
            kind = undo.RESET if self._resets else undo.WITHDRAW
            undo.go_forward(segment, self.flip, kind)
            return
        header = segment.header
        # One aligned store of 8 bytes, after all others: who reads the new flip sees all
        # that it stands for. x86-64 keeps stores in order; where processors reorder them,
        # readers take the lock (`HostedShard.locks_reads`).
        header[FLIP] = self.flip
        header[CHANGED_ROW] = self.row
        if self._rows:
            undo.done(header)

    def _note_parts(self, parts: dict[int, tuple[int, int, int, int]]) -> None:
        """Note which elements of pieces have changed; see `Segment.parts`."""
        for position, operations in self._operations.items():
            before = self.old.changed.item(position)
            since, last, start, stop = parts.pop(position, (0, -1, 0, 0))
            if last != before:
                since, start, stop = before, self.segment.sizes[position], 0
            start = min(start, *(of.start for of in operations))
            stop = max(stop, *(of.start + len(of.data) for of in operations))
            if stop - start < self.segment.sizes[position]:
                parts[position] = since, self.flip, start, stop

    def _update_on_device(self) -> None:
        """Update all pieces there, and wait; give the shard up where that stops midway.

        Weights have two buffers and rows a log, but slots may have one buffer.
        """
        segment = self.segment
        try:
            for position, operations in self._operations.items():
                self._run(position, operations, large=True)
            self._await_device()
        except (PushRejectedError, StaleGenerationError):
            # No update does anything after a look that has found NaN, and a device that
            # has ended holds nothing.
            raise
        except Exception as error:
            has_slots = any(map(segment.slot_init.__getitem__, self._operations))
            if segment.n_sides == 1 and has_slots and segment.payload.give_up:
                raise segment.payload.give_up(error) from error
            raise

    def _run(
        self, position: int, operations: Sequence[PieceUpdate], *, large: bool
    ) -> None:
        """Apply any updates to a piece."""
        segment, master = self.segment, self.segment.has_master[position]
        bound = master or any(op.binding is not None for op in operations)
        slots = self._slots(position) if bound else ((),) * 2
        arrays = *self._weights(position), *slots
        target = PieceBuffers(*arrays, segment.payload, master)
        with np.errstate(all="ignore"):
            if not run_operations(operations, target, large):
                raise self._not_finite(position)

    def _queue_looks(self) -> None:
        """Have a device look at all that is to be looked at, before the first update."""
        for position, operations in self._operations.items():
            looked = []
            for operation in operations:
                if operation.check:
                    self.segment.payload.look(operation.formed(self.segment.payload))
                    operation = operation._replace(check=False)
                looked.append(operation)
            self._operations[position] = tuple(looked)

    def _look_first(self) -> None:
        """Look at sums before anything is written, where slots in force would be.

        In memory of this process alone slots have one buffer. A device goes on with the
        updates.
        """
        if self.segment.payload.device is not None:
            self._queue_looks()
            self._update_on_device()
            return
        slots = self.segment.slot_init
        if not any(map(slots.__getitem__, self._operations)):
            return
        for position, operations in self._operations.items():
            for data, *_, check in operations:
                if not isinstance(data, Formed):
                    if check and not self.segment.payload.is_finite(data):
                        raise self._not_finite(position)
                elif data.checks:
                    for lo in range(0, len(data), data.step):
                        data[lo : min(lo + data.step, len(data))]

    def _await_device(self) -> None:
        """Wait for a device; refuse what it has looked at, if that is not finite."""
        payload = self.segment.payload
        if payload.wait():
            return
        for position, operations in self._operations.items():
            for operation in operations:
                if not payload.is_finite(operation.formed(payload)):
                    # A sum that is formed is looked at again: that flag goes too.
                    payload.wait()
                    raise self._not_finite(position)
        for ordinal, updates in self._rows.items():
            for update in updates:
                if update.check and not payload.is_finite(update.data.reshape(-1)):
                    name = self.segment.tables[ordinal].piece.table.name
                    raise self._rows_not_finite(name, update)
        raise IllegalStateError("a look has found what no look finds again")

    def _not_finite(self, position: int) -> PushRejectedError:
        """Return why what was to be looked at is refused."""
        parameter = self.segment.pieces[position].parameter
        if self._of_sums:
            return overflows(parameter.name, np.dtype(compute_dtype(parameter.dtype)))
        return PushRejectedError(
            f"the gradient of {parameter.name[:60]!r} has NaN or Inf; nothing was applied"
        )

    def _write_rows(self) -> None:
        """Update rows in place, before anything else is written."""
        segment, changed = self.segment, self._changed
        undo.begin(segment, self.flip, changed)
        for ordinal in changed:
            table, clock = segment.tables[ordinal], self.old.clocks[ordinal]
            for i, update in enumerate(self._rows[ordinal]):
                named, gone = update, _NONE
                if table.unbounded is not None:
                    # Rows that were looked up before hold for the first update only.
                    known = update if not i else update._replace(rows=None)
                    clock += not update.forget
                    to = known, table.buffers, self.flip, clock
                    update, gone = table.unbounded.change(*to)
                if table.feed.head[ON]:
                    _tell(table.feed, self.record, named, gone)
                if update.forget:
                    continue
                if not update.apply(table.buffers, self.flip, segment.cache_dir):
                    raise self._rows_not_finite(table.piece.table.name, update)

    def _rows_not_finite(self, name: str, update: RowUpdate) -> PushRejectedError:
        """Return why rows that were to be looked at are refused."""
        if self._of_sums:
            return overflows(name, update.data.dtype)
        return PushRejectedError(
            f"rows for table {name[:60]!r} have NaN or Inf; nothing was applied"
        )

    def _take_along(self) -> None:
        """Copy what a small shard has into the buffer that changes of some pieces go to.

        Before the first of these is written.
        """
        side = self.old.plain[SIDE]
        if side == MIXED:
            return
        np.asarray(self.record.weight_sides)[:] = 1 - side
        now, then = self.segment.vectors[side], self.segment.vectors[1 - side]
        for dtype, weights in now.items():
            self.segment.payload.copy(then[dtype], weights)

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

    def _update(
        self, position: int, binding: Bound, data: Array, scalars: tuple[float, ...]
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
        known[1](data, scalars)  # the `update` in `Kernel.fixed`

    def reset(self) -> None:
        """Begin anew with the steps of every piece and the first values of its slots.

        Written at once, but for those of rows, which have no second buffer.
        """
        self._resets = True
        for position in range(len(self.record.factors)):
            self.record.steps[position] = self.record.factors[position] = 0
        for position, values in enumerate(self.segment.slot_init):
            now, slots = self._slots(position)
            if master := self.segment.has_master[position]:
                self.segment.payload.copy(slots[0], now[0])
                weights = slots[0]
            else:
                weights = self.segment.weights_of(self.record, position)
            for slot, value in zip(slots[master:], values[master:], strict=True):
                self.segment.payload.fill(slot, value)
            for j in self.segment.copied_anew[position]:
                self.segment.payload.copy(slots[j], weights)
        self.record.changed[:] = self.flip

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
                self.segment.payload.copy(*pair)

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
                segment.payload.copy(out, slot)

    def _slots(self, position: int) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Return where to read the slots of a piece and where to write them.

        Of a durable segment that is the other buffer, which the record of this
        publication notes; the record in force goes on with the one it has.
        """
        segment, old, new = self.segment, self.old.slot_sides, self.record.slot_sides
        slots = segment.slots[new.item(position)][position]
        if segment.n_sides == 1 or not slots or new[position] != old[position]:
            return slots, slots
        new[position] = 1 - old[position]
        return slots, segment.slots_of(self.record, position)


def _tell(feed: Feed, record: Record, named: RowUpdate, gone: Array) -> None:
    """Have a feed tell of rows that an update changes, and of those that it takes away."""
    feed.note(record, gone if named.forget else named.ids, named.by)
    if not named.forget:
        # The trainer that pushed did not name these rows.
        feed.note(record, gone, 0)


def checks(segment: Segment, items: Sequence[Item]) -> bool:
    """Return whether gradients can be looked at in the pass that applies them.

    They must be all that a publication applies, each to a whole piece, and nothing may
    be written that is in force: slots of one buffer are.
    """
    return (
        is_large(segment)
        and all(item.ids is None for item in items)
        and len({item.position for item in items}) == len(items)
        and all(
            len(item.data) == segment.pieces[item.position].size
            and (
                segment.n_sides > 1
                or segment.payload.device is not None
                or not segment.slot_init[item.position]
            )
            for item in items
        )
    )


def is_large(segment: Segment) -> bool:
    """Return whether a segment is updated past the caches, or on a device."""
    is_here = segment.payload.device is None
    return not is_here or segment.weights_nbytes >= PAST_NBYTES


def is_possible(segment: Segment) -> bool:
    """Return whether the last round of the run in progress can be withdrawn."""
    flip, now = segment.flip, segment.current.plain
    before = segment.record(flip - 1).plain
    if segment.withdraws == segment.writing == flip + 1:
        # Begun and not ended; the run may be out of that record already.
        return before[ROUNDS] == now[ROUNDS] - 1
    return (
        segment.writing == flip
        and before[RUN] == now[RUN] != 0
        and before[ROUNDS] == now[ROUNDS] - 1
    )


class Withdrawal(Publication):
    """The publication that takes back the one in force; :meth:`commit` ends it.

    Parameters
    ----------
    segment : Segment
        The memory; :func:`is_possible` says whether its last round can be withdrawn.
    """

    withdraws = True

    def _begin(self) -> None:
        """Begin with what was in force before, as it stands in the other record."""
        segment, flip = self.segment, self.flip
        # First: without it no process could tell that the weights to go back to are
        # whole.
        segment.withdraws = flip
        segment.header[CHANGED_ROW] = 0
        segment.writing = flip
        # Producers that have ended are noted in the record in force, at any time.
        self.record.take_producers(self.old)
        # The pieces of the round that goes read otherwise than they did.
        self.record.changed[self.old.changed == flip - 1] = flip

    def commit(self) -> None:
        """Take the round back, after its rows were told once more."""
        for table in self.segment.tables:
            table.feed.again(self.old, self.record)
            if table.since(self.old) or table.feed.began == self.flip - 1:
                # Rows whose time was over are there again, or it began after what the
                # round changed: no entry has them.
                table.feed.stop()
        super().commit()

"""One shard's memory and the views into it; the module `format` says what is where."""

from __future__ import annotations

from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from daskps.backend.host import private, untouched
from daskps.layout.slots import has_master, of_weights
from daskps.layout.spans import WEIGHTS, slot_area
from daskps.shards.arrays.payload import NUMPY
from daskps.shards.memory.areas import (
    HEADER,
    RECORD,
    areas_of,
    first_feed,
    held_parts,
    spare_parts,
)
from daskps.shards.memory.format import (
    CHANGED_ROW,
    FENCED,
    FLIP,
    LIMIT,
    ROWS_SEQUENCE,
    RUN,
    WITHDRAWS,
    WRITING,
    Identity,
    Record,
    integers,
)
from daskps.shards.memory.room import Memory, Own, begin_rows, held_nbytes
from daskps.shards.memory.table_memory import tables_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from daskps.kernels.rule_kernel import Fixed
    from daskps.layout.arrays import Layout
    from daskps.layout.parameters import Piece
    from daskps.layout.spans import Span
    from daskps.optim import Bound
    from daskps.shards.arrays.payload import Payload
    from daskps.shards.memory.areas import Area
    from daskps.typing import Array

#: Shards with so many bytes of weights at most keep them in one buffer at all times:
#: to copy what a push leaves alone takes less than to read it piece by piece.
TOGETHER_NBYTES = 2**16


class Segment:
    """One shard's memory and the views into it.

    Parameters
    ----------
    layout : Layout
        The store's layout.
    shard : int
        Index of the shard.
    slots : mapping of int to sequence of float
        For each parameter index the initial value of each optimizer slot.
    buffer : ndarray, shape (nbytes,), uint8, optional
        Memory to use, zeroed or with a shard in it, which is taken over as it is;
        private memory is taken by default.
    durable : bool, default False
        Whether the slots have two buffers, so that a process killed in an update
        leaves a shard that others can go on with.
    payload : Payload, optional
        The functions of the memory that weights and slots are in: on a device they are
        beside `buffer`, at the same distances from each other.

    Raises
    ------
    ProtocolError
        If `buffer` holds something else: another format, or another shard.
    """

    #: Has memory for more unbounded rows; None where only the owner has. In memory that
    #: was given it is the owner who says what has.
    memory: Memory | None = None
    #: How much of it is memory of a device, in bytes.
    device_nbytes = 0
    #: Of pieces of which only some elements have changed since the last state was taken:
    #: the flip before, the last one, and which. This process alone notes it, from the
    #: first state on.
    parts: dict[int, tuple[int, int, int, int]] | None = None

    def __init__(
        self,
        layout: Layout,
        shard: int,
        slots: Mapping[int, Sequence[float]],
        buffer: Array | None = None,
        *,
        durable: bool = False,
        payload: Payload = NUMPY,
    ) -> None:
        self.pieces: tuple[Piece, ...] = layout.pieces[shard]
        #: How many buffers the slots have.
        self.is_durable, self.n_sides = durable, 1 + durable
        #: Whether the store has no other shard.
        self.is_alone = layout.n_shards == 1
        #: The place of each area; everything else follows from it.
        self.areas = areas_of(layout, shard, slots, durable=durable)
        self.nbytes = self.areas[-1].stop
        if buffer is None:
            # Pages of what is on a device are never taken.
            new = private if payload.device is None else untouched
            buffer, self.memory = new(self.nbytes), Own()
        #: The functions that copy, add, fill and check its arrays.
        self.buffer, self.payload = buffer, payload
        n, n_tables = len(self.pieces), len(layout.tables)
        identity = Identity(n, self.n_sides, n_tables, self.nbytes)
        identity.check_header(self.buffer)
        header, record, *others = self.areas
        (self.words,) = header.views(self.buffer)
        #: The same words as plain integers, which are read on every call.
        self.header = integers(self.words)
        holds = identity.is_in(self.words, self.buffer)
        self.records = tuple(Record(w, n, n_tables) for w in record.views(self.buffer))
        weights = [area for area in others if area.name == WEIGHTS]
        self.weights_nbytes = sum(area.stride for area in weights)
        self.sizes = [piece.size for piece in self.pieces]
        #: Whether all of them lie in one buffer at all times.
        self.is_together = self.weights_nbytes <= TOGETHER_NBYTES
        first = [slots.get(p.parameter.index, ()) for p in self.pieces]
        #: For each piece the initial value of each optimizer slot.
        self.slot_init = [tuple(map(float, of)) for of in first]
        self.has_slots = any(self.slot_init)
        #: Whether its first slot is a master.
        self.has_master = [*map(has_master, first)]
        #: The numbers of its slots that begin with the weights, and of those that do so
        #: whenever optimizer state begins anew.
        self.copied = [*map(of_weights, first)]
        self.copied_anew = [of_weights(of, anew=True) for of in first]
        at = len(weights) + sum(map(len, self.slot_init))
        self._slot_areas, views = others[len(weights) : at], [*map(self.views, others)]
        #: For each buffer the weights of each dtype, and of each piece.
        self.vectors: tuple[dict[str, Array], ...] = tuple(
            {a.dtype: of[side] for a, of in zip(weights, views, strict=False)}
            for side in (0, 1)
        )
        self.weights = tuple(
            [v[p.parameter.dtype][p.local : p.local + p.size] for p in self.pieces]
            for v in self.vectors
        )
        #: For each of their buffers the slots of each piece.
        self.slots = tuple(
            self._by_piece(of[side] for of in views[len(weights) : at])
            for side in range(self.n_sides)
        )
        #: Tables, whose positions come after those of the pieces.
        of = layout.table_pieces[shard], zip(others[at:], views[at:], strict=True)
        self.tables = tuple(tables_of(*of, slots, memory=buffer, payload=payload))
        self.has_unbounded = any(table.unbounded is not None for table in self.tables)
        self._cache_dir: str | None = None
        #: Updates that :mod:`daskps.shards.memory.publication` makes ready once, by
        #: piece and buffers: the rule, and what its `Kernel.fixed` has returned.
        self.updates: dict[tuple[int, int, int, bool], tuple[Bound, Fixed]] = {}
        #: Until when reads in this process copy weights before they send them, as an
        #: update has run into them; by `time.monotonic`.
        self.copied_until = 0.0
        if not holds:
            self._begin(identity)

    def views(self, area: Area) -> tuple[Array, ...]:
        """Return the arrays of an area, in new memory of the device if they go there."""
        if self.payload.device is None or not area.has_values:
            return area.views(self.buffer)
        n = area.stop - area.offset
        memory = self.payload.allocate(n, np.uint8)
        self.device_nbytes += n
        self.payload.fill(memory.view(np.int64), 0)
        return area.views(memory, area.offset)

    def _begin(self, identity: Identity) -> None:
        """Make a shard of zeroed memory."""
        for arrays, values in zip(self.slots[0], self.slot_init, strict=True):
            for array, value in zip(arrays, values, strict=True):
                self.payload.fill(array, value)
        for table in self.tables:
            table.fill_slots(self.payload.fill)
            begin_rows(table)
            table.feed.begin(first_feed(table.piece))
        self.payload.wait()
        identity.write(self.words)

    def begin_copies(self) -> None:
        """Have slots that begin with the weights do so, in a shard that nobody sees yet."""
        for position, weights in enumerate(self.weights[0]):
            for slot in self.copied[position]:
                self.payload.copy(self.slots[0][position][slot], weights)

    def load(self, span: Span, data: Array) -> None:
        """Write first weights or rows of a piece, before anybody sees them.

        Raises
        ------
        LookupError, ValueError
            If there are none there, or not as many.
        """
        spans = [span]
        if span.area == WEIGHTS:
            copied = self.copied[span.position]
            spans += [span._replace(area=slot_area(j)) for j in copied]
        for one in spans:
            out = self.view(self.current, one)
            if out.shape != data.shape or span.stop - span.start != len(data):
                raise ValueError(f"{len(data)} values for elements {span}")
            self.payload.write(out, data)

    @staticmethod
    def needed_nbytes(
        layout: Layout,
        shard: int,
        slots: Mapping[int, Sequence[float]],
        *,
        durable: bool = False,
    ) -> int:
        """Return the bytes of memory of a new segment, without making one."""
        areas = areas_of(layout, shard, slots, durable=durable)
        return sum(stop - start for start, stop in held_parts(areas))

    @staticmethod
    def needed_of_device(
        layout: Layout, shard: int, slots: Mapping[int, Sequence[float]]
    ) -> int:
        """Return how many of these bytes are a device's."""
        areas = areas_of(layout, shard, slots)
        return sum(area.stop - area.offset for area in areas if area.has_values)

    @staticmethod
    def extent(
        layout: Layout, shard: int, slots: Mapping[int, Sequence[float]]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Return the length of a durable segment, and which parts have memory at first."""
        areas = areas_of(layout, shard, slots, durable=True)
        return areas[-1].stop, held_parts(areas)

    @staticmethod
    def spare(
        layout: Layout, shard: int, slots: Mapping[int, Sequence[float]]
    ) -> list[tuple[int, int]]:
        """Return which of these parts no one needs before the first publication."""
        return spare_parts(areas_of(layout, shard, slots, durable=True))

    @staticmethod
    def length(layout: Layout, shard: int, slots: Mapping[int, Sequence[float]]) -> int:
        """Return the length of a segment of private memory, most of it without memory."""
        return areas_of(layout, shard, slots)[-1].stop

    @property
    def held_nbytes(self) -> int:
        """Bytes of host memory that it has now, of the addresses reserved for it."""
        if not self.has_unbounded:
            return self.nbytes - self.device_nbytes
        fixed = sum(a.stop - a.offset for a in self.areas if a.first is None)
        return fixed + sum(map(held_nbytes, self.tables))

    def _by_piece(self, slots: Iterable[Array]) -> list[tuple[Array, ...]]:
        """Return slots, which come in the order of their areas, by piece."""
        slots = iter(slots)
        return [tuple(islice(slots, len(init))) for init in self.slot_init]

    @property
    def cache_dir(self) -> str | None:
        """Where compiled functions are kept."""
        return self._cache_dir

    @cache_dir.setter
    def cache_dir(self, value: str | None) -> None:
        self._cache_dir = value
        for table in self.tables:
            if table.unbounded is not None:
                table.unbounded.cache_dir = value

    @property
    def more_nbytes(self) -> int:
        """Bytes that a run in rounds takes beside this memory, for slots."""
        return 0 if self.is_durable else sum(area.stride for area in self._slot_areas)

    def double_slots(self) -> None:
        """Give slots of one buffer a second one: a round may have to be taken back."""
        if self.n_sides == 1 and self._slot_areas:
            memory = self.payload.allocate(self.more_nbytes, np.uint8)
            start = self._slot_areas[0].offset
            views = (area.views(memory, start)[0] for area in self._slot_areas)
            self.slots, self.n_sides = (self.slots[0], self._by_piece(views)), 2

    def single_slots(self) -> None:
        """Free the second buffer of slots that had one to begin with."""
        if not self.is_durable and self.n_sides == 2:
            # Updates made ready for that buffer would keep it.
            self.updates.clear()
            self.slots, self.n_sides = self.slots[:1], 1

    def amend(self, area: str, words: Sequence[tuple[int, int]]) -> None:
        """Store words beside any publication, in order: each of them alone is right.

        Of the header, or of the record in force, as `area` says.
        """
        into = self.header if area == HEADER else self.current.plain
        if area == RECORD:
            self.header[CHANGED_ROW] = 0
        for at, value in words:
            into[at] = value

    def part_since(self, flip: int, position: int) -> tuple[int, int]:
        """Return which elements of a piece may have changed since a flip."""
        since, last, *part = (self.parts or {}).get(position, (0, -1, 0, 0))
        if since <= flip and last == self.current.changed[position]:
            return part[0], part[1]
        # Some change was noted nowhere, or came before.
        return 0, self.sizes[position]

    def slots_of(self, record: Record, position: int) -> tuple[Array, ...]:
        """Return the optimizer slots of a piece as a record has them."""
        return self.slots[record.slot_sides.item(position)][position]

    def view(self, record: Record, span: Span) -> Array:
        """Return elements as a record has them."""
        area, position, start, stop = span
        if area == RECORD:
            return record.words[start:stop]
        if self._is_of_table(span):
            return self._view_of_table(span)
        if area == WEIGHTS:
            return self.weights_of(record, position)[start:stop]
        slots = enumerate(self.slots_of(record, position))
        return {slot_area(i): slot for i, slot in slots}[area][start:stop]

    def _is_of_table(self, span: Span) -> bool:
        return span.area != RECORD and span.position >= len(self.pieces)

    def _view_of_table(self, span: Span) -> Array:
        """Return elements of rows, or of their slots, as they are now."""
        area, position, start, stop = span
        table = self.tables[position - len(self.pieces)]
        return table.by_area[area].reshape(-1)[start:stop]

    def copy(self, flip: int, parts: Sequence[tuple[Span, Array]]) -> bool:
        """Copy elements out without the lock; return whether all are of that flip."""
        record, sequence = self.record(flip), self.header[ROWS_SEQUENCE]
        self.payload.read((out, self.view(record, span)) for span, out in parts)
        of_tables = [self._is_of_table(span) for span, _ in parts]
        if any(of_tables):
            now = self.header[ROWS_SEQUENCE], self.flip
            if sequence & 1 or now != (sequence, flip):
                return False
        # Slots of one buffer are written in place by the publication that is coming.
        kept = self.n_sides > 1 or all(
            rows or span.area in (RECORD, WEIGHTS)
            for rows, (span, _) in zip(of_tables, parts, strict=True)
        )
        return self.writing <= flip + kept

    @cached_property
    def places(self) -> dict[str, tuple[list[int], list[int]]]:
        """For each dtype where its pieces begin in the vector, and their positions."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for position, piece in enumerate(self.pieces):
            starts, positions = found.setdefault(piece.parameter.dtype, ([], []))
            starts.append(piece.local)
            positions.append(position)
        return found

    def weights_of(self, record: Record, position: int) -> Array:
        """Return the weights of a piece as a record has them."""
        return self.weights[record.weight_sides[position]][position]

    @property
    def flip(self) -> int:
        """Number of publications; its parity selects the record."""
        return self.header[FLIP]

    @flip.setter
    def flip(self, value: int) -> None:
        self.header[FLIP] = value

    @property
    def writing(self) -> int:
        """The flip being written, or the last one that was."""
        return self.header[WRITING]

    @writing.setter
    def writing(self, value: int) -> None:
        self.header[WRITING] = value

    @property
    def withdraws(self) -> int:
        """The flip of the withdrawal that was begun last."""
        return self.header[WITHDRAWS]

    @withdraws.setter
    def withdraws(self, value: int) -> None:
        self.header[WITHDRAWS] = value

    @property
    def limit(self) -> int | None:
        """The round from which on the run in progress completes none, if it has one."""
        header = self.header
        run = self.records[header[FLIP] & 1].plain[RUN]
        return header[LIMIT] if run and abs(header[FENCED]) == run else None

    @property
    def awaits_word(self) -> bool:
        """Whether that is until all shards have heard that a trainer has finished."""
        return self.limit is not None and self.header[FENCED] < 0

    def fence(self, limit: int, *, until_word: bool = False) -> None:
        """Let the run in progress complete no round from `limit` on."""
        run = self.current.plain[RUN]
        # In this order: a limit without its run says nothing.
        self.amend(HEADER, ((LIMIT, limit), (FENCED, -run if until_word else run)))

    def unfence(self) -> None:
        """Let the run in progress complete rounds again."""
        self.amend(HEADER, ((FENCED, 0), (LIMIT, -1)))

    def record(self, flip: int) -> Record:
        """Return the record of a flip: the current one, or the one before it."""
        return self.records[flip & 1]

    @property
    def current(self) -> Record:
        """The record in force."""
        return self.records[self.header[FLIP] & 1]

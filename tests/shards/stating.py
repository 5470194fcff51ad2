"""The state of all shards of a store as one, and shards that it is installed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from daskps.kernels import id_hash
from daskps.layout.arrays import Layout
from daskps.layout.chunks import WHOLE
from daskps.layout.slots import width
from daskps.layout.spans import (
    CANDIDATES,
    COUNTS,
    IDS,
    ROWS,
    TOUCHED,
    WEIGHTS,
    Span,
    slot_area,
)
from daskps.layout.tables import UnboundedTable
from daskps.shards.frozen import BegunCopy, FrozenShard
from daskps.shards.installation import Counted, Installation
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard

#: Arrays by name of the parameter or table and area, and what is counted.
State = tuple[dict[tuple[str, str], Any], Counted]


def copied(shards: Sequence[Shard]) -> list[FrozenShard]:
    found = []
    for shard in shards:
        begun = BegunCopy.of(shard.segment, WHOLE)
        copy = begun.read(shard.segment, shard.segment.flip)
        assert copy is not None
        found.append(copy)
    return found


def state_of(shards: Sequence[Shard], layout: Layout) -> State:
    """All of a state in the order that it has on any number of shards."""
    copies = copied(shards)
    arrays: dict[tuple[str, str], list[Any]] = {}
    for i, copy in enumerate(copies):
        for (name, area), span in spans_of(shards[i].segment, copy):
            arrays.setdefault((name, area), []).append(copy.get(span))
    counted = [copy.counted for copy in copies]
    assert all(isinstance(one, Counted) for one in counted)
    return {key: np.concatenate(parts) for key, parts in arrays.items()}, joined(
        counted
    )


def spans_of(segment: Segment, copy: FrozenShard) -> Iterator[tuple[Any, Span]]:
    for at, piece in enumerate(segment.pieces):
        name = piece.parameter.name
        for area in (WEIGHTS, *map(slot_area, range(len(segment.slot_init[at])))):
            yield (name, area), Span(area, at, 0, piece.size)
    sizes = iter(zip(copy.n_rows, copy.n_candidates, strict=True))
    for at, memory in enumerate(segment.tables, len(segment.pieces)):
        table, n, k = memory.piece.table, memory.piece.n_rows, 0
        widths = {ROWS: table.dim}
        for j, slot in enumerate(memory.slots):
            widths[slot_area(j)] = slot.shape[1]
        if memory.unbounded is not None:
            (n, k), widths[IDS] = next(sizes), 1
            if memory.unbounded.is_stamped:
                widths[TOUCHED] = 1
            yield (table.name, CANDIDATES), Span(CANDIDATES, at, 0, k)
            yield (table.name, COUNTS), Span(COUNTS, at, 0, k)
        for area, wide in widths.items():
            if n or memory.unbounded is not None:
                yield (table.name, area), Span(area, at, 0, n * wide)


def joined(counted: Sequence[Any]) -> Counted:
    steps: dict[int, int] = {}
    for one in counted:
        for index, n in one.steps.items():
            assert steps.setdefault(index, n) == n
        assert list(one.clocks) == list(counted[0].clocks)
    came = np.sum([one.came for one in counted], axis=0).tolist()
    version = max(one.version for one in counted)
    return Counted(
        version, dict(sorted(steps.items())), counted[0].clocks, came, counted[0].epochs
    )


def install(state: State, segments: Sequence[Segment], layout: Layout) -> None:
    """Install a state in new segments, a few elements at a time."""
    arrays, counted = state
    for i, segment in enumerate(segments):
        into = Installation(segment)
        for at, piece in enumerate(segment.pieces):
            name = piece.parameter.name
            for area in (WEIGHTS, *map(slot_area, range(len(segment.slot_init[at])))):
                values = arrays[name, area][piece.start : piece.stop]
                put(into, area, at, values)
        for at, memory in enumerate(segment.tables, len(segment.pieces)):
            table, first = memory.piece.table, memory.piece.first_row
            own, areas = slice(first, first + memory.piece.n_rows), [ROWS]
            areas += map(slot_area, range(len(memory.slots)))
            if isinstance(table, UnboundedTable):
                own, mine = (
                    belongs(arrays[table.name, a], memory.piece)
                    for a in (IDS, CANDIDATES)
                )
                ids = arrays[table.name, IDS][own]
                without = [arrays[table.name, a][mine] for a in (CANDIDATES, COUNTS)]
                into.begin_table(at, ids, np.array(without, np.int64))
                areas += [TOUCHED] if (table.name, TOUCHED) in arrays else []
            for area in areas:
                wide = {ROWS: table.dim, TOUCHED: 1}.get(area)
                if wide is None:
                    wide = memory.slots[int(area[-1])].shape[1]
                values = arrays[table.name, area].reshape(-1, wide)[own]
                put(into, area, at, values.reshape(-1))
        came = counted.came if i == 0 else [(0, 0)] * len(counted.came)
        replace(counted, came=came).put(segment)


def belongs(ids: Any, piece: Any) -> Any:
    table = piece.table
    found = id_hash.buckets(np.ascontiguousarray(ids), table.hash_seed, table.n_buckets)
    return (piece.first_bucket <= found) & (found < piece.stop_bucket)


def put(into: Installation, area: str, at: int, values: Any) -> None:
    cuts = [0, len(values) // 3, -(-len(values) // 2), len(values)]
    for start, stop in pairwise(cuts):
        if start < stop:
            into.put(Span(area, at, start, stop), values[start:stop])


def same(one: State, other: State) -> None:
    """Fail where a bit of two states differs."""
    (arrays, counted), (others, theirs) = one, other
    assert arrays.keys() == others.keys()
    for key, array in arrays.items():
        assert (array.dtype, array.tobytes()) == (
            others[key].dtype,
            others[key].tobytes(),
        ), key
    assert counted == theirs


def widths(slots: Mapping[int, Sequence[float]], index: int, dim: int) -> list[int]:
    return [width(first, dim) for first in slots.get(index, ())]


def content(segment: Segment, flip: int) -> list[Any]:
    """All values of a flip; of rows those in force now."""
    record, found = segment.record(flip), list[Any]()
    for position in range(len(segment.pieces)):
        found.append(segment.weights_of(record, position).tobytes())
        found += [s.tobytes() for s in segment.slots_of(record, position)]
    for table in segment.tables if flip == segment.flip else ():
        if table.unbounded is None:
            found += [a.tobytes() for a in (table.rows, *table.slots)]
            continue
        since = table.since(record)
        ids, rows = table.unbounded.ids(since)
        found += [ids.tolist(), table.unbounded.counts(since)]
        found += [a[rows].tolist() for a in (table.rows, *table.slots)]
        found += [table.unbounded.state[rows].tolist()]
        found += [a.tolist() for a in table.unbounded.index.candidates()]
    return found


def used(segment: Segment) -> list[bytes]:
    """All that the record in force says, but where things are in its segment."""
    record = segment.current
    words = record.words.copy()
    for part in record.own:
        words[part] = 0
    return [words[part].tobytes() for part in record.used()]

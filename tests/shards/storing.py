"""What a segment holds after every single store of a publication that changes rows.

Where the process was killed after that store, that is what others find. The loops over
rows are written here once more, one element at a time: the order of their stores is
what is looked at, and all else is the code itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from daskps.shards.arrays.row_operations import (
    RowBuffers,
    RowUpdate,
    entries_of,
    undo_word,
)
from daskps.shards.memory.feed import Feed
from daskps.shards.memory.format import Record
from daskps.shards.memory.segment import Segment

#: Rows that go to the log at a time here.
STRIDE = 2


class Stores:
    """The bytes of a segment after each store that was seen."""

    def __init__(self, segment: Segment) -> None:
        self._buffer = segment.buffer
        self.states: list[tuple[str, Any]] = []

    def note(self, label: str) -> None:
        self.states.append((label, self._buffer.copy()))


class Words:
    """Words of a segment, each store of which is noted."""

    def __init__(self, words: Any, stores: Stores, label: str) -> None:
        self._words, self._stores, self._label = words, stores, label

    def __getitem__(self, at: Any) -> Any:
        found = self._words[at]
        return found if isinstance(at, slice) else int(found)

    def __setitem__(self, at: int, value: int) -> None:
        self._words[at] = value
        self._stores.note(f"{self._label} {at}")


def pairs(target: RowBuffers) -> list[tuple[Any, Any]]:
    """What is changed in place, each with its log."""
    table, log = target.table, target.log
    return [*zip((table.w, *table.slots), (log.w, *log.slots), strict=True)]


def note(target: RowBuffers, flip: int, numbers: Any, stores: Stores) -> None:
    """Log rows, element by element, and then say so."""
    first = entries_of(target.undo[0])
    for entry, row in enumerate(numbers, first):
        target.log.rows[entry] = row
        stores.note("log id")
        for array, log in pairs(target):
            put(log[entry], array[row], stores, "log row")
    target.undo[0] = undo_word(flip, first + len(numbers))


def put(out: Any, values: Any, stores: Stores, label: str) -> None:
    for i, value in enumerate(values):
        out[i] = value
        stores.note(label)


def apply(update: RowUpdate, target: RowBuffers, flip: int, stores: Stores) -> bool:
    """As :meth:`RowUpdate.apply`."""
    for lo in range(0, len(update.ids), STRIDE):
        numbers = update.ids[lo : lo + STRIDE] - target.table.first
        data = update.data if update.at is None else update.data[update.at]
        data = data[lo : lo + STRIDE]
        if update.check and not np.isfinite(data).all():
            return False
        note(target, flip, numbers, stores)
        arrays = [array for array, _ in pairs(target)]
        made = [array[numbers] for array in arrays]
        write(update, data, made)
        for k, row in enumerate(numbers):
            for array, new in zip(arrays, made, strict=True):
                put(array[row], new[k], stores, "row")
    return True


def write(update: RowUpdate, data: Any, made: list[Any]) -> None:
    """Update copies of rows and slots."""
    rows, *slots = made
    binding: Any = update.binding
    if binding is not None:
        for k, g in enumerate(data):
            binding.inplace(rows[k], g, tuple(s[k] for s in slots), update.scalars)
    elif update.replace:
        rows[:] = data
    else:
        rows += data


def roll_back(target: RowBuffers, stores: Stores) -> None:
    """As :meth:`RowBuffers.roll_back`."""
    word = target.undo[0]
    for entry in range(entries_of(word) - 1, -1, -1):
        row = target.log.rows[entry]
        for array, log in pairs(target):
            put(array[row], log[entry], stores, "row back")
    target.undo[0] = undo_word(word >> 24, 0)


def follow(segment: Segment) -> None:
    """Have the feeds of all tables note what changes."""
    for table in segment.tables:
        table.feed.follow(segment.current, table.n_rows, None)


def told(segment: Segment) -> list[Any]:
    """What the feeds tell since each version."""
    record = segment.current
    read = [
        table.feed.read(record, since, by)
        for table in segment.tables
        for since in range(record.version + 1)
        for by in (0, 1)
    ]
    return [None if ids is None else ids.tolist() for ids in read]


def noting(feed: Feed, stores: Stores) -> Feed:
    """A feed whose stores are noted, an id at a time."""
    found = copy.copy(feed)
    found.head = Words(feed.head, stores, "feed head")  # type: ignore[assignment]  # as the words
    found._words = Words(feed._words, stores, "feed entry")  # type: ignore[assignment]  # as the words
    found._ids = Ids(feed._ids, stores)  # type: ignore[assignment]  # as the words
    return found


class Ids:
    """The ids of a feed, each store of which is noted."""

    def __init__(self, ids: Any, stores: Stores) -> None:
        self._ids, self._stores = ids, stores

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: Any) -> Any:
        return self._ids[at]

    def __setitem__(self, part: slice, ids: Any) -> None:
        put(self._ids[part], ids, self._stores, "feed id")


def words(target: RowBuffers, stores: Stores) -> Any:
    return Words(target.undo, stores, "undo")


@contextmanager
def watched(segment: Segment, *, one: Callable[..., bool] = apply) -> Iterator[Stores]:
    """Note every store to a segment, by code that finds it from here on."""
    stores = Stores(segment)
    segment.header = Words(segment.header, stores, "header")  # type: ignore[assignment]  # as the words
    segment.tables = tuple(
        table._replace(
            buffers=table.buffers._replace(undo=words(table.buffers, stores)),
            feed=noting(table.feed, stores),
        )
        for table in segment.tables
    )
    for record in segment.records:
        record.told = Words(record.told, stores, "told")  # type: ignore[assignment]  # as the words
    copied = Record.copy_from

    def copy_from(record: Record, *args: Any) -> None:
        copied(record, *args)
        stores.note("record copied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Record, "copy_from", copy_from)
        patch.setattr(RowUpdate, "apply", lambda *args: one(*args[:3], stores))
        patch.setattr(RowBuffers, "roll_back", lambda to: roll_back(to, stores))
        yield stores

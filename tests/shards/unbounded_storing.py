"""What a segment holds after every store of a publication that gives ids rows.

As :mod:`tests.shards.storing`, which notes rows and their log. The loops over words are
those that are compiled otherwise: they run as Python here, one store after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from daskps.kernels import (
    index_changes,
    row_index,
    system,
    words_log,
)
from daskps.shards.arrays import unbounded_rows
from daskps.shards.memory.segment import Segment
from tests.shards.storing import Stores, put, watched

LOOPS = {f.__name__: f for f in row_index.LOOPS}


class Noting:
    """An array, each store to which is noted."""

    def __init__(self, array: Any, stores: Stores, label: str) -> None:
        self._array, self._stores, self._label = array, stores, label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, at: Any) -> Any:
        return self._array[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self._array[at] = value
        self._stores.note(self._label)


class Loops:
    """The loops as Python, whose stores are noted."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores

    def function(self, name: str) -> Any:
        def run(words: Any, places: Any, *args: Any) -> Any:
            noting = Noting(words, self._stores, "word")
            # Of what a loop is given the entries of the log are longest.
            told = [
                Noting(a, self._stores, "log word")
                if isinstance(a, np.ndarray) and np.shares_memory(a, words)
                else a
                for a in args
            ]
            with np.errstate(over="ignore"):
                return LOOPS[name](noting, places, *told)

        return run


@contextmanager
def watched_unbounded(segment: Segment) -> Iterator[Stores]:
    """Note every store to a segment with unbounded tables."""
    with watched(segment) as stores, pytest.MonkeyPatch.context() as patch:

        def store(address: int, value: int) -> None:
            system.store(int(address), int(value))
            stores.note("undo of words")

        def scatter(w: Any, rows: Any, values: Any, **_: Any) -> None:
            for row, value in zip(rows, values, strict=True):
                put(w[row], value, stores, "new row")

        patch.setattr(words_log, "store", store)
        patch.setattr(index_changes, "store", store)
        patch.setattr(unbounded_rows, "scatter", scatter)
        patch.setattr(row_index, "_module", lambda _: Loops(stores))
        for table in segment.tables:
            if (of := table.unbounded) is not None:
                of.own = Noting(of.own, stores, "own word")  # type: ignore[assignment]  # as the words
                head = Noting(of.head, stores, "head word")
                of.head = of.index.head = head  # type: ignore[assignment]  # as the words
        yield stores

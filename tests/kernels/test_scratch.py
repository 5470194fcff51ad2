"""Memory for a moment: given on when its last view is gone, never before."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from daskps.kernels import row_repeats, scratch

N = scratch.SMALLEST
Kept = dict[int, deque[Any]]


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What is kept, by the bits of its length: nothing yet."""
    found: Kept = {bits: deque() for bits in range(scratch.LARGEST.bit_length())}
    monkeypatch.setattr(scratch, "_kept", found)
    return found


def address(array: Any) -> int:
    return int(array.ctypes.data)


def n_of(kept: Kept) -> int:
    return sum(map(len, kept.values()))


def test_memory_goes_on_when_its_last_view_is_gone() -> None:
    first = scratch.empty(N, np.uint8)
    at, part = address(first), first[10:20].view(np.int8)
    del first
    other = scratch.empty(N, np.uint8)
    assert address(other) != at  # a part of it is still looked at
    del part
    assert address(scratch.empty(N // 8, np.int64)) == at


def test_arrays_of_one_length_have_memory_of_their_own(kept: Kept) -> None:
    held = [scratch.empty(N, np.uint8) for _ in range(7)]
    for i, array in enumerate(held):
        array[:] = i
    assert [int(array.sum()) for array in held] == [i * N for i in range(7)]
    assert n_of(kept) == 4


@pytest.mark.parametrize(("nbytes", "n"), [(N - 1, 0), (2**23 + 1, 0), (2**23, 1)])
def test_small_and_very_large_arrays_are_not_kept(
    nbytes: int, n: int, kept: Kept
) -> None:
    assert scratch.empty(nbytes, np.uint8).shape == (nbytes,)
    assert n_of(kept) == n


def test_zeros_are_zeros_also_in_used_memory() -> None:
    scratch.empty(N, np.uint8)[:] = 7
    assert not scratch.zeros(N // 4, np.int32).any()


def test_sums_of_repeats_stay_as_long_as_they_are_held() -> None:
    ids, rows = np.arange(2_000) // 2, np.ones((2_000, 32), "f4")
    first = row_repeats.repeats(ids).sum(rows)
    for _ in range(6):
        row_repeats.repeats(ids).sum(3 * rows)
    assert first.nbytes >= N
    assert (first == 2).all()


def test_no_two_threads_have_the_same_memory() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            mine = scratch.empty(N, np.uint8)
            mine.fill(number)
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

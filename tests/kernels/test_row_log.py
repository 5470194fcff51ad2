"""Rows changed under an undo log: what is logged, what is put back, what is read."""

from __future__ import annotations

import os
import signal
from mmap import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daskps import optim
from daskps.kernels import row_log, row_moves, row_writes
from daskps.kernels.row_log import TableRows, UndoLog
from daskps.layout.arrays import DTYPES
from tests.kernels.compiling import kept

BASE = 5 << 24


def made(rng: Any, shape: Any, dtype: Any) -> Any:
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def room(table: TableRows, entries: int) -> UndoLog:
    arrays = [np.zeros((entries, a.shape[1]), a.dtype) for a in (table.w, *table.slots)]
    rows, word = np.full(entries, -1), np.zeros(1, np.int64)
    return UndoLog(rows, arrays[0], tuple(arrays[1:]), word, BASE)


def entries_of(log: UndoLog) -> int:
    return int(log.word[0]) - BASE


def bits(table: TableRows) -> list[bytes]:
    return [a.tobytes() for a in (table.w, *table.slots)]


def put_back(log: UndoLog, n: int, asked: Any, *to: Any) -> None:
    """Put what rows were over what was read of them, as readers do."""
    read, at, first = to
    found = row_log.oldest_entries(log, n, asked, at, first=first)
    row_moves.gather(log.w, found[0], read, found[1])


passes = st.lists(
    st.lists(st.integers(0, 39), max_size=50).map(lambda x: list(dict.fromkeys(x))),
    max_size=3,
)


@settings(max_examples=40)
@given(passes, st.sampled_from(["f2", "f4", "f8"]), st.sampled_from([0, 100]))
def test_several_updates_are_undone_and_read_as_before(
    batches: Any, dtype: str, first: int
) -> None:
    rng = np.random.default_rng(len(batches))
    bound = optim.bind(optim.Adagrad(0.1), dtype, cache_dir=kept())
    compute = bound.kernel.compute_dtype
    w, slot = made(rng, (40, 5), dtype), np.ones((40, 5), compute)
    table = TableRows(w, (slot,), first)
    log, before = room(table, 200), bits(table)
    logged: list[int] = []
    for ids in batches:
        now = log._replace(begin=len(logged))
        g = made(rng, (60, 5), compute)
        at = rng.permutation(60)[: len(ids)]
        held = w.copy(), slot.copy()
        wanted = np.array(ids, np.int64) + first
        assert bound.rows(table, wanted, at, g, bound.scalars(1), now, check=True)
        for e, row in enumerate(ids, len(logged)):
            assert log.rows[e] == row
            assert log.w[e].tobytes() == held[0][row].tobytes()
            assert log.slots[0][e].tobytes() == held[1][row].tobytes()
        logged += ids
        if ids:
            assert entries_of(log) == len(logged)
    assert bits(table) != before or not logged
    n = len(logged)
    asked = np.array([*range(40), 3, 3], np.int64) + first
    read = np.concatenate([w, w[[3, 3]]])
    put_back(log, n, asked, read, None, first)
    assert read[:40].tobytes() == before[0]
    turned = np.concatenate([w, w[[3, 3]]])[::-1].copy()
    at = np.arange(42)[::-1].copy()
    put_back(log, n, asked, turned, at, first)
    assert turned[::-1].tobytes() == read.tobytes()
    for _ in range(2):
        row_log.restore(table, log, n)
        assert bits(table) == before


@pytest.mark.parametrize("offset", [0, 1])
def test_a_log_that_is_written_past_the_caches_has_what_was_there(offset: int) -> None:
    """Of more than 8 MiB, where it begins a line; else as any other."""
    rng, n = np.random.default_rng(0), 34_000
    bound = optim.bind(optim.Adagrad(0.1), "f4", cache_dir=kept())
    table = TableRows(made(rng, (n, 64), "f4"), (np.ones((n, 64), "f4"),))
    before = bits(table)
    logs = []
    for _ in range(2):
        memory = np.zeros(n * 64 + 16 + offset, "f4")
        start = -(memory.ctypes.data // 4) % 16 + offset
        logs.append(memory[start : start + n * 64].reshape(n, 64))
    log = room(table, n)._replace(w=logs[0], slots=(logs[1],))
    ids, g = rng.permutation(n), made(rng, (n, 64), "f4")
    assert bound.rows(table, ids, None, g, bound.scalars(1), log, check=True)
    assert bits(table) != before
    assert entries_of(log) == n
    for kept_rows, held in zip(logs, before, strict=True):
        old = np.frombuffer(held, "f4").reshape(n, 64)
        np.testing.assert_array_equal(kept_rows, old[ids])
    row_log.restore(table, log, n)
    assert bits(table) == before


@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("bad", [0, 15, 16, 47, 49])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_taken_back(
    dtype: str, bad: int, value: float
) -> None:
    bound = optim.bind(optim.SGD(0.1, momentum=0.9), dtype, cache_dir=kept())
    rng = np.random.default_rng(bad)
    table = TableRows(made(rng, (60, 7), dtype), (np.ones((60, 7), "f4"),))
    before, log, g = bits(table), room(table, 50), np.ones((51, 7), "f4")
    at, ids = rng.permutation(51)[:50], rng.permutation(60)[:50]
    g[at[bad], 3] = value
    args = table, ids, at, g, bound.scalars(1), log
    assert not bound.rows(*args, check=True)
    # The chunk with it counts, as its rows have changed; none after it does.
    n = max(0, entries_of(log))
    assert n == (0 if dtype == "f2" else min(50, bad // 16 * 16 + 16))
    row_log.restore(table, log, n)
    assert bits(table) == before
    assert bound.rows(*args)
    assert not np.isfinite(table.w[ids[bad]]).all()
    # Of another shard's rows nobody looks at the gradients.
    log.word[0] = 0
    rest = np.delete(np.arange(50), bad)
    one = TableRows(np.ones((60, 7), dtype), (np.ones((60, 7), "f4"),))
    assert bound.rows(one, ids[rest], at[rest], g, bound.scalars(1), log, check=True)


@pytest.mark.parametrize("bad", [-1, 60, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("verb", ["rows", "add", "assign"])
@pytest.mark.parametrize("what", ["id", "position"])
def test_an_index_outside_ends_it_before_memory_is_touched(
    verb: str, what: str, bad: int
) -> None:
    around = np.ones((80, 7), "f4")
    table = TableRows(around[10:70])
    log, g, before = room(table, 40), np.ones((60, 7), "f4"), around.tobytes()
    ids, at = np.arange(40), np.arange(40)
    (ids if what == "id" else at)[20] = bad
    bound = optim.bind(optim.SGD(0.1), "f4", cache_dir=kept())

    args: tuple[Any, ...] = table, ids, at, g, bound.scalars(1), log
    write: Any = bound.rows
    if verb != "rows":
        write, args = getattr(row_writes, verb), (*args[:4], log)
    with pytest.raises(ValueError, match=f"expected ids .* got .*{bad}"):
        write(*args)
    row_log.restore(table, log, max(0, entries_of(log)))
    assert around.tobytes() == before


@pytest.mark.parametrize("bad", [-1, 4, 2**62])
def test_a_log_that_names_no_row_is_refused(bad: int) -> None:
    around = np.ones((6, 3), "f4")
    table = TableRows(around[1:5])
    log, before = room(table, 3), around.tobytes()
    log.rows[:] = bad
    with pytest.raises(
        ValueError, match=f"entry 2 of an undo log names row {bad} of 4"
    ):
        row_log.restore(table, log, 3)
    with pytest.raises(ValueError, match="do not fit"):
        row_log.restore(table, log, 4)
    assert around.tobytes() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("verb", ["add", "assign"])
def test_rows_of_any_dtype_are_added_to_and_replaced(verb: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    for dim, k in ((5, 37), (9_000, 3), (1, 0), (0, 4)):
        table = TableRows(made(rng, (50, dim), dtype), first=1000)
        log, before, data = room(table, k), table.w.copy(), made(rng, (60, dim), dtype)
        rows, at = rng.permutation(50)[:k], rng.permutation(60)[:k]
        expected = before.copy()
        expected[rows] = data[at] if verb == "assign" else before[rows] + data[at]
        assert getattr(row_writes, verb)(table, rows + 1000, at, data, log, check=True)
        assert table.w.tobytes() == expected.tobytes()
        assert log.rows.tolist() == rows.tolist()
        assert log.w.tobytes() == before[rows].tobytes()
        row_log.restore(table, log, k)
        assert table.w.tobytes() == before.tobytes()
        first = data[:k].copy()
        assert getattr(row_writes, verb)(table, rows + 1000, None, first, log)
        expected[rows] = first if verb == "assign" else before[rows] + first
        assert table.w.tobytes() == expected.tobytes()


@pytest.mark.parametrize("verb", ["add", "assign"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_values_that_are_not_finite_are_taken_back(verb: str, dtype: str) -> None:
    table = TableRows(np.ones((40, 3), dtype))
    log, data, before = room(table, 40), np.ones((40, 3), dtype), bits(table)
    data[30, 1] = np.nan
    write = getattr(row_writes, verb)
    assert not write(table, np.arange(40), None, data, log, check=True)
    row_log.restore(table, log, max(0, entries_of(log)))
    assert bits(table) == before


@pytest.mark.parametrize("verb", ["add", "assign"])
def test_writes_refuse_what_does_not_fit(verb: str) -> None:
    w, ids, rows = np.ones((4, 3), "i4"), np.arange(2), np.ones((2, 3), "i4")
    log, write = room(TableRows(w), 2), getattr(row_writes, verb)
    cases: list[tuple[Any, ...]] = [
        (TableRows(w, (w,)), ids, None, rows, log),
        (TableRows(w), ids, None, rows.astype("f4"), log),
        (TableRows(w), ids, None, rows[:, :2].copy(), log),
        (TableRows(w), ids.astype("i4"), None, rows, log),
        (TableRows(w), np.arange(3), None, np.ones((3, 3), "i4"), log),
        (TableRows(w), ids, ids[:1], rows, log),
    ]
    for case in cases:
        with pytest.raises(ValueError, match=r"expected|do not fit"):
            write(*case)
    assert w.all()
    assert not log.word.any()


@pytest.mark.parametrize("dtype", ["f2", "i4"])
def test_ids_that_their_owner_changes_meanwhile_leave_a_whole_log(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableRows(np.arange(20).reshape(10, 2).astype(dtype))
    ids, log, before = np.arange(5), room(table, 5), bits(table)

    def gathered(*given: Any, **more: Any) -> None:
        row_moves.gather(*given, **more)
        ids[:] = 9, 8, 7, 6, -1

    monkeypatch.setattr(row_log, "gather", gathered)
    row_writes.add(table, ids, None, np.ones((5, 2), dtype), log)
    assert (table.w[:5] == np.arange(1, 11).reshape(5, 2)).all()
    row_log.restore(table, log, entries_of(log))
    assert bits(table) == before


def test_a_process_killed_at_any_moment_leaves_what_can_be_put_back() -> None:
    """On shared memory; every element tells how many updates it has had."""
    n, dim, k = 4_000, 32, 1_500
    sizes = [8 * 8, n * dim * 4, k * 8, k * dim * 4]
    memory = np.frombuffer(mmap(-1, sum(sizes)), np.uint8)
    head, w, rows, kept = np.split(memory, np.cumsum(sizes)[:-1])
    table = TableRows(w.view("f4").reshape(n, dim))
    words = head.view("i8")
    log = UndoLog(rows.view("i8"), kept.view("f4").reshape(k, dim), (), words[:1], 0)
    bound = optim.bind(optim.SGD(1.0), "f4")
    bound.kernel.warm_rows()
    rng, g = np.random.default_rng(1), np.full((k, dim), -1, "f4")
    sets = [rng.choice(n, k, replace=False) for _ in range(7)]
    member = np.array([np.isin(np.arange(n), s) for s in sets], "f4")
    scalars, torn = bound.scalars(1), 0

    def publish() -> None:
        flip = int(words[1]) + 1
        words[0] = flip << 24
        ids = sets[flip % 7]
        bound.rows(table, ids, None, g, scalars, log._replace(base=flip << 24))
        words[1] = flip

    def expected() -> Any:
        turns = np.bincount(np.arange(1, words[1] + 1) % 7, minlength=7).astype("f4")
        return np.broadcast_to((turns @ member)[:, None], (n, dim))

    for _ in range(30):
        child = os.fork()
        if not child:
            while True:
                publish()
        # Some publications, and then a random part of one.
        since, spins = int(words[1]), int(rng.integers(4_000))
        while words[1] < since + 2 or (spins := spins - 1) > 0:
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        torn += not np.array_equal(table.w, expected())
        flip, entries = divmod(int(words[0]), 1 << 24)
        if flip == words[1] + 1:
            row_log.restore(table, log, entries)
        np.testing.assert_array_equal(table.w, expected())
    assert torn > 0

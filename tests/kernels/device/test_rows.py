"""Rows by element functions, with their log, against the loops of hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps import optim
from daskps.kernels import row_log, row_moves, row_writes
from daskps.kernels.device import ptx
from daskps.kernels.device import rows as device_rows
from daskps.kernels.device.row_loops import (
    gather_loop,
    row_look_loop,
    row_loop,
    sum_loop,
)
from daskps.kernels.row_log import TableRows, UndoLog
from daskps.kernels.row_repeats import repeats
from daskps.layout.arrays import DTYPES
from daskps.optim.master import WithMaster
from tests.kernels.compiling import kept
from tests.kernels.device.assembling import assemble, faults
from tests.kernels.device.launching import SPECIAL, Launcher, kernel_of, same_bits
from tests.kernels.test_rows import RULES

ROWWISE = optim.Adagrad(0.1, rowwise=True)
CASES = [(rule, "f4") for rule in RULES]
CASES += [(optim.Adam(0.1), "f2"), (optim.Ftrl(0.1), "f8")]
CASES += [(WithMaster(optim.SGD(0.1)), "f2"), (WithMaster(optim.SGD(0.1)), "f4")]
CASES += [(ROWWISE, dtype) for dtype in ("f2", "f4", "f8")]
CASES += [(optim.chain(optim.clip_by_value(-1, 1), ROWWISE), "f4")]
FIRST, BASE = 5000, 7 << 24


def drawn(rng, shape, dtype):
    """Return numbers of a dtype, special ones among them."""
    if np.dtype(dtype).kind != "f":
        return rng.integers(0, 255, shape).astype(dtype)
    found = rng.normal(size=shape)
    found.reshape(-1)[: len(SPECIAL)] = SPECIAL
    with np.errstate(over="ignore"):
        return found.astype(dtype)


def log_of(table, entries):
    """Return an undo log of a table, all of it other numbers."""
    copies = [
        np.full((entries, a.shape[1]), 3, a.dtype) for a in (table.w, *table.slots)
    ]
    words = np.full(entries, -9), np.zeros(1, np.int64)
    return UndoLog(words[0], copies[0], tuple(copies[1:]), words[1], BASE, 2)


def copied(table):
    return table._replace(w=table.w.copy(), slots=tuple(s.copy() for s in table.slots))


def arrays_of(table, log):
    return [table.w, *table.slots, log.rows, log.w, *log.slots, log.word]


def case(rule: Any, dtype: Any, *, n=200, dim=5, k=60):
    """Return a bound rule, its table, ids, positions, gradients and scalars."""
    rng = np.random.default_rng(n + dim)
    bound = optim.bind(rule, dtype, cache_dir=kept())
    compute = bound.kernel.compute_dtype
    per_row = bound.kernel.per_row or (False,) * len(rule.slots)
    slots = tuple(
        np.abs(rng.normal(size=(n, 1 if of else dim))).astype(compute) for of in per_row
    )
    table = TableRows(drawn(rng, (n, dim), dtype), slots, FIRST)
    ids, at = FIRST + rng.permutation(n)[:k], rng.permutation(2 * k)[:k]
    ids[0] = FIRST  # the special ones
    ids = np.unique(ids)
    return (
        bound,
        table,
        ids,
        at[: len(ids)],
        drawn(rng, (2 * k, dim), dtype),
        bound.scalars(3),
    )


@pytest.mark.parametrize("direct", [False, True], ids=["at", "in order"])
@pytest.mark.parametrize(("rule", "dtype"), CASES, ids=repr)
def test_updates_have_the_bits_and_the_log_of_hosts(rule, dtype, direct):
    bound, table, ids, at, g, scalars = case(rule, dtype)
    places, values = at, g.astype(bound.kernel.compute_dtype)
    if direct:
        places, values = None, g[: len(ids)]
    mine = copied(table)
    log, my_log = log_of(table, 90), log_of(table, 90)
    bound.rows(table, ids, places, values, scalars, log)
    launcher = Launcher(1)
    kernel = kernel_of(rule, dtype, launcher)
    assert kernel.rows(mine, ids, places, values, scalars, my_log)
    assert launcher.wait()
    assert same_bits(arrays_of(mine, my_log), arrays_of(table, log))
    if values.dtype == dtype and not direct:
        # More entries, by what is checked once; then all of it is put back.
        before = copied(mine)
        update = kernel.fixed_rows(mine, my_log)
        update(ids[:20], at[:20], g, scalars, BASE, 2 + len(ids), False)
        bound.rows(
            table, ids[:20], at[:20], g, scalars, log._replace(begin=2 + len(ids))
        )
        launcher.wait()
        assert same_bits(arrays_of(mine, my_log), arrays_of(table, log))
        with pytest.raises(ValueError, match="names row -9"):
            device_rows.restore(launcher, mine, my_log, 82)
        assert not same_bits([before.w], [mine.w])


def test_every_operation_says_how_it_rounds(tmp_path):
    loops = {gather_loop(n) for n in (1, 2, 4, 8)}
    loops |= {row_look_loop(np.dtype(dtype)) for dtype in ("f2", "f4", "f8")}
    loops |= {sum_loop(np.dtype(dtype)) for dtype in ("f4", "f8", "i4", "bool")}
    for rule, dtype in CASES:
        kernel = kernel_of(rule, dtype, Launcher())
        loops.add(row_loop(kernel.rule, kernel.dtype))
    texts = [loop.ptx(kept()) for loop in loops]
    assert [fault for text in texts for fault in faults(text)] == []
    # Nothing was vectorised for this processor.
    assert not [loop for loop in loops if " x " in ptx.element_code(loop, kept())]
    # No division of 64 bits, which takes a hundred instructions.
    assert not [text for text in texts if "div.s64" in text or "rem.s64" in text]
    assemble(texts, tmp_path)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_look_at_rows_that_finds_something_leaves_them_and_a_log_of_them(bad):
    _, table, ids, at, g, scalars = case(ROWWISE, "f4")
    table.w[:], g[:] = 1, 2
    g[np.setdiff1d(np.arange(len(g)), at)] = np.nan  # rows of nobody
    launcher = Launcher(2)
    kernel, log, before = (
        kernel_of(ROWWISE, "f4", launcher),
        log_of(table, 90),
        copied(table),
    )
    g[at[7], 3] = bad
    assert kernel.rows(table, ids, at, g, scalars, log, check=True)
    assert not launcher.wait()
    assert same_bits([table.w, *table.slots], [before.w, *before.slots])
    part = log._replace(
        rows=log.rows[2:], w=log.w[2:], slots=tuple(s[2:] for s in log.slots)
    )
    device_rows.restore(launcher, table, part, len(ids))
    g[at[7], 3] = 2
    kernel.rows(table, ids, at, g, scalars, log, check=True)
    assert launcher.wait()
    assert (table.w[ids - FIRST] != 1).all()
    assert (np.delete(table.w, ids - FIRST, 0) == 1).all()


@pytest.mark.parametrize("adds", [True, False], ids=["add", "assign"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_have_the_bits_and_the_log_of_hosts(dtype, adds):
    rng, dtype = np.random.default_rng(4), np.dtype(dtype)
    table = TableRows(drawn(rng, (50, 6), dtype), (), FIRST)
    ids, at, data = FIRST + rng.permutation(50)[:30], rng.permutation(40)[:30], None
    data = drawn(rng, (40, 6), dtype)
    mine, launcher = copied(table), Launcher(5)
    log, my_log = log_of(table, 40), log_of(table, 40)
    write = row_writes.add if adds else row_writes.assign
    with np.errstate(all="ignore"):
        assert write(table, ids, at, data, log, cache_dir=kept())
    kernel = device_rows.writing(launcher, dtype, adds=adds)
    assert kernel.rows(mine, ids, at, data, (), my_log)
    assert launcher.wait()
    assert same_bits(arrays_of(mine, my_log), arrays_of(table, log))


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8"])
def test_rows_are_gathered_as_they_are(dtype):
    rng, launcher = np.random.default_rng(6), Launcher(7)
    w = drawn(rng, (50, 6), dtype)
    ids, at = FIRST + rng.integers(0, 50, 30), rng.permutation(40)[:30]
    out, expected = np.full((2, 40, 6), 9, dtype)
    device_rows.gather(launcher.launch, w, ids, out, at, first=FIRST)
    launcher.wait()
    row_moves.gather(w, ids, expected, at, first=FIRST, cache_dir=kept())
    assert out.tobytes() == expected.tobytes()
    device_rows.gather(launcher.launch, w, ids, out[:30], first=FIRST)
    launcher.wait()
    assert out[:30].tobytes() == w[ids - FIRST].tobytes()


def test_a_log_is_put_back_and_read_by_its_oldest_entries():
    bound, table, ids, _, g, scalars = case(optim.Adam(0.1), "f4")
    launcher, before = Launcher(8), copied(table)
    log = log_of(table, 200)._replace(begin=0)
    for start in (0, 20, 5):
        part = ids[start : start + 30]
        n = int(log.word[0]) - BASE if log.word[0] else 0
        bound.rows(table, part, None, g[: len(part)], scalars, log._replace(begin=n))
    n = int(log.word[0]) - BASE
    asked = np.concatenate([ids, [FIRST + 199, FIRST + 3], ids[:9]])
    out, expected = table.w[asked - FIRST], table.w[asked - FIRST]
    found = row_log.oldest_entries(log, n, asked, None, first=FIRST, cache_dir=kept())
    device_rows.gather(launcher.launch, log.w, found[0], out, found[1])
    launcher.wait()
    row_moves.gather(log.w, found[0], expected, found[1], cache_dir=kept())
    assert same_bits([out], [expected])
    assert same_bits([out], [before.w[asked - FIRST]])
    device_rows.restore(launcher, table, log, n)
    launcher.wait()
    assert same_bits([table.w, *table.slots], [before.w, *before.slots])


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "bool"])
def test_sums_of_repeats_are_added_in_order_of_appearance(dtype):
    rng, launcher = np.random.default_rng(9), Launcher(10)
    ids = rng.zipf(1.5, 500) % 70
    rows = rng.normal(size=(600, 5)).astype(dtype)
    if dtype == "i4":
        rows = rng.integers(-(2**31), 2**31, (600, 5)).astype(dtype)
    found = repeats(ids, cache_dir=kept())
    for at in (None, rng.permutation(600)[:500]):
        out = device_rows.sums(launcher, found, rows, at)
        launcher.wait()
        assert same_bits([out], [found.sum(rows, at)])


def test_wrong_rows_are_refused_before_anything_is_queued():
    rule, launcher = optim.SGD(0.1), Launcher()
    kernel = kernel_of(rule, "f4", launcher)
    table = TableRows(np.ones((9, 3), "f4"), (), FIRST)
    ids, g, log = FIRST + np.arange(2), np.ones((2, 3), "f4"), log_of(table, 9)
    scalars: Any = rule.scalars(1)
    for wrong, said in (
        ((table, ids + 8, None, g, scalars, log), "ids of rows from 5000 to 5008"),
        ((table, ids, np.array([0, 2]), g, scalars, log), "its value is none"),
        ((table, ids, None, g[:1], scalars, log), "contiguous"),
        ((table, ids, None, g.astype("f8"), scalars, log), "gradients of float32"),
        ((table, ids, None, g, scalars[:0], log), "scalars"),
        ((table, ids, None, g, scalars, log._replace(begin=8)), "do not fit"),
    ):
        with pytest.raises(ValueError, match=said):
            kernel.rows(*wrong)
    for w, named, said in (
        (table.w, ids + 8, "ids"),
        (table.w[:, ::2], ids, "contiguous"),
    ):
        with pytest.raises(ValueError, match=said):
            device_rows.gather(
                launcher.launch, w, named, g[:, : w.shape[1]].copy(), first=FIRST
            )
    found = repeats(ids, cache_dir=kept())
    for rows, at in ((g.astype("f2"), None), (g, np.array([0, 2]))):
        with pytest.raises(ValueError, match="expected"):
            device_rows.sums(launcher, found, rows, at)
    assert log.word[0] == 0
    assert (log.rows == -9).all()
    assert not launcher.queue


def test_no_rows_are_no_launch():
    launcher, none = Launcher(), np.empty(0, np.int64)
    table = TableRows(np.ones((9, 3), "f4"), (), FIRST)
    log = log_of(table, 9)
    kernel = kernel_of(optim.SGD(0.1), "f4", launcher)
    kernel.rows(table, none, None, table.w[:0], (0.1,), log)
    device_rows.gather(launcher.launch, table.w, none, table.w[:0], first=FIRST)
    device_rows.restore(launcher, table, log, 0)
    assert device_rows.sums(launcher, repeats(none), table.w[:0]).shape == (0, 3)
    assert not launcher.queue
    assert log.word[0] == 0

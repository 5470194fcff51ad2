"""Ranges of one array in several threads: the same bits, nobody left behind."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from daskps import kernels, optim
from daskps.kernels import copying, threads
from tests.cluster.forks import child

#: Elements of the arrays here; three threads get 40 to 44 thousand each.
N = 128 * 1024 + 3
#: Where the middle and the last range begin.
CUTS = (40_960, 86_016)


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(threads, "LEAST_NBYTES", 2**16)
    yield
    threads.allow(1)


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("daskps-update")]


def arrays(dtype: Any, n: int, skip: int) -> list[np.ndarray[Any, Any]]:
    """Return arrays whose first element lies so many after a cache line."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(n):
        raw = np.empty(N * np.dtype(dtype).itemsize + 128, np.uint8)
        start = -raw.ctypes.data % 64 + skip * np.dtype(dtype).itemsize
        a = raw[start : start + N * np.dtype(dtype).itemsize].view(dtype)
        a[:] = 1 + rng.random(N)
        found.append(a)
    return found


def applied(rule: Any, dtype: str, how: str, skip: int) -> list[bytes]:
    """Apply an update once; return the bytes of all that was written."""
    bound = optim.bind(rule, dtype)
    k, wide = len(rule.slots), bound.kernel.compute_dtype
    w, g, out = arrays(dtype, 3, skip)
    slots, outs = (tuple(arrays(wide, k, skip)) for _ in range(2))
    scalars = bound.scalars(3)
    if how == "inplace":
        bound.inplace(w, g, slots, scalars)
        return [a.tobytes() for a in (w, *slots)]
    if how.startswith("stream"):
        durable = outs if "durable" in how else None
        assert bound.stream(w, out, g, slots, scalars, durable, check="check" in how)
    else:
        durable = outs if "durable" in how else None
        bound.publish(w, out, g, slots, scalars, durable)
    return [a.tobytes() for a in (out, *(slots if durable is None else durable))]


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize(
    "how", ["inplace", "publish", "publish durable", "stream", "stream durable check"]
)
@pytest.mark.parametrize("dtype", ["f2", "f4"])
@pytest.mark.parametrize("rule", [optim.SGD(0.1), optim.Adam(0.1)], ids=repr)
def test_any_number_of_threads_gives_the_same_bits(
    rule: Any, dtype: str, how: str, skip: int
) -> None:
    expected = applied(rule, dtype, how, skip)
    for n in (2, 3):
        threads.allow(n)
        assert applied(rule, dtype, how, skip) == expected
        assert len(helpers()) >= n - 1


@pytest.mark.parametrize("at", [0, CUTS[0] - 1, CUTS[0], CUTS[1], N - 1])
def test_nan_in_any_range_is_found(at: int) -> None:
    """Before a slot that is in force is written, whichever range it is in."""
    threads.allow(3)
    bound = optim.bind(optim.Adam(0.1), "f4")
    w, out, g, m, v = arrays("f4", 5, 0)
    before = m.tobytes(), v.tobytes()
    assert kernels.finite(g)
    g[at] = np.nan
    assert not kernels.finite(g)
    scalars = bound.scalars(3)
    assert not bound.stream(w, out, g, (m, v), scalars, check=True)
    assert (m.tobytes(), v.tobytes()) == before
    others = tuple(arrays("f4", 2, 0))
    assert not bound.stream(w, out, g, (m, v), scalars, others, check=True)


def test_copies_are_cut_too() -> None:
    threads.allow(3)
    a, out = (array.reshape(-1, 1) for array in arrays("f8", 2, 1))
    a[:, 0] = np.arange(N)
    copying.copy(out, a)
    assert out.tobytes() == a.tobytes()


def test_ranges_run_at_the_same_time_and_cover_the_array_once() -> None:
    threads.allow(3)
    together, seen = threading.Barrier(3), []

    def loop(part: np.ndarray[Any, Any], more: str) -> None:
        together.wait(30)
        seen.append((int(part[0]), len(part), more))

    assert kernels.each(loop, (np.arange(N),), "more")
    lengths = np.diff([0, *CUTS, N]).tolist()
    assert sorted(seen) == [
        (start, n, "more") for start, n in zip((0, *CUTS), lengths, strict=True)
    ]


def test_small_arrays_and_one_thread_take_no_other() -> None:
    here = []

    def loop(part: np.ndarray[Any, Any]) -> None:
        here.append((threading.current_thread(), len(part)))

    kernels.each(loop, (np.zeros(N),))
    threads.allow(3)
    kernels.each(loop, (np.zeros(10_000),))
    assert here == [(threading.current_thread(), n) for n in (N, 10_000)]
    assert not helpers()


def test_nobody_waits_for_threads_that_are_busy() -> None:
    threads.allow(2)
    go, busy, done = threading.Event(), threading.Barrier(3), []

    def blocks(part: np.ndarray[Any, Any]) -> None:
        busy.wait(30)
        assert go.wait(30)

    other = threading.Thread(target=kernels.each, args=(blocks, (np.zeros(N),)))
    other.start()
    busy.wait(30)
    kernels.each(lambda part: done.append(len(part)), (np.zeros(N),))
    assert sum(done) == N
    go.set()
    other.join()


def test_an_error_comes_after_all_that_was_begun_is_over() -> None:
    """What another thread still writes must not be anybody else's by then."""
    threads.allow(2)
    begun, go, over = threading.Event(), threading.Event(), []

    def loop(part: np.ndarray[Any, Any]) -> None:
        if part[0] == 0:
            assert begun.wait(30)
            timer = threading.Timer(0.05, go.set)
            timer.start()
            raise KeyboardInterrupt
        begun.set()
        assert go.wait(30)
        over.append(len(part))

    with pytest.raises(KeyboardInterrupt):
        kernels.each(loop, (np.arange(N),))
    assert len(over) == 1


def test_an_error_of_another_thread_is_the_callers() -> None:
    threads.allow(2)
    both = threading.Barrier(2)

    def loop(part: np.ndarray[Any, Any]) -> None:
        both.wait(30)
        if part[0]:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        kernels.each(loop, (np.arange(N),))


def test_what_numpy_warns_of_is_the_callers_choice() -> None:
    threads.allow(3)
    together = threading.Barrier(3)
    largest = np.full(N, np.finfo("f4").max, "f4")

    def loop(*parts: np.ndarray[Any, Any]) -> None:
        together.wait(30)
        np.add(*parts)

    with np.errstate(all="ignore"):
        kernels.each(loop, (largest, largest, largest))
    assert np.isinf(largest).all()


def test_forked_child_waits_for_no_thread() -> None:
    threads.allow(3)
    a = np.ones(N)
    kernels.each(np.add, (a, a, a))
    assert len(helpers()) == 2

    def work(pipe: Any) -> None:
        kernels.each(np.add, (a, a, a))
        pipe.send(a.sum())

    with child(work) as process:
        assert process.receive() == 4 * N
        assert process.end() == 0


def test_threads_keep_no_array() -> None:
    """They would keep the memory of a shard that was freed."""
    threads.allow(3)
    a = np.ones(N)
    gone = weakref.ref(a)
    kernels.each(np.copyto, (a, a))
    del a
    deadline = time.monotonic() + 30
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0)


def test_threads_end_when_fewer_are_allowed() -> None:
    threads.allow(3)
    kernels.each(np.negative, (np.ones(N), np.ones(N)))
    before = helpers()
    assert len(before) == 2
    threads.allow(1)
    for thread in before:
        thread.join(30)
    assert not helpers()


def test_updates_go_on_where_the_system_gives_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And keep nothing for threads that are not there."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads.allow(3)
    a = np.ones(N)
    kernels.each(np.add, (a, a, a))
    assert (a == 2).all()
    gone = weakref.ref(a)
    del a
    assert gone() is None

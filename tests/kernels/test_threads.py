"""Ranges of one array in several threads: the same bits, nobody left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from daskps import kernels, optim
from daskps.kernels import copying, threads
from tests.cluster.forks import child
from tests.support import until

#: Elements of the arrays here; three threads get 40 to 44 thousand each.
#: What is inside: one call that helpers take part in, all of them, and who began it.
JOB, HELPERS, CALLER = threads._Job, threads._Helpers, threads._CALLER
N = 128 * 1024 + 3
#: Where the middle and the last range begin.
CUTS = (40_960, 86_016)


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(threads, "LEAST_NBYTES", 2**16)
    yield
    threads.allow(1)


@pytest.fixture(autouse=True)
def none_from_before() -> None:
    for thread in helpers():
        thread.join(30)
    assert not helpers()


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("daskps-update")]


def meet(n: int, *arrays: np.ndarray[Any, Any]) -> None:
    """Have so many threads in one call: those that were busy are done with it."""
    together = threading.Barrier(n)

    def loop(*parts: np.ndarray[Any, Any]) -> None:
        together.wait(30)

    kernels.in_ranges(loop, arrays or (np.zeros(N),))


@contextmanager
def busy_helper() -> Iterator[None]:
    """Keep the one helper that is allowed, and another caller, at one call."""
    threads.allow(2)
    go, busy = threading.Event(), threading.Barrier(3)

    def blocks(part: np.ndarray[Any, Any]) -> None:
        busy.wait(30)
        assert go.wait(30)

    given = blocks, (np.zeros(N),)
    other = threading.Thread(target=kernels.in_ranges, args=given)
    other.start()
    busy.wait(30)
    try:
        yield
    finally:
        go.set()
        other.join()


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
    if how.startswith("past"):
        durable = outs if "durable" in how else None
        assert bound.publish(
            w, out, g, slots, scalars, durable, check="check" in how, past=True
        )
    else:
        durable = outs if "durable" in how else None
        bound.publish(w, out, g, slots, scalars, durable)
    return [a.tobytes() for a in (out, *(slots if durable is None else durable))]


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize(
    "how", ["inplace", "publish", "publish durable", "past", "past durable check"]
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
        assert len(helpers()) == n - 1


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
    assert not bound.publish(w, out, g, (m, v), scalars, check=True, past=True)
    assert (m.tobytes(), v.tobytes()) == before
    others = tuple(arrays("f4", 2, 0))
    assert not bound.publish(w, out, g, (m, v), scalars, others, check=True, past=True)


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

    assert kernels.in_ranges(loop, (np.arange(N),), "more")
    lengths = np.diff([0, *CUTS, N]).tolist()
    assert sorted(seen) == [
        (start, n, "more") for start, n in zip((0, *CUTS), lengths, strict=True)
    ]


def test_small_arrays_and_one_thread_take_no_other() -> None:
    here = []

    def loop(part: np.ndarray[Any, Any]) -> None:
        here.append((threading.current_thread(), len(part)))

    kernels.in_ranges(loop, (np.zeros(N),))
    threads.allow(3)
    kernels.in_ranges(loop, (np.zeros(10_000),))
    assert here == [(threading.current_thread(), n) for n in (N, 10_000)]
    assert not helpers()


def test_nobody_waits_for_threads_that_are_busy() -> None:
    done: list[int] = []
    with busy_helper():
        kernels.in_ranges(lambda part: done.append(len(part)), (np.zeros(N),))
        assert sum(done) == N


def test_a_call_that_is_over_keeps_no_array() -> None:
    """Also where a helper that is busy has still to hear of it."""
    with busy_helper():
        a = np.ones(N)
        gone = weakref.ref(a)
        kernels.in_ranges(np.add, (a, a, a))
        del a
        assert gone() is None


def test_an_error_comes_after_all_that_was_begun_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another thread still writes must not be anybody else's by then."""
    threads.allow(2)
    begun, go, over = threading.Event(), threading.Event(), []
    wait = JOB._wait

    def waits(job: Any) -> None:
        go.set()
        wait(job)

    monkeypatch.setattr(JOB, "_wait", waits)

    def loop(part: np.ndarray[Any, Any]) -> None:
        if part[0] == 0:
            assert begun.wait(30)
            raise KeyboardInterrupt
        begun.set()
        assert go.wait(30)
        over.append(len(part))

    with pytest.raises(KeyboardInterrupt):
        kernels.in_ranges(loop, (np.arange(N),))
    assert len(over) == 1


class Struck:
    """Claims whose caller is struck by a signal at some of its looks."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.claims: dict[int, object] = {}
        self.at, self.looks = at, 0

    def setdefault(self, i: int, who: object) -> object:
        if who is CALLER:
            self.looks += 1
            if self.looks in self.at:
                raise KeyboardInterrupt
        return self.claims.setdefault(i, who)


@pytest.mark.parametrize("at", [(), (1,), (2,), (3,), (4,), (3, 4), (2, 4, 5)])
def test_a_signal_leaves_nobody_behind(
    at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it strikes: the first two looks are for work, the others to wait.

    With none of them it strikes right after the offer, and as the wait begins.
    """
    threads.allow(2)
    meet(2)
    begun, go, over, waited = threading.Event(), threading.Event(), [], []
    claims: Any = Struck(at)
    offer, wait = HELPERS.offer, JOB._wait

    def offers(found: Any, job: Any, n: int) -> None:
        job._claims = claims
        offer(found, job, n)
        assert begun.wait(30)
        if not at:
            raise KeyboardInterrupt

    def waits(job: Any) -> None:
        waited.append(1)
        if not at and len(waited) == 1:
            raise KeyboardInterrupt
        if claims.looks >= max(at, default=0):
            go.set()
        wait(job)

    monkeypatch.setattr(HELPERS, "offer", offers)
    monkeypatch.setattr(JOB, "_wait", waits)

    def loop(part: np.ndarray[Any, Any]) -> None:
        if part[0]:
            begun.set()
            assert go.wait(30)
            over.append(len(part))

    with pytest.raises(KeyboardInterrupt):
        kernels.in_ranges(loop, (np.arange(N),))
    assert len(over) == 1


def test_an_error_of_another_thread_is_the_callers() -> None:
    threads.allow(2)
    both = threading.Barrier(2)

    def loop(part: np.ndarray[Any, Any]) -> None:
        both.wait(30)
        if part[0]:
            raise MemoryError("no room")

    a = np.arange(N)
    gone = weakref.ref(a)
    gc.disable()  # what only a collection finds stays for long
    try:
        with pytest.raises(MemoryError, match="no room") as caught:
            kernels.in_ranges(loop, (a,))
        del caught, a
        meet(2)
        assert gone() is None
    finally:
        gc.enable()


def test_what_numpy_warns_of_is_the_callers_choice() -> None:
    threads.allow(3)
    together = threading.Barrier(3)
    largest = np.full(N, np.finfo("f4").max, "f4")

    def loop(*parts: np.ndarray[Any, Any]) -> None:
        together.wait(30)
        np.add(*parts)

    with np.errstate(all="ignore"):
        kernels.in_ranges(loop, (largest, largest, largest))
    assert np.isinf(largest).all()


def test_forked_child_waits_for_no_thread() -> None:
    threads.allow(3)
    a = np.ones(N)
    kernels.in_ranges(np.add, (a, a, a))
    assert len(helpers()) == 2

    def work(pipe: Any) -> None:
        kernels.in_ranges(np.add, (a, a, a))
        pipe.send((a.sum(), threads.allowed(), len(helpers())))

    with child(work) as process:
        assert process.receive() == (4 * N, 1, 0)
        assert process.end() == 0


def test_threads_keep_no_array() -> None:
    """They would keep the memory of a shard that was freed."""
    threads.allow(3)
    a = np.ones(N)
    gone = weakref.ref(a)
    meet(3, a)
    del a
    assert gone() is None


def test_threads_start_when_a_call_needs_them() -> None:
    """To start one may take milliseconds, and a shard is locked meanwhile."""
    threads.allow(64)
    meet(2, np.zeros(2**14))
    assert len(helpers()) == 1
    meet(4, np.zeros(2**15))
    assert len(helpers()) == 3


def test_threads_end_when_fewer_are_allowed() -> None:
    threads.allow(4)
    meet(4)
    before = helpers()
    assert len(before) == 3
    threads.allow(2)
    until(lambda: len(helpers()) == 1)
    threads.allow(4)
    meet(4)
    # Who was there stays.
    assert len(set(helpers()) & set(before)) == 1
    assert len(helpers()) == 3
    threads.allow(1)
    for thread in {*helpers(), *before}:
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
    kernels.in_ranges(np.add, (a, a, a))
    assert (a == 2).all()
    gone = weakref.ref(a)
    del a
    assert gone() is None

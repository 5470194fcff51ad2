"""Memory used again: only when the last view of it is gone, and within its limit."""

from __future__ import annotations

import threading

import numpy as np

from daskps.cluster.machine.leases import LEAST_LIMIT, SMALLEST, BufferPool, limit_of
from daskps.reduction import fold

N = SMALLEST // 4


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_again_when_the_last_view_is_gone():
    pool = BufferPool(LEAST_LIMIT)
    first = pool.empty(N, "f4")
    assert first.shape == (N,)
    assert first.dtype == np.float32
    assert first.flags.writeable
    where = address(first)
    view, frame = first[5:], first.data
    del first
    assert address(pool.empty(N, "f4")) != where
    del view
    assert address(pool.empty(N, "f4")) != where
    del frame
    assert where in {address(a) for a in [pool.empty(N, "f4") for _ in range(2)]}


def test_memory_of_another_length_is_not_taken():
    pool = BufferPool(LEAST_LIMIT)
    where = address(pool.empty(N, "f4"))
    other = pool.empty(2 * N, "f4")
    assert (len(other), pool.nbytes) == (2 * N, 4 * N)
    # The same number of bytes, as another dtype.
    again = pool.empty(N // 2, "f8")
    assert (address(again), pool.nbytes) == (where, 0)
    assert again.dtype == np.float64


def test_no_more_than_the_limit_is_kept_the_oldest_goes():
    pool = BufferPool(3 * SMALLEST)
    arrays = [pool.empty(N + i, "f4") for i in range(5)]
    del arrays
    assert SMALLEST < pool.nbytes <= 3 * SMALLEST
    assert len(pool.empty(N + 4, "f4")) == N + 4
    pool.clear()
    assert pool.nbytes == 0


def test_small_arrays_are_left_to_malloc():
    pool = BufferPool(LEAST_LIMIT)
    array = pool.empty(N - 1, "f4")
    assert array.flags.owndata
    del array
    assert pool.nbytes == 0


def test_the_limit_follows_the_memory_of_the_worker():
    assert limit_of(None) == limit_of(0) == limit_of(2**30) == LEAST_LIMIT
    assert limit_of(100 * 2**30) == 5 * 2**30


def test_threads_never_share_memory():
    pool, wrong = BufferPool(LEAST_LIMIT), []

    def work(me):
        for _ in range(300):
            mine = pool.empty(N, "i4")
            mine[:] = me
            if not (mine == me).all():
                wrong.append(me)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # Of 1,200 arrays, at most two for each thread at a time and what is looked at.
    assert 0 < pool.nbytes <= 16 * SMALLEST


def test_sums_of_read_only_contributions_go_into_memory_of_the_callers():
    made = []

    def empty(n, dtype):
        made.append(np.empty(n, dtype))
        return made[-1]

    leaves = [np.full(3, float(i)) for i in range(4)]
    for array in leaves:
        array.flags.writeable = False
    nodes = {(i, i + 1): ({0: a}, {0: 1.0}) for i, a in enumerate(leaves)}
    found = fold(nodes, 0, 4, empty)
    assert found is not None
    assert any(found[0][0] is array for array in made)
    assert found[0][0].tolist() == [6.0] * 3
    assert [a[0] for a in leaves] == [0.0, 1.0, 2.0, 3.0]

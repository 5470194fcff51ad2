"""Frames arrive in memory that is used again, and in one piece."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from distributed.comm import tcp

import daskps
from daskps.cluster import arrivals, upstream
from tests.support import gen_cluster

N = 2 * arrivals.SMALLEST
MESSAGES = {"daskps.ways.process": False, "daskps.ways.machine": False}
PLAIN = vars(tcp)["host_array"]


def place(array):
    return array.__array_interface__["data"][0]


def listen(worker):
    """Let a worker keep what it gets under "take", and say where it lies."""
    got: list[Any] = []

    async def take(x, y=None):
        got.append((x, y))
        return {"status": "OK"}

    worker.handlers["take"] = take
    return got


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=MESSAGES)
async def test_a_frame_takes_the_place_of_one_that_nobody_holds(c, s, a):
    store = await daskps.create({"w": np.zeros(4)})
    got = listen(a)
    places = []
    for k in range(4):
        sent = np.arange(N + 8 * k, dtype="u1")
        await s.rpc(a.address).take(x=upstream.frame(sent))
        received = got.pop()[0]
        np.testing.assert_array_equal(received, sent)
        assert received.flags.writeable
        places.append(place(received) & -arrivals.SMALLEST)
        del received
    assert len(set(places[1:])) == 1
    for _ in range(3):
        await s.rpc(a.address).take(x=upstream.frame(np.full(N, len(got), "u1")))
    assert len({place(x) for x, _ in got}) == 3
    assert [int(x[-1]) for x, _ in got] == [0, 1, 2]
    assert all((x == x[0]).all() for x, _ in got)
    await store.close()


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)] * 2, config=MESSAGES)
async def test_dask_has_its_own_back_when_the_last_host_is_gone(c, s, a, b):
    store = await daskps.create({"w": np.zeros(4)}, servers=[a.address])
    assert vars(tcp)["host_array"] is not PLAIN
    await store.close()
    for worker in (a, b):
        assert vars(tcp)["host_array"] is not PLAIN
        arrivals._pool.empty(N, "u1")
        assert 0 < arrivals._pool.nbytes <= arrivals._pool.limit
        await worker.close()
    assert vars(tcp)["host_array"] is PLAIN
    assert (arrivals._pool.limit, arrivals._pool.nbytes) == (0, 0)


def test_the_limit_is_that_of_the_largest_worker():
    arrivals.join("one", 100 * 2**20)
    arrivals.join("two", None)
    assert arrivals._pool.limit == arrivals.NO_LIMIT
    arrivals.leave("two")
    assert arrivals._pool.limit == 5 * 2**20
    arrivals.leave("one")
    arrivals.leave("one")
    assert arrivals._pool.limit == 0


@pytest.mark.parametrize("comm", [tcp.TCP, tcp.TLS])
def test_a_frame_is_one_piece(monkeypatch, comm):
    monkeypatch.setattr(tcp.TCP, "max_shard_size", N // 4)
    monkeypatch.setattr(tcp.TLS, "max_shard_size", N // 4)
    upstream.frame(np.empty(10, "u1"))
    assert comm.max_shard_size == N // 4
    upstream.frame(np.empty(N, "u1"))
    assert comm.max_shard_size == N
    upstream.frame(np.empty(N // 2, "u1"))
    assert comm.max_shard_size == N
    huge = np.broadcast_to(np.uint8(0), 2**32)
    upstream.frame(huge)
    assert comm.max_shard_size == (2**31 - 1 if comm is tcp.TLS else 2**32)


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=MESSAGES)
async def test_no_array_of_a_message_is_joined(c, s, a):
    """What Dask would cut and the receiver join by a copy: the second one."""
    got = listen(a)
    with pytest.MonkeyPatch.context() as patch:
        for comm in (tcp.TCP, tcp.TLS):
            patch.setattr(comm, "max_shard_size", N // 4)

        def refuse(buffers):
            raise AssertionError("joined by a copy")

        # By name: the package has a function that is called like this module of it.
        serialize = sys.modules["distributed.protocol.serialize"]
        patch.setattr(serialize, "host_array_from_buffers", refuse)
        x, y = np.arange(N, dtype="u1"), np.arange(N, dtype="u1")[::-1].copy()
        await s.rpc(a.address).take(x=upstream.frame(x), y=upstream.frame(y))
    np.testing.assert_array_equal(got[0][0], x)
    np.testing.assert_array_equal(got[0][1], y)

"""Large arrays travel in one piece."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from distributed.comm import tcp

from daskps.cluster import upstream
from tests.support import gen_cluster

N = 2**21
MESSAGES = {"daskps.ways.process": False, "daskps.ways.machine": False}


def listen(worker):
    """Let a worker keep what it gets under "take", and say where it lies."""
    got: list[Any] = []

    async def take(x, y=None):
        got.append((x, y))
        return {"status": "OK"}

    worker.handlers["take"] = take
    return got


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

"""Large arrays travel in one piece, and the messages of others as Dask has them."""

from __future__ import annotations

import sys
from typing import Any

import dask
import numpy as np
import pytest
from distributed.comm import tcp
from distributed.protocol.serialize import Serialize, Serialized, to_serialize

from daskps.cluster import upstream
from tests.support import gen_cluster

N = 2**21
MESSAGES = {"daskps.carriers.process": False, "daskps.carriers.machine": False}


@pytest.fixture
def short(monkeypatch):
    """Dask cuts what is longer than a quarter of an array here."""
    for comm in (tcp.TCP, tcp.TLS):
        monkeypatch.setattr(comm, "max_shard_size", N // 4)


def test_what_is_not_cut_is_left_to_dask(short):
    assert type(upstream.frame(np.empty(N // 4, "u1"))) is Serialize
    assert type(upstream.frame(np.empty(N // 4 + 1, "u1"))) is Serialized
    with dask.config.set({"distributed.comm.compression": "zlib"}):
        assert type(upstream.frame(np.empty(N, "u1"))) is Serialize


@pytest.mark.parametrize("n", [10, N])
def test_what_stays_in_the_process_is_the_array_itself(short, n):
    array = np.empty(n, "u1")
    assert upstream.unframe(upstream.frame(array)) is array
    assert upstream.unframe(array) is array


def listen(worker):
    """Let a worker keep what it gets under "take", and send it back."""
    got: list[Any] = []

    async def take(x, y):
        got.append((x, y))
        return {"status": "OK", "data": [upstream.frame(x), upstream.frame(y)]}

    worker.handlers["take"] = take
    return got


@gen_cluster(client=True, nthreads=[("127.0.0.1", 1)], config=MESSAGES)
async def test_no_array_of_a_message_is_joined(c, s, a):
    """What Dask would cut and the receiver join by a copy: the second one."""
    got, joined = listen(a), []
    # By name: the package has a function that is called like this module of it.
    serialize = sys.modules["distributed.protocol.serialize"]
    join = vars(serialize)["host_array_from_buffers"]

    def count(buffers):
        joined.append(buffers)
        return join(buffers)

    with pytest.MonkeyPatch.context() as patch:
        for comm in (tcp.TCP, tcp.TLS):
            patch.setattr(comm, "max_shard_size", N // 4)
        patch.setattr(serialize, "host_array_from_buffers", count)
        x, y = np.arange(N, dtype="u1"), np.arange(N, dtype="u1")[::-1].copy()
        async with upstream.connection(a.address, 10) as node:
            reply = await node.take(x=upstream.frame(x), y=upstream.frame(y))
            assert not joined
            # Others' messages on the same connection are cut as ever.
            await node.take(x=to_serialize(x), y=to_serialize(y))
        assert joined
    for found in (*got, reply["data"]):
        np.testing.assert_array_equal(found[0], x)
        np.testing.assert_array_equal(found[1], y)

"""Opening a store that is there, or that somebody is about to create."""

from __future__ import annotations

import asyncio
import math

import dask
import numpy as np
import pytest

import daskps
from tests.seams import waiters_of
from tests.support import PATIENCE, gen_cluster, until

W = np.arange(4.0)


def waiting(s):
    """Who waits for the names of new stores at the directory."""
    found = s.extensions.get("daskps-directory")
    return list(waiters_of(found)) if found else []


async def until_awaited(s, n=1):
    await asyncio.to_thread(until, lambda: len(waiting(s)) >= n)


@gen_cluster(client=True)
async def test_everybody_who_waits_is_answered(c, s, a, b):
    first = asyncio.ensure_future(daskps.aio.open("x", client=c, wait=60))
    second = asyncio.ensure_future(daskps.aio.open("x", client=c, wait=math.inf))
    other = asyncio.ensure_future(daskps.aio.open("y", client=c, wait=60))
    await until_awaited(s, 3)
    store = await daskps.aio.create({"w": W}, client=c, name="x")
    for opened in (await first, await second):
        assert opened == store
        np.testing.assert_array_equal(await opened["w"].pull(), W)
    assert not other.done()
    other.cancel()
    await store.delete()


@gen_cluster(client=True)
async def test_end_of_the_wait_says_what_and_how_long(c, s, a, b):
    with pytest.raises(daskps.StoreNotFoundError, match=r"waited 0\.05 s: .*'nobody'"):
        await daskps.aio.open("nobody", client=c, wait="50ms")
    assert not waiting(s)
    with pytest.raises(daskps.StoreNotFoundError, match=r"^no store named 'nobody'"):
        await daskps.aio.open("nobody", client=c, wait=0)
    # A store that goes leaves no name behind.
    store = await daskps.aio.create({"w": W}, client=c, name="gone")
    await store.delete()
    with pytest.raises(daskps.StoreNotFoundError, match=r"waited 0\.05 s"):
        await daskps.aio.open("gone", client=c, wait=0.05)


@gen_cluster(client=True)
async def test_default_timeout_does_not_cut_the_wait(c, s, a, b):
    with dask.config.set({"daskps.timeout": "0.2s"}):
        opening = asyncio.ensure_future(daskps.aio.open("x", client=c, wait=PATIENCE))
        await until_awaited(s)
        done, _ = await asyncio.wait({opening}, timeout=0.5)
        assert not done
        store = await daskps.aio.create({"w": W}, client=c, name="x", timeout=PATIENCE)
        assert await opening == store
    # A timeout that is given covers everything.
    with pytest.raises(TimeoutError, match="store 'z'"):
        await daskps.aio.open("z", client=c, wait="60s", timeout=0.05)
    await store.delete()


@gen_cluster(client=True)
async def test_long_waits_ask_again(c, s, a, b):
    """The directory keeps a waiting message for a bounded time only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("daskps.cluster.caller.finding.WAIT_SECONDS", 0.02)
        opening = asyncio.ensure_future(daskps.aio.open("x", client=c, wait=60))
        seen: list[object] = []

        def asked_thrice():
            seen.extend(f for f in waiting(s) if f not in seen)
            return len(seen) >= 3

        await asyncio.to_thread(until, asked_thrice)
        store = await daskps.aio.create({"w": W}, client=c, name="x")
        assert await opening == store
    await store.delete()


@pytest.mark.parametrize(
    ("wait", "error"), [(-1, ValueError), ("soon", ValueError), (True, TypeError)]
)
def test_bad_wait(client, wait, error):
    with pytest.raises(error, match="wait="):
        daskps.open("x", wait=wait)

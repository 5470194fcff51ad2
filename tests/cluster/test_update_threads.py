"""Large updates take as many threads as are configured where the worker has its host."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest

from daskps.kernels import threads
from tests.support import gen_cluster, store


def test_large_pushes_and_pulls_in_several_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through a worker's host: 16 MiB, so that copies are cut, too."""
    calls: list[int] = []

    class Watched(threads._Job):
        def __init__(self, work: Any, n: int) -> None:
            super().__init__(work, n)
            calls.append(n)

    monkeypatch.setattr(threads, "_Job", Watched)
    n = 2**22

    @gen_cluster(client=True, nthreads=[("127.0.0.1", 1)])
    async def use(c: Any, s: Any, a: Any) -> None:
        with dask.config.set({"daskps.update-threads": 5}):
            made = await store(c, params={"w": np.zeros(n, "f4")})
        assert threads.allowed() == 5
        await made.push({"w": np.full(n, 10, "f4")})
        pushed = calls.count(4)
        assert pushed >= 1
        await made.add({"w": np.full(n, 3, "f4")})
        await made.assign({"w": np.full(n, 7, "f4")})
        await made.push({"w": np.arange(n, dtype="f4")})
        found = (await made.pull())["w"]
        expected = np.float32(7) - np.float32(0.1) * np.arange(n, dtype="f4")
        assert found.tobytes() == expected.tobytes()
        assert calls.count(4) >= pushed + 4
        await made.close()

    use()
    assert threads.allowed() == 1


@gen_cluster(client=True)
async def test_one_thread_by_default(c: Any, s: Any, a: Any, b: Any) -> None:
    made = await store(c)
    assert threads.allowed() == 1
    await made.close()

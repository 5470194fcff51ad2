"""Workers in containers: namespaces of their own, with one memory or one each."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

import daskps
from tests.cluster import containers as within
from tests.cluster.containers import PIDS, containers
from tests.support import until


def test_workers_with_one_memory_may_have_one_number(tmp_path: Path) -> None:
    """Both are process 1; one is killed while it has the lock, the other one goes on."""
    with containers(tmp_path / "s", [PIDS, PIDS]) as (client, processes):
        (a, pid), (b, _) = processes.items()
        assert client.run(os.getpid) == {a: 1, b: 1}
        store = daskps.create({"w": np.zeros(2)}, servers=[a], client=client)
        assert client.submit(within.adds, store, 1, workers=[b]).result() == [0, 1]
        assert client.submit(within.maps, store, workers=[b]).result()
        has, held = tmp_path / "has", tmp_path / "held"
        turn = client.submit(within.passes_its_turn, str(has), workers=[a])
        until(has.exists)
        added = client.submit(within.adds, store, 0, workers=[b])
        assert turn.result()
        assert added.result() == [1, 1]
        holder = client.submit(within.holds, str(held), workers=[a])
        until(held.exists)
        added = client.submit(within.adds, store, 0, workers=[b], pure=False)
        os.kill(pid, signal.SIGKILL)
        assert added.result() == [2, 1]
        holder.cancel()
        # The other one adopts the memory.
        until(lambda: within.adds(store, 0) and [*store.placement] == [b])
        # And once it added zeros.
        assert store.version == store.pull()["w"].sum() + 1

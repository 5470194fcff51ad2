"""Workers in containers: namespaces of their own, with one memory or one each."""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest

import daskps
from daskps.cluster.machine.membership import HERE
from daskps.errors import ShardLostError
from tests.cluster import containers as within
from tests.cluster.containers import MEMORY, PIDS, containers
from tests.support import until
from tests.test_readme import run_python

SHARED = "DASK_DASKPS__SHARED_MEMORY_DIRECTORY"


def test_workers_with_one_memory_may_have_one_number(tmp_path: Path) -> None:
    """Both are process 1; one is killed while it has the lock, the other one goes on."""
    where = {SHARED: str(tmp_path)}
    with containers(tmp_path / "s", [PIDS, PIDS], **where) as (client, processes):
        (a, pid), (b, _) = processes.items()
        assert client.run(os.getpid) == {a: 1, b: 1}
        store = daskps.create({"w": np.zeros(2)}, servers=[a], client=client)
        assert client.submit(within.adds, store, 1, workers=[b]).result() == [0, 1]
        assert client.submit(within.is_near, store, workers=[b]).result()
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
        assert store.version == store.pull()["w"].sum()


def test_workers_with_a_memory_each_have_no_near_way(tmp_path: Path) -> None:
    """One that leaves sends its shards; where it dies they are lost, by name."""
    with containers(tmp_path / "s", [MEMORY] * 3) as (client, processes):
        a, b, _ = processes
        alone = daskps.create({"w": np.zeros(2)}, servers=[a], client=client)
        assert not client.submit(within.is_near, alone, workers=[b]).result()
        # All have one address: nobody there finds the memory of the others.
        client.retire_workers([a])
        assert within.adds(alone, 1) == [0, 1]
        (owner,) = alone.placement
        about: dict[str, Any] = {"servers": [owner], "client": client}
        safe = daskps.create({"w": np.zeros(2)}, copies=2, **about)
        assert within.adds(safe, 1) == [0, 1]
        os.kill(processes[owner], signal.SIGKILL)
        assert within.adds(safe, 0) == [1, 1]
        said = f"shard 0 of .*{alone.name}.* {owner} died"
        with pytest.raises(ShardLostError, match=said):
            alone.pull()


@pytest.mark.parametrize(
    ("protocol", "host", "carrier"),
    [("tcp", "[::1]", "socket"), ("ws", "127.0.0.1", "message")],
)
def test_other_addresses(
    protocol: str, host: str, carrier: str, tmp_path: Path
) -> None:
    """Nothing takes an address apart at its first colon."""
    if host == "[::1]" and not has_ipv6():
        pytest.skip("no IPv6 here")
    # In a process of its own: Dask leaves websockets for the garbage collector.
    said = run_python(ADDRESSES.format(protocol=protocol, host=host), tmp_path)
    assert said == f"{protocol} [2, 2] [-22.0, -22.0] {{'{carrier}'}}\n"


ADDRESSES = """
import daskps, dask, numpy as np
from distributed import Client, LocalCluster

def pushes(trainer, part):
    for _ in range(2):
        trainer.push({{"w": np.ones(2)}})
    return int(trainer.clock)

dask.config.set({{f"daskps.carriers.{{way}}": False for way in ("process", "machine")}})
options = {{"protocol": "{protocol}", "host": "{host}", "processes": False}}
# Dask logs an error for a heartbeat that a closing websocket cuts: none comes.
options["heartbeat_interval"] = "60s"
with (
    LocalCluster(n_workers=2, dashboard_address=None, **options) as cluster,
    Client(cluster) as client,
):
    optimizer = daskps.optim.SGD(1.0)
    with daskps.create({{"w": np.zeros(2)}}, copies=2, optimizer=optimizer) as store:
        # Sockets are opened for those that call often.
        for _ in range(20):
            store.push({{"w": np.ones(2)}})
        clocks = daskps.run(store, pushes, [0, 1])
        carriers = set(store.stats()["handle"]["carriers"].values())
        scheme = client.scheduler.addr.partition("://")[0]
        print(scheme, clocks, store.pull()["w"].tolist(), carriers)
"""


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as tried:
        tried.bind(("::1", 0))
        return True
    return False


def test_a_cluster_that_was_killed_leaves_its_memory(tmp_path: Path) -> None:
    """Until the next one of that user and machine comes."""
    shm = tmp_path / "shm"
    shm.mkdir()
    where = {SHARED: str(shm)}
    with containers(tmp_path / "s", [()], **where) as (client, _):
        daskps.create({"w": np.zeros(1000)}, name="kept", client=client)
    (left,) = shm.iterdir()
    assert re.fullmatch(rf"daskps-{os.getuid()}-[0-9a-f]{{16}}", left.name)
    assert sum(file.stat().st_size for file in left.iterdir()) > 16_000
    with dask.config.set({"daskps.shared-memory-directory": str(shm)}):
        after = HERE.join("the next one")
        assert after is not None
        assert [str(path) for path in shm.iterdir()] == [after.path]
        after.leave()

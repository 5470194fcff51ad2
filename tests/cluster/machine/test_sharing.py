"""Memory that processes share: who finds whose, and what is left of it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client, get_worker

import daskps
from daskps import config, optim
from daskps.cluster.machine.folder import folder_of
from tests.seams import shards_of
from tests.support import cleaned, local_cluster, store, until

#: What is not in memory that this process has goes by message.
BY_MESSAGE = {"daskps.carriers.socket": False}


def folder(client):
    """Where a cluster's blocks are; others of this user may run meanwhile."""
    cluster = client.scheduler_info()["id"]
    return Path(folder_of(config.load().shared_memory, cluster))


def files(client):
    """Names of all blocks of a cluster."""
    return {str(p) for p in folder(client).glob("*-*")}


def held(*_, collect=True):
    """Mappings and descriptors of shared memory in this process."""
    if collect:
        gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("/daskps-")
    fds = [p for p in Path("/proc/self/fd").iterdir() if "daskps-" in _target(p)]
    return maps, len(fds)


def _target(path):
    try:
        return str(path.readlink())
    except OSError:
        return ""


def everywhere(client):
    """What all workers and this process hold, and which files there are."""
    return {"here": held(), **client.run(held)}, files(client)


@pytest.fixture
def machine(machine_cluster):
    with cleaned(machine_cluster):
        yield machine_cluster


def uses(s):
    s.push({"w": np.ones(10, "f4")})
    return s.pull()["w"].sum()


def test_many_stores_leave_nothing(machine):
    """No file, no mapping, no descriptor; of client and workers."""
    with store(machine) as warm:
        machine.submit(uses, warm, pure=False).result()
    before = everywhere(machine)
    for turn in range(100):
        with store(machine) as s:
            s.push({"w": np.ones(10, "f4")})
            if turn % 10 == 0:
                machine.submit(uses, s, pure=False).result()
    del s
    machine.run(lambda: gc.collect() and None)
    until(lambda: everywhere(machine) == before)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_run_leaves_nothing(machine, sync):
    """At once: a collection may come late, and mailboxes are as large as the store."""

    def loop(trainer, part):
        out = {"w": np.empty(10, "f4")}
        for _ in range(3):
            trainer.pull(out=out)
            trainer.pull(copy=False)
            trainer.push({"w": np.ones(10, "f4")})

    with store(machine) as warm:
        machine.submit(uses, warm, pure=False).result()
    before = everywhere(machine)
    machine.run(gc.disable)
    try:
        with store(machine) as s:
            own = machine.run(held, collect=False)
            daskps.run(s, loop, [0, 1], sync=sync)
            # The shards themselves, and nothing of the run.
            until(lambda: machine.run(held, collect=False) == own)
    finally:
        machine.run(gc.enable)
    del s
    machine.run(lambda: gc.collect() and None)
    until(lambda: everywhere(machine) == before)


def test_closed_cluster_leaves_nothing_while_a_handle_lives():
    with local_cluster() as client:
        s, path = store(client), folder(client)
        uses(s)
        assert len(files(client)) == 2
    assert not path.exists()
    assert s.name


def test_what_a_store_shares_has_no_more_bytes_than_it_says(machine):
    with store(machine, optimizer=optim.Adam(0.1)) as s:
        sizes = {os.stat(name).st_size for name in files(machine)}
        assert {row["segment_nbytes"] for row in s.stats()["shards"]} <= sizes


@pytest.mark.parametrize("base", ["/nowhere", "/proc"])
def test_without_shared_memory_all_goes_by_message(base):
    """As in a container without /dev/shm, or with one that nobody may write to."""
    with (
        dask.config.set({"daskps.shared-memory-directory": base, **BY_MESSAGE}),
        local_cluster(1) as client,
        store(client) as s,
    ):
        assert uses(s) == pytest.approx(-1.0)
        assert list(s.stats()["handle"]["carriers"].values()) == ["message"]
        assert "private memory" in next(iter(s.stats()["handle"]["why"].values()))
        assert s.stats()["handle"]["local_calls"] == 0


def full(dask_worker):
    """Let /dev/shm have no room from the second block of a store on."""
    allocate, taken = os.posix_fallocate, []

    def no_room(*args):
        taken.append(1)
        if len(taken) > 1:
            raise OSError(28, "No space left on device")
        return allocate(*args)

    os.posix_fallocate = no_room


def test_full_memory_in_the_middle_of_a_create_leaves_nothing_shared():
    with dask.config.set(BY_MESSAGE), local_cluster(1) as client:
        client.run(full)
        with store(client, shards=3) as s:
            assert not files(client)
            assert uses(s) == pytest.approx(-1.0)
            assert list(s.stats()["handle"]["carriers"].values()) == ["message"]


def test_two_clusters_of_one_user_do_not_meet(machine):
    with local_cluster(1) as other:
        with store(machine) as a, store(other) as b:
            with machine.as_current():
                assert uses(a) == pytest.approx(-1.0)
            with other.as_current():
                assert uses(b) == pytest.approx(-1.0)
            assert set(b.stats()["handle"]["carriers"].values()) == {"machine"}
        address = other.scheduler_info()["address"]
    del other
    assert address
    with store(machine) as a:
        assert uses(a) == pytest.approx(-1.0)


def in_fork(s):
    """Use a store in a forked child of a task, and then in the task."""
    before = s.pull()["w"].sum()
    pid = os.fork()
    if pid == 0:
        try:
            s.push({"w": np.ones(10, "f4")})
        except RuntimeError as error:
            os._exit(7 if "forked process" in str(error) else 8)
        except BaseException:  # noqa: BLE001 - the exit status says it
            os._exit(9)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), before, uses(s), get_worker().address


def test_fork_in_user_code_is_refused_and_harms_nothing(machine):
    with store(machine) as s:
        code, before, after, _ = machine.submit(in_fork, s, pure=False).result()
        assert code == 7
        assert after == pytest.approx(before - 1.0)
        assert uses(s) == pytest.approx(before - 2.0)


def test_client_of_another_configuration_sends_messages(machine):
    closed = {"daskps.carriers.machine": False, **BY_MESSAGE}
    with dask.config.set(closed), store(machine) as s:
        uses(s)
        assert set(s.stats()["handle"]["carriers"].values()) == {"message"}
        assert not shards_of(s).meta.where.segments


def test_asynchronous_client_sends_messages_and_meets_the_socket(machine):
    import asyncio

    async def other(name):
        address = machine.scheduler.address
        async with Client(address, asynchronous=True) as client:
            x = await daskps.aio.open(name, client=client)
            await x.push({"w": np.ones(10, "f4")})
            return (await x.stats())["handle"]["carriers"]

    with store(machine, name="shared") as s:
        uses(s)
        carriers = asyncio.run(other("shared"))
        assert set(carriers.values()) == {"message"}
        assert s.pull()["w"].sum() == pytest.approx(-2.0)
        s.delete()

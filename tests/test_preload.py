"""`--preload daskps.preload` with real schedulers and workers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # without type hints
import numpy as np
import pytest
from distributed import Client

import daskps
from daskps.optim import SGD
from daskps.preload import dask_setup
from tests.support import PATIENCE, popen, until

ROOT = Path(__file__).parent.parent
HERE = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
PRELOAD = ["--preload", "daskps.preload"]


class Servers:
    """Processes of one cluster, started one by one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.file = folder / "scheduler.json"
        self.folder = folder
        self.stack = stack
        self.env = {**os.environ, "PYTHONPATH": str(ROOT)}

    def scheduler(self, *options: str) -> None:
        self._start("scheduler", "--port", "0", *options)

    def worker(self, name: str, *options: str) -> None:
        self._start("worker", "--nthreads", "1", "--name", name, *options)

    def client(self) -> Client:
        client = Client(scheduler_file=str(self.file), set_as_default=False)
        return self.stack.enter_context(client)

    def _start(self, role: str, *options: str) -> None:
        args = ["dask", role, *HERE, "--scheduler-file", str(self.file), *options]
        self.stack.enter_context(popen(args, env=self.env, cwd=self.folder))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


def add_host_again(client: Client) -> dict[str, Any]:
    """Add the worker plugin to workers that have it, as every registration may."""

    async def add(dask_worker: Any) -> Any:
        from daskps.cluster.plugins import HostPlugin

        return await dask_worker.plugin_add(HostPlugin(), name=HostPlugin.name)

    found: dict[str, Any] = client.run(add)
    return found


def has_host(dask_worker: Any) -> bool:
    return "daskps_call" in dask_worker.handlers


def addresses(client: Client) -> dict[str, str]:
    workers = client.scheduler_info()["workers"]
    return {info["name"]: address for address, info in workers.items()}


@contextmanager
def pickled_by_value() -> Iterator[None]:
    """For functions of this module, which the servers cannot import."""
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def learn(store: Any) -> int:
    return int(store.push({"w": np.ones(10)}))


def gradient(params: dict[str, Any], X: Any, y: Any) -> dict[str, Any]:
    return {"w": params["w"] - X.mean(axis=0)}


def test_preloaded_servers_keep_shards_when_registered_again(servers: Servers) -> None:
    servers.scheduler(*PRELOAD)
    servers.worker("one", *PRELOAD)
    servers.worker("two", *PRELOAD, "--no-nanny")
    client = servers.client()
    client.wait_for_workers(2, timeout=PATIENCE)
    with pickled_by_value():
        # Before any client uses daskps.
        assert set(client.run(has_host).values()) == {True}
        assert client.run_on_scheduler(
            lambda dask_scheduler: (
                "daskps_directory" in dask_scheduler.handlers
                and "daskps-directory" in dask_scheduler.plugins
            )
        )
        params = {"w": np.zeros(10)}
        store = daskps.create(params, name="kept", optimizer=SGD(0.5), client=client)
        assert set(store.placement) == set(addresses(client).values())
        store.push({"w": np.ones(10)})
        # Again from a second client, and by force.
        again = daskps.open("kept", client=servers.client())
        assert np.array_equal(again.pull()["w"], np.full(10, -0.5))
        assert all(r["status"] == "OK" for r in add_host_again(client).values())
        assert np.array_equal(again.pull()["w"], np.full(10, -0.5))
        again.push({"w": np.ones(10)})
        assert np.array_equal(store.pull()["w"], np.full(10, -1.0))
        assert store.versions == (2, 2)
        store.delete()


def test_preloaded_worker_of_a_plain_scheduler(servers: Servers) -> None:
    """The client brings the directory, which adds the host a second time."""
    servers.scheduler()
    servers.worker("one", *PRELOAD, "--no-nanny")
    client = servers.client()
    client.wait_for_workers(1, timeout=PATIENCE)
    with pickled_by_value():
        # Nobody but the preload can have made it.
        assert list(client.run(has_host).values()) == [True]
    with daskps.create({"w": np.zeros(10)}, optimizer=SGD(0.5), client=client) as store:
        store.push({"w": np.ones(10)})
        assert np.array_equal(store.pull()["w"], np.full(10, -0.5))


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(PRELOAD, marks=pytest.mark.slow)],
    ids=["plain", "preload"],
)
def test_worker_that_joins_later(servers: Servers, options: list[str]) -> None:
    servers.scheduler(*PRELOAD)
    servers.worker("first", *PRELOAD, "--no-nanny")
    client = servers.client()
    client.wait_for_workers(1, timeout=PATIENCE)
    with (
        pickled_by_value(),
        daskps.create({"w": np.zeros(10)}, optimizer=SGD(0.5), client=client) as store,
    ):
        store.push({"w": np.ones(10)})
        servers.worker("later", *options)
        client.wait_for_workers(2, timeout=PATIENCE)
        later = until(lambda: addresses(client).get("later"))
        assert store.placement == (addresses(client)["first"],)
        # A task with a handle, then trainers on both.
        assert (
            client.submit(learn, store, workers=[later]).result(timeout=PATIENCE) == 2
        )
        assert np.array_equal(store.pull()["w"], np.full(10, -1.0))
        result = daskps.train(
            store, gradient, np.ones((40, 10)), epochs=20, batch_size=10, timeout=60
        )
        assert np.allclose(result.weights["w"], 1.0, atol=1e-6)
        # And shards of a store made after it came.
        with daskps.create({"w": np.zeros(10)}, client=client) as wider:
            assert set(wider.placement) == set(addresses(client).values())


def test_other_servers_are_refused_by_name() -> None:
    class Nanny:
        pass

    with pytest.raises(TypeError, match="not for Nanny"):
        asyncio.run(dask_setup(Nanny()))

"""What tests of the cluster share; the only importer of distributed's own helpers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.utils_test import gen_cluster, gen_test, popen

import daskps
from daskps import optim

__all__ = [
    "client",
    "cluster",
    "gen_cluster",
    "gen_test",
    "local_cluster",
    "popen",
    "rpc_cluster",
    "store",
    "until",
    "way",
]

#: Configuration of workers that close the way inside the process.
RPC_ONLY = {"daskps.ways.process": False}


@contextmanager
def local_cluster(n_workers: int = 2, threads: int = 2, **kwargs: Any) -> Iterator[Any]:
    """A cluster of real worker processes on loopback, and its client."""
    options = {
        "n_workers": n_workers,
        "threads_per_worker": threads,
        # Not None: that opens Dask's default port on all interfaces.
        "dashboard_address": "127.0.0.1:0",
        "host": "127.0.0.1",
        "silence_logs": 50,
        **kwargs,
    }
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="session")
def cluster() -> Iterator[Client]:
    """Two worker processes for all tests that break nothing."""
    with local_cluster() as client:
        yield client


@pytest.fixture
def client(cluster: Client) -> Iterator[Client]:
    """The client of the shared cluster; no store may be left in it."""
    with cluster.as_current():
        before = {info.uid for info in daskps.list_stores()}
        yield cluster
        for info in daskps.list_stores():
            if info.uid not in before:
                if info.session:
                    daskps.ParameterStore(info.uid, info.name).close()
                else:
                    daskps.open(info.name).delete()


@pytest.fixture(scope="session")
def rpc_cluster() -> Iterator[Client]:
    """Two worker processes whose trainers reach every shard by RPC."""
    with dask.config.set(RPC_ONLY), local_cluster() as client:
        yield client


@pytest.fixture(params=["process", "rpc"])
def way(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a cluster for each way to a shard."""
    name = "cluster" if request.param == "process" else "rpc_cluster"
    found: Client = request.getfixturevalue(name)
    with found.as_current():
        yield found


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait until a condition of another process holds; fail when it never does."""
    event, deadline = threading.Event(), time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {condition}")
        event.wait(0.01)
    return found


def store(client: Client, **kwargs: Any) -> Any:
    """A small store with a plain optimizer."""
    params = kwargs.pop("params", {"w": np.zeros(10, "f4"), "b": np.float64(0)})
    kwargs.setdefault("optimizer", optim.SGD(0.1))
    return daskps.create(params, client=client, **kwargs)

"""What tests of the cluster share; the only importer of distributed's own helpers."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client, utils_test
from distributed.utils import get_mp_context
from distributed.utils_test import gen_test, popen

import daskps
from daskps import optim, testing
from daskps.cluster.protocol.handlers import HOST, Handler
from daskps.testing import (
    client,
    gen_cluster,
    local_cluster,
    until,
)
from tests import inprocess, socket_tally

__all__ = [
    "client",
    "cluster",
    "gen_cluster",
    "gen_test",
    "local_cluster",
    "machine_cluster",
    "mostly_inside",
    "popen",
    "rpc_cluster",
    "served_by",
    "socket_cluster",
    "store",
    "train",
    "until",
    "way",
]

#: What `gen_cluster` sets the configuration back to, for all that come after it.
DEFAULTS = utils_test.original_config
OURS = {
    # What fails shows all frames, ours and Dask's too.
    "admin.traceback.shorten": [],
    # Worker processes are forked from one that has imported all they need: two of them
    # take 0.2 instead of 2.4 s of processor time. Commands that tests start use spawn.
    "distributed.worker.multiprocessing-method": "forkserver",
    # A cluster of Dask's that starts its workers itself gives one up, nanny and all,
    # that is not there 15 s after it was lost, also where it came back and was lost
    # again.
    "distributed.deploy.lost-worker-timeout": "1 hour",
    # Shared clusters stay to the end of the session, two dozen workers on two cores:
    # idle ones took 2.7 % of a core each, and their schedulers 2 %, of which this
    # leaves a fifth.
    "distributed.worker.profile.enabled": False,
    # Later than 3 s it would be late, in the logs: Dask reads that when it is imported.
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.tick.cycle": "1 minute",
    # So often each worker, and for it its nanny, looks at its memory, and each process
    # at its processor time; every 100 and 500 ms that was half of what an idle cluster
    # took.
    "distributed.worker.memory.monitor-interval": "1s",
    "distributed.admin.system-monitor.interval": "10s",
    # So often a client asks for what notebooks show of its cluster; tests ask
    # themselves.
    "distributed.client.scheduler-info-interval": "1 minute",
}
dask.config.set(OURS)
dask.config.set(OURS, config=DEFAULTS)
get_mp_context().set_forkserver_preload(["tests.preloaded"])

PATIENCE, cleaned = testing.PATIENCE, testing.cleaned

#: For each way to a shard the configuration of workers that leave open no other but
#: messages.
CARRIERS = {
    way: {
        f"daskps.carriers.{name}": name == way
        for name in ("process", "machine", "socket")
    }
    for way in ("process", "machine", "rpc", "socket")
}


@contextmanager
def carrier_cluster(way: str) -> Iterator[Client]:
    """Two worker processes that reach shards in one way, or by message."""
    with ExitStack() as stack:
        # Only while its workers start: other clusters of the session are as they are.
        preload = {
            "distributed.worker.preload": ["tests.socket_tally"] * (way == "socket")
        }
        with dask.config.set(CARRIERS[way] | preload):
            client: Any = stack.enter_context(local_cluster())
        _calm(client.cluster.scheduler)
        yield client


def _calm(scheduler: Any) -> None:
    """Have the workers of a cluster report every 5 s, and its scheduler look for less.

    Each half a second it was two fifths of what an idle cluster took, and another fifth
    that the scheduler asked four times a second whether it is idle or without workers.
    """
    handler = scheduler.handlers["heartbeat_worker"]

    @functools.wraps(handler)
    def heartbeat(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs) | {"heartbeat-interval": 5.0}

    scheduler.handlers["heartbeat_worker"] = heartbeat
    for name in ("idle-timeout", "no-workers-timeout"):
        scheduler.loop.add_callback(scheduler.periodic_callbacks[name].stop)


#: Options and environment of the workers of `terminal_cluster`: one has a nanny.
THREE: Any = (["--nanny"], {}), (["--no-nanny"], {}), (["--no-nanny"], {})


@contextmanager
def terminal_cluster(
    file: Path, workers: Any = THREE, **env: str
) -> Iterator[tuple[Client, list[Any]]]:
    """A cluster as people start it: its client, and the processes of its workers.

    `workers` are options and environment of each, `env` is for all.
    """
    env = {**os.environ, "PYTHONPATH": os.getcwd(), **env}
    quiet = ["--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
    here = ["--host", "127.0.0.1"]
    with ExitStack() as stack:
        begun = popen(["dask", "scheduler", "--port", "0", *here, *quiet], env=env)
        stack.enter_context(begun)
        started = [
            popen(["dask", "worker", *quiet, *here, *options], env={**env, **more})
            for options, more in workers
        ]
        processes = [stack.enter_context(process) for process in started]
        until(file.exists, PATIENCE)
        client = stack.enter_context(Client(scheduler_file=str(file)))
        client.wait_for_workers(len(processes), PATIENCE)
        yield client, processes


def adapter(name: str) -> Any:
    """Import another library; without it a module of tests is skipped.

    Where all adapters are to be tested, as in the project's own checks, that is an error.
    """
    if os.environ.get("DASKPS_TESTS_NEED_ADAPTERS"):
        return importlib.import_module(name)
    return pytest.importorskip(name)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Client]:
    """Two worker processes for all tests that break nothing."""
    with carrier_cluster("process") as client:
        yield client


@pytest.fixture(scope="session")
def machine_cluster() -> Iterator[Client]:
    """Two worker processes whose shards everybody reaches through shared memory."""
    with carrier_cluster("machine") as client:
        yield client


@pytest.fixture(scope="session")
def rpc_cluster() -> Iterator[Client]:
    """Two worker processes whose trainers reach every shard by RPC."""
    with carrier_cluster("rpc") as client:
        yield client


@pytest.fixture(scope="session")
def socket_cluster() -> Iterator[Client]:
    """Two worker processes that everybody reaches by sockets, from the first call on."""
    with carrier_cluster("socket") as client:
        yield client
        tally = socket_tally.Tally(
            [socket_tally.counted(), *client.run(socket_tally.counted).values()]
        )
        TOLD["the fourth way"] = str(tally)
        assert tally.is_enough, tally


#: What a run of the tests says at its end.
TOLD: dict[str, str] = {}


#: Clusters without Dask's inside this process, by how shards are reached there.
INSIDE = {"inside": "process", "queue": "rpc"}


@pytest.fixture(params=CARRIERS)
def way(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A client of a cluster for each way to a shard; see also :func:`mostly_inside`."""
    if request.param in INSIDE:
        with (
            dask.config.set(CARRIERS[INSIDE[request.param]]),
            inprocess.cluster() as made,
        ):
            yield made
        return
    name = {"process": "cluster"}.get(request.param, f"{request.param}_cluster")
    found: Client = request.getfixturevalue(name)
    # Of the others only the tasks have what is nearer than a message.
    mine = {"daskps.carriers.socket": CARRIERS[request.param]["daskps.carriers.socket"]}
    watch = socket_tally.watched() if request.param == "socket" else nullcontext()
    with watch, dask.config.set(mine), cleaned(found):
        yield found


def mostly_inside(
    names: str = "",
    values: Sequence[Any] = ((),),
    *,
    real: Sequence[Any] = (),
    train: bool = False,
) -> pytest.MarkDecorator:
    """Have a test run for all values inside this process, for some on real clusters.

    Parameters
    ----------
    names : str
        Arguments of the test beside `way`, as `pytest.mark.parametrize` takes them.
    values : sequence
        One value, or a tuple of them, for each case.
    real : sequence
        Those for which the test also runs once for each way on a cluster of Dask's;
        by default the first.
    train : bool
        Whether it takes `train` as well.
    """
    asked = ["way", *["train"] * train, *filter(None, names.split(","))]
    rows = [v if isinstance(v, tuple) else (v,) for v in values]
    chosen = [v if isinstance(v, tuple) else (v,) for v in real] or rows[:1]
    resident = ["resident"] * train
    cases = [(way, *resident, *row) for way in INSIDE for row in rows]
    cases += [(way, *resident, *row) for way in CARRIERS for row in chosen]
    if train:
        cases += [("inside", "graph", *row) for row in rows]
        cases += [("process", "graph", *row) for row in chosen]
    return pytest.mark.parametrize(
        tuple(asked),
        [pytest.param(*case) for case in cases],
        ids=["-".join(str(getattr(v, "__name__", v)) for v in case) for case in cases],
        indirect=asked[: 1 + train],
    )


class Train:
    """`daskps.train` in one execution; skips what that execution refuses."""

    def __init__(self, execution: str) -> None:
        self.execution = execution

    def __call__(self, store: Any, *args: Any, **options: Any) -> Any:
        if self.execution == "graph" and options.get("sync", "bsp") != "bsp":
            pytest.skip("the task graph has synchronous rounds only")
        return daskps.train(store, *args, execution=self.execution, **options)


@pytest.fixture(params=["resident", "graph"])
def train(request: pytest.FixtureRequest) -> Train:
    """`daskps.train` in each execution that a policy can have."""

    return Train(request.param)


def served_by(name: str, function: Callable[..., Any]) -> Handler:
    """Return the handler of a message to hosts with another function."""
    return replace(HOST.by_name[name], function=function)


def open_files() -> set[tuple[str, str]]:
    """Return number and target of each open descriptor; nothing where unknown."""
    found, fds = set(), Path("/proc/self/fd")
    for fd in fds.iterdir() if fds.exists() else ():
        try:
            found.add((fd.name, os.readlink(fd)))
        except OSError:  # the descriptor of this very listing
            continue
    return found


def store(client: Client, **kwargs: Any) -> Any:
    """A small store with a plain optimizer."""
    params = kwargs.pop("params", {"w": np.zeros(10, "f4"), "b": np.float64(0)})
    kwargs.setdefault("optimizer", optim.SGD(0.1))
    return daskps.create(params, client=client, **kwargs)

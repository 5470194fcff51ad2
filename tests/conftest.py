"""Fixtures of all tests: a printed seed, and a look at what a test leaves behind."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import dask
import numpy as np
import pytest
from _pytest.logging import LogCaptureHandler
from hypothesis import settings

from daskps.cluster.machine.mapping import FILES
from daskps.kernels import cache
from tests import support
from tests.completeness import Completeness
from tests.kernels.compiling import kept
from tests.support import (
    TOLD,
    client,
    cluster,
    machine_cluster,
    open_files,
    rpc_cluster,
    socket_cluster,
    train,
    way,
)

__all__ = [
    "client",
    "cluster",
    "machine_cluster",
    "rpc_cluster",
    "socket_cluster",
    "train",
    "way",
]

# Or every worker, scheduler and nanny that a test starts compiles all of daskps: that
# took as long as everything else it imports (0.8 s instead of 0.4 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

#: One number decides all randomness of a test run; give it again to repeat the run.
SEED = int(os.environ.get("DASKPS_TEST_SEED") or secrets.randbits(32))
# For the processes that share a run (pytest-xdist).
os.environ["DASKPS_TEST_SEED"] = str(SEED)
# A busy machine is slow, which is no failure.
settings.register_profile("daskps", deadline=None, print_blob=True)
settings.load_profile("daskps")
#: Fixtures that stand for a cluster.
CLUSTERS = {
    "client",
    "cluster",
    "socket_cluster",
    "loop",
    "machine_cluster",
    "rpc_cluster",
    "way",
}
#: The file whose tests this process runs.
RUNNING = pytest.StashKey[Path]()
#: Programs without examples: imported a second time, by another name, their functions
#: would be those of a module that no other process can import.
collect_ignore = ["benchmarks", "preloaded.py", "simulator", "typing/programs"]


def pytest_configure(config: pytest.Config) -> None:
    """Count the tests that ran, in the process that reports them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Completeness(), "daskps-completeness")


def pytest_report_header() -> str:
    return f"daskps: DASKPS_TEST_SEED={SEED}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for what, said in TOLD.items():
        terminalreporter.write_line(f"daskps: {what}: {said}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect one process first, and each without looking for garbage.

    What the first compiles, modules and the asserts of tests, the others find on disk.
    There is no garbage yet: to look for it again and again took half of the time, and
    later collections would look at all tests as well.
    """
    with open(__file__) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        gc.disable()
        yield
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with a cluster last: its threads would look like leaks of others."""
    items[:] = [item for item in items if not _is_vain(item)]
    items.sort(key=_may_start_cluster)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave what the tests of other files keep out of later collections of garbage.

    Syntax trees of the package and compiled loops are millions of objects, and shared
    clusters grow: each time a test, or a store, collected garbage the process looked at
    them for up to a second.
    """
    if item.config.stash.get(RUNNING, None) != item.path:
        item.config.stash[RUNNING] = item.path
        gc.collect()
        # What is frozen and comes into a cycle later is never collected.
        if not FILES.nbytes():
            gc.freeze()


def _is_vain(item: pytest.Item) -> bool:
    """Tell whether a test asks the task graph for rounds of another policy.

    Or for the way between processes: within one a graph run takes both.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    if params.get("train") != "graph":
        return False
    sync = params.get("sync", params.get("options", {}).get("sync", "bsp"))
    return params.get("way", "process") not in ("process", "inside") or sync != "bsp"


def _may_start_cluster(item: pytest.Item) -> bool:
    """Tell whether a test may leave the threads of a cluster behind.

    That is one in `tests/cluster`, one of a module that uses `tests/support.py`, one
    with a fixture of `CLUSTERS`, and one that is marked `leaky`.
    """
    module = getattr(item, "module", None)
    return (
        item.get_closest_marker("leaky") is not None
        or item.path.is_relative_to(Path(__file__).parent / "cluster")
        or not CLUSTERS.isdisjoint(getattr(item, "fixturenames", ()))
        or any(
            getattr(module, name, None) is getattr(support, name)
            for name in support.__all__
        )
    )


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test in this run."""
    name = request.node.nodeid.encode()
    return int(np.random.SeedSequence([SEED, *name]).generate_state(1)[0])


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator of this test in this run."""
    return np.random.default_rng(seed)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let this process and those it starts take Ctrl-C, as at a terminal.

    A shell has what it starts in the background ignore it, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def scratch_space(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have clusters of this process share their directory with no other process.

    Each worker that starts removes what killed ones have left there, and logs an error
    where another process is at it too.
    """
    folder = str(tmp_path_factory.mktemp("dask"))
    os.environ["DASK_TEMPORARY_DIRECTORY"] = folder  # of commands that tests start
    for config in (dask.config.config, support.DEFAULTS):
        dask.config.set({"temporary-directory": folder}, config=config)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take from the disk, too, what a test would compile for itself in memory.

    A loop takes 0.3 s, in each process of a run, and 5 ms where it is kept. The tests of
    `tests/kernels` count what is compiled.
    """
    if request.path.is_relative_to(Path(__file__).parent / "kernels"):
        yield
        return
    load = cache.load
    with mock.patch.object(cache, "load", lambda s, to: load(s, to or kept())):
        yield


@pytest.fixture(autouse=True)
def heard() -> None:
    """Have `caplog` take all records, whatever cluster was started before.

    A `LocalCluster` silences the handlers that there are then, for as long as it lives.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogCaptureHandler):
            handler.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads or descriptors behind.

    Not for tests that may start a cluster, whose threads outlive it.
    """
    if _may_start_cluster(request.node):
        yield
        return
    threads, files = set(threading.enumerate()), open_files()
    yield
    if set(threading.enumerate()) <= threads and open_files() <= files:
        return
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)
    left = set(threading.enumerate()) - threads
    assert not left, f"threads left behind: {left}"
    more = open_files() - files
    # Where a cluster was, Dask's monitor has files of /proc open for a moment.
    end, pause = time.monotonic() + 5, threading.Event()
    while more and time.monotonic() < end:
        pause.wait(0.01)
        more &= open_files()
    assert not more, f"files left open: {sorted(more)}"

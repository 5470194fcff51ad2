"""Workers of Dask in namespaces of their own, as containers have them, and what they do.

``python -m tests.cluster.containers ADDRESS`` has a worker of a cluster adopt what another
one leaves, and prints what it finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, get_worker

import daskps
from daskps.cluster.host.node import HOSTS
from daskps.cluster.machine.blocks import Block
from daskps.cluster.machine.mapping import FILES
from daskps.shards.memory.format import FLIP, WANTED
from tests.support import PATIENCE, until
from tests.test_readme import ROOT

UNSHARE = ("unshare", "--fork", "--kill-child")
#: A number of its own for each process, and a memory that no other container sees.
PIDS = (*UNSHARE, "--pid", "--mount-proc")
_MOUNT = 'mount -t tmpfs -o size=64m shm /dev/shm && exec "$@"'
MEMORY = (*UNSHARE, "--mount", "sh", "-c", _MOUNT, "sh")


@contextmanager
def running(command: Sequence[str], **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Dask's, which is killed with all it started as the test ends."""
    env, quiet = {**os.environ, "PYTHONPATH": str(ROOT), **env}, subprocess.DEVNULL
    with subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def containers(
    file: Path, namespaces: Sequence[Sequence[str]], host: str = "127.0.0.1", **env: str
) -> Iterator[tuple[Client, dict[str, int]]]:
    """A worker in each of some namespaces: a client, and their processes by address."""
    for namespace in {*namespaces}:
        tried = subprocess.run([*namespace, "true"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    about = ["--host", host, "--scheduler-file", str(file), "--no-dashboard"]
    dask = [sys.executable, "-m", "distributed.cli"]
    with ExitStack() as stack:
        begun = [*dask[:2], "distributed.cli.dask_scheduler", "--port", "0", *about]
        stack.enter_context(running(begun, **env))
        begun = [*dask[:2], "distributed.cli.dask_worker", "--no-nanny", *about]
        begun += ["--preload", "daskps.preload"]
        outer = {
            k: stack.enter_context(
                running([*namespace, *begun, "--name", str(k)], **env)
            ).pid
            for k, namespace in enumerate(namespaces)
        }
        until(file.exists, PATIENCE)
        client = stack.enter_context(Client(scheduler_file=str(file)))
        client.wait_for_workers(len(outer), PATIENCE)
        found: dict[str, int] = client.run(lambda dask_worker: dask_worker.name)
        yield (
            client,
            {
                a: child_of(outer[found[a]])
                for a in sorted(found, key=lambda a: found[a])
            },
        )


def child_of(pid: int) -> int:
    """Return the process in a container, by its number here; else the process itself."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return int((children.split() or [str(pid)])[0])


def block_here() -> Block:
    """Return the memory of the only shard of this worker."""
    (hosted,) = HOSTS[get_worker().address].shards.values()
    assert hosted.block is not None
    return hosted.block


def is_near(to: Any, part: int = 0) -> bool:
    """Return whether a store or trainer maps memory of another process."""
    to.pull()
    return FILES.nbytes() > FILES.nbytes(owned=True)


def passes_its_turn(path: str) -> bool:
    """Hold a shard until another process wants it; return whether it had its turn."""
    block = block_here()
    lock, words = block.lock(), block.buffer[:128].view(np.int64)
    lock.acquire(PATIENCE)
    Path(path).touch()
    until(lambda: words[WANTED] != 0)
    flip = words[FLIP]
    lock.release()
    if not lock.try_acquire():
        return True
    lock.release()
    return bool(words[FLIP] != flip)


def adds(store: Any, at: int) -> list[float]:
    """Add one to an element; return all of them."""
    delta = np.zeros(len(store["w"]))
    delta[at] = 1.0
    store.add({"w": delta})
    return store["w"].pull().tolist()


def holds(path: str) -> None:
    """Hold a shard until this process is killed; say so by a file."""
    lock = block_here().lock()
    lock.acquire(PATIENCE)
    Path(path).touch()
    until(lambda: False, PATIENCE)


def main(scheduler: str) -> dict[str, Any]:
    """Use memory of a worker from another one, and have it adopted."""
    with Client(scheduler) as client:
        client.wait_for_workers(2, PATIENCE)
        here, there = sorted(client.nthreads())
        with daskps.create({"w": np.zeros(2)}, servers=[there]) as store:
            near = client.submit(is_near, store, workers=[here]).result()
            found = [client.submit(adds, store, 1, workers=[here]).result()]
            dying = client.submit(os._exit, 1, workers=[there])
            until(lambda: there not in client.nthreads(), PATIENCE)
            dying.cancel()
            found.append(adds(store, 0))
            return {"near": near, "w": found, "adopted": [*store.placement] == [here]}


if __name__ == "__main__":
    # Under its own name: functions of the main module would travel by value.
    from tests.cluster import containers as this

    sys.stdout.write(json.dumps(this.main(sys.argv[1])))

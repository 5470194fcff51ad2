"""Two workers in two network namespaces of this machine, with a rate between them.

Nothing is shared but the kernel: each has addresses and shared memory of its own.
`run` starts this module in namespaces that end with their last process, so nothing is
left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client

from tests.benchmarks import ENVIRON, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NEEDS = ("unshare", "nsenter", "ip", "tc", "mount")
#: Addresses of the two ends.
HERE, THERE = "10.77.0.1", "10.77.0.2"
#: What the rate lets through at once, and how long bytes may queue.
BURST, LATENCY = "256kb", "50ms"
#: How long a scheduler without tasks stays.
IDLE = "2 minutes"
LANES = {"DASK_DASKPS__WAYS__LANE": "true"}
_SHARED = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up"


def _unshare(*, as_root: bool) -> list[str]:
    user = [] if as_root else ["--user", "--map-root-user"]
    return ["unshare", *user, "--net", "--mount"]


def missing() -> str | None:
    """Return why there can be no namespaces here; None where there can be some."""
    if lacking := [name for name in NEEDS if shutil.which(name) is None]:
        return f"{', '.join(lacking)} not found (of util-linux and iproute2)"
    # A kernel may have namespaces and no such queue.
    probe = f"{_SHARED} && tc qdisc add dev lo root tbf rate 1gbit burst {BURST} latency 1ms"
    line = [*_unshare(as_root=os.geteuid() == 0), "sh", "-c", probe]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        return f"it needs root, or namespaces of users, and tbf: {said[-1]}"
    return None


def run(rate: str, arguments: Sequence[str]) -> int:
    """Run ``python -m tests.benchmarks`` with arguments, on workers in two namespaces.

    They get ``--scheduler`` besides.
    """
    as_root = os.geteuid() == 0
    line = [sys.executable, "-m", __name__, rate, *arguments]
    return subprocess.run([*_unshare(as_root=as_root), *line], check=False).returncode


def _shell(script: str, inside: int | None = None) -> None:
    """Run a script, as it is or in the namespaces of a process."""
    enter = [] if inside is None else ["nsenter", "-t", str(inside), "-n", "-m"]
    subprocess.run([*enter, "sh", "-ec", script], check=True)


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _joined(rate: str) -> Iterator[int]:
    """Join these namespaces by a cable to new ones; give a process that is in those."""
    _shell(_SHARED)
    # It ends with its input, so with this process, however that ends.
    far = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", "echo; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with far, _ended(far):
        assert far.stdout is not None
        far.stdout.readline()  # it is in there
        _shell(f"ip link add cable type veth peer name cable netns {far.pid}")
        for address, inside in ((HERE, None), (THERE, far.pid)):
            shape = f"tbf rate {rate} burst {BURST} latency {LATENCY}"
            lines = (
                f"ip addr add {address}/24 dev cable; ip link set cable up; "
                f"tc qdisc add dev cable root {shape}"
            )
            _shell(lines, inside)
        _shell(_SHARED, far.pid)
        yield far.pid


@contextmanager
def _cluster(far: int) -> Iterator[str]:
    """Start a scheduler and a worker here and one worker there; give its address."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file, enter = folder / "scheduler", ["nsenter", "-t", str(far), "-n", "-m"]

        def start(what: str, host: str, *more: str) -> None:
            line = [
                sys.executable,
                "-m",
                "dask",
                what,
                "--host",
                host,
                "--no-dashboard",
            ]
            given = [*line, "--scheduler-file", str(file), *more]
            log = stack.enter_context((folder / f"{what}-{host}").open("wb"))
            inside = enter if host == THERE else []
            process = subprocess.Popen(
                [*inside, *given],
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRON | LANES,
            )
            stack.enter_context(_ended(process))

        # It ends by itself where this process is killed; the workers end with it.
        start("scheduler", HERE, "--port", "0", "--idle-timeout", IDLE)
        for host in (HERE, THERE):
            local = ["--local-directory", str(folder / host), "--no-nanny"]
            start("worker", host, *local, "--nthreads", "1", "--memory-limit", "0")
        with Client(scheduler_file=str(file)) as client:
            client.wait_for_workers(2, timeout=30)
            address: str = client.scheduler_info()["address"]
        yield address


def main(rate: str, *arguments: str) -> int:
    """Do that, in the namespaces of the first worker."""
    with _joined(rate) as far, _cluster(far) as address:
        return command.main([*arguments, "--scheduler", address])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

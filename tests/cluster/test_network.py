"""Between machines: two network namespaces with nothing but a wire between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.cluster.network import results
from tests.test_readme import ROOT

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
#: Known inside the namespaces only.
ADDRESSES = ("10.213.97.1", "10.213.97.2")
#: A second one of the first, and its network.
APART_ADDRESS, APART_NETWORK = "10.213.98.1", "10.213.98.0/30"
#: The namespaces share /dev/shm: they are one machine, and daskps would find out.
NEAR = "DASK_DASKPS__CARRIERS__MACHINE"
APART = {NEAR: "false", "PYTHONPATH": str(ROOT)}


def ip(*words: str) -> None:
    subprocess.run([str(IP), *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a pair of devices; gone at the end."""
    if IP is None:
        pytest.skip("there is no command ip to make network namespaces with")
    first, second = names = [f"daskps-{os.getpid()}-{k}" for k in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            wire = ("type", "veth", "peer", "name", "wire", "netns", second)
            ip("link", "add", "wire", "netns", first, *wire)
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/30", "dev", "wire")
                ip("-n", name, "link", "set", "wire", "up")
                ip("-n", name, "link", "set", "lo", "up")
                ip("netns", "exec", name, "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield first, second


def inside(namespace: str, *words: str) -> list[str]:
    return [str(IP), "netns", "exec", namespace, sys.executable, "-m", *words]


@contextmanager
def running(command: list[str], near: str) -> Iterator[None]:
    """A process of Dask's, which ends at the latest with the test."""
    env, quiet = {**os.environ, **APART, NEAR: near}, subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@contextmanager
def cluster(
    namespaces: Sequence[str], workers: Sequence[str], near: str = "false"
) -> Iterator[str]:
    """A scheduler in the first namespace, and a worker at each address."""
    scheduler = f"tcp://{ADDRESSES[0]}:8786"
    with ExitStack() as stack:
        dask = ["distributed.cli.dask_scheduler", "--host", ADDRESSES[0]]
        dask += ["--port", "8786", "--no-dashboard"]
        stack.enter_context(running(inside(namespaces[0], *dask), near))
        for address in workers:
            name = namespaces[address == ADDRESSES[1]]
            dask = ["distributed.cli.dask_worker", scheduler, "--host", address]
            dask += ["--no-nanny", "--no-dashboard", "--nthreads", "2"]
            stack.enter_context(running(inside(name, *dask), near))
        yield scheduler


@contextmanager
def talking(
    namespace: str, module: str, scheduler: str
) -> Iterator[Callable[..., Any]]:
    """A program in a namespace: it is told to go on, and says what it found."""
    process = subprocess.Popen(
        inside(namespace, module, scheduler),
        env={**os.environ, **APART},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def found(*, goes_on: bool = True) -> Any:
        said, told = process.stdout, process.stdin
        assert said is not None
        assert told is not None
        if goes_on:
            told.write("\n")
            told.flush()
        return json.loads(said.readline())

    with process:
        try:
            yield found
        finally:
            process.kill()


def said(namespace: str, module: str, scheduler: str, near: str = "false") -> Any:
    """Return what a program in a namespace has found."""
    done = subprocess.run(
        inside(namespace, module, scheduler),
        env={**os.environ, **APART, NEAR: near},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_workers_of_several_networks_may_have_one_memory(namespaces):
    """As containers may: they go near, and one adopts what the other one leaves."""
    with cluster(namespaces, ADDRESSES, near="true") as scheduler:
        found = said(namespaces[0], "tests.cluster.containers", scheduler, "true")
    assert found == {"near": True, "w": [[0.0, 1.0], [1.0, 1.0]], "adopted": True}


def test_runs_over_a_wire_have_the_numbers_of_loopback(namespaces, rpc_cluster):
    with cluster(namespaces, ADDRESSES) as scheduler:
        found = said(namespaces[0], "tests.cluster.network", scheduler)
    assert found.pop("hosts") == [f"tcp://{address}" for address in ADDRESSES]
    expected = results(rpc_cluster)
    assert expected.pop("hosts") == ["tcp://127.0.0.1"]
    assert found == expected
    assert found["bsp"] != found["bsp, bf16"] == found["graph, bf16"]
    assert found["asp"][1] == 2 * 2 * 4


def test_a_client_that_reaches_the_scheduler_alone_is_told_so(namespaces):
    first, second = namespaces
    ip("-n", first, "addr", "add", f"{APART_ADDRESS}/30", "dev", "wire")
    ip("-n", second, "route", "add", APART_NETWORK, "dev", "wire")
    heard = {}
    with (
        cluster(namespaces, [APART_ADDRESS] * 2) as scheduler,
        talking(second, "tests.cluster.unreached", scheduler) as found,
    ):
        assert found(goes_on=False) == "open"
        # Nobody gets what goes there: it is dropped, connections included.
        nobody = ("lladdr", "02:00:00:00:00:99", "dev", "wire")
        where = ("neigh", "replace", APART_ADDRESS, *nobody)
        ip("-n", second, *where, "nud", "permanent")
        heard["dropped"] = found()
        ip("-n", second, "route", "replace", "unreachable", APART_NETWORK)
        heard["refused"] = found()
    for what, (errors, others) in heard.items():
        assert set(errors.values()) == {f"tcp://{APART_ADDRESS}"}, (what, errors)
        # Each run adds -0.5 times the mean of two ones.
        assert others.pop("after") == others.pop("snapshot") - 0.5 * 3000
        assert others == {"run": [1, 1], "list": ["model"], "repr": True}


def test_a_cut_wire_costs_no_push(namespaces):
    """Its second copy takes the place of an owner that only the wire kept."""
    first, second = namespaces
    heard = []
    with (
        cluster(namespaces, [ADDRESSES[0], *ADDRESSES]) as scheduler,
        talking(first, "tests.cluster.cut", scheduler) as found,
    ):
        assert found(goes_on=False) == [-3.0] * 6
        for state in ("down", "up"):
            ip("-n", second, "link", "set", "wire", state)
            heard.append(found())
    assert heard[0].pop("waited") > 1
    assert heard == [{"w": [-14.0] * 6, "moved": True}, {"w": [-16.0] * 6}]

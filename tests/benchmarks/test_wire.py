"""The benchmark of calls between machines: what it measures, and what it says."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from daskps.cluster.lane.forms import read_form
from daskps.layout.arrays import Layout
from tests.benchmarks import command, wire
from tests.benchmarks.between import bars, crowd, namespaces, sockets, tables
from tests.benchmarks.between.calls import Pair, own_cores
from tests.benchmarks.between.rows import Bar, Row, WaySample
from tests.support import cleaned, local_cluster

#: Whether a process can be kept on cores.
keeps_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="needs cores that can be chosen"
)
#: Few of everything.
FEW = Namespace(rounds=1, calls=3, seconds=0.01)


# -- bars ----------------------------------------------------------------------


def fake(*p50: float, rate: float = 0.0) -> Iterator[WaySample]:
    yield from (WaySample((us,) * 3, 1.0, 2.0, 0.5, rate) for us in p50)


def row(*of: Bar, lane: Any = (10.0, 30.0), other: Any = (20.0, 20.0)) -> Row:
    ours, theirs = fake(*lane), fake(*other)
    sides = {"lane": lambda: next(ours), "other": lambda: next(theirs)}
    found = Row("job", sides, of)
    found.measure(2)
    return found


@pytest.mark.parametrize(
    ("bar", "ratio", "kept"),
    [
        (Bar("lane", "other", 1.0), 1.0, True),
        (Bar("lane", "other", 0.9), 1.0, False),
        # The other's time over ours: 2 and 2 / 3.
        (Bar("lane", "other", 1.3, at_least=True), 4 / 3, True),
        (Bar("lane", "other", 1.4, at_least=True), 4 / 3, False),
        (Bar("lane", "", 19.0), 20.0, False),
        (Bar("lane", "", 20.0, "p99"), 20.0, True),
        (Bar("lane", "", 1.0, "rate", at_least=True), 0.0, False),
    ],
)
def test_a_bar_is_of_the_medians_of_the_rounds(
    bar: Bar, ratio: float, kept: bool
) -> None:
    found = row(bar).plain()["bars"][0]
    assert found["ratio"] == pytest.approx(ratio)
    assert found["kept"] is kept


def test_the_table_has_ways_and_bars() -> None:
    said = [*row(Bar("lane", "other", 2.0)).lines()]
    assert said[1].split() == ["lane", "20", "30", "1", "2", "50%", "0", "a", "second"]
    assert said[3].strip() == "lane / other: 1 (0.5-1.5), bar <= 2: kept"


def test_rows_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["wire", "--only", "small,nope"])
    assert "no rows nope; there are small, step" in capsys.readouterr().err


# -- what lanes are set beside -------------------------------------------------


def test_a_bare_server_does_the_work_of_a_shard() -> None:
    weights, (here, there) = sockets.BareWeights(4), socket.socketpair()
    with here, there:
        thread = threading.Thread(target=sockets._answer, args=(there, weights, True))
        thread.start()
        gradient = np.arange(4, dtype=np.float32)
        for _ in range(2):
            sockets.send(here, sockets.request(16, 0), gradient)
            sockets.fill(here, memoryview(bytearray(sockets.ANSWER_NBYTES)))
        answer = bytearray(sockets.ANSWER_NBYTES + 16)
        here.sendall(sockets.request(0, 16))
        sockets.fill(here, memoryview(answer))
        here.shutdown(socket.SHUT_RDWR)
        thread.join()
    found = np.frombuffer(answer, np.float32, offset=sockets.ANSWER_NBYTES)
    np.testing.assert_allclose(found, -2e-3 * gradient, rtol=1e-6)


@pytest.mark.parametrize("is_limit", [False, True])
def test_a_bare_server_of_rows_does_the_work_of_a_shard(
    monkeypatch: pytest.MonkeyPatch, is_limit: bool
) -> None:
    monkeypatch.setattr(tables, "ROWS", 40)
    # Which is kept from call to call, and none of another test's.
    monkeypatch.setattr(tables, "table", functools.cache(tables.table.__wrapped__))
    worker: Any = SimpleNamespace(ip="127.0.0.1")
    where = tables.serve(8, is_limit, dask_worker=worker)
    with contextlib.closing(tables.BareRows(where, 8)) as caller:
        ids = next(tables.sets_of(8))
        caller.both()
        caller._sets = iter([ids])  # those that were changed
        caller.both()
    found = np.frombuffer(caller._answer, np.float32, offset=sockets.ANSWER_NBYTES)
    np.testing.assert_allclose(found, 1 - 1e-6, rtol=1e-6)


@pytest.mark.parametrize("apart", ["0", pytest.param("1", marks=keeps_cores)])
def test_the_floor_times_every_step(apart: str) -> None:
    line = [sys.executable, "-P", str(bars.FLOOR), "40", "512", "20", apart]
    done = subprocess.run(line, capture_output=True, check=True)
    took, cpu = json.loads(done.stdout)
    # Each step waits for two contributions, one after the other under the lock.
    assert (len(took), min(took) > 40, cpu > 0) == (20, True, True)
    assert done.stderr == b""


@keeps_cores
def test_a_process_has_cores_of_its_own_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    with own_cores(0, 2):
        shares = [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]
        assert all(share == set(sorted(before)[::2]) for share in shares)
        with pytest.raises(ZeroDivisionError), own_cores(0, 1):
            raise ZeroDivisionError
        assert os.sched_getaffinity(0) == shares[0]
    assert os.sched_getaffinity(0) == before


@keeps_cores
@pytest.mark.parametrize(("pids", "may"), [((1, 1), False), ((1, 2), True)])
def test_only_processes_can_be_apart(pids: tuple[int, int], may: bool) -> None:
    cores = len(os.sched_getaffinity(0))
    pair = Pair(None, "a", "b", pids)  # type: ignore[arg-type]  # nobody calls
    assert pair.may_part == (may and cores > 1)


def test_what_namespaces_need_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    assert command.main(["wire", "--only", "network"]) == 0
    said = capsys.readouterr().out
    assert "left out two network namespaces: tc not found" in said
    assert "0 bars of 0 kept" in said


def test_namespaces_that_are_refused_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(returncode=1, stderr="x\nunshare: not permitted\n")
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: refused)
    assert "not permitted" in (namespaces.missing() or "")


def test_a_cluster_of_one_worker_is_refused() -> None:
    client: Any = SimpleNamespace(nthreads=lambda: {"tcp://a": 1})
    with pytest.raises(SystemExit, match="two workers are needed, there are 1"):
        Pair.of(client)


# -- every row on a cluster ----------------------------------------------------


@pytest.fixture(scope="module")
def here() -> Iterator[Client]:
    settings = {"daskps.ways.machine": False, "daskps.ways.lane": True}
    with (
        dask.config.set({**settings, "distributed.worker.profile.enabled": False}),
        local_cluster(processes=False, protocol="tcp", threads=1) as client,
    ):
        yield client


@pytest.fixture
def pair(here: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    # In one process no way but this one is as between machines.
    settings = {"daskps.ways.process": False, "daskps.ways.lane": True}
    monkeypatch.setattr(bars, "CROWD", 3)
    monkeypatch.setattr(bars, "LEAST", 1)
    monkeypatch.setattr("tests.benchmarks.between.calls.WARM_STEPS", 3)
    with dask.config.set(settings), cleaned(here):
        yield Pair.of(here)


@pytest.mark.leaky
@pytest.mark.parametrize(
    ("rows", "ways"),
    [
        (bars.small, {"lane", "bare socket", "message"}),
        (bars.large, {"lane", "bare socket", "message"}),
        (bars.steps, {"lane", "floor", "message"}),
        (bars.many, {"lane", "bare selector", "lane, others open", "bare socket"}),
    ],
)
def test_each_row_has_its_ways(pair: Pair, rows: Any, ways: set[str]) -> None:
    seen = set()
    for found in rows(pair, FEW):
        if isinstance(found, str):
            assert "3 lanes take of their host: " in found
            continue
        found.measure(1)
        seen |= {*found.found}
        for way, (sample,) in found.found.items():
            assert all(us > 0 for us in sample.took), (found.job, way)
            if way == "message":
                assert sample.by_lane == 0
    assert seen == ways


@pytest.mark.leaky
def test_calls_by_lane_are_counted(pair: Pair) -> None:
    with pair.store(8) as store:
        assert pair.call(store, "get", 10, lane=True).by_lane == 1
        assert pair.call(store, "get", 10, lane=False).by_lane == 0


def test_hosts_know_the_form_of_what_a_crowd_pushes() -> None:
    layout = Layout.build({"w": ((crowd.ELEMENTS,), "float32")}, 1)
    form = read_form(crowd._form("s", 7), lambda *_: layout)
    [part] = form.template.parts
    assert (part.step.kind, part.step.producer) == ("gradient", 7)
    assert form.nbytes == 4 * crowd.ELEMENTS


@pytest.mark.leaky
def test_a_host_with_too_few_lanes_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*args: Any) -> Any:
        return {"status": "error"}, None

    monkeypatch.setattr("daskps.cluster.connections.ask_for_socket", refused)
    pushes = partial(crowd.by_lane, seconds=0.01, peer=pair.pids[1])
    with pair.store(8) as store, pytest.raises(crowd.CrowdError, match="0 lanes of 3"):
        pair.run(pushes, store, pair.there, 3)


@pytest.mark.slow  # three processes of Dask and one of the benchmark
@pytest.mark.skipif(namespaces.missing() is not None, reason=str(namespaces.missing()))
def test_rows_between_namespaces(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    few = ["--rounds=1", "--calls=8", "--only", wire.NETWORK, "--rate=20gbit"]
    assert command.main(["wire", *few, "--json", str(file)]) == 0
    found = json.loads(file.read_text("utf-8"))["rows"]
    assert {row["rate"] for row in found} == {"20gbit"}
    assert len(found) == 6
    assert "between two network namespaces" in capfd.readouterr().out

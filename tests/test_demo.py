"""The demo: its mathematics, and the command as a user starts and stops it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil  # type: ignore[import-untyped]  # without type hints
import pytest
from dask.utils import parse_timedelta
from distributed import Client

from daskps import cli, config, demo
from daskps.demo import digits as data
from daskps.demo import plain, servers, waiting
from tests.kernels.compiling import kept
from tests.support import PATIENCE, popen, until

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "daskps.cli", "demo"]
CONNECT = "distributed.comm.timeouts.connect"
LINE = re.compile(r"^ +\d+ +(\d\.\d{4}) +(0\.\d{4}|1\.0000) +(\d+) +(\d+\.\d{3})$")


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An environment in which every file the demo leaves behind is seen."""
    for name in ("home", "tmp", "cwd"):
        (tmp_path / name).mkdir()
    return {
        **os.environ,
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": str(tmp_path / "tmp"),
        # What is compiled is the same each time; one of the tests compiles it.
        "DASK_DASKPS__CACHE_DIRECTORY": kept(),
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def left_behind(tmp_path: Path) -> list[Path]:
    """Every file and folder but the kernel cache."""
    found = [p for name in ("home", "tmp", "cwd") for p in (tmp_path / name).rglob("*")]
    kernels = tmp_path / "cache" / "daskps" / "kernels"
    return found + [
        p
        for p in (tmp_path / "cache").rglob("*")
        if p.is_file() and not p.is_relative_to(kernels)
    ]


# -- mathematics -------------------------------------------------------------------


def test_held_out_rows_depend_on_the_seed_alone_and_are_not_trained_on() -> None:
    a, b, other = data.load(3), data.load(3), data.load(4)
    assert np.array_equal(a.X_held_out, b.X_held_out)
    assert not np.array_equal(a.X_held_out, other.X_held_out)
    assert len(a.X_held_out) == data.N_HELD_OUT
    rows = np.concatenate([a.X, a.X_held_out]).sum(axis=0)
    assert len(a.X) + len(a.X_held_out) == 1797
    assert np.allclose(rows, np.concatenate([other.X, other.X_held_out]).sum(axis=0))


def test_gradient_is_the_derivative_of_the_loss(rng: np.random.Generator) -> None:
    params = {"weight": rng.normal(size=(64, 10)), "bias": rng.normal(size=10)}
    X, y = rng.random((7, 64)), rng.integers(0, 10, 7)
    _, grads = data.gradient(params, X, y)
    for name, index in [("weight", (3, 4)), ("weight", (63, 9)), ("bias", (2,))]:
        losses = []
        for step in (1e-6, -1e-6):
            moved = {n: p.copy() for n, p in params.items()}
            moved[name][index] += step
            losses.append(data.gradient(moved, X, y)[0])
        slope = (losses[0] - losses[1]) / 2e-6
        assert grads[name][index] == pytest.approx(slope, abs=1e-8)


def test_gradient_leaves_its_arguments_alone(rng: np.random.Generator) -> None:
    params, X, y = data.initial(), rng.random((5, 64)), rng.integers(0, 10, 5)
    before = X.copy(), y.copy()
    data.gradient(params, X, y)
    assert np.array_equal(X, before[0])
    assert np.array_equal(y, before[1])
    assert not params["weight"].any()


def test_plain_sgd_is_what_the_rule_says() -> None:
    """Rounds of two trainers, and steps over all rows of both."""
    options, digits = demo.Options(epochs=1), data.load(0)
    found = plain.train_plain(options, digits, 2)
    params = data.initial()
    rule = demo.RULES["sgd"]
    for turn in plain.steps(options, len(digits.X), 2, epoch=0):
        halves = np.array_split(np.arange(len(digits.X)), 2)
        taken = np.concatenate([halves[rank][rows] for rank, rows in turn])
        # The mean over rows of a round is the mean over the rows of all its batches.
        _, grads = data.gradient(params, digits.X[taken], digits.y[taken])
        for name in params:
            params[name] = rule.update(params[name], grads[name], *rule.scalars(1))
    assert data.difference(found, params) < 1e-12


# -- through a store ---------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster inside this process, where epochs are quick."""
    with Client(
        processes=False,
        n_workers=2,
        threads_per_worker=2,
        dashboard_address="127.0.0.1:0",
    ) as client:
        yield client


@pytest.mark.parametrize("trainers", [1, 3])
@pytest.mark.parametrize("optimizer", list(demo.RULES))
def test_bsp_equals_plain_numpy(cluster: Any, optimizer: str, trainers: int) -> None:
    options = demo.Options(optimizer=optimizer, epochs=2, batch_size=50, seed=1)
    digits = data.load(options.seed)
    found = demo.train(options, digits, cluster, trainers)
    reference = plain.train_plain(options, digits, trainers)
    assert data.difference(found, reference) < 1e-12
    # And is not equal for want of training.
    assert data.accuracy(found, digits) > 0.7


@pytest.mark.parametrize(
    "options",
    [
        demo.Options(sync="asp"),
        demo.Options(sync="ssp"),
        demo.Options(sync="ssp", staleness=0),
    ],
)
def test_asynchronous_training_learns(cluster: Any, options: demo.Options) -> None:
    options, digits = replace(options, epochs=5), data.load(0)
    found = demo.train(options, digits, cluster, 2)
    assert data.accuracy(found, digits) > 0.9
    assert data.accuracy(plain.train_plain(options, digits, 2), digits) > 0.9


@pytest.mark.parametrize("own", [True, False], ids=["own", "running"])
def test_on_a_cluster_of_its_own_nothing_ends_a_demo_but_an_error(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine takes minutes to start two processes and to compile loops."""
    found: dict[str, Any] = {}

    class NoClusterError(Exception):
        """Instead of one: the processes take their limits from here."""

    def look(*args: Any, **kwargs: Any) -> Any:
        settings = config.load()
        found["verbs"] = config.deadline(config.DEFAULT)
        found["register"] = settings.register_timeout_seconds
        found["connect"] = parse_timedelta(dask.config.get(CONNECT))
        raise NoClusterError

    before = config.load(), dask.config.get(CONNECT)
    monkeypatch.setattr(servers, "LocalCluster", look)
    monkeypatch.setattr(servers, "Client", look)
    with (
        pytest.raises(NoClusterError),
        servers.cluster(None if own else "tcp://[::1]:9"),
    ):
        pass
    if own:
        assert found["verbs"] is None
        assert found["register"] >= 3600
        assert found["connect"] >= 300
    else:
        assert found["verbs"] == before[0].timeout_seconds
    assert (config.load(), dask.config.get(CONNECT)) == before


def test_a_demo_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    enough = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            enough.set()

    monkeypatch.setattr(waiting, "SAY_SECONDS", 1e-3)
    with waiting.WaitNotice("the first epoch", say) as wait:
        assert enough.wait(PATIENCE)
        wait.end()
        n_said = len(said)
    assert len(said) == n_said
    assert all(
        re.fullmatch(r"waiting for the first epoch, .* s so far", s) for s in said
    )


def test_a_wait_that_ends_at_once_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with waiting.WaitNotice("nothing"):
        pass
    assert capsys.readouterr().out == ""


def test_a_cluster_that_does_not_answer_in_time_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(options: demo.Options) -> None:
        raise TimeoutError("timed out after 60 s waiting for the creation")

    monkeypatch.setattr(demo, "demo", late)
    assert cli.main(["demo"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "waiting for the creation (daskps.timeout" in err


@pytest.mark.parametrize("optimizer", list(demo.RULES))
def test_every_optimizer_reaches_the_accuracy_of_the_default(optimizer: str) -> None:
    options, digits = demo.Options(optimizer=optimizer), data.load(0)
    assert data.accuracy(plain.train_plain(options, digits, 2), digits) >= 0.94


# -- the command -------------------------------------------------------------------


@contextmanager
def started(
    place: dict[str, str], tmp_path: Path, *options: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *options],
        env=place,
        cwd=tmp_path / "cwd",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    """Return how a demo ended that was not to end, and its last words."""
    _, err = process.communicate(timeout=PATIENCE)
    return f"the demo ended with {process.returncode}: {err}"


def check_output(out: str, epochs: int) -> float:
    """Check what a finished demo printed, return the accuracy through the store."""
    shards = re.findall(r"^  shard (\d+) on (\S+), (\d+) weights$", out, re.MULTILINE)
    assert [int(shard) for shard, _, _ in shards] == list(range(len(shards)))
    assert sum(int(weights) for _, _, weights in shards) == 650
    lines = [found for line in out.splitlines() if (found := LINE.match(line))]
    assert len(lines) == epochs
    assert float(lines[-1][1]) < float(lines[0][1])
    assert all(int(line[3]) > 0 for line in lines)
    [(ours, plain)] = re.findall(
        r"accuracy (\S+) through the store\n +(\S+) with plain NumPy", out
    )
    assert ours == plain == lines[-1][2]
    return float(ours)


def test_defaults_from_a_cold_start(place: dict[str, str], tmp_path: Path) -> None:
    del place["DASK_DASKPS__CACHE_DIRECTORY"]
    with started(place, tmp_path) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert not err
    assert check_output(out, epochs=20) >= 0.94
    assert out.count("shard ") == 2
    assert not left_behind(tmp_path)
    assert [*(tmp_path / "cache" / "daskps" / "kernels").glob("*.py")]


def test_words_by_the_command(place: dict[str, str], tmp_path: Path) -> None:
    """One trainer alone, then one per worker; words that belong together are near."""
    few = ["--sync", "ssp", "--epochs", "2", "--batch-size", "2048"]
    with started(place, tmp_path, "--task", "words", *few) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert not err
    lines = re.findall(r"^ +(\d) +(\d) +(\d+\.\d{3}) +([\d,]+) ", out, re.MULTILINE)
    assert [line[:2] for line in lines] == [("1", "1"), ("2", "2")]
    assert float(lines[1][2]) < float(lines[0][2])
    assert all(float(line[3].replace(",", "")) > 100 for line in lines)
    [(found, named)] = re.findall(
        r"^(\d+) of 10 pairs are among the 10 nearest:\n(.*)$", out, re.MULTILINE
    )
    assert len(named.split()) == int(found) >= 7
    assert not left_behind(tmp_path)


def listening(processes: list[psutil.Process]) -> set[str]:
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


def takes_interrupts(process: psutil.Process) -> bool:
    """Whether SIGINT is neither blocked nor ignored."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    masks = re.findall(r"^Sig(?:Blk|Ign):\s+(\w+)$", status, re.MULTILINE)
    assert len(masks) == 2
    return not any(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in masks)


@pytest.mark.parametrize(
    "whole_group",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["kill", "terminal"],
)
@pytest.mark.usefixtures("interruptible")
def test_interrupt_leaves_nothing(
    place: dict[str, str], tmp_path: Path, whole_group: bool
) -> None:
    """A terminal sends Ctrl-C to the workers too."""
    with started(place, tmp_path, "--epochs", "100000") as process:
        assert process.stdout is not None
        while not LINE.match(line := process.stdout.readline()):
            assert line, ended(process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        assert not any(map(takes_interrupts, children))
        addresses = listening([psutil.Process(process.pid), *children])
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert addresses == {"127.0.0.1"}
    assert process.returncode == 130, err
    assert err == "daskps demo: interrupted\n"
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert not alive
    assert not left_behind(tmp_path)


@pytest.mark.parametrize(
    "whole_group",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["kill", "terminal"],
)
@pytest.mark.usefixtures("interruptible")
def test_interrupt_while_workers_start(
    place: dict[str, str], tmp_path: Path, whole_group: bool
) -> None:
    with started(place, tmp_path) as process:
        parent = psutil.Process(process.pid)
        until(lambda: process.poll() is not None or len(parent.children()) >= 2)
        assert process.poll() is None, ended(process)
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        children = parent.children(recursive=True)
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, err
    assert err == "daskps demo: interrupted\n"
    assert not LINE.search(out)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert not alive
    assert not left_behind(tmp_path)


def test_running_cluster(place: dict[str, str], tmp_path: Path) -> None:
    """A scheduler without preload, and workers that only have daskps installed."""
    file = tmp_path / "scheduler.json"
    here = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    scheduler = ["dask", "scheduler", *here, "--port", "0"]
    worker = ["dask", "worker", *here, "--no-nanny", "--nthreads", "1"]
    worker += ["--scheduler-file", str(file)]
    flags: dict[str, Any] = {"env": place, "cwd": tmp_path / "cwd"}
    # These workers import daskps and load kernels while the demo waits for its store.
    place["DASK_DASKPS__TIMEOUT"] = f"{PATIENCE} s"
    with (
        popen([*scheduler, "--scheduler-file", str(file)], **flags),
        popen(worker, **flags),
        popen(worker, **flags),
        Client(scheduler_file=str(file)) as client,
    ):
        client.wait_for_workers(2, timeout=PATIENCE)
        address = client.scheduler.address
        with started(
            place, tmp_path, "--scheduler", address, "--epochs", "3", "--trainers", "3"
        ) as process:
            out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
        assert not err
        assert check_output(out, epochs=3) > 0.8
        for worker_address in client.nthreads():
            assert worker_address in out

        def count(dask_scheduler: Any) -> int:
            return len(dask_scheduler.extensions["daskps-directory"].stores)

        # Nothing of the demo stays on a cluster that is not its own.
        until(lambda: not client.run_on_scheduler(count))
        assert len(client.nthreads()) == 2


@pytest.mark.parametrize("n_workers", [0, 1], ids=["no workers", "no daskps"])
def test_cluster_that_cannot_be_used(
    place: dict[str, str], tmp_path: Path, n_workers: int
) -> None:
    """Its servers find a `daskps` that cannot be imported, as if there were none."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "daskps.py").write_text("raise ModuleNotFoundError('gone')")
    file = tmp_path / "scheduler.json"
    here = ["--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0"]
    here += ["--scheduler-file", str(file)]
    env = {**place, "PYTHONPATH": str(tmp_path / "path")}
    with ExitStack() as stack:
        stack.enter_context(popen(["dask", "scheduler", *here, "--port", "0"], env=env))
        for _ in range(n_workers):
            worker = ["dask", "worker", "--no-nanny", *here]
            stack.enter_context(popen(worker, env=env))
        client = stack.enter_context(Client(scheduler_file=str(file)))
        if n_workers:
            client.wait_for_workers(n_workers, timeout=PATIENCE)
        process = stack.enter_context(
            started(place, tmp_path, "--scheduler", client.scheduler.address)
        )
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert err.count("\n") == 1
    assert ("install the same daskps" if n_workers else "has no workers") in err

"""The command line: what it says, on which stream, and with which exit status."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import io
import json
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import dask
import dask.cli
import numpy as np
import pytest
from click.testing import CliRunner
from dask.utils import format_bytes

import daskps
from daskps import cli, demo, optim
from daskps.cli import stores
from daskps.demo import servers
from tests.support import gen_cluster, until

ROOT = Path(__file__).parent.parent


status = cli.main


@pytest.fixture(autouse=True)
def no_scheduler() -> Iterator[None]:
    """No cluster is configured on the machine of the test."""
    with dask.config.set({"scheduler-address": None}):
        yield


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "Missing command"),
        (["demon"], "demon"),
        (["--frob"], "--frob"),
        (["demo", "--frob"], "--frob"),
        (["demo", "--task", "letters"], "words"),
        (["demo", "--task", "words", "--optimizer", "sgd"], "is for --task digits"),
        (["demo", "--task", "words", "--staleness", "2"], "not asp"),
        (["demo", "digits"], "digits"),
        (["demo", "--epo", "3"], "--epo"),
        (["demo", "--sync", "sometimes"], "bsp"),
        (["demo", "--optimizer", "lion"], "adamw"),
        (["demo", "--staleness", "-1", "--sync", "ssp"], "x>=0"),
        (["demo", "--staleness", "2"], "--staleness is for --sync ssp, not bsp"),
        (["demo", "--staleness", "2", "--sync", "asp"], "not asp"),
        (["demo", "--trainers", "0"], "1<=x<=1024"),
        (["demo", "--trainers", "1025"], "1<=x<=1024"),
        (["demo", "--epochs", "0"], "x>=1"),
        (["demo", "--epochs", "many"], "'many'"),
        (["demo", "--epochs"], "requires an argument"),
        (["demo", "--batch-size", "0"], "x>=1"),
        (["demo", "--batch-size", "1.5"], "'1.5'"),
        (["demo", "--seed", "-1"], "x>=0"),
        (["demo", "--scheduler", "foo://bar"], "foo://bar"),
        (["demo", "--scheduler", ""], "--scheduler"),
        (["list"], "which cluster? Give --scheduler ADDRESS"),
        (["list", "--scheduler", " "], "give an address"),
        (["list", "model"], "model"),
        (["show"], "NAME"),
        (["show", "model"], "DASK_SCHEDULER_ADDRESS"),
        (["watch"], "NAME"),
        (["watch", "model", "--count", "0"], "x>=1"),
        (["watch", "model", "--interval", "0"], "x>=0.1"),
        (["watch", "model", "--interval", "nan"], "--interval nan is not up to"),
        (["watch", "model", "--interval", "1e400"], "--interval inf is not up to"),
        (["delete", "--yes"], "NAME"),
    ],
)
def test_wrong_option_is_one_line_and_status_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(argv) == cli.MISUSED == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("daskps")
    assert said in err


def test_the_line_begins_with_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, begin in [
        ([], "daskps: "),
        (["demon"], "daskps: "),
        (["demo", "--epochs", "0"], "daskps demo: "),
        (["demo", "--staleness", "2"], "daskps demo: --staleness"),
        (["list"], "daskps list: which"),
    ]:
        status(argv)
        assert capsys.readouterr().err.startswith(begin)


def test_interrupt_is_one_line_and_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(options: demo.Options) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupt)
    assert status(["demo"]) == cli.INTERRUPTED == 130
    assert capsys.readouterr().err == "daskps demo: interrupted\n"


@pytest.mark.leaky  # Dask's client that reached nobody keeps its event loop's thread
def test_unreachable_scheduler_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(servers, "CONNECT_SECONDS", 0.2)
    assert status(["demo", "--scheduler", "tcp://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "tcp://127.0.0.1:9" in err


def test_missing_scikit_learn_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert status(["demo"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert 'pip install "daskps[demo]"' in err


def test_failure_of_the_store_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(options: demo.Options) -> None:
        raise daskps.ShardLostError("s", 1, "tcp://a:1", "died")

    monkeypatch.setattr(demo, "demo", lose)
    assert status(["demo"]) == 1
    assert "ShardLostError: shard 1 of store 's'" in capsys.readouterr().err


def test_options_reach_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[demo.Options] = []
    monkeypatch.setattr(demo, "demo", seen.append)
    line = (
        "demo --scheduler tcp://a:1 --sync ssp --staleness 2 --trainers 3 --epochs 4 "
        "--batch-size 5 --optimizer adam --seed 6"
    )
    assert status(line.split()) == 0
    assert status(["demo"]) == 0
    assert status(["demo", "--task", "words", "--epochs", "9"]) == 0
    assert seen == [
        demo.Options("tcp://a:1", "ssp", 2, 3, 4, 5, "adam", 6),
        demo.Options(),
        demo.Options(None, "asp", None, None, 9, 512, "adagrad", 0, "words"),
    ]
    assert seen[0].policy == daskps.SSP(2)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["--version"]) == 0
    assert capsys.readouterr().out == f"daskps {daskps.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"], ["demo", "-h"]])
def test_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(argv) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    if argv[0] == "demo":
        for option in demo.Options.__dataclass_fields__:
            assert f"--{option.replace('_', '-')}" in out


def test_console_script_is_main() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["daskps"].split(":")
    assert getattr(importlib.import_module(module), function) is cli.main


# -- list and show -----------------------------------------------------------------


def said(argv: list[str], capsys: pytest.CaptureFixture[str], client: Any) -> str:
    assert status([*argv, "--scheduler", client.scheduler.address]) == 0
    out, err = capsys.readouterr()
    assert not err
    return str(out)


def test_list(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    daskps.create({"w": np.zeros((2, 3)), "b": 0.0}, name="model", shards=3)
    other = daskps.create({"w": np.zeros(5, "f4")})
    lines = said(["list"], capsys, client).splitlines()
    assert (
        lines[0]
        == "name              kind     parameters  tables  shards  workers  bytes"
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["model"] == ["named", "2", "0", "3", "2", "56", "B"]
    assert rows[f"session-{other.uid[:8]}"] == [
        "session",
        "1",
        "0",
        "2",
        "2",
        "20",
        "B",
    ]
    found = {
        row["name"]: row for row in json.loads(said(["list", "--json"], capsys, client))
    }
    assert found["model"] == {
        "name": "model",
        "uid": daskps.open("model").uid,
        "kind": "named",
        "parameters": 2,
        "tables": 0,
        "shards": 3,
        "workers": 2,
        "nbytes": 56,
    }


def test_scheduler_as_a_client_finds_it(
    client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """From Dask's configuration, into which the environment variable goes."""
    with dask.config.set({"scheduler-address": client.scheduler.address}):
        assert status(["list"]) == 0
        assert status(["show", "nothing"]) == 1
    assert "no store named 'nothing'" in capsys.readouterr().err
    assert dask.config.collect_env({"DASK_SCHEDULER_ADDRESS": "tcp://a:1"}) == {
        "scheduler_address": "tcp://a:1"
    }


def test_watch_shows_pushes_a_second(
    client: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = daskps.create({"w": np.zeros(4)}, name="model", shards=2)
    now = iter((100.0, 104.0))
    monkeypatch.setattr(stores, "monotonic", lambda: next(now))

    def push(seconds: float) -> None:
        assert seconds == 3.0
        for _ in range(10):
            store.add({"w": np.ones(4)})

    monkeypatch.setattr(stores, "sleep", push)
    argv = ["watch", "model", "--interval", "3", "--count", "2"]
    lines = [line.split() for line in said(argv, capsys, client).splitlines()]
    head = ["shard", "worker", "version", "pushes", "pushes/s", "duplicates", "parked"]
    assert lines[0] == lines[3] == head
    assert [(row[0], *row[2:]) for row in lines[1:3]] == [
        (str(i), "0", "0", "-", "0", "0") for i in range(2)
    ]
    assert [(row[0], *row[2:]) for row in lines[4:]] == [
        (str(i), "10", "10", "2.5", "0", "0") for i in range(2)
    ]
    store.delete()


def test_watch_goes_on_as_a_store_is_cut_anew(
    client: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pushes are counted from 0 then, and nobody pushes less than never."""
    store = daskps.create({"w": np.zeros(4)}, name="model", shards=2)
    for _ in range(3):
        store.add({"w": np.ones(4)})
    monkeypatch.setattr(stores, "sleep", lambda _: store.reshard(shards=2))
    # As of a command that was started with `>&-`, which goes on too.
    monkeypatch.setattr(sys, "stdout", None)
    shown: list[str] = []
    monkeypatch.setattr(click, "echo", shown.append)
    argv = ["watch", "model", "--count", "2", "--scheduler", client.scheduler.address]
    assert status(argv) == 0
    rows = [line.split()[3:5] for text in shown for line in text.splitlines()[1:]]
    assert rows == [["3", "-"]] * 2 + [["0", "-"]] * 2
    store.delete()


def test_delete(
    client: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daskps.create({"w": np.zeros(4)}, name="model")
    session = daskps.create({"w": np.zeros(4)})
    for answer in ("n\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        argv = ["delete", "model", "--scheduler", client.scheduler.address]
        assert status(argv) == cli.FAILED
        assert "free store 'model'" in capsys.readouterr().out
    assert said(["delete", "model", "--yes"], capsys, client) == (
        "deleted store 'model'\n"
    )
    assert said(["delete", session.uid, "--yes"], capsys, client).startswith("deleted")
    assert daskps.list_stores() == []
    assert status([*argv, "--yes"]) == cli.FAILED
    assert "no store named 'model'" in capsys.readouterr().err


def test_show(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    store = daskps.create(
        {"w": np.zeros((2, 3)), "n": np.int64(0)},
        name="model",
    )
    store.add({"w": np.ones((2, 3))})
    store.add({"n": 4})
    waiting = store.pull_async(min_version=9, timeout=None)
    until(lambda: all(row["parked"] for row in store.stats()["shards"]))
    text = said(["show", "model"], capsys, client)
    found = json.loads(said(["show", store.uid, "--json"], capsys, client))
    waiting.cancel()
    assert text.startswith(f"named store 'model', uid {store.uid}\n")
    assert found["parameters"] == [
        {
            "name": "w",
            "shape": [2, 3],
            "dtype": "float64",
            "nbytes": 48,
            "optimizer": None,
            "shards": None,
        },
        {
            "name": "n",
            "shape": [],
            "dtype": "int64",
            "nbytes": 8,
            "optimizer": None,
            "shards": None,
        },
    ]
    keys = ("shard", "worker", *stores.COUNTERS)
    assert [tuple(row) for row in found["shards"]] == [keys, keys]
    assert [row["worker"] for row in found["shards"]] == list(store.placement)
    assert [row["version"] for row in found["shards"]] == list(store.versions)
    assert found["shards"][0]["pushes"] >= 1
    assert [row["parked"] for row in found["shards"]] == [1, 1]
    for row in found["shards"]:
        assert row["worker"] in text
        assert row["nbytes"] == store.layout.shard_nbytes(row["shard"])
        assert row["segment_nbytes"] > row["nbytes"]
    heads = text.splitlines()[-3].split()
    assert heads[:6] == ["shard", "worker", "generation", "version", "bytes", "memory"]


def test_show_names_optimizers(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    daskps.create({"w": np.zeros(3)}, name="model", optimizer=optim.SGD(0.5))
    assert "SGD(lr=0.5)" in said(["show", "model"], capsys, client)


@pytest.mark.leaky
@gen_cluster()
async def test_cluster_without_daskps_stays_so(s, a, b):
    """Neither plugins nor clients nor hosts appear, and that is what is said."""
    before = set(s.plugins), set(s.extensions), set(s.handlers), set(s.clients)
    at = ["--scheduler", s.address]
    runner = CliRunner()
    loop = asyncio.get_running_loop()

    def invoke(*argv: str) -> click.testing.Result:
        return runner.invoke(cli.ps, [*argv, *at])

    listed = await loop.run_in_executor(None, invoke, "list")
    assert (listed.exit_code, listed.output) == (0, f"{stores.NO_DASKPS}\n")
    listed = await loop.run_in_executor(None, invoke, "list", "--json")
    assert (listed.exit_code, json.loads(listed.output)) == (0, [])
    shown = await loop.run_in_executor(None, invoke, "show", "model")
    assert shown.exit_code == 1
    assert shown.output == f"ps show: {stores.NO_DASKPS}\n"
    assert before == (
        set(s.plugins),
        set(s.extensions),
        set(s.handlers),
        set(s.clients),
    )
    assert not any("daskps" in w.metrics for w in (a, b))


@gen_cluster(client=True)
async def test_no_stores_and_lost_shards(c, s, a, b):
    loop = asyncio.get_running_loop()

    def invoke(*argv: str) -> str:
        found = CliRunner().invoke(cli.ps, [*argv, "--scheduler", s.address])
        assert found.exit_code == 0, found.output
        return found.output

    # Private memory: the other worker cannot take over what this one leaves.
    with dask.config.set({"daskps.carriers.machine": False}):
        store = await daskps.aio.create({"w": np.zeros(4)}, client=c, name="model")
    # And has no room for what that would send.
    s.workers[a.address].memory_limit = 1
    await b.close()
    # Until then a worker that closes may be found on its way.
    with pytest.raises(daskps.ShardLostError):
        await store.pull()
    shown = await loop.run_in_executor(None, invoke, "show", "model")
    [line] = [line for line in shown.splitlines() if b.address in line]
    assert "lost: was closed" in line
    [line] = [line for line in shown.splitlines() if a.address in line]
    assert "lost" not in line
    await store.delete()
    assert await loop.run_in_executor(None, invoke, "list") == "no stores\n"


def test_scheduler_that_is_none_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody there, something that is silent, something that is not Dask."""
    monkeypatch.setattr(stores, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for address in ("tcp://127.0.0.1:9", f"tcp://127.0.0.1:{port}", "foo://bar"):
            for command in (["list"], ["show", "model"]):
                assert status([*command, "--scheduler", address]) == 1
                out, err = capsys.readouterr()
                assert not out
                assert err.count("\n") == 1
                assert err.startswith(f"daskps {command[0]}: cannot reach a scheduler")
                assert address in err


def test_server_that_is_not_dask(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1 << 16)

        thread = threading.Thread(target=greet)
        thread.start()
        at = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert status(["list", "--scheduler", at]) == 1
        thread.join()
    assert capsys.readouterr().err.count("\n") == 1


def test_dask_ps_is_the_same_group(client: Any) -> None:
    """Dask finds it by the entry point, adds it as `ps` and says its own name."""
    [(name, value)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "entry-points"
    ]["dask_cli"].items()
    entry = importlib.metadata.EntryPoint(name, value, "dask_cli")
    root = click.Group("dask")
    dask.cli._register_command_ep(root, entry)
    assert root.commands == {"ps": cli.ps}
    at = ["--scheduler", client.scheduler.address]
    found = CliRunner().invoke(root, ["ps", "list", *at], prog_name="dask")
    assert found.exit_code == 0
    found = CliRunner().invoke(root, ["ps", "show", "x", *at], prog_name="dask")
    assert (found.exit_code, found.output.count("\n")) == (1, 1)
    assert found.output.startswith("dask ps show: StoreNotFoundError: no store")
    found = CliRunner().invoke(root, ["ps", "demo", "--epochs", "0"], prog_name="dask")
    assert found.exit_code == 2
    assert found.output.startswith("dask ps demo: Invalid value for '--epochs'")


def test_importing_daskps_leaves_the_command_line_alone() -> None:
    code = "import daskps, sys; print('daskps.cli' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_show_tells_of_tables(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"emb": daskps.TableSpec(1000, 8)}
    store = daskps.create(params, name="model", optimizer=optim.SGD(0.5))
    store["emb"].push([3, 999], np.ones((2, 8)))
    lines = said(["show", "model"], capsys, client).splitlines()
    heads = "name", "rows", "dim", "dtype", "bytes", "steps", "optimizer"
    assert tuple(lines[2].split()) == heads
    assert " ".join(lines[3].split()) == "emb 1000 8 float32 31.25 kiB 1 SGD(lr=0.5)"
    [listed] = json.loads(said(["list", "--json"], capsys, client))
    assert (listed["parameters"], listed["tables"]) == (0, 1)


def test_show_tells_of_second_copies(
    client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = daskps.create({"w": np.zeros(5)}, name="twice", shards=1, copies=2)
    [row] = store.stats()["shards"]
    assert {row["worker"], row["copy"]} == {*client.nthreads()}
    *_, head, shard = said(["show", "twice"], capsys, client).splitlines()
    assert head.split()[-4:] == ["copy", "copy's", "memory", "behind"]
    nbytes = format_bytes(row["copy_nbytes"])
    assert shard.split()[-4:] == [row["copy"], *nbytes.split(), "0"]
    [found] = json.loads(said(["show", "twice", "--json"], capsys, client))["shards"]
    keys = "copy", "copy_nbytes", "behind"
    assert {key: found[key] for key in keys} == {key: row[key] for key in keys}
    assert found["behind"] == 0


def test_list_and_show_tell_of_devices(
    client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    store = daskps.create({"w": np.zeros(5)}, name="there", shards=1, device="fake")
    lines = said(["list"], capsys, client).splitlines()
    assert lines[0].endswith("bytes  device")
    assert lines[1].endswith("40 B   fake:0")
    [row] = json.loads(said(["list", "--json"], capsys, client))
    assert row["device"] == "fake:0"
    *_, head, shard = said(["show", "there"], capsys, client).splitlines()
    assert head.endswith("device  device memory")
    [found] = json.loads(said(["show", "there", "--json"], capsys, client))["shards"]
    assert found["device_nbytes"] == store.stats()["shards"][0]["device_nbytes"] > 80
    assert shard.endswith("fake:0  8.00 kiB")

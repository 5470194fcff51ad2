"""The command line: what it says, on which stream, and with which exit status."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

import daskps
from daskps import cli, demo
from daskps.demo import servers

ROOT = Path(__file__).parent.parent


def status(argv: list[str]) -> int:
    try:
        return cli.main(argv)
    except SystemExit as end:
        return int(str(end.code))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "COMMAND"),
        (["demon"], "demon"),
        (["--frob"], "COMMAND"),
        (["demo", "--frob"], "--frob"),
        (["demo", "digits"], "digits"),
        (["demo", "--epo", "3"], "--epo"),
        (["demo", "--sync", "sometimes"], "bsp"),
        (["demo", "--optimizer", "lion"], "adamw"),
        (["demo", "--staleness", "-1", "--sync", "ssp"], "at least 0"),
        (["demo", "--staleness", "2"], "--staleness is for --sync ssp, not bsp"),
        (["demo", "--staleness", "2", "--sync", "asp"], "not asp"),
        (["demo", "--trainers", "0"], "1 to 1024"),
        (["demo", "--trainers", "1025"], "1 to 1024"),
        (["demo", "--epochs", "0"], "at least 1"),
        (["demo", "--epochs", "many"], "'many'"),
        (["demo", "--epochs"], "expected one argument"),
        (["demo", "--batch-size", "0"], "at least 1"),
        (["demo", "--batch-size", "1.5"], "'1.5'"),
        (["demo", "--seed", "-1"], "at least 0"),
        (["demo", "--scheduler", "foo://bar"], "foo://bar"),
        (["demo", "--scheduler", ""], "--scheduler"),
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
    assert seen == [
        demo.Options("tcp://a:1", "ssp", 2, 3, 4, 5, "adam", 6),
        demo.Options(),
    ]
    assert seen[0].policy == daskps.SSP(2)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["--version"]) == 0
    assert capsys.readouterr().out == f"daskps {daskps.__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
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

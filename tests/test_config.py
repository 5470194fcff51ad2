from __future__ import annotations

import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import yaml

import daskps.config
from daskps.config import DEFAULT, Config, deadline, load

FOLDER = Path(daskps.config.__file__).parent
DEFAULTS = yaml.safe_load((FOLDER / "daskps.yaml").read_text())
SCHEMA = yaml.safe_load((FOLDER / "daskps-schema.yaml").read_text())


def keys(defaults: dict[str, Any]) -> dict[str, Any]:
    return {k: keys(v) if isinstance(v, dict) else None for k, v in defaults.items()}


def schema_keys(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        key: schema_keys(value["properties"]) if "properties" in value else None
        for key, value in properties.items()
    }


def leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    out: set[str] = set()
    for key, value in tree.items():
        name = f"{prefix}{key}"
        out |= {name} if value is None else leaves(value, f"{name}.")
    return out


def test_schema_has_the_keys_of_the_defaults() -> None:
    assert schema_keys(SCHEMA["properties"]) == keys(DEFAULTS)


def test_every_key_of_the_file_is_read() -> None:
    assert set(daskps.config._PARSERS) == leaves(keys(DEFAULTS)["daskps"])


def test_every_schema_entry_has_a_type_and_a_description() -> None:
    def walk(properties: dict[str, Any]) -> None:
        for value in properties.values():
            if "properties" in value:
                walk(value["properties"])
            else:
                assert {"type", "enum"} & set(value)
                assert value["description"].strip()

    walk(SCHEMA["properties"]["daskps"]["properties"])


def test_load_gives_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert load() == Config(
        timeout_seconds=60.0,
        register_timeout_seconds=30.0,
        lost_after_seconds=10.0,
        suspect_after_seconds=5.0,
        run_away_seconds=300.0,
        check_finite=True,
        memory_share=0.5,
        device_memory_share=0.8,
        rebalance=False,
        correct_memory=True,
        locked_reads=False,
        process_carrier=True,
        machine_carrier=True,
        socket_carrier=True,
        inline_nbytes=65_536,
        warn_pull_nbytes=2**30,
        cache=Path("/cache/daskps/kernels"),
        shared_memory=Path("/dev/shm"),
        threads=2,
        double_buffer="none",
    )


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("timeout", "2 minutes", "timeout_seconds", 120.0),
        ("timeout", 1.5, "timeout_seconds", 1.5),
        ("timeout", None, "timeout_seconds", None),
        ("register-timeout", "500ms", "register_timeout_seconds", 0.5),
        ("lost-after", "200ms", "lost_after_seconds", 0.2),
        ("run-away-timeout", "1 minute", "run_away_seconds", 60.0),
        ("run-away-timeout", None, "run_away_seconds", None),
        ("finite", "allow", "check_finite", False),
        ("memory-share", 1, "memory_share", 1.0),
        ("device-memory-share", 0.5, "device_memory_share", 0.5),
        ("rebalance", True, "rebalance", True),
        ("carriers.process", False, "process_carrier", False),
        ("carriers.machine", False, "machine_carrier", False),
        ("carriers.socket", False, "socket_carrier", False),
        ("carriers.locked-reads", True, "locked_reads", True),
        ("inline-nbytes", 0, "inline_nbytes", 0),
        ("warn-pull-size", "10 MB", "warn_pull_nbytes", 10_000_000),
        ("cache-directory", "/x/y", "cache", Path("/x/y")),
        ("cache-directory", Path("/x"), "cache", Path("/x")),
        ("shared-memory-directory", "/x", "shared_memory", Path("/x")),
        ("threads", 7, "threads", 7),
        ("double-buffer", "parameters", "double_buffer", "parameters"),
    ],
)
def test_load_reads_at_call_time(
    key: str, value: Any, field: str, expected: Any
) -> None:
    with dask.config.set({f"daskps.{key}": value}):
        assert getattr(load(), field) == expected
    assert load() == load()


def test_a_value_that_went_is_named_once_and_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    daskps.config._warn_of.cache_clear()
    gone = {"daskps.update-threads": 2, "daskps.double-buffer": "batches"}
    with dask.config.set(gone):
        assert [load().double_buffer for _ in range(3)] == ["none"] * 3
    [key, value] = caplog.records
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "daskps.update-threads: has no effect any more" in key.message
    assert "daskps.double-buffer: batches has no effect any more" in value.message


@pytest.mark.parametrize(
    ("key", "bad", "hint"),
    [
        ("timeout", "soon", '"30s"'),
        ("timeout", "-3s", '"30s"'),
        ("timeout", "3 parsecs", '"30s"'),
        ("timeout", "", '"30s"'),
        ("timeout", True, '"30s"'),
        ("timeout", [3], '"30s"'),
        ("register-timeout", -1, '"30s"'),
        ("register-timeout", math.nan, '"30s"'),
        ("register-timeout", 0, "above 0"),
        ("register-timeout", None, "above 0"),
        ("register-timeout", math.inf, "above 0"),
        ("lost-after", 0, "above 0"),
        ("suspect-after", 0, "above 0"),
        ("lost-after", None, "above 0"),
        ("run-away-timeout", -1, '"30s"'),
        ("finite", "maybe", '"reject" or "allow"'),
        ("finite", [], '"reject" or "allow"'),
        ("memory-share", 0, "above 0"),
        ("memory-share", 1.5, "above 0"),
        ("memory-share", "half", "above 0"),
        ("memory-share", True, "above 0"),
        ("rebalance", 1, "true or false"),
        ("rebalance", "yes", "true or false"),
        ("carriers.process", "no", "true or false"),
        ("carriers.locked-reads", 1, '"auto" or true'),
        ("carriers.locked-reads", False, '"auto" or true'),
        ("inline-nbytes", "64 apples", "64 KiB"),
        ("inline-nbytes", -1, "64 KiB"),
        ("inline-nbytes", None, "64 KiB"),
        ("inline-nbytes", "", "64 KiB"),
        ("warn-pull-size", 1.5, "64 KiB"),
        ("cache-directory", 3, "directory"),
        ("cache-directory", "", "directory"),
        ("shared-memory-directory", "x/y", "absolute"),
        ("shared-memory-directory", 3, "absolute"),
        ("threads", 0, "at least 1"),
        ("threads", 1.5, "at least 1"),
        ("threads", True, "at least 1"),
        ("double-buffer", True, '"parameters"'),
        ("double-buffer", "all", '"none" or "parameters"'),
    ],
)
def test_bad_value_names_its_key_and_what_is_allowed(
    key: str, bad: Any, hint: str
) -> None:
    with (
        dask.config.set({f"daskps.{key}": bad}),
        pytest.raises(ValueError, match=f"daskps.{key} is ") as caught,
    ):
        load()
    assert repr(bad) in str(caught.value)
    assert hint in str(caught.value)


def test_environment_overrides_the_defaults() -> None:
    code = (
        "from daskps.config import load; c = load();"
        "print(c.timeout_seconds, c.process_carrier, c.memory_share, c.inline_nbytes)"
    )
    env = {
        "DASK_DASKPS__TIMEOUT": "5s",
        "DASK_DASKPS__CARRIERS__PROCESS": "false",
        "DASK_DASKPS__MEMORY_SHARE": "0.25",
        "DASK_DASKPS__INLINE_NBYTES": "1 kiB",
        "HOME": "/nonexistent",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert done.stdout.split() == ["5.0", "False", "0.25", "1024"], done.stderr


@pytest.mark.parametrize("xdg", [None, "", "relative/path"])
def test_cache_falls_back_to_the_home(
    xdg: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert load().cache == Path("/somebody/.cache/daskps/kernels")
    with dask.config.set({"daskps.cache-directory": "~/k"}):
        assert load().cache == Path("/somebody/k")


def test_cache_without_a_home_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ValueError, match=r"daskps\.cache-directory"):
        load()


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (None, None),
        (0, 0.0),
        (1.5, 1.5),
        (np.float32(2), 2.0),
        (np.int64(3), 3.0),
        (math.inf, None),
        ("30s", 30.0),
        (" 30 s ", 30.0),
        ("250 ms", 0.25),
        ("7", 7.0),
    ],
)
def test_deadline_gives_seconds(timeout: Any, expected: float | None) -> None:
    assert deadline(timeout) == expected


def test_deadline_of_default_is_the_configured_timeout() -> None:
    assert deadline() == deadline(DEFAULT) == 60.0
    with dask.config.set({"daskps.timeout": "3s"}):
        assert deadline() == 3.0
    with dask.config.set({"daskps.timeout": None}):
        assert deadline() is None
    assert repr(DEFAULT) == "<daskps.timeout>"


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, -math.inf, "soon", "-3s", ".5s"])
def test_deadline_refuses_bad_values(bad: Any) -> None:
    with pytest.raises(ValueError, match="is no timeout: give seconds"):
        deadline(bad)


@pytest.mark.parametrize("bad", [True, [1], b"3s", 1j, timedelta(seconds=1), object()])
def test_deadline_refuses_bad_types(bad: Any) -> None:
    with pytest.raises(TypeError, match="is no timeout: give seconds"):
        deadline(bad)

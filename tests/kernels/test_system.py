"""Memory by address: in Python, and the same compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from daskps.kernels import plain
from daskps.kernels.system import hold, store
from tests.kernels import compiling


def stores(address: int, value: int) -> int:
    """Write a word and its successor to an address, one after the other."""
    store(address, value)
    hold()
    store(address + 8, value + 1)
    return value


FUNCTIONS = (stores,)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Any:
    cache_dir = str(tmp_path_factory.mktemp("kernels"))
    for hits in (0, len(FUNCTIONS)):
        module = plain(FUNCTIONS, cache_dir)
        found = {f.__name__: module.function(f.__name__) for f in FUNCTIONS}
        assert compiling.hits(module) == hits
    return found


@pytest.fixture(params=["python", "compiled"])
def of(request) -> Any:
    if request.param == "python":
        return {f.__name__: f for f in FUNCTIONS}
    return request.getfixturevalue("compiled")


def test_memory_is_written_by_address(of):
    words = np.array([1, 2, 3])
    assert of["stores"](words.ctypes.data, -(2**63)) == -(2**63)
    assert words.tolist() == [-(2**63), 1 - 2**63, 3]


def one() -> int:
    """Return a number of this module."""
    return LIMIT


def test_one_name_has_one_number():
    space: dict[str, Any] = {"LIMIT": 2, "__name__": "other"}
    exec("def other():\n    return LIMIT", space)
    with pytest.raises(ValueError, match=r"LIMIT of .* another value"):
        plain((one, space["other"]))


LIMIT = 1

"""Fixtures for the examples of docstrings; no part of the installed package.

It lies here, as NumPy's does, so that the examples of one module can be run alone.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from distributed import Client

import daskps

if TYPE_CHECKING:
    from collections.abc import Iterator


#: They import libraries that may be missing.
collect_ignore = ["backend/cuda.py"]
collect_ignore += [] if find_spec("jax") else ["jax.py"]
collect_ignore += [] if find_spec("torch") else ["torch"]


@pytest.fixture(scope="package")
def client() -> Iterator[Client]:
    """Start two workers inside this process, for all examples."""
    with Client(
        processes=False,
        n_workers=2,
        threads_per_worker=2,
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    ) as client:
        yield client


@pytest.fixture(autouse=True)
def names(doctest_namespace: dict[str, Any], client: Client) -> None:
    """Give examples the names that the reference page says they assume."""
    doctest_namespace.update(client=client, daskps=daskps, np=np)

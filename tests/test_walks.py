"""Calls pass few files, functions and returns, from the caller to the shard and back.

The table falls where a route gets shorter; it rises only with what an issue grants.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_readme import run_python

#: Files, functions and returns of each trip: near, by socket and by message.
TABLE = {
    "push, BSP": ((21, 47, 8), (32, 78, 21), (47, 181, 111)),
    "push, BSP, timeout": ((23, 51, 9), (35, 84, 22), (49, 186, 116)),
    "push of arrays and rows, BSP": ((41, 109, 44), (59, 164, 67), (67, 249, 153)),
    "pull into arrays": ((4, 10, 1), (15, 32, 6), (41, 184, 125)),
    "pull of rows": ((14, 53, 13), (34, 112, 39), (50, 220, 131)),
    "push, ASP": ((24, 50, 14), (35, 81, 28), (48, 176, 103)),
    "push of rows, ASP": ((35, 71, 20), (53, 126, 43), (60, 204, 112)),
    "store.push": ((31, 77, 25), (44, 107, 38), (50, 189, 112)),
    "table.push": ((43, 100, 30), (56, 142, 49), (62, 223, 126)),
    "table.push, unbounded": ((47, 125, 44), (61, 169, 63), (66, 249, 141)),
    "table.pull": ((8, 15, 0), (26, 68, 21), (51, 236, 141)),
    "table.pull, unbounded": ((14, 24, 0), (54, 209, 90), (55, 246, 146)),
}
#: How much longer a trip may be than the table says: what serves a socket, and when an
#: event loop looks at its calls, differs from trip to trip.
SLACK = {"near": 1.0, "socket": 1.15, "message": 1.03}


@pytest.mark.leaky  # the process that its process is forked from
@pytest.mark.parametrize("carrier", SLACK)
def test_trips_are_short(carrier: str, tmp_path: Path) -> None:
    said = run_python(f"from tests import walks; walks.main({carrier!r})", tmp_path)
    found: dict[str, Any] = json.loads(said)
    assert {*found} == {*TABLE}
    column, slack = [*SLACK].index(carrier), SLACK[carrier]
    longer = {
        name: (walk, files)
        for name, (walk, files) in found.items()
        if any(
            n > most * slack for n, most in zip(walk, TABLE[name][column], strict=True)
        )
    }
    assert not longer

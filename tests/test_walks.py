"""Calls pass few files, functions and returns, from the caller to the shard and back.

The table falls where a route gets shorter; it rises only with what an issue grants.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("carrier", SLACK)
def test_trips_are_short(carrier: str) -> None:
    command = [sys.executable, "-m", "tests.walks", carrier]
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found: dict[str, Any] = json.loads(ran.stdout)
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

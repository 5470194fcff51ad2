"""Calls pass few files, functions and returns, from the caller to the shard and back.

The table falls where a road gets shorter; it rises only with what an issue grants.
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
    "push, BSP": ((21, 48, 8), (33, 81, 25), (48, 188, 104)),
    "push, BSP, timeout": ((24, 54, 9), (36, 87, 25), (50, 193, 109)),
    "push of arrays and rows, BSP": ((51, 151, 75), (73, 243, 135), (69, 280, 179)),
    "pull into arrays": ((4, 10, 1), (17, 34, 8), (47, 203, 138)),
    "pull of rows": ((16, 57, 16), (40, 119, 44), (53, 229, 145)),
    "push, ASP": ((24, 53, 14), (38, 86, 29), (50, 185, 101)),
    "push of rows, ASP": ((35, 72, 20), (57, 131, 48), (60, 208, 109)),
    "store.push": ((31, 80, 25), (46, 109, 39), (52, 197, 108)),
    "table.push": ((43, 100, 30), (62, 144, 53), (64, 225, 120)),
    "table.push, unbounded": ((47, 125, 44), (67, 169, 66), (68, 250, 134)),
    "table.pull": ((8, 15, 0), (28, 63, 23), (53, 240, 153)),
    "table.pull, unbounded": ((15, 25, 1), (63, 217, 98), (57, 249, 160)),
}
#: How much longer a trip may be than the table says: what serves a socket, and when an
#: event loop looks at its calls, differs from trip to trip.
SLACK = {"near": 1.0, "socket": 1.25, "message": 1.03}


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

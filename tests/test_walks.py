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
    "push, BSP": ((21, 49, 12), (39, 101, 39), (48, 188, 104)),
    "push, BSP, timeout": ((25, 55, 13), (40, 89, 25), (51, 193, 109)),
    "push of arrays and rows, BSP": ((54, 183, 102), (75, 248, 138), (69, 280, 179)),
    "pull into arrays": ((4, 10, 1), (19, 46, 14), (47, 203, 139)),
    "pull of rows": ((24, 80, 24), (42, 121, 45), (53, 229, 146)),
    "push, ASP": ((27, 54, 15), (40, 88, 29), (51, 185, 102)),
    "push of rows, ASP": ((38, 76, 21), (60, 136, 54), (61, 208, 109)),
    "store.push": ((34, 81, 26), (48, 111, 39), (52, 197, 109)),
    "table.push": ((46, 104, 31), (64, 147, 53), (64, 225, 121)),
    "table.push, unbounded": ((50, 127, 44), (69, 172, 66), (68, 250, 134)),
    "table.pull": ((8, 15, 2), (30, 74, 29), (53, 240, 154)),
    "table.pull, unbounded": ((14, 24, 3), (65, 218, 101), (57, 249, 161)),
}
#: How much longer a trip may be than the table says: what serves a socket, and when an
#: event loop looks at its calls, differs from trip to trip.
SLACK = {"near": 1.0, "socket": 1.12, "message": 1.03}


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

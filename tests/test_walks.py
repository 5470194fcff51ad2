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
    "push, BSP": ((21, 48, 8), (32, 79, 21), (48, 181, 111)),
    "push, BSP, timeout": ((23, 52, 9), (34, 80, 20), (50, 186, 116)),
    "push of arrays and rows, BSP": ((41, 109, 45), (59, 161, 64), (69, 249, 152)),
    "pull into arrays": ((4, 10, 1), (16, 32, 6), (43, 184, 125)),
    "pull of rows": ((14, 55, 16), (35, 114, 40), (53, 220, 130)),
    "push, ASP": ((24, 50, 14), (35, 84, 28), (50, 176, 103)),
    "push of rows, ASP": ((35, 72, 20), (53, 123, 40), (62, 204, 111)),
    "store.push": ((31, 77, 25), (43, 105, 36), (51, 189, 112)),
    "table.push": ((43, 100, 30), (56, 138, 46), (65, 223, 125)),
    "table.push, unbounded": ((47, 125, 44), (62, 169, 62), (69, 249, 140)),
    "table.pull": ((8, 15, 0), (25, 63, 19), (54, 236, 140)),
    "table.pull, unbounded": ((14, 24, 0), (59, 199, 85), (59, 246, 144)),
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

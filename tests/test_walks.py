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
    "push, BSP": ((23, 49, 12), (39, 101, 39), (50, 188, 105)),
    "push, BSP, timeout": ((27, 55, 13), (40, 89, 25), (53, 193, 109)),
    "push of arrays and rows, BSP": ((55, 186, 106), (75, 248, 138), (70, 282, 184)),
    "pull into arrays": ((4, 10, 1), (19, 46, 14), (47, 203, 139)),
    "pull of rows": ((25, 80, 27), (42, 121, 45), (54, 229, 149)),
    "push, ASP": ((27, 54, 16), (40, 88, 29), (51, 185, 103)),
    "push of rows, ASP": ((39, 79, 24), (60, 136, 54), (62, 210, 112)),
    "store.push": ((35, 81, 27), (48, 111, 39), (53, 197, 110)),
    "table.push": ((47, 105, 32), (64, 147, 53), (65, 226, 122)),
    "table.push, unbounded": ((51, 128, 45), (69, 172, 66), (69, 251, 136)),
    "table.pull": ((8, 15, 2), (30, 74, 29), (54, 240, 158)),
    "table.pull, unbounded": ((14, 24, 3), (65, 218, 101), (58, 249, 165)),
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

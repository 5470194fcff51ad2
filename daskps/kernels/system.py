"""Memory by address, for functions that are compiled.

Functions that :func:`daskps.kernels.plain` compiles may call these; here they are as
Python has them, and :mod:`daskps.kernels.intrinsics` has the same for compiled code. A
wrong address ends the process: who calls them holds what the memory belongs to.
"""

from __future__ import annotations

import ctypes
from typing import Any


def store(address: int, value: int) -> None:
    """Write an int64 to an address, after all that was written before."""
    ctypes.c_int64.from_address(address).value = value


def hold() -> None:
    """Let nothing that is written later be written before this."""


def fetch(table: Any, row: int) -> None:
    """Begin to bring a row of a contiguous table that will be updated."""


def fetch_to_read(table: Any, row: int) -> None:
    """Begin to bring a row of a contiguous table that is only read."""

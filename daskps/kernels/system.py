"""Memory by address and sockets by number, for functions that are compiled.

Functions that :func:`daskps.kernels.plain` compiles may call these; here they are as
Python has them, and :mod:`daskps.kernels.intrinsics` has the same for compiled code. A
wrong address ends the process: who calls them holds what the memory belongs to.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import time
from typing import Any

#: Whether there is a C library that has them as they are called here.
IS_KNOWN = sys.platform.startswith("linux") and platform.machine() == "x86_64"


@functools.cache
def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def load(address: int) -> int:
    """Return the int64 at an address, before anything that comes later is read."""
    return ctypes.c_int64.from_address(address).value


def store(address: int, value: int) -> None:
    """Write an int64 to an address, after all that was written before."""
    ctypes.c_int64.from_address(address).value = value


def settle() -> None:
    """Let nothing that was read so far be read any later than this."""


def hold() -> None:
    """Let nothing that is written later be written before this."""


def fetch(table: Any, row: int) -> None:
    """Begin to bring a row of a contiguous table that will be updated."""


def fetch_to_read(table: Any, row: int) -> None:
    """Begin to bring a row of a contiguous table that is only read."""


def copy(to: int, source: int, nbytes: int) -> None:
    """Copy bytes from one address to another; the two may overlap."""
    ctypes.memmove(to, source, nbytes)


def recv(fd: int, address: int, nbytes: int, flags: int) -> int:
    """Receive at most so many bytes; return how many, 0 at the end, or -1."""
    call = _library().recv
    call.restype = ctypes.c_ssize_t
    room = ctypes.c_void_p(address)
    found: int = call(fd, room, ctypes.c_size_t(nbytes), flags)
    return found


def send(fd: int, address: int, nbytes: int, flags: int) -> int:
    """Send at most so many bytes; return how many, or -1."""
    call = _library().send
    call.restype = ctypes.c_ssize_t
    said = ctypes.c_void_p(address)
    found: int = call(fd, said, ctypes.c_size_t(nbytes), flags)
    return found


def poll(address: int, milliseconds: int) -> int:
    """Wait for one descriptor.

    Parameters
    ----------
    address : int
        Of a word: the descriptor, and above 32 bits what is waited for.
    milliseconds : int
        How long, -1 for ever.

    Returns
    -------
    int
        1, 0 when that time is over, or -1.
    """
    call = _library().poll
    found: int = call(ctypes.c_void_p(address), ctypes.c_ulong(1), milliseconds)
    return found


def epoll_wait(fd: int, address: int, most: int, milliseconds: int) -> int:
    """Wait for one of many descriptors.

    Parameters
    ----------
    fd : int
        Of the set of them.
    address : int
        Of room for as many events: 12 bytes each, what it is and then the descriptor.
    most : int
        How many.
    milliseconds : int
        How long, -1 for ever.

    Returns
    -------
    int
        How many events there are, 0 when that time is over, or -1.
    """
    call = _library().epoll_wait
    found: int = call(fd, ctypes.c_void_p(address), most, milliseconds)
    return found


def monotonic() -> int:
    """Return milliseconds of the clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


def errno() -> int:
    """Return why the last of these calls failed in this thread."""
    return ctypes.get_errno()

"""Memory by address and sockets by number: in Python, and the same compiled."""

from __future__ import annotations

import errno as errors
import os
import select
import socket
import time
from typing import Any

import numpy as np
import pytest

from daskps.kernels import plain, system
from daskps.kernels.system import (
    copy,
    epoll_wait,
    errno,
    load,
    monotonic,
    poll,
    recv,
    send,
    settle,
    store,
)
from tests.kernels import compiling

INT = "types.int64"


def loads(address: int) -> int:
    """Return the word at an address."""
    store(address + 8, load(address) + 1)
    return load(address)


def copies(to: int, source: int, nbytes: int) -> None:
    """Copy bytes."""
    copy(to, source, nbytes)
    settle()


def receives(fd: int, address: int, nbytes: int, flags: int) -> int:
    """Receive, and say why not below -1."""
    found = recv(fd, address, nbytes, flags)
    return found if found >= 0 else -errno()


def sends(fd: int, address: int, nbytes: int, flags: int) -> int:
    """Send, and say why not below -1."""
    found = send(fd, address, nbytes, flags)
    return found if found >= 0 else -errno()


def times(more: int) -> int:
    """Return the time, and some more."""
    return monotonic() + more


def events(fd: int, address: int, most: int, milliseconds: int) -> int:
    """Wait for events."""
    return epoll_wait(fd, address, most, milliseconds)


def polls(address: int, milliseconds: int) -> int:
    """Wait."""
    return poll(address, milliseconds)


SIGNATURES: dict[Any, str] = {
    loads: INT,
    copies: ", ".join([INT] * 3),
    receives: ", ".join([INT] * 4),
    sends: ", ".join([INT] * 4),
    polls: f"{INT}, {INT}",
    events: ", ".join([INT] * 4),
    times: INT,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Any:
    cache_dir = str(tmp_path_factory.mktemp("kernels"))
    for hits in (0, len(SIGNATURES)):
        module = plain(SIGNATURES, cache_dir=cache_dir, alone=True)
        found = {f.__name__: module.function(f.__name__) for f in SIGNATURES}
        # What calls the C library is kept too.
        assert compiling.hits(module) == hits
    return found


@pytest.fixture(params=["python", "compiled"])
def of(request) -> Any:
    if request.param == "python":
        return {f.__name__: f for f in SIGNATURES}
    return request.getfixturevalue("compiled")


pytestmark = pytest.mark.skipif(not system.IS_KNOWN, reason="no such C library")


def test_memory_is_read_and_copied_by_address(of):
    words = np.array([1, -(2**63), 3, 4])
    at = words.ctypes.data
    assert of["loads"](at) == 1
    assert words.tolist() == [1, 2, 3, 4]
    words[1] = -(2**63)
    of["copies"](at, at + 8, 24)
    assert words.tolist() == [-(2**63), 3, 4, 4]
    of["copies"](at + 16, at, 0)
    assert words.tolist() == [-(2**63), 3, 4, 4]


def test_bytes_come_and_go_by_number(of):
    here, there = socket.socketpair()
    buffer, flags = np.zeros(8, np.uint8), int(socket.MSG_DONTWAIT)
    at = buffer.ctypes.data
    with here, there:
        assert of["receives"](here.fileno(), at, 8, flags) == -errors.EAGAIN
        there.sendall(b"abc")
        assert of["receives"](here.fileno(), at + 1, 7, flags) == 3
        assert buffer.tobytes() == b"\0abc\0\0\0\0"
        assert of["sends"](here.fileno(), at + 1, 2, flags) == 2
        assert there.recv(8) == b"ab"
        there.close()
        assert of["receives"](here.fileno(), at, 8, flags) == 0
        assert of["sends"](here.fileno(), at, 8, flags) == -errors.EPIPE
    assert of["receives"](here.fileno(), at, 8, flags) == -errors.EBADF


def test_one_descriptor_is_waited_for(of):
    reading, writing = os.pipe()
    word = np.array([reading | select.POLLIN << 32])
    try:
        assert of["polls"](word.ctypes.data, 0) == 0
        os.write(writing, b"x")
        assert of["polls"](word.ctypes.data, -1) == 1
    finally:
        os.close(reading)
        os.close(writing)


def test_one_of_many_is_waited_for(of):
    here, there = socket.socketpair()
    found = np.zeros(24, np.uint8)
    with here, there, select.epoll() as epoll:
        epoll.register(here, select.EPOLLIN)
        said = epoll.fileno(), found.ctypes.data, 2
        assert of["events"](*said, 0) == 0
        there.sendall(b"x")
        assert of["events"](*said, -1) == 1
        assert found[:8].view(np.int32).tolist() == [select.EPOLLIN, here.fileno()]
    assert of["events"](*said, 0) == -1


def test_the_clock_is_that_of_python(of):
    before = time.monotonic_ns() // 1_000_000
    assert before <= of["times"](0) <= time.monotonic_ns() // 1_000_000


def one() -> int:
    """Return a number of this module."""
    return LIMIT


def test_one_name_has_one_number():
    space: dict[str, Any] = {"LIMIT": 2, "__name__": "other"}
    exec("def other():\n    return LIMIT", space)
    with pytest.raises(ValueError, match=r"LIMIT of .* another value"):
        plain({one: "", space["other"]: ""})


LIMIT = 1

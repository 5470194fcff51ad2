"""Other processes of a test, forked: they start in a millisecond and can be killed."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

_CLONE_NEWPID, _PR_SET_PDEATHSIG = 0x20000000, 1


class Child:
    """A forked process, and the pipe to it."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self._pipe = pid, pipe
        self._status: int | None = None

    def send(self, value: Any = None) -> None:
        self._pipe.send(value)

    def receive(self) -> Any:
        assert self._pipe.poll(30), "the child says nothing"
        return self._pipe.recv()

    @property
    def is_running(self) -> bool:
        return self._status is None

    def kill(self) -> None:
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)
            self.end()

    def end(self) -> int:
        """Wait for the end; return the exit status."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


@contextmanager
def child(function: Callable[..., Any], *args: Any) -> Iterator[Child]:
    """Run `function(pipe, *args)` in a forked process, killed at the end."""
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads; a child runs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # What is garbage here belongs to the parent.
            gc.disable()
            ours.close()
            function(theirs, *args)
            status = 0
        except BaseException:  # noqa: BLE001 - printed, and the status says it
            traceback.print_exc()
        finally:
            os._exit(status)
    theirs.close()
    process = Child(pid, ours)
    try:
        yield process
    finally:
        process.kill()
        ours.close()


@contextmanager
def contained(function: Callable[..., Any], *args: Any) -> Iterator[tuple[Child, int]]:
    """Run a child as process 1 of a PID namespace of its own, as a container does.

    Also its process id here; a test is skipped where namespaces are forbidden.
    """
    with child(_contain, function, *args) as between:
        if isinstance(found := between.receive(), str):
            pytest.skip(f"no PID namespaces here: {found}")
        between.send()
        yield between, found


def _contain(pipe: Connection, function: Callable[..., Any], *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID):
        pipe.send(os.strerror(ctypes.get_errno()))
        return
    if pid := os.fork():
        pipe.send(pid)
        os.waitpid(pid, 0)
        return
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    pipe.recv()
    function(pipe, *args)


def left(base: Path) -> tuple[list[str], list[str], set[str]]:
    """Files below a folder, and mappings and descriptors of them in this process."""
    files = sorted(str(path) for path in base.rglob("*"))
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line for line in maps if str(base) in line]
    descriptors = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # that of this listing
            continue
        # Others come and go with the clusters of other tests.
        if str(base) in target:
            descriptors.add(f"{fd} {target}")
    return files, mapped, descriptors

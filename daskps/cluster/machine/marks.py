"""Marks in a registry that describe its folder once no member of it lives.

They are in the file's size and time, not in bytes: also where the directory is full a
folder must be found to be abandoned. Only a process that has locked the file may
change them.
"""

from __future__ import annotations

import os
import time


def mark_kept(fd: int) -> None:
    """Note that the cluster's scheduler is on this machine and keeps the folder."""
    os.ftruncate(fd, 1)


def was_kept(fd: int) -> bool:
    """Whether the cluster's scheduler has ever kept the folder."""
    return os.fstat(fd).st_size > 0


def mark_joined(fd: int) -> None:
    """Note that there is a member."""
    os.utime(fd, ns=(0, 0))


def seconds_alone(fd: int) -> float:
    """Return for how long the folder has been seen without members, and note it.

    Parameters
    ----------
    fd : int
        The registry, which this process has locked against all others.

    Returns
    -------
    float
        0 where this is the first time since the last member joined.
    """
    # Not of the clock that people set. One of before the machine started is none.
    now, since = time.monotonic_ns(), os.fstat(fd).st_mtime_ns
    if not 0 < since <= now:
        os.utime(fd, ns=(now, now))
        return 0.0
    return (now - since) / 1e9

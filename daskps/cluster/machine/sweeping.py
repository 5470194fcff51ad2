"""Folders that nobody is a member of any more, as after a crash.

Workers that have all died may come back to their memory. So a folder without members
stays while its cluster's scheduler keeps it. Once that has gone, it is over; where no
scheduler was ever seen, because it is on another machine, a while says so.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from contextlib import ExitStack, suppress
from enum import Enum
from typing import NamedTuple

from daskps import config
from daskps.cluster.machine.folder import (
    KEPT_AT,
    CarrierClosed,
    inode_of,
    open_folder,
    open_registry,
    remove_without_members,
    seconds_alone,
    try_lock,
    was_kept,
)
from daskps.cluster.machine.registry import is_in, locked

#: Seconds that a folder without members stays at least, where nothing says that its
#: cluster is over: longer than a worker takes to come back.
LEAST_SECONDS = 60.0


class _Fate(Enum):
    """The fate of a folder."""

    REMOVED = 1
    #: It has no members; it goes once that has been so for long enough.
    WAITS = 2
    #: Somebody is there, or it is not this user's alone.
    STAYS = 3


class _Swept(NamedTuple):
    """The fate of all folders: paths of those that went, and whether some wait."""

    removed: list[str]
    waits: bool


def _patience() -> float:
    """Return for how many seconds workers may be away whose scheduler is not seen."""
    wanted = max(LEAST_SECONDS, 2 * config.load().lost_after_seconds)
    return min(wanted, threading.TIMEOUT_MAX)


def sweep_abandoned(
    base: str | os.PathLike[str], but: str = "", *, seconds: float | None = None
) -> _Swept:
    """Remove this user's folders of clusters that are over.

    Parameters
    ----------
    base : path-like
        Where the folders of all clusters are.
    but : str
        A folder to leave alone.
    seconds : float, optional
        See :func:`sweep`; :func:`_patience` by default.

    Returns
    -------
    _Swept
        Nothing where there is no such base.
    """
    seconds = _patience() if seconds is None else seconds
    pattern = re.compile(rf"daskps-{os.getuid()}-[0-9a-f]{{16}}")
    found = dict[str, _Fate]()
    # A folder of somebody else's, or one that just goes, is left alone.
    with suppress(OSError):
        for entry in os.listdir(base):
            path = os.path.join(base, entry)
            if pattern.fullmatch(entry) and path != but:
                found[path] = sweep(path, seconds)
    removed = [path for path, became in found.items() if became is _Fate.REMOVED]
    return _Swept(removed, _Fate.WAITS in found.values())


def sweep_later(base: str | os.PathLike[str], but: str = "") -> None:
    """Sweep again when what waits now may go, in a thread, until nothing waits.

    Nobody else may ever look again: the cluster that begins may be there for weeks.
    """

    def again() -> None:
        if sweep_abandoned(base, but).waits:
            sweep_later(base, but)

    timer = threading.Timer(_patience(), again)
    timer.name, timer.daemon = "daskps-sweep", True
    timer.start()


def sweep(path: str, seconds: float) -> _Fate:
    """Remove a folder of this user whose cluster is over.

    Parameters
    ----------
    path : str
        The folder.
    seconds : float
        For how long it must have been seen without members, where the cluster's
        scheduler has never kept it.

    Returns
    -------
    _Fate
        `STAYS` also where this process itself is there.
    """
    with locked(), suppress(OSError, CarrierClosed), ExitStack() as opened:
        folder_fd = open_folder(path)
        opened.callback(os.close, folder_fd)
        # Perhaps under another path. Opening its registry would drop our locks.
        if is_in(inode_of(folder_fd)):
            return _Fate.STAYS
        try:
            fd = open_registry(folder_fd)
        except FileNotFoundError:
            os.rmdir(path)  # A process that is just making it tries again.
            return _Fate.REMOVED
        opened.callback(os.close, fd)
        # Until the file is closed: a scheduler that comes now tries again.
        if not try_lock(fd, KEPT_AT, fcntl.LOCK_EX, keep=True):
            return _Fate.STAYS
        waits = False

        def is_over() -> bool:
            nonlocal waits
            waits = not was_kept(fd) and seconds_alone(fd) < seconds
            return not waits

        went = remove_without_members(path, folder_fd, fd, only_if=is_over)
        if went is not None:
            return _Fate.REMOVED
        return _Fate.WAITS if waits else _Fate.STAYS
    return _Fate.STAYS

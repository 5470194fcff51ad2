"""Folders that nobody is a member of any more, as after a crash."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack, suppress

from daskps.cluster.machine.folder import (
    WayClosed,
    inode_of,
    open_folder,
    open_registry,
    remove_without_members,
)
from daskps.cluster.machine.registry import is_in, locked


def sweep_abandoned(base: str | os.PathLike[str], but: str = "") -> list[str]:
    """Remove this user's folders in which nobody is left.

    Parameters
    ----------
    base : path-like
        Where the folders of all clusters are.
    but : str
        A folder to leave alone.

    Returns
    -------
    list of str
        Paths of the folders that were removed; none where there is no such base.
    """
    pattern = re.compile(rf"daskps-{os.getuid()}-[0-9a-f]{{16}}")
    removed = []
    # What is somebody else's, or just goes, is left alone.
    with suppress(OSError):
        for entry in os.listdir(base):
            path = os.path.join(base, entry)
            if pattern.fullmatch(entry) and path != but and sweep(path):
                removed.append(path)
    return removed


def sweep(path: str) -> bool:
    """Remove a folder of this user in which nobody is.

    Parameters
    ----------
    path : str
        The folder.

    Returns
    -------
    bool
        False where somebody is there, this process included, and where it is not
        this user's alone.
    """
    with locked(), suppress(OSError, WayClosed), ExitStack() as opened:
        folder_fd = open_folder(path)
        opened.callback(os.close, folder_fd)
        # Perhaps under another path. Opening its registry would drop our locks.
        if is_in(inode_of(folder_fd)):
            return False
        try:
            fd = open_registry(folder_fd)
        except FileNotFoundError:
            os.rmdir(path)  # A process that is just making it tries again.
            return True
        opened.callback(os.close, fd)
        return remove_without_members(path, folder_fd, fd) is not None
    return False

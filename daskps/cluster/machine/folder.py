"""The folder in which the processes of one cluster share files on this machine.

Plain functions of paths and descriptors. Nothing is used that is not this user's alone,
and a folder is removed only by a process that has locked out all members.

Marks in the registry describe the folder once no member of it lives. They are in the
file's size and time, not in bytes: also where the directory is full a folder must be
found to be abandoned. Only a process that has locked the file may change them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: The file of a folder that carries the locks.
_REGISTRY = "registry"
#: Byte of the registry on which every member holds a shared lock.
PRESENT_AT = 0
#: Byte on which the cluster's scheduler holds a shared lock while it has stores.
KEPT_AT = 1
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

Inode = tuple[int, int]


class CarrierClosed(Exception):  # noqa: N818 - no error: callers take another way
    """Shared memory cannot be used, or not this one; the text says why."""


def folder_of(base: str | os.PathLike[str], cluster_id: str) -> str:
    """Return the path of a cluster's folder.

    Parameters
    ----------
    base : path-like
        Where the folders of all clusters are.
    cluster_id : str
        Text that the processes of one cluster agree on, such as the scheduler's id.

    Returns
    -------
    str
        The path; it need not exist.
    """
    digest = hashlib.blake2b(cluster_id.encode(), digest_size=8).hexdigest()
    return os.path.join(base, f"daskps-{os.getuid()}-{digest}")


def open_folder(path: str) -> int:
    """Open a folder of this user and nobody else's."""
    try:
        fd = os.open(path, _FOLDER)
    except NotADirectoryError as error:
        raise CarrierClosed(f"{path} is no directory; remove it") from error
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        os.close(fd)
        raise CarrierClosed(
            f"{path} belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}, not to user {os.getuid()} alone"
        )
    return fd


def open_registry(folder_fd: int, create: bool = False) -> int:
    """Open the file with the locks; its locks of this process go when it is closed."""
    flags = _FILE | os.O_CREAT if create else _FILE
    return os.open(_REGISTRY, flags, 0o600, dir_fd=folder_fd)


def has_its_name(fd: int, folder_fd: int) -> bool:
    """Whether an open registry is the one that the folder has now."""
    try:
        status = os.stat(_REGISTRY, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == inode_of(fd)


def check_file(status: os.stat_result, path: str) -> None:
    """Refuse a file that is not this user's alone.

    Parameters
    ----------
    status : os.stat_result
        The status of the file.
    path : str
        Its name, for the message.

    Raises
    ------
    CarrierClosed
        If it is no regular file, belongs to somebody else or others may open it.
    """
    mode = stat.S_IMODE(status.st_mode)
    regular = stat.S_ISREG(status.st_mode)
    if not regular or status.st_uid != os.getuid() or mode != 0o600:
        raise CarrierClosed(
            f"{path} is not this user's own file: user {status.st_uid}, mode {mode:o}"
        )


def inode_of(fd: int) -> Inode:
    """Return what tells an open file from all others."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def try_lock(fd: int, at: int, kind: int, keep: bool = False) -> bool:
    """Lock one byte if no other process holds it, and let it go again unless told."""
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB, 1, at)
    except (BlockingIOError, PermissionError):
        return False
    if not keep:
        unlock(fd, at)
    return True


def unlock(fd: int, at: int) -> None:
    """Let one byte go."""
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, at)


def unlink(name: str, folder_fd: int) -> bool:
    """Remove a file; whether it was there and could be removed."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        return False
    return True


def remove_without_members(
    path: str, folder_fd: int, fd: int, *, only_if: Callable[[], bool] = lambda: True
) -> list[str] | None:
    """Remove a folder that no other process is a member of.

    Parameters
    ----------
    path : str
        The folder.
    folder_fd, fd : int
        Descriptors of the folder and of its registry.
    only_if : callable
        Asked while nobody can become a member.

    Returns
    -------
    list of str or None
        Names of the files that went; None where another process is a member, or was
        faster, and where it was not to be.
    """
    if not try_lock(fd, PRESENT_AT, fcntl.LOCK_EX, keep=True):
        return None
    try:
        if not has_its_name(fd, folder_fd) or not only_if():
            return None
        names = [name for name in os.listdir(folder_fd) if name != _REGISTRY]
        removed = [name for name in names if unlink(name, folder_fd)]
        # From here on others make a new one.
        unlink(_REGISTRY, folder_fd)
        with suppress(OSError):
            os.rmdir(path)
        return removed
    finally:
        unlock(fd, PRESENT_AT)


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

"""A process in a directory that it shares: opened once, locked, and left.

A process that closes *any* descriptor of a file drops *all* of its record locks on it: a registry
is opened once per process, however many hosts and clients join, and stays open until
the last of them has left. A forked child inherits no lock: it is no member.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import stat
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: An owner number: random bits, then the bits of a process id.
PID_BITS, RANDOM_BITS = 22, 40
#: The file of a directory that carries the locks.
FILE = "registry"
#: Byte of the registry on which every member holds a shared lock.
PRESENT_AT = 0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
#: Seconds to wait for a process that is just removing the directory.
_PATIENCE = 5.0

Inode = tuple[int, int]


class WayClosed(Exception):  # noqa: N818 - no error: callers take another way
    """Shared memory cannot be used, or not this one; the text says why."""


class Presence:
    """A process in one directory: its descriptors, locks, and how often it joined."""

    def __init__(self, path: str, directory_fd: int, fd: int, owner: int) -> None:
        self.path, self.directory_fd, self.fd = path, directory_fd, fd
        self.owner, self.pid = owner, os.getpid()
        self.n_members = self.n_visitors = 0
        #: What went with this process, where it was the last member to leave.
        self.removed: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether this process is there by it; never in a forked child."""
        return self.n_members + self.n_visitors > 0 and self.pid == os.getpid()

    def add(self, member: bool) -> bool:
        """Be there once more; return whether that was possible.

        Visitors have no lock on the first byte: a directory goes with its members.
        Nor do they remove it when these have died: a worker that comes now can adopt.
        """
        if not member:
            self.n_visitors += 1
            return True
        if not self.n_members and not try_lock(
            self.fd, PRESENT_AT, fcntl.LOCK_SH, keep=True
        ):
            return False
        self.n_members += 1
        return True

    def drop(self, member: bool) -> None:
        """Be there once less."""
        if member:
            self.n_members -= 1
        else:
            self.n_visitors -= 1


#: Directories this process is in, by inode.
_present: dict[Inode, Presence] = {}
#: Held while any of this changes.
_lock = threading.Lock()
#: Entries that are over. The garbage collector may end one anywhere, also in a thread
#: that holds the lock: it is noted, and whoever has the lock next undoes it.
_over: deque[tuple[Presence, bool]] = deque()


def enter(path: str, member: bool) -> Presence:
    """Be in a directory, once more where this process is there already.

    Parameters
    ----------
    path : str
        The directory.
    member : bool
        Whether as a member, who makes it where there is none, or as a visitor.

    Returns
    -------
    Presence
        One per process and directory; each entry is left by :func:`leave`.

    Raises
    ------
    OSError
        If there is no such directory, or it cannot be made or locked.
    WayClosed
        If it is not this user's alone.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        with _locked():
            presence = _try_enter(path, member)
        if presence is not None:
            return presence
        if time.monotonic() > deadline:
            raise WayClosed(f"{path} does not stay: others remove it again and again")
        time.sleep(0.001)


def leave(presence: Presence, member: bool) -> list[str]:
    """Undo one :func:`enter`; the last member that leaves removes the directory.

    While another call is at work here, that one does it before it returns.

    Parameters
    ----------
    presence : Presence
        What :func:`enter` gave. In a forked child nothing happens.
    member : bool
        As it entered.

    Returns
    -------
    list of str
        Names of the files that went with the directory. Where others are there still,
        all files stay, those of this process too.
    """
    _over.append((presence, member))
    _settle()
    return presence.removed


def remove(presence: Presence, name: str) -> bool:
    """Remove a file of a directory that this process is still in.

    Parameters
    ----------
    presence : Presence
        What :func:`enter` gave.
    name : str
        The file.

    Returns
    -------
    bool
        False where it is gone already, and in a forked child.
    """
    # Or the descriptor could be closed, and be another one, before it is used.
    with _locked():
        return presence.is_open and unlink(name, presence.directory_fd)


def rename(presence: Presence, name: str) -> str:
    """Make another's file one of this process, in one step: by its name.

    Parameters
    ----------
    presence : Presence
        What :func:`enter` gave.
    name : str
        The file.

    Returns
    -------
    str
        Its new name.

    Raises
    ------
    OSError
        If it is not there.
    WayClosed
        If this process is no member any more: one that leaves takes nothing over.
    """
    # Or the last member could remove what is there, and this one be missed.
    with _locked():
        if not (presence.is_open and presence.n_members):
            raise WayClosed(f"this process is leaving {presence.path}")
        new, at = new_name(presence), presence.directory_fd
        os.rename(name, new, src_dir_fd=at, dst_dir_fd=at)
        return new


def new_name(presence: Presence) -> str:
    """Return a fresh name for a file of this process.

    Parameters
    ----------
    presence : Presence
        What :func:`enter` gave.

    Returns
    -------
    str
        The owner number comes first.
    """
    return f"{presence.owner:016x}-{secrets.token_hex(8)}"


def clear(path: str) -> bool:
    """Remove a directory of this user in which nobody is.

    Parameters
    ----------
    path : str
        The directory.

    Returns
    -------
    bool
        False where somebody is there, this process included.
    """
    with _locked():
        return _clear(path)


@contextmanager
def _locked() -> Iterator[None]:
    try:
        with _lock:
            yield
    finally:
        _settle()


def _settle() -> None:
    """Undo what is over, unless another process has the lock, which does it then."""
    while _over and _lock.acquire(blocking=False):
        try:
            while _over:
                _leave(*_over.popleft())
        finally:
            _lock.release()


def _leave(presence: Presence, member: bool) -> None:
    if not presence.is_open:
        return
    presence.drop(member)
    if member and not presence.n_members:
        _end_membership(presence)
    if not presence.n_members + presence.n_visitors:
        _depart(presence)


def _try_enter(path: str, member: bool) -> Presence | None:
    """Take the locks; None where the directory was removed meanwhile."""
    if member:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        directory_fd = _open_directory(path)
    except FileNotFoundError:
        if member:
            return None
        raise
    fd = -1
    try:
        known = _present.get(inode_of(directory_fd))
        # Another process may have replaced the registry that a visitor has opened.
        if known is not None and _is(known.fd, directory_fd):
            return known if known.add(member) else None
        flags = _FILE | os.O_CREAT if member else _FILE
        fd = os.open(FILE, flags, 0o600, dir_fd=directory_fd)
        check_file(os.fstat(fd), f"{path}/{FILE}")
        # While there is no lock yet, somebody may remove what was opened here.
        owner = _new_owner()
        presence = Presence(path, directory_fd, fd, owner)
        if (
            presence.add(member)
            and try_lock(fd, owner, fcntl.LOCK_EX, keep=True)
            and _is(fd, directory_fd)
        ):
            _present[inode_of(directory_fd)] = presence
            directory_fd = fd = -1
            return presence
    except FileNotFoundError:
        # The directory goes while we come; a visitor comes too early or too late.
        if not member:
            raise
    finally:
        for opened in (fd, directory_fd):
            if opened >= 0:
                os.close(opened)
    return None


def _new_owner() -> int:
    return secrets.randbits(RANDOM_BITS) << PID_BITS | os.getpid()


def _end_membership(presence: Presence) -> None:
    """Leave the others what is there, and remove all of it when nobody is.

    A process that leaves has no lock on the first byte any more and sees by that of the others
    whether they leave too: of many that go at once the last one finds itself alone.
    """
    # First out, then alone: of two that turn their shared lock into an exclusive one
    # neither would succeed.
    fcntl.lockf(presence.fd, fcntl.LOCK_UN, 1, PRESENT_AT)
    removed = _remove_if_alone(presence.path, presence.directory_fd, presence.fd)
    if removed is None:
        # A visitor from here on.
        fcntl.lockf(presence.fd, fcntl.LOCK_UN, 1, PRESENT_AT)
    else:
        presence.removed = removed
    # What this process leaves there is nobody's, also while it lives on.
    fcntl.lockf(presence.fd, fcntl.LOCK_UN, 1, presence.owner)
    presence.owner = _new_owner()
    try_lock(presence.fd, presence.owner, fcntl.LOCK_EX, keep=True)


def _depart(presence: Presence) -> None:
    """Close the descriptors."""
    inode = inode_of(presence.directory_fd)
    if _present.get(inode) is presence:  # and not one of a newer registry
        del _present[inode]
    os.close(presence.fd)
    os.close(presence.directory_fd)


def _clear(path: str) -> bool:
    """Remove a directory that this process is not in, if nobody is."""
    directory_fd = _open_directory(path)
    fd = -1
    try:
        # Perhaps under another path. Opening its registry would drop our locks.
        if inode_of(directory_fd) in _present:
            return False
        try:
            fd = os.open(FILE, _FILE, dir_fd=directory_fd)
        except FileNotFoundError:
            os.rmdir(path)  # A process that is just making it tries again.
            return True
        return _remove_if_alone(path, directory_fd, fd) is not None
    finally:
        for opened in (fd, directory_fd):
            if opened >= 0:
                os.close(opened)


def _remove_if_alone(path: str, directory_fd: int, fd: int) -> list[str] | None:
    """Remove a directory and return what was in it; None where somebody is there."""
    if not try_lock(fd, PRESENT_AT, fcntl.LOCK_EX, keep=True):
        return None
    if not _is(fd, directory_fd):  # Another process was faster.
        return None
    names = [name for name in os.listdir(directory_fd) if name != FILE]
    removed = [name for name in names if unlink(name, directory_fd)]
    # From here on others make a new one.
    unlink(FILE, directory_fd)
    with suppress(OSError):
        os.rmdir(path)
    return removed


def _open_directory(path: str) -> int:
    """Open a directory of ours and nobody else's."""
    try:
        fd = os.open(path, _DIRECTORY)
    except NotADirectoryError as error:
        raise WayClosed(f"{path} is no directory; remove it") from error
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) != 0o700:
        os.close(fd)
        raise WayClosed(
            f"{path} belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}, not to user {os.getuid()} alone"
        )
    return fd


def check_file(status: os.stat_result, path: str) -> None:
    """Refuse a file that is not this user's alone.

    Parameters
    ----------
    status : os.stat_result
        What the file is.
    path : str
        Its name, for the message.

    Raises
    ------
    WayClosed
        If it is no regular file, belongs to somebody else or others may open it.
    """
    mode = stat.S_IMODE(status.st_mode)
    regular = stat.S_ISREG(status.st_mode)
    if not regular or status.st_uid != os.getuid() or mode != 0o600:
        raise WayClosed(
            f"{path} is not this user's own file: user {status.st_uid}, mode {mode:o}"
        )


def inode_of(fd: int) -> Inode:
    """Return what tells an open file from all others."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _is(fd: int, directory_fd: int) -> bool:
    """Whether an open registry still has its name."""
    try:
        status = os.stat(FILE, dir_fd=directory_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (status.st_dev, status.st_ino) == inode_of(fd)


def try_lock(fd: int, at: int, kind: int, keep: bool = False) -> bool:
    """Lock one byte if nobody else holds it, and let it go again unless told."""
    try:
        fcntl.lockf(fd, kind | fcntl.LOCK_NB, 1, at)
    except (BlockingIOError, PermissionError):
        return False
    if not keep:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, at)
    return True


def unlink(name: str, directory_fd: int) -> bool:
    """Remove a file; whether it was there and could be removed."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        return False
    return True


def _leave_all() -> None:
    with _lock:
        for presence in list(_present.values()):
            if presence.n_members:
                _end_membership(presence)
            presence.n_members = presence.n_visitors = 0
            _depart(presence)


def _forget() -> None:
    """Be nobody in a forked child; closing does not touch its parent's locks."""
    global _lock
    # Another thread of the parent may have held it.
    _lock = threading.Lock()
    for presence in _present.values():
        os.close(presence.fd)
        os.close(presence.directory_fd)
    _present.clear()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget)

"""The registry of a folder, as this process has it open: its locks, and how often it joined.

A process that closes *any* descriptor of a file drops *all* of its record locks on it:
a registry is opened once per process, however many hosts and clients join, and stays
open until the last of them has left. A forked child inherits no lock: it is no member.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import time
from contextlib import ExitStack, suppress
from enum import Enum

from daskps.cluster.machine.folder import (
    KEPT_AT,
    PRESENT_AT,
    CarrierClosed,
    Inode,
    check_file,
    has_its_name,
    inode_of,
    mark_joined,
    mark_kept,
    open_folder,
    open_registry,
    remove_without_members,
    try_lock,
    unlock,
)
from daskps.cluster.machine.leases import DeferredEnds
from daskps.cluster.machine.processes import THIS


class Role(Enum):
    """As what a process is in a folder; its values name those who are."""

    #: With memory there: the folder goes with the last of them.
    MEMBER = "members"
    #: Uses memory of others.
    VISITOR = "visitors"
    #: A scheduler: while it is there nobody else takes the folder for abandoned.
    KEEPER = "keepers"


#: Byte that those of a role share a lock on.
_LOCKED = {Role.MEMBER: PRESENT_AT, Role.KEEPER: KEPT_AT}
#: Seconds to wait for a process that is just removing the folder.
_PATIENCE = 5.0


class Registry:
    """The open registry of one folder: its locks, and how often this process is there."""

    def __init__(self, path: str, folder_fd: int, fd: int) -> None:
        self.path, self.folder_fd, self.fd = path, folder_fd, fd
        self.process, self.inode = THIS.number, inode_of(folder_fd)
        self.n: dict[Role, int] = dict.fromkeys(Role, 0)
        #: Files that went with this process, where it was the last member to leave.
        self.removed: list[str] = []
        #: Whether it leaves what is there also as the last one, for members to come.
        self.keeps = False

    @property
    def is_open(self) -> bool:
        """Whether this process is there by it; never in a forked child."""
        return any(self.n.values()) and self.process == THIS.number

    def lock_owner(self) -> bool:
        """Take a new owner number, and its lock."""
        self.owner = THIS.next_number()
        return try_lock(self.fd, self.owner, fcntl.LOCK_EX, keep=True)

    def add(self, role: Role) -> bool:
        """Be there once more; return whether that was possible.

        Visitors and keepers have no lock on the first byte: a folder goes with its
        members. Nor do they remove it when these have died: a worker that comes now can
        adopt.
        """
        if not self.n[role] and (at := _LOCKED.get(role)) is not None:
            if not try_lock(self.fd, at, fcntl.LOCK_SH, keep=True):
                return False
            mark_joined(self.fd) if role is Role.MEMBER else mark_kept(self.fd)
        self.n[role] += 1
        return True

    def drop(self, role: Role) -> None:
        """Be there once less; without effect in a forked child."""
        if not self.is_open:
            return
        self.n[role] -= 1
        if not self.n[role]:
            self._end(role)
        if not any(self.n.values()):
            self.close()

    def drop_all(self) -> None:
        """Be there no more, as at the end of this process."""
        if self.n[Role.MEMBER]:
            self._end(Role.MEMBER)
        self.n = dict.fromkeys(Role, 0)
        self.close()

    def _end(self, role: Role) -> None:
        if role is Role.MEMBER:
            self.end_membership()
        elif role is Role.KEEPER:
            unlock(self.fd, KEPT_AT)

    def end_membership(self) -> None:
        """Leave the other members what is there; without any, remove all of it.

        A process that leaves has no lock on the first byte any more and sees by that of
        the others whether they leave too: of many that go at once the last one finds
        itself alone.
        """
        # First out, then alone: of two that turn their shared lock into an exclusive
        # one neither would succeed.
        unlock(self.fd, PRESENT_AT)
        if not self.keeps:
            removed = remove_without_members(self.path, self.folder_fd, self.fd)
            self.removed = removed or self.removed
        # Files that this process leaves there are nobody's, also while it lives on.
        unlock(self.fd, self.owner)
        self.lock_owner()

    def close(self) -> None:
        """Close the descriptors, and by that drop all locks."""
        if _open.get(self.inode) is self:  # and not one of a newer registry
            del _open[self.inode]
        os.close(self.fd)
        os.close(self.folder_fd)


#: Registries that this process has open, by the inode of their folder.
_open: dict[Inode, Registry] = {}
#: Held while any of this changes, with the memberships that are over.
_ends = DeferredEnds[tuple[Registry, Role]](lambda over: over[0].drop(over[1]))


def enter(path: str, role: Role) -> Registry:
    """Be in a folder, once more where this process is there already.

    Parameters
    ----------
    path : str
        The folder.
    role : Role
        As what; members make it where there is none.

    Returns
    -------
    Registry
        One per process and folder; each entry is left by :func:`leave`.

    Raises
    ------
    OSError
        If there is no such folder, or it cannot be made or locked.
    CarrierClosed
        If it is not this user's alone.
    """
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() <= deadline:
        if role is Role.MEMBER:
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            with locked():
                registry = _try_enter(path, role)
        except FileNotFoundError:
            # The folder goes as this process comes; a visitor is too early or too late.
            if role is not Role.MEMBER:
                raise
        else:
            if registry is not None:
                return registry
        time.sleep(0.001)
    raise CarrierClosed(f"{path} does not stay: others remove it again and again")


def leave(registry: Registry, role: Role) -> None:
    """Undo one :func:`enter`; the last member that leaves removes the folder.

    While another thread is at work here, that one does it before it returns.
    """
    _ends.end((registry, role))


def _try_enter(path: str, role: Role) -> Registry | None:
    """Take the locks; None where the folder was removed meanwhile."""
    with ExitStack() as opened:
        folder_fd = open_folder(path)
        opened.callback(os.close, folder_fd)
        known = _open.get(inode_of(folder_fd))
        # Another process may have replaced the registry that a visitor has opened.
        if known is not None and has_its_name(known.fd, folder_fd):
            return known if known.add(role) else None
        fd = open_registry(folder_fd, create=role is Role.MEMBER)
        opened.callback(os.close, fd)
        check_file(os.fstat(fd), f"{path}/registry")
        registry = Registry(path, folder_fd, fd)
        # While there was no lock yet, another process may have removed the file.
        if registry.add(role) and registry.lock_owner() and has_its_name(fd, folder_fd):
            opened.pop_all()
            _open[registry.inode] = registry
            return registry
    return None


#: Lets no other thread of this process enter or leave a folder.
locked = _ends.held


def is_in(inode: Inode) -> bool:
    """Whether this process has the registry of a folder open."""
    return inode in _open


def _leave_all() -> None:
    with locked():
        for registry in list(_open.values()):
            registry.drop_all()


def _forget() -> None:
    """Be nobody in a forked child; closing does not touch its parent's locks."""
    _ends.forked()
    for registry in list(_open.values()):
        registry.close()


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_forget)

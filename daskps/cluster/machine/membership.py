"""Who shares memory on this machine: one directory per user and cluster.

Every member of the cluster keeps the directory's file ``registry`` open and holds two
POSIX record locks on it: a shared one on the first byte, for being there at all, and
an exclusive one on a byte of its own, whose offset is its *owner number*. So the
kernel itself knows who lives, also after ``kill -9``. What a process makes is named
``<owner>-<random>``; files of an owner that does not live are orphans, and so is a
directory without members. A *visitor* uses memory of others and has none there: the
directory goes without it, and what it has mapped stays its own to read. Every host of
the cluster is a member from its start, also without a shard: while one is there, what
a dead one left can be adopted, and nobody else takes it for abandoned.

A process that closes *any* descriptor of a file drops *all* of its locks on it: the
file is opened once per process, however many hosts and clients join in it. Locks are
not inherited: a forked child is no member until it joins itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from daskps.cluster.machine.presence import (
    PID_BITS,
    Presence,
    WayClosed,
    clear,
    enter,
    leave,
    new_name,
    remove,
    rename,
    try_lock,
    unlink,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = [
    "Membership",
    "WayClosed",
    "directory",
    "join",
    "owner_of",
    "pid_of",
    "sweep_abandoned",
    "visit",
]

R = TypeVar("R", bound="Membership")
#: Name of a block, the owner's number first.
BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")


def owner_of(name: str) -> int:
    """Return the owner number in a block's name.

    Parameters
    ----------
    name : str
        Name of a block.

    Returns
    -------
    int
        The number.

    Raises
    ------
    WayClosed
        If it is no name of a block.
    """
    found = BLOCK.fullmatch(name)
    if found is None:
        raise WayClosed(f"{name!r} is no name of shared memory")
    return int(found[1], 16)


def pid_of(owner: int) -> int:
    """Return the process id in an owner number, as its own namespace knows it."""
    return owner & ((1 << PID_BITS) - 1)


class Membership:
    """One membership; see :func:`join` and :func:`visit`."""

    def __init__(self, presence: Presence, member: bool) -> None:
        self._presence, self._member = presence, member
        self._left = False

    def of_kind(self, kind: type[R]) -> R:
        """Return the same membership as another kind, which leaves in its place."""
        return kind(self._presence, self._member)

    @property
    def path(self) -> str:
        """The directory."""
        return self._presence.path

    @property
    def owner(self) -> int:
        """Owner number of this process."""
        return self._open().owner

    @property
    def directory_fd(self) -> int:
        """Descriptor of the directory, valid until this membership is left."""
        return self._open().directory_fd

    @property
    def is_open(self) -> bool:
        """Whether this process is a member by it; never in a forked child."""
        return not self._left and self._presence.is_open

    def _open(self) -> Presence:
        if not self.is_open:
            raise WayClosed(
                f"this process is no member of {self.path}: it has left, or was "
                f"forked from a member and has not joined itself"
            )
        return self._presence

    def new_name(self) -> str:
        """Return a fresh name for a block of this process."""
        return new_name(self._open())

    def take(self, name: str) -> str:
        """Make a block of another owner one of this process.

        Parameters
        ----------
        name : str
            Its name.

        Returns
        -------
        str
            Its new name.

        Raises
        ------
        OSError
            If it is not there.
        WayClosed
            If this process is no member any more.
        """
        return rename(self._open(), name)

    def lives(self, owner: int) -> bool:
        """Whether the process of an owner number is still there.

        Parameters
        ----------
        owner : int
            As :func:`owner_of` reads it from a block's name.

        Returns
        -------
        bool
            True for this process itself.
        """
        here = self._open()
        # A process never conflicts with its own locks.
        return owner == here.owner or not try_lock(here.fd, owner, fcntl.LOCK_SH)

    def names(self) -> list[str]:
        """Return the names of all blocks in the directory."""
        return [n for n in os.listdir(self.directory_fd) if BLOCK.fullmatch(n)]

    def remove(self, name: str) -> bool:
        """Remove a block of this process, also after this membership was left.

        Parameters
        ----------
        name : str
            Its name.

        Returns
        -------
        bool
            False where it is gone already, as after this process's last leave.
        """
        return remove(self._presence, name)

    def orphans(self) -> list[str]:
        """Return the names of blocks whose owner does not live.

        They can be adopted.
        """
        return [name for name in self.names() if not self.lives(owner_of(name))]

    def sweep(self, names: Collection[str]) -> list[str]:
        """Remove blocks whose owner does not live.

        Parameters
        ----------
        names : collection of str
            Their names; one whose owner lives after all stays.

        Returns
        -------
        list of str
            Names of the files that were removed.
        """
        at = self.directory_fd
        return [n for n in self.orphans() if n in names and unlink(n, at)]

    def leave(self) -> list[str]:
        """Stop being a member by this registry; the last one removes the directory.

        Calling it again, or in a forked child, does nothing.

        Returns
        -------
        list of str
            Names of the blocks that went with the directory. Where others are there
            still, blocks of this process that were not freed stay, for them to adopt.
        """
        if self._left:
            return []
        self._left = True
        return leave(self._presence, self._member)


def join(base: str | os.PathLike[str], cluster_id: str) -> Membership:
    """Become a member of a cluster on this machine; makes its directory.

    Directories of this user in which nobody is left, as after a crash, are removed.

    Parameters
    ----------
    base : path-like
        Where the directories of all clusters are.
    cluster_id : str
        What the processes of one cluster agree on, such as the scheduler's id.

    Returns
    -------
    Membership
        The membership; memberships of one process count.

    Raises
    ------
    WayClosed
        If there is no such base, or the directory is not safe to use.
    """
    with _closing_the_way(base):
        path = directory(base, cluster_id)
        sweep_abandoned(base, but=path)
        return Membership(enter(path, member=True), member=True)


def visit(base: str | os.PathLike[str], cluster_id: str) -> Membership:
    """Become a visitor of a cluster that has its directory on this machine.

    For who only uses memory of others: nothing is made, and nothing is kept.

    Parameters
    ----------
    base : path-like
        Where the directories of all clusters are.
    cluster_id : str
        What the processes of one cluster agree on, such as the scheduler's id.

    Returns
    -------
    Membership
        The membership; memberships of one process count.

    Raises
    ------
    WayClosed
        If there is no such directory, or it is not safe to use.
    """
    with _closing_the_way(base):
        path = directory(base, cluster_id)
        return Membership(enter(path, member=False), member=False)


def directory(base: str | os.PathLike[str], cluster_id: str) -> str:
    """Return the path of a cluster's directory.

    Parameters
    ----------
    base : path-like
        Where the directories of all clusters are.
    cluster_id : str
        What the processes of one cluster agree on.

    Returns
    -------
    str
        The path; it need not exist.
    """
    digest = hashlib.blake2b(cluster_id.encode(), digest_size=8).hexdigest()
    return os.path.join(base, f"daskps-{os.getuid()}-{digest}")


def sweep_abandoned(base: str | os.PathLike[str], but: str = "") -> list[str]:
    """Remove this user's directories in which nobody is left.

    Parameters
    ----------
    base : path-like
        Where the directories of all clusters are.
    but : str
        A directory to leave alone.

    Returns
    -------
    list of str
        Paths of the directories that were removed.
    """
    pattern = re.compile(rf"daskps-{os.getuid()}-[0-9a-f]{{16}}")
    removed = []
    for entry in os.listdir(base):
        path = os.path.join(base, entry)
        # What is somebody else's, or just goes, is no matter of ours.
        with suppress(OSError, WayClosed):
            if pattern.fullmatch(entry) and path != but and clear(path):
                removed.append(path)
    return removed


@contextmanager
def _closing_the_way(base: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WayClosed(f"no shared memory in {os.fspath(base)}: {error}") from error

"""Which processes share memory on this machine: one folder per user and cluster.

Every member of the cluster keeps the folder's file ``registry`` open and holds two
POSIX record locks on it: a shared one on the first byte, for being there at all, and
an exclusive one on a byte of its own, whose offset is its *owner number*. So the
kernel itself knows who lives, also after ``kill -9``. What a process makes is named
``<owner>-<random>``; files of an owner that does not live are orphans, and so is a
folder without members. A *visitor* uses memory of others and has none there: the
folder goes without it, and what it has mapped stays its own to read. Every host of
the cluster is a member from its start, also without a shard: while one is there, what
a dead one left can be adopted, and nobody else takes it for abandoned.

A process opens the file once, see :mod:`daskps.cluster.machine.registry`.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from daskps.cluster.machine.folder import WayClosed, folder_of, try_lock, unlink
from daskps.cluster.machine.registry import PID_BITS, Registry, enter, leave, locked

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["BLOCK", "Membership", "WayClosed", "owner_of", "pid_of"]

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
    """One membership; of one process they count. See :meth:`join` and :meth:`visit`."""

    def __init__(self, path: str, member: bool) -> None:
        self._registry, self._member = enter(path, member), member
        self._left = False

    @classmethod
    def join(cls, base: str | os.PathLike[str], cluster_id: str) -> Self:
        """Become a member of a cluster on this machine; makes its folder.

        Parameters
        ----------
        base : path-like
            Where the folders of all clusters are.
        cluster_id : str
            What the processes of one cluster agree on, such as the scheduler's id.

        Returns
        -------
        Membership
            The membership.

        Raises
        ------
        WayClosed
            If there is no such base, or the folder is not safe to use.
        """
        with _closing_the_way(base):
            return cls(folder_of(base, cluster_id), member=True)

    @classmethod
    def visit(cls, base: str | os.PathLike[str], cluster_id: str) -> Self:
        """Become a visitor of a cluster that has its folder on this machine.

        For processes that only use memory of others: nothing is made or kept.

        Parameters
        ----------
        base : path-like
            Where the folders of all clusters are.
        cluster_id : str
            What the processes of one cluster agree on, such as the scheduler's id.

        Returns
        -------
        Membership
            The membership.

        Raises
        ------
        WayClosed
            If there is no such folder, or it is not safe to use.
        """
        with _closing_the_way(base):
            return cls(folder_of(base, cluster_id), member=False)

    @property
    def path(self) -> str:
        """The folder."""
        return self._registry.path

    @property
    def owner(self) -> int:
        """Owner number of this process."""
        return self._here().owner

    @property
    def folder_fd(self) -> int:
        """Descriptor of the folder, valid until this membership is left."""
        return self._here().folder_fd

    @property
    def is_open(self) -> bool:
        """Whether this process is a member by it; never in a forked child."""
        return not self._left and self._registry.is_open

    def _here(self) -> Registry:
        if not self.is_open:
            raise WayClosed(
                f"this process is no member of {self.path}: it has left, or was "
                f"forked from a member and has not joined itself"
            )
        return self._registry

    def new_name(self) -> str:
        """Return a fresh name for a block of this process."""
        return f"{self.owner:016x}-{secrets.token_hex(8)}"

    def rename(self, name: str) -> str:
        """Make a block of another owner one of this process, in one step.

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
            If this process is no member any more: one that leaves takes nothing over.
        """
        # Or the last member could remove what is there, and this one be missed.
        with locked():
            if not self._here().n_members:
                raise WayClosed(f"this process is leaving {self.path}")
            new, at = self.new_name(), self.folder_fd
            os.rename(name, new, src_dir_fd=at, dst_dir_fd=at)
            return new

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
        here = self._here()
        # A process never conflicts with its own locks.
        return owner == here.owner or not try_lock(here.fd, owner, fcntl.LOCK_SH)

    def names(self) -> list[str]:
        """Return the names of all blocks in the folder."""
        return [n for n in os.listdir(self.folder_fd) if BLOCK.fullmatch(n)]

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
        # Or the descriptor could be closed, and be another one, before it is used.
        with locked():
            return self._registry.is_open and unlink(name, self._registry.folder_fd)

    def orphans(self) -> list[str]:
        """Return the names of blocks whose owner does not live; they can be adopted."""
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
        at = self.folder_fd
        return [n for n in self.orphans() if n in names and unlink(n, at)]

    def leave(self) -> list[str]:
        """End this membership; the last member that leaves removes the folder.

        Calling it again, or in a forked child, does nothing. While another thread is at
        work here, that one does it before it returns.

        Returns
        -------
        list of str
            Names of the blocks that went with the folder. Where others are there
            still, blocks of this process that were not freed stay, for them to adopt.
        """
        if self._left:
            return []
        self._left = True
        leave(self._registry, self._member)
        return self._registry.removed


@contextmanager
def _closing_the_way(base: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WayClosed(f"no shared memory in {os.fspath(base)}: {error}") from error

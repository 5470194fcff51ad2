"""Blocks of memory, and those that the processes of a machine share.

A block of shared memory is one file in the cluster's folder on this machine (see
:mod:`daskps.cluster.machine.membership`): allocated in full when it is made, because a
sparse file ends a process by SIGBUS where memory runs out later, and removed by its
owner or, after a crash, by another process's sweep. A process that attaches to a block
proves by its nonce that it found the memory it was told of.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from daskps.cluster.machine.folder import Inode, check_file
from daskps.cluster.machine.locks import FileLock, Lock
from daskps.cluster.machine.mapping import FILES, Mapped
from daskps.cluster.machine.membership import Membership, WayClosed, owner_of
from daskps.errors import IllegalStateError
from daskps.shards.memory.areas import PAGE_NBYTES
from daskps.shards.memory.format import (
    FORMAT,
    FORMAT_AT,
    HEADER_WORDS,
    MAGIC,
    MAGIC_AT,
    NONCE,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from daskps.typing import Array

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_HEADER_NBYTES = 8 * HEADER_WORDS


class Members(Protocol):
    """A process among those of a cluster on its machine, and the memory they share.

    All that is asked of a machine: :class:`FileMembers` by files and record locks.
    """

    @property
    def path(self) -> str:
        """Where the blocks are, for messages."""

    def lives(self, owner: int) -> bool:
        """Whether the process of an owner number is still there."""

    def orphans(self) -> list[str]:
        """Return the names of blocks whose owner does not live."""

    def sweep(self, names: Collection[str]) -> list[str]:
        """Remove blocks whose owner does not live; return their names."""

    def make(self, nbytes: int) -> Block:
        """Return a new block of this process; OSError where there is no room."""

    def attach(self, name: str, nbytes: int, nonce: int) -> Block:
        """Map a block of another process; see :meth:`FileMembers.attach`."""

    def adopt(
        self, name: str, nbytes: int, nonce: int, *, released: bool = False
    ) -> Block:
        """Take over a block without an owner; see :meth:`FileMembers.adopt`."""

    def find(self, name: str, nbytes: int, nonce: int) -> str:
        """Return the name that a block has now; see :meth:`FileMembers.find`."""

    def remove(self, name: str) -> bool:
        """Remove a block of this process; whether it was there."""

    def leave(self) -> list[str]:
        """Stop being a member; the last one removes what is there, and names it."""


class Block:
    """A piece of memory of one size.

    Attributes
    ----------
    name : str
        Name of the file; empty for private memory.
    nonce : int
        Random; the maker of a segment writes it into the header's word `NONCE`.
    nbytes : int
        The size.
    """

    def __init__(
        self,
        buffer: Array,
        nonce: int,
        name: str = "",
        *,
        file: Mapped | None = None,
        members: Members | None = None,
    ) -> None:
        self.name, self.nonce, self.nbytes = name, nonce, buffer.nbytes
        self._buffer: Array | None = buffer
        self._file = file
        # Of an owner only: a process that merely attached removes nothing.
        self._members = members

    @property
    def buffer(self) -> Array:
        """The memory, uint8, from a page on; its views may outlive the block."""
        if self._buffer is None:
            raise IllegalStateError(f"memory {self.name or '(private)'} was given back")
        return self._buffer

    @property
    def file(self) -> Mapped:
        """The file, for its lock; valid while there is a view of the buffer."""
        if self._file is None:
            raise IllegalStateError("private memory has no lock between processes")
        return self._file

    @property
    def is_shared(self) -> bool:
        """Whether other processes can attach to it."""
        return self._file is not None

    def lock(self) -> Lock:
        """Return the lock of the segment it holds, as this process sees it."""
        return FileLock(self)

    def stamp(self) -> None:
        """Write the header that processes look for which attach to it.

        For memory that is no segment, which writes its own but for the nonce.
        """
        words = self.buffer[:_HEADER_NBYTES].view(np.int64)
        words[[MAGIC_AT, FORMAT_AT, NONCE]] = MAGIC, FORMAT, self.nonce

    def release(self) -> None:
        """Leave the memory to whoever adopts it: this process answers for it no more."""
        if self._file is not None:
            self._file.is_owned = False
        self._members = None

    def free(self) -> None:
        """Give the memory back; of an owner's block the name goes at once.

        The memory goes with its last view. Calling it again does nothing; in a forked
        child it does nothing to others.
        """
        if self._members is not None:
            self._members.remove(self.name)
        self._members = self._buffer = None


class FileMembers(Membership):
    """A membership by files and record locks, with the blocks that are shared there."""

    def make(self, nbytes: int) -> Block:
        """Return a new block of this process, with all of its pages.

        Parameters
        ----------
        nbytes : int
            Its size, at least 1.

        Returns
        -------
        Block
            Zeroed.

        Raises
        ------
        OSError
            If there is no room.
        """
        name = self.new_name()
        fd = os.open(name, _NEW, 0o600, dir_fd=self.folder_fd)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            file, buffer = FILES.add(fd, nbytes, is_owned=True)
        except BaseException:
            self.remove(name)
            os.close(fd)
            raise
        # Takes the page faults here instead of in the first update.
        buffer[::PAGE_NBYTES] = 0
        return Block(buffer, new_nonce(), name, file=file, members=self)

    def attach(self, name: str, nbytes: int, nonce: int) -> Block:
        """Map a segment that another process made.

        Parameters
        ----------
        name : str
            Name of the block.
        nbytes : int
            Its size.
        nonce : int
            What its header says, as its maker told.

        Returns
        -------
        Block
            A block whose :meth:`Block.free` gives up this view and removes nothing.

        Raises
        ------
        WayClosed
            If there is no such segment, or it is another one.
        """
        path = f"{self.path}/{name}"
        owner_of(name)
        try:
            status = os.stat(name, dir_fd=self.folder_fd, follow_symlinks=False)
            inode = _check(status, path, nbytes)
            file, buffer = FILES.find(inode, lambda: self._open(name, nbytes, inode))
        except OSError as error:
            raise WayClosed(f"{path} cannot be attached: {error}") from error
        words = buffer[:_HEADER_NBYTES].view(np.int64)
        found = tuple(int(words[at]) for at in (MAGIC_AT, FORMAT_AT, NONCE))
        if found != (MAGIC, FORMAT, nonce):
            raise WayClosed(
                f"{path} is not the segment that was meant: magic, format and nonce "
                f"are {found}, not {(MAGIC, FORMAT, nonce)}"
            )
        return Block(buffer, nonce, name, file=file)

    def adopt(
        self, name: str, nbytes: int, nonce: int, *, released: bool = False
    ) -> Block:
        """Take over a segment that has no owner any more, without a copy.

        Processes that have it attached keep it. Its name is this process's from here on.

        Parameters
        ----------
        name : str
            Name of the block.
        nbytes : int
            Its size.
        nonce : int
            What its header says, as its maker told.
        released : bool
            Whether its owner has let go of it; else it must not live.

        Returns
        -------
        Block
            A block of this process, as from :meth:`make`, of a new name.

        Raises
        ------
        WayClosed
            If there is no such segment, it is another one, or its owner lives.
        """
        if not released and self.lives(owner_of(name)):
            raise WayClosed(f"{self.path}/{name} has an owner that lives")
        block = self.attach(name, nbytes, nonce)
        try:
            # In one step: the name that sweepers look at, and which process may remove it.
            new = self.rename(name)
        except OSError as error:
            raise WayClosed(f"{self.path}/{name} went meanwhile: {error}") from error
        block.file.is_owned = True
        return Block(block.buffer, nonce, new, file=block.file, members=self)

    def find(self, name: str, nbytes: int, nonce: int) -> str:
        """Return the name that a segment has now.

        It is another one where the process that adopted it could tell nobody.

        Parameters
        ----------
        name : str
            Name of the block when it was last heard of.
        nbytes : int
            Its size.
        nonce : int
            What its header says, as its maker told.

        Returns
        -------
        str
            The same name where there is no such segment at all.
        """
        names = self.names()
        if name in names:
            return name
        for other in names:
            # Most are other segments, or go meanwhile.
            with suppress(WayClosed):
                return self.attach(other, nbytes, nonce).name
        return name

    def _open(self, name: str, nbytes: int, inode: Inode) -> tuple[int, int]:
        fd = os.open(name, _OLD, dir_fd=self.folder_fd)
        try:
            if _check(os.fstat(fd), path := f"{self.path}/{name}", nbytes) != inode:
                raise WayClosed(f"{path} was replaced while it was attached")
        except BaseException:
            os.close(fd)
            raise
        return fd, nbytes


def _check(status: os.stat_result, path: str, nbytes: int) -> Inode:
    check_file(status, path)
    if status.st_size != nbytes or nbytes < _HEADER_NBYTES:
        raise WayClosed(f"{path} has {status.st_size} bytes, not {nbytes}")
    return status.st_dev, status.st_ino


def new_nonce() -> int:
    """Return a number that no other segment has."""
    return secrets.randbits(63)

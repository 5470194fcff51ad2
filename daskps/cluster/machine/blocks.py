"""Blocks of memory that the processes of a machine share, as one of them has them.

A block is one file in the cluster's folder on this machine (see
:mod:`daskps.cluster.machine.membership`): allocated in full when it is made, because a
sparse file ends a process by SIGBUS where memory runs out later, and removed by its
owner or, after a crash, by another process's sweep. A process that attaches to a block
proves by its nonce that it found the memory it was told of. The functions that make and
open the files take a folder that is open; its member knows who may use it.
"""

from __future__ import annotations

import errno
import os
import re
import resource
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.backend.host import PAGE_NBYTES
from daskps.cluster.machine.folder import CarrierClosed, Inode, check_file
from daskps.cluster.machine.locks import FileLock
from daskps.cluster.machine.mapping import FILES, Mapped
from daskps.errors import IllegalStateError, LayoutError
from daskps.shards.memory.areas import without
from daskps.shards.memory.format import (
    FORMAT,
    FORMAT_AT,
    HEADER_WORDS,
    MAGIC,
    MAGIC_AT,
    NONCE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from daskps.typing import Array

_HEADER_NBYTES = 8 * HEADER_WORDS
#: Bytes of a block before its `body`.
HEAD_NBYTES = PAGE_NBYTES
#: As many bytes are taken in one call that cannot be ended.
_AT_ONCE = 2**26
#: Name of a block, the owner's number first.
BLOCK = re.compile(r"([0-9a-f]{16})-[0-9a-f]{16}")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
#: Descriptors that blocks leave to the rest of the process: connections, and what Dask
#: opens for a moment. Without them its monitor fails twice a second.
SPARED_DESCRIPTORS = 64


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
    CarrierClosed
        If it is no name of a block.
    """
    found = BLOCK.fullmatch(name)
    if found is None:
        raise CarrierClosed(f"{name!r} is no name of shared memory")
    return int(found[1], 16)


class BlockAddress(NamedTuple):
    """Where the memory of a shard, or of its mailboxes, is on its machine."""

    #: Of the file; it is another one once somebody has adopted the block.
    name: str
    nbytes: int
    #: The nonce in the header, as the maker of the block told it.
    nonce: int


class Block:
    """A piece of memory of one size.

    Attributes
    ----------
    name : str
        Name of the file.
    nonce : int
        Random; the maker of a segment writes it into the header's word `NONCE`.
    nbytes : int
        The size.
    file : Mapped
        The file, for its lock; valid while there is a view of the buffer.
    """

    def __init__(self, address: BlockAddress, file: Mapped, buffer: Array) -> None:
        self.name, self.nbytes, self.nonce = address
        self.file = file
        self._buffer: Array | None = buffer
        # Of an owner only: a process that merely attached removes nothing.
        self._remove: Callable[[str], bool] | None = None
        #: Parts that have no pages yet.
        self.later: list[tuple[int, int]] = []

    @property
    def address(self) -> BlockAddress:
        """Where other processes find it."""
        return BlockAddress(self.name, self.nbytes, self.nonce)

    @property
    def buffer(self) -> Array:
        """The memory, uint8, from a page on; its views may outlive the block."""
        if self._buffer is None:
            raise IllegalStateError(f"memory {self.name} was given back")
        return self._buffer

    @property
    def proof(self) -> tuple[int, ...]:
        """The magic, the format and the nonce that its header has."""
        words = self.buffer[:_HEADER_NBYTES].view(np.int64)
        return tuple(int(words[at]) for at in (MAGIC_AT, FORMAT_AT, NONCE))

    @property
    def meant(self) -> tuple[int, ...]:
        """The magic, the format and the nonce that its maker wrote."""
        return MAGIC, FORMAT, self.nonce

    @property
    def body(self) -> Array:
        """The memory behind a page for the header, as mailboxes have it."""
        return self.buffer[HEAD_NBYTES:]

    def take_later(self) -> None:
        """Take the pages that are still to come; until then nobody may write there.

        It ends early where the block is freed meanwhile.

        Raises
        ------
        LayoutError
            Where the machine has no more.
        """
        # Keeps the file open.
        buffer = self._buffer
        try:
            for at, n in _pieces(self.later):
                if buffer is None or self._buffer is None:
                    return
                os.posix_fallocate(self.file.fd, at, n)
        except OSError as error:
            nbytes = sum(stop - start for start, stop in self.later)
            raise LayoutError(
                f"there are no {nbytes:,} bytes of shared memory more for the second "
                f"buffers of a shard: {error}; give the machine a larger /dev/shm, or "
                f"use more of them"
            ) from error
        self.later = []

    def lock(self) -> FileLock:
        """Return the lock of the segment it holds, as this process sees it."""
        return FileLock(self.file, self.buffer, self.name)

    def stamp(self) -> None:
        """Write the header that processes look for which attach to it.

        For memory that is no segment, which writes its own but for the nonce.
        """
        words = np.zeros(HEADER_WORDS, np.int64)
        words[[MAGIC_AT, FORMAT_AT, NONCE]] = self.meant
        self.write(0, words.view(np.uint8))

    def write(self, at: int, data: Array) -> None:
        """Write bytes into the file, which all see, also where it is mapped privately."""
        while data.nbytes:
            # The system may write less than it is given.
            n = os.pwrite(self.file.fd, data.data, at)
            at, data = at + n, data[n:]

    def own(self, name: str, remove: Callable[[str], bool]) -> None:
        """Have this process answer for the memory, under a name of its own."""
        self.name, self._remove = name, remove
        self.file.is_owned = True

    def release(self) -> None:
        """Leave the memory to whoever adopts it: this process answers for it no more."""
        self.file.is_owned = False
        self._remove = None

    def free(self) -> None:
        """Give the memory back; of an owner's block the name goes at once.

        The memory goes with its last view. Calling it again does nothing; in a forked
        child it does nothing to others.
        """
        if self._remove is not None:
            self._remove(self.name)
        self._remove = self._buffer = None


def _pieces(parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Give where parts begin that are taken in one call, and how long each is."""
    for start, stop in parts:
        for at in range(start, stop, _AT_ONCE):
            yield at, min(_AT_ONCE, stop - at)


def new_block(
    address: BlockAddress,
    parts: Sequence[tuple[int, int]],
    *,
    at: int,
    remove: Callable[[str], bool],
    later: Sequence[tuple[int, int]] | None = None,
    private: bool = False,
) -> Block:
    """Make a block of this process, with the pages of some parts.

    Parameters
    ----------
    address : BlockAddress
        Its name and its size.
    parts : sequence of (int, int)
        From where to where it has memory.
    at : int
        Descriptor of the folder.
    remove : callable
        Removes a file of that folder by its name.
    later : sequence of (int, int), optional
        Those of these parts that get their pages by :meth:`Block.take_later`. A caller
        that names some is about to write all the rest: the page faults are left to
        that.
    private : bool
        Whether it is written by its descriptor alone, see :class:`Mapped`.

    Returns
    -------
    Block
        Zeroed.

    Raises
    ------
    OSError
        If there is no room; then nothing of it stays.
    """
    fd = _open(address.name, _NEW, at)
    try:
        allocate(fd, address.nbytes, without(parts, later or ()))
        file = Mapped(fd, address.nbytes, private=private)
    except BaseException:
        remove(address.name)
        os.close(fd)
        raise
    _, buffer = FILES.find(file.inode, lambda: file)
    block = Block(address, file, buffer)
    block.own(address.name, remove)
    if later is not None:
        block.later = [*later]
        return block
    # Takes the page faults here instead of in the first update.
    for start, stop in parts:
        buffer[start:stop:PAGE_NBYTES] = 0
    return block


def _open(name: str, flags: int, at: int) -> int:
    """Return a descriptor that is none of the last ones."""
    # The least that is free: as many are open below.
    lowest = os.dup(at)
    os.close(lowest)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft <= lowest + SPARED_DESCRIPTORS:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)
    return os.open(name, flags, 0o600, dir_fd=at)


def allocate(fd: int, nbytes: int, parts: Sequence[tuple[int, int]]) -> None:
    """Give an empty file its length, and some parts of it pages; else it stays sparse."""
    os.ftruncate(fd, nbytes)
    for start, stop in parts:
        os.posix_fallocate(fd, start, stop - start)


def check_room(at: int, nbytes: int) -> None:
    """Refuse so many bytes where the filesystem of a folder has not as many.

    Raises
    ------
    OSError
        As if they had been taken.
    """
    room = os.fstatvfs(at)
    # Without a limit of its own a tmpfs has no blocks.
    if room.f_blocks and room.f_bavail * room.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_block(
    address: BlockAddress, *, at: int, path: str, private: bool = False
) -> Block:
    """Map whatever has that name and size.

    Parameters
    ----------
    address : BlockAddress
        Its address, as told by its maker.
    at : int
        Descriptor of the folder.
    path : str
        The folder, for messages.
    private : bool
        Whether what is written there stays in this process.

    Returns
    -------
    Block
        One that removes nothing.

    Raises
    ------
    OSError
        If nothing has the name.
    CarrierClosed
        If it is another file, or not this user's alone.
    """
    name = address.name

    def check(status: os.stat_result) -> Inode:
        check_file(status, whole := f"{path}/{name}")
        if status.st_size != address.nbytes or address.nbytes < _HEADER_NBYTES:
            raise CarrierClosed(
                f"{whole} has {status.st_size} bytes, not {address.nbytes}"
            )
        return status.st_dev, status.st_ino

    def open_file() -> Mapped:
        fd = _open(name, _OLD, at)
        try:
            if check(os.fstat(fd)) != inode:
                raise CarrierClosed(f"{name} was replaced while it was attached")
            return Mapped(fd, address.nbytes, private=private)
        except BaseException:
            os.close(fd)
            raise

    inode = check(os.stat(name, dir_fd=at, follow_symlinks=False))
    return Block(address, *FILES.find(inode, open_file))

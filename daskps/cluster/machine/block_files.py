"""The files that blocks are: made with all of their memory, or opened as what was told.

Plain functions of a folder that is open; who may use it is its member's to know
(:mod:`daskps.cluster.machine.membership`).
"""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

from daskps.cluster.machine.blocks import HEADER_NBYTES, Block, BlockAddress
from daskps.cluster.machine.folder import Inode, WayClosed, check_file
from daskps.cluster.machine.mapping import FILES, Mapped
from daskps.shards.memory.areas import PAGE_NBYTES, without

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_OLD = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
#: Descriptors that blocks leave to the rest of the process: connections, and what Dask
#: opens for a moment. Without them its monitor fails twice a second.
SPARED_DESCRIPTORS = 64


def new_block(
    address: BlockAddress,
    parts: Sequence[tuple[int, int]],
    *,
    at: int,
    remove: Callable[[str], bool],
    later: Sequence[tuple[int, int]] | None = None,
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
        file = Mapped(fd, address.nbytes)
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


def open_block(address: BlockAddress, *, at: int, path: str) -> Block:
    """Map whatever has that name and size.

    Parameters
    ----------
    address : BlockAddress
        Its address, as told by its maker.
    at : int
        Descriptor of the folder.
    path : str
        The folder, for messages.

    Returns
    -------
    Block
        One that removes nothing.

    Raises
    ------
    OSError
        If nothing has the name.
    WayClosed
        If it is another file, or not this user's alone.
    """
    name = address.name

    def check(status: os.stat_result) -> Inode:
        check_file(status, whole := f"{path}/{name}")
        if status.st_size != address.nbytes or address.nbytes < HEADER_NBYTES:
            raise WayClosed(f"{whole} has {status.st_size} bytes, not {address.nbytes}")
        return status.st_dev, status.st_ino

    def open_file() -> Mapped:
        fd = _open(name, _OLD, at)
        try:
            if check(os.fstat(fd)) != inode:
                raise WayClosed(f"{name} was replaced while it was attached")
            return Mapped(fd, address.nbytes)
        except BaseException:
            os.close(fd)
            raise

    inode = check(os.stat(name, dir_fd=at, follow_symlinks=False))
    return Block(address, *FILES.find(inode, open_file))

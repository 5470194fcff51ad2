"""Blocks of memory that the processes of a machine share, as one of them has them.

A block is one file in the cluster's folder on this machine (see
:mod:`daskps.cluster.machine.membership`): allocated in full when it is made, because a
sparse file ends a process by SIGBUS where memory runs out later, and removed by its
owner or, after a crash, by another process's sweep. A process that attaches to a block
proves by its nonce that it found the memory it was told of.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daskps.cluster.machine.folder import WayClosed
from daskps.cluster.machine.locks import FileLock
from daskps.cluster.machine.registry import PID_BITS
from daskps.errors import IllegalStateError, LayoutError
from daskps.shards.memory.format import (
    FORMAT,
    FORMAT_AT,
    HEADER_WORDS,
    MAGIC,
    MAGIC_AT,
    NONCE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from daskps.cluster.machine.mapping import Mapped
    from daskps.typing import Array

HEADER_NBYTES = 8 * HEADER_WORDS
#: As many bytes are taken in one call that cannot be ended.
_AT_ONCE = 2**26
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
        words = self.buffer[:HEADER_NBYTES].view(np.int64)
        return tuple(int(words[at]) for at in (MAGIC_AT, FORMAT_AT, NONCE))

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
        words = self.buffer[:HEADER_NBYTES].view(np.int64)
        words[[MAGIC_AT, FORMAT_AT, NONCE]] = MAGIC, FORMAT, self.nonce

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

"""Memory that comes later: for rows of any ids, whose shard has addresses for them all.

A segment with such tables is a sparse file: as long as it may ever become, with memory where
something is. More of it is allocated before it is used, so that a process that has it mapped
sees rows there without mapping anything again, and none is ended by SIGBUS. Where there is
no shared memory a private mapping does the same.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from daskps.errors import LayoutError
from daskps.shards.memory.areas import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.machine.mapping import Mapped
    from daskps.typing import Array

#: Of Linux; before Python 3.13 it has no name.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class PrivateMemory:
    """Addresses of this process alone, whose memory comes as it is written."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.memory = mmap.mmap(-1, nbytes, flags=_PRIVATE)
        except OSError as error:
            raise LayoutError(
                f"a shard with tables of any ids is given {nbytes:,} bytes of addresses, "
                f"and this process has none left ({error.strerror}): it has 128 TiB at "
                f"most, less where `ulimit -v` or vm.overcommit_memory=2 say so. Make "
                f"fewer shards for each worker, or give such tables max_rows="
            ) from error
        self.fd = -1


class Growing:
    """Gives parts of a segment memory, within what its host may take.

    Parameters
    ----------
    file : Mapped or PrivateMemory
        The memory that the segment is in.
    buffer : ndarray, uint8
        All of it.
    ask : callable
        Given a number of bytes, it raises LayoutError where the host has no more.
    """

    def __init__(
        self, file: Mapped | PrivateMemory, buffer: Array, ask: Callable[[int], None]
    ) -> None:
        self.file, self._buffer, self._ask = file, buffer, ask

    def take(self, parts: Sequence[Array]) -> None:
        """Have memory behind these, all zeros.

        Raises
        ------
        LayoutError
            If the host may not take so much, or the machine has no more.
        """
        nbytes = sum(part.nbytes for part in parts)
        self._ask(nbytes)
        if self.file.fd < 0:
            return
        try:
            for part in parts:
                if part.nbytes:
                    os.posix_fallocate(self.file.fd, self._at(part), part.nbytes)
        except OSError as error:
            raise LayoutError(
                f"there are no {nbytes:,} bytes of shared memory more for rows of a "
                f"table: {error}; give the machine a larger /dev/shm, or use more of them"
            ) from error

    def clear(self, part: Array) -> None:
        """Make zeros of it."""
        part[...] = 0

    def give(self, part: Array) -> None:
        """Do without its memory; it is zeros when it is taken again."""
        start = self._at(part)
        low, high = start + -start % PAGE_NBYTES, start + part.nbytes
        high -= high % PAGE_NBYTES
        flat = part.reshape(-1).view(np.uint8)
        if low >= high:
            flat[...] = 0
            return
        flat[: low - start] = 0
        flat[high - start :] = 0
        away = mmap.MADV_DONTNEED if self.file.fd < 0 else mmap.MADV_REMOVE
        self.file.memory.madvise(away, low, high - low)

    def _at(self, part: Array) -> int:
        at: int = part.ctypes.data - self._buffer.ctypes.data
        return at

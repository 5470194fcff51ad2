"""Files mapped into this process, each opened once, for as long as a view of it lives.

A process that closes *any* descriptor of a file drops *all* of its record locks on it.
So whoever uses the same file in one process, the host that made it and a trainer that
found it by name, shares one descriptor and one mapping; both end with the last array
that looks at them, whoever held that.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.machine.folder import Inode, inode_of
from daskps.cluster.machine.leases import DeferredEnds, leased

if TYPE_CHECKING:
    from collections.abc import Callable

    from daskps.typing import Array


class Mapped:
    """One mapped file of this process.

    Parameters
    ----------
    fd : int
        The file.
    nbytes : int
        Its size.
    private : bool
        Whether what is written to the mapping stays in this process.

    Attributes
    ----------
    fd : int
        Its only descriptor, for record locks.
    nbytes : int
        Its size.
    is_owned : bool
        Whether this process answers for the memory.
    mutex : threading.Lock
        Held by the thread that has, or tries to get, the record lock: the kernel
        does not tell threads apart.
    """

    def __init__(self, fd: int, nbytes: int, *, private: bool = False) -> None:
        self.memory = _map(fd, nbytes, private)
        self.fd, self.nbytes, self.is_owned = fd, nbytes, False
        self.inode = inode_of(fd)
        self.mutex = threading.Lock()
        self.n_leases = 0

    @property
    def held_nbytes(self) -> int:
        """Bytes that it has memory for: less than its size in a sparse file."""
        try:
            return min(self.nbytes, 512 * os.fstat(self.fd).st_blocks)
        except OSError:
            # Closed by another thread since this one took the list of all files.
            return 0


class _Files:
    """All mapped files of this process; safe for threads."""

    def __init__(self) -> None:
        self._files: dict[Inode, Mapped] = {}
        self._ends = DeferredEnds(self._end_view)

    def find(
        self, inode: Inode, open_file: Callable[[], Mapped]
    ) -> tuple[Mapped, Array]:
        """Return a file, and open it where this process does not have it.

        Parameters
        ----------
        inode : tuple of int
            The file.
        open_file : callable
            Opens it.

        Returns
        -------
        Mapped
            The file.
        ndarray, shape (nbytes,), uint8
            A view of all of it.
        """
        with self._ends.held():
            if inode not in self._files:
                self._files[inode] = open_file()
            file = self._files[inode]
            file.n_leases += 1
            memory: Array = np.frombuffer(file.memory, np.uint8)
            return file, leased(memory, self._ends.end, file)

    def _end_view(self, file: Mapped) -> None:
        """Close a file that has no views any more."""
        file.n_leases -= 1
        if not file.n_leases:
            # Unmapped with its last reference; before 3.13 it has a second descriptor.
            # It counts as ours until that is done, as the system counts it.
            del file.memory
            del self._files[file.inode]
            os.close(file.fd)

    def nbytes(self, owned: bool = False) -> int:
        """Return the bytes mapped in this process, or those it made or adopted."""
        files = list(self._files.values())
        return sum(f.held_nbytes for f in files if f.is_owned or not owned)

    def forked(self) -> None:
        """Begin in a forked child, which has the mappings but owns nothing."""
        self._ends.forked()
        for file in self._files.values():
            file.mutex = threading.Lock()
            file.is_owned = False


def _map(fd: int, nbytes: int, private: bool) -> mmap.mmap:
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_DEFAULT
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, access=access, trackfd=False)
    return mmap.mmap(fd, nbytes, access=access)


#: Those of this process.
FILES = _Files()
os.register_at_fork(after_in_child=FILES.forked)

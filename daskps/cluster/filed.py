"""Reading the shards of another worker from their files, without touching their pages.

Every page of a mapping that a process touches is charged to it. Where Dask would pause
or end a worker for that (see :mod:`daskps.cluster.accounting`) what a shard holds is
read by the system into the caller's own arrays. Its header and its records, 180 KiB
and 48 bytes for each piece, are looked at where they are: they say what may be read,
and whether a copy is whole.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.once import warn_once
from daskps.shards.deputies import NotHereError

if TYPE_CHECKING:
    from daskps.cluster.memory import Block
    from daskps.cluster.messages import Array
    from daskps.cluster.reading import Copy

logger = logging.getLogger(__name__)


class Filed:
    """Copies out of the file of a block, in place of its mapping.

    Parameters
    ----------
    block : Block
        Shared memory.
    """

    def __init__(self, block: Block) -> None:
        # Keeps the descriptor open.
        self._buffer, self._fd = block.buffer, block.file.fd
        self._start = _address(self._buffer)

    def copier(self, nbytes: int) -> Copy:
        """Return what copies to the first array from the second, for so much in all."""
        return self.copy

    def copy(self, out: Array, source: Array) -> None:
        """Fill an array with what a part of the block holds.

        Parameters
        ----------
        out : ndarray, shape (n,)
            What to fill.
        source : ndarray, shape (n,)
            A view of the block's buffer: where it begins counts, it is not read.

        Raises
        ------
        NotHereError
            If the file cannot be read so far: its owner has to be asked.
        """
        if out.dtype != source.dtype or not out.flags.c_contiguous:
            whole = np.empty(source.shape, source.dtype)
            self.copy(whole, source)
            np.copyto(out, whole)
            return
        left, at = out.view(np.uint8).data, _address(source) - self._start
        # A call reads 2 GiB at most, and less where a signal comes.
        while left:
            try:
                n = os.preadv(self._fd, [left], at)
            except OSError as error:
                raise NotHereError(f"the file of a shard: {error}") from error
            if not n:
                raise NotHereError(f"the file of a shard was cut short at byte {at}")
            left, at = left[n:], at + n


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def say_once(why: str) -> None:
    """Log why shards are read from their files here, each reason once."""
    warn_once(
        logger,
        why,
        "shards of other workers are read from their files here, and not mapped; "
        "Dask would count their memory as this worker's own: %s",
        why,
    )

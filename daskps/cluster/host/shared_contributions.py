"""Contributions in shared memory: other workers of the machine read them in place.

A *sheet* is the memory of one contribution, several of them to a block. Its first word
is its *ticket*: a number that is written when the contribution is complete and wiped
out before the memory is used again. Who was told the ticket has read what was meant if
the word says it afterwards, too; who finds another one asks the owner by message. So a
task that reads what nobody waits for any more reads nothing wrong.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.machine.leases import leased
from daskps.cluster.machine.membership import WayClosed
from daskps.layout.arrays import align
from daskps.shards.memory.segment import PAGE_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from daskps.cluster.machine.blocks import Block, Members, Memory
    from daskps.typing import Array

#: Where arrays begin.
LINE = 64
#: Bytes that blocks have about, where a contribution is smaller: each is an open file.
BLOCK_NBYTES = 2**18


class Spot(NamedTuple):
    """Spot a contribution lies: in which block, from which byte on."""

    name: str
    nbytes: int
    nonce: int
    start: int
    ticket: int
    #: Parameter index of its arrays, in their order.
    indices: tuple[int, ...]


def spans(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return first and last byte of each array of a sheet, by their bytes.

    Examples
    --------
    >>> spans([100, 8])
    [(64, 164), (192, 200)]
    """
    found, at = [], LINE
    for nbytes in sizes:
        found.append((at, at + nbytes))
        at += align(nbytes, LINE)
    return found


def _end(sizes: Iterable[int]) -> int:
    return align(max((end for _, end in spans(sizes)), default=LINE), LINE)


class _Cut(NamedTuple):
    """The memory of a sheet, free or in use."""

    block: Block
    start: int
    memory: Array


class Sheet:
    """The memory of one contribution, handed out array by array."""

    def __init__(self, sheets: Sheets, cut: _Cut) -> None:
        self._memory = leased(cut.memory, sheets.give_back, cut)
        self._cut, self._ticket = cut, next(sheets.tickets)
        self._at = LINE

    def empty(self, n: int, dtype: Any) -> Array:
        """Return the next array, like ``np.empty(n, dtype)``."""
        first, dtype = self._at, np.dtype(dtype)
        self._at += align(n * dtype.itemsize, LINE)
        return self._memory[first : first + n * dtype.itemsize].view(dtype)

    def publish(self, indices: Iterable[int]) -> Spot:
        """Say that it is complete; return where others find it."""
        _ticket(self._memory)[0] = self._ticket
        block, start, _ = self._cut
        return Spot(
            block.name, block.nbytes, block.nonce, start, self._ticket, tuple(indices)
        )


class Sheets:
    """The sheets of one run on one worker; safe for threads.

    Parameters
    ----------
    memory : Memory or None
        Where blocks come from; None where no other process could map them.
    sizes : iterable of int
        Bytes of each array of the largest contribution.
    """

    def __init__(self, memory: Memory | None, sizes: Iterable[int]) -> None:
        self._source, self._nbytes = memory, _end(sizes)
        #: Each for one contribution.
        self.tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        #: Sheets in all of them.
        self._n = 0
        # Operations of a deque are atomic, and a lease may end anywhere, also in a
        # thread that holds the lock.
        self._free: deque[_Cut] = deque()

    def take(self, sizes: Iterable[int]) -> Sheet | None:
        """Return memory for arrays of so many bytes; None where there is none."""
        if self._source is None or _end(sizes) > self._nbytes:
            return None
        while True:
            try:
                cut = self._free.popleft()
            except IndexError:
                if not self._grow():
                    return None
            else:
                return Sheet(self, cut)

    def _grow(self) -> bool:
        """Take another block; whether there was one."""
        with self._lock:
            if self._free:
                return True
            if self._source is None:
                return False
            each = self._nbytes
            # Ever larger blocks: hundreds of ranks must not take as many open files.
            n = max(BLOCK_NBYTES // each, self._n // 4, 1)
            taken = self._source.take_shared([PAGE_NBYTES + n * each])
            if not taken:
                # From here on contributions are in private memory.
                self._source = None
                return False
            [block] = taken
            block.stamp()
            self._blocks.append(block)
            self._n += n
            for start in range(PAGE_NBYTES, PAGE_NBYTES + n * each, each):
                part = block.buffer[start : start + each]
                self._free.append(_Cut(block, start, part))
            return True

    def give_back(self, cut: _Cut) -> None:
        """Use a sheet again: nobody here looks at it any more."""
        _ticket(cut.memory)[0] = 0
        self._free.append(cut)

    def close(self) -> None:
        """Give all memory back: the run is over. Views stay what they are."""
        with self._lock:
            self._source = None
            for block in self._blocks:
                block.free()
            self._blocks.clear()
            self._free.clear()


class Neighbours:
    """The sheets of other workers of this machine, mapped as long as a run lasts.

    Parameters
    ----------
    registry : Members or None
        A membership in the cluster; None where the way is closed here.
    """

    def __init__(self, registry: Members | None) -> None:
        self._registry = registry
        #: By name; None for what is not on this machine.
        self._blocks: dict[str, Block | None] = {}

    def find(self, spot: Spot | None) -> Array | None:
        """Return a contribution's memory from its ticket on; None if it is not there."""
        if spot is None or self._registry is None:
            return None
        block = self._block(spot, self._registry)
        if block is None:
            return None
        found = block.buffer[spot.start :]
        return found if int(_ticket(found)[0]) == spot.ticket else None

    def _block(self, spot: Spot, registry: Members) -> Block | None:
        name = spot.name
        if name not in self._blocks:
            try:
                block = registry.attach(name, spot.nbytes, spot.nonce)
            except WayClosed:
                self._blocks[name] = None
            else:
                self._blocks[name] = block
        return self._blocks[name]


def _ticket(found: Array) -> Array:
    return found[:8].view(np.int64)

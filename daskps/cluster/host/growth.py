"""Memory of shards that grow: unbounded tables take memory as rows come.

A segment with such tables is a sparse file: as long as it may ever become, with memory
where something is. More of it is allocated before it is used, so that a process that
has it mapped sees rows there without mapping anything again, and none is ended by
SIGBUS. Where there is no shared memory a private mapping does the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from daskps import config
from daskps.backend.host import PAGE_NBYTES
from daskps.errors import DaskPSError, LayoutError
from daskps.layout.placement import check_memory
from daskps.shards.arrays.payload import NUMPY, Payload
from daskps.shards.memory.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.host.hosted import HostedShard
    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.mapping import Mapped
    from daskps.layout.arrays import Layout
    from daskps.typing import Array

#: The host tells the directory of a shard that has grown by one part of so many.
_TOLD_SHARE = 8


class Budget:
    """Memory limit for all shards of a worker: a share of the worker's limit."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def ask(self, nbytes: int) -> None:
        """Refuse to give so many bytes more if the limit does not allow them.

        Raises
        ------
        LayoutError
            The message names the worker, the need and the limit.
        """
        worker = self._host.worker
        where, share = worker.address, config.load().memory_share
        held = {where: self._host.held_nbytes}
        limits = {where: worker.memory_limit or 0}
        check_memory({where: nbytes}, held, limits, share)
        loop = worker.loop.asyncio_loop
        loop.call_soon_threadsafe(_begin_telling, self._host)


def _begin_telling(host: ShardHost) -> None:
    """Start telling the directory of shards that grow, unless a task does already."""
    host.may_have_grown = True
    if host.telling is None or host.telling.done():
        host.telling = asyncio.ensure_future(_tell(host))


async def _tell(host: ShardHost) -> None:
    """Tell the directory of shards that have grown by more than an eighth.

    The directory adds up the bytes of each worker, and lets no worker adopt shards that
    it has no room for.
    """
    while host.may_have_grown:
        host.may_have_grown = False
        growing = [s for s in host.shards.items() if s[1].shard.segment.has_unbounded]
        for store in {uid for (uid, _), _ in growing}:
            of = [hosted for (uid, _), hosted in growing if uid == store]
            with contextlib.suppress(OSError, DaskPSError):
                await _tell_of(host, store, of)


async def _tell_of(
    host: ShardHost, store: str, hosted_shards: Sequence[HostedShard]
) -> None:
    # Under the mutex: the push that asked for memory has it by then.
    sizes = await host.each(hosted_shards, lambda hosted: hosted.nbytes)
    grown = {
        hosted: nbytes
        for hosted, nbytes in zip(hosted_shards, sizes, strict=True)
        if nbytes > hosted.told_nbytes + hosted.told_nbytes // _TOLD_SHARE
    }
    if not grown:
        return
    noted = await host.worker.directory(
        "grew",
        uid=store,
        worker=host.worker.address,
        sizes=[(hosted.index, nbytes) for hosted, nbytes in grown.items()],
    )
    for hosted, nbytes in grown.items():
        if hosted.index in noted:
            hosted.told_nbytes = nbytes


def new_segment(
    of: tuple[Layout, int, Mapping[int, Sequence[float]]],
    block: Block | None,
    ask: Callable[[int], None],
    payload: Payload = NUMPY,
) -> Segment:
    """Return the segment of a new shard, in a block or in private memory.

    `of` are the layout, the number of the shard and the first values of slots.
    """
    layout, shard, slots = of
    if payload.device is not None:
        return Segment(layout, shard, slots, payload=payload)
    if block is not None:
        segment = Segment(layout, shard, slots, block.buffer, durable=True)
        grow_by(segment, block, ask)
        return segment
    if not layout.grows:
        return Segment(layout, shard, slots)
    memory = PrivateMemory(Segment.length(layout, shard, slots))
    buffer = np.frombuffer(memory.memory, np.uint8)
    segment = Segment(layout, shard, slots, buffer)
    segment.memory = Growing(memory, buffer, ask)
    return segment


def grow_by(segment: Segment, block: Block, ask: Callable[[int], None]) -> None:
    """Let the owner of a segment in a block take memory as its rows need it."""
    if segment.has_unbounded:
        segment.memory = Growing(block.file, block.buffer, ask)


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
                f"a shard with unbounded tables is given {nbytes:,} bytes of addresses, "
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

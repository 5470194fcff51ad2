"""Memory of shards: shared between the processes of a machine, or private.

A block of shared memory is one file in the cluster's directory on this machine (see
:mod:`daskps.cluster.machine.membership`): allocated in full when it is made, because a sparse file
ends a process by SIGBUS where memory runs out later, and removed by its owner or, after
a crash, by whoever sweeps. Who attaches to a block proves by its nonce that it found
the memory it was told of. Where shared memory is absent or too small, blocks are
private and processes send messages instead; the log says so once.
"""

from __future__ import annotations

import logging
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np

from daskps.cluster.machine.locks import FileLock, Lock
from daskps.cluster.machine.mapping import FILES, Mapped
from daskps.cluster.machine.membership import Membership, WayClosed, join, owner_of
from daskps.cluster.machine.presence import check_file
from daskps.cluster.machine.warnings import warn_once
from daskps.errors import IllegalStateError
from daskps.shards.memory.areas import PAGE_NBYTES, private
from daskps.shards.memory.format import (
    FORMAT,
    FORMAT_AT,
    HEADER_WORDS,
    MAGIC,
    MAGIC_AT,
    NONCE,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from daskps.typing import Array

logger = logging.getLogger(__name__)

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
        """Map a block of another process; see :func:`attach`."""

    def adopt(
        self, name: str, nbytes: int, nonce: int, *, released: bool = False
    ) -> Block:
        """Take over a block without an owner; see :func:`adopt`."""

    def find(self, name: str, nbytes: int, nonce: int) -> str:
        """Return the name that a block has now; see :func:`find`."""

    def remove(self, name: str) -> bool:
        """Remove a block of this process; whether it was there."""

    def leave(self) -> list[str]:
        """Stop being a member; the last one removes what is there, and names it."""


class Block:
    """A piece of memory of one size.

    Attributes
    ----------
    name : str
        Name in the registry's directory; empty for private memory.
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
        registry: Members | Membership | None = None,
    ) -> None:
        self.name, self.nonce, self.nbytes = name, nonce, buffer.nbytes
        self._buffer: Array | None = buffer
        self._file = file
        # Of an owner only: who merely attached removes nothing.
        self._registry = registry

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
        """Write the header that :func:`attach` looks for.

        For memory that is no segment, which writes its own but for the nonce.
        """
        words = self.buffer[:_HEADER_NBYTES].view(np.int64)
        words[[MAGIC_AT, FORMAT_AT, NONCE]] = MAGIC, FORMAT, self.nonce

    def release(self) -> None:
        """Leave the memory to whoever adopts it: this process answers for it no more."""
        if self._file is not None:
            self._file.is_owned = False
        self._registry = None

    def free(self) -> None:
        """Give the memory back; of an owner's block the name goes at once.

        The memory goes with its last view. Calling it again does nothing; in a forked
        child it does nothing to others.
        """
        if self._registry is not None:
            self._registry.remove(self.name)
        self._registry = self._buffer = None


class Memory:
    """Where a host takes the memory of its shards from.

    Parameters
    ----------
    registry : Members or None
        The membership on this machine, which this object leaves in :meth:`close`;
        None for private memory only.
    """

    def __init__(self, registry: Members | None) -> None:
        self.registry = registry

    @property
    def is_shared(self) -> bool:
        """Whether memory is shared as far as there is room."""
        return self.registry is not None

    def take(self, nbytes: int) -> Block:
        """Return zeroed memory; see :meth:`take_all`.

        Parameters
        ----------
        nbytes : int
            Its size, at least 1.

        Returns
        -------
        Block
            Shared where possible, else private.
        """
        return self.take_all([nbytes])[0]

    def take_all(
        self, sizes: Sequence[int], private_sizes: Sequence[int] | None = None
    ) -> list[Block]:
        """Return zeroed memory of several sizes, all of it shared or all private.

        Its pages exist: nothing fails later for want of memory in the directory.

        Parameters
        ----------
        sizes : sequence of int
            The sizes, each at least 1.
        private_sizes : sequence of int, optional
            The sizes where it is private; the same by default.

        Returns
        -------
        list of Block
            In this order. Private where shared memory is closed or has no room for
            all, which is logged once per process.
        """
        if taken := self.take_shared(sizes):
            return taken
        sizes = sizes if private_sizes is None else private_sizes
        return [Block(private(nbytes), _nonce()) for nbytes in sizes]

    def take_shared(self, sizes: Sequence[int]) -> list[Block]:
        """Return zeroed memory of several sizes that other processes can map, or none.

        Parameters
        ----------
        sizes : sequence of int
            The sizes, each at least 1.

        Returns
        -------
        list of Block
            In this order. Empty where shared memory is closed or has no room for
            all, which is logged once per process.
        """
        if self.registry is None:
            return []
        taken: list[Block] = []
        try:
            for nbytes in sizes:
                # A comprehension would lose those that are to be freed.
                taken.append(self.registry.make(nbytes))  # noqa: PERF401
            return taken
        except (OSError, WayClosed) as error:
            need, where = sum(sizes), self.registry.path
            _say_once(
                f"no room for {need:,} bytes of shared memory in {where}: {error}"
            )
            return []
        finally:
            if len(taken) < len(sizes):
                for block in taken:
                    block.free()

    def close(self) -> list[str]:
        """Leave the registry; return the names of the blocks that went with it.

        Those are all, where nobody else is there, and none otherwise: what was not
        freed others can adopt.
        """
        registry, self.registry = self.registry, None
        return [] if registry is None else registry.leave()


class FileMembers(Membership):
    """A membership by files and record locks, with what shares memory there."""

    def make(self, nbytes: int) -> Block:
        """Return a new block of this process."""
        return _make(self, nbytes)

    def attach(self, name: str, nbytes: int, nonce: int) -> Block:
        """Map a segment that another process made; see :func:`attach`."""
        return attach(self, name, nbytes, nonce)

    def adopt(
        self, name: str, nbytes: int, nonce: int, *, released: bool = False
    ) -> Block:
        """Take over a segment without an owner; see :func:`adopt`."""
        return adopt(self, name, nbytes, nonce, released=released)

    def find(self, name: str, nbytes: int, nonce: int) -> str:
        """Return the name that a segment has now; see :func:`find`."""
        return find(self, name, nbytes, nonce)


def open_memory(base: str | os.PathLike[str], cluster_id: str) -> Memory:
    """Return a host's memory: shared where this machine allows it.

    Parameters
    ----------
    base : path-like
        Where the directories of all clusters are.
    cluster_id : str
        What the processes of one cluster agree on, such as the scheduler's id.

    Returns
    -------
    Memory
        Private memory only, which is logged once per process, where shared memory
        is closed.
    """
    try:
        return Memory(join(base, cluster_id).of_kind(FileMembers))
    except WayClosed as error:
        _say_once(str(error))
        return Memory(None)


def attach(registry: Membership, name: str, nbytes: int, nonce: int) -> Block:
    """Map a segment that another process made.

    Parameters
    ----------
    registry : Membership
        A membership in the same cluster.
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
    path = f"{registry.path}/{name}"
    owner_of(name)
    try:
        status = os.stat(name, dir_fd=registry.directory_fd, follow_symlinks=False)
        inode = _check(status, path, nbytes)
        file, buffer = FILES.find(inode, lambda: _open(registry, name, nbytes, inode))
    except OSError as error:
        raise WayClosed(f"{path} cannot be attached: {error}") from error
    words = buffer[:_HEADER_NBYTES].view(np.int64)
    found = tuple(int(words[at]) for at in (MAGIC_AT, FORMAT_AT, NONCE))
    if found != (MAGIC, FORMAT, nonce):
        raise WayClosed(
            f"{path} is not the segment that was meant: magic, format and nonce are "
            f"{found}, not {(MAGIC, FORMAT, nonce)}"
        )
    return Block(buffer, nonce, name, file=file)


def adopt(
    registry: Membership, name: str, nbytes: int, nonce: int, *, released: bool = False
) -> Block:
    """Take over a segment that has no owner any more, without a copy.

    Whoever has it attached keeps it. Its name is this process's from here on.

    Parameters
    ----------
    registry : Membership
        A membership in the same cluster.
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
        A block of this process, as from :meth:`Memory.take`, of a new name.

    Raises
    ------
    WayClosed
        If there is no such segment, it is another one, or its owner lives.
    """
    if not released and registry.lives(owner_of(name)):
        raise WayClosed(f"{registry.path}/{name} has an owner that lives")
    block = attach(registry, name, nbytes, nonce)
    try:
        # In one step: the name that sweepers look at, and which process may remove it.
        new = registry.take(name)
    except OSError as error:
        raise WayClosed(f"{registry.path}/{name} went meanwhile: {error}") from error
    block.file.is_owned = True
    return Block(block.buffer, nonce, new, file=block.file, registry=registry)


def find(registry: Membership, name: str, nbytes: int, nonce: int) -> str:
    """Return the name that a segment has now.

    It is another one where who adopted it could tell nobody.

    Parameters
    ----------
    registry : Membership
        A membership in the same cluster.
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
    names = registry.names()
    if name in names:
        return name
    for other in names:
        # Most are other segments, or go meanwhile.
        with suppress(WayClosed):
            return attach(registry, other, nbytes, nonce).name
    return name


def _make(registry: Membership, nbytes: int) -> Block:
    name = registry.new_name()
    fd = os.open(name, _NEW, 0o600, dir_fd=registry.directory_fd)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        file, buffer = FILES.add(fd, nbytes, is_owned=True)
    except BaseException:
        registry.remove(name)
        os.close(fd)
        raise
    # Takes the page faults here instead of in the first update.
    buffer[::PAGE_NBYTES] = 0
    return Block(buffer, _nonce(), name, file=file, registry=registry)


def _open(
    registry: Membership, name: str, nbytes: int, inode: tuple[int, int]
) -> tuple[int, int]:
    path = f"{registry.path}/{name}"
    fd = os.open(name, _OLD, dir_fd=registry.directory_fd)
    try:
        if _check(os.fstat(fd), path, nbytes) != inode:
            raise WayClosed(f"{path} was replaced while it was attached")
    except BaseException:
        os.close(fd)
        raise
    return fd, nbytes


def _check(status: os.stat_result, path: str, nbytes: int) -> tuple[int, int]:
    check_file(status, path)
    if status.st_size != nbytes or nbytes < _HEADER_NBYTES:
        raise WayClosed(f"{path} has {status.st_size} bytes, not {nbytes}")
    return status.st_dev, status.st_ino


def _nonce() -> int:
    return secrets.randbits(63)


def _say_once(reason: str) -> None:
    warn_once(
        logger,
        # Whatever it was first: memory is asked for in many sizes.
        "",
        "%s; what was to be there is in private memory, and other processes of "
        "this machine reach it by messages. This is said once",
        reason,
    )

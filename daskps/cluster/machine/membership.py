"""The processes that share memory on this machine: one folder per user and cluster.

Every member of the cluster keeps the folder's file ``registry`` open and holds two
POSIX record locks on it: a shared one on the first byte, for being there at all, and
an exclusive one on a byte of its own, whose offset is its *owner number*. So the
kernel itself knows who lives, also after ``kill -9``. A block that a process makes is
named ``<owner>-<random>``; files of an owner that does not live are orphans, and so is
a folder without members. A *visitor* uses memory of others and has none there: the
folder goes without it, and what it has mapped stays its own to read. A *keeper* is the
cluster's scheduler, where it is on this machine: the workers may all be away. Every
host of the cluster is a member from its start, also without a shard: while one is
there, what a dead one left can be adopted, and nobody else takes it for abandoned.

A process opens the file once, see :mod:`daskps.cluster.machine.registry`. Hosts and
links reach their machine by :data:`HERE` and by nothing else.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from daskps import config
from daskps.cluster.machine.blocks import (
    BLOCK,
    Block,
    BlockAddress,
    check_room,
    new_block,
    open_block,
    owner_of,
)
from daskps.cluster.machine.folder import (
    CarrierClosed,
    folder_of,
    try_lock,
    unlink,
    unlock,
)
from daskps.cluster.machine.registry import Registry, Role, enter, leave, locked
from daskps.cluster.machine.sweeping import sweep_abandoned, sweep_later
from daskps.cluster.machine.warnings import warn_private

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Membership:
    """One membership; of one process they count. See :meth:`join` and :meth:`visit`."""

    def __init__(
        self, base: str | os.PathLike[str], cluster_id: str, role: Role
    ) -> None:
        self._role, self._left = role, False
        try:
            self._registry = enter(folder_of(base, cluster_id), role)
        except OSError as error:
            raise CarrierClosed(
                f"no shared memory in {os.fspath(base)}: {error}"
            ) from error

    @classmethod
    def join(cls, base: str | os.PathLike[str], cluster_id: str) -> Self:
        """Become a member of a cluster on this machine; makes its folder.

        Parameters
        ----------
        base : path-like
            Where the folders of all clusters are.
        cluster_id : str
            Text that the processes of one cluster agree on, such as the scheduler's id.

        Raises
        ------
        CarrierClosed
            If there is no such base, or the folder is not safe to use.
        """
        return cls(base, cluster_id, Role.MEMBER)

    @classmethod
    def visit(cls, base: str | os.PathLike[str], cluster_id: str) -> Self:
        """Become a visitor of a cluster that has its folder on this machine.

        For processes that only use memory of others: nothing is made or kept.

        Raises
        ------
        CarrierClosed
            If there is no such folder, or it is not safe to use.
        """
        return cls(base, cluster_id, Role.VISITOR)

    @classmethod
    def keep(cls, base: str | os.PathLike[str], cluster_id: str) -> Self:
        """Keep a cluster's folder on this machine from those of other clusters.

        For a scheduler that has stores there, whose workers may all die and come back.
        The workers' own last one that leaves removes it all the same.

        Raises
        ------
        CarrierClosed
            If there is no such folder, or it is not safe to use.
        """
        return cls(base, cluster_id, Role.KEEPER)

    @property
    def path(self) -> str:
        """The folder."""
        return self._registry.path

    @property
    def owner(self) -> int:
        """Owner number of this process."""
        return self._here().owner

    @property
    def folder_fd(self) -> int:
        """Descriptor of the folder, valid until this membership is left."""
        return self._here().folder_fd

    @property
    def is_open(self) -> bool:
        """Whether this process is a member by it; never in a forked child."""
        return not self._left and self._registry.is_open

    def _here(self) -> Registry:
        if not self.is_open:
            raise CarrierClosed(
                f"this process is no member of {self.path}: it has left, or was "
                f"forked from a member and has not joined itself"
            )
        return self._registry

    def new_name(self) -> str:
        """Return a fresh name for a block of this process."""
        return f"{self.owner:016x}-{secrets.token_hex(8)}"

    def rename(self, name: str) -> str:
        """Make a block of another owner one of this process, in one step.

        Parameters
        ----------
        name : str
            Its name.

        Returns
        -------
        str
            Its new name.

        Raises
        ------
        OSError
            If it is not there.
        CarrierClosed
            If this process is no member any more: one that leaves takes nothing over.
        """
        # Or the last member could remove what is there, and this one be missed.
        with locked():
            if not self._here().n[Role.MEMBER]:
                raise CarrierClosed(f"this process is leaving {self.path}")
            new, at = self.new_name(), self.folder_fd
            os.rename(name, new, src_dir_fd=at, dst_dir_fd=at)
            return new

    def lives(self, owner: int) -> bool:
        """Whether the process of an owner number is still there.

        Parameters
        ----------
        owner : int
            As :func:`owner_of` reads it from a block's name.

        Returns
        -------
        bool
            True for this process itself.

        Raises
        ------
        CarrierClosed
            If this process is no member any more.
        """
        # Or another thread that leaves could close the descriptor before it is used.
        with locked():
            here = self._here()
            # A process never conflicts with its own locks.
            return owner == here.owner or not try_lock(here.fd, owner, fcntl.LOCK_SH)

    def names(self) -> list[str]:
        """Return the names of all blocks in the folder."""
        return [n for n in os.listdir(self.folder_fd) if BLOCK.fullmatch(n)]

    def make(
        self,
        nbytes: int,
        parts: Sequence[tuple[int, int]] | None = None,
        later: Sequence[tuple[int, int]] | None = None,
    ) -> Block:
        """Return a new block of this process, with all of its pages.

        Parameters
        ----------
        nbytes : int
            Its size, at least 1.
        parts : sequence of (int, int), optional
            From where to where it has memory, all of it by default; for the rest it has
            addresses only, see :mod:`daskps.cluster.host.growth`.
        later : sequence of (int, int), optional
            The parts that :meth:`Block.take_later` is for.

        Returns
        -------
        Block
            Zeroed.

        Raises
        ------
        OSError
            If there is no room.
        """
        parts = [(0, nbytes)] if parts is None else parts
        address = BlockAddress(self.new_name(), nbytes, secrets.randbits(63))
        at, remove = self.folder_fd, self.remove
        return new_block(address, parts, at=at, remove=remove, later=later)

    def check_room(self, nbytes: int) -> None:
        """Refuse so many bytes where there is no room for them, by OSError."""
        check_room(self.folder_fd, nbytes)

    def make_all(
        self,
        sizes: Sequence[int | tuple[int, list[tuple[int, int]]]],
        later: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> list[Block]:
        """Return new blocks of several sizes, or none, which is logged once.

        Their pages exist: nothing fails later for want of memory. Or only those of some
        parts do, where a size comes with them, and of these not yet what is `later` of
        each; there is room for it now.
        """
        made: list[Block] = []
        wanted = [(n, [(0, n)]) if isinstance(n, int) else n for n in sizes]
        n = sum(stop - start for _, parts in wanted for start, stop in parts)
        try:
            if later is not None:
                self.check_room(n)
            for i, (nbytes, parts) in enumerate(wanted):
                made.append(
                    self.make(nbytes, parts, None if later is None else later[i])
                )
            return made
        except (OSError, CarrierClosed) as error:
            need = f"no room for {n:,} bytes of shared memory in {self.path}"
            warn_private(f"{need}: {error}")
            return []
        finally:
            if len(made) < len(sizes):
                for block in made:
                    block.free()

    def attach(self, address: BlockAddress, *, private: bool = False) -> Block:
        """Map a segment that another process made.

        Parameters
        ----------
        address : BlockAddress
            Its address, as its maker told it.
        private : bool
            Whether what is written there stays in this process.

        Returns
        -------
        Block
            A block whose :meth:`Block.free` gives up this view and removes nothing.

        Raises
        ------
        CarrierClosed
            If there is no such segment, or it is another one.
        """
        owner_of(address.name)
        try:
            block = self.map_block(address, private=private)
        except OSError as error:
            path = f"{self.path}/{address.name}"
            raise CarrierClosed(f"{path} cannot be attached: {error}") from error
        if (found := block.proof) != (meant := block.meant):
            raise CarrierClosed(
                f"{self.path}/{address.name} is not the segment that was meant: magic, "
                f"format and nonce are {found}, not {meant}"
            )
        return block

    def map_block(self, address: BlockAddress, *, private: bool = False) -> Block:
        """Map whatever has that name and size; OSError where nothing has the name."""
        at, path = self.folder_fd, self.path
        return open_block(address, at=at, path=path, private=private)

    def take_turn(self, turn: int) -> bool:
        """Take a turn that one process of the machine has at a time; else return False.

        Turns are numbers above those of owners; the system ends that of a dead process.
        """
        with locked():
            return try_lock(self._here().fd, turn, fcntl.LOCK_EX, keep=True)

    def end_turn(self, turn: int) -> None:
        """Let others have a turn; without effect once this process has left."""
        with locked():
            if self._registry.is_open:
                unlock(self._registry.fd, turn)

    def take_over(self, address: BlockAddress, *, released: bool = False) -> Block:
        """Take over a segment that has no owner any more, by renaming its file.

        Processes that have it attached keep it. Its name is this process's from here
        on.

        Parameters
        ----------
        address : BlockAddress
            Its address, as its maker told it.
        released : bool
            Whether its owner has let go of it; else it must not live.

        Returns
        -------
        Block
            A block of this process, as from :meth:`make`, of a new name.

        Raises
        ------
        CarrierClosed
            If there is no such segment, it is another one, or its owner lives.
        """
        name = address.name
        if not released and self.lives(owner_of(name)):
            raise CarrierClosed(f"{self.path}/{name} has an owner that lives")
        block = self.attach(address)
        try:
            # In one step: the name that sweepers look at, and which process may remove
            # it.
            block.own(self.rename(name), self.remove)
        except OSError as error:
            raise CarrierClosed(
                f"{self.path}/{name} went meanwhile: {error}"
            ) from error
        return block

    def find(self, address: BlockAddress) -> BlockAddress:
        """Return where a segment is now.

        Its name is another one where the process that adopted it could tell nobody; it
        is the same where there is no such segment at all.
        """
        names = self.names()
        if address.name not in names:
            for name in names:
                # Most are other segments, or go meanwhile.
                with suppress(CarrierClosed):
                    return self.attach(address._replace(name=name)).address
        return address

    def remove(self, name: str) -> bool:
        """Remove a block, of this process also after this membership was left.

        Parameters
        ----------
        name : str
            Its name.

        Returns
        -------
        bool
            False where it is gone already, as after this process's last leave.
        """
        # Or the descriptor could be closed, and be another one, before it is used.
        with locked():
            return self._registry.is_open and unlink(name, self._registry.folder_fd)

    def orphans(self) -> list[str]:
        """Return the names of blocks whose owner does not live; they can be adopted."""
        return [name for name in self.names() if not self.lives(owner_of(name))]

    def sweep(self, names: Collection[str]) -> list[str]:
        """Remove blocks whose owner does not live.

        Parameters
        ----------
        names : collection of str
            Their names; one whose owner lives after all stays.

        Returns
        -------
        list of str
            Names of the files that were removed.
        """
        return [n for n in self.orphans() if n in names and self.remove(n)]

    def leave(self, *, keeps: bool = False) -> list[str]:
        """End this membership; the last member that leaves removes the folder.

        Calling it again, or in a forked child, does nothing. While another thread is at
        work here, that one does it before it returns.

        Parameters
        ----------
        keeps : bool
            Whether the folder stays in any case, as after a crash of all: memory that
            dead members have left there is still looked for.

        Returns
        -------
        list of str
            Names of the blocks that went with the folder. Where others are there
            still, blocks of this process that were not freed stay, for them to adopt.
        """
        if self._left:
            return []
        self._left = True
        self._registry.keeps = keeps
        leave(self._registry, self._role)
        return self._registry.removed


class Machine:
    """The machine of this process: the configured directory of shared memory."""

    def join(self, cluster: str) -> Membership | None:
        """Return a membership of a process with memory here.

        None where shared memory is closed, which is logged once per process. Folders
        of this user whose cluster is over, as after a crash, are removed, now or when
        it is certain.
        """
        base = config.load().shared_memory
        try:
            own = folder_of(base, cluster)
            if sweep_abandoned(base, own).waits:
                sweep_later(base, own)
            return Membership.join(base, cluster)
        except CarrierClosed as error:
            warn_private(str(error))
            return None

    def visit(self, cluster: str) -> Membership:
        """Return a membership of a process without memory here, or raise CarrierClosed."""
        return Membership.visit(config.load().shared_memory, cluster)

    def keep(self, cluster: str) -> Membership | None:
        """Return a membership of a scheduler with stores; None where none are here."""
        try:
            return Membership.keep(config.load().shared_memory, cluster)
        except CarrierClosed:
            return None


HERE = Machine()


def memory_id() -> str:
    """Return what tells this user's shared memory from that of other containers.

    They may have the same address; "" where there is none.
    """
    try:
        status = os.stat(config.load().shared_memory)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}:{os.getuid()}"

"""The machines of simulated processes: memory that they share, in this one.

Names, promises and most of the code are those of
:mod:`daskps.cluster.machine.membership` and :mod:`daskps.cluster.machine.blocks`; what
files and record locks do there is done by plain objects here. What a process leaves
behind when it dies stays until somebody adopts or sweeps it. Memory is that of files
without a name: of what grows it is there where somebody has taken it, as on a machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.host.growth import Growing
from daskps.cluster.machine.blocks import BLOCK, Block, BlockAddress, allocate
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.locks import FileLock
from daskps.cluster.machine.mapping import Mapped
from daskps.cluster.machine.membership import Machine, Membership
from daskps.errors import ShardBusyError
from daskps.shards.memory.areas import without
from daskps.shards.memory.format import HEADER_WORDS, HOLDER
from tests.simulator.ground import CHANCE, put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.typing import Array
    from tests.simulator.loop import Process

PID_BITS = 22


class SimFile(Mapped):
    """A file that only this process knows, mapped for as long as it simulates.

    Attributes
    ----------
    taken_nbytes : int
        Bytes that it had memory for when somebody took some last.
    """

    def __init__(self, nbytes: int, parts: Sequence[tuple[int, int]]) -> None:
        fd = os.memfd_create("simulated")
        allocate(fd, nbytes, parts)
        super().__init__(fd, nbytes)
        self.taken_nbytes = self.held_nbytes


def follow_growth() -> None:
    """Have files know how much memory was taken from here on."""
    take, give = Growing.take, Growing.give

    def take_and_note(growing: Growing, parts: Sequence[Array]) -> None:
        take(growing, parts)
        _note_taken(growing)

    def give_and_note(growing: Growing, part: Array) -> None:
        give(growing, part)
        _note_taken(growing)

    put(Growing, take=take_and_note, give=give_and_note)


def _note_taken(growing: Growing) -> None:
    if isinstance(growing.file, SimFile):
        growing.file.taken_nbytes = growing.file.held_nbytes


@dataclass(eq=False)
class Kept:
    """A piece of a machine's memory, whoever has it now."""

    file: SimFile
    #: Who has its lock.
    holder: Process | None = None

    @cached_property
    def buffer(self) -> Array:
        """All of it."""
        return np.frombuffer(self.file.memory, np.uint8)

    @property
    def words(self) -> Array:
        """The header."""
        return self.buffer[: 8 * HEADER_WORDS].view(np.int64)

    @property
    def is_free(self) -> bool:
        """Whether nobody has its lock."""
        return self.holder is None or self.holder.is_dead

    def take(self, process: Process) -> None:
        """Give its lock to a process."""
        self.holder = process
        self.words[HOLDER] = process.pid


@dataclass(eq=False)
class SimMachine:
    """One machine: its blocks by name, and processes by owner number."""

    name: str
    blocks: dict[str, Kept] = field(default_factory=dict)
    owners: dict[int, Process] = field(default_factory=dict)
    #: Those of them that may own blocks.
    members: set[int] = field(default_factory=set)
    #: Whether its last member has left in order, and taken away what was there.
    is_freed: bool = False
    #: Whether it has ended once, with its memory.
    has_ended: bool = False

    def end(self) -> None:
        """Lose all memory: whoever comes to this machine finds nothing."""
        self.blocks.clear()
        self.has_ended = True

    def lock_some(self, process: Process) -> int:
        """Have a process hold locks that are free; return how many.

        As if it were stopped in the middle of calls, of which nothing is done yet.
        """
        free = [kept for kept in self.blocks.values() if kept.is_free]
        some = [kept for kept in free if CHANCE.random() < 0.5]
        for kept in some:
            kept.take(process)
        return len(some)

    def unlock_all(self, process: Process) -> None:
        """Have a process give back the locks that it holds."""
        for kept in self.blocks.values():
            if kept.holder is process:
                kept.holder = None


class SimView(Machine):
    """A machine as one of its processes reaches it."""

    def __init__(self, machine: SimMachine, process: Process) -> None:
        self.machine, self.process = machine, process

    def join(self, cluster: str) -> SimMembers:
        """Join the processes there."""
        members = self.visit(cluster)
        self.machine.members.add(members.owner)
        return members

    def visit(self, cluster: str) -> SimMembers:
        """Return a membership."""
        return SimMembers(self.machine, self.process)


class SimMembers(Membership):
    """A process among those of its machine."""

    path = ""
    owner = 0

    def __init__(self, machine: SimMachine, process: Process) -> None:
        self._machine, self._process = machine, process
        self.path = f"sim:{machine.name}"
        self.owner = CHANCE.getrandbits(40) << PID_BITS | process.pid
        machine.owners[self.owner] = process

    def lives(self, owner: int) -> bool:
        """Whether the process of an owner number is still there."""
        process = self._machine.owners.get(owner)
        return process is not None and not process.is_dead

    def names(self) -> list[str]:
        """Return the names of all blocks."""
        return [name for name in self._machine.blocks if BLOCK.fullmatch(name)]

    def check_room(self, nbytes: int) -> None:
        """Have room for all."""

    def make(
        self,
        nbytes: int,
        parts: Sequence[tuple[int, int]] | None = None,
        later: Sequence[tuple[int, int]] | None = None,
    ) -> Block:
        """Return a new block of this process, with memory for all of it or for parts."""
        address = BlockAddress(self.new_name(), nbytes, CHANCE.getrandbits(63))
        parts = [(0, nbytes)] if parts is None else parts
        file = SimFile(nbytes, without(parts, later or ()))
        kept = self._machine.blocks[address.name] = Kept(file)
        block = SimBlock(address, kept, self._process)
        block.later = [*(later or ())]
        block.own(address.name, self.remove)
        return block

    def new_name(self) -> str:
        """Return a fresh name for a block of this process."""
        return f"{self.owner:016x}-{CHANCE.getrandbits(64):016x}"

    def map_block(self, address: BlockAddress, *, private: bool = False) -> Block:
        """Return whatever has that name and size."""
        kept = self._machine.blocks.get(address.name)
        if kept is None or kept.buffer.nbytes != address.nbytes:
            raise CarrierClosed(f"{self.path}/{address.name} cannot be attached")
        return SimBlock(address, kept, self._process)

    def rename(self, name: str) -> str:
        """Make a block of another owner one of this process."""
        if self.owner not in self._machine.members:
            raise CarrierClosed(f"this process is leaving {self.path}")
        new = self.new_name()
        self._machine.blocks[new] = self._machine.blocks.pop(name)
        return new

    def remove(self, name: str) -> bool:
        """Remove a block; whether it was there."""
        return self._machine.blocks.pop(name, None) is not None

    def leave(self, *, keeps: bool = False) -> list[str]:
        """Stop being a member; the last one removes what is there, and names it."""
        machine = self._machine
        machine.owners.pop(self.owner, None)
        if self.owner not in machine.members:
            return []
        machine.members.discard(self.owner)
        stays = keeps or any(self.lives(owner) for owner in machine.members)
        removed = [] if stays else [n for n in self.names() if self.remove(n)]
        machine.is_freed = machine.is_freed or bool(removed)
        return removed


class SimBlock(Block):
    """A block of a simulated machine as one process has it."""

    def write(self, at: int, data: Array) -> None:
        """Write bytes."""
        self.buffer[at : at + data.nbytes] = data

    def __init__(self, address: BlockAddress, kept: Kept, process: Process) -> None:
        super().__init__(address, kept.file, kept.buffer)
        self._kept, self._process = kept, process

    def lock(self) -> SimLock:
        """Return the lock of the segment it holds."""
        return SimLock(self._kept, self._process)


class SimLock(FileLock):
    """The lock of one block, as one process sees it; free when its holder dies."""

    def __init__(self, kept: Kept, process: Process) -> None:
        self._kept, self._by = kept, process

    @property
    def holder(self) -> int:
        """Process that has the lock, or had it last; 0 before the first."""
        return int(self._kept.words[HOLDER])

    def held_by(self) -> int:
        """Return the process that has the lock now, 0 where none has."""
        holder = self._kept.holder
        return 0 if holder is None or self._kept.is_free else holder.pid

    def try_acquire(self) -> bool:
        """Take the lock if it is free."""
        if not self._kept.is_free:
            return False
        self._kept.take(self._by)
        return True

    def acquire(self, seconds: float) -> None:
        """Take the lock; waiting would stop everything, so that nobody waits."""
        if not self.try_acquire():
            raise ShardBusyError(f"the shard is locked by process {self.holder}")

    def release(self) -> None:
        """Give the lock back."""
        self._kept.holder = None

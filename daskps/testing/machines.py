"""The machines of simulated processes: memory that they share, in this one.

Names and promises are those of :mod:`daskps.cluster.machine.membership` and
:mod:`daskps.cluster.machine.blocks`; what files and record locks do there is done by plain
objects here. What a process leaves behind when it dies stays until somebody adopts or
sweeps it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from daskps.cluster.machine.blocks import Block
from daskps.cluster.machine.membership import BLOCK, WayClosed, owner_of
from daskps.cluster.machine.memory import Memory
from daskps.errors import ShardBusyError
from daskps.shards.memory.areas import private
from daskps.shards.memory.format import (
    FORMAT,
    FORMAT_AT,
    HEADER_WORDS,
    HOLDER,
    MAGIC,
    MAGIC_AT,
    NONCE,
)
from daskps.testing.ground import CHANCE

if TYPE_CHECKING:
    from collections.abc import Collection

    from daskps.testing.loop import Process
    from daskps.typing import Array

PID_BITS = 22


@dataclass(eq=False)
class Kept:
    """A piece of a machine's memory, whoever has it now."""

    buffer: Array
    nonce: int
    #: Who has its lock.
    holder: Process | None = None

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


@dataclass(frozen=True, eq=False)
class SimView:
    """A machine as one of its processes reaches it."""

    machine: SimMachine
    process: Process

    def memory(self, cluster: str) -> Memory:
        """Join the processes there and return where to take memory from."""
        members = self.visit(cluster)
        self.machine.members.add(members.owner)
        return Memory(members)

    def visit(self, cluster: str) -> SimMembers:
        """Return a membership."""
        return SimMembers(self.machine, self.process)


class SimMembers:
    """A process among those of its machine."""

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

    def orphans(self) -> list[str]:
        """Return the names of blocks whose owner does not live."""
        return [name for name in self.names() if not self.lives(owner_of(name))]

    def sweep(self, names: Collection[str]) -> list[str]:
        """Remove blocks whose owner does not live; return their names."""
        return [n for n in self.orphans() if n in names and self.remove(n)]

    def make(self, nbytes: int) -> Block:
        """Return a new block of this process."""
        name, nonce = self._new_name(), CHANCE.getrandbits(63)
        kept = self._machine.blocks[name] = Kept(private(nbytes), nonce)
        return SimBlock(kept, name, self._process, self)

    def _new_name(self) -> str:
        return f"{self.owner:016x}-{CHANCE.getrandbits(64):016x}"

    def attach(self, name: str, nbytes: int, nonce: int) -> Block:
        """Map a block of another process."""
        owner_of(name)
        kept = self._machine.blocks.get(name)
        if kept is None or kept.buffer.nbytes != nbytes:
            raise WayClosed(f"{self.path}/{name} cannot be attached")
        words = kept.words
        found = tuple(int(words[at]) for at in (MAGIC_AT, FORMAT_AT, NONCE))
        if found != (MAGIC, FORMAT, nonce):
            raise WayClosed(f"{self.path}/{name} is not the segment that was meant")
        return SimBlock(kept, name, self._process)

    def adopt(
        self, name: str, nbytes: int, nonce: int, *, released: bool = False
    ) -> Block:
        """Take over a block without an owner."""
        if self.owner not in self._machine.members:
            raise WayClosed(f"this process is leaving {self.path}")
        if not released and self.lives(owner_of(name)):
            raise WayClosed(f"{self.path}/{name} has an owner that lives")
        self.attach(name, nbytes, nonce)
        new, kept = self._new_name(), self._machine.blocks.pop(name)
        self._machine.blocks[new] = kept
        return SimBlock(kept, new, self._process, self)

    def find(self, name: str, nbytes: int, nonce: int) -> str:
        """Return the name that a block has now."""
        if name not in self._machine.blocks:
            for other, kept in self._machine.blocks.items():
                if (kept.nonce, kept.buffer.nbytes) == (nonce, nbytes):
                    return other
        return name

    def remove(self, name: str) -> bool:
        """Remove a block; whether it was there."""
        return self._machine.blocks.pop(name, None) is not None

    def leave(self) -> list[str]:
        """Stop being a member; the last one removes what is there, and names it."""
        machine = self._machine
        machine.owners.pop(self.owner, None)
        if self.owner not in machine.members:
            return []
        machine.members.discard(self.owner)
        others = any(self.lives(owner) for owner in machine.members)
        removed = [] if others else [n for n in self.names() if self.remove(n)]
        machine.is_freed = machine.is_freed or bool(removed)
        return removed


class SimBlock(Block):
    """A block of a simulated machine as one process has it."""

    def __init__(
        self,
        kept: Kept,
        name: str,
        process: Process,
        members: SimMembers | None = None,
    ) -> None:
        super().__init__(kept.buffer, kept.nonce, name, members=members)
        self._kept, self._process = kept, process

    @property
    def is_shared(self) -> bool:
        """Whether other processes can attach to it."""
        return True

    def lock(self) -> SimLock:
        """Return the lock of the segment it holds."""
        return SimLock(self._kept, self._process)


class SimLock:
    """The lock of one block, as one process sees it; free when its holder dies."""

    def __init__(self, kept: Kept, process: Process) -> None:
        self._kept, self._process = kept, process

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
        self._kept.take(self._process)
        return True

    def acquire(self, seconds: float) -> None:
        """Take the lock; waiting would stop everything, so that nobody waits."""
        if not self.try_acquire():
            raise ShardBusyError(f"the shard is locked by process {self.holder}")

    def release(self) -> None:
        """Give the lock back."""
        self._kept.holder = None

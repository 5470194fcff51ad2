"""What a process asks of the machine that it is on: memory it shares with others there.

Hosts and links reach the machine by this and by nothing else. Processes with memory of their own
join (:class:`~daskps.cluster.machine.memory.Memory`); those that only use memory of others
visit.
"""

from __future__ import annotations

from typing import Protocol

from daskps import config
from daskps.cluster.machine.blocks import FileMembers, Members
from daskps.cluster.machine.memory import Memory, open_memory


class Machine(Protocol):
    """The machine of one process."""

    def memory(self, cluster: str) -> Memory:
        """Join a cluster's processes there and return where to take memory from."""

    def visit(self, cluster: str) -> Members:
        """Return a membership of a process without memory there, or raise WayClosed."""


class ThisMachine:
    """The machine of this process: the configured directory of shared memory."""

    def memory(self, cluster: str) -> Memory:
        """Join a cluster's processes here and return where to take memory from."""
        return open_memory(config.load().shared_memory, cluster)

    def visit(self, cluster: str) -> Members:
        """Return a membership of a process without memory here, or raise WayClosed."""
        return FileMembers.visit(config.load().shared_memory, cluster)


HERE = ThisMachine()

"""What a process asks of the machine that it is on: memory it shares with others there.

Hosts and links reach the machine by this and by nothing else. A membership is joined
by who has memory of its own (:class:`~daskps.cluster.machine.blocks.Memory`), and visited by
who only uses that of others.
"""

from __future__ import annotations

from typing import Protocol

from daskps import config
from daskps.cluster.machine.blocks import FileMembers, Members, Memory, open_memory
from daskps.cluster.machine.membership import visit


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
        return visit(config.load().shared_memory, cluster).of_kind(FileMembers)


HERE = ThisMachine()

"""What the homes of connections ask of who serves these."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from daskps.cluster.lane.batch import FrameBatch
    from daskps.cluster.lane.calls import Waiting
    from daskps.cluster.lane.connection import Connection


class Serving(Protocol):
    """What serves connections, in whichever thread."""

    def begin_thread(self) -> memoryview:
        """Return the buffer of this thread."""

    def go_on(
        self,
        connection: Connection,
        buffer: memoryview,
        seconds: float,
        batch: FrameBatch[Connection] | None = None,
    ) -> int:
        """Have a connection go on; return what it waits for, 0 where it has ended."""

    def finish(self, connection: Connection, seconds: float, waiting: Waiting) -> None:
        """Answer a parked call, unless another thread does."""

    def end(self, connection: Connection, error: Exception | None = None) -> None:
        """Close a connection."""


class Giving(Serving, Protocol):
    """What serves connections, and has threads to give them to."""

    def give_away(self, connection: Connection) -> None:
        """Have another thread serve a frame that takes long."""

    def reply(self, connection: Connection, found: list[Any] | Waiting) -> int:
        """Answer a frame whose batch was served; return what it waits for."""

    def finish_done(self, seconds: float) -> None:
        """Answer the calls that this thread has completed."""

    def try_to_stay(self, connection: Connection) -> bool:
        """Give a busy connection a thread to itself, if there is one."""

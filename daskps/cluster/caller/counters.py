"""Counts of the calls of a handle or a trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daskps.cluster.caller.routes import Request


@dataclass(slots=True)
class Counters:
    """Counts of a handle: messages, calls without one, their bytes, retries."""

    messages: int = 0
    local_calls: int = 0
    nbytes: int = 0
    retries: int = 0
    #: Calls that sockets took, and the bytes of their arrays.
    socket_calls: int = 0
    socket_nbytes: int = 0
    #: Rows of tables that were asked for and that were brought, repeats among them.
    rows_pulled: int = 0
    rows_pushed: int = 0
    #: By reason how often a call that had a socket went on by message.
    fallbacks: dict[str, int] = field(default_factory=dict)

    def count_rows(self, request: Request) -> None:
        """Count the rows of tables that a call names."""
        if request.rows:
            for given in request.rows:
                self.rows_pushed += len(given.split.ids)
        if request.target is not None and (rows := request.target.rows):
            self.rows_pulled += sum(
                len(r.asked.ids) for of in rows.values() for r in of
            )

    def fell_back(self, why: str) -> None:
        """Count a call that a socket leaves to messages."""
        # A new dict: another thread may be looking through the old one.
        self.fallbacks = {**self.fallbacks, why: self.fallbacks.get(why, 0) + 1}

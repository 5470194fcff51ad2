"""One run as the directory sees it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskps.cluster.entry import Entry


@dataclass
class Run:
    """One run in progress."""

    id: int
    entry: Entry
    client: str
    size: int
    #: Whether a trainer that lost its worker may register again.
    restartable: bool
    #: Whether trainers wait for the client's verdict after each epoch.
    gated: bool
    #: Worker of each rank that has registered and lives.
    ranks: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    #: Per epoch and rank what the trainer reported.
    reports: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    announced: int = 0
    allowed: int = 0
    stopped: bool = False
    clock: int = 0
    fenced: Exception | None = None
    #: Memory of the mailboxes that trainers on its machine may fill, as rows of
    #: shard, name, bytes and nonce; how contributions are reduced, pickled; codec.
    mailboxes: dict[str, Any] = field(default_factory=dict)
    #: Whether its trainers go on in rounds.
    bsp: bool = True
    #: Whether tasks of the graph, not resident trainers, compute the rounds; then the
    #: workers that may hold contributions to them.
    graph: bool = False
    holders: set[str] = field(default_factory=set)
    #: Attempt and round of the newest gradient task the scheduler has forgotten.
    forgotten: tuple[int, ...] = ()
    #: Ended epochs and everything else the client wants to hear of.
    events: list[dict[str, Any]] = field(default_factory=list)
    first_event: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def mailboxes_at(self) -> list[Any]:
        """Where the mailboxes are."""
        found: list[Any] = self.mailboxes.get("rows", [])
        return found

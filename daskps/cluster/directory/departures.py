"""Workers that left, and new owners for their shards, as the directory appoints them.

The memory of a shard outlives its process where other processes of the machine can
map it. The directory asks workers of that machine to take it over (``move``, one for
each store and dead worker): which of them, ``candidates`` decides, and ``adopters``
sends the messages. Until one has, the shards are away and their callers wait, or lost,
as ``verdict`` says of each; also of a lost one somebody is asked now and then. A
shard's generation rises with its owner, so what was meant for the former one is
refused and sent again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from distributed.core import Status

from daskps.cluster.directory.move import Move, lose_shards
from daskps.cluster.directory.run import rounds_lost
from daskps.cluster.wire.handlers import DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from daskps.cluster.directory.adopters import MoveContext
    from daskps.cluster.directory.entry import StoreEntry

#: Ends the message about a shard that no other process of its machine can map.
WAS_PRIVATE = (
    "; its memory was private, so that nobody could adopt it: daskps.ways.machine is "
    "false there or where the store was created, or the worker's log says why it shares "
    "none"
)


class Departures:
    """The workers that left, and the moves of their shards."""

    def __init__(self, context: MoveContext) -> None:
        self._context = context
        #: Whether their worker closed in order.
        self._moves: dict[Move, bool] = {}

    @DIRECTORY.handles("leaving")
    def on_leaving(self, worker: str) -> list[str]:
        """Hear that a worker closes, and return of which stores others may have shards.

        It lets go of those when it knows, and frees what it has of other stores. A
        shard that it has adopted just now may have no owner yet, as far as the
        directory knows.
        """
        self.worker_left(worker, "was closed", in_order=True)
        # Also what was given up is looked for: a worker may have hung for long.
        self.worker_came()
        entries = self._context.stores.values()
        return [entry.uid for entry in entries if entry.without_owner]

    @DIRECTORY.handles("awaits")
    def awaits_shards(self, worker: str) -> bool:
        """Return whether shards of workers that died may have an owner again.

        Then their memory must outlast a worker that closes, were it the last of its
        machine: one may come that adopts them. The worker itself has not died, even if
        its connection has ended first.
        """
        for move in self._moves:
            self._moves[move] |= move.worker == worker
        died = [move for move, in_order in self._moves.items() if not in_order]
        return any(move.is_open for move in died)

    @DIRECTORY.handles("removed")
    def on_removed(self, worker: str, names: Sequence[str]) -> None:
        """Hear what memory went with a worker that was the last of its machine."""
        gone, why = set(names), "was closed, as were all others of its machine"
        for entry in self._context.stores.values():
            shards = {row[0] for row in entry.segments if row[1] in gone}
            if shards := shards - entry.lost.keys():
                self._give_up(entry, shards)
                for owner in {entry.owners[i] for i in shards}:
                    of = [i for i in sorted(shards) if entry.owners[i] == owner]
                    # Most likely somebody has closed the cluster.
                    left_by = owner, why
                    lose_shards(self._context, entry, of, left_by, level=logging.INFO)

    def worker_left(self, worker: str, reason: str, *, in_order: bool = False) -> None:
        """Look for new owners of what a worker held, or mark it as lost.

        One that leaves in order has yet to let go of it, and others may leave with it.
        """
        scheduler = self._context.scheduler
        for entry in self._context.stores.values():
            entry.nbytes.pop(worker, None)
            held = {i for i, w in enumerate(entry.owners) if w == worker}
            if not (shards := sorted(held - entry.without_owner)):
                continue
            shared = {row[0] for row in entry.segments}
            running = scheduler.status == Status.running
            if entry.ready and running and shared.issuperset(shards):
                self._begin(entry, (worker, reason), shards, in_order)
            else:
                why = reason + WAS_PRIVATE * (entry.ready and running)
                lose_shards(self._context, entry, shards, (worker, why))

    def _begin(
        self,
        entry: StoreEntry,
        left_by: tuple[str, str],
        shards: list[int],
        in_order: bool,
    ) -> None:
        """Look for new owners of shards that other processes can map."""
        worker, _ = left_by
        self._context.runs.fence_all(
            entry, rounds_lost(worker), lambda run: not run.survives(shards)
        )
        move = Move(self._context, entry, left_by, shards)
        if in_order:
            move.wait()
        self._moves[move] = in_order
        work = self._context.hosts.spawn(move.run())
        work.add_done_callback(lambda _: self._moves.pop(move))

    def worker_came(self) -> None:
        """Hear that a worker came, which may find what others did not."""
        for move in self._moves:
            move.look_now()

    def store_gone(self, entry: StoreEntry) -> None:
        """Look for nobody any more for a store that has ended."""
        self._give_up(entry, ())

    def _give_up(self, entry: StoreEntry, shards: Iterable[int]) -> None:
        for move in self._moves:
            if move.entry is entry:
                move.give_up(shards)

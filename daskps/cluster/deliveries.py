"""Steps of a trainer that go to shards it can reach itself, made ready once.

From one step to the next only the numbers change: which shards get which elements
stays. The message that a step would be is left out altogether; each shard gets its part
in the caller's thread. Whatever is not as simple as that (a shard that must be asked,
holds steps back or refuses this one) takes the general way, under the same sequence
number: what was applied already is recognised there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.lane import PATIENCE_SECONDS
from daskps.cluster.slot import Pending, Slot
from daskps.errors import ShardBusyError
from daskps.shards.base import NO_WAIT, NOTHING, Item, Ready, Step, Ticket
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.cluster.messages import Array
    from daskps.cluster.session import Session

#: Position of a piece, index of its parameter, and its elements there.
Cut = tuple[int, int, int, int]


class Delivery:
    """Steps with arrays for the same parameters.

    Parameters
    ----------
    session : Session
        The trainer's place in its run.
    indices : tuple of int
        Which parameters.
    """

    def __init__(self, session: Session, indices: tuple[int, ...]) -> None:
        meta, ways = session.meta, session.shards.ways
        self._run, self._rank = session.run, session.rank
        self._counters = session.shards.counters
        cuts: dict[int, list[Cut]] = {s: [] for s in range(meta.layout.n_shards)}
        for index in indices:
            for piece in meta.layout.pieces_of[index]:
                if piece.start < piece.stop:
                    position = meta.positions[piece.shard, index]
                    cut = position, index, piece.start, piece.stop
                    cuts[piece.shard].append(cut)
        self._parts: list[tuple[int, Slot, list[Cut]]] = []
        lives: list[Callable[[], bool]] = []
        #: Whether all shards can be reached without a message.
        self.is_possible = True
        for worker, shards in meta.where.hosts.items():
            serving = ways.serving(worker)
            if serving is None or any(
                (meta.uid, s) not in serving.slots for s in shards
            ):
                self.is_possible = False
                return
            lives.append(serving.is_live)
            self._parts += [(s, serving.slots[meta.uid, s], cuts[s]) for s in shards]
        self._lives = lives
        # Trainers that begin with different shards wait less for each other.
        first = session.rank % len(self._parts)
        self._parts = self._parts[first:] + self._parts[:first]

    def send(
        self,
        arrays: Mapping[int, Array],
        kind: str,
        *,
        clock: int,
        sequence: int,
        weight: float,
    ) -> Version | None:
        """Deliver a step that ticks; None where the general way must be taken."""
        # What is pushed to a worker that is gone would be acknowledged, and lost.
        if not all(lives() for lives in self._lives):
            return None
        versions = []
        for shard, slot, cuts in self._parts:
            step = Step(
                kind=kind if arrays else NOTHING,
                items=[Item(p, 0, arrays[index][a:b]) for p, index, a, b in cuts],
                run=self._run,
                rank=self._rank,
                clock=clock,
                tick=True,
                sequence=sequence,
                generation=slot.shard.generation,
                weight=weight,
                wait=NO_WAIT,
                floor=sequence,
            )
            ticket = Ticket(step, owner=_nobody)
            try:
                if not slot.submit_now(ticket, PATIENCE_SECONDS):
                    return None
            except ShardBusyError:
                # Its holder may be stopped: the general way hears of a fence.
                return None
            outcome = ticket.outcome
            if type(outcome) is not Ready:
                if outcome is None:
                    slot.forget(ticket)
                return None
            versions.append((shard, ticket.version))
        self._counters.local_calls += len(self._lives)
        return Version.of(sorted(versions))


_nobody = Pending(1, lambda: None)


class Deliveries:
    """The prepared steps of one trainer.

    Parameters
    ----------
    session : Session
        The trainer's place in its run.
    """

    #: Sets of parameters that are kept, the latest.
    MOST = 8

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[tuple[int, ...], Delivery] = {}
        self._where = session.meta.where
        #: Where the shards were when these were made ready.
        self._where = session.meta.where

    def send(
        self, arrays: Mapping[int, Array], kind: str, weight: float
    ) -> Version | None:
        """Deliver a step that ticks; None where the general way must be taken."""
        session, indices = self._session, tuple(arrays)
        if self._where is not session.meta.where:
            self._where = session.meta.where
            self._known.clear()
        delivery = self._known.get(indices)
        if delivery is None:
            if len(self._known) >= self.MOST:
                del self._known[next(iter(self._known))]
            delivery = self._known[indices] = Delivery(session, indices)
        if not delivery.is_possible:
            return None
        clock, sequence = session.clock, session.sequence
        return delivery.send(
            arrays, kind, clock=clock, sequence=sequence, weight=weight
        )

"""Steps of a trainer that go to shards it can reach itself, made ready once.

From one step to the next only the numbers change: which shards get which elements
stays. The message that a step would be is left out altogether; each shard gets its part
in the caller's thread. Whatever is not as simple as that (a shard that must be asked,
holds steps back or refuses this one) takes the general way, under the same sequence
number: what was applied already is recognised there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daskps import config
from daskps.cluster.caller.mapped import PATIENCE_SECONDS
from daskps.cluster.host.hosted import Countdown, HostedShard
from daskps.errors import ShardBusyError
from daskps.kernels import finite
from daskps.shards.memory.publication import PAST_NBYTES
from daskps.shards.steps import ASK, NO_WAIT, NOTHING, Item, Ready, Step, Tick, Ticket
from daskps.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from daskps.cluster.caller.member import Member
    from daskps.typing import Array

#: How often the shards' owners are looked after.
LOOK_SECONDS = 0.001
#: Position of a piece, index of its parameter, and its elements there.
PieceCut = tuple[int, int, int, int]
#: A shard, and what of an array goes there.
PreparedPart = tuple[int, HostedShard, list[PieceCut]]
#: Less is looked at before: no shard writes it past the caches.
LOOK_LATER_NBYTES = PAST_NBYTES


@dataclass(slots=True)
class FiniteCheck:
    """A look for NaN and infinity in gradients that nobody has had yet.

    Called, it raises PushRejectedError where there are any.
    """

    function: Callable[[], None]
    done: bool = False

    def __call__(self) -> None:
        """Look, unless somebody has."""
        if not self.done:
            self.function()
            self.done = True


class PreparedStep:
    """Steps with arrays for the same parameters.

    Parameters
    ----------
    session : Member
        The trainer's place in its run.
    indices : tuple of int
        Which parameters.
    cache : str
        Where compiled loops are kept.
    """

    def __init__(self, session: Member, indices: tuple[int, ...], cache: str) -> None:
        meta, ways = session.meta, session.shards.ways
        self._cache = cache
        self._in_rounds = session.bsp
        self._counters = session.shards.counters
        cuts: dict[int, list[PieceCut]] = {s: [] for s in range(meta.layout.n_shards)}
        for index in indices:
            for piece in meta.layout.pieces_of[index]:
                if piece.start < piece.stop:
                    position = meta.positions[piece.shard, index]
                    cut = position, index, piece.start, piece.stop
                    cuts[piece.shard].append(cut)
        self._parts: list[PreparedPart] = []
        self._lives: list[Callable[[], bool]] = []
        self._next_look = 0.0
        #: Whether all shards can be reached without a message.
        self.is_possible = True
        for worker, shards in meta.where.hosts.items():
            serving = ways.serving(worker)
            if serving is None or any(
                (meta.uid, s) not in serving.slots for s in shards
            ):
                self.is_possible = False
                return
            self._lives.append(serving.is_live)
            for shard in shards:
                slot = serving.slots[meta.uid, shard]
                self._parts.append((shard, slot, cuts[shard]))
        # Trainers that begin with different shards wait less for each other.
        first = session.rank % len(self._parts)
        self._parts = self._parts[first:] + self._parts[:first]

    def send(
        self, arrays: Mapping[int, Array], tick: Tick, look: FiniteCheck | None = None
    ) -> Version | None:
        """Deliver a step; None where the general way must be taken.

        The first shard looks at its part of the gradients itself, while it applies
        them: until it has, no other one has seen anything.
        """
        # What is pushed to a worker that is gone would be acknowledged, and lost.
        if (now := time.monotonic()) > self._next_look:
            if not all(lives() for lives in self._lives):
                return None
            self._next_look = now + LOOK_SECONDS
        if look is not None and not look.done and not self._may_look_later(arrays):
            look()
        versions = []
        for shard, slot, cuts in self._parts:
            given = {p: arrays[index][a:b] for p, index, a, b in cuts}
            try:
                if self._in_rounds:
                    version = slot.try_step(tick, given, PATIENCE_SECONDS)
                else:
                    check = look is not None and not look.done
                    version = self._submit(slot, tick, given, check)
            except ShardBusyError:
                # Its holder may be stopped: the general way hears of a fence.
                return None
            if version == ASK:
                return None
            if look is not None:
                look.done = True
            versions.append((shard, version))
        self._counters.local_calls += len(self._lives)
        versions.sort()
        return Version.of(versions)

    def _submit(
        self, slot: HostedShard, tick: Tick, arrays: Mapping[int, Array], check: bool
    ) -> int:
        """Have a shard apply a step on arrival."""
        step = Step(
            kind=tick.kind,
            items=[Item(position, 0, data) for position, data in arrays.items()],
            run=tick.run,
            rank=tick.rank,
            clock=tick.clock,
            tick=True,
            sequence=tick.sequence,
            generation=slot.shard.generation,
            weight=tick.weight,
            wait=NO_WAIT,
            check=check,
            floor=tick.sequence,
        )
        ticket = Ticket(step, owner=_nobody)
        if not slot.submit_now(ticket, PATIENCE_SECONDS):
            return ASK
        if isinstance(ticket.outcome, Ready):
            return ticket.version
        if ticket.outcome is None:
            slot.forget(ticket)
        return ASK

    def _may_look_later(self, arrays: Mapping[int, Array]) -> bool:
        """Look at all that does not go to the first shard; return whether it is fine."""
        (_, slot, _), *others = self._parts
        return slot.shard.segment.weights_nbytes >= PAST_NBYTES and all(
            finite(arrays[index][a:b], cache_dir=self._cache)
            for _, _, cuts in others
            for _, index, a, b in cuts
        )


_nobody = Countdown(1, lambda: None)


class PreparedSteps:
    """The prepared steps of one trainer.

    Parameters
    ----------
    session : Member
        The trainer's place in its run.
    """

    #: Sets of parameters that are kept, the latest.
    MOST = 8

    def __init__(self, session: Member) -> None:
        self._session = session
        self._known: dict[tuple[int, ...], PreparedStep] = {}
        #: Where the shards were when these were made ready.
        self._where = session.meta.where
        #: Read once: no step reads the configuration.
        self._cache = str(config.load().cache)

    def clear(self) -> None:
        """Forget all steps."""
        self._known.clear()

    def send(
        self,
        arrays: Mapping[int, Array],
        kind: str,
        weight: float,
        look: FiniteCheck | None = None,
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
            delivery = self._known[indices] = PreparedStep(
                session, indices, self._cache
            )
        if not delivery.is_possible:
            return None
        kind = kind if arrays else NOTHING
        return delivery.send(
            arrays,
            Tick(
                session.run, session.rank, session.clock, session.sequence, kind, weight
            ),
            look,
        )

"""Taking over shards whose worker died: what the directory asks of a host."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daskps import codecs
from daskps.cluster import words
from daskps.cluster.registry import WayClosed, owner_of
from daskps.cluster.rules import Rules
from daskps.cluster.slot import Slot
from daskps.cluster.upstream import loads
from daskps.errors import (
    IllegalStateError,
    ProtocolError,
    ShardBusyError,
    StoreClosedError,
)
from daskps.layout import Layout, counted
from daskps.shards.dense import Shard
from daskps.shards.gates import CLOSED, gate_of
from daskps.shards.segment import GENERATION, N_RANKS, PAGE_NBYTES, RUN, Segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host import ShardHost
    from daskps.cluster.memory import Block, Members

logger = logging.getLogger(__name__)
#: Name, bytes and nonce of shared memory.
Place = tuple[str, int, int]
#: How long another process that acts for the shard may take to release it.
LOCK_SECONDS = 2.0


class OwnerLivesError(Exception):
    """The worker is still dying, or was thought dead and is not."""


async def adopt(
    host: ShardHost,
    *,
    store: str,
    about: Mapping[str, Any],
    rows: Sequence[Sequence[Any]],
    rounds: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Take shards over, memory and all, from a worker that does not live.

    `about` is the store: its name, layout, rules and cluster.
    `rows` are shard, name, bytes and nonce of the memory, and the generation to be.
    `rounds` is the run in rounds that is to go on: its number, mailboxes as rows of
    the same kind, pickled function that reduces, and codec.
    Returns for each shard what the directory has to know of it, or "why" not, and
    whether the owner "lives".
    """
    found = list[dict[str, Any]]()
    name, goes_on = about["name"], _Rounds.of(rounds)

    def work() -> list[Slot]:
        taker, taken = _Taker(host, about, goes_on), list[Slot]()
        for shard, block, nbytes, nonce, generation in rows:
            # There already if an answer was lost on its way.
            slot = host.slots.get((store, shard))
            try:
                if slot is None:
                    slot = taker.take(shard, (block, nbytes, nonce), generation)
                    taken.append(slot)
                found.append(_row(slot))
            except (OwnerLivesError, ShardBusyError) as error:
                found.append({"shard": shard, "why": str(error), "lives": True})
            except (WayClosed, ProtocolError) as error:
                found.append({"shard": shard, "why": str(error), "lives": False})
        return taken

    slots = await host.in_thread(work)
    if store in host.dropped:
        for slot in slots:
            slot.close()
        raise StoreClosedError(f"store {name!r} was freed while it was adopted")
    for slot in slots:
        host.slots[store, slot.index] = slot
    if slots:
        where, n = host.worker.address, counted(len(slots), "shard")
        logger.info("%s adopted %s of store %r", where, n, name)
    return found


def _row(slot: Slot) -> dict[str, Any]:
    block = slot.block
    if block is None:
        raise IllegalStateError(f"shard {slot.index} is in private memory")
    return {
        "shard": slot.index,
        "name": block.name,
        "nbytes": block.nbytes,
        "nonce": block.nonce,
        "generation": slot.shard.generation,
        "run": int(slot.shard.segment.current.fixed[RUN]),
        "mailbox": None if slot.mailbox is None else _place(slot.mailbox[1]),
    }


def _found(members: Members, place: Place) -> Place:
    """Return where a block is now: an adopter may have died before it answered."""
    _, nbytes, nonce = place
    return members.find(*place), nbytes, nonce


def _place(block: Block) -> Place:
    return block.name, block.nbytes, block.nonce


@dataclass(frozen=True)
class _Rounds:
    """A run in rounds that goes on."""

    run: int
    mailboxes: Mapping[int, Place]
    reduce: Any
    codec: str
    #: Whether they are tasks of the graph.
    graph: bool = False

    @classmethod
    def of(cls, wire: Mapping[str, Any] | None) -> _Rounds:
        """Return what the directory says; of no run nothing is there."""
        if wire is None:
            return cls(0, {}, None, "")
        places = {row[0]: tuple(row[1:]) for row in wire["rows"]}
        reduce, codec, graph = loads(wire["reduce"]), wire["codec"], wire["graph"]
        return cls(wire["run"], places, reduce, codec, graph)

    def at(self, run: int, shard: int) -> tuple[Place | None, Any]:
        """Return where the mailboxes of a shard are, and how they are reduced.

        A run of the task graph needs none.
        """
        place = self.mailboxes.get(shard)
        if run != self.run or (place is None and not self.graph):
            raise WayClosed("nobody else can have it")
        return place, self.reduce


class _Taker:
    """Takes over shards of one store."""

    def __init__(
        self, host: ShardHost, about: Mapping[str, Any], rounds: _Rounds
    ) -> None:
        self._memory, self._where = host.memory(about["cluster"]), host.worker.address
        self._name, self._layout = about["name"], Layout.from_wire(about["layout"])
        self._rules, self._rounds = Rules(self._layout, about["rules"]), rounds
        self._is_warm = False

    @property
    def _registry(self) -> Members:
        if self._memory is None or self._memory.registry is None:
            raise WayClosed(f"worker {self._where} maps no shared memory")
        return self._memory.registry

    def take(self, shard: int, place: Place, generation: int) -> Slot:
        """Take a shard over under its lock; its generation rises before all else."""
        registry = self._registry
        place = _found(registry, place)
        # What is not there, or is another shard's, is found before it is touched.
        seen = registry.attach(*place)
        self._warm()
        slots = self._rules.slots
        segment = Segment(self._layout, shard, slots, seen.buffer, durable=True)
        if registry.lives(owner_of(place[0])):
            raise OwnerLivesError(f"its owner {owner_of(place[0]):x} lives")
        lock = seen.lock()
        lock.acquire(LOCK_SECONDS)
        try:
            if gate_of(segment) == CLOSED:
                raise WayClosed("its owner was about to free it")
            block = registry.adopt(*place)
            segment.words[GENERATION] = generation
            rules = self._rules
            mine = Shard(segment, rules, generation, cache_dir=rules.cache_dir)
            mailbox = self._open_round(mine, shard)
            mine.take_over()
        finally:
            lock.release()
        slot = Slot(self._name, self._layout, shard, mine, block=block)
        slot.mailbox = mailbox
        return slot

    def _warm(self) -> None:
        """Make the loops ready before anybody can push; most likely they are on disk."""
        if not self._is_warm:
            self._is_warm = True
            self._rules.warm(durable=True)
            if self._rounds.codec:
                words.warm(codecs.named(self._rounds.codec))

    def _open_round(self, mine: Shard, shard: int) -> tuple[int, Block] | None:
        """Take over what came for the open round; where it is gone, end the run."""
        if not mine.is_bsp:
            return None
        fixed, block = mine.segment.current.fixed, None
        run, n_ranks = int(fixed[RUN]), int(fixed[N_RANKS])
        try:
            place, reduce = self._rounds.at(run, shard)
            if place is None:
                mine.attach_rounds(run, n_ranks, reduce, None)
                return None
            block = self._registry.adopt(*_found(self._registry, place))
            buffer = block.buffer[PAGE_NBYTES:]
            mine.attach_rounds(run, n_ranks, reduce, buffer)
        except (WayClosed, ProtocolError) as error:
            if block is not None:
                block.free()
            mine.end_run(run, f"its open round went with a worker: {error}")
            return None
        return run, block


async def litter(host: ShardHost, *, cluster: str) -> list[str]:
    """Return the names of what dead workers left on this machine."""
    shared = host.memory(cluster)
    if shared is None or shared.registry is None:
        return []
    return shared.registry.litter()


async def sweep(host: ShardHost, *, cluster: str, names: Sequence[str]) -> None:
    """Remove what dead workers left and nobody needs."""
    shared = host.memory(cluster)
    if shared is None or shared.registry is None:
        return
    if swept := shared.registry.sweep(set(names)):
        where, n = host.worker.address, len(swept)
        logger.info("%s removed %d blocks of dead workers", where, n)


METHODS = (adopt, litter, sweep)

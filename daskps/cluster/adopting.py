"""Taking over shards whose worker died: what the directory asks of a host."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from daskps.cluster import memory
from daskps.cluster.locks import FileLock
from daskps.cluster.registry import WayClosed, owner_of
from daskps.cluster.rules import Rules
from daskps.cluster.slot import Slot
from daskps.consistency import BSP
from daskps.errors import (
    IllegalStateError,
    ProtocolError,
    ShardBusyError,
    StoreClosedError,
)
from daskps.layout import Layout
from daskps.shards.dense import Shard
from daskps.shards.gates import CLOSED, gate_of
from daskps.shards.segment import GENERATION, RUN, Segment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from daskps.cluster.host import ShardHost
    from daskps.cluster.registry import Registry

logger = logging.getLogger(__name__)
#: How long another process that acts for the shard may take to release it.
LOCK_SECONDS = 2.0


class OwnerLivesError(Exception):
    """The worker is still dying, or was thought dead and is not."""


async def adopt(
    host: ShardHost,
    *,
    store: str,
    name: str,
    layout: Mapping[str, Any],
    rules: bytes,
    cluster: str,
    rows: Sequence[Sequence[Any]],
) -> list[dict[str, Any]]:
    """Take shards over, memory and all, from a worker that does not live.

    `rows` are shard, name, bytes and nonce of the memory, and the generation to be.
    Returns for each shard what the directory has to know of it, or "why" not, and
    whether the owner "lives".
    """
    made, found = Layout.from_wire(layout), list[dict[str, Any]]()

    def work() -> list[Slot]:
        bound = Rules(made, rules)
        # Before anybody can push: compiled for the dead worker, most likely.
        bound.warm(durable=True)
        taker, taken = _Taker(host, cluster, made, bound, name=name), list[Slot]()
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
        where, n = host.worker.address, len(slots)
        logger.info("%s adopted %d shards of store %r", where, n, name)
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
    }


class _Taker:
    """Takes over shards of one store."""

    def __init__(
        self, host: ShardHost, cluster: str, layout: Layout, rules: Rules, *, name: str
    ) -> None:
        self._memory, self._where = host.memory(cluster), host.worker.address
        self._layout, self._rules, self._name = layout, rules, name

    @property
    def _registry(self) -> Registry:
        if self._memory is None or self._memory.registry is None:
            raise WayClosed(f"worker {self._where} maps no shared memory")
        return self._memory.registry

    def take(self, shard: int, place: tuple[str, int, int], generation: int) -> Slot:
        """Take a shard over under its lock; its generation rises before all else."""
        registry = self._registry
        # What is not there, or is another shard's, is found before it is touched.
        seen = memory.attach(registry, *place)
        slots = self._rules.slots
        segment = Segment(self._layout, shard, slots, seen.buffer, durable=True)
        if registry.lives(owner_of(place[0])):
            raise OwnerLivesError(f"its owner {owner_of(place[0]):x} lives")
        lock = FileLock(seen)
        lock.acquire(LOCK_SECONDS)
        try:
            if gate_of(segment) == CLOSED:
                raise WayClosed("its owner was about to free it")
            block = memory.adopt(registry, *place)
            segment.words[GENERATION] = generation
            mine = Shard(segment, self._rules, generation)
            _begin(mine)
        finally:
            lock.release()
        return Slot(self._name, self._layout, shard, mine, block=block)


def _begin(shard: Shard) -> None:
    """Begin where the dead owner left: no cut, nothing held back."""
    shard.set_gate()
    if isinstance(shard.policy, BSP):
        # What was accepted for the open round went with the owner.
        run = int(shard.segment.current.fixed[RUN])
        shard.end_run(run, "a worker died with contributions to its open round")


async def sweep(host: ShardHost, cluster: str, owners: Sequence[int]) -> int:
    """Remove what dead workers left and nobody adopted."""
    shared = host.memory(cluster)
    if shared is None or shared.registry is None:
        return 0
    swept = [n for owner in owners for n in shared.registry.sweep(owner)]
    if swept:
        where, n = host.worker.address, len(swept)
        logger.info("%s removed %d blocks of dead workers", where, n)
    return len(swept)


METHODS = (adopt, sweep)

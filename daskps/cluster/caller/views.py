"""Parameters as views of a shard's own memory: a read that copies nothing.

Under BSP a shard applies round t + 1 only with the contribution of every live trainer.
It writes that round to buffers that are not in force, and none before t + 2 to one that
was read at clock t. So what a trainer reads at its clock stays as it is until it has
ticked twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from daskps.cluster.caller.reads import wait
from daskps.shards.reads import NOT_YET, TrainerReads
from daskps.typing import Array

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from daskps.cluster.caller.member import Member

#: A look at the shard, which of its pieces, and that in both of its buffers.
Seen = tuple[TrainerReads, int, tuple[Array, Array]]


class Views:
    """The parameters that one trainer can see without a copy.

    Parameters
    ----------
    session : Member
        The trainer's place in its run.
    """

    def __init__(self, session: Member) -> None:
        self._session = session
        self._seen: dict[str, Seen | None] = {}
        self._where = session.meta.where

    def clear(self) -> None:
        """Forget all parameters."""
        self._seen.clear()

    def of(self, names: Iterable[str]) -> dict[str, Array]:
        """Return read-only views of those parameters of which that is possible.

        They must lie in one shard whose memory this process has, in a BSP run.
        """
        clock, found = self._session.clock, {}
        if self._where is not self._session.meta.where:
            self._where = self._session.meta.where
            self._seen.clear()
        for name in names:
            if name not in self._seen:
                self._seen[name] = self._look(name)
            seen = self._seen[name]
            if seen is None:
                continue
            glance, position, buffers = seen
            flip = glance.find_flip(clock)
            if flip == NOT_YET:
                flip = wait(glance, clock)
            if flip >= 0:
                found[name] = buffers[glance.side_of(flip, position)]
        return found

    def late(self, names: Iterable[str], seen: Container[str]) -> list[str]:
        """Return those that can be seen once their round is complete."""
        return [n for n in names if n not in seen and self._seen.get(n) is not None]

    def _look(self, name: str) -> Seen | None:
        session, meta = self._session, self._session.meta
        parameter = meta.layout[name]
        pieces = [p for p in meta.layout.pieces_of[parameter.index] if p.size]
        if not session.bsp or len(pieces) != 1:
            return None
        shard = pieces[0].shard
        serving = session.shards.ways.serving(meta.owners[shard])
        if serving is None or (meta.uid, shard) not in serving.slots:
            return None
        slot = serving.slots[meta.uid, shard]
        if slot.locks_reads:
            return None
        segment = slot.shard.segment
        position = meta.positions[shard, parameter.index]
        buffers = [w[position].reshape(parameter.shape) for w in segment.weights]
        for buffer in buffers:
            buffer.flags.writeable = False
        glance = TrainerReads(segment, session.run, session.rank)
        return glance, position, (buffers[0], buffers[1])

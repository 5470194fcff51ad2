"""All-reduces of one trainer: its arrays go to the hosts of the store, and come back.

Each host reduces a part of the elements, so that no node gets all of them. A host that
dies takes its part along: the next owner asks for the arrays again, and a trainer that
has got the result already has left it with the host of its own worker, where the other
trainers find it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daskps.cluster.host.collectives import Offered, WholeResult, check_alike
from daskps.cluster.host.host import HOSTS
from daskps.cluster.host.reductions import shard_of
from daskps.cluster.wire.packing import pack_array, unpack_array
from daskps.errors import ConsistencyError, DaskPSError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.shard_map import ShardMap
    from daskps.cluster.wire.deadline import Deadline
    from daskps.typing import Array

#: Bytes of the elements that one host reduces at least, where several could.
PART_NBYTES = 256 * 1024
#: How long one message waits at a host; less where results may be found elsewhere.
WAIT_SECONDS, LOST_SECONDS = 5.0, 0.5
#: How long the host of another trainer may take to send its result, and the number of
#: bytes for which it may take a second more.
PEER_SECONDS, PEER_NBYTES = 2.0, 20e6


class _Asked(NamedTuple):
    """One all-reduce of this trainer."""

    number: int
    #: Number of the first all-reduce that the trainer may repeat once it is started
    #: again.
    floor: int
    brought: Offered
    flats: Sequence[Array]
    parts: int

    def packed(self, part: int) -> list[Any]:
        """Return its arrays of a part, as they are sent."""
        found = []
        for index, flat in enumerate(self.flats):
            start, stop = self.brought.extent(index, part, self.parts)
            found.append(pack_array(flat[start:stop]))
        return found

    def cut(self, wholes: Sequence[Array]) -> dict[int, Sequence[Array]]:
        """Return whole arrays as parts."""
        extent, n = self.brought.extent, range(self.parts)
        return {
            part: [a[slice(*extent(i, part, self.parts))] for i, a in enumerate(wholes)]
            for part in n
        }


class CallCount:
    """Progress of one trainer in calls that all trainers make equally often."""

    def __init__(self) -> None:
        #: Number of the next call, of the first call at this clock, and the clock.
        self.number, self.first, self.clock = 0, 0, -1
        #: Number of the last call of the rank's trainers before this one.
        self._last = -1

    def resume(self, place: Sequence[int] | None, clock: int) -> None:
        """Go on where the directory says the rank's last trainer was at a clock."""
        if place is not None:
            at, first, self._last = place
            self.number = first if clock == at else self._last + 1
            self.first, self.clock = self.number, clock

    def at(self, clock: int) -> int:
        """Return the number of a call at a clock.

        The trainer repeats the calls that the rank's last trainer made at its clock at
        that clock only.
        """
        if clock > self.clock:
            self.number = max(self.number, self._last + 1)
            self.first, self.clock = self.number, clock
        return self.number


class Allreduces:
    """The all-reduces of one trainer.

    Parameters
    ----------
    link : Link
        The worker's way to the cluster.
    shards : ShardClient
        The way to the shards.
    run, rank : int
        The run and the trainer's number in it.
    bsp : bool
        Whether all trainers are at the same clock.
    """

    def __init__(
        self, link: Link, shards: ShardClient, run: int, rank: int, *, bsp: bool
    ) -> None:
        self._link, self._shards, self._bsp = link, shards, bsp
        self._run, self._rank = run, rank
        self._calls = CallCount()
        self._restartable = False
        #: Number of the first all-reduce that any trainer may ask for again.
        self._least = 0
        #: Other trainers may have results up to this number that no shard's host has.
        self._behind = -1
        #: Where the shards were when this trainer first sent the arrays of the current
        #: one.
        self._where: ShardMap | None = None

    def resume(self, told: dict[str, Any], clock: int) -> None:
        """Go on where the directory says the rank's last trainer was at a clock."""
        self._restartable, self._behind = True, told["latest"]
        self._calls.resume(told["allreduces"], clock)

    def reduce(
        self, brought: Offered, flats: Sequence[Array], clock: int, deadline: Deadline
    ) -> list[Array]:
        """Return the reduced arrays, flat.

        Raises
        ------
        ValueError
            If other trainers bring something else.
        ConsistencyError
            If a trainer has finished while it was in this.
        """
        self._calls.at(clock)
        nbytes = sum(flat.nbytes for flat in flats)
        n_shards = self._shards.meta.layout.n_shards
        parts = max(1, min(n_shards, -(-nbytes // PART_NBYTES)))
        try:
            found = self._link.run(
                lambda: self._reduced(brought, flats, parts, deadline)
            )
        except (ValueError, ConsistencyError):
            # All trainers get this error. A caller repeats an all-reduce that it gave
            # up, under the same number: the arrays count where they have arrived.
            self._next()
            raise
        outs = [np.empty_like(flat) for flat in flats]
        for part, arrays in found.items():
            for index, out in enumerate(outs):
                start, stop = brought.extent(index, part, parts)
                out[start:stop] = arrays[index]
        self._keep(brought, outs)
        self._next()
        return outs

    def _next(self) -> None:
        self._calls.number += 1
        self._where = None

    def _keep(self, brought: Offered, outs: Sequence[Array]) -> None:
        """Leave the result with a host, where other trainers find it."""
        host = HOSTS.get(self._link.node.address)
        if host is None:
            return
        flats = [out.copy() for out in outs]
        floor = self._least
        host.collectives.keep(
            self._run,
            self._calls.number,
            WholeResult(self._placed(brought), flats),
            floor,
        )

    def _placed(self, brought: Offered) -> Offered:
        """Say at which clock it is where all trainers are at the same one.

        A trainer that was started again may have left a call out: it would wait for
        ever for the others, and they for it.
        """
        if self._restartable and self._bsp:
            return brought._replace(clock=self._calls.clock)
        return brought

    async def _reduced(
        self, brought: Offered, flats: Sequence[Array], parts: int, deadline: Deadline
    ) -> dict[int, Sequence[Array]]:
        number = self._calls.number
        if number == 0 or self._restartable or number <= self._behind:
            told = await self._tell(deadline)
            self._restartable = told["restartable"]
        floor = self._calls.first if self._restartable else number
        brought = self._placed(brought)
        asked = _Asked(number, floor, brought, flats, parts)
        meta = self._shards.meta
        self._where = self._where or meta.where
        done: dict[int, Sequence[Array]] = {}
        #: By part whether its host has its arrays, as far as this trainer knows.
        sent = dict.fromkeys(range(parts), False)
        absent: list[Sequence[int]] = []
        while sent:
            lost = self._may_be_elsewhere
            if lost:
                # A host that waits for others has not got the result either.
                waits = any(sent.values())
                found = await self._found_elsewhere(asked, deadline, waits=waits)
                if found:
                    return found
            seconds = LOST_SECONDS if lost else WAIT_SECONDS
            plan = partial(self._plan, asked, sent, min(seconds, deadline.left()))
            for least, rows in await self._shards.control_each(
                "allreduce", plan, deadline
            ):
                self._least = least
                for part, state, without, packed in rows:
                    if state == "done":
                        del sent[part]
                        absent.append(without)
                        done[part] = self._unpacked(asked, packed)
                    else:
                        sent[part] = state == "waits"
        if any(absent) and self._may_be_elsewhere:
            # A trainer that is in none of the parts may have got the result before it
            # finished.
            found = await self._found_elsewhere(asked, deadline)
            if found:
                return found
        check_alike(absent)
        return done

    @property
    def _may_be_elsewhere(self) -> bool:
        """Whether a host may have lost a result that some trainers have got."""
        has_moved = self._where is not self._shards.meta.where
        return has_moved or self._calls.number <= self._behind

    def _plan(
        self, asked: _Asked, sent: dict[int, bool], seconds: float
    ) -> dict[str, dict[str, Any]]:
        """Return the questions to the hosts, by worker."""
        meta = self._shards.meta
        owners, n_shards = meta.where.owners, meta.layout.n_shards
        of: dict[str, list[tuple[int, list[Any] | None]]] = {}
        for part, is_there in sent.items():
            worker = owners[shard_of(part, asked.parts, n_shards)]
            packed = None if is_there else asked.packed(part)
            of.setdefault(worker, []).append((part, packed))
        about = asked.number, asked.floor, asked.parts, tuple(asked.brought)
        who = {"run": self._run, "rank": self._rank, "wait_seconds": seconds}
        return {w: {**who, "asked": about, "given": given} for w, given in of.items()}

    @staticmethod
    def _unpacked(asked: _Asked, packed: Sequence[Any]) -> list[Array]:
        return [
            unpack_array(data, dtype)
            for data, (_, _, dtype) in zip(packed, asked.brought.arrays, strict=True)
        ]

    async def _tell(self, deadline: Deadline) -> dict[str, Any]:
        told: dict[str, Any] = await self._link.within(
            lambda: self._link.directory(
                "collects",
                run=self._run,
                rank=self._rank,
                worker=self._link.node.address,
                clock=self._calls.clock,
                number=self._calls.number,
            ),
            deadline.remaining(),
            deadline.what,
        )
        return told

    async def _found_elsewhere(
        self, asked: _Asked, deadline: Deadline, *, waits: bool = False
    ) -> dict[int, Sequence[Array]] | None:
        """Return the result where another trainer has left it with its host.

        Hosts that have gone, or do not answer, are passed over.

        Raises
        ------
        ConsistencyError
            Where the shards' hosts wait for trainers that had the result and are past
            it, and nobody has the result any more.
        """
        told = await self._tell(deadline)
        is_lost: bool = waits and told["is_past"]
        about = {
            "store": self._shards.meta.uid,
            "run": self._run,
            "number": asked.number,
            "offered": tuple(asked.brought),
        }
        seconds = PEER_SECONDS + sum(f.nbytes for f in asked.flats) / PEER_NBYTES
        for worker in told["workers"]:
            if self._shards.ways.is_gone(worker):
                continue
            try:
                ask = partial(self._link.control, worker, "reduced", **about)
                left = min(deadline.left(), seconds)
                packed = await self._link.within(ask, left, deadline.what)
            except (OSError, DaskPSError):
                is_lost = False
                continue
            if packed is not None:
                return asked.cut(self._unpacked(asked, packed))
        if is_lost:
            raise ConsistencyError(
                f"allreduce {asked.number} of run {self._run} went with the workers that "
                f"had its result, and trainers that had got it are past it: trainer "
                f"{self._rank} cannot go on from clock {self._calls.clock}. Start the run "
                f"again; with trainers on more workers more of them keep such results"
            )
        return None

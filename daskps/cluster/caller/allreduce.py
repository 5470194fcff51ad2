"""All-reduces of one trainer: its arrays go to the hosts of the store, and come back.

Each host reduces a part of the elements, so that no node gets all of them. A host that
dies takes its part along: the next owner asks for the arrays again, and a trainer that
has got the result already has left it with the host of its own worker, where the other
trainers find it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from daskps.cluster.host.collectives import Offered, WholeResult, check_alike
from daskps.cluster.host.node import HOSTS
from daskps.cluster.host.reductions import shard_of
from daskps.cluster.protocol.packing import pack_array, unpack_array
from daskps.errors import ConsistencyError, DaskPSError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from daskps.cluster.caller.client import ShardClient
    from daskps.cluster.caller.link import Link
    from daskps.cluster.caller.shard_map import ShardMap
    from daskps.cluster.protocol.deadline import Deadline
    from daskps.typing import Array

#: Bytes of the elements that one host reduces at least, where several could.
_PART_NBYTES = 256 * 1024
#: How long one message waits at a host; less where results may be found elsewhere.
WAIT_SECONDS, LOST_SECONDS = 5.0, 0.5
#: How long the host of another trainer may take to send its result, and the number of
#: bytes for which it may take a second more.
PEER_SECONDS, PEER_NBYTES = 2.0, 20e6


class CallCount:
    """Progress of one trainer in calls that all trainers make equally often."""

    def __init__(self) -> None:
        #: Number of the next call, of the first call at this clock, and the clock.
        self.number, self.first, self.clock = 0, 0, -1
        #: The first call at the clock before, whose step may have to be made again.
        self.before = 0
        #: Of the rank's trainers before this one the number of the last call, and by
        #: clock those of the first ones.
        self._last, self._firsts = -1, dict[int, int]()

    def resume(self, place: Sequence[int] | None, clock: int) -> None:
        """Go on where the directory says the rank's last trainer was, at a clock.

        That is an earlier clock where the last step went with the owner of a shard.
        """
        if place is not None:
            at, first, self._last, before, first_before = place
            self._firsts = {before: first_before, at: first}
            self.number = self.first = self._from(clock)
            self.before, self.clock = self._from(clock - 1), clock

    def at(self, clock: int) -> int:
        """Return the number of a call at a clock.

        The trainer repeats the calls that the rank's last trainer made at its clock at
        that clock only.
        """
        if clock > self.clock:
            self.number = max(self.number, self._from(clock))
            self.before, self.first, self.clock = self.first, self.number, clock
        return self.number

    def _from(self, clock: int) -> int:
        """Return the number of the rank's first call at a clock or after it."""
        made = (first for at, first in self._firsts.items() if at >= clock)
        return min(made, default=self._last + 1)


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
        self,
        brought: Offered,
        flats: Sequence[Array],
        clock: int,
        deadline: Deadline,
        *,
        wait: Callable[[Awaitable[list[Array]]], Awaitable[list[Array]]],
    ) -> list[Array]:
        """Return the reduced arrays, flat, once `wait` has them.

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
        parts = max(1, min(n_shards, -(-nbytes // _PART_NBYTES)))
        try:
            outs = self._link.run(
                lambda: wait(self._reduced(brought, flats, parts, deadline))
            )
        except (ValueError, ConsistencyError):
            # All trainers get this error. A caller repeats an all-reduce that it gave
            # up, under the same number: the arrays count where they have arrived.
            self._next()
            raise
        if (host := HOSTS.get(self._link.node.address)) is not None:
            # Other trainers find it there.
            kept = WholeResult(self._placed(brought), [out.copy() for out in outs])
            host.collectives.keep(self._run, self._calls.number, kept, self._least)
        self._next()
        return outs

    def _next(self) -> None:
        self._calls.number += 1
        self._where = None

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
    ) -> list[Array]:
        number = self._calls.number
        if number == 0 or self._restartable or number <= self._behind:
            told = await self._tell(deadline)
            self._restartable = told["restartable"]
        goes_back = self._bsp and self._shards.meta.copies > 1
        floor = self._calls.before if goes_back else self._calls.first
        if not self._restartable:
            floor = number
        brought = self._placed(brought)
        self._where = self._where or self._shards.meta.where
        outs = [np.empty_like(flat) for flat in flats]
        about = number, floor, parts, tuple(brought)
        #: By part whether its host has its arrays, as far as this trainer knows.
        sent = dict.fromkeys(range(parts), False)
        absent: list[Sequence[int]] = []
        while sent:
            lost = self._may_be_elsewhere
            # A host that waits for others has not got the result either.
            waits = any(sent.values())
            if lost and await self._found_elsewhere(
                brought, outs, deadline, waits=waits
            ):
                return outs
            seconds = min(LOST_SECONDS if lost else WAIT_SECONDS, deadline.left())
            who = {"run": self._run, "rank": self._rank, "wait_seconds": seconds}
            plan = partial(self._plan, brought, flats, sent, asked=about, **who)
            for least, rows in await self._shards.control_each(
                "allreduce", plan, deadline
            ):
                self._least = least
                for part, state, without, packed in rows:
                    if state != "done":
                        sent[part] = state == "waits"
                        continue
                    del sent[part]
                    absent.append(without)
                    for index, out in enumerate(outs):
                        _fill(out[_part(brought, index, part, parts)], packed[index])
        # A trainer that is in none of the parts may have got the result before it
        # finished.
        left = any(absent) and self._may_be_elsewhere
        if not left or not await self._found_elsewhere(brought, outs, deadline):
            check_alike(absent)
        return outs

    @property
    def _may_be_elsewhere(self) -> bool:
        """Whether a host may have lost a result that some trainers have got."""
        has_moved = self._where is not self._shards.meta.where
        return has_moved or self._calls.number <= self._behind

    def _plan(
        self,
        brought: Offered,
        flats: Sequence[Array],
        sent: dict[int, bool],
        **about: Any,
    ) -> dict[str, dict[str, Any]]:
        """Return the questions to the hosts, by worker."""
        meta, parts = self._shards.meta, about["asked"][2]
        plan: dict[str, dict[str, Any]] = {}
        for part, is_there in sent.items():
            worker = meta.owners[shard_of(part, parts, meta.layout.n_shards)]
            packed = None
            if not is_there:
                packed = [
                    pack_array(flat[_part(brought, index, part, parts)])
                    for index, flat in enumerate(flats)
                ]
            asked = plan.setdefault(worker, {**about, "given": []})
            asked["given"].append((part, packed))
        return plan

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
        self,
        brought: Offered,
        outs: Sequence[Array],
        deadline: Deadline,
        *,
        waits: bool = False,
    ) -> bool:
        """Get the result where another trainer has left it with its host.

        Hosts that have gone, or do not answer, are passed over.

        Raises
        ------
        ConsistencyError
            Where the shards' hosts wait for trainers that had the result and are past
            it, and nobody has the result any more.
        """
        told, number = await self._tell(deadline), self._calls.number
        is_lost: bool = waits and told["is_past"]
        about = {
            "store": self._shards.meta.uid,
            "run": self._run,
            "number": number,
            "offered": tuple(brought),
        }
        seconds = PEER_SECONDS + sum(out.nbytes for out in outs) / PEER_NBYTES
        for worker in told["workers"]:
            if self._shards.carriers.is_gone(worker):
                continue
            try:
                ask = partial(self._link.control, worker, "reduced", **about)
                left = min(deadline.left(), seconds)
                packed = await self._link.within(ask, left, deadline.what)
            except (OSError, DaskPSError):
                is_lost = False
                continue
            if packed is not None:
                for out, data in zip(outs, packed, strict=True):
                    _fill(out, data)
                return True
        if is_lost:
            raise ConsistencyError(
                f"allreduce {number} of run {self._run} went with the workers that "
                f"had its result, and trainers that had got it are past it: trainer "
                f"{self._rank} cannot go on from clock {self._calls.clock}. Start the run "
                f"again; with trainers on more workers more of them keep such results"
            )
        return False


def _part(brought: Offered, index: int, part: int, parts: int) -> slice:
    """Return the elements of an array that a part has."""
    return slice(*brought.extent(index, part, parts))


def _fill(out: Array, packed: Any) -> None:
    out[:] = unpack_array(packed, out.dtype.name)

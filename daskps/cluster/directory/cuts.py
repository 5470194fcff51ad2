"""Cuts as the directory leads them: through all shards of a store, one at a time.

A host is asked four times: for memory, to hold new steps and report, to let through
what it lacks and copy, and, once Dask has the copies, to forget them. Shards release
on their own as soon as they have copied. Where anything comes in between (a run that
begins, a message that is lost) all are released and the cut starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.entry import insist, remember
from daskps.cluster.protocol.deadline import silence
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.reports import unpack_report
from daskps.errors import (
    ConsistencyError,
    ProtocolError,
    StaleGenerationError,
)
from daskps.layout.arrays import Layout
from daskps.layout.chunks import WHOLE, shards_of
from daskps.shards.cuts.cut import Order, agree

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from daskps.cluster.directory.entry import Hosts, StoreEntry

logger = logging.getLogger(__name__)
#: Longest that pushes wait for one attempt; then it starts again, and they go on.
HOLD_SECONDS = 5.0
#: To which comes the time to copy a host's shards, at the very worst.
_COPY_NBYTES_PER_SECOND = 256 * 2**20
#: How much later a host releases its shards by itself.
_LEASE_SECONDS = 3.0
#: How long a step may be in coming before the directory asks whether its producer
#: has ended: what a task pushed last may still be on its way when the task is over.
_GRACE_SECONDS = 0.2
#: Between two attempts.
_PAUSE_SECONDS = 0.01
#: Between two tries to tell a host that a cut is over.
DROP_SECONDS = 0.2
#: How long a release is waited for; a silent host hears of it when it wakes.
_RELEASE_SECONDS = 0.5


@dataclass(eq=False, slots=True)
class _OpenCut:
    """A cut in progress, or one of which the hosts still have copies."""

    name: str
    entry: StoreEntry
    #: Client or worker that asked for it.
    owner: tuple[str, str]
    #: Those it goes through.
    shards: Sequence[int]
    #: The parameter, None for all.
    index: int | None
    #: Whether shards are held until it is dropped, and not copied; then it has the
    #: store's turn as long.
    hold: bool = False
    has_turn: bool = False
    #: Whether a checkpoint was made of it.
    is_saved: bool = False
    attempt: int = 0
    #: For callers that it takes too long: "" for the hosts that are silent.
    waits_for: str = "another snapshot of the store to end"
    silent: set[str] = field(default_factory=set)
    #: The hosts it has asked: shards may have left one since, and it goes on.
    asked: set[str] = field(default_factory=set)
    work: asyncio.Future[dict[str, Any]] = field(init=False)


class Cuts:
    """The cuts of all stores."""

    def __init__(
        self,
        hosts: Hosts,
        entry: Callable[[str], StoreEntry],
        ended: Callable[[Sequence[int]], list[int]],
    ) -> None:
        self._hosts = hosts
        self._entry = entry
        self._ended = ended
        self._claims: dict[str, _OpenCut] = {}
        #: Cuts that were dropped lately, of which the hosts take no message any more.
        self._over: dict[str, None] = {}

    # -- messages ------------------------------------------------------------

    @DIRECTORY.handles("cut")
    async def on_cut(
        self,
        uid: str,
        owner: tuple[str, str],
        seconds: float | None,
        *,
        cut: str,
        index: int | None,
        hold: bool = False,
    ) -> dict[str, Any]:
        """Copy a cut on the hosts, or `hold` their shards; `drop_cut` ends that.

        Returns "versions", with the number of rows of each unbounded table, "where" the
        shards are, and "trained_by", the run that has trained the store last; or after
        `seconds` "waited_for".
        """
        entry = self._entry(uid)
        shards = shards_of(Layout.from_wire(entry.layout), index)
        kind, name = owner
        known = cut in self._claims or cut in self._over
        if known or not entry.ready or not shards:
            raise ProtocolError(
                f"cut {cut!r:.60} of store {entry.name!r}: it was taken before, or there "
                f"is nothing of parameter {index} to copy"
            )
        if index == WHOLE:
            self._check_idle(entry)
        begun = _OpenCut(cut, entry, (kind, name), shards, index, hold)
        work = begun.work = asyncio.ensure_future(self._within(begun, seconds))
        self._claims[cut] = begun
        try:
            await asyncio.wait({work})
            if work.cancelled():
                # Says so where the store is gone; else nobody waits for an answer.
                self._entry(uid)
                return {"waited_for": "nothing, the caller has gone"}
            found = work.result()
            if "waited_for" in found:
                self._drop(cut)
            return found
        except BaseException:
            self._drop(cut)
            raise

    def _check_idle(self, entry: StoreEntry) -> None:
        """Refuse a second save: hosts have room for one copy of everything, if at all."""
        for other in self._claims.values():
            if other.entry is entry and other.index == WHOLE:
                raise ConsistencyError(
                    f"store {entry.name!r} is being saved by {' '.join(other.owner)}, "
                    f"or resharded, which is not done yet; nothing was done now, try "
                    f"again later"
                )

    @DIRECTORY.handles("drop_cut")
    def on_drop_cut(
        self, cut: str, checkpoint: str = "", nbytes: int = 0, held: Sequence[str] = ()
    ) -> None:
        """Forget a cut, and tell of a checkpoint that was written of it; twice is fine.

        `held` are hosts without room for a copy: pushes to these had to wait.
        """
        if checkpoint and (begun := self._claims.get(cut)) is not None:
            about = {"checkpoint": checkpoint, "nbytes": nbytes, "held": list(held)}
            begun.is_saved, begun.entry.saved = True, (time.time(), nbytes)
            self._hosts.tell("store-saved", begun.entry, **about)
        self._drop(cut)

    def held(self, cut: str) -> Sequence[tuple[int, ...]]:
        """Return shard, version and more of all shards that a cut holds.

        Raises
        ------
        ConsistencyError
            If it is over.
        """
        if (begun := self._claims.get(cut)) is None or not begun.has_turn:
            raise ConsistencyError(f"cut {cut!r:.60} is over, and holds no shard")
        found: Sequence[tuple[int, ...]] = begun.work.result()["versions"]
        return found

    # -- what the cluster tells us -------------------------------------------

    def left(self, kind: str, name: str) -> None:
        """Forget the cuts of a client or worker that left."""
        for cut in [c for c, of in self._claims.items() if of.owner == (kind, name)]:
            self._drop(cut)

    def store_gone(self, entry: StoreEntry) -> None:
        """Forget the cuts of a store that is gone."""
        for cut in [c for c, of in self._claims.items() if of.entry is entry]:
            self._drop(cut)

    def _drop(self, cut: str) -> None:
        remember(self._over, cut, None)
        if (begun := self._claims.pop(cut, None)) is not None:
            begun.work.cancel()
            if begun.index == WHOLE and not (begun.hold or begun.is_saved):
                begun.entry.failed_saves += 1
                by = " ".join(begun.owner)
                self._hosts.tell("save-failed", begun.entry, by=by)
            if begun.has_turn:
                begun.entry.cutting.release()
                if begun.entry.lease.cut == cut:
                    begun.entry.lease.end()
            for worker in sorted(begun.asked):
                # Else the host keeps copies, or holds shards, for good.
                at = self._hosts, worker, "drop_cut", DROP_SECONDS
                dropping = insist(*at, store=begun.entry.uid, cut=cut)
                self._hosts.spawn(dropping)

    # -- one cut -------------------------------------------------------------

    async def _within(self, cut: _OpenCut, seconds: float | None) -> dict[str, Any]:
        entry, scope = cut.entry, asyncio.timeout(seconds)
        try:
            async with scope, contextlib.AsyncExitStack() as turn:
                await turn.enter_async_context(entry.cutting)
                versions = await self._until_done(cut)
                if cut.hold:
                    turn.pop_all()
                    cut.has_turn = True
                where, trained_by = entry.where(), entry.trained_by
                return {"versions": versions, "where": where, "trained_by": trained_by}
        except TimeoutError:
            if not scope.expired():
                raise
            if (away := entry.first_away) is None:
                silent = silence(cut.silent) or "its hosts to copy their shards"
                return {"waited_for": cut.waits_for or silent}
            shard, worker, why = away
            return {"waited_for": f"shard {shard} at worker {worker}, which {why}"}

    async def _until_done(self, cut: _OpenCut) -> list[tuple[int, ...]]:
        entry, cut.waits_for = cut.entry, ""
        while True:
            # Also what has come since, of unbounded rows.
            hold = (
                HOLD_SECONDS
                + max(entry.nbytes.values(), default=0) / _COPY_NBYTES_PER_SECOND
            )
            await entry.wait_for_owners()
            self._entry(entry.uid)
            entry.check_found(cut.shards)
            cut.attempt += 1
            try:
                async with asyncio.timeout(hold):
                    about: dict[str, Any] = {"index": cut.index, "hold": cut.hold}
                    await self._everywhere(cut, "prepare_cut", **about)
                async with asyncio.timeout(hold):
                    return await self._attempt(cut, hold)
            except (OSError, ConsistencyError) as error:
                # An OSError is a host that cannot be reached, or is too slow.
                if not isinstance(error, TimeoutError):
                    cut.waits_for = f"a cut that nothing disturbs ({error})"
                logger.info("daskps: a cut of %s starts again: %r", entry.name, error)
            work = self._everywhere(cut, "drop_cut", attempt=cut.attempt)
            await asyncio.wait({self._hosts.spawn(work)}, timeout=_RELEASE_SECONDS)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _attempt(self, cut: _OpenCut, hold: float) -> list[tuple[int, ...]]:
        entry, at = cut.entry, cut.entry.owners
        about = {"index": cut.index, "attempt": cut.attempt}
        lease = {"lease_seconds": hold + _LEASE_SECONDS}
        rows = await self._everywhere(cut, "begin_cut", **about, **lease)
        reports = [unpack_report(row) for of in rows for row in of]
        if {r.shard for r in reports} != set(cut.shards):
            raise StaleGenerationError("some shards of the cut are not at their hosts")
        order = _order(agree(reports))
        missing = order["missing"]
        cut.waits_for = _describe(missing)
        work = self._everywhere(cut, "fill_cut", **about, order=order)
        copying = asyncio.ensure_future(work)
        owners = sorted({owner for _, owner, _ in missing if owner >= 0})
        try:
            while not (await asyncio.wait({copying}, timeout=_GRACE_SECONDS))[0]:
                if gone := self._ended(owners):
                    marked_lost = {"producers": gone, "attempt": cut.attempt}
                    await self._everywhere(cut, "mark_lost", **marked_lost)
                    owners = [owner for owner in owners if owner not in gone]
        finally:
            copying.cancel()
        found = sorted(tuple(row) for of in copying.result() for row in of)
        is_all = [i for i, *_ in found] == cut.shards and entry.owners == at
        if not is_all or entry.without_owner & {*cut.shards}:
            # Others were asked to copy than had begun, or one has gone with its copies.
            raise StaleGenerationError("some shards of the cut have left their hosts")
        return found

    def _everywhere(
        self, cut: _OpenCut, method: str, **kwargs: Any
    ) -> Awaitable[list[Any]]:
        cut.silent = set()
        cut.asked.update(cut.entry.hosts)
        return self._hosts.everywhere(
            cut.entry, method, silent=cut.silent, cut=cut.name, **kwargs
        )


def _order(orders: Mapping[int, Order]) -> dict[str, Any]:
    """Return the orders of all shards as one message: most of them are empty."""
    missing = [(i, o, s) for i, order in orders.items() for o, s in order.missing]
    first = next(iter(orders.values()), Order())
    return {"missing": missing, "run": first.run, "rounds": first.rounds}


def _describe(missing: Sequence[tuple[int, int, int]]) -> str:
    if not missing:
        return ""
    shard, owner, sequence = missing[0]
    whose = f"trainer {-1 - owner}" if owner < 0 else f"producer {owner}"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"push {sequence} of {whose} to reach shard {shard}{more}"

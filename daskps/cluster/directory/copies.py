"""Second copies of shards: where they are, and what follows where one goes.

The directory alone says which copy an owner waits for: it strikes one off before the
owner goes on without it, so of a shard without an owner the copy that it names has all
that was ever answered. :mod:`daskps.cluster.host.moving` has the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from distributed.comm.addressing import get_address_host
from distributed.core import Status

from daskps.cluster.directory.entry import Copy, LeftBy, insist
from daskps.cluster.directory.move import time_now
from daskps.cluster.directory.placement import eligible, find_room, greet, held_bytes
from daskps.cluster.directory.run import rounds_error
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.cluster.protocol.reports import Sight
from daskps.errors import (
    ConsistencyError,
    DaskPSError,
    LayoutError,
    NotEnoughWorkersError,
    ProtocolError,
    ShardBusyError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from daskps.cluster.directory.entry import StoreEntry
    from daskps.cluster.directory.move import ShardMoves

logger = logging.getLogger(__name__)
#: Between two tries to make a copy, or to tell a host of one.
_AGAIN_SECONDS, _PAUSE_SECONDS = 1.0, 0.2
#: After how many of these it is said that a store lacks copies.
_SAY_TRIES = 5
#: How long a copy may take to become the owner, and a former owner to hear of it.
_OWN_SECONDS, _TELL_SECONDS = 5.0, 1.0
#: How long a copy waits for a former owner to hear of it, which has died most likely.
_DEPOSE_SECONDS = 0.3
#: How often a copy is asked to, where no answer comes; and how often its owner may tell
#: that it is silent.
_MOST_TRIES = 3


@dataclass(eq=False)
class _Promotion:
    """A copy that is to be the owner of a shard that a worker has left."""

    copy: Copy
    worker: str
    #: Does what follows where it cannot, for the last one that wanted it.
    otherwise: Callable[[], Any] = bool


class SecondCopies:
    """The second copies of all stores that have any.

    Parameters
    ----------
    moves : ShardMoves
        Knows the workers, the hosts and the stores.
    """

    def __init__(self, moves: ShardMoves) -> None:
        self._moves, self._hosts, self._stores = moves, moves.hosts, moves.stores
        moves.standby = self
        #: Stores whose copies are being made.
        self._making = set[str]()
        #: By store and shard the copy that is about to take over.
        self._taking: dict[tuple[str, int], _Promotion] = {}
        #: Shards whose owners were silent, until they have one again.
        self._silent: set[tuple[str, int]] = set()
        #: Workers that were silent, until they answer: no copy is made there.
        self._hung = set[str]()
        #: Has a worker that has stopped a shard go on, see `Drains.take_back`.
        self.take_back: Callable[[StoreEntry, int, str], Any]

    @DIRECTORY.handles("copies")
    async def on_copies(
        self, uid: str, segments: Sequence[tuple[int, str, int, int]]
    ) -> None:
        """Make the copies of a new store; its answers wait for them from then on."""
        entry = self._stores[uid]
        entry.segments = segments
        try:
            await self._make_all(entry)
        except (OSError, ConsistencyError):
            entry.check_found(range(len(entry.owners)))
            raise

    @DIRECTORY.handles("copy-ended")
    def on_ended(self, store: str, shard: int, move: str) -> None:
        """Hear that a copy could not follow its shard, and make another one."""
        if (entry := self._stores.get(store)) is not None:
            copy = entry.copies.get(shard)
            if copy is not None and copy.move == move:
                self.strike(entry, shard, "could not follow")

    @DIRECTORY.handles("copy-silent")
    async def on_silent(
        self, store: str, shard: int, move: str, times: int = 0
    ) -> None:
        """Hear, so many times in a row, that a copy is silent; with 0 that its owner is.

        One that answers this scheduler is waited for, but a copy not for ever: the two
        may be cut from each other. Else the other one goes on.
        """
        owner = not times
        entry = self._stores.get(store)
        copy = None if entry is None else entry.copies.get(shard)
        if entry is None or copy is None or copy.move != move:
            return
        worker = entry.owners[shard] if owner else copy.worker
        with contextlib.suppress(OSError):
            await self._look(entry, worker, [], _TELL_SECONDS)
            # One that never could follow is not waited for.
            if owner or (copy.counts and times < _MOST_TRIES):
                return
        is_same = entry.copies.get(shard) is copy and self._hosts.has_worker(worker)
        if is_same and shard not in entry.without_owner:
            if not owner:
                self.strike(entry, shard, "is silent")
            elif copy.counts:
                goes_on = partial(self._goes_on, move)
                self._silent.add((entry.uid, shard))
                self.promote(entry, [shard], LeftBy(worker, "is silent"), goes_on)

    def _goes_on(
        self, move: str, entry: StoreEntry, shards: list[int], left_by: LeftBy
    ) -> None:
        """Have the owner of shards go on whose copy cannot take over, if it lives."""
        entry.set_away(shards, f"{left_by.reason}, and its copy cannot take over")
        for shard in shards:
            self._hosts.spawn(self.take_back(entry, shard, move))

    def worker_came(self) -> None:
        """Hear that a worker came, which has no host yet."""
        self._hosts.spawn(self._move_apart(_AGAIN_SECONDS))

    async def _move_apart(self, seconds: float = 0.0) -> None:
        """Have copies made elsewhere that are where their owner is, one after the other."""
        await asyncio.sleep(seconds)
        for entry in [*self._stores.values()]:
            for shard, copy in [*entry.copies.items()]:
                if copy.is_together and copy.counts:
                    try:
                        await self._try_apart(entry, shard, copy)
                    except Exception as error:  # noqa: BLE001 - as in `_keep_making`
                        text = "shard %d of %r has no copy on another machine: %r"
                        logger.info(text, shard, entry.name, error)

    async def _try_apart(self, entry: StoreEntry, shard: int, copy: Copy) -> None:
        new = await self._target(entry, shard, entry.owners[shard])
        is_same = entry.copies.get(shard) is copy and shard not in entry.without_owner
        if is_same and not new.is_together:
            await asyncio.wait({self.strike(entry, shard, "moves to another machine")})
            await self._make_all(entry)

    def worker_left(self, worker: str) -> None:
        """Hear that a worker has left, maybe with copies."""
        for entry in self._stores.values():
            for shard, copy in [*entry.copies.items()]:
                if copy.worker == worker:
                    self.strike(entry, shard, "left")

    async def drained(self, entry: StoreEntry, worker: str) -> None:
        """Have copies made elsewhere that are on a worker, where others can have them."""
        others = {w.address for w in self._moves.scheduler.running} - entry.drained
        struck = [
            self.strike(entry, shard, "is on a worker that is drained")
            for shard, copy in [*entry.copies.items()]
            if copy.worker == worker and others - {entry.owners[shard]}
        ]
        await asyncio.gather(*struck)

    # -- made ----------------------------------------------------------------------

    def look(self, entry: StoreEntry) -> None:
        """Make the copies that a store lacks, as soon as that can be."""
        if entry.n_copies > 1 and entry.ready and entry.uid not in self._making:
            self._making.add(entry.uid)
            self._hosts.spawn(self._keep_making(entry))

    async def _keep_making(self, entry: StoreEntry) -> None:
        tries = 0
        try:
            while entry.uid in self._stores and len(entry.copies) < len(entry.owners):
                tries += 1
                try:
                    await self._make_all(entry)
                except Exception as error:  # noqa: BLE001 - also of a rule of the user's
                    level = logging.WARNING if tries == _SAY_TRIES else logging.DEBUG
                    text = "daskps: store %r has yet to get second copies: %s"
                    logger.log(level, text, entry.name, error)
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            self._making.discard(entry.uid)

    async def _make_all(self, entry: StoreEntry) -> None:
        """Make the copies that a store lacks of shards with an owner.

        Raises
        ------
        Exception
            The first that kept a shard from its copy, once the others have theirs.
        """
        began = time_now()
        made, errors = dict[int, bool](), list[Exception]()
        for shard, owner in enumerate(entry.owners):
            try:
                made |= await self._make_one(entry, shard, owner)
            except Exception as error:
                if not entry.ready:
                    raise
                # Others may have theirs; the scheduler has more to do than to look for it.
                errors.append(error)
                await asyncio.sleep(0)
        if made:
            nbytes, seconds = sum(entry.sizes[i] for i in made), time_now() - began
            about = {"shards": [*made], "seconds": seconds, "nbytes": nbytes}
            self._hosts.tell("copies-made", entry, **about)
        if together := [shard for shard, is_together in made.items() if is_together]:
            self._hosts.tell("copies-together", entry, shards=together)
        if errors:
            raise errors[0]

    async def _make_one(
        self, entry: StoreEntry, shard: int, owner: str
    ) -> dict[int, bool]:
        """Make the copy that a shard lacks; return whether it is on its owner's machine.

        Nothing where the shard has one, or no owner that could send it.
        """

        def lacks() -> bool:
            is_owned = entry.owners[shard] == owner and shard not in entry.without_owner
            return entry.uid in self._stores and is_owned and shard not in entry.copies

        if lacks():
            copy = await self._target(entry, shard, owner)
            async with self._moves.turn(entry, owner):
                if lacks():
                    await self._make(entry, shard, owner, copy)
                    return {shard: copy.is_together}
        return {}

    async def _target(self, entry: StoreEntry, shard: int, owner: str) -> Copy:
        """Return the copy of a shard that is to be made, on a worker with room for it.

        On the owner's machine, by the addresses of both or as the worker finds the
        owner's memory, only where no worker of another one has room that is not drained.
        """
        others = self._others(entry, shard, owner)
        near = {w for w in others if get_address_host(w) == get_address_host(owner)}
        apart = {w: others[w] for w in others if w not in near | entry.drained}
        servers = eligible(self._moves.scheduler, entry.asked_servers)
        rows = [row for row in entry.segments if row[0] == shard]
        while True:
            may, held = apart or others, held_bytes(self._stores.values())
            try:
                worker = find_room(entry, [shard], held, may, servers=servers)[shard]
            except LayoutError:
                if not apart:
                    raise
                apart.clear()
                continue
            try:
                found = await self._look(entry, worker, rows, _OWN_SECONDS)
                await greet(self._hosts, worker, _OWN_SECONDS)
            except (OSError, ProtocolError) as error:
                del others[worker]
                if not others and isinstance(error, ProtocolError):
                    raise
            else:
                if not apart or not any(of["sight"] == Sight.FOUND for of in found):
                    return Copy(worker, uuid.uuid4().hex, entry.sizes[shard], not apart)
            apart.pop(worker, None)

    def _others(self, entry: StoreEntry, shard: int, owner: str) -> dict[str, Any]:
        """Return the workers that may have a copy of a shard, or refuse."""
        workers, no = self._moves.scheduler.workers, self._hung | self._hosts.foreign
        may = {w: s for w, s in workers.items() if s.status == Status.running}
        if others := {w: may[w] for w in may if w not in {owner, *no}}:
            return others
        raise NotEnoughWorkersError(
            f"no worker but {owner} can have a second copy of shard {shard} of store "
            f"{entry.name!r}; start one of the same daskps, or create it with copies=1"
        )

    async def _look(
        self, entry: StoreEntry, worker: str, rows: list[Any], seconds: float
    ) -> Any:
        """Ask a worker which of these shards' memory it finds.

        One that does not answer for so long gets no copy until it does.
        """
        about = {"cluster": entry.cluster, "rows": rows}
        try:
            asked = self._hosts.control(worker, "look", **about)
            return await asyncio.wait_for(asked, seconds)
        except OSError:
            self._pass_over(worker)
            raise

    def _pass_over(self, worker: str) -> None:
        if worker not in self._hung:
            self._hung.add(worker)
            self._hosts.spawn(self._wait_for(worker))

    async def _wait_for(self, worker: str) -> None:
        about: dict[str, Any] = {"cluster": "", "rows": []}
        try:
            await insist(self._hosts, worker, "look", _PAUSE_SECONDS, **about)
        finally:
            self._hung.discard(worker)
        await self._move_apart()

    async def _make(
        self, entry: StoreEntry, shard: int, owner: str, copy: Copy
    ) -> None:
        """Have a copy made on its worker; the owner waits for it from then on."""
        worker = copy.worker
        of: dict[str, Any] = {"store": entry.uid, "shard": shard, "move": copy.move}
        entry.strays |= {owner, worker}
        entry.charge(worker, copy.nbytes)
        entry.copies[shard] = copy
        entry.n_changed += 1
        order = entry.n_changed
        try:
            about = {"about": entry.described, "source": owner, "stays": True}
            await self._moves.have_filled(worker, **of, **about)
            await self._hosts.control(owner, "copy_on", **of, order=order)
            await self._hosts.control(worker, "copy_follow", **of, source=owner)
            copy.counts = True
            entry.copies_gone.pop(shard, None)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                self._pass_over(worker)
            # Its owner lets nobody read it any more; a shard that it lets go of just now
            # refuses that.
            how: Any = {"on": (OSError, DaskPSError), "generation": 0, **of}
            back = insist(self._hosts, owner, "move_back", _PAUSE_SECONDS, **how)
            self._hosts.spawn(back)
            await asyncio.wait({self.strike(entry, shard, "could not be made")})
            raise

    # -- gone ----------------------------------------------------------------------

    def strike(self, entry: StoreEntry, shard: int, why: str) -> asyncio.Future[None]:
        """Strike the copy of a shard off, if there is one; its owner goes on alone.

        What this returns is done when the hosts have heard of it.
        """
        if (copy := self._forget(entry, shard, why)) is not None:
            self._hosts.tell("copies-lost", entry, shards=[shard], why=why)
        return self._hosts.spawn(self._struck(entry, shard, copy))

    async def _struck(self, entry: StoreEntry, shard: int, copy: Copy | None) -> None:
        # Also without any now: the owner may have yet to hear of that.
        if entry.n_copies > 1:
            await self._set(entry, shard)
        if copy is not None:
            self._drop(entry, shard, copy)
            self.look(entry)

    def _drop(self, entry: StoreEntry, shard: int, copy: Copy) -> None:
        """Have a host free a copy that nobody waits for."""
        of: dict[str, Any] = {"store": entry.uid, "shard": shard, "move": copy.move}
        drop = insist(self._hosts, copy.worker, "move_drop", _PAUSE_SECONDS, **of)
        self._hosts.spawn(drop)

    def _forget(self, entry: StoreEntry, shard: int, why: str) -> Copy | None:
        if (copy := entry.copies.pop(shard, None)) is not None:
            entry.n_changed += 1
            gone = f"its second copy, on worker {copy.worker}, had gone (it {why})"
            entry.copies_gone[shard] = gone, time_now()
            entry.charge(copy.worker, -copy.nbytes)
        return copy

    async def _set(self, entry: StoreEntry, shard: int) -> None:
        """Have the owner of a shard wait for the copy that it has, or for none."""
        owner = entry.owners[shard]
        while self._hosts.has_worker(owner) and entry.owners[shard] == owner:
            if shard in entry.without_owner:
                return  # a copy may be about to take over: this owner is not alone
            copy = entry.copies.get(shard)
            of = {"store": entry.uid, "shard": shard, "move": copy.move if copy else ""}
            try:
                of_owner = {**of, "order": entry.n_changed}
                await self._hosts.control(owner, "copy_on", **of_owner)
                if copy is not None:
                    more = {**of, "source": owner}
                    await self._hosts.control(copy.worker, "copy_follow", **more)
            except (OSError, ShardBusyError) as error:
                logger.info("%s has yet to hear of a copy: %r", owner, error)
                await asyncio.sleep(_PAUSE_SECONDS)
            except DaskPSError:
                return  # it has another owner by now
            else:
                return

    # -- owners that change --------------------------------------------------------

    def moved(self, entry: StoreEntry, shards: Sequence[int]) -> None:
        """Hear that shards have another owner, or their owner again."""
        for shard in shards if entry.n_copies > 1 else ():
            self._silent.discard((entry.uid, shard))
            self._taking.pop((entry.uid, shard), None)
            copy = entry.copies.get(shard)
            if copy is not None and copy.worker == entry.owners[shard]:
                self.strike(entry, shard, "is where its owner is")
            else:
                self._hosts.spawn(self._set(entry, shard))
        self.look(entry)

    def promote(
        self,
        entry: StoreEntry,
        shards: Sequence[int],
        left_by: LeftBy,
        otherwise: Callable[[StoreEntry, list[int], LeftBy], Any],
    ) -> list[int]:
        """Make copies the owners of shards whose worker has gone.

        Returns the shards without any. `otherwise` is called for those whose copy
        cannot take over, also where it was about to do so before: the last one counts.
        """
        if kept := [shard for shard in shards if self.serves(entry, shard)]:
            entry.set_away(kept, f"{left_by.reason}; its second copy takes over")
            # One that has yet to begin, begins anew: a copy could not go on with it.
            error, runs = rounds_error(left_by.worker), self._moves.runs
            runs.fence_all(entry, error, lambda run: run.bsp and not run.began)
        for shard in kept:
            # Now: its worker may leave before the task begins, and nobody hear of it.
            if (copy := self._forget(entry, shard, "was to take over")) is not None:
                promotion = _Promotion(copy, left_by.worker)
                self._taking[entry.uid, shard] = promotion
                self._hosts.spawn(self._promote(entry, shard, promotion))
        rest = [shard for shard in shards if (entry.uid, shard) not in self._taking]
        for shard in {*shards}.difference(rest):
            follows = partial(otherwise, entry, [shard], left_by)
            self._taking[entry.uid, shard].otherwise = follows
        return rest

    def about_to_own(self, entry: StoreEntry, worker: str) -> list[int]:
        """Return the shards that a worker may own in a moment.

        Its copies of them are about to take over; or it was silent, and goes on with them
        if their copies cannot.
        """
        taking, key = self._taking.items(), (entry.uid, worker)
        found = [i for (uid, i), of in taking if (uid, of.copy.worker) == key]
        silent = [i for i in entry.away if (entry.uid, i) in self._silent]
        return found + [i for i in silent if entry.owners[i] == worker]

    def serves(self, entry: StoreEntry, shard: int) -> bool:
        """Whether a shard has a copy whose worker may take over: it does not close.

        Also one that Dask retires: it sends on what it has by then.
        """
        copy, workers = entry.copies.get(shard), self._moves.scheduler.workers
        ws = workers.get(copy.worker) if copy else None
        alive = Status.running, Status.paused, Status.closing_gracefully
        return ws is not None and ws.status in alive

    async def _promote(
        self, entry: StoreEntry, shard: int, promotion: _Promotion
    ) -> None:
        key, copy, worker = (entry.uid, shard), promotion.copy, promotion.worker
        # Adopters that were asked before, or are meanwhile, have lower numbers than it.
        entry.raise_generation(shard)
        entry.raise_generation(shard)
        runs, number = self._moves.runs.for_owner(entry), entry.generations[shard] + 2
        about: dict[str, Any] = {"store": entry.uid, "shard": shard, "move": copy.move}
        about |= {"generation": number, "runs": runs, "alone": True}
        if copy.counts:
            # One that lives would answer reads as if nothing had changed since.
            told = self.depose(entry, shard, worker, move=copy.move, keeps=True)
            await asyncio.wait({told}, timeout=_DEPOSE_SECONDS)
        try:
            try:
                row = await self._own(copy.worker, worker, about)
                hands = copy.worker, worker
                await self._moves.settle_runs(entry, hands, [row], runs["rounds"])
                is_sent_on = (shard, copy.worker) in entry.sent_on
                if not (is_sent_on or self._hosts.has_worker(copy.worker)):
                    raise ConsistencyError(f"worker {copy.worker} has left too")
            finally:
                # Else somebody has adopted it meanwhile, with all that it had.
                if is_due := self._taking.get(key) is promotion:
                    del self._taking[key]
                is_due = is_due and entry.uid in self._stores and shard in entry.away
        except Exception as error:  # noqa: BLE001 - also of a codec of the user's
            logger.warning("a copy could not take over shard %d: %r", shard, error)
            self._drop(entry, shard, copy)
            if is_due:
                entry.settle([shard])
                promotion.otherwise()
            return
        if not is_due:
            self._drop(entry, shard, copy)
            return
        self._moves.install(entry, copy.worker, [row])
        self._hosts.spawn(self._moves.runs.tell_ended(entry, shard))
        self.depose(entry, shard, worker, move=copy.move)
        about = {"shards": [shard], "worker": worker, "by": copy.worker}
        self._hosts.tell("shards-promoted", entry, **about)

    async def _own(self, worker: str, owner: str, about: dict[str, Any]) -> Any:
        """Have a copy become the owner, also where an answer was lost; return its row.

        Where the owner lives it goes on after some tries; else only the copy is left.
        """
        tries = 0
        while True:
            tries += 1
            try:
                own = self._hosts.control(worker, "move_own", **about)
                return await asyncio.wait_for(own, _OWN_SECONDS)
            except OSError:
                is_owned = tries >= _MOST_TRIES and self._hosts.has_worker(owner)
                if is_owned or not self._hosts.has_worker(worker):
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    def depose(
        self, entry: StoreEntry, shard: int, worker: str, **more: Any
    ) -> asyncio.Future[None]:
        """Tell a worker, which may live, that another one is the owner of a shard."""
        of: dict[str, Any] = {"store": entry.uid, "shard": shard, **more}
        of["generation"] = entry.generations[shard]
        return self._hosts.spawn(self._depose(worker, of))

    async def _depose(self, worker: str, of: dict[str, Any]) -> None:
        how: Any = {"on": (OSError, ShardBusyError), **of}
        await insist(self._hosts, worker, "move_deposed", _PAUSE_SECONDS, **how)
        if not self._hosts.has_worker(worker):
            # It may live: else its memory stays, for somebody who adopts it.
            told = self._hosts.control(worker, "move_deposed", **of)
            await asyncio.wait_for(told, _TELL_SECONDS)

"""Stores that are cut into other shards: the turn to do so, and the moment of the change.

A client leads it, as a restore in the place of a lost store: under another uid new
shards are filled from those that a cut holds. Until the directory names the new layout
each step is taken back where anything fails; it does so once the old shards have
stopped as the cut holds them, so nothing is changed or read there any more. By the uid
that it had before the store is found all the same: users know no other one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from daskps.cluster.directory.drains import handing
from daskps.cluster.directory.placement import find_servers
from daskps.cluster.protocol.handlers import DIRECTORY
from daskps.errors import ConsistencyError, LayoutError
from daskps.layout.chunks import WHOLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daskps.cluster.directory.cuts import Cuts
    from daskps.cluster.directory.drains import Drains
    from daskps.cluster.directory.move import ShardMoves
    from daskps.cluster.directory.store_registry import Stores

#: How long hosts may take to stop their shards, and a store to go on after a failure.
_STOP_SECONDS, _BACK_SECONDS = 5.0, 1.0
#: Ends the reason why a shard is away meanwhile.
_TO = "a new layout"


class Reshards:
    """The reshards of all stores.

    Parameters
    ----------
    stores, moves, cuts, drains : Stores, ShardMoves, Cuts, Drains
        The parts of the directory that do parts of it.
    """

    def __init__(
        self, stores: Stores, moves: ShardMoves, cuts: Cuts, drains: Drains
    ) -> None:
        self._stores, self._moves = stores, moves
        self._cuts, self._drains = cuts, drains

    @DIRECTORY.handles("reshard")
    async def on_reshard(
        self,
        uid: str,
        owner: tuple[str, str],
        seconds: float | None,
        *,
        cut: str,
        servers: str | Sequence[str] | None,
    ) -> dict[str, Any]:
        """Have a cut hold a store, and give somebody the turn to lay it out anew.

        Until the cut is dropped. Returns what a cut does, the number of the turn, and
        the shards and servers that were asked for.
        """
        entry = await self._moves.runs.free_entry(uid)
        if entry.device:
            raise LayoutError(
                f"store {entry.name!r} is on device {entry.device!r}, whose shards are not "
                f"laid out anew; save it, and restore it with shards="
            )
        servers = self._stores.recoveries.servers(entry) if servers is None else servers
        # Else a new store would wait for them, and pushes for that.
        await find_servers(self._moves.scheduler, servers, 0.0)
        about: dict[str, Any] = {"cut": cut, "index": WHOLE, "hold": True}
        found = await self._cuts.on_cut(uid, owner, seconds, **about)
        if "waited_for" in found:
            return found
        await self._moves.runs.free_entry(uid)
        self._cuts.held(cut)
        now, (kind, name) = asyncio.get_running_loop().time(), owner
        found["token"] = entry.lease.take((kind, name), now, cut)
        return {**found, "shards": entry.asked_shards, "servers": servers}

    @DIRECTORY.handles("reshard_commit")
    async def on_commit(self, uid: str, **about: Any) -> None:
        """Make the new layout the store's, once all old shards have stopped.

        `about` is as of a commit.

        Raises
        ------
        ConsistencyError
            If a shard is not as it was cut, or the turn is over.
        """
        new = self._stores.entry(uid)
        old = self._stores.entry((new.replaces or ("", 0))[0])
        held, of = self._cuts.held(cut := old.lease.cut), {"store": old.uid, "cut": cut}
        if away := old.without_owner:
            raise ConsistencyError(
                f"shards {sorted(away)} of store {old.name!r} have lost their worker while "
                f"it was resharded; it goes on as it was, try again"
            )
        shards: dict[str, list[tuple[int, int, int]]] = {}
        for i, version, *_ in held:
            row = i, version, old.generations[i] + 1
            shards.setdefault(old.owners[i], []).append(row)
        hosts = self._moves.hosts
        for worker, rows in shards.items():
            old.set_away([i for i, *_ in rows], handing(worker, _TO))
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                ask = hosts.control
                stop = (ask(w, "relay_end", **of, shards=s) for w, s in shards.items())
                await asyncio.gather(*stop)
            # Of what is not in use yet nobody adopts anything.
            new.check_found(new.lost)
            self._stores.on_commit(uid, **about)
        except BaseException as error:
            # Of others a copy takes over by now, or a neighbour: their memory went.
            still = [i for i, why in old.away.items() if why.endswith(_TO)]
            back = asyncio.gather(*(self._drains.take_back(old, i, cut) for i in still))
            await asyncio.wait({hosts.spawn(back)}, timeout=_BACK_SECONDS)
            if isinstance(error, OSError):
                raise ConsistencyError(
                    f"an owner of store {old.name!r} failed as it was resharded "
                    f"({error!r}); it goes on as it was, try again"
                ) from error
            raise

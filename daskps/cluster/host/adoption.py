"""Shards from host to host: taken over from a dead worker, let go of in order.

However a worker closes (SIGTERM, Ctrl-C, `cluster.scale`, retirement, a heartbeat that
the scheduler does not know), Dask ends its plugins before its connections. The host
tells the directory, which begins to look for new owners, then lets go of each shard
under its lock, and then leaves the machine's members. Members take shards over; a host
that leaves does not. The last host of a machine frees all blocks there, unless the
directory still looks for shards of workers that have died.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from daskps.cluster.host.growth import Budget, grow_by
from daskps.cluster.host.hosted import Backing, HostedShard
from daskps.cluster.host.rules import Rules
from daskps.cluster.machine.blocks import BlockAddress, owner_of
from daskps.cluster.machine.folder import CarrierClosed
from daskps.cluster.machine.membership import memory_id
from daskps.cluster.machine.processes import pid_of
from daskps.cluster.protocol import encoding
from daskps.cluster.protocol.handlers import HOST
from daskps.cluster.protocol.reports import Sight
from daskps.cluster.upstream import loads
from daskps.errors import (
    DaskPSError,
    ProtocolError,
    ShardBusyError,
    StoreClosedError,
)
from daskps.layout.arrays import Layout, counted
from daskps.shards import run_record
from daskps.shards.deputy import CLOSED, RELEASED, gate_of, set_gate
from daskps.shards.memory.format import GENERATION
from daskps.shards.memory.segment import Segment
from daskps.shards.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from daskps.cluster.host.host import ShardHost
    from daskps.cluster.machine.blocks import Block
    from daskps.cluster.machine.membership import Membership

logger = logging.getLogger(__name__)
#: How often a host looks for a block that another process may be about to rename.
_FIND_TRIES = 3
#: How long another process that acts for the shard may take to release it.
_ADOPT_SECONDS = 0.5


@HOST.handles("adopt")
async def adopt(
    host: ShardHost,
    *,
    store: str,
    about: Mapping[str, Any],
    rows: Sequence[Sequence[Any]],
    rounds: Mapping[str, Any] | None,
    codecs: Sequence[tuple[str, bytes]],
    copies: Sequence[tuple[int, str]] = (),
) -> list[dict[str, Any]]:
    """Take shards of a dead worker over, together with their shared memory.

    `Move.ask_to_adopt` of the directory asks.

    `about` is the store: its name, layout, rules and cluster.
    `rows` are shard, name, bytes and nonce of the memory, and the new generation.
    `rounds` is the run in rounds to continue: its number, mailboxes as rows of
    the same kind, and pickled function that reduces; `codecs` are those of all runs,
    `copies` the shards that have a second copy, and its number.
    Returns for each shard the row for the directory, or "why" it was not taken, and
    the state of its memory.
    """
    where, members = host.worker.address, host.members(about["cluster"])
    if host.leaves():
        return [_left(where, row[0]) for row in rows]
    if members is None:
        return [_said(row[0], *_unknown(where)) for row in rows]
    name = about["name"]
    for codec in codecs:
        await host.in_thread(partial(encoding.learn, *codec))
    adopter = _Adopter(members, where, about, rounds)
    adopter.ask, adopter.copies = Budget(host).ask, dict(copies)
    host.has_copies |= bool(copies)
    hosted_shards = await host.in_thread(partial(adopter.take_all, host, store, rows))
    if store in host.dropped:
        for hosted in hosted_shards:
            hosted.close()
        raise StoreClosedError(f"store {name!r} was freed while it was adopted")
    if host.leaves():
        for hosted in hosted_shards:
            hosted.release(StoreClosedError("its worker has left at once"))
            hosted.serve()
        return [_left(where, row[0]) for row in rows]
    for hosted in hosted_shards:
        host.shards[store, hosted.index] = hosted
    if hosted_shards:
        n = counted(len(hosted_shards), "shard")
        logger.info("%s adopted %s of store %r", where, n, name)
    return adopter.found


@HOST.handles("look")
async def look(
    host: ShardHost, *, cluster: str, rows: Sequence[Sequence[Any]]
) -> list[dict[str, Any]]:
    """Report the state of the memory of shards that have no owner.

    `rows` are shard, name, bytes and nonce. Runs on the event loop, which waits for no
    lock: the host's own threads may wait for a shard whose holder is stopped.
    """
    members, where, found = host.members(cluster), host.worker.address, []
    for shard, *address in rows:
        seen = _unknown(where)
        if members is not None:
            seen = _look(members, where, BlockAddress(*address))
        found.append(_said(shard, *seen))
        await asyncio.sleep(0)
    return found


def _look(members: Membership, where: str, address: BlockAddress) -> tuple[Sight, str]:
    """Return the state of a shard's memory here, and the process that keeps it."""
    for _ in range(_FIND_TRIES):
        # A worker that adopts the shard just now renames the block.
        try:
            block = members.attach(members.find(address))
            break
        except (CarrierClosed, FileNotFoundError) as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno != errno.ENOENT:
                # It is there, but this process can open no more files, say.
                return Sight.FOUND, str(error)
    else:
        return Sight.ABSENT, f"worker {where} finds no memory of it"
    if members.lives(owner := owner_of(block.name)):
        return Sight.FOUND, _owner_lives(owner)
    if holder := block.lock().held_by():
        return Sight.FOUND, f"process {holder} of its machine has locked it"
    return Sight.FOUND, ""


def _unknown(where: str) -> tuple[Sight, str]:
    return Sight.UNKNOWN, f"worker {where} maps no shared memory"


def _left(where: str, shard: int) -> dict[str, Any]:
    return _said(shard, Sight.FOUND, f"worker {where} is leaving too")


def _owner_lives(owner: int) -> str:
    return f"its owner, process {pid_of(owner)} of its machine, lives"


def _said(shard: int, sight: Sight, why: str) -> dict[str, Any]:
    return {"shard": shard, "sight": sight.value, "why": why}


def row_of(hosted: HostedShard) -> dict[str, Any]:
    """Return the row of a shard that has come here, for the directory.

    Its name is "" where nobody else can map its memory.
    """
    address = BlockAddress("", 0, 0) if hosted.block is None else hosted.block.address
    return {
        "shard": hosted.index,
        **address._asdict(),
        "held": hosted.nbytes,
        "generation": hosted.shard.generation,
        "run": hosted.shard.run_state.run,
        "stopped": hosted.shard.run_state.why_stopped is not None,
        "mailbox": None if hosted.mailbox is None else (*hosted.mailbox[1].address,),
    }


def _anything(nbytes: int) -> None:
    """Let a shard take all free memory."""


class _Adopter:
    """Takes over shards of one store."""

    def __init__(
        self,
        members: Membership,
        where: str,
        about: Mapping[str, Any],
        rounds: Mapping[str, Any] | None,
    ) -> None:
        self._members, self._where = members, where
        #: Raises where the host has no more memory for a table that grows.
        self.ask: Callable[[int], None] = _anything
        #: The second copies that answers have to wait for.
        self.copies: Mapping[int, str] = {}
        #: The run to continue, and the addresses of its mailboxes by shard.
        self._rounds = rounds
        self._mailboxes = {
            shard: BlockAddress(*address)
            for shard, *address in (rounds["rows"] if rounds else ())
        }
        #: Seconds to wait for the next lock; a stopped process may hold many.
        self._patience = _ADOPT_SECONDS
        self._name, self._layout = about["name"], Layout.from_wire(about["layout"])
        self._rules = Rules(self._layout, about["rules"])
        self._is_warm = False
        #: The result for each shard, as the directory needs it.
        self.found: list[dict[str, Any]] = []

    def take_all(
        self, host: ShardHost, store: str, rows: Sequence[Sequence[Any]]
    ) -> list[HostedShard]:
        """Take over as many of these shards as possible, and report on each."""
        taken = list[HostedShard]()
        for shard, *place, generation in rows:
            address = BlockAddress(*place)
            # The host has it already if an answer was lost on its way.
            hosted = host.shards.get((store, shard))
            try:
                if hosted is None:
                    hosted = self.take(shard, address, generation)
                    taken.append(hosted)
                # A move that has brought it, and is undone, must not drop it any more.
                hosted.came_by = ""
                self.found.append(row_of(hosted))
            except ShardBusyError as error:
                self.found.append(_said(shard, Sight.FOUND, str(error)))
            except Exception as error:
                why = str(error)
                if not isinstance(error, CarrierClosed | ProtocolError):
                    # This host keeps the shards that it took before.
                    logger.exception("shard %d of store %r", shard, self._name)
                    why = repr(error)
                sight, _ = _look(self._members, self._where, address)
                self.found.append(_said(shard, sight, why))
        return taken

    def take(self, shard: int, address: BlockAddress, generation: int) -> HostedShard:
        """Take a shard over under its lock; its generation rises before all else."""
        members = self._members
        # Memory that is missing, or another shard's, is detected before any write.
        seen = members.attach(members.find(address))
        self._warm()
        slots = self._rules.slots
        segment = Segment(self._layout, shard, slots, seen.buffer, durable=True)
        is_released, owner = gate_of(segment) == RELEASED, owner_of(seen.name)
        if not is_released and members.lives(owner):
            raise ShardBusyError(_owner_lives(owner))
        lock = seen.lock()
        try:
            lock.acquire(self._patience)
        except ShardBusyError:
            self._patience = 0.0
            raise ShardBusyError(
                f"process {lock.holder} of its machine has locked it"
            ) from None
        try:
            if gate_of(segment) == CLOSED:
                raise CarrierClosed("its owner was about to free it")
            is_released = gate_of(segment) == RELEASED
            # The rename in it decides: of hosts that come this far, one alone succeeds.
            block = members.take_over(seen.address, released=is_released)
            grow_by(segment, block, self.ask)
            try:
                segment.words[GENERATION] = generation
                rules = self._rules
                mine = Shard(segment, rules, generation, cache_dir=rules.cache_dir)
                mailbox = self._open_round(mine, shard, is_released)
                if shard in self.copies:
                    mine.last_flip = 0
                mine.take_over()
            except BaseException:
                # Else its owner lives, but serves no caller.
                block.release()
                set_gate(segment, RELEASED)
                raise
        finally:
            lock.release()
        hosted = HostedShard(self._name, self._layout, shard, mine, block=block)
        hosted.mailbox = mailbox
        if shard in self.copies:
            hosted.backing = Backing(self.copies[shard])
        return hosted

    def _warm(self) -> None:
        """Load the update loops before any caller can push; most are on disk."""
        if not self._is_warm:
            self._is_warm = True
            self._rules.warm(durable=True)

    def _open_round(
        self, mine: Shard, shard: int, is_released: bool
    ) -> tuple[int, Block] | None:
        """Take over deliveries of the open round; if they are lost, hold the run."""
        if not mine.run_state.is_bsp:
            return None
        block, run, n_ranks = None, mine.run_state.run, mine.run_state.n_ranks
        try:
            wire, address = self._rounds, self._mailboxes.get(shard)
            # Tasks of the graph need no mailboxes.
            if not (wire and wire["run"] == run and (address or wire["graph"])):
                raise CarrierClosed("nobody else can have it")
            reduce = loads(wire["reduce"])
            if address:
                address = self._members.find(address)
                block = self._members.take_over(address, released=is_released)
            buffer = block.body if block else None
            mine.run_state.attach_rounds(run, n_ranks, reduce, buffer)
        except (CarrierClosed, ProtocolError) as error:
            if block is not None:
                block.free()
            # The run ends with all shards of the store, after the same round.
            reason = f"its open round went with a worker: {error}"
            mine.run_state.stop(run, run_record.ended(run, reason))
            return None
        return (run, block) if block else None


@HOST.handles("orphans")
async def _orphans(host: ShardHost, *, cluster: str) -> list[str]:
    """Return the names of blocks that dead workers left on this machine."""
    members = host.members(cluster)
    return [] if members is None else members.orphans()


@HOST.handles("sweep")
async def _sweep(
    host: ShardHost,
    *,
    cluster: str,
    names: Sequence[str],
    keep: Sequence[Sequence[Any]],
) -> None:
    """Remove blocks that dead workers left and no store needs.

    `keep` are shard, name, bytes and nonce of blocks that a store still needs: a worker
    may have died after it renamed one, before it told any process.
    """
    if (members := host.members(cluster)) is None:
        return
    kept = {members.find(BlockAddress(*address)).name for _, *address in keep}
    if swept := members.sweep(set(names) - kept):
        where, n = host.worker.address, len(swept)
        logger.info("%s removed %d blocks of dead workers", where, n)


#: How long the directory may take to say of which stores others may have the shards. A
#: nanny gives its worker 4 s in all.
TELL_SECONDS = 1.0
#: How long it may take to hear that no other host can have them; Dask would try for
#: longer to reach a scheduler that has ended.
_LATE_SECONDS = 0.3
#: How long other processes may keep a shard locked; a worker that adopts waits longer.
LOCK_SECONDS = 1.0
#: Seconds between two tries to get at a shard, at first and at most.
_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.0005, 0.05


async def leave(host: ShardHost, reason: str) -> None:
    """Let go of all shards, or free them, and end what the host does.

    Parameters
    ----------
    host : ShardHost
        The host, on its worker's event loop.
    reason : str
        The reason, for callers of a shard that is lost with the host.
    """
    host.is_leaving, keeps = True, False
    try:
        # Copies may be about to take over.
        if host.shards or host.going or host.coming:
            where, n = host.worker.address, counted(len(host.shards), "shard")
            logger.info("%s %s, with %s", where, reason, n)
            wanted = await _ask(host)
            # From here on none comes back that could not be sent.
            host.lets_go = True
            keys = [k for k in host.shards if wanted is None or k[0] in wanted]
            await _let_go(host, keys)
        # Also if the stream to the scheduler has ended: at SIGTERM Dask ends it first.
        keeps = bool(await _tell(host, "awaits", _LATE_SECONDS))
    finally:
        removed = host.close(reason, keeps=keeps)
    if removed:
        about = {"names": removed, "memory": memory_id()}
        await _tell(host, "removed", TELL_SECONDS, **about)


@HOST.handles("let_go")
async def let_go(
    host: ShardHost, *, store: str, shards: Sequence[tuple[int, int]]
) -> None:
    """Release shards that others of the machine are to have, as the directory says.

    `shards` are their numbers and generations: it may ask twice, and again when the
    shard has come back.
    """
    found = ((host.shards.get((store, i)), i, g) for i, g in shards)
    keys = [(store, i) for of, i, g in found if of and of.shard.generation == g]
    await _let_go(host, keys, math.inf)
    if host.sockets is not None:
        host.sockets.let_go()


async def _let_go(
    host: ShardHost, keys: Sequence[tuple[str, int]], seconds: float = LOCK_SECONDS
) -> None:
    """Release shards, of those that are shared."""
    released = []
    for key in keys:
        if (hosted := host.shards[key]).is_shared:
            hosted.release(hosted.gone())
            del host.shards[key]
            released.append(hosted)
    end, pause = asyncio.get_running_loop().time() + seconds, _PAUSE_SECONDS
    while waiting := [hosted for hosted in released if not hosted.is_released]:
        for hosted in waiting:
            # If no other thread has the mutex.
            await host.run_for(hosted, hosted.serve)
        if asyncio.get_running_loop().time() > end:
            # The worker that adopts these shards takes this one for dead.
            logger.info("%d shards stayed locked by other processes", len(waiting))
            return
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE_SECONDS)
    for hosted in released:
        if hosted.backing is not None:
            # Their copies follow others by now, and ask here no more.
            hosted.backing.end(hosted.gone())


async def _ask(host: ShardHost) -> list[str] | None:
    """Return the stores whose shards others may have; None if there is no answer.

    Meanwhile others have what nobody of this machine can.
    """
    is_connected = host.worker.is_connected()
    if not is_connected and await _tell(host, "awaits", _LATE_SECONDS) is None:
        # A scheduler that has ended is not waited for.
        return None
    while (found := await _tell(host, "leaving", TELL_SECONDS)) is not None:
        if not found["waits"]:
            wanted: list[str] = found["stores"]
            return wanted
    return None


async def _tell(host: ShardHost, method: str, seconds: float, **kwargs: Any) -> Any:
    """Tell the directory; None if it cannot be reached, as without a scheduler."""
    work = host.worker.directory(method, worker=host.worker.address, **kwargs)
    try:
        return await asyncio.wait_for(work, seconds)
    except (OSError, DaskPSError) as error:
        logger.info("could not tell the scheduler: %s: %r", method, error)
        return None

"""One store as the directory knows it, the turn to restore it, and its hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from daskps import config
from daskps.cluster.keys import label_of
from daskps.cluster.protocol.packing import unpack_reply
from daskps.errors import ConsistencyError, ShardLostError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set

    from distributed import Scheduler

logger = logging.getLogger(__name__)
#: Under which the scheduler keeps our events; see docs/observability.md.
_TOPIC = "daskps"
#: How long whoever restores a store may be silent before another one does.
LEASE_SECONDS = 10.0
#: For how long those that ask after a failure hear of that one, before it is tried
#: again.
AGAIN_SECONDS = 5.0


@dataclass(eq=False)
class _Lease:
    """The turn to restore one store, by times of the event loop."""

    #: Counts whose turn it is: what an earlier one says is refused.
    token: int = 0
    #: Client or worker that has it.
    holder: tuple[str, str] | None = None
    #: The uid of what it makes, "" where there is nothing yet.
    made: str = ""
    #: The cut that is laid out anew, "" where a lost store is restored.
    cut: str = ""
    _until: float = 0.0
    #: Why the last one has failed that did, its number, and when anew may be tried.
    _why: str = ""
    _failed: int = 0
    _again_at: float = 0.0
    #: Set when the turn is over, and then replaced.
    _over: asyncio.Event = field(default_factory=asyncio.Event)

    def is_free(self, now: float) -> bool:
        """Return whether nobody has the turn, or nobody who lives."""
        return self.holder is None or now >= self._until

    def failure(self, now: float, tried: int) -> str:
        """Return why the last one to try has failed, "" where one may try.

        A caller that has waited for number `tried`, or not long enough, hears of it.
        """
        heard = now < self._again_at or 0 < tried <= self._failed
        return self._why if heard else ""

    def take(self, holder: tuple[str, str], now: float, cut: str = "") -> int:
        """Give somebody the turn; return the number by which it is told from others."""
        self.token += 1
        self.holder, self.made, self.cut = holder, "", cut
        self.renew(self.token, now)
        return self.token

    def renew(self, token: int, now: float) -> None:
        """Hear that whoever has the turn is at it.

        Raises
        ------
        ConsistencyError
            If somebody else has it.
        """
        self.check(token)
        self._until = now + LEASE_SECONDS

    def check(self, token: int) -> None:
        """Refuse whoever has not the turn, or not any more."""
        if self.holder is None or token != self.token:
            raise ConsistencyError(
                "this process was silent for too long while it restored a store, or the "
                "store was lost while it resharded it, and its turn is over; what it had "
                "made was undone"
            )

    def fail(self, why: str, now: float) -> None:
        """Note that whoever had the turn has given up, and why."""
        self._why, self._failed, self._again_at = why, self.token, now + AGAIN_SECONDS
        self.end()

    def end(self) -> None:
        """Note that nobody has the turn any more; those that wait hear of it."""
        self.holder = None
        self._over.set()
        self._over = asyncio.Event()

    async def wait(self, now: float, seconds: float) -> None:
        """Wait until the turn is over, at most so long."""
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait({over}, timeout=max(0.0, min(seconds, self._until - now)))
        over.cancel()


class LeftBy(NamedTuple):
    """The worker that has left shards, and why."""

    worker: str
    reason: str
    #: One that closes in order has yet to let go of them, and others may leave with it.
    in_order: bool = False


@dataclass(slots=True, eq=False)
class Copy:
    """The second copy of a shard."""

    worker: str
    #: By which its host, and the shard's owner, tell it from earlier ones.
    move: str
    nbytes: int
    #: Whether it is on the machine of its owner.
    is_together: bool
    #: Whether it can take over.
    counts: bool = False


@dataclass
class StoreEntry:
    """One store as the directory knows it."""

    uid: str
    name: str
    #: Client that made it, whose end is a session store's end at the latest.
    client: str
    session: bool
    layout: dict[str, Any]
    owners: tuple[str, ...]
    #: Bytes on each worker.
    nbytes: dict[str, int]
    #: Largest share of a worker's memory limit that shards may fill.
    memory_share: float
    rules: bytes
    #: For each parameter index with an optimizer its repr.
    optimizers: dict[int, str]
    #: The uid of the store that it goes back to, by checkpoints; "" for its own.
    lineage: str = ""
    #: Under which the processes of a machine find each other; "" for not at all.
    cluster: str = ""
    #: Shard, name, bytes and nonce of the memory that others there can map.
    segments: Sequence[Any] = ()
    #: The shared memory that owners have, or had, see :func:`memory_id`.
    memories: dict[str, str] = field(default_factory=dict)
    #: Bytes of memory that each shard takes, as last heard: with unbounded rows it
    #: grows, and what others map of it is mostly addresses.
    sizes: dict[int, int] = field(default_factory=dict)
    #: Shards whose bytes no worker has any more: it has left.
    uncharged: set[int] = field(default_factory=set)
    #: Incarnation of each shard.
    generations: tuple[int, ...] = ()
    ready: bool = False
    #: Shards without a live copy: worker and reason.
    lost: dict[int, tuple[str, str]] = field(default_factory=dict)
    #: Shards whose worker is gone and whose next owner is being looked for: why it
    #: left, and what the shard waits for.
    away: dict[int, str] = field(default_factory=dict)
    #: How many copies of each shard it is to have, and the second ones that there are.
    n_copies: int = 1
    copies: dict[int, Copy] = field(default_factory=dict)
    #: How often these have changed, so that owners pass over what comes late.
    n_changed: int = 0
    #: The end of the second copies of shards that have none any more, and its time.
    copies_gone: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Shards that a worker which closes is to send to others, each with that worker.
    sent_on: set[tuple[int, str]] = field(default_factory=set)
    #: Workers that somebody has drained of it: no shard moves there unasked.
    drained: set[str] = field(default_factory=set)
    #: Workers that have a view of it, and the bytes of those that they have made.
    viewers: dict[str, int] = field(default_factory=dict)
    #: Other workers that had to do with a shard: they are told when it ends.
    strays: set[str] = field(default_factory=set)
    #: When its last checkpoint was written (0.0 for never), and of how many bytes.
    saved: tuple[float, int] = (0.0, 0)
    failed_saves: int = 0
    #: The run with epochs that trained it last, or does: opaque text of its client's.
    trained_by: str = ""
    #: The uid of the first store that others have taken the place of; "" for its own.
    origin: str = ""
    #: How often it was resharded, and the uid that its users know, which stays then.
    epoch: int = 0
    known_as: str = ""
    #: The store that this one is made in place of, and whose turn that is.
    replaces: tuple[str, int] | None = None
    #: Where to restore it from, once a shard is lost: an URL, and options that may be
    #: secrets; and how many shards on what servers it was asked to have, and which
    #: parameters on which of them.
    recover_from: tuple[str, str] | None = field(default=None, repr=False)
    asked_shards: int | None = None
    asked_servers: str | Sequence[str] = "auto"
    asked_placement: Sequence[tuple[Sequence[str], Sequence[int]]] = ()
    #: The device of its owners that it is on, "" for host memory; and how many bytes it
    #: takes of each, by uuid.
    device: str = ""
    of_devices: dict[str, int] = field(default_factory=dict)
    #: The turn to do that, which one client or worker has at a time.
    lease: _Lease = field(default_factory=_Lease)
    #: Set while no shard is away. `Directory.on_locate` waits for it, for each caller that
    #: asks where shards are; `Move._install` sets it, by `install`.
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    #: Held by the cut in progress: a store takes one at a time.
    cutting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.generations = self.generations or (1,) * len(self.owners)
        self.known_as = self.known_as or self.uid
        self.settled.set()

    @property
    def label(self) -> str:
        """Its name in the keys of tasks."""
        return label_of(self.name, self.uid)

    def where(self) -> dict[str, Any]:
        """Return where the shards are, for those who call them."""
        return {
            "owners": list(self.owners),
            "generations": list(self.generations),
            "segments": list(self.segments),
        }

    @property
    def described(self) -> dict[str, Any]:
        """Its description, for a host that is to own a shard."""
        return {
            "name": self.name,
            "layout": self.layout,
            "rules": self.rules,
            "cluster": self.cluster,
        }

    @property
    def holders(self) -> list[str]:
        """The worker of each shard that has one: neither lost nor on the move."""
        without = self.without_owner
        return [w for i, w in enumerate(self.owners) if i not in without]

    @property
    def without_owner(self) -> set[int]:
        """The shards that are away or lost."""
        return self.away.keys() | self.lost.keys()

    @property
    def hosts(self) -> list[str]:
        """Workers that hold shards now."""
        return list(dict.fromkeys(self.holders))

    def rows_of(self, shards: Iterable[int]) -> list[list[Any]]:
        """Return shard, name, bytes and nonce of the memory of shards."""
        rows = {row[0]: list(row) for row in self.segments}
        return [rows[shard] for shard in shards]

    def install(self, worker: str, taken: Sequence[Mapping[str, Any]]) -> list[int]:
        """Note that a worker has shards now, and where they are; return which."""
        owners, generations = list(self.owners), list(self.generations)
        rows = {row[0]: row for row in self.segments}
        for new in taken:
            shard = new["shard"]
            self.uncharge({shard})
            self.uncharged.discard(shard)
            owners[shard], generations[shard] = worker, new["generation"]
            rows[shard] = (shard, new["name"], new["nbytes"], new["nonce"])
            if not new["name"]:
                del rows[shard]
            self.sizes[shard] = new["held"]
            self.charge(worker, new["held"])
        self.owners, self.generations = tuple(owners), tuple(generations)
        self.segments = [rows[shard] for shard in sorted(rows)]
        self.settle(shards := sorted(new["shard"] for new in taken))
        return shards

    def raise_generation(self, shard: int) -> None:
        """Note that somebody may have become the owner of a shard, and did not say so."""
        generations = list(self.generations)
        generations[shard] += 1
        self.generations = tuple(generations)

    def note_sizes(self, worker: str, sizes: Iterable[tuple[int, int]]) -> list[int]:
        """Note how many bytes shards take that a worker has; return which it has."""
        without, noted = self.without_owner, []
        for shard, nbytes in sizes:
            known = shard in self.sizes and self.owners[shard] == worker
            if known and shard not in without:
                if shard not in self.uncharged:
                    self.charge(worker, nbytes - self.sizes[shard])
                if copy := self.copies.get(shard):
                    self.charge(copy.worker, nbytes - copy.nbytes)
                    copy.nbytes = nbytes
                self.sizes[shard] = nbytes
                noted.append(shard)
        return noted

    def charge(self, worker: str, nbytes: int) -> None:
        """Note that a worker holds so many bytes more, or fewer."""
        self.nbytes[worker] = self.nbytes.get(worker, 0) + nbytes
        if self.nbytes[worker] <= 0:
            del self.nbytes[worker]

    async def wait_for_owners(self) -> None:
        """Wait until no shard is away, as long as a run would at most.

        Raises
        ------
        ShardLostError
            Naming what the first one of them waits for.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.load().run_away_seconds):
                # Another one may be away before this task goes on.
                while self.away:
                    await self.settled.wait()
        if shard := self.first_away:
            raise ShardLostError(self.name, *shard, True)

    @property
    def first_away(self) -> tuple[int, str, str] | None:
        """The first shard that is away, its worker and what it waits for, if any."""
        if not self.away:
            return None
        shard = min(self.away)
        return shard, self.owners[shard], self.away[shard]

    def set_lost(self, shards: Iterable[int], worker: str, reason: str) -> None:
        """Note that shards are lost with a worker, and so are their second copies."""
        now = asyncio.get_running_loop().time()
        for shard in shards:
            copy, at = self.copies_gone.get(shard, ("", now))
            more = f"; {copy} {now - at:.0f} s before" if copy else ""
            self.lost[shard] = worker, reason + more

    def check_found(self, shards: Iterable[int]) -> None:
        """Refuse to go on where one of these shards is lost."""
        for shard in shards:
            if shard in self.lost:
                raise ShardLostError(self.name, shard, *self.lost[shard])

    def uncharge(self, shards: Set[int]) -> None:
        """Note that the owners of shards have their bytes no more; twice is fine."""
        for shard in shards - self.uncharged:
            self.charge(self.owners[shard], -self.sizes.get(shard, 0))
        self.uncharged |= shards

    def set_away(self, shards: Iterable[int], why: str) -> None:
        """Note that shards are away, why, and what for."""
        self.away |= dict.fromkeys(shards, why)
        self.settled.clear()

    def settle(self, shards: Iterable[int]) -> None:
        """Note that shards are away no longer; nor lost, where they were found."""
        for shard in shards:
            self.away.pop(shard, None)
            self.lost.pop(shard, None)
        if not self.away:
            self.settled.set()

    def summary(self) -> dict[str, Any]:
        """Return what is told of it in lists and events."""
        return {
            "session": self.session,
            "parameters": len(self.layout["parameters"]),
            "tables": len(self.layout.get("tables", ())),
            "shards": len(self.owners),
            "workers": len(set(self.owners)),
        }

    def to_wire(self) -> dict[str, Any]:
        """Return what a handle needs."""
        return {
            **self.where(),
            "uid": self.uid,
            "known_as": self.known_as,
            "epoch": self.epoch,
            "name": self.name,
            "session": self.session,
            "lineage": self.lineage or self.uid,
            "origin": self.origin or self.uid,
            "recovers": self.recover_from is not None,
            "layout": self.layout,
            "rules": self.rules,
            "optimizers": list(self.optimizers.items()),
            "cluster": self.cluster,
            "device": self.device,
            "copies": self.n_copies,
        }


#: How many stores and runs that are gone are remembered, for better messages.
REMEMBERED = 10_000


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Note what became of something, forgetting the oldest note."""
    known[key] = value
    if len(known) > REMEMBERED:
        del known[next(iter(known))]


class Hosts:
    """The scheduler's way to the hosts, and the work it does beside its own."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._background: set[asyncio.Task[Any]] = set()
        #: Workers that have another daskps, and so can have no shard.
        self.foreign = set[str]()
        #: How often each event was told.
        self.told: Counter[str] = Counter()

    def has_client(self, client: str) -> bool:
        """Return whether a client is connected."""
        return client in self._scheduler.clients

    def has_worker(self, worker: str) -> bool:
        """Return whether a worker is one of the cluster."""
        return worker in self._scheduler.workers

    async def control(self, worker: str, method: str, **kwargs: Any) -> Any:
        """Send a control message to the host on a worker."""
        rpc: Any = self._scheduler.rpc(worker)
        reply = await rpc.daskps_control(method=method, **kwargs)
        return unpack_reply(reply, f"worker {worker}")

    async def everywhere(
        self,
        entry: StoreEntry,
        method: str,
        *,
        silent: set[str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Send a control message to every live host of a store.

        In `silent` are those that have yet to answer.
        """
        silent = set() if silent is None else silent
        silent.update(entry.hosts)

        async def ask(worker: str) -> Any:
            found = await self.control(worker, method, store=entry.uid, **kwargs)
            silent.discard(worker)
            return found

        asked = map(ask, entry.hosts)
        found = await asyncio.gather(*asked, return_exceptions=True)
        # Only once all have answered: what is sent next must not overtake this.
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found

    async def broadcast(self, method: str, **kwargs: Any) -> None:
        """Send a control message to the hosts of all workers; some may be gone."""
        await asyncio.gather(
            *(self.control(w, method, **kwargs) for w in self._scheduler.workers),
            return_exceptions=True,
        )

    def tell(self, action: str, entry: StoreEntry, **more: Any) -> None:
        """Put an event about a store into the scheduler's log of events.

        Never once per step: the log is short and goes to everyone who subscribed.
        """
        self.told[action] += 1
        event = {"action": action, "store": entry.name, "uid": entry.known_as, **more}
        self._scheduler.log_event(_TOPIC, event)

    def spawn(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Run something in the background and log how it fails."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.info("daskps background work ended with %r", error)

    def close(self) -> None:
        """Stop the background work."""
        for task in self._background:
            task.cancel()


async def insist(
    hosts: Hosts,
    worker: str,
    method: str,
    pause: float,
    *,
    on: type[Exception] | tuple[type[Exception], ...] = OSError,
    tries: float = math.inf,
    **about: Any,
) -> None:
    """Send a host a control message until it has heard it, or has left.

    Parameters
    ----------
    hosts : Hosts
        The scheduler's way to the hosts.
    worker : str
        The worker that the host is in.
    method : str
        The message.
    pause : float
        Seconds between two tries.
    on : type of Exception, or tuple of some
        The error after which the message is sent again: it was lost on its way, or the
        connection was.
    tries : float
        How often it is sent at most.
    **about : object
        Its arguments.
    """
    while tries > 0 and hosts.has_worker(worker):
        tries -= 1
        try:
            await hosts.control(worker, method, **about)
            return
        except on as error:
            logger.debug("%s has yet to hear %s: %r", worker, method, error)
            await asyncio.sleep(pause)

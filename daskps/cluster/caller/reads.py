"""Reads of a handle or a trainer, made ready once: into arrays, and as views.

Between two reads of the same parameters nothing changes but the clock: shards, elements
and places stay. The cost of a small read is the Python between the call and the copy,
so a prepared read looks all of that up once. Shards that this process reaches are read
without a lock or a message.

A view copies nothing. Under BSP a shard applies round t + 1 only with the contribution
of every live trainer. It writes that round to buffers that are not in force, and no
round before t + 2 to one that was read at clock t. So a view that a trainer takes at
its clock stays as it is until it has ticked twice.
"""

from __future__ import annotations

import math
import time
import weakref
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from daskps.cluster.caller import routes
from daskps.cluster.caller.call_socket import SocketPayload
from daskps.cluster.caller.local import AGAIN_SECONDS
from daskps.cluster.caller.routes import Step
from daskps.cluster.caller.shard_map import Prepared
from daskps.cluster.caller.socket_carrier import SocketCarrier
from daskps.cluster.caller.targets import Target, find_overlap
from daskps.cluster.machine.locks import Pause
from daskps.cluster.protocol.deadline import Deadline
from daskps.shards.reader import BUSY, NOT_YET, REFER, ShardReader

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from daskps.cluster.caller.carriers import Carriers
    from daskps.cluster.caller.remote import RemoteShards
    from daskps.cluster.caller.routes import Request
    from daskps.cluster.caller.shard_map import ShardMap, StoreMap
    from daskps.cluster.caller.socket_route import SocketRoute
    from daskps.cluster.caller.targets import ReadSlice, ReadSlices
    from daskps.cluster.host.hosted import ReachableShards
    from daskps.shards.reader import RowsRead
    from daskps.typing import Array

    #: A parameter in one shard: what reads it, the piece, and its array in both
    #: buffers.
    Seen: TypeAlias = tuple[ShardReader, int, Sequence[Array]]
    #: The elements and the shards of a read, and the same made ready.
    Latest: TypeAlias = (
        "tuple[PreparedRead, ShardMap, ReadSlices, tuple[int, ...] | None]"
    )

#: How long a read waits without asking the shards, and how much of it without a sleep.
WAIT_SECONDS, SPIN_SECONDS = 0.01, 0.0005
#: By the answer of a reader how long a read waits in all: for other trainers, whose
#: round is short where they are near, and for updates that run into copies of rows.
_PATIENCE = {NOT_YET: WAIT_SECONDS, BUSY: SPIN_SECONDS}
#: How often a read looks after the shards' owners: an owner that is gone publishes
#: nothing more, and reads of its memory would look as if nobody pushed.
LOOK_SECONDS = 0.1
#: The rows of a read without tables.
_NO_ROWS: Mapping[int, Sequence[RowsRead]] = {}


class Source:
    """One shard of a read, and the object that serves it in this process."""

    __slots__ = ("next_look", "reader", "serving", "shard")

    def __init__(
        self, shard: int, reader: ShardReader, serving: ReachableShards
    ) -> None:
        self.shard, self.reader, self.serving = shard, reader, serving
        self.next_look = 0.0

    def is_live(self, now: float) -> bool:
        """Look after the owner, and return whether it is there."""
        if not self.serving.is_live():
            return False
        self.next_look = now + LOOK_SECONDS
        return True


def find_source(
    carriers: Carriers, shard: int, slices: Sequence[ReadSlice] = ()
) -> Source | None:
    """Return a shard as this process reads it; None where it must be asked."""
    found = carriers.find_shard(shard)
    if found is None or found[1].locks_reads:
        return None
    serving, hosted = found
    segment = hosted.shard.segment
    reader = ShardReader(segment, slices, carriers.run, carriers.rank)
    return Source(shard, reader, serving)


class PreparedRead:
    """One read, ready to be repeated into any arrays.

    It holds none of them: arrays that a loop has let go of must not live on here.

    Parameters
    ----------
    sources : sequence of Source
        The shards to read.
    seen : dict of int to int, optional
        Takes the version that was read of each shard.
    first : int
        The source to begin with: trainers that begin with different ones run less into
        each other's updates.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        seen: dict[int, int] | None = None,
        first: int = 0,
    ) -> None:
        self.sources, self._seen, self._first = sources, seen, first
        #: Number of hosts whose shards it reads.
        self.n_hosts = len({source.serving for source in sources})

    @classmethod
    def of(
        cls,
        carriers: Carriers,
        slices: ReadSlices,
        shards: Sequence[int] | None = None,
        seen: dict[int, int] | None = None,
    ) -> PreparedRead | None:
        """Return a read of slices, and maybe of other shards with tables.

        None where it takes a message, or the lock of a shard.
        """
        shards = tuple(slices) if shards is None else shards
        sources = []
        for shard in shards:
            source = find_source(carriers, shard, slices.get(shard, ()))
            if source is None:
                return None
            sources.append(source)
        return cls(sources, seen, max(0, carriers.rank) % max(1, len(sources)))

    @classmethod
    def joined(cls, reads: Sequence[PreparedRead]) -> PreparedRead:
        """Return a read of the shards of several ones."""
        return cls([source for read in reads for source in read.sources])

    def read(
        self,
        bounds: Iterable[int],
        outs: Sequence[Array],
        rows: Mapping[int, Sequence[RowsRead]] = _NO_ROWS,
    ) -> int | None:
        """Read without asking the shards.

        Parameters
        ----------
        bounds : iterable of int
            For each shard the clock of the trainer; outside runs the least version.
        outs : sequence of ndarray, shape (n,)
            The arrays to fill.
        rows : mapping of int to sequence of RowsRead
            By shard the rows to read.

        Returns
        -------
        int or None
            Clocks by which the slowest live trainer was behind. None where shards must
            be asked: the arrays hold anything.
        """
        now, lag, pause = time.monotonic(), 0, None
        pending: Iterable[tuple[Source, int]]
        pending = zip(self.sources, bounds, strict=False)
        if first := self._first:
            pending = [*pending]
            pending = pending[first:] + pending[:first]
        while True:
            late = []
            for source, least in pending:
                if now > source.next_look and not source.is_live(now):
                    return None
                reader = source.reader
                version = reader.read(least, outs, rows.get(source.shard, ()))
                if version >= 0:
                    lag = max(lag, reader.lag)
                    if self._seen is not None:
                        self._seen[source.shard] = version
                # Asked after the try: a thread that the kernel suspends in a pause
                # still tries once more.
                elif version == REFER or (pause and pause.seconds > _PATIENCE[version]):
                    return None
                else:
                    # It reads the other shards meanwhile.
                    late.append((source, least))
            if not late:
                return lag
            pause = pause or Pause(SPIN_SECONDS)
            pause()
            pending = late


def wait(find: Callable[[], int]) -> int:
    """Return what a reader finds, maybe after a short wait for other trainers."""
    found, pause = find(), None
    while found == NOT_YET:
        pause = pause or Pause(SPIN_SECONDS)
        if pause.seconds > WAIT_SECONDS:
            break
        pause()
        found = find()
    return found


class NamedRead:
    """A read of whole parameters into arrays by their names.

    Parameters
    ----------
    carriers : Carriers
        How this process reaches their shards.
    remote : RemoteShards
        The way to those of other processes.
    out : mapping of str to ndarray
        The arrays, in the order in which the target has them.
    target : Target
        The same read.
    seen : dict of int to int, optional
        As for :class:`PreparedRead`.
    """

    def __init__(
        self,
        carriers: Carriers,
        remote: RemoteShards,
        out: Mapping[str, Array],
        target: Target,
        *,
        seen: dict[int, int] | None = None,
    ) -> None:
        self._wanted = [(array.shape, array.dtype) for array in out.values()]
        #: The arrays of the latest read, of which no two share memory.
        self._apart = [weakref.ref(array) for array in out.values()]
        self.slices = target.slices
        self._remote, self._seen = remote, seen
        self._step = Step(run=carriers.run, rank=carriers.rank)
        local: dict[int, tuple[ReadSlice, ...]] = {}
        remote_slices: dict[int, tuple[ReadSlice, ...]] = {}
        for shard, of in target.slices.items():
            where = remote_slices if carriers.find_shard(shard) is None else local
            where[shard] = of
        #: The read of shards that this process reaches, and the route over sockets to
        #: the others, if there are any.
        self.local = PreparedRead.of(carriers, local, seen=seen)
        self.route: SocketRoute | None = None
        #: Until when it holds: a way that is closed now may be open soon.
        self.until = math.inf
        if remote_slices:
            request = self._request(remote_slices, 0, ())
            self.route = remote.find_socket_route(request, tuple(remote_slices))
            self.until = time.monotonic() + AGAIN_SECONDS
        #: Whether it is worth keeping.
        self.is_possible = self.local is not None and (
            not remote_slices or self.route is not None
        )

    def _request(
        self, slices: ReadSlices, clock: int, outs: Sequence[Array]
    ) -> Request:
        """Return a read of other processes' shards as a request."""
        step, target = self._step._replace(clock=clock), Target(slices, outs, dict)
        return routes.read(self._remote.meta, target, None, step)

    def read_remote(
        self,
        local: PreparedRead,
        route: SocketRoute,
        outs: Sequence[Array],
        *,
        clock: int,
        deadline: Deadline,
    ) -> int | None:
        """Read over sockets, and from the shards that this process reaches, if any.

        These are read while the hosts read, or afterwards where the hosts have little
        work: they then need the interpreter's lock above all. Returns by how many
        clocks the slowest trainer was behind; None where `local` must be asked.
        """
        said = SocketPayload(clock, outs=outs)
        make = partial(self._request, route.slices, clock, outs)
        call = SocketCarrier(self._remote, route, said, make=make, deadline=deadline)
        lag: int | None = 0
        if not local.n_hosts:
            reply = call.run()
        elif route.is_small:
            reply, lag = call.run(), local.read(repeat(clock), outs)
        else:

            def meanwhile() -> Sequence[tuple[int, int]]:
                nonlocal lag
                lag = local.read(repeat(clock), outs)
                return ()

            reply = call.run(meanwhile)
        if self._seen is not None:
            self._seen.update(reply.versions)
        return None if lag is None else max(lag, reply.lag)

    def flats(self, out: Mapping[str, Array]) -> list[Array] | None:
        """Return the arrays as vectors; None where the general read must check them."""
        flats, is_known = [], True
        wanted = zip(out.values(), self._wanted, self._apart, strict=True)
        for array, (shape, dtype), latest in wanted:
            if not (
                type(array) is np.ndarray
                and array.shape == shape
                and array.dtype == dtype
                and array.flags.carray
            ):
                return None
            flats.append(array.ravel())
            is_known = is_known and latest() is array
        if not is_known:
            if find_overlap(out.items()):
                return None
            self._apart = [weakref.ref(array) for array in out.values()]
        return flats

    def target(self, out: Mapping[str, Array]) -> Target | None:
        """Return this read into `out`; None where the general read must check that."""
        flats, found = self.flats(out), dict(out)
        if flats is None:
            return None
        return Target(self.slices, flats, lambda: found)


class Reads:
    """The prepared reads of one handle, or of one trainer.

    Parameters
    ----------
    meta : StoreMap
        The store.
    carriers : Carriers
        How this process reaches its shards, and the trainer that reads.
    remote : RemoteShards
        The way to those of other processes.
    seen : dict of int to int, optional
        Takes the version that was last read of each shard.
    """

    def __init__(
        self,
        meta: StoreMap,
        carriers: Carriers,
        remote: RemoteShards,
        seen: dict[int, int] | None = None,
    ) -> None:
        self._meta, self._carriers, self._remote, self._seen_at = (
            meta,
            carriers,
            remote,
            seen,
        )
        self._counters = remote.counters
        self._forever = Deadline(None, "a pull")
        self._named: Prepared[tuple[str, ...] | None, NamedRead] = Prepared(meta)
        #: The last read, under the one key: loops read the same again.
        self._latest: Latest | None = None
        most = max(1, len(meta.layout.parameters))
        self._seen: Prepared[str, tuple[Seen | None]] = Prepared(meta, most)
        #: Largest number of clocks that a live trainer was behind one of these reads.
        self.lag = 0

    def clear(self) -> None:
        """Forget all reads, and with them the shards' memory."""
        self._latest = None
        for known in (self._named, self._seen):
            known.clear()

    def read(
        self, names: Any, out: Any, clock: int, deadline: Deadline | None = None
    ) -> dict[str, Array] | None:
        """Repeat a read that is known; None where it is not, or has to wait.

        By sockets it waits as well.
        """
        known = self._named.find(_asked(names, out))
        if known is None or (flats := known.flats(out)) is None:
            return None
        local, route = known.local, known.route
        if local is None:
            return None
        if route is None:
            lag = local.read(repeat(clock), flats)
        elif time.monotonic() > known.until:
            self._named.forget(_asked(names, out))
            return None
        else:
            until = deadline or self._forever
            lag = known.read_remote(local, route, flats, clock=clock, deadline=until)
        if lag is None:
            return None
        self._counters.local_calls += local.n_hosts
        self.lag = max(self.lag, lag)
        return dict(out)

    def target(self, names: Any, out: Any) -> Target | None:
        """Return the target of a known read; None where it is not known."""
        known = self._named.find(_asked(names, out))
        return None if known is None else known.target(out)

    def learn(self, names: Any, out: Mapping[str, Array], target: Target) -> None:
        """Make a read ready for the next time, unless it is."""
        asked, where = _asked(names, out), self._meta.where
        if any(type(array) is not np.ndarray for array in out.values()):
            return  # of a device
        if asked is not None and self._named.find(asked) is None:
            about = self._carriers, self._remote, out, target
            made = NamedRead(*about, seen=self._seen_at)
            if made.is_possible:
                self._named.keep(asked, made, where)

    def fill(self, target: Target, bounds: Iterable[int]) -> bool:
        """Read a target as far as these bounds; return whether that was possible."""
        known, where, rows = self._latest, self._meta.where, _NO_ROWS
        asked = target.slices, target.shards if target.rows else None
        if known is None or known[1] is not where or known[2:] != asked:
            read = PreparedRead.of(self._carriers, *asked, self._seen_at)
            if read is None:
                return False
            self._latest = known = read, where, *asked
        read = known[0]
        if target.rows:
            rows = {shard: target.row_reads(shard) for shard in target.rows}
        lag = read.read(bounds, target.flats, rows)
        if lag is None:
            return False
        self._counters.local_calls += read.n_hosts
        for copies in rows.values():
            for one in copies:
                self._counters.rows_pulled += len(one.ids)
        self.lag = max(self.lag, lag)
        return True

    # -- without a copy ----------------------------------------------------------

    def views(self, names: Iterable[str], clock: int) -> dict[str, Array]:
        """Return read-only views of those parameters of which that is possible.

        They must lie in one shard whose memory this process has, in a BSP run.
        """
        found = {}
        for name in names:
            if (seen := self._find_seen(name)) is None:
                continue
            reader, position, buffers = seen
            side = wait(partial(reader.find_side, position, clock))
            if side >= 0:
                found[name] = buffers[side]
        return found

    def late(self, names: Iterable[str], seen: Container[str]) -> list[str]:
        """Return the names of those that can be seen once their round is complete."""
        return [n for n in names if n not in seen and self._find_seen(n) is not None]

    def _find_seen(self, name: str) -> Seen | None:
        known, where = self._seen.find(name), self._meta.where
        if known is None:
            known = (self._look(name),)
            self._seen.keep(name, known, where)
        return known[0]

    def _look(self, name: str) -> Seen | None:
        meta, parameter = self._meta, self._meta.layout[name]
        pieces = [p for p in meta.layout.pieces_of[parameter.index] if p.size]
        if not self._carriers.bsp or len(pieces) != 1 or meta.device:
            return None
        shard = pieces[0].shard
        source = find_source(self._carriers, shard)
        if source is None:
            return None
        position = meta.layout.positions[shard, parameter.index]
        buffers = source.reader.see(position, parameter.shape)
        return source.reader, position, buffers


def _asked(names: Any, out: Any) -> tuple[str, ...] | None:
    """Return the names of a read whose arrays are all in `out`, in order."""
    if not isinstance(out, dict):
        return None
    given = tuple(out)
    if names is None or given == ((names,) if type(names) is str else names):
        return given
    return None
